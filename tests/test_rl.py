"""Advantages and losses against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.rl import losses
from laminar.rl.advantages import group_advantages
from laminar.rl.losses import clipped_policy_loss, importance_ratio, kl_k3, token_logprobs


def test_advantages_are_standardised_within_each_group() -> None:
    values = group_advantages([1.0, 0.0, 0.0, 0.0, 5.0, 7.0], [9, 9, 9, 9, 4, 4])
    std = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    assert values == pytest.approx([0.75 / std] + [-0.25 / std] * 3 + [-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5)


def test_without_std_an_advantage_is_the_distance_from_the_group_mean() -> None:
    assert group_advantages([1.0, 0.0, 4.0, 0.0], [1, 2, 1, 2], divide_by_std=False) == [-1.5, 0.0, 1.5, 0.0]


@given(st.floats(-1e6, 1e6), st.integers(1, 12))
def test_a_group_of_equal_rewards_has_exactly_zero_advantage(reward: float, size: int) -> None:
    assert group_advantages([reward] * size, [0] * size) == [0.0] * size


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100)), min_size=1, max_size=30))
def test_advantages_sum_to_zero_in_every_group(rows: list[tuple[int, float]]) -> None:
    groups = [group for group, _ in rows]
    values = group_advantages([reward for _, reward in rows], groups)
    for group in set(groups):
        assert abs(math.fsum(v for v, g in zip(values, groups, strict=True) if g == group)) < 1e-6


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match=r"reward nan of row 1 \(group 7\)"):
        group_advantages([0.0, math.nan], [7, 7])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1 << 25, 40])
def test_token_logprobs_and_their_gradient_equal_log_softmax(
    temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = (4 * torch.randn(7, 13)).requires_grad_()
    targets = torch.randint(13, (7,))
    weights = torch.randn(7)
    expected = torch.log_softmax(logits / temperature, -1)
    (weights * expected.gather(1, targets[:, None])[:, 0]).sum().backward()
    grad, logits.grad = logits.grad, None
    logprobs, entropy = token_logprobs(logits, targets, temperature)
    (weights * logprobs).sum().backward()
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    torch.testing.assert_close(logits.grad, grad)
    assert not entropy.requires_grad


def test_token_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 300).bfloat16()
    targets = torch.randint(300, (5,))
    expected = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(token_logprobs(logits, targets, 1.0)[0], expected)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "clipped"),
    [
        (1.0, 1.1, -1.1, False),
        (1.0, 1.5, -1.28, True),
        (1.0, 0.5, -0.5, False),
        (-1.0, 1.5, 1.5, False),
        (-1.0, 0.5, 0.8, True),
        (-1.0, 0.9, 0.9, False),
    ],
)
def test_the_surrogate_clips_only_what_would_go_too_far(
    advantage: float, ratio: float, loss: float, clipped: bool
) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    parts = clipped_policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)
    assert parts.loss.item() == pytest.approx(loss)
    assert parts.clipped.item() is clipped
    parts.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -advantage * ratio)


def test_at_ratio_one_the_gradient_is_that_of_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    parts = clipped_policy_loss(logprobs, logprobs.detach(), torch.tensor([0.5, -3.0]), 0.2, 0.28)
    parts.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 3.0]
    assert not parts.clipped.any()


def test_an_absurd_log_ratio_stays_finite() -> None:
    ratio = importance_ratio(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]))
    assert torch.isfinite(ratio).all()
    assert (ratio > 0).all()


def test_k3_is_never_negative_and_estimates_the_kl_divergence() -> None:
    torch.manual_seed(0)
    reference, policy = torch.log_softmax(torch.randn(2, 6), -1)
    exact = (reference.exp() * (reference - policy)).sum()
    sampled = torch.multinomial(reference.exp(), 200_000, replacement=True)
    values = kl_k3(policy[sampled], reference[sampled])
    assert (values >= 0).all()
    assert values.mean().item() == pytest.approx(exact.item(), rel=0.05)
