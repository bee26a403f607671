"""What a run has done since this controller began: sums that only grow, and histograms, for `laminar.controller.prometheus`.

The per-step figures of `laminar.controller.telemetry` are of windows; a scraper that comes by every 15 s needs sums.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

import msgspec

from laminar import wire
from laminar.ids import WorkerId

STALENESSES = ("s_gen", "residence", "s_train")
STALENESS_STEPS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""Exact where runs are meant to be; beyond 32 trainer steps nobody asks how far."""
TRAJECTORY_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
PULL_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
NAMES_MAX = (
    64  # of alarms and agents' counts: what comes after that is counted as OTHER, so that no name can flood a scraper
)
OTHER = "other"


class Histogram:
    """Numbers of observations up to each bound, `bounds` ascending."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Each of them; thousands at once, when a step ends."""
        counts, bounds = self._counts, self.bounds
        for value, num in Counter(values).items():
            counts[bisect_left(bounds, value)] += num
            self.sum += value * num

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, observations up to and with it); the last bound is infinite."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class Totals(msgspec.Struct, kw_only=True):
    """All counts start at 0 with the process."""

    steps: int = 0
    trained_tokens: float = 0.0
    num_failed: int = 0
    generated_tokens: dict[WorkerId, int] = {}
    busy_s: dict[WorkerId, float] = {}
    """Replica -> seconds in which its engine prefilled or decoded."""
    reported_s: dict[WorkerId, float] = {}
    """Replica -> seconds of which it has told."""
    trainer_s: dict[str, float] = msgspec.field(
        default_factory=lambda: {"train": 0.0, "publish": 0.0, "checkpoint": 0.0}
    )
    """What the trainer stood in for so long; what is left is idle."""
    agents: dict[str, int] = {}
    alarms: dict[str, int] = {}
    restarts: dict[str, int] = {}
    """Worker -> how often its process was started again."""
    pull_wait_s: Histogram = msgspec.field(default_factory=lambda: Histogram(PULL_S))
    staleness: dict[str, Histogram] = msgspec.field(
        default_factory=lambda: {name: Histogram(STALENESS_STEPS) for name in STALENESSES}
    )
    """Of what was trained, trainer steps."""
    trajectory_s: Histogram = msgspec.field(default_factory=lambda: Histogram(TRAJECTORY_S))
    reward_s: Histogram = msgspec.field(default_factory=lambda: Histogram(TRAJECTORY_S))

    def on_message(self, worker: WorkerId, message: wire.Message) -> None:
        """Take what a worker says."""
        match message:
            case wire.RolloutReport():
                self._on_report(worker, message)
            case wire.Refreshed():
                self.pull_wait_s.observe(message.wait_s)
            case wire.ShardsWritten():
                self.trainer_s["publish"] += message.stall_s
            case wire.CheckpointSaved():
                self.trainer_s["checkpoint"] += message.stall_s

    def _on_report(self, worker: WorkerId, report: wire.RolloutReport) -> None:
        generated, busy, reported = self.generated_tokens, self.busy_s, self.reported_s
        generated[worker] = generated.get(worker, 0) + num_generated(report)
        busy[worker] = busy.get(worker, 0.0) + report.decode_busy_s
        reported[worker] = reported.get(worker, 0.0) + report.interval_s
        self.num_failed += len(report.failed)
        for name, num in report.agents.items():
            _count(self.agents, name, num)

    def on_step(self, metrics: dict[str, float]) -> None:
        """A step is finished."""
        self.steps += 1
        self.trained_tokens += metrics.get("num_tokens/trained", 0.0)
        self.trainer_s["train"] += metrics.get("timing/step_s", 0.0)

    def on_restart(self, worker: WorkerId) -> None:
        """A lost worker is started again."""
        _count(self.restarts, worker, 1)

    def on_alarm(self, name: str) -> None:
        """People were told of something."""
        _count(self.alarms, name, 1)


def num_generated(report: wire.RolloutReport) -> int:
    """Response tokens in it that the model generated."""
    return len(report.tokens) // 4 - (len(report.sources) - report.sources.count(0))


def bounded(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The same counts under at most NAMES_MAX names and OTHER."""
    found: dict[str, int] = {}
    for name, num in counts:
        _count(found, name, num)
    return found


def _count(counts: dict[str, int], name: str, num: int) -> None:
    if name not in counts and len(counts) >= NAMES_MAX:
        name = OTHER
    counts[name] = counts.get(name, 0) + num
