"""The world around the core: a heap of what happens when, in virtual time. It stamps events, hands out actions, and checks.

    heap ──(at, order)──► event ──► Core.handle ──► actions ──► rollouts, training ──► heap

Invariants: events are stamped 1, 2, 3 … in order of time. After every event, for what it touched: the ledger is closed, and
replicas stay within their limits; `rollouts`, `relays` and `training` check what they are asked for (one version per
trajectory, nothing started or trained twice). Every 10,000 events and at the end: all of `laminar.core.invariants`.
"""

import hashlib
import math
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

import msgspec

from laminar.core import actions, events, invariants, ledger
from laminar.core.engine import Core
from laminar.core.sampling import Sampler
from laminar.core.settings import Settings
from laminar.ids import WorkerId
from laminar.samplers import Samplers
from laminar.sim import midway, samples
from laminar.sim.cluster import Cluster
from laminar.sim.measure import Measures
from laminar.sim.relays import TRAINER_HOST, Relays
from laminar.sim.rollouts import Rollouts
from laminar.sim.training import LAUNCH, Training
from laminar.sim.workload import Workload

CHECK_ALL_EVERY = 10_000  # events; a check of everything costs about as much as some hundred events
STALL_S = 3600.0  # longer than any repair, pause or deadline takes; a run that moves nothing for so long is stuck
EVENTS_MAX = 50_000_000  # a run of months; more means that it does not end
TRAINER = WorkerId("trainer-0/0")


class SimulationError(AssertionError):
    """The core or the world broke an invariant; the message says which, at which event."""


class World:
    """One run, from the first event to FinishRun."""

    def __init__(
        self,
        *,
        settings: Settings,
        cluster: Cluster,
        workload: Workload,
        measures: Measures,
        flush_s: float = 60.0,
        sample_s: float = 5.0,
        sampler: Sampler | None = None,
        traced: bool = False,
        stop_after: int = 0,
        check_every: int = CHECK_ALL_EVERY,
        core: Core | None = None,
    ) -> None:
        """`core`: one that is in the midst of a run, which goes on from there; `settings` count for a run from its beginning."""
        self.core = core or Core(settings)
        self.cluster, self.workload, self.measures = cluster, workload, measures
        self.flush_s, self.sample_s = flush_s, sample_s
        self._configured_flush_s = flush_s
        self.samplers = Samplers(sampler)
        self.check_every, self.stop_after = check_every, stop_after
        """The operator stops the run after so many steps, so that none of them sees its end coming; 0 = never."""
        self.now = 0.0
        self.base = self.core.state.at
        """Run time of `now` = 0: seconds since the epoch, of a recorded run, are too coarse to add up decode steps."""
        self._least_at = 0.0
        """Run time of the last timer: rounding must not let it fire before it is due."""
        self.intercept: Callable[[str, Any], bool] = lambda kind, subject: False
        """The faults' door: called before an answer or outcome; True = it does not happen as planned."""
        self.observe: Callable[[Core, events.AnyEvent, list[actions.AnyAction]], None] = lambda core, event, done: None
        """Shown every event, and what the core answered, before that is acted on."""
        self.trace = hashlib.sha256() if traced else None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._timer_at: float | None = None
        self._begun = False
        self.elapsed_s = 0.0
        """Wall time that it took so far."""
        self.stall_s = STALL_S
        self._moved: tuple[int, ...] = ()
        self._moved_at = 0.0
        self.rollouts = Rollouts(self)
        self.training = Training(self)
        self.relays = Relays(self)
        self._answers = self.rollouts.answers | self.training.answers | self.relays.answers
        self._answers |= {actions.RaiseAlarm: self._on_raise_alarm, actions.FinishRun: lambda action: None}
        self._answers[actions.StartWorker] = self._on_start_worker
        self._answers[actions.StopWorker] = self._on_stop_worker
        self._answers[actions.BreakpointHit] = lambda action: None
        self._answers[actions.UseSampler] = lambda action: self.samplers.use(action.reference)
        self._answers[actions.ReconfigureReplica] = self._on_reconfigure_replica

    # ---- running -----------------------------------------------------------------------------------------------

    def run(self, events_max: int = EVENTS_MAX, until: Callable[[], bool] = lambda: False) -> None:
        """Until the run is over, or `until` is true; then it can be gone on with by another call. Raises SimulationError if an
        invariant breaks, or if nothing can happen any more."""
        began = time.perf_counter()
        if not self._begun:
            self.begin()
        while not (self.core.state.finished or until()):
            if self.core.state.seq > events_max:
                raise SimulationError(f"the run does not end: event {self.core.state.seq}, at {self.now:.1f} s")
            self.happen()
        if self.core.state.finished:
            self.end()
        self.elapsed_s += time.perf_counter() - began

    def happen(self) -> None:
        """Let the next thing happen. Raises SimulationError as `run` does."""
        if not self._heap:
            raise SimulationError(f"nothing can happen any more: event {self.core.state.seq}, at {self.now:.1f} s")
        at, _, happen = heappop(self._heap)
        self.now = max(self.now, at)
        happen()
        if self.now - self._moved_at > self.stall_s:
            self._check_moves()

    @property
    def next_at(self) -> float:
        """When the next thing happens; infinite if nothing will."""
        return self._heap[0][0] if self._heap else math.inf

    def end(self) -> None:
        """The run is over: bring everything up to date, and check it once more."""
        self.close()
        self.rollouts.catch_up()
        self._checked(invariants.check, self.core.state)

    def close(self) -> None:
        """It is not gone on with: no thread is left."""
        self.samplers.close()

    def _check_moves(self) -> None:
        """A run in which no token, trajectory, step or version has come since the last look, long ago, can go no further, unless
        the trainer is at a step that will end."""
        state = self.core.state
        books, trainer = state.ledger, state.trainer
        moved = (books.tokens.total, books.trajectories.total, trainer.step, trainer.branch, trainer.checkpoint)
        is_held = state.held or state.holds  # an operator may take any time
        if moved != self._moved or self.training.free_at > self.now or is_held:
            self._moved, self._moved_at = moved, self.now
            return
        raise SimulationError(
            f"event {state.seq} at {self.now:.1f} s: nothing has moved since {self._moved_at:.1f} s: {self._stuck()}"
        )

    def _stuck(self) -> str:
        """Where everything is, in one line."""
        state = self.core.state
        replicas = [f"{r.id} {r.state} {r.version} at {len(r.attempts)}" for r in state.replicas.values()]
        return (
            f"trainer at {state.trainer.step}, running {state.trainer.running}, ready {state.trainer.ready}; "
            f"{len(state.groups)} groups, {len(state.buffer)} complete, {len(state.requeue)} queued; {'; '.join(replicas)}"
        )

    def begin(self) -> None:
        """The first events: relays, trainer, replicas."""
        self._begun = True
        if self.core.state.started:
            self._checked(midway.begin, self)
            samples.begin(self)
            return
        self.send(events.RunStarted(boot=1))
        self.relays.begin()
        self.send(
            events.TrainerRankReady(worker=TRAINER, incarnation=1, rank=0, world_size=1, step=0, host=TRAINER_HOST)
        )
        self.rollouts.begin()
        samples.begin(self)

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let `happen` happen in so many seconds."""
        self.at(self.now + seconds, happen)

    def at(self, moment: float, happen: Callable[[], None]) -> None:
        """Let `happen` happen at a moment."""
        heappush(self._heap, (moment, next(self._order), happen))

    def send(self, event: events.AnyEvent) -> None:
        """Stamp an event, let the core handle it, check, and act."""
        state = self.core.state
        stamped = msgspec.structs.replace(event, seq=state.seq + 1, at=max(self.base + self.now, self._least_at))
        done = self._checked(self._handle, stamped)
        self.observe(self.core, stamped, done)
        if self.trace is not None:
            self.trace.update(msgspec.msgpack.encode(done))
        for action in done:
            self._answers[type(action)](action)
        self.set_timer()

    def _handle(self, event: events.AnyEvent) -> list[actions.AnyAction]:
        done = self.core.handle(event)
        self._check_touched(event)
        if event.seq % self.check_every == 0:
            invariants.check(self.core.state)
        return done

    def _checked(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except AssertionError as error:
            raise SimulationError(f"event {self.core.state.seq} at {self.now:.3f} s: {error}") from error

    def _check_touched(self, event: events.AnyEvent) -> None:
        books = self.core.state.ledger
        for account in (books.trajectories, books.tokens):
            assert ledger.is_closed(account), f"the ledger is open: {account}"
        replica = self.core.state.replicas.get(getattr(event, "worker", None))  # type: ignore[arg-type]
        if replica is not None:
            assert 0 <= replica.num_generating <= len(replica.attempts), f"{replica.id}: {replica.num_generating}"

    def set_timer(self) -> None:
        """See to it that the core's next timer fires."""
        deadline = self.core.next_deadline()
        if deadline is not None and deadline != self._timer_at:
            self._timer_at = deadline
            self.at(max(deadline - self.base, self.now), lambda: self._fire(deadline))

    def _fire(self, deadline: float) -> None:
        if deadline == self._timer_at:
            self._timer_at, self._least_at = None, deadline
            due = self.core.state.repack.next_at
            if due and due <= max(self.base + self.now, deadline):
                self.rollouts.report_kv()
            self.send(events.TimerFired())

    def _on_start_worker(self, action: actions.StartWorker) -> None:
        if action.worker == LAUNCH:
            self.training.start()
        elif action.worker in self.core.state.relay_hosts.values():
            self.relays.start(action.worker)
        # a replica's launcher starts it by itself

    def _on_stop_worker(self, action: actions.StopWorker) -> None:
        self.relays.stop(action.worker, action.incarnation)
        self.rollouts.stop(action.worker, action.incarnation, action.lost)

    def _on_reconfigure_replica(self, action: actions.ReconfigureReplica) -> None:
        """Simulated replicas flush together: at the interval that was said last of any."""
        self.flush_s = action.flush_interval_s or self._configured_flush_s

    def _on_raise_alarm(self, action: actions.RaiseAlarm) -> None:
        self.measures.faults[f"alarm:{action.name}"] += 1
        self.measures.alarms.setdefault(action.name, action.text)
