"""One global batch: fetch, prepare, and one optimizer update per mini-batch.

Loss of a mini-batch: the sum over its trained tokens of weight x clipped surrogate. The weights of a mini-batch sum to 1 over
all ranks (token-mean: 1 / tokens; sequence-mean: 1 / (tokens of the sequence x sequences)), so accumulation over micro-batches and
ranks changes nothing. FSDP averages gradients over ranks, hence the factor `world_size`.

The old log-probs ("recompute") are those of the weights at the start of the step. With one mini-batch all its forward passes
happen at those weights, so their own detached values are used and the preparation pass is skipped.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from laminar import wire
from laminar.config import Config
from laminar.errors import LaminarError
from laminar.ids import Version
from laminar.rl.advantages import group_advantages
from laminar.rl.losses import clipped_policy_loss
from laminar.rl.packing import MicroBatch, MicroBatchPlan, Tokens, collate
from laminar.workers.trainer.batch import (
    BatchError,
    Fetch,
    MiniBatchPlan,
    check_window,
    fetch_tokens,
    plan_step,
    rows_of,
)
from laminar.workers.trainer.collective import first_failure, sum_over_ranks
from laminar.workers.trainer.metrics import TokenMetrics, batch_metrics
from laminar.workers.trainer.model import Policy
from laminar.workers.trainer.optimizer import Optimizer, Update


class Share(NamedTuple):
    """What this rank knows of the batch it helps to train."""

    mini_batches: list[tuple[MicroBatchPlan, ...]]
    tokens: dict[int, Tokens]
    advantages: Tensor
    """float32 (rows,)"""
    weights: Tensor
    """float32 (rows,): weight of each trained token of a row"""
    same_version: Tensor
    """float32 (rows,): 1 = sampled from the weights that this step starts from"""

    def micro_batch(self, plan: MicroBatchPlan) -> MicroBatch:
        """Its tensors; made anew each time, because attention masks of a whole batch would fill the memory."""
        return collate(plan, self.tokens).to(self.advantages.device)


class StepRunner:
    """Applies steps to one policy; every rank calls `run` with the same rows."""

    def __init__(
        self, config: Config, policy: Policy, optimizer: Optimizer, *, rank: int, world_size: int, device: torch.device
    ) -> None:
        self._config = config
        self._policy = policy
        self._optimizer = optimizer
        self._rank, self._world_size, self._device = rank, world_size, device

    def run(self, rows: Sequence[wire.BatchRow], fetch: Fetch, version: Version | None) -> dict[str, float]:
        """All updates of one batch; the step's metrics, the same on every rank but for the timings.

        `version`: of the weights right now, if they have one. Raises BatchError, on all ranks, when one got no tokens that fit its
        rows; RuntimeError of torch.
        """
        if not rows:
            raise LaminarError("a step without rows: the controller sent an empty batch")
        started = time.perf_counter()
        window = self._policy.attention_window()
        plans = plan_step(rows, self._config.trainer, world_size=self._world_size, positions_max=window)
        tokens = self._fetch(rows, plans, fetch, window)
        fetched = time.perf_counter()
        advantages = group_advantages(
            [row.reward for row in rows],
            [row.group for row in rows],
            divide_by_std=self._config.algorithm.advantage_std,
        )
        share = self._share(rows, plans, tokens, advantages, version)
        metrics = TokenMetrics(self._device)
        metrics.add_environment(sum(int((~own.trained).sum()) for own in tokens.values()))
        old = self._prepare(share, metrics) if self._needs_preparation(plans) else None
        prepared = time.perf_counter()
        updates = [self._update(share, number, old, metrics) for number in range(len(plans))]
        result = batch_metrics(rows, advantages) | metrics.reduce() | self._update_metrics(updates)
        result["actor/pg_loss"] /= len(plans)
        ended = time.perf_counter()
        return result | {
            "timing/fetch_s": fetched - started,
            "timing/prepare_s": prepared - fetched,
            "timing/update_s": ended - prepared,
            "timing/step_s": ended - started,
        }

    def _fetch(
        self, rows: Sequence[wire.BatchRow], plans: list[MiniBatchPlan], fetch: Fetch, window: int
    ) -> dict[int, Tokens]:
        """Ranks agree before they go on, so that all of them name the cause and not the peer that went away."""
        tokens: dict[int, Tokens] = {}
        cause: Exception | None = None
        try:
            tokens = fetch_tokens(rows, rows_of(plans, self._rank), fetch)
            check_window(rows, tokens, window)
        except (LaminarError, OSError) as error:
            cause = error
        reason = None if cause is None else f"{type(cause).__name__}: {cause}"
        if failure := first_failure(reason):
            raise BatchError(f"a rank got no tokens ({failure})") from cause
        return tokens

    def _needs_preparation(self, plans: list[MiniBatchPlan]) -> bool:
        return len(plans) > 1 and self._config.algorithm.old_logprobs == "recompute"

    def _share(
        self,
        rows: Sequence[wire.BatchRow],
        plans: list[MiniBatchPlan],
        tokens: dict[int, Tokens],
        advantages: list[float],
        version: Version | None,
    ) -> Share:
        same = [float(version is not None and row.behavior_version == version) for row in rows]
        return Share(
            mini_batches=[plan.ranks[self._rank] for plan in plans],
            tokens=tokens,
            advantages=torch.tensor(advantages, dtype=torch.float32, device=self._device),
            weights=self._token_weights(len(rows), plans, tokens).to(self._device),
            same_version=torch.tensor(same, dtype=torch.float32, device=self._device),
        )

    def _token_weights(self, num_rows: int, plans: list[MiniBatchPlan], tokens: dict[int, Tokens]) -> Tensor:
        """float32 (rows,), from the trained tokens and sequences of each mini-batch on all ranks."""
        trained = np.zeros(num_rows)
        for row, own in tokens.items():
            trained[row] = own.trained.sum()
        own_rows = [rows_of([plan], self._rank) for plan in plans]
        counts = torch.tensor([[trained[part].sum(), (trained[part] > 0).sum()] for part in own_rows])
        totals = sum_over_ranks(counts.to(self._device)).tolist()
        weights = np.zeros(num_rows)
        by_token = self._config.algorithm.loss_aggregation == "token-mean"
        for part, (num_tokens, num_sequences) in zip(own_rows, totals, strict=True):
            denominator = num_tokens if by_token else num_sequences * trained[part]
            weights[part] = 1.0 / np.maximum(denominator, 1.0)
        return torch.from_numpy(weights).float()

    def _prepare(self, share: Share, metrics: TokenMetrics) -> list[list[Tensor]]:
        """Log-probs of the whole batch at the weights that the step starts from, per mini- and micro-batch."""
        old = []
        for plans in share.mini_batches:
            old.append([])
            for plan in plans:
                batch = share.micro_batch(plan)
                logprobs = self._policy.frozen_logprobs(batch)
                old[-1].append(logprobs)
                self._compare_behavior(share, batch, logprobs, metrics, at_start=True)
        self._policy.drop_gathered()
        return old

    def _update(self, share: Share, number: int, old: list[list[Tensor]] | None, metrics: TokenMetrics) -> Update:
        plans = share.mini_batches[number]
        total = torch.zeros((), device=self._device)
        for at, plan in enumerate(plans):
            batch = share.micro_batch(plan)
            self._policy.reduce_gradients(at == len(plans) - 1)
            logprobs, entropy = self._policy.logprobs(batch)
            frozen = logprobs.detach()
            reference = self._reference(batch, frozen, old[number][at] if old else None)
            algorithm = self._config.algorithm
            parts = clipped_policy_loss(
                logprobs, reference, share.advantages[batch.rows], algorithm.clip_low, algorithm.clip_high
            )
            loss = (parts.loss * share.weights[batch.rows] * batch.trained).sum()
            (loss * self._world_size).backward()
            total += loss.detach()
            metrics.add_work(batch.input_ids.numel(), batch.num_inputs)
            metrics.add_policy(
                mask=batch.trained,
                entropy=entropy,
                loss=loss.detach(),
                clipped=parts.clipped,
                logprobs=frozen,
                old_logprobs=reference,
            )
            if old is None:
                self._compare_behavior(share, batch, frozen, metrics, at_start=number == 0)
        return self._optimizer.update(float(total))

    def _reference(self, batch: MicroBatch, frozen: Tensor, old: Tensor | None) -> Tensor:
        """Denominator of the importance ratio."""
        if self._config.algorithm.old_logprobs == "behavior":
            return batch.logprobs
        return frozen if old is None else old

    def _compare_behavior(
        self, share: Share, batch: MicroBatch, logprobs: Tensor, metrics: TokenMetrics, *, at_start: bool
    ) -> None:
        """`at_start`: `logprobs` are those of the weights that the step started from."""
        same = share.same_version[batch.rows] if at_start else torch.zeros_like(batch.trained)
        metrics.add_behavior(mask=batch.trained, logprobs=logprobs, behavior=batch.logprobs, same_version=same)

    def _update_metrics(self, updates: list[Update]) -> dict[str, float]:
        applied = [update.grad_norm for update in updates if update.applied]
        return {
            "actor/grad_norm": sum(applied) / len(applied) if applied else updates[-1].grad_norm,
            "actor/lr": updates[-1].lr,
            "optim/updates": float(self._optimizer.num_updates),
            "optim/skipped_updates": float(self._optimizer.num_skipped),
        }
