"""Sampling of next tokens for all rows of a batch at once.

Each row's randomness is a function of its own (seed, response position) and of nothing else, so a request samples the
same tokens whatever shares its batch, and goes on identically from a prefix. One uniform number per token drives an
inverse-CDF draw over the vocabulary in id order.

Invariants:
* The reported log-prob is that of the distribution after temperature and before truncation; at temperature 0 that of
  temperature 1.
* A token of probability zero (truncated, or masked by the model with -inf) is never drawn.
* A row whose logits are not finite numbers gets a log-prob that is not finite: the caller checks.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from laminar.workers.engines.base import SamplingParams

TEMPERATURE_MIN = 1e-5  # below it logits / temperature leaves float32's exact range; greedy is what is meant

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ValueError naming the first parameter that is out of range."""
    temperature, top_p = sampling.temperature, sampling.top_p
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens}; at least one token has to be generated")
    if not (temperature == 0 or TEMPERATURE_MIN <= temperature < float("inf")):
        raise ValueError(
            f"temperature is {temperature}; use 0 for greedy, or a finite number from {TEMPERATURE_MIN} up"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must lie in (0, 1], 1 = off")
    if sampling.top_k < 0:
        raise ValueError(f"top_k is {sampling.top_k}; it must be 0 (off) or positive")


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), a bijection that scrambles all 64 bits. Any shape."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Counter-based uniform numbers in [0, 1) with 53 bits: output `position` of the splitmix64 that starts at `stream`.

    Both inputs and the result have shape [n]. Streams are scrambled seeds (`mix64`), else seeds that differ by a
    multiple of splitmix's increment would give shifted copies of one sequence.
    """
    bits = mix64(streams + (positions + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor,
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    uniform: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token per row: logits [n, V] of any float dtype, the rest [n]; returns tokens [n] and log-probs [n].

    Top-k is applied first and top-p to what it leaves, renormalised, as vLLM and transformers do.
    """
    greedy = temperature == 0
    logits = logits.float()
    divisor = np.where(greedy, np.float32(1), temperature)
    if (divisor != 1).any():
        logits = logits / torch.from_numpy(divisor).to(logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        tokens = logits.argmax(-1)
    else:
        tokens = _draw(logprobs, top_p, top_k, uniform)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(logits.device), logits.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.cpu().numpy(), chosen.cpu().numpy()


def _draw(
    logprobs: torch.Tensor, top_p: NDArray[np.float64], top_k: NDArray[np.int64], uniform: NDArray[np.float64]
) -> torch.Tensor:
    """Inverse-CDF draw: tokens [n] from log-probs [n, V], uniform [n]."""
    probs = logprobs.exp()
    truncated = (top_p < 1) | (top_k > 0)
    if truncated.any():
        rows = torch.from_numpy(np.flatnonzero(truncated)).to(probs.device)
        probs[rows] = _truncate(probs[rows], top_p[truncated], top_k[truncated])
    # float64, because float32 would lose the tail of a large vocabulary
    cdf = probs.cumsum(-1, dtype=torch.float64)
    threshold = torch.from_numpy(uniform).to(cdf.device)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, threshold, right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)


def _truncate(probs: torch.Tensor, top_p: NDArray[np.float64], top_k: NDArray[np.int64]) -> torch.Tensor:
    """Zero what top-k and top-p exclude: probs [m, V], top_p [m], top_k [m]. The most likely token always stays."""
    device, vocab_size = probs.device, probs.shape[1]
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where(top_k > 0, top_k, vocab_size)).to(device)[:, None]
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=device) >= k, 0.0)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    nucleus = torch.from_numpy(top_p).to(device)[:, None] * cumulative[:, -1:]
    ordered = ordered.masked_fill(cumulative - ordered >= nucleus, 0.0)
    return torch.zeros_like(probs).scatter_(1, ids, ordered)


class SamplingRows:
    """The sampling parameters of a batch as columns; row i belongs to row i of the KV cache."""

    def __init__(self, num_rows_max: int) -> None:
        self._temperature = np.ones(num_rows_max, np.float32)
        self._top_p = np.ones(num_rows_max, np.float64)
        self._top_k = np.zeros(num_rows_max, np.int64)
        self._stream = np.zeros(num_rows_max, np.uint64)
        self._position = np.zeros(num_rows_max, np.uint64)

    def set(self, row: int, sampling: SamplingParams, position: int) -> None:
        """Put a request into `row`; its next token is number `position` (0-based) of the response."""
        self._temperature[row] = sampling.temperature
        self._top_p[row] = sampling.top_p
        self._top_k[row] = sampling.top_k
        self._stream[row : row + 1] = mix64(np.array([sampling.seed & _MASK_64], np.uint64))
        self._position[row] = position

    def move(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        for column in (self._temperature, self._top_p, self._top_k, self._stream, self._position):
            column[target] = column[source]

    def sample(self, logits: torch.Tensor, start: int) -> tuple[list[int], list[float]]:
        """Next token and log-prob of the rows from `start` on, one per row of logits [n, V]; steps their positions."""
        rows = slice(start, start + logits.shape[0])
        tokens, logprobs = sample(
            logits,
            self._temperature[rows],
            self._top_p[rows],
            self._top_k[rows],
            uniforms(self._stream[rows], self._position[rows]),
        )
        self._position[rows] += np.uint64(1)
        return tokens.tolist(), logprobs.tolist()
