"""The canary tells weights that arrived from weights that did not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.canary import NUM_TOKENS, TOLERANCES, Canary, CanaryError, Sighting, canary_tokens, judge


def sighting(reference: float, observed: float, num: int = 4) -> Sighting:
    return Sighting(Canary(list(range(num + 1)), [reference] * num), [observed] * num)


def test_an_engine_that_agrees_with_the_trainer_passes():
    judge(sighting(-2.0, -2.005), None, 0.01)
    judge(sighting(-2.0, -2.005), sighting(-1.0, -1.005), 0.01)


@pytest.mark.parametrize("observed", [-2.02, math.nan, -math.inf])
def test_an_engine_that_computes_something_else_is_caught(observed: float):
    with pytest.raises(CanaryError, match=r"from the trainer's \(allowed: 0\.01\)"):
        judge(sighting(-2.0, observed), None, 0.01)


def test_weights_that_never_arrived_are_caught_within_the_tolerance():
    before, now = sighting(-2.0, -2.004), sighting(-2.002, -2.004)
    with pytest.raises(CanaryError, match="the new weights never reached the engine"):
        judge(now, before, 0.3)


def test_an_engine_that_stands_still_passes_while_the_trainer_stands_still_too():
    judge(sighting(-2.0, -2.004), sighting(-2.0, -2.004), 0.3)
    judge(sighting(-2.00001, -2.004), sighting(-2.0, -2.004), 0.3)


def test_another_sequence_of_tokens_is_not_compared_with_the_last():
    before = Sighting(Canary([9, 9, 9, 9, 9], [-1.0] * 4), [-2.004] * 4)
    judge(sighting(-2.0, -2.004), before, 0.3)


@given(st.integers(1, 300_000))
def test_the_tokens_lie_in_the_vocabulary_and_scatter_over_it(vocab_size: int):
    tokens = canary_tokens(vocab_size)
    assert len(tokens) == NUM_TOKENS
    assert all(0 <= token < vocab_size for token in tokens)
    assert len(set(tokens)) >= min(vocab_size, NUM_TOKENS) // 2


def test_every_published_dtype_has_a_tolerance():
    assert {"float32", "bfloat16"} <= TOLERANCES.keys()
