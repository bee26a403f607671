"""What is generated: prompt and response lengths, tool calls and their latencies, and how lengths change over training.

Invariant: a trajectory's draw depends only on its seed, the version's step and the workload, so it is the same on every replica,
after every failure, under every policy and in every baseline.
"""

import contextlib
import math
import sqlite3
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import NormalDist

import msgspec

from laminar.errors import ConfigError
from laminar.ids import derive_seed

_NORMAL = NormalDist()
SIGMA = math.log(10.0) / _NORMAL.inv_cdf(0.99)  # P99 = 10 x median
DRAWS_KEPT = (
    2**20
)  # the grid's runs draw the same 150,000, partial rollout others, with and without tool calls: 600,000 in all
LENGTH_STREAM = 3  # keeps a response's length apart from its tool calls
CHANCE_MAX = 1.0 - 2.0**-53  # the largest float below 1


class Pause(msgspec.Struct, frozen=True, gc=False):
    """A tool call: after `at` response tokens the environment works `latency_s` and adds `num_tokens`."""

    at: int
    latency_s: float
    num_tokens: int


class Draw(msgspec.Struct, frozen=True):
    """One response to be generated."""

    num_tokens: int
    """Response tokens in all, the environment's included."""
    pauses: tuple[Pause, ...] = ()
    reward_s: float = 0.0
    """From its last token to its reward."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A length distribution and, for tool use, an environment."""

    name: str
    median: float = 2500.0
    """Response tokens at the beginning of training."""
    tokens_max: int = 16384
    growth_per_step: float = 0.0
    """Relative growth of the median per trainer step."""
    prompt_tokens: int = 256
    calls_max: int = 0
    call_latency_s: float = 2.0
    """Median; the tail is the lengths' (P99 = 10 x median)."""
    call_tokens: int = 128
    lengths: tuple[int, ...] = field(default=(), repr=False)
    """Observed lengths, sorted: drawn from in place of the log-normal."""

    def draw(self, seed: int, step: int) -> Draw:
        """The response of the trajectory with this sampling seed under weights of `step`."""
        scale = (1.0 + self.growth_per_step) ** step
        if not self.lengths:
            median = self.median * scale
            return _log_normal(seed, median, self.tokens_max, self.calls_max, self.call_tokens, self.call_latency_s)
        observed = self.lengths[int(_chance(seed) * len(self.lengths))] * scale
        return _draw(seed, observed, self.tokens_max, self.calls_max, self.call_tokens, self.call_latency_s)

    def rest(self, seed: int, step: int, num_tokens: int) -> Draw:
        """As `draw`, of a response that has so many tokens already and goes on, or ends at once."""
        draw = self.draw(seed, step)
        return draw if draw.num_tokens >= num_tokens else Draw(num_tokens, reward_s=draw.reward_s)

    def mean_tokens(self, step: int = 0, num: int = 20_000) -> float:
        """Mean response tokens, from `num` quantiles of the distribution."""
        scale = (1.0 + self.growth_per_step) ** step
        if self.lengths:
            return sum(min(self.tokens_max, length * scale) for length in self.lengths) / len(self.lengths)
        quantiles = (math.exp(SIGMA * _NORMAL.inv_cdf((i + 0.5) / num)) for i in range(num))
        return sum(min(self.tokens_max, self.median * scale * q) for q in quantiles) / num


@lru_cache(maxsize=DRAWS_KEPT)
def _log_normal(
    seed: int, median: float, tokens_max: int, calls_max: int, call_tokens: int, call_latency_s: float
) -> Draw:
    length = median * math.exp(SIGMA * _NORMAL.inv_cdf(_chance(seed)))
    return _draw(seed, length, tokens_max, calls_max, call_tokens, call_latency_s)


def _chance(seed: int) -> float:
    """Of the length, in [0, 1)."""
    return min(CHANCE_MAX, (derive_seed(seed, LENGTH_STREAM) + 0.5) / 2.0**63)


def _draw(seed: int, length: float, tokens_max: int, calls_max: int, call_tokens: int, call_latency_s: float) -> Draw:
    total = max(1, min(tokens_max, round(length)))
    return Draw(total, _pauses(seed, total, calls_max, call_tokens, call_latency_s) if calls_max else ())


def _pauses(seed: int, total: int, calls_max: int, call_tokens: int, call_latency_s: float) -> tuple[Pause, ...]:
    """Calls at random places; the environment's tokens are part of the total."""
    random = Random(seed)
    num = min(random.randint(0, calls_max), total // (2 * call_tokens))
    written = total - num * call_tokens
    places = sorted(random.randint(1, written) for _ in range(num))
    return tuple(
        Pause(
            at=place + index * call_tokens,
            latency_s=call_latency_s * math.exp(SIGMA * random.gauss(0.0, 1.0)),
            num_tokens=call_tokens,
        )
        for index, place in enumerate(places)
    )


WORKLOADS = {
    "math": Workload(name="math"),
    "tool": Workload(name="tool", calls_max=8),
}


def observed(path: Path) -> Workload:
    """Lengths as in a real run's `run.db`. Raises ConfigError if there are none."""
    if not path.is_file():
        raise ConfigError(f"--workload {path}: no such file; give math, tool, or the run.db of a finished run")
    query = "SELECT num_tokens, num_prompt_tokens FROM trajectories WHERE num_tokens > 0 AND finish_reason IN ('stop', 'length')"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as database:
            rows = database.execute(query).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(
            f"--workload {path}: cannot read its trajectories: {error}; give a run.db of Laminar"
        ) from error
    if not rows:
        raise ConfigError(f"--workload {path}: no finished trajectory in it; give the run.db of a longer run")
    lengths = tuple(sorted(row[0] for row in rows))
    prompt = round(sum(row[1] for row in rows) / len(rows))
    return Workload(
        name=f"run:{path.parent.name}", lengths=lengths, tokens_max=lengths[-1], median=float(lengths[len(lengths) // 2]),
        prompt_tokens=prompt,
    )  # fmt: skip
