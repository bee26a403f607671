"""The staleness penalty: an assumption about what stale data is worth, so that throughput and freshness can be ranked together.

A trained trajectory of staleness s counts

    w(s) = 2^(-s / h)

of a fresh one; h, the half-life, is in versions. The fresh throughput of a run is its throughput times the mean weight over the
staleness histogram of what it trained. Nothing here is measured; docs/sim/model.md says so beside every use.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

HALF_LIFE = 8.0
"""Versions. Decoupled objectives are reported to lose little up to about eight versions, naive ones earlier."""
HALF_LIVES = (4.0, 8.0, 16.0, math.inf)
"""What is reported beside it; at infinity staleness costs nothing."""
SEARCH_MIN, SEARCH_MAX, SEARCH_POINTS = 0.05, 1e4, 400
"""Half-lives that `break_even` looks at, equally spaced by logarithm; below, only fresh data counts, above, all counts alike."""
BISECTIONS = 60  # halves a search interval to the last bits of a float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a system trains, and on how stale data."""

    tokens_per_s: float
    staleness: Mapping[int, float]
    """Trained trajectories by s_train, versions; shares of a trajectory where its tokens are of several versions."""

    def mean_weight(self, half_life: float = HALF_LIFE) -> float:
        """Mean of w(s), between 0 and 1. Raises ValueError without a trained trajectory or a positive half-life."""
        total = sum(self.staleness.values())
        if total <= 0 or half_life <= 0:
            raise ValueError(f"{total} trained trajectories, half-life {half_life}: both must be positive")
        return sum(num * math.exp2(-s / half_life) for s, num in self.staleness.items()) / total

    def fresh_tokens_per_s(self, half_life: float = HALF_LIFE) -> float:
        """Throughput in tokens worth as much as fresh ones."""
        return self.tokens_per_s * self.mean_weight(half_life)

    def report(self) -> dict[str, object]:
        """For JSON: fresh throughput at each half-life, and the staleness that it comes from."""
        total = sum(self.staleness.values())
        return {
            "fresh_tokens_per_s": self.fresh_tokens_per_s(),
            "fresh_tokens_per_s_by_half_life": {f"{h:g}": self.fresh_tokens_per_s(h) for h in HALF_LIVES},
            "s_per_million_fresh_tokens": 1e6 / self.fresh_tokens_per_s(),
            "s_train_mean": sum(s * num for s, num in self.staleness.items()) / total,
            "s_train_max": max(self.staleness),
            "s_train": {str(s): self.staleness[s] for s in sorted(self.staleness)},
        }


def pace_of(row: Mapping[str, object]) -> Pace:
    """From a reported row: a run's summary, or a line of the grid."""
    rate, counts = row["throughput_tokens_per_s"], row["s_train"]
    assert isinstance(rate, float)
    assert isinstance(counts, Mapping)
    return Pace(tokens_per_s=rate, staleness={int(s): num for s, num in counts.items()})


def break_even(a: Pace, b: Pace) -> float | None:
    """The half-life, versions, at which both are equally good; None = one is ahead at every half-life.

    Above it the one of higher throughput is ahead, below the fresher one. If there are several, the largest.
    """

    def lead(half_life: float) -> float:
        return a.fresh_tokens_per_s(half_life) - b.fresh_tokens_per_s(half_life)

    ratio = (SEARCH_MIN / SEARCH_MAX) ** (1.0 / SEARCH_POINTS)
    high = SEARCH_MAX
    for _ in range(SEARCH_POINTS):
        low = high * ratio
        if lead(low) * lead(high) < 0.0:
            return _root(lead, low, high)
        high = low
    return None


def _root(lead: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if lead(middle) * lead(high) < 0.0:
            low = middle
        else:
            high = middle
    return high
