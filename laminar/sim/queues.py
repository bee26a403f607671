"""Steady-state accounting of the experience buffer as a queue: complete groups arrive, wait, and leave with a batch.

Pure arithmetic over what a run has recorded; times are virtual seconds, depths in groups. In a steady state Little's law holds:
mean depth = arrival rate x mean residence. Depth is sampled and residence recorded per group, so their ratio is a check of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

TREND_SHARE = 0.1  # a drift over the second half below a tenth of the mean is not called a trend …
TREND_ERRORS = 3.0  # … nor one below three standard errors of its slope


@dataclass(frozen=True, kw_only=True)
class Group:
    """A trained group; what the buffer holds when the run ends has none."""

    complete_at: float
    """Its last sibling was rewarded: it arrives in the buffer."""
    sampled_at: float
    step: int
    """That trained it."""
    s_train: float
    """Mean of its siblings', versions."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The state at a moment."""

    at: float
    buffered: int
    in_flight: int
    held_back: bool
    """The buffer limit holds new groups back."""


@dataclass(kw_only=True)
class Record:
    """What a run notes down."""

    groups: list[Group] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    """(from, until) of the trainer's steps and publication stalls."""


def account(record: Record, steps: Sequence[tuple[int, float]], dropped: Mapping[str, int]) -> dict[str, Any]:
    """The queue between the first and the last of `steps`, (step, when it ended), with a row of the series for each but the first.

    Raises ValueError with less than two steps.
    """
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps: the queue is accounted for between two of them")
    begin, end = steps[0][1], steps[-1][1]
    seconds = end - begin
    samples = [sample for sample in record.samples if begin < sample.at <= end]
    taken = [group for group in record.groups if begin < group.sampled_at <= end]
    arrived = sum(begin < group.complete_at <= end for group in record.groups) + (
        samples[-1].buffered if samples else 0
    )
    ages, depths = [group.sampled_at - group.complete_at for group in taken], [sample.buffered for sample in samples]
    series = [_row(record, step, since, until) for (_, since), (step, until) in pairwise(steps)]
    little = arrived / seconds * _mean(ages)
    return {
        "seconds": seconds,
        "arrivals_groups_per_s": arrived / seconds,
        "consumption_groups_per_s": len(taken) / seconds,
        "depth_groups": _spread(depths),
        "residence_s": _spread(ages),
        "in_flight_groups_mean": _mean([sample.in_flight for sample in samples]),
        "dropped_trajectories": dict(dropped),
        "trainer_waits_share": max(0.0, 1.0 - _overlap(record.busy, begin, end) / seconds),
        "held_back_share": _mean([sample.held_back for sample in samples]),
        "little_ratio": _mean(depths) / little if little else 1.0,
        "trend_depth": trend([row["depth_groups"] for row in series]),
        "trend_s_train": trend([row["s_train"] for row in series]),
        "series": series,
    }


def _row(record: Record, step: int, since: float, until: float) -> dict[str, float]:
    samples = [sample for sample in record.samples if since < sample.at <= until]
    trained = [group for group in record.groups if group.step == step]
    return {
        "step": step,
        "at": until,
        "seconds": until - since,
        "depth_groups": _mean([sample.buffered for sample in samples]),
        "in_flight_groups": _mean([sample.in_flight for sample in samples]),
        "residence_s": _mean([group.sampled_at - group.complete_at for group in trained]),
        "s_train": _mean([group.s_train for group in trained]),
        "trainer_waits_share": max(0.0, 1.0 - _overlap(record.busy, since, until) / (until - since)),
    }


def _overlap(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    return sum(max(0.0, min(until, end) - max(since, begin)) for since, until in intervals)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    last = len(ordered) - 1
    return {"mean": _mean(values), "p50": ordered[last // 2], "p99": ordered[int(0.99 * last)], "max": ordered[last]}


def trend(values: Sequence[float]) -> dict[str, Any]:
    """Least squares over the second half of a series: slope per step, drift over that half, and whether it is a trend."""
    half = list(values[len(values) // 2 :])
    num, mean = len(half), _mean(half)
    if num < 3:
        return {"slope_per_step": 0.0, "drift": 0.0, "is_trend": False}
    middle = (num - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(num))
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(half)) / spread
    rest = sum((value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(half))
    error = (rest / (num - 2) / spread) ** 0.5
    drift = slope * (num - 1)
    found = abs(drift) > TREND_SHARE * abs(mean) and abs(slope) > TREND_ERRORS * error
    return {"slope_per_step": slope, "drift": drift, "is_trend": found}
