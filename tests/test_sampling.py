"""The sampler: distribution, truncation, reproducibility, log-probs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.engines.base import SamplingParams
from laminar.workers.engines.sampling import SamplingRows, check_sampling, mix64, sample, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


def draw_many(num, logits=LOGITS, **params):
    """`num` independent draws from one distribution, as one batch of rows with different seeds."""
    rows = SamplingRows(num)
    for row in range(num):
        rows.set(row, SamplingParams(max_tokens=1, seed=row, **params), 0)
    tokens, logprobs = rows.sample(logits.expand(num, -1), 0)
    return np.array(tokens), np.array(logprobs)


def frequencies(tokens, vocab_size=5):
    return np.bincount(tokens, minlength=vocab_size) / len(tokens)


def test_draws_follow_the_softmax_at_the_given_temperature():
    for temperature in (0.5, 1.0, 2.0):
        tokens, _ = draw_many(40_000, temperature=temperature)
        expected = (LOGITS / temperature).softmax(-1).numpy()
        # Five standard deviations of a frequency over 40,000 draws are at most 0.0125.
        assert np.abs(frequencies(tokens) - expected).max() < 0.0125


def test_draws_along_one_request_follow_the_softmax_too():
    rows = SamplingRows(1)
    rows.set(0, SamplingParams(max_tokens=1, seed=7), 0)
    tokens = [rows.sample(LOGITS[None], 0)[0][0] for _ in range(4_000)]
    assert np.abs(frequencies(np.array(tokens)) - LOGITS.softmax(-1).numpy()).max() < 0.04


def test_logprob_is_after_temperature_and_before_truncation():
    tokens, logprobs = draw_many(200, temperature=0.7, top_k=2, top_p=0.9)
    expected = (LOGITS / 0.7).log_softmax(-1).numpy()[tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_temperature_zero_takes_the_most_likely_token_with_the_logprob_of_temperature_one():
    tokens, logprobs = draw_many(3, temperature=0.0, top_p=0.5)
    assert tokens.tolist() == [0, 0, 0]
    np.testing.assert_allclose(logprobs, LOGITS.log_softmax(-1)[0].item(), atol=1e-6)


def test_top_k_keeps_the_k_most_likely_with_their_ratios():
    tokens, _ = draw_many(40_000, top_k=2)
    expected = LOGITS[:2].softmax(-1).numpy()
    assert np.abs(frequencies(tokens)[:2] - expected).max() < 0.0125
    assert set(tokens) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probs = torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05])
    for top_p, kept in ((0.3, {1}), (0.41, {1, 2}), (0.69, {1, 2}), (0.71, {1, 2, 3}), (0.97, {0, 1, 2, 3, 4})):
        tokens, _ = draw_many(4_000, logits=probs.log(), top_p=top_p)
        assert set(tokens) == kept, top_p


def test_top_p_applies_to_what_top_k_left():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # Renormalised over two tokens the first has 4/7 = 0.571, so 0.55 is reached by it alone; over four it is not.
    tokens, _ = draw_many(2_000, logits=probs.log(), top_k=2, top_p=0.55)
    assert set(tokens) == {0}


def test_tokens_masked_by_the_model_are_never_drawn():
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])
    tokens, logprobs = draw_many(2_000, logits=logits)
    assert set(tokens) == {1, 3}
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def test_the_largest_uniform_number_draws_the_last_token_with_probability():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    one, none = np.ones(1), np.zeros(1, np.int64)
    tokens, _ = sample(logits, np.ones(1, np.float32), one, none, np.array([1 - 2.0**-53]))
    assert tokens.tolist() == [1]


def test_logits_that_are_not_numbers_give_a_logprob_that_is_not_finite():
    for temperature in (0.0, 1.0):
        for top_k in (0, 2):
            tokens, logprobs = draw_many(1, logits=torch.full((5,), float("nan")), temperature=temperature, top_k=top_k)
            assert 0 <= tokens[0] < 5
            assert not np.isfinite(logprobs[0])


def test_a_row_draws_the_same_whatever_shares_its_batch():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    params = [
        SamplingParams(max_tokens=1, seed=seed, temperature=temperature, top_p=top_p, top_k=top_k)
        for seed, (temperature, top_p, top_k) in enumerate(
            [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 5), (0.5, 0.9, 3), (1.0, 1.0, 0)]
        )
    ]
    together = SamplingRows(6)
    for row, sampling in enumerate(params):
        together.set(row, sampling, 3)
    tokens, logprobs = together.sample(logits, 0)
    for row, sampling in enumerate(params):
        alone = SamplingRows(1)
        alone.set(0, sampling, 3)
        alone_tokens, alone_logprobs = alone.sample(logits[row : row + 1], 0)
        assert alone_tokens == tokens[row : row + 1]
        assert alone_logprobs == pytest.approx(logprobs[row : row + 1], abs=1e-6)


def test_noise_goes_on_from_the_position_where_a_prefix_ends():
    torch.manual_seed(0)
    logits = torch.randn(10, 1, 50)
    whole, rest = SamplingRows(1), SamplingRows(1)
    whole.set(0, SamplingParams(max_tokens=10, seed=-5), 0)
    tokens = [whole.sample(step, 0)[0][0] for step in logits]
    rest.set(0, SamplingParams(max_tokens=10, seed=-5), 4)
    assert [rest.sample(step, 0)[0][0] for step in logits[4:]] == tokens[4:]


def test_moving_a_row_moves_its_noise_and_parameters():
    torch.manual_seed(0)
    logits = torch.randn(1, 50)
    rows, reference = SamplingRows(3), SamplingRows(1)
    for row in range(3):
        rows.set(row, SamplingParams(max_tokens=9, seed=row, temperature=1.0 + row, top_k=10 * row), row)
    reference.set(0, SamplingParams(max_tokens=9, seed=2, temperature=3.0, top_k=20), 2)
    rows.move(2, 0)
    for _ in range(5):
        tokens, logprobs = rows.sample(logits.expand(2, -1), 0)
        assert (tokens[:1], logprobs[:1]) == reference.sample(logits, 0)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31))
def test_uniform_numbers_are_below_one_and_depend_on_both_inputs(seed, position):
    stream = mix64(np.array([seed & (2**64 - 1)] * 2, np.uint64))
    first, second = uniforms(stream, np.array([position, position + 1], np.uint64))
    assert 0 <= first < 1
    assert 0 <= second < 1
    assert first != second


def test_uniform_numbers_match_the_published_splitmix64():
    # First outputs of the reference implementation from state 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    numbers = uniforms(np.full(3, 1234567, np.uint64), np.arange(3, dtype=np.uint64))
    assert numbers.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


def test_streams_of_neighbouring_seeds_are_uncorrelated():
    streams = mix64(np.arange(2_000, dtype=np.uint64))
    numbers = uniforms(streams, np.zeros(2_000, np.uint64))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.1
    assert abs(numbers.mean() - 0.5) < 0.035


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(params, name):
    with pytest.raises(ValueError, match=name):
        check_sampling(SamplingParams(**{"max_tokens": 1, **params}))
