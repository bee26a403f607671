"""AdamW over this rank's rows of the float32 master weights.

It works on plain local tensors, not DTensors: the update is element-wise, and dispatching through DTensor costs more than
the arithmetic for small models.

Invariant: an update is applied on all ranks or on none; one whose loss or gradient norm is not finite is skipped and counted,
and leaves weights and moments as they were.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from laminar.config import TrainerConfig
from laminar.workers.trainer.collective import sum_over_ranks
from laminar.workers.trainer.model import LocalParameter


class Update(NamedTuple):
    """What one optimizer update did."""

    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    applied: bool


class Optimizer:
    """AdamW (arXiv:1711.05101) with gradient clipping by global norm and linear warm-up; no decay on 1-D parameters."""

    def __init__(self, parameters: list[LocalParameter], config: TrainerConfig) -> None:
        self.num_updates = 0
        """Updates applied so far; the warm-up counts these."""
        self.num_skipped = 0
        self.trained = [part for part in parameters if part.parameter.requires_grad]
        self._config = config
        self._adamw = _make_adamw(self.trained, config)
        self._device = parameters[0].local.device

    def moments(self, part: LocalParameter) -> tuple[Tensor, Tensor]:
        """(first, second) moment of this rank's rows, float32, shaped like `part.local`."""
        state = self._adamw.state[part.local]
        return state["exp_avg"], state["exp_avg_sq"]

    def restore_counts(self, num_updates: int, num_skipped: int) -> None:
        """After the moments were loaded in place."""
        self.num_updates, self.num_skipped = num_updates, num_skipped
        for state in self._adamw.state.values():
            state["step"].fill_(num_updates)

    def learning_rate(self) -> float:
        """Of the next update."""
        warmup = self._config.warmup_updates
        return self._config.lr * (min(1.0, (self.num_updates + 1) / warmup) if warmup else 1.0)

    @torch.no_grad()
    def update(self, loss: float) -> Update:
        """One update from the parameters' gradients, which are dropped. `loss` is this rank's part: not finite = skip."""
        gradients = self._take_gradients()
        norm = self._global_norm(list(gradients.values()), loss)
        lr = self.learning_rate()
        if not math.isfinite(norm):
            self.num_skipped += 1
            return Update(norm, lr, False)
        limit = self._config.grad_clip
        if limit and norm > limit and gradients:
            torch._foreach_mul_(list(gradients.values()), limit / (norm + 1e-6))
        self._apply(gradients, lr)
        self.num_updates += 1
        return Update(norm, lr, True)

    def _take_gradients(self) -> dict[int, Tensor]:
        """Local gradients by position in `trained`; a parameter that took no part, or has no rows here, has none."""
        gradients: dict[int, Tensor] = {}
        for position, part in enumerate(self.trained):
            grad, part.parameter.grad = part.parameter.grad, None
            if grad is not None and part.local.numel():
                gradients[position] = grad.to_local() if isinstance(grad, DTensor) else grad
        return gradients

    def _global_norm(self, gradients: list[Tensor], loss: float) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            total += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        if not math.isfinite(loss):
            total.fill_(math.nan)
        return math.sqrt(value) if (value := float(sum_over_ranks(total))) < math.inf else value

    def _apply(self, gradients: dict[int, Tensor], lr: float) -> None:
        for position, grad in gradients.items():
            self.trained[position].local.grad = grad
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


def _make_adamw(trained: list[LocalParameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW whose state exists from the start, so that a checkpoint has one shape before and after the first update."""
    decayed = [part.local for part in trained if part.parameter.ndim > 1]
    plain = [part.local for part in trained if part.parameter.ndim <= 1]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if params
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    for part in trained:
        adamw.state[part.local] = {
            "step": torch.zeros((), dtype=torch.float32, device=part.local.device),
            "exp_avg": torch.zeros_like(part.local),
            "exp_avg_sq": torch.zeros_like(part.local),
        }
    return adamw
