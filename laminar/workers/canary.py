"""A fixed sequence of tokens whose log-probs the trainer computes for every version: proof that an engine took the weights.

The canary travels with its version through the relay. After each pull the replica computes the same log-probs with its engine.
Two things give bad weights away: log-probs too far from the trainer's (a tensor went to the wrong place, or to none), and
log-probs that have not moved by a bit although the trainer's have (the new weights never arrived). The second works at
learning rates whose steps are far smaller than the tolerance.
"""

from typing import NamedTuple

import msgspec

from laminar.errors import LaminarError

NUM_TOKENS = 32
"""Enough for every layer to matter, short enough to cost about one decode step."""
TOLERANCES = {"float32": 0.01, "bfloat16": 0.3, "float16": 0.3}
"""Mean |Δ log-prob| by the engine's dtype. Correct engines give some 1e-5 and some 1e-2; a model with one layer's weights missing,
above 1."""
MOVED = 1e-4
"""Mean |Δ log-prob| between two versions, by the trainer, from which an engine cannot compute the very same numbers for both."""


class Canary(msgspec.Struct, frozen=True, array_like=True):
    """What the trainer's weights say of the fixed sequence."""

    tokens: list[int]
    logprobs: list[float]
    """Of `tokens[1:]`, each given those before it, at temperature 1; nats."""


class Sighting(NamedTuple):
    """One version as the trainer and one engine saw it."""

    canary: Canary
    observed: list[float]
    """The engine's log-probs of the same tokens."""

    @property
    def difference(self) -> float:
        """Mean |Δ log-prob|, nats per token; NaN if the engine's are not numbers."""
        return mean_difference(self.canary.logprobs, self.observed)


class CanaryError(LaminarError):
    """The engine does not compute with the weights that it was told to load: end it."""


def canary_tokens(vocab_size: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """The fixed sequence for a vocabulary: scattered over it, the same everywhere."""
    return [
        (number + 1) * 2654435761 % 2**32 * vocab_size >> 32 for number in range(num_tokens)
    ]  # Knuth's multiplicative hash


def mean_difference(first: list[float], second: list[float]) -> float:
    """Mean absolute difference. ValueError when the lengths differ."""
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / max(1, len(first))


def judge(now: Sighting, before: Sighting | None, tolerance: float) -> None:
    """Raises CanaryError if `now` does not show the version's own weights. `before`: the same engine's last sighting."""
    if not now.difference <= tolerance:
        raise CanaryError(
            f"log-probs of the canary differ by {now.difference:.3g} nats a token from the trainer's (allowed: {tolerance:g}): "
            "the engine did not load these weights as they are, or computes something else than the trainer; "
            "compare dtypes and the model's files, or set rollout.canary_tolerance"
        )
    if before is None or before.observed != now.observed or before.canary.tokens != now.canary.tokens:
        return
    moved = mean_difference(before.canary.logprobs, now.canary.logprobs)
    if moved > MOVED:
        raise CanaryError(
            f"log-probs of the canary are bit for bit those of the version before, while the trainer's moved by {moved:.3g} nats a "
            "token: the new weights never reached the engine"
        )
