"""Plans of lines and micro-batches, and the equality of packed and unpacked log-probs on real models."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from laminar.errors import ConfigError
from laminar.rl.packing import Lengths, Tokens, collate, line_tokens, plan_lines, plan_micro_batches
from laminar.workers.trainer.model import Policy

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8),
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2),
    "gemma3": Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=64, pad_token_id=0),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}


# Soft-capped attention has no sdpa kernel, and eager attention adds masks instead of applying them.
UNPACKABLE = Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, pad_token_id=0)


def make_policy(config: PreTrainedConfig) -> Policy:
    torch.manual_seed(1)
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Policy(model, temperature=0.8, device=torch.device("cpu"))


def make_group(seed: int, num_prompt: int, responses: list[int]) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 40, num_prompt).astype(np.int32)
    return [
        Tokens(prompt, rng.integers(1, 40, n).astype(np.int32), rng.random(n).astype(np.float32), rng.random(n) < 0.8)
        for n in responses
    ]


def logprobs_by_row(policy: Policy, tokens: dict[int, Tokens], groups: list[list[int]], *, pack: bool) -> dict:
    lengths = [Lengths(len(own.prompt), len(own.response)) for _, own in sorted(tokens.items())]
    values: dict[int, torch.Tensor] = {}
    for plan in plan_micro_batches(
        plan_lines(groups, lengths, pack=pack, tokens_max=60), lengths, tokens_max=60 if pack else 33
    ):
        batch = collate(plan, tokens)
        logprobs = policy.frozen_logprobs(batch)
        for row in batch.rows.unique().tolist():
            values[row] = logprobs[batch.rows == row]
            assert batch.targets[batch.rows == row].tolist() == tokens[row].response.tolist()
    return values


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_log_probs_equal_unpacked_ones(name: str) -> None:
    group_a, group_b = make_group(0, 9, [5, 1, 7]), make_group(1, 4, [3, 6])
    tokens = dict(enumerate(group_a + group_b))
    policy = make_policy(CONFIGS[name])
    packed = logprobs_by_row(policy, tokens, [[0, 1, 2], [3, 4]], pack=True)
    unpacked = logprobs_by_row(policy, tokens, [[0, 1, 2], [3, 4]], pack=False)
    assert packed.keys() == unpacked.keys() == tokens.keys()
    for row, values in packed.items():
        torch.testing.assert_close(values, unpacked[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_log_probs_are_those_of_the_whole_sequence_through_the_plain_model(name: str) -> None:
    tokens = dict(enumerate(make_group(3, 6, [4, 9])))
    policy = make_policy(CONFIGS[name])
    values = logprobs_by_row(policy, tokens, [[0, 1]], pack=True)
    policy._select = None  # type: ignore[method-assign, assignment]
    head = policy.model.get_output_embeddings()
    head._forward_pre_hooks.clear()
    for row, own in tokens.items():
        sequence = torch.tensor([[*own.prompt.tolist(), *own.response.tolist()]])
        logits = policy.model(input_ids=sequence).logits[0, len(own.prompt) - 1 : -1]
        expected = torch.log_softmax(logits / 0.8, -1).gather(1, sequence[0, len(own.prompt) :, None])[:, 0]
        torch.testing.assert_close(values[row], expected, atol=1e-5, rtol=0)


def test_packed_gradients_equal_unpacked_ones() -> None:
    tokens = dict(enumerate(make_group(5, 8, [5, 2, 6])))
    lengths = [Lengths(8, 5), Lengths(8, 2), Lengths(8, 6)]
    grads = []
    for pack in (True, False):
        policy = make_policy(CONFIGS["qwen3"])
        batch = collate(tuple(plan_lines([[0, 1, 2]], lengths, pack=pack, tokens_max=60)), tokens)
        (policy.logprobs(batch)[0] * (batch.rows + 1)).sum().backward()
        grads.append([parameter.grad for parameter in policy.model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def test_a_packed_line_holds_its_prompt_once_and_no_last_tokens() -> None:
    lengths = [Lengths(10, 3), Lengths(10, 5)]
    (line,) = plan_lines([[0, 1]], lengths, pack=True, tokens_max=100)
    assert line == (0, 1)
    assert line_tokens(line, lengths) == 10 + 2 + 4
    batch = collate((line,), dict(enumerate(make_group(0, 10, [3, 5]))))
    assert batch.input_ids.shape == (1, 16)
    assert batch.num_inputs == 16
    assert batch.position_ids is not None
    assert batch.position_ids[0].tolist() == [*range(10), 10, 11, 10, 11, 12, 13]
    assert batch.index.tolist() == [9, 10, 11, 9, 12, 13, 14, 15]


@pytest.mark.parametrize(("tokens_max", "positions_max", "second_prompt"), [(15, 0, 10), (100, 14, 10), (100, 0, 9)])
def test_a_group_that_cannot_be_packed_stays_unpacked(tokens_max: int, positions_max: int, second_prompt: int) -> None:
    lengths = [Lengths(10, 3), Lengths(second_prompt, 5)]
    lines = plan_lines([[0, 1]], lengths, pack=True, tokens_max=tokens_max, positions_max=positions_max)
    assert lines == [(0,), (1,)]


def test_a_response_without_tokens_gets_no_line() -> None:
    assert plan_lines([[0, 1], [2]], [Lengths(4, 0), Lengths(4, 2), Lengths(3, 0)], pack=True, tokens_max=99) == [(1,)]


lengths_strategy = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=5)))


@given(lengths_strategy, st.integers(1, 120), st.booleans())
def test_every_response_is_in_one_micro_batch_within_the_budget(
    groups: list[tuple[int, list[int]]], tokens_max: int, pack: bool
) -> None:
    lengths = [Lengths(prompt, response) for prompt, responses in groups for response in responses]
    numbers = iter(range(len(lengths)))
    members = [[next(numbers) for _ in responses] for _, responses in groups]
    batches = plan_micro_batches(
        plan_lines(members, lengths, pack=pack, tokens_max=tokens_max), lengths, tokens_max=tokens_max
    )
    placed = sorted(row for batch in batches for line in batch for row in line)
    assert placed == [row for row, own in enumerate(lengths) if own.num_response]
    for batch in batches:
        widths = [line_tokens(line, lengths) for line in batch]
        assert widths == sorted(widths, reverse=True)
        assert len(batch) == 1 or len(batch) * widths[0] <= tokens_max


def test_an_empty_plan_gives_a_pass_without_weight() -> None:
    batch = collate((), {})
    assert batch.trained.sum() == 0
    logprobs, _ = make_policy(CONFIGS["qwen3"]).logprobs(batch)
    (logprobs * batch.trained).sum().backward()


def test_siblings_with_different_prompts_are_refused() -> None:
    tokens = {0: make_group(0, 5, [2])[0], 1: make_group(1, 5, [2])[0]}
    with pytest.raises(ValueError, match="siblings of one group, but their prompts differ"):
        collate(((0, 1),), tokens)


def test_a_model_that_mixes_packed_siblings_is_refused() -> None:
    remedy = 'trainer.packing = "none"'
    make_policy(CONFIGS["qwen3"]).check_packing(torch.float32, remedy)
    with pytest.raises(ConfigError, match=r'Gemma2ForCausalLM .* set trainer.packing = "none"'):
        make_policy(UNPACKABLE).check_packing(torch.float32, remedy)


# ---- several contexts in one response ----------------------------------------------------------------------


def with_contexts(tokens: Tokens, starts: list[int]) -> Tokens:
    begins = np.zeros(len(tokens.response), bool)
    begins[starts] = True
    return tokens._replace(trained=tokens.trained & ~begins, begins=begins)


def context_logprobs(policy: Policy, tokens: Tokens, starts: list[int]) -> torch.Tensor:
    """Each context alone through the policy; 0 where a context begins, which nothing predicts."""
    cuts = [0, *starts, len(tokens.response)]
    parts, prompt = [], tokens.prompt
    for first, last in itertools.pairwise(cuts):
        response = tokens.response[first:last]
        if first:
            prompt, response = response[:1], response[1:]
            parts.append(torch.zeros(1))
        own = Tokens(prompt, response, np.zeros(len(response), np.float32), np.ones(len(response), bool))
        if len(response):
            parts.append(policy.frozen_logprobs(collate(((0,),), {0: own})))
    return torch.cat(parts)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("starts", [[3], [1, 4], [5, 6], [8], [2, 8]])
def test_log_probs_of_further_contexts_are_those_of_each_alone(name: str, starts: list[int]) -> None:
    policy = make_policy(CONFIGS[name])
    plain, other, last = make_group(3, 5, [4, 9, 6])
    tokens = {0: plain, 1: with_contexts(other, starts), 2: last}
    for plan in (((0, 1, 2),), ((1,), (0,), (2,)), ((0, 1), (2,))):
        batch = collate(plan, tokens)
        logprobs = policy.frozen_logprobs(batch)
        expected = {1: context_logprobs(policy, tokens[1], starts)}
        expected |= {row: context_logprobs(policy, tokens[row], []) for row in (0, 2)}
        for row, values in expected.items():
            got = logprobs[batch.rows == row].clone()
            if row == 1:
                got[starts] = 0.0
            torch.testing.assert_close(got, values, atol=1e-5, rtol=0)


def test_tokens_of_the_environment_have_no_part_in_the_gradient() -> None:
    policy = make_policy(CONFIGS["qwen3"])
    own = with_contexts(make_group(3, 5, [9])[0], [4])
    gradients = []
    for weight in (1.0, 1e6):
        policy.model.zero_grad()
        batch = collate(((0,),), {0: own})
        logprobs, _ = policy.logprobs(batch)
        weights = torch.where(batch.trained > 0, 1.0, weight)
        (logprobs * weights * batch.trained).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
    assert torch.equal(gradients[0], gradients[1])
    assert gradients[0].abs().sum() > 0
    assert batch.trained.tolist() == own.trained.astype(np.float32).tolist()
