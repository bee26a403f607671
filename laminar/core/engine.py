"""The one door of the core: `Core.handle(event) -> actions`.

Handlers record facts. Then `_settle` runs the passes until none of them has anything to decide: refresh, repack, dispatch and
sample yield decisions that can be held (`laminar.core.passes`); the rest follows from the facts.
"""

from collections.abc import Callable
from typing import Any

from laminar.core import (
    amend,
    bounds,
    breakpoints,
    checkpointing,
    choice,
    evaluation,
    events,
    failover,
    fleet,
    health,
    limits,
    moves,
    outage,
    passes,
    recovery,
    refresh,
    relays,
    retention,
    snapshot,
    stall,
    storage,
    story,
    stragglers,
    timers,
    training,
    tuning,
    versions,
)
from laminar.core.actions import AnyAction, StopWorker
from laminar.core.decisions import AnyDecision
from laminar.core.records import State
from laminar.core.resume import restore as restore_data
from laminar.core.settings import Settings
from laminar.core.turn import Turn
from laminar.errors import ConfigError
from laminar.ids import WorkerId


class Core:
    """All scheduling state of a run. Not thread-safe; no I/O, no clock, no chance."""

    def __init__(self, settings: Settings, state: State | None = None) -> None:
        """Raises ConfigError for settings with which a run could go no further."""
        self.state = state if state is not None else State()
        self.configured = settings
        self.settings = amend.amended(settings, self.state)
        """What applies now: as configured, with what an operator has changed."""
        too_slow = tuning.why_too_slow(self.state, self.settings.progress_timeout_s)
        if problems := [*limits.problems(self.settings), *([too_slow] if too_slow else [])]:
            raise ConfigError("these settings cannot work:\n  " + "\n  ".join(problems))
        self.story = story.Story()
        self.witness: Callable[[Turn, AnyDecision], None] | None = None
        """Shown each decision before it is applied, and the turn as it is then, in which it changes nothing."""

    @classmethod
    def resumed(cls, settings: Settings, data_state: bytes) -> "Core":
        """A core that goes on from what a checkpoint carried. Raises as for a new one, and msgspec.DecodeError for other bytes."""
        state = State()
        restore_data(state, data_state)
        return cls(settings, state)

    def handle(self, event: events.AnyEvent) -> list[AnyAction]:
        """Take one event, in the order of `seq`; what the shell has to do because of it."""
        state = self.state
        assert event.seq == state.seq + 1, f"event {event.seq} after {state.seq}"
        state.seq = event.seq
        state.at = max(state.at, event.at)
        turn = Turn(state, self.settings, self.story)
        turn.witness = self.witness
        self.story.begin(event)
        if state.skipped:
            state.skipped = {}
            turn.look_again()
        watch = breakpoints.Watch(turn) if state.breakpoints else None
        _HANDLERS[type(event)](turn, event)
        if watch:
            watch.look(turn, event)
        if state.dirty or not isinstance(event, events.ReplicaReported):
            _settle(turn)  # else it is a frame in which nothing ended, as most are: what was settled before still is
        if watch:
            watch.look(turn, None)
        if state.stall.told:
            stall.look(turn)
        self.settings = turn.settings
        return turn.actions

    def next_deadline(self) -> float | None:
        """Run time at which `TimerFired` is due, seconds; None = no timer."""
        return timers.next_at(self.state, self.settings)

    def look(self) -> Turn:
        """A turn in which nothing happens, for what only reads: `laminar.core.waits`, `laminar.core.explain` …"""
        return Turn(self.state, self.settings, self.story)

    def snapshot(self) -> bytes:
        """The whole state."""
        return snapshot.encode(self.state)

    @classmethod
    def restore(cls, settings: Settings, data: bytes) -> "Core":
        """A core that behaves as the one that made the snapshot."""
        return cls(settings, snapshot.decode(data))


# ---- events about workers of any role ----------------------------------------------------------------------


def _on_started(turn: Turn, event: events.RunStarted) -> None:
    turn.state.started, turn.state.boot, turn.state.branch_floor = True, event.boot, event.branch_floor
    moves.trigger(turn)
    stall.begin(turn)


def _on_stop(turn: Turn, event: events.StopRequested) -> None:
    turn.state.stopping = turn.state.stopping or event.reason


def _on_failure(turn: Turn, event: events.FailureReported) -> None:
    turn.fail(event.reason)


def _on_step_finished(turn: Turn, event: events.StepFinished) -> None:
    training.on_step_finished(turn, event)
    moves.trigger(turn)


def _incarnation(state: State, worker: str) -> int:
    replica = state.replicas.get(worker)  # type: ignore[call-overload]
    if replica is not None:
        return int(replica.incarnation)
    if worker in state.relays:
        return int(state.relays[worker].incarnation)  # type: ignore[index]
    return state.trainer.ranks.get(worker, -1)  # type: ignore[call-overload,no-any-return]


def _on_disconnected(turn: Turn, event: events.WorkerDisconnected) -> None:
    if _incarnation(turn.state, event.worker) == event.incarnation:
        turn.state.silent[event.worker] = turn.at + turn.settings.reconnect_grace_s
        turn.tell("channel broke", story.worker(event.worker))


def _on_returned(turn: Turn, event: events.WorkerReturned) -> None:
    if _incarnation(turn.state, event.worker) == event.incarnation:
        turn.state.silent.pop(event.worker, None)
        if event.worker in turn.state.replicas:
            health.returned(turn, turn.state.replicas[event.worker])
        turn.tell("channel is back", story.worker(event.worker))


def _on_lost(turn: Turn, event: events.WorkerLost) -> None:
    known = _incarnation(turn.state, event.worker)
    if turn.state.finished or 0 < event.incarnation <= turn.state.fenced.get(event.worker, 0):
        return  # they were told to stop
    if known < 0 and recovery.is_waiting(turn, training.launch_of(turn.state, event.worker)):
        return
    if known == event.incarnation:
        _lose(turn, event.worker, event.reason)
    elif known < 0 and (role := recovery.role_starting(turn, training.launch_of(turn.state, event.worker))):
        turn.state.fenced[event.worker] = max(event.incarnation, turn.state.fenced.get(event.worker, 0))
        _lose_starting(turn, event.worker, event.reason, role)
    elif known < 0 and turn.state.fenced.get(event.worker, -1) < event.incarnation:
        turn.fail(f"{event.worker} did not start: {event.reason}")


def _lose(turn: Turn, worker: Any, reason: str) -> None:
    state = turn.state
    state.silent.pop(worker, None)
    if worker in state.replicas:
        fleet.lose(turn, state.replicas[worker], reason)
    elif worker in state.trainer.ranks:
        training.lose(turn, worker, reason)
    elif worker in state.relays:
        relays.lose(turn, state.relays[worker], reason)


def _lose_starting(turn: Turn, worker: WorkerId, reason: str, role: recovery.Role) -> None:
    """It was started again and ended before it joined."""
    lose: dict[recovery.Role, Callable[[Turn, WorkerId, str], None]] = {
        "rollout": fleet.lose_starting,
        "trainer": training.lose,
        "relay": relays.lose_starting,
    }
    lose[role](turn, worker, reason)


def _give_up_starting(turn: Turn, worker: WorkerId) -> None:
    """What was started again has not joined in time: whatever it hangs in, another try may not."""
    record = turn.state.restarts[worker]
    reason = f"it was started again and did not join within {turn.settings.start_timeout_s:g} s"
    fenced = turn.state.fenced.get(worker, 0)
    turn.emit(StopWorker(cause=turn.cause, worker=worker, incarnation=fenced, reason=reason))
    _lose_starting(turn, worker, reason, record.role)


def _on_report(turn: Turn, event: events.ReplicaReported) -> None:
    health.on_report(turn, event)
    stragglers.on_report(turn, event)


def _on_timer(turn: Turn, event: events.TimerFired) -> None:
    state = turn.state
    if state.finished:
        return
    for worker in [worker for worker, deadline in state.silent.items() if deadline <= turn.at]:
        _lose(turn, worker, "its channel broke and did not come back")
    for replica in [state.replicas[worker] for worker, deadline in state.pulls.items() if deadline <= turn.at]:
        fleet.lose(turn, replica, f"its pull of {replica.target} did not end")
    versions.check(turn)
    for replica, reason in health.check(turn):
        fleet.lose(turn, replica, reason)
    stragglers.check(turn)
    evaluation.check(turn)
    training.check(turn)
    for late in recovery.overdue(turn):
        _give_up_starting(turn, late)
    recovery.start_due(turn)
    stall.check(turn)
    if state.repack.next_at and state.repack.next_at <= turn.at:
        moves.trigger(turn)


# ---- deciding ----------------------------------------------------------------------------------------------


def _settle(turn: Turn) -> None:
    """Decide until nothing is left to decide. The order matters:

    who is wanted for an evaluation or an old version, and who drains, before anybody pulls; a pull before a move or a new group can
    keep the replica busy; moves before dispatch, which carries them out; what is too old goes before a batch is chosen; a replica
    leaves, and a batch is leased, by what dispatch has left; whatever that makes free, the next round sees.
    """
    state = turn.state
    if state.finished:
        return
    progressed = True
    while progressed and not state.finished:
        evaluation.plan(turn)
        failover.plan(turn)
        if state.review_due:
            state.review_due = False
            refresh.review(turn)
            retention.review(turn)
        progressed = passes.run(turn, "refresh")
        moves.check(turn)
        progressed |= passes.run(turn, "repack")
        progressed |= passes.run(turn, "dispatch")
        progressed |= bounds.sweep(turn)
        progressed |= fleet.release_drained(turn)
        choice.ask(turn)
        progressed |= passes.run(turn, "sample")
        progressed |= training.start_leased(turn)
        progressed |= training.finish(turn)
    state.dirty = {}


_HANDLERS: dict[type, Callable[[Turn, Any], None]] = {
    events.RunStarted: _on_started,
    events.ControllerRestarted: outage.on_restarted,
    events.ControllerPaused: outage.on_paused,
    events.TimerFired: _on_timer,
    events.StopRequested: _on_stop,
    events.FailureReported: _on_failure,
    events.StorageFailed: storage.on_failed,
    events.StorageRecovered: storage.on_recovered,
    events.ReplicaJoined: fleet.on_joined,
    events.WorkerDisconnected: _on_disconnected,
    events.WorkerReturned: _on_returned,
    events.WorkerLost: _on_lost,
    events.ReplicaReported: _on_report,
    events.ReplicaRefreshed: fleet.on_refreshed,
    events.ReplicaRefreshFailed: fleet.on_refresh_failed,
    events.EvaluationFinished: evaluation.on_finished,
    events.EvaluationFailed: evaluation.on_failed,
    events.TrainerRankReady: training.on_rank_ready,
    events.StepFinished: _on_step_finished,
    events.StepFailed: training.on_step_failed,
    events.ShardsWritten: versions.on_shards_written,
    events.CheckpointSaved: checkpointing.on_checkpoint_saved,
    events.CheckpointFailed: checkpointing.on_checkpoint_failed,
    events.RelayJoined: relays.on_joined,
    events.VersionReady: relays.on_ready,
    events.VersionLost: versions.on_lost,
    events.VersionHeld: relays.on_held,
    events.VersionDropped: relays.on_dropped,
    events.LinkBroken: relays.on_link_broken,
    events.LinkSlow: relays.on_link_slow,
    events.SamplerAnswered: choice.on_answered,
    events.DrainRequested: fleet.on_drain,
    events.HoldChanged: passes.on_hold,
    events.DecisionResolved: passes.on_resolved,
    events.DecisionEdited: passes.on_edited,
    events.BreakpointSet: breakpoints.on_set,
    events.BreakpointCleared: breakpoints.on_cleared,
    events.SettingsChanged: amend.on_settings_changed,
    events.SamplerChanged: amend.on_sampler_changed,
    events.ReplicaSettingsChanged: tuning.on_replica_settings,
    events.CheckpointRequested: amend.on_checkpoint_requested,
    events.StopAfterStep: amend.on_stop_after_step,
}
