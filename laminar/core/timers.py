"""The core's timers: every moment at which something is given up, looked at or begun, if nothing happens before.

Nothing is kept here: a timer is a fact of the state, set where what it limits begins. `Core.next_deadline` is the first of them.
"""

from collections.abc import Iterator

import msgspec

from laminar.core import evaluation, training
from laminar.core.records import State
from laminar.core.settings import Settings


class Timer(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One moment, and what it is."""

    at: float
    """Run time, seconds."""
    what: str
    who: str = ""
    """The worker that it is about, if it is about one."""


def timers(state: State, settings: Settings) -> list[Timer]:
    """All that run, the next one first."""
    return sorted(Timer(at, what, str(who)) for at, what, who in _rows(state, settings) if at)


def next_at(state: State, settings: Settings) -> float | None:
    """Run time of the next one, seconds; None = none runs."""
    return min((row[0] for row in _rows(state, settings) if row[0]), default=None)


def _rows(state: State, settings: Settings) -> Iterator[tuple[float, str, str]]:
    """(moment, what, who); 0 = it does not run. Asked for after every event."""
    if state.finished:
        return
    yield state.repack.next_at, "the next repack check", ""
    yield state.health_check_at, "the next look at the replicas' progress", ""
    yield state.stragglers_at, "a group may go on without its stragglers", ""
    yield state.stall.check_at, "the next look whether the run gets anywhere", ""
    yield training.deadline(state, settings.step_timeout_s), "the trainer's step or checkpoint is given up", ""
    yield evaluation.deadline(state, settings.evaluation_timeout_s), "an evaluation is given up", ""
    if state.stop_by > state.at:
        yield state.stop_by, "a stopped run ends without its last checkpoint", ""
    for record in state.versions[-1:]:
        yield record.deadline, "the publication under way is given up", ""
        yield record.retry_at, "the publication that failed is tried again", ""
        yield record.awaited_until, "idle replicas await the publication no longer", ""
    for worker, restart in state.restarts.items():
        yield restart.due_at, "it is started again", worker
        yield restart.start_by, "its start is given up", worker
    for worker, at in state.pulls.items():
        yield at, "its pull is given up", worker
    for worker, at in state.silent.items():
        yield at, "it is lost unless its channel is back", worker
