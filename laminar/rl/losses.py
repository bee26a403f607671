"""Token log-probs, the clipped policy-gradient loss, and divergence estimators.

Tensors are flat over response tokens: shape (N,), float32, unless a docstring says otherwise. A log-prob is that of the
distribution after temperature and before truncation: log_softmax(logits / temperature).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = (
    1 << 25
)  # float32 work space per chunk of rows: 128 MiB; a whole (tokens, vocabulary) copy would be GBs
LOG_RATIO_MAX = 20.0  # exp(20) is 5e8: far beyond any clip, and still finite


class _TokenLogprobs(torch.autograd.Function):
    """Fused log-softmax, gather and entropy that keeps only the logits for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _row_chunks(logits):
            scaled = _scaled(logits[part], temperature)
            normalizer[part] = scaled.logsumexp(-1)
            logprobs[part] = scaled.gather(1, targets[part, None])[:, 0] - normalizer[part]
            probs = (scaled - normalizer[part, None]).exp_()
            entropy[part] = normalizer[part] - probs.mul_(scaled).sum(-1)
        ctx.save_for_backward(logits, targets, normalizer)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalizer = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in _row_chunks(logits):
            probs = (_scaled(logits[part], ctx.temperature) - normalizer[part, None]).exp_()
            scale = grad_logprobs[part, None] / ctx.temperature
            grad[part] = probs.mul_(-scale).scatter_add_(1, targets[part, None], scale)
        return grad, None, None


def _row_chunks(logits: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probs (N,) of the targets, entropies (N,) in nats without gradient), both float32.

    `logits_NV`: (N, vocabulary), any float dtype; `targets_N`: int64. `temperature` > 0 divides the logits.
    """
    return _TokenLogprobs.apply(logits_NV, targets_N, temperature)


class PolicyLoss(NamedTuple):
    """What `clipped_policy_loss` returns, per token, shape (N,)."""

    loss: Tensor
    clipped: Tensor
    """bool: the clipped term is the larger one, so the token has no gradient."""


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Per token: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - old_logprobs).

    PPO (arXiv:1707.06347, eq. 7) with asymmetric clips (Clip-Higher, DAPO, arXiv:2503.14476, eq. 10). Gradient through `logprobs`.
    """
    ratio = importance_ratio(logprobs, old_logprobs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(torch.maximum(plain, clipped), clipped > plain)


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), the exponent limited to ±20."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per token estimate of KL(reference || policy) from tokens that the *reference* sampled: exp(d) - 1 - d with
    d = logprobs - reference_logprobs, never negative, unbiased (k3 of J. Schulman, "Approximating KL divergence", 2020)."""
    difference = (logprobs - reference_logprobs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return difference.expm1() - difference
