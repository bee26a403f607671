"""How fast a recorded run's machines were, what was generated, and what broke: all that its re-simulation is made of.

    ReplicaReported ──► decode: seconds over steps and tokens        PullWeights ──► ReplicaRefreshed: pull
    StartTrainStep ──► StepFinished: seconds over tokens             PublishVersion ──► ShardsWritten: publication
    FinishedAttempt: lengths by group and sibling                    WorkerLost ──► joined again: faults

Costs are linear in what they are over, fitted by least squares with no negative part; they include whatever else the machines did.
"""

from array import array
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.ids import BOOT_SHIFT, TrajectoryId, WorkerId
from laminar.replay.meter import WARMUP_SHARE
from laminar.sim.decode import DecodeModel
from laminar.sim.measured import Costs

NEARLY_ALL = 0.9  # one that computes its prompt has no new token to tell of
FLUSH_S = 0.25  # of a run that reported too seldom to tell


class Fault(NamedTuple):
    """Something of the fleet that came or went."""

    after_s: float
    """Since the first group began."""
    kind: str
    """``lost``, ``trainer``, ``drained`` or ``joined``."""
    worker: WorkerId
    seconds: float
    """Until it was back; 0 = it was not."""


class Response(NamedTuple):
    """A trajectory as it was generated."""

    seed: int
    """Of its sampling."""
    num_tokens: int
    reward_s: float
    """From its end to its reward."""


class Interval(NamedTuple):
    """Between two reports of a replica that generates."""

    seconds: float
    steps: float
    """Decode steps: a request that ran all the time made a token in each; else, new tokens per running request."""
    tokens: float
    kv_steps: float
    """Steps × KV tokens in use."""


class _Since:
    """Of a replica that generates: what it made since it began, or last told the lengths of all that it generates."""

    def __init__(self, at: float, running: int, kv_tokens: int, lengths: dict[int, int]) -> None:
        """`lengths` of what it generates then, by trajectory."""
        self.began = self._at = at
        self._running, self._kv_tokens, self._lengths = running, kv_tokens, lengths
        self._tokens = self._steps = 0
        self._running_s = self._kv_s = 0.0
        """Requests, and KV tokens, times seconds."""

    def start(self, at: float, num: int) -> None:
        """So many more requests."""
        self._pass(at, self._running, self._kv_tokens)
        self._running += num

    def add(self, event: events.ReplicaReported, new: int, lengths: dict[int, int]) -> None:
        """One more report, with so many new tokens, that tells these lengths."""
        self._pass(event.at, (self._running + event.num_running) / 2, (self._kv_tokens + event.kv_tokens) / 2)
        self._running, self._kv_tokens = event.num_running, event.kv_tokens
        self._tokens += new
        gains = [length - self._lengths[t] for t, length in lengths.items() if t in self._lengths]
        self._steps = max([self._steps, *gains])

    def _pass(self, at: float, running: float, kv_tokens: float) -> None:
        self._running_s += (at - self._at) * running
        self._kv_s += (at - self._at) * kv_tokens
        self._at = at

    def interval(self) -> Interval | None:
        """Until the last report; None = nothing was generated."""
        seconds = self._at - self.began
        if not (seconds > 0.0 and self._running_s > 0.0 and self._tokens):
            return None
        steps = self._steps or self._tokens * seconds / self._running_s
        return Interval(seconds, steps, self._tokens, steps * self._kv_s / seconds)


class Rates:
    """Fed with every event of a recorded life, after the core has handled it."""

    def __init__(self) -> None:
        self.began = 0.0
        """Run time when the first group began; 0 = none has."""
        self.replicas: dict[WorkerId, events.ReplicaJoined] = {}
        """The fleet as it was when the first group began, or the first that joined."""
        self.faults: list[Fault] = []
        self.responses: dict[tuple[int, int], Response] = {}
        """By (number of the group within the run, sibling)."""
        self.prompt_tokens: list[int] = []
        self.away_s = 0.0
        """How long no controller listened."""
        self.num_relays_lost = 0
        self.num_amended = 0
        self.num_held = 0
        """How often an operator or a breakpoint held a pass."""
        self._intervals: list[Interval] = []
        self._flushes_s: list[float] = []
        self._since: dict[WorkerId, _Since] = {}
        self._idle: dict[WorkerId, bool] = {}
        """Replicas of which it is known that nothing runs there."""
        self._told: dict[WorkerId, None] = {}
        """Those whose last interval began with a report."""
        self._known: dict[TrajectoryId, int] = {}
        self._finished: dict[TrajectoryId, tuple[float, tuple[int, int]]] = {}
        """When they did, and where they are in `responses`."""
        self._trained: list[tuple[float, int]] = []
        self._running: tuple[float, int] | None = None
        self._free_at = 0.0
        self._publishing: dict[Any, float] = {}
        self._publish_s: list[float] = []
        self._pulling: dict[WorkerId, float] = {}
        self._pulls_s: list[float] = []
        self._saving: dict[int, float] = {}
        self._saves_s: list[float] = []
        self._ready: dict[Any, float] = {}
        self._spread_s: list[float] = []
        self._version_bytes = 1
        self._lost: dict[WorkerId, tuple[int, float]] = {}
        """Worker -> (its place in `faults`, when it was lost)."""
        self._observers: dict[type, Callable[[Core, Any], None]] = {
            events.ReplicaReported: self._on_report,
            events.ReplicaJoined: self._on_joined,
            events.ReplicaRefreshed: self._on_refreshed,
            events.WorkerLost: self._on_lost,
            events.DrainRequested: lambda core, e: self._fault(core, "drained", e.worker),
            events.TrainerRankReady: self._on_rank_ready,
            events.StepFinished: self._on_step_finished,
            events.ShardsWritten: self._on_shards_written,
            events.VersionReady: self._on_version_ready,
            events.VersionHeld: self._on_version_held,
            events.CheckpointSaved: self._on_checkpoint_saved,
            events.ControllerRestarted: self._on_away,
            events.ControllerPaused: self._on_away,
            events.SettingsChanged: self._on_amended,
            events.HoldChanged: self._on_hold,
        }

    def observe(self, core: Core, event: events.AnyEvent, new: list[actions.AnyAction]) -> None:
        """One event and what the core answered."""
        observer = self._observers.get(type(event))
        if observer is not None:
            observer(core, event)
        at = core.state.at
        for action in new:
            if isinstance(action, actions.StartGroup):
                self.began = self.began or at
                self._start(action, at)
            elif isinstance(action, actions.StartTrainStep):
                tokens = sum(row.num_prompt_tokens + row.num_tokens for row in action.rows)
                self._running = max(at, self._free_at), tokens
            elif isinstance(action, actions.PublishVersion):
                self._publishing[action.version] = max(at, self._free_at)
            elif isinstance(action, actions.PullWeights):
                self._pulling[action.worker] = at
            elif isinstance(action, actions.BreakpointHit):
                self.num_held += 1
            elif isinstance(action, actions.SaveCheckpoint):
                self._saving[action.step] = at
            elif isinstance(action, actions.StopWorker) and action.lost:
                self._lose(core, action.worker)

    # ---- rollouts ----------------------------------------------------------------------------------------------

    def _start(self, action: actions.StartGroup, at: float) -> None:
        starts = [start for start in action.starts if not start.score_only]
        since = self._since.get(action.worker)
        if since is not None:
            since.start(at, len(starts))
        elif self._idle.pop(action.worker, False):
            lengths = {int(start.trajectory): self._known.get(start.trajectory, 0) for start in starts}
            self._since[action.worker] = _Since(at, len(starts), 0, lengths)

    def _on_report(self, core: Core, event: events.ReplicaReported) -> None:
        worker = event.worker
        new, found, num_going_on = self._take_lengths(core, event)
        since = self._since.get(worker)
        if any(e.worker == worker and not e.done for e in core.state.evaluations) or worker in self._pulling:
            self._since.pop(worker, None)
            return
        if since is not None:
            since.add(event, new, found)
        if num_going_on >= NEARLY_ALL * event.num_running:  # the lengths of (nearly) all that it generates are known
            if since is not None and (interval := since.interval()):
                self._intervals.append(interval)
                self._flushes_s += [interval.seconds] * (event.num_running > 0 and worker in self._told)
            self._told[worker] = None
            self._since[worker] = _Since(event.at, event.num_running, event.kv_tokens, found)
        if not event.num_running:
            self._since.pop(worker, None)
            self._told.pop(worker, None)
            self._idle[worker] = True

    def _take_lengths(self, core: Core, event: events.ReplicaReported) -> tuple[int, dict[int, int], int]:
        """Response tokens that this report brought, the lengths that it told, and of how many trajectories that go on."""
        found = dict(zip(array("q", event.trajectories), array("i", event.num_tokens), strict=True))
        for done in event.finished:
            found[done.trajectory] = done.num_tokens
            self.prompt_tokens.append(done.num_prompt_tokens)
            record = core.state.trajectories.get(done.trajectory)
            if record is not None:
                place = record.group & ((1 << BOOT_SHIFT) - 1), record.sibling
                self.responses[place] = Response(record.seed, done.num_tokens, 0.0)
                self._finished[done.trajectory] = event.at, place
        for rewarded in event.rewarded:
            if rewarded.trajectory in self._finished:
                finished, place = self._finished.pop(rewarded.trajectory)
                self.responses[place] = self.responses[place]._replace(reward_s=event.at - finished)
        new = sum(max(0, length - self._known.get(TrajectoryId(t), 0)) for t, length in found.items())
        for trajectory, length in found.items():
            self._known[TrajectoryId(trajectory)] = max(length, self._known.get(TrajectoryId(trajectory), 0))
        for done in event.finished:
            self._known.pop(done.trajectory, None)
        return new, found, len(found) - len(event.finished)

    def _on_joined(self, core: Core, event: events.ReplicaJoined) -> None:
        if not self.began:
            self.replicas[event.worker] = event
        elif event.worker in self._lost:
            self._back(core, event.worker)
        elif event.worker not in self.replicas:
            self._join_later(core, event)

    def _join_later(self, core: Core, event: events.ReplicaJoined) -> None:
        """One that joined a fleet at work."""
        if not self.replicas:
            self.replicas[event.worker] = event
        else:
            self._fault(core, "joined", event.worker)

    def _on_refreshed(self, core: Core, event: events.ReplicaRefreshed) -> None:
        began = self._pulling.pop(event.worker, None)
        if began is not None:
            self._pulls_s.append(event.at - began)
        self._since.pop(event.worker, None)
        self._idle[event.worker] = True

    # ---- what breaks -------------------------------------------------------------------------------------------

    def _fault(self, core: Core, kind: str, worker: WorkerId) -> None:
        if self.began:
            self.faults.append(Fault(core.state.at - self.began, kind, worker, 0.0))

    def _on_lost(self, core: Core, event: events.WorkerLost) -> None:
        if not core.state.finished and not core.state.stopping:
            self._lose(core, event.worker)

    def _lose(self, core: Core, worker: WorkerId) -> None:
        name = WorkerId("trainer-0") if worker.startswith("trainer-") else worker
        if worker.startswith("relay-"):
            self.num_relays_lost += 1
        elif name not in self._lost and self.began and (name in self.replicas or name == "trainer-0"):
            self._lost[name] = len(self.faults), core.state.at
            self._fault(core, "trainer" if name == "trainer-0" else "lost", name)
        self._since.pop(worker, None)
        self._pulling.pop(worker, None)
        self._running = None if name == "trainer-0" else self._running

    def _back(self, core: Core, name: WorkerId) -> None:
        place, lost_at = self._lost.pop(name)
        self.faults[place] = self.faults[place]._replace(seconds=core.state.at - lost_at)

    def _on_rank_ready(self, core: Core, event: events.TrainerRankReady) -> None:
        if core.state.trainer.ready and "trainer-0" in self._lost:
            self._back(core, WorkerId("trainer-0"))

    def _on_away(self, core: Core, event: events.ControllerRestarted | events.ControllerPaused) -> None:
        self.away_s += event.away_s
        self._since.clear()

    def _on_hold(self, core: Core, event: events.HoldChanged) -> None:
        self.num_held += event.held

    def _on_amended(self, core: Core, event: events.SettingsChanged) -> None:
        self.num_amended += 1

    # ---- trainer and weights -----------------------------------------------------------------------------------

    def _on_step_finished(self, core: Core, event: events.StepFinished) -> None:
        if self._running is not None:
            began, tokens = self._running
            self._trained.append((event.at - began, tokens))
        self._running, self._free_at = None, event.at

    def _on_shards_written(self, core: Core, event: events.ShardsWritten) -> None:
        began = self._publishing.pop(event.version, None)
        if began is not None:
            self._publish_s.append(event.at - began)
            self._free_at = max(self._free_at, event.at)
            if self._running is not None:  # it waited for this
                self._running = max(self._running[0], event.at), self._running[1]

    def _on_version_ready(self, core: Core, event: events.VersionReady) -> None:
        self._version_bytes = max(1, event.num_bytes)
        self._ready[event.version] = event.at

    def _on_version_held(self, core: Core, event: events.VersionHeld) -> None:
        if event.version in self._ready:
            self._spread_s.append(event.at - self._ready[event.version])

    def _on_checkpoint_saved(self, core: Core, event: events.CheckpointSaved) -> None:
        began = self._saving.pop(event.step, None)
        if began is not None:
            self._saves_s.append(event.at - began)

    # ---- fitted ------------------------------------------------------------------------------------------------

    @property
    def flush_s(self) -> float:
        """How often a replica that generates reports."""
        return median(self._flushes_s) if self._flushes_s else FLUSH_S

    @property
    def checkpoint_s(self) -> float:
        """How long a checkpoint is being written."""
        return _mean(self._saves_s)

    def costs(self) -> Costs | None:
        """After the warm-up, as the figures are. None = nothing was generated, or nothing trained."""
        trained = settled(self._trained)
        if not (self._intervals and trained):
            return None
        seconds = [max(0.0, seconds) for seconds, _ in trained]
        step_s, token_s = fitted([1.0] * len(trained), [float(tokens) for _, tokens in trained], seconds)
        return Costs(
            decode=_decode(settled(self._intervals)),
            step_s=step_s,
            token_s=token_s,
            publish_s=_mean(settled(self._publish_s)),
            pull_s=_mean(settled(self._pulls_s)),
            spread_s=_mean(settled(self._spread_s)),
            version_bytes=self._version_bytes,
        )


T = TypeVar("T")


def settled(values: list[T]) -> list[T]:
    """Without the first ones, while files, caches and compilers warm up."""
    return values[len(values) // WARMUP_SHARE :]


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _decode(intervals: list[Interval]) -> DecodeModel:
    """Seconds over steps and requests (compute), or over steps and KV tokens (memory), whichever explains more."""
    seconds, steps = [i.seconds for i in intervals], [i.steps for i in intervals]
    tokens, kv_steps = [i.tokens for i in intervals], [i.kv_steps for i in intervals]
    by_request, by_kv = fitted(steps, tokens, seconds), fitted(steps, kv_steps, seconds)
    if _error(by_request, steps, tokens, seconds) <= _error(by_kv, steps, kv_steps, seconds):
        return DecodeModel(weights_s=0.0, kv_s=0.0, flops_s=by_request[1], overhead_s=by_request[0])
    return DecodeModel(weights_s=0.0, kv_s=by_kv[1], flops_s=0.0, overhead_s=by_kv[0])


def fitted(first: list[float], second: list[float], seconds: list[float]) -> tuple[float, float]:
    """(a, b), neither negative, for which a · first + b · second comes nearest to seconds, scaled so that the sums are equal."""
    aa, bb = sum(x * x for x in first), sum(y * y for y in second)
    ab = sum(x * y for x, y in zip(first, second, strict=True))
    at, bt = (sum(x * t for x, t in zip(xs, seconds, strict=True)) for xs in (first, second))
    determinant = aa * bb - ab * ab
    a, b = (0.0, 0.0)
    if determinant > 1e-9 * aa * bb:
        a, b = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
    if a < 0.0 or b < 0.0 or (a, b) == (0.0, 0.0):
        only = [((at / aa) if aa else 0.0, 0.0), (0.0, (bt / bb) if bb else 0.0)]
        a, b = min(only, key=lambda pair: _error(pair, first, second, seconds))
    explained = a * sum(first) + b * sum(second)
    scale = sum(seconds) / explained if explained > 0.0 else 1.0
    return a * scale, b * scale


def _error(pair: tuple[float, float], first: list[float], second: list[float], seconds: list[float]) -> float:
    a, b = pair
    return sum((a * x + b * y - t) ** 2 for x, y, t in zip(first, second, seconds, strict=True))
