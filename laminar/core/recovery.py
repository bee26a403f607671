"""Starting lost workers again: in place, a bounded number of times, with growing pauses; then they are given up.

    lost ──► waiting (backoff · 2^n, at most BACKOFF_MAX_S) ──► starting ──► joined
                                            └─ ended before it joined ──► waiting … ──► given up after `restarts_max`

A replica that still made progress RESET_S after it had joined has its earlier restarts forgiven, for mere life does not count; a
relay, one that got a version so late; a trainer, with its next checkpoint.
"""

from typing import Literal

from laminar.core import story
from laminar.core.actions import RaiseAlarm, StartWorker
from laminar.core.records import Restart, State
from laminar.core.turn import Turn
from laminar.ids import WorkerId

Role = Literal["rollout", "trainer", "relay"]
BACKOFF_MAX_S = 300.0  # what has not come back by then is not helped by a longer pause
RESET_S = 600.0  # crashes ten minutes apart are accidents, not a loop


def plan(turn: Turn, worker: WorkerId, reason: str, role: Role = "rollout") -> bool:
    """The worker is gone: start it again after a pause, unless that has been tried too often. Whether it will be."""
    state, settings = turn.state, turn.settings
    limits: dict[Role, int] = {
        "rollout": settings.restarts_max,
        "trainer": settings.trainer_restarts_max,
        "relay": settings.relay_restarts_max,
    }
    restarts_max = limits[role]
    if state.stopping:
        return False
    record = state.restarts.setdefault(worker, Restart(role=role))
    record.starting, record.start_by, record.joined_at, record.reason = False, 0.0, 0.0, reason
    if record.num >= restarts_max:
        record.due_at, record.evicted = 0.0, True
        if not restarts_max:
            return False
        text = f"{worker} was started again {record.num} times and is given up; the last time: {reason}"
        turn.emit(RaiseAlarm(cause=turn.cause, name="worker-evicted", text=text))
        return False
    record.due_at = turn.at + min(BACKOFF_MAX_S, settings.restart_backoff_s * 2**record.num)
    record.num += 1
    turn.tell(f"will be started again at {record.due_at:.1f}, time {record.num}", story.worker(worker))
    return True


def start_due(turn: Turn) -> None:
    """The pauses that are over."""
    for worker, record in turn.state.restarts.items():
        if record.due_at and record.due_at <= turn.at:
            record.due_at, record.starting = 0.0, True
            record.start_by = turn.at + turn.settings.start_timeout_s if turn.settings.start_timeout_s else 0.0
            if not turn.state.stopping:
                turn.emit(StartWorker(cause=turn.cause, worker=worker))


def overdue(turn: Turn) -> list[WorkerId]:
    """Workers that were started again and have not joined in time."""
    records = turn.state.restarts.items()
    return [worker for worker, record in records if record.start_by and record.start_by <= turn.at]


def joined(turn: Turn, worker: WorkerId) -> None:
    """It is back."""
    record = turn.state.restarts.get(worker)
    if record is not None:
        record.due_at, record.starting, record.joined_at, record.evicted = 0.0, False, turn.at, False
        record.start_by = 0.0


def worked(turn: Turn, worker: WorkerId, until: float) -> None:
    """A replica or relay made its last progress at `until`: see above."""
    record = turn.state.restarts.get(worker)
    if record is not None and record.joined_at and until - record.joined_at > RESET_S:
        forgive(turn, worker)


def forgive(turn: Turn, worker: WorkerId | None) -> None:
    """It has got somewhere: earlier restarts no longer count."""
    record = turn.state.restarts.get(worker) if worker else None
    if record is not None:
        record.num = 0


def role_starting(turn: Turn, worker: WorkerId) -> Role | None:
    """What the worker is, if its end before it joined is the end of a restart."""
    record = turn.state.restarts.get(worker)
    return record.role if record is not None and record.starting else None


def is_waiting(turn: Turn, worker: WorkerId) -> bool:
    """Whether it will be started again, but has not been: what is heard of it is of a process given up."""
    record = turn.state.restarts.get(worker)
    return record is not None and record.due_at > 0


def may_return(state: State, worker: WorkerId) -> bool:
    """Whether a lost worker is started again."""
    record = state.restarts.get(worker)
    return record is not None and bool(record.due_at or record.starting)


def is_expected(turn: Turn, role: Role) -> bool:
    """Whether some lost worker of this role may come back."""
    return any(may_return(turn.state, worker) for worker, r in turn.state.restarts.items() if r.role == role)
