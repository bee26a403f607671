"""What a run measures about itself: per step to `metrics.jsonl` and `run.db`, between steps for the display.

Names are those of docs/metrics.md. All windows are from one finished step to the next.
"""

from collections import Counter, deque
from pathlib import Path
from typing import Any, Protocol

import msgspec

from laminar import wire
from laminar.controller.eventlog import EventLog
from laminar.controller.moves import Moves
from laminar.controller.runtime import Runtime
from laminar.controller.totals import Totals, num_generated
from laminar.controller.trajectoryrows import Stalenesses
from laminar.core import actions, events
from laminar.core.records import Trajectory
from laminar.ids import WorkerId
from laminar.logs import Lossy

HISTORY_STEPS = 500  # some 7 KB each; those who look come by many times in so many, and run.db has all
RECENT_STEPS = 20  # whose histograms of staleness are kept: enough rows for a shape, few enough to show a change
LEVELS_S = 1.0  # between two rows of `levels`: finer than a screen shows of a minute, and some 10 MB a day


class Window(msgspec.Struct, kw_only=True):
    """Sums since the last step."""

    started: float
    tokens_generated: int = 0
    busy_s: dict[WorkerId, float] = {}
    interval_s: dict[WorkerId, float] = {}
    wait_s: float = 0.0
    num_pulls: int = 0
    canary_differences: list[float] = []
    stall_s: float = 0.0
    cast_s: float = 0.0
    device_copy_s: float = 0.0
    host_copy_s: float = 0.0
    checkpoint_stall_s: float = 0.0
    checkpoint_s: list[float] = []
    num_failed: int = 0
    stalled_s: float = 0.0
    agents: dict[str, int] = {}


class Tracer(Protocol):
    """Hears what happened, once it is over. Times are run times, seconds since the epoch."""

    def span(self, worker: WorkerId, kind: str, start: float, end: float, what: str) -> None:
        """A row of `spans`, but for decoding."""

    def move(
        self, trajectory: int, source: WorkerId, destination: WorkerId, start: float, end: float, tokens: int
    ) -> None:
        """A row of `moves`."""

    def trajectory(self, t: Trajectory, at: float) -> None:
        """A row of `trajectories`."""

    async def close(self) -> None:
        """Nothing more happens; returns after a bounded time."""


class Telemetry:
    """Hears what workers say and what the core decides."""

    def __init__(self, runtime: Runtime, log: EventLog, path: Path) -> None:
        self.history: list[dict[str, float]] = []
        """Metrics of this process's last steps, `HISTORY_STEPS` at least."""
        self.num_steps = 0
        """Steps that ever were in `history`."""
        self.relays: dict[WorkerId, wire.RelayReport] = {}
        """The last word of each."""
        self.totals = Totals()
        self.tracer: Tracer | None = None
        self._moves = Moves(runtime, log)
        self.staleness: deque[dict[str, Counter[int]]] = deque(maxlen=RECENT_STEPS)
        """Of each of the last steps: trainer steps -> trained trajectories, by kind of staleness."""
        self._runtime, self._log = runtime, log
        self._file = Lossy(path.open("a", buffering=1))  # the figures are in the database, too
        self._window = Window(started=runtime.now())
        self._leveled = 0.0
        """Run time of the last row of `levels`."""
        self._last = (0, 0)
        """Step and attempt of the last row; a restored trainer does steps again."""
        self._stalled_since = 0.0
        """Run time from which on the run has been stalled; 0 = it is not."""

    async def finish(self) -> None:
        """Nothing more happens: let the traces go."""
        if self.tracer is not None:
            await self.tracer.close()

    def close(self) -> None:
        """Flush the file."""
        self._file.close()

    # ---- from workers --------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerId, message: wire.Message) -> None:
        """Take what the core does not need."""
        self.totals.on_message(worker, message)
        if isinstance(message, wire.RolloutReport):
            self._on_report(worker, message)
        elif isinstance(message, wire.Refreshed):
            self._window.wait_s += message.wait_s
            self._window.num_pulls += 1
            if message.canary_difference is not None:
                self._window.canary_differences.append(message.canary_difference)
            self._span(worker, "pull", message.wait_s, message.version)
        elif isinstance(message, wire.ShardsWritten):
            self._on_shards_written(worker, message)
        elif isinstance(message, wire.RelayReport):
            self.relays[worker] = message
        elif isinstance(message, wire.RelayReady):
            self.relays.pop(worker, None)  # it begins anew
        elif isinstance(message, wire.CheckpointSaved):
            self._window.checkpoint_stall_s += message.stall_s
            self._window.checkpoint_s.append(message.seconds)
            self._span(worker, "checkpoint", message.seconds, f"s{message.step}")
        elif isinstance(message, wire.StepDone):
            self._span(worker, "train", message.metrics.get("timing/step_s", 0.0), f"s{message.step}")
        elif isinstance(message, wire.VersionReady):
            self._log.write(
                "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?)",
                (message.version.step, message.version.branch, message.digest, message.num_bytes, self._runtime.now()),
            )

    def on_action(self, action: actions.AnyAction) -> None:
        """Hear what the core wants done."""
        if isinstance(action, actions.StartWorker):
            self.totals.on_restart(action.worker)
        elif isinstance(action, actions.AbortAttempts):
            self._moves.on_abort(action)
        elif isinstance(action, actions.StartGroup):
            for move in self._moves.on_start(action):
                if self.tracer is not None:
                    self.tracer.move(
                        move.trajectory, move.source, move.destination, move.start, move.end, move.num_tokens
                    )
        elif isinstance(action, actions.RecordTrajectories) and self.tracer is not None:
            for trajectory in action.trajectories:
                self.tracer.trajectory(trajectory, self._runtime.core.state.at)

    def _on_shards_written(self, worker: WorkerId, message: wire.ShardsWritten) -> None:
        window = self._window
        window.stall_s += message.stall_s
        window.cast_s += message.cast_s
        window.device_copy_s += message.device_copy_s
        window.host_copy_s += message.host_copy_s
        self._span(worker, "publish", message.stall_s, message.version)

    def _on_report(self, worker: WorkerId, report: wire.RolloutReport) -> None:
        window = self._window
        window.tokens_generated += num_generated(report)
        window.busy_s[worker] = window.busy_s.get(worker, 0.0) + report.decode_busy_s
        window.interval_s[worker] = window.interval_s.get(worker, 0.0) + report.interval_s
        window.num_failed += len(report.failed)
        for name, num in report.agents.items():
            window.agents[name] = window.agents.get(name, 0) + num
        if report.decode_busy_s > 0:
            end = report.since + report.interval_s
            self._log.write(
                "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)",
                (worker, "decode", report.since, end, report.decode_busy_s, str(report.version)),
            )

    def _span(self, worker: WorkerId, kind: str, seconds: float, what: Any) -> None:
        end = self._runtime.now()
        row = (worker, kind, end - seconds, end, seconds, str(what))
        self._log.write("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", row)
        if self.tracer is not None:
            self.tracer.span(worker, kind, end - seconds, end, str(what))

    # ---- per step ------------------------------------------------------------------------------------------

    def observe(self, event: events.AnyEvent) -> dict[str, float] | None:
        """Called after the core took an event. The metrics of the step, if it ended one: answers of old attempts do not."""
        self._observe_stall(event.at)
        if event.at >= self._leveled + LEVELS_S:
            self._write_levels(event.at)
        if isinstance(event, events.ReplicaReported):
            self._moves.on_report(event)
        if not isinstance(event, events.StepFinished):
            return None
        step = self._runtime.core.state.steps.get(event.step)
        done = step is not None and step.done and step.attempt == event.attempt
        if not done or self._last == (event.step, event.attempt):
            return None
        self._last = event.step, event.attempt
        return self._finish_step(event)

    def _write_levels(self, at: float) -> None:
        """How full everything is."""
        self._leveled, state = at, self._runtime.core.state
        replicas = state.replicas.values()
        row = (
            at,
            len(state.buffer),
            state.ledger.trajectories.in_flight,
            sum(replica.num_generating for replica in replicas),
            sum(replica.kv_tokens for replica in replicas),
            sum(replica.kv_tokens_max for replica in replicas),
        )
        self._log.write("INSERT OR REPLACE INTO levels VALUES (?, ?, ?, ?, ?, ?)", row)

    def _observe_stall(self, at: float) -> None:
        stall = self._runtime.core.state.stall
        if stall.told:
            self._stalled_since = stall.since
        elif self._stalled_since:
            self._window.stalled_s += at - self._stalled_since
            self._stalled_since = 0.0

    def _finish_step(self, event: events.StepFinished) -> dict[str, float]:
        state = self._runtime.core.state
        members = [
            state.trajectories[t] for group in state.steps[event.step].groups for t in state.groups[group].trajectories
        ]
        self.totals.on_step(event.metrics)
        metrics = {**event.metrics, **self._of_batch(members), **self._of_window(event), **self._of_buffer()}
        self.num_steps += 1
        self.history.append({"step": float(event.step), **metrics})
        if len(self.history) > 2 * HISTORY_STEPS:
            del self.history[:HISTORY_STEPS]
        row = {"step": event.step, "at": event.at, **metrics}
        self._file.write(msgspec.json.encode(row).decode() + "\n")  # a NaN becomes null, which JSON has
        for name, value in metrics.items():
            self._log.write("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", (event.step, name, value))
        self._window = Window(started=event.at, agents=dict.fromkeys(self._window.agents, 0))
        return metrics

    def _of_batch(self, members: list[Trajectory]) -> dict[str, float]:
        branches = self._runtime.core.state.branches
        stalenesses, totals = Stalenesses(branches), self.totals
        rows = [stalenesses.of(t) for t in members]
        metrics, counts = {}, {}
        for index, (name, histogram) in enumerate(totals.staleness.items()):
            values = [row[index] or 0 for row in rows]
            histogram.observe_all(values)
            counts[name] = Counter(values)
            metrics |= {f"off_policy/{name}/{key}": value for key, value in _mean_max(values).items()}
        self.staleness.append(counts)
        finished = [t.timings.finished - t.timings.queued for t in members]
        rewarded = [t.timings.rewarded - t.timings.finished for t in members]
        totals.trajectory_s.observe_all(finished)
        totals.reward_s.observe_all(rewarded)
        metrics |= {f"timing/trajectory_s/{key}": value for key, value in _mean_max(finished).items()}
        metrics |= {f"timing/reward_s/{key}": value for key, value in _mean_max(rewarded).items()}
        metrics["is_truncated/mean"] = sum(t.finish_reason == "length" for t in members) / max(1, len(members))
        return metrics

    def _of_window(self, event: events.StepFinished) -> dict[str, float]:
        window = self._window
        wall = max(1e-9, event.at - window.started)
        busy, interval = sum(window.busy_s.values()), sum(window.interval_s.values())
        working = event.metrics.get("timing/step_s", 0.0) + window.stall_s + window.checkpoint_stall_s
        canaries = _mean_max(window.canary_differences) if window.canary_differences else {}
        checkpoints = (
            {"perf/checkpoint_stall_s": window.checkpoint_stall_s, "perf/checkpoint_s": max(window.checkpoint_s)}
            if window.checkpoint_s
            else {}
        )
        return {
            **{f"canary/logprob_abs_diff/{key}": value for key, value in canaries.items()},
            **checkpoints,
            "timing/wall_s": wall,
            "perf/generation_tokens_per_s": window.tokens_generated / wall,
            "perf/training_tokens_per_s": event.metrics.get("num_tokens/trained", 0.0) / wall,
            "perf/trainer_idle_ratio": max(0.0, 1.0 - working / wall),
            "perf/rollout_idle_ratio": max(0.0, 1.0 - busy / interval) if interval else 1.0,
            "perf/publication_stall_s": window.stall_s,
            "perf/publication_cast_s": window.cast_s,
            "perf/publication_device_copy_s": window.device_copy_s,
            "perf/publication_host_copy_s": window.host_copy_s,
            "perf/rollout_wait_s": window.wait_s / max(1, window.num_pulls),
            "rollout/num_pulls": float(window.num_pulls),
            "rollout/num_failed": float(window.num_failed),
            "event_loop_lag/max": self._runtime.take_lag(),
            "laminar/stalled_s": window.stalled_s,
            "log/commit_lag_s/max": self._log.take_lag(),
            **{f"log/{name}": size for name, size in self._log.upkeep.sizes.in_mib().items()},
            **{f"agent/{name}": float(num) for name, num in window.agents.items()},
        }

    def _of_buffer(self) -> dict[str, float]:
        state = self._runtime.core.state
        ages = [state.at - state.groups[group].completed_at for group in state.buffer]
        in_flight = state.ledger.trajectories.in_flight
        metrics = {f"buffer/age_s/{key}": value for key, value in _mean_max(ages).items()}
        return {
            **metrics,
            "buffer/depth_groups": float(len(state.buffer)),
            "buffer/in_flight_trajectories": float(in_flight),
        }

    def seconds_per_step(self) -> float:
        """Mean of the last ten steps, for the ETA; 0 before the first."""
        last = [row["timing/wall_s"] for row in self.history[1:][-10:]]
        return sum(last) / len(last) if last else 0.0


def _mean_max(values: list[Any]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "max": 0.0}
    return {"mean": sum(values) / len(values), "max": float(max(values))}
