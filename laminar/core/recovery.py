"""Starting lost replicas again: in place, a bounded number of times, with growing pauses; then they are evicted.

    lost ──► waiting (backoff · 2^n) ──► starting ──► joined
                                            └─ ended before it joined ──► waiting … ──► evicted after `restarts_max`

A replica that lived for RESET_S before it was lost has its earlier restarts forgiven.
"""

from laminar.core import story
from laminar.core.actions import RaiseAlarm, StartWorker
from laminar.core.records import Restart
from laminar.core.turn import Turn
from laminar.ids import WorkerId

RESET_S = 600.0  # crashes ten minutes apart are accidents, not a loop


def plan(turn: Turn, worker: WorkerId, reason: str) -> None:
    """The worker is gone: start it again after a pause, unless that has been tried too often."""
    state, settings = turn.state, turn.settings
    if not settings.restarts_max or state.stopping:
        return
    record = state.restarts.setdefault(worker, Restart())
    if record.joined_at and turn.at - record.joined_at > RESET_S:
        record.num = 0
    record.starting, record.joined_at = False, 0.0
    if record.num >= settings.restarts_max:
        record.due_at = 0.0
        text = f"{worker} was started again {record.num} times and is given up; the last time: {reason}"
        turn.emit(RaiseAlarm(cause=turn.cause, name="worker-evicted", text=text))
        return
    record.due_at = turn.at + settings.restart_backoff_s * 2**record.num
    record.num += 1
    turn.tell(f"will be started again at {record.due_at:.1f}, time {record.num}", story.worker(worker))


def start_due(turn: Turn) -> None:
    """The pauses that are over."""
    for worker, record in turn.state.restarts.items():
        if record.due_at and record.due_at <= turn.at:
            record.due_at, record.starting = 0.0, True
            if not turn.state.stopping:
                turn.emit(StartWorker(cause=turn.cause, worker=worker))


def joined(turn: Turn, worker: WorkerId) -> None:
    """It is back."""
    record = turn.state.restarts.get(worker)
    if record is not None:
        record.due_at, record.starting, record.joined_at = 0.0, False, turn.at


def is_starting(turn: Turn, worker: WorkerId) -> bool:
    """Whether its end before it joined is the end of a restart."""
    record = turn.state.restarts.get(worker)
    return record is not None and record.starting


def is_expected(turn: Turn) -> bool:
    """Whether some lost replica may come back."""
    return any(record.due_at or record.starting for record in turn.state.restarts.values())
