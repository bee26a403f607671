"""Whether the run gets anywhere: if nothing useful happens for `stall_after_s` although something is to do, people are told, once.

    watched ──(no progress for stall_after_s)──► stalled ──(progress)──► watched

*Useful* is a token (of an evaluation, too), a trajectory that ends, a group leased, committed or dropped, a train step, a
checkpoint, a version made readable, a pull. The clock stands still, and does not begin, while

* no replica has got weights since the run began: workers start, models load and compile, within `start_timeout_s`;
* the run is stopping, or nothing can be written: both are told, and have limits of their own;
* an operator or a breakpoint holds a pass without which a run stands still;
* the trainer works on a step and has not taken `SLOW_STEP` times as long as its steps take: large steps are slow.

Nothing is done about a stall but telling (`Stalled`, which makes the shell write down who waits for what): whatever can be mended
has a time limit where it is waited for.
"""

from laminar.core import holds, pace
from laminar.core.actions import RaiseAlarm, Stalled
from laminar.core.records import State
from laminar.core.turn import Turn

CHECKS_PER_LIMIT = 4  # a stall found out a quarter later than at once costs nothing
SLOW_STEP = 3.0


def progress(state: State) -> tuple[float, ...]:
    """Counts that change when something useful happens: O(replicas)."""
    trajectories = state.ledger.trajectories
    return (
        state.ledger.tokens.total,
        trajectories.committed,
        trajectories.buffered,
        trajectories.leased,
        sum(trajectories.dropped.values()),
        state.trainer.step,
        state.trainer.branch,
        state.trainer.checkpoint,
        sum(record.ready for record in state.versions),
        sum(replica.version is not None for replica in state.replicas.values()),
        sum(len(replica.attempts) for replica in state.replicas.values()),
        max((replica.progress_at for replica in state.replicas.values()), default=0.0),
        sum(evaluation.done for evaluation in state.evaluations),
    )


def begin(turn: Turn) -> None:
    """Watch from now on."""
    record, limit_s = turn.state.stall, turn.settings.stall_after_s
    record.since = turn.at
    record.check_at = turn.at + limit_s / CHECKS_PER_LIMIT if limit_s else 0.0


def check(turn: Turn) -> None:
    """If due, look whether anything has changed; tell people if nothing has for too long."""
    record, limit_s = turn.state.stall, turn.settings.stall_after_s
    if not record.check_at or record.check_at > turn.at:
        return
    late_s = turn.at - record.check_at
    if late_s > limit_s / CHECKS_PER_LIMIT:
        record.since = min(turn.at, record.since + late_s)  # the controller itself was not listening
    record.check_at = turn.at + limit_s / CHECKS_PER_LIMIT
    if is_excused(turn):
        record.since = turn.at
    seen = progress(turn.state)
    if seen != record.progress:
        record.progress, record.since = seen, turn.at
    elif not record.told and turn.at - record.since >= limit_s:
        _tell(turn)


def look(turn: Turn) -> None:
    """After an event: whether a stall that people were told of is over."""
    record = turn.state.stall
    if record.told and (progress(turn.state) != record.progress or turn.state.stopping):
        lasted_s = turn.at - record.since
        record.told, record.since, record.progress = False, turn.at, progress(turn.state)
        text = f"something happens again, after {lasted_s:.0f} s without"
        turn.emit(RaiseAlarm(cause=turn.cause, name="stall-over", text=text))


def is_excused(turn: Turn) -> bool:
    """Whether there is a good reason for nothing to happen (the list above)."""
    state = turn.state
    if state.stopping or state.storage_failure or holds.keeps_still(state):
        return True
    if not any(replica.version is not None for replica in state.replicas.values()) and not state.ledger.tokens.total:
        return True
    running_s = turn.at - state.trainer.running_since
    return state.trainer.running > 0 and running_s < SLOW_STEP * pace.seconds_per_step(state.pace)


def _tell(turn: Turn) -> None:
    record = turn.state.stall
    record.told = True
    stalled_s = turn.at - record.since
    what = f"no token came, no step ended and no version was published for {stalled_s:.0f} s"
    text = f"{what}; who waits for what: logs/why-stalled-*.txt"
    turn.emit(RaiseAlarm(cause=turn.cause, name="stalled", text=text))
    turn.emit(Stalled(cause=turn.cause, since=record.since))
