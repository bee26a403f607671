"""The numbers of one step, summed over micro-batches and ranks.

Means are over trained response tokens of the whole batch unless a name says otherwise. docs/metrics.md lists them for users.
"""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from laminar import wire
from laminar.rl.losses import importance_ratio, kl_k3
from laminar.workers.trainer.collective import max_over_ranks, sum_over_ranks

_SUMS = (
    "tokens",
    "environment",
    "positions",
    "inputs",
    "entropy",
    "pg_loss",
    "clipped",
    "ppo_kl",
    "ratio",
    "same_version_tokens",
    "mismatch_k3",
    "mismatch_abs",
)
_MAXIMA = ("ratio", "mismatch_k3", "mismatch_abs")


class TokenMetrics:
    """Sums and maxima over the tokens that this rank trained; `reduce` combines all ranks. Tensors stay on the device."""

    def __init__(self, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in _SUMS}
        self._maxima = {name: torch.zeros((), dtype=torch.float64, device=device) for name in _MAXIMA}

    def add_work(self, num_positions: int, num_inputs: int) -> None:
        """One micro-batch of `num_positions` input positions, of which `num_inputs` are not padding."""
        self._sums["positions"] += num_positions
        self._sums["inputs"] += num_inputs

    def add_environment(self, num_tokens: int) -> None:
        """Response tokens of this rank that are not trained, because the environment wrote them."""
        self._sums["environment"] += num_tokens

    def add_policy(
        self, *, mask: Tensor, entropy: Tensor, loss: Tensor, clipped: Tensor, logprobs: Tensor, old_logprobs: Tensor
    ) -> None:
        """Per token (N,) of an update: `mask` 1 = trained; `loss` a scalar, already weighted."""
        self._sums["tokens"] += mask.sum()
        self._sums["entropy"] += (mask * entropy).sum()
        self._sums["pg_loss"] += loss
        self._sums["clipped"] += (mask * clipped).sum()
        self._sums["ppo_kl"] += (mask * (old_logprobs - logprobs)).sum()

    def add_behavior(self, *, mask: Tensor, logprobs: Tensor, behavior: Tensor, same_version: Tensor) -> None:
        """The trainer's log-probs against the rollout's; `same_version` 1 = both are of the same weights."""
        ratio = importance_ratio(logprobs, behavior) * mask
        same = mask * same_version
        k3 = kl_k3(logprobs, behavior) * same
        difference = (logprobs - behavior).abs() * same
        self._sums["ratio"] += ratio.sum()
        self._sums["same_version_tokens"] += same.sum()
        for name, values in (("ratio", ratio), ("mismatch_k3", k3), ("mismatch_abs", difference)):
            self._maxima[name] = torch.maximum(self._maxima[name], values.max())
        self._sums["mismatch_k3"] += k3.sum()
        self._sums["mismatch_abs"] += difference.sum()

    def reduce(self) -> dict[str, float]:
        """All ranks' metrics, on every rank. The `mismatch` ones only if some tokens come from the weights being trained."""
        sums = dict(zip(_SUMS, sum_over_ranks(torch.stack(list(self._sums.values()))).tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, max_over_ranks(torch.stack(list(self._maxima.values()))).tolist(), strict=True))
        tokens = max(1.0, sums["tokens"])
        metrics = {
            "actor/entropy": sums["entropy"] / tokens,
            "actor/pg_loss": sums["pg_loss"],
            "actor/pg_clipfrac": sums["clipped"] / tokens,
            "actor/ppo_kl": sums["ppo_kl"] / tokens,
            "importance_ratio/mean": sums["ratio"] / tokens,
            "importance_ratio/max": maxima["ratio"],
            "num_tokens/trained": sums["tokens"],
            "num_tokens/environment": sums["environment"],
            "num_tokens/computed": sums["positions"],
            "num_tokens/padded": sums["positions"] - sums["inputs"],
        }
        if same := sums["same_version_tokens"]:
            metrics["mismatch_kl/mean"] = sums["mismatch_k3"] / same
            metrics["mismatch_kl/max"] = maxima["mismatch_k3"]
            metrics["mismatch/logprob_abs_diff_mean"] = sums["mismatch_abs"] / same
            metrics["mismatch/logprob_abs_diff_max"] = maxima["mismatch_abs"]
        return metrics


def batch_metrics(rows: Sequence[wire.BatchRow], advantages: Sequence[float]) -> dict[str, float]:
    """What the rows alone say. `advantage/zero_fraction` is the share of groups without any learning signal."""
    rewards = [row.reward for row in rows]
    signal: dict[int, bool] = {}
    for row, advantage in zip(rows, advantages, strict=True):
        signal[row.group] = signal.get(row.group, False) or advantage != 0.0
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "response_length/mean": statistics.fmean(row.num_tokens for row in rows),
        "advantage/zero_fraction": 1.0 - sum(signal.values()) / len(signal),
    }
