"""The controller was away: it goes on with what its log says, or it stood still for a while.

Workers went on meanwhile; what they had to say comes with their channels, or they count as lost after `reconnect_grace_s`. Time
limits on what others do stand still while nobody listened.
"""

from typing import Literal

from laminar.core import story
from laminar.core.actions import FinishRun
from laminar.core.events import ControllerPaused, ControllerRestarted
from laminar.core.records import State
from laminar.core.training import launch_of, process_of
from laminar.core.turn import Turn
from laminar.ids import WorkerId


def on_restarted(turn: Turn, event: ControllerRestarted) -> None:
    """Every known worker is silent until it is back; a question to a sampler that died with the controller is asked again.

    A run that was over is over: it has yet to be put away.
    """
    state = turn.state
    _shift(state, event.away_s)
    state.boot = event.boot
    deadline = turn.at + turn.settings.reconnect_grace_s
    state.silent = dict.fromkeys(_workers(state), deadline)
    state.sampler_request = None
    state.review_due = True
    turn.tell(f"the controller was away for {event.away_s:.1f} s", *(story.worker(w) for w in state.silent))
    turn.look_again()
    if state.finished:
        turn.emit(FinishRun(cause=turn.cause, reason=state.finished, ok=state.ok))


def on_paused(turn: Turn, event: ControllerPaused) -> None:
    """What others said meanwhile is still to be heard: no limit is over before it is."""
    state = turn.state
    _shift(state, event.away_s)
    state.silent = {worker: _later(at, event.away_s) for worker, at in state.silent.items()}
    turn.tell(f"the controller stood still for {event.away_s:.1f} s")


def next_incarnation(state: State, process: str) -> int:
    """The lowest that a new process of this name may have: a clock that was set back must not make it look like an old one."""
    known = [number for worker, number in state.fenced.items() if process_of(worker) == process]
    return max([0, *known, *workers_of(state, process).values()]) + 1


def what_to_do(state: State, process: str) -> Literal["lost", "start", "nothing"]:
    """With a process of the run's plan that does not live: its workers are lost, it has yet to be one, or it is not wanted (now).

    One that waits to be started again is started by the core's timer. When the run is over none is wanted.
    """
    if state.finished:
        return "nothing"
    if any(process_of(worker) == process for worker in _workers(state)):
        return "lost"
    record = state.restarts.get(launch_of(state, WorkerId(process)))
    if record is not None and (record.due_at or record.evicted):
        return "nothing"
    if record is not None and record.starting:
        return "start"
    return "nothing" if any(process_of(worker) == process for worker in state.fenced) else "start"


def workers_of(state: State, process: str) -> dict[WorkerId, int]:
    """The workers of a process that have joined -> their incarnations."""
    incarnations = {worker: relay.incarnation for worker, relay in state.relays.items()} | state.trainer.ranks
    incarnations |= {worker: replica.incarnation for worker, replica in state.replicas.items()}
    return {worker: number for worker, number in incarnations.items() if process_of(worker) == process}


def _workers(state: State) -> list[WorkerId]:
    return [*state.relays, *state.trainer.ranks, *state.replicas]


def _shift(state: State, seconds: float) -> None:
    """Later by so much: whatever has a moment at which it is over."""
    for record in state.versions[-1:]:
        record.deadline = _later(record.deadline, seconds)
        record.retry_at = _later(record.retry_at, seconds)
        record.awaited_until = _later(record.awaited_until, seconds)
    state.pulls = {worker: _later(at, seconds) for worker, at in state.pulls.items()}
    for restart in state.restarts.values():
        restart.due_at = _later(restart.due_at, seconds)
        restart.start_by = _later(restart.start_by, seconds)
    for evaluation in state.evaluations:
        evaluation.since += seconds
    state.trainer.running_since += seconds
    state.trainer.saving_since += seconds
    state.stall.since += seconds
    state.repack.next_at = _later(state.repack.next_at, seconds)
    state.stop_by = _later(state.stop_by, seconds)


def _later(at: float, seconds: float) -> float:
    """0 = there is none."""
    return at + seconds if at else 0.0
