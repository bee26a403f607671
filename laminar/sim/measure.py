"""What a simulated run is measured by. Times are virtual seconds.

Throughput is the paper's: prompt + response tokens of one global batch over the time between two actor updates, over the measured
iterations; the first ones are warm-up. KV use is sampled at a fixed period over all replicas, idle ones included.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from laminar.sim.freshness import Pace
from laminar.sim.queues import Record, account


@dataclass(kw_only=True)
class Iteration:
    """One actor update."""

    step: int
    at: float
    """When the update was applied."""
    num_tokens: int
    """Prompt + response tokens of its batch."""
    num_generated: int
    """Response tokens decoded by all replicas since the run began."""


@dataclass(kw_only=True)
class Measures:
    """Collected by the world while it runs."""

    warmup: int
    iterations: list[Iteration] = field(default_factory=list)
    s_gen: Counter[int] = field(default_factory=Counter)
    residence: Counter[int] = field(default_factory=Counter)
    s_train: Counter[int] = field(default_factory=Counter)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """(finished at, seconds from its first start to its last token) of each trained trajectory."""
    kv_use: list[tuple[float, float]] = field(default_factory=list)
    """(at, mean share of the KV capacity in use)."""
    buffered: list[tuple[float, int]] = field(default_factory=list)
    """(at, complete groups in the buffer)."""
    queue: Record = field(default_factory=Record)
    """Of the experience buffer, for long runs."""
    lanes: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Per replica: (at, step of the version that it holds from then on)."""
    waits_s: list[float] = field(default_factory=list)
    """Decoding stopped for a pull."""
    recoveries_s: list[float] = field(default_factory=list)
    """From a replica's loss to the same name's return."""
    detections_s: list[float] = field(default_factory=list)
    """From an engine's hang to its replica's loss."""
    trainer_outages: list[tuple[float, int]] = field(default_factory=list)
    """(at, response tokens decoded so far): in turn when a trainer was lost and when the next launch was ready."""
    num_tokens_lost: int = 0
    """Decoded and gone with an engine before they were reported."""
    faults: Counter[str] = field(default_factory=Counter)
    alarms: dict[str, str] = field(default_factory=dict)
    """What the first alarm of each name said."""

    def summary(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        window = self.iterations[self.warmup :]
        if self.warmup == 0 or len(self.iterations) <= self.warmup:
            raise ValueError(f"{len(self.iterations)} iterations, {self.warmup} of them warm-up: nothing to measure")
        begin, end = self.iterations[self.warmup - 1], window[-1]
        seconds = end.at - begin.at
        latencies = sorted(value for at, value in self.latencies if begin.at < at <= end.at)
        kv_use = [share for at, share in self.kv_use if begin.at < at <= end.at]
        throughput = tokens_per_s(self.iterations, self.warmup)
        found = {
            "throughput_tokens_per_s": throughput,
            "generation_tokens_per_s": (end.num_generated - begin.num_generated) / seconds,
            "iteration_s": seconds / len(window),
            "kv_use": mean(kv_use) if kv_use else 0.0,
            "latency_mean_s": mean(latencies) if latencies else 0.0,
            "latency_p99_s": latencies[int(0.99 * (len(latencies) - 1))] if latencies else 0.0,
            "latency_max_s": latencies[-1] if latencies else 0.0,
            "s_gen_mean": _mean(self.s_gen),
            "s_gen_max": max(self.s_gen, default=0),
            "s_gen": {str(s): self.s_gen[s] for s in sorted(self.s_gen)},
            "residence": {str(s): self.residence[s] for s in sorted(self.residence)},
            "buffered_groups_mean": mean([n for at, n in self.buffered if begin.at < at <= end.at] or [0]),
            "pull_wait_mean_s": mean(self.waits_s) if self.waits_s else 0.0,
            "virtual_s": end.at,
        }
        trained = Pace(tokens_per_s=throughput, staleness=self.s_train)
        return found | trained.report() if self.s_train else found

    def queue_account(self, dropped: dict[str, int]) -> dict[str, Any]:
        """The buffer as a queue over the measured window; `dropped` = trajectories by reason, of the whole run."""
        window = self.iterations[self.warmup - 1 :]
        return account(self.queue, [(iteration.step, iteration.at) for iteration in window], dropped)


def tokens_per_s(iterations: Sequence[Iteration], warmup: int) -> float:
    """Throughput over all but the first `warmup`, at least one; there is one more at the least."""
    return sum(i.num_tokens for i in iterations[warmup:]) / (iterations[-1].at - iterations[warmup - 1].at)


def _mean(counts: Counter[int]) -> float:
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / total if total else 0.0
