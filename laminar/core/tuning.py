"""What an operator changes of single replicas while a run goes on: how often they flush, and how much each is given at once.

A replica's worker is told its flush interval, again whenever a new process of it joins. How many requests it has at once is up to
the core alone, which gives it all of them: a lower limit holds new groups and moves back until enough of what it has is done.
"""

from laminar.core import story
from laminar.core.actions import ReconfigureReplica
from laminar.core.events import ReplicaSettingsChanged
from laminar.core.operator_records import ReplicaSettings
from laminar.core.records import Replica, State
from laminar.core.turn import Turn
from laminar.ids import WorkerId

EVERYBODY = WorkerId("")
KEYS = {"rollout.flush_interval_s": "flush_interval_s", "rollout.max_concurrent": "num_requests_max"}
"""Key of the configuration -> what of a replica's settings takes its place."""
FLUSH_MAX_S = 60.0  # a move, a drain or an abort is as slow as that
FLUSHES_PER_TIMEOUT = (
    4  # a replica has to give tokens so often before it can be called suspect; as in laminar.configrules
)


def of_replica(state: State, worker: WorkerId) -> ReplicaSettings:
    """What applies to a replica: its own, where it has any, else everybody's."""
    everybody = state.replica_settings.get(EVERYBODY, ReplicaSettings())
    own = state.replica_settings.get(worker, ReplicaSettings())
    return ReplicaSettings(
        flush_interval_s=own.flush_interval_s or everybody.flush_interval_s,
        num_requests_max=own.num_requests_max or everybody.num_requests_max,
    )


def why_not_reconfigured(turn: Turn, event: ReplicaSettingsChanged) -> str:
    """Why a replica's settings do not become so; empty = they do."""
    state, flush_s, num = turn.state, event.flush_interval_s, event.num_requests_max
    replica = state.replicas.get(event.worker)
    if event.worker != EVERYBODY and replica is None:
        return f"there is no replica {event.worker}; there are: {', '.join(state.replicas) or 'none'}"
    if flush_s is None and num is None:
        return "neither a flush interval nor a number of requests is named"
    if flush_s is not None and not 0 <= flush_s <= FLUSH_MAX_S:
        return f"flush_interval_s = {flush_s:g}: above 0 and at most {FLUSH_MAX_S:g} s (0 = as configured)"
    timeout_s = turn.settings.progress_timeout_s
    if flush_s is not None and 0 < timeout_s < FLUSHES_PER_TIMEOUT * flush_s:
        return f"flush_interval_s = {flush_s:g}: {_too_slow(timeout_s)}"
    if num is not None and num < 0:
        return f"num_requests_max = {num}: at least 1 (0 = as it was started)"
    if num is not None and replica is not None and num > replica.num_requests_able:
        return f"num_requests_max = {num}: {replica.id} was started for {replica.num_requests_able} at once"
    return ""


def on_replica_settings(turn: Turn, event: ReplicaSettingsChanged) -> None:
    """The worker is told how often it flushes; how much it is given is up to the core alone."""
    if refusal := why_not_reconfigured(turn, event):
        turn.refuse("replica-settings", refusal)
        return
    state = turn.state
    known = state.replica_settings.get(event.worker, ReplicaSettings())
    state.replica_settings[event.worker] = ReplicaSettings(
        flush_interval_s=known.flush_interval_s if event.flush_interval_s is None else event.flush_interval_s,
        num_requests_max=known.num_requests_max if event.num_requests_max is None else event.num_requests_max,
    )
    for replica in state.replicas.values():
        if event.worker in (EVERYBODY, replica.id):
            _apply(turn, replica, tell=event.flush_interval_s is not None)
    turn.look_again()


def joined(turn: Turn, replica: Replica) -> None:
    """A new process of a replica knows nothing of what was changed."""
    if turn.state.replica_settings:
        _apply(turn, replica, tell=of_replica(turn.state, replica.id).flush_interval_s > 0)


def _apply(turn: Turn, replica: Replica, *, tell: bool) -> None:
    """Let what was changed apply to a replica; `tell` it how often to flush."""
    wanted = of_replica(turn.state, replica.id)
    replica.num_requests_max = min(wanted.num_requests_max or replica.num_requests_able, replica.num_requests_able)
    if tell:
        turn.emit(ReconfigureReplica(cause=turn.cause, worker=replica.id, flush_interval_s=wanted.flush_interval_s))
        turn.tell(f"is to flush every {wanted.flush_interval_s:g} s (0 = as configured)", story.worker(replica.id))


def why_too_slow(state: State, progress_timeout_s: float) -> str:
    """Why replicas would be suspect between two flushes with this time limit; empty = they would not."""
    slowest = max((each.flush_interval_s for each in state.replica_settings.values()), default=0.0)
    if not 0 < progress_timeout_s < FLUSHES_PER_TIMEOUT * slowest:
        return ""
    return f"progress_timeout_s = {progress_timeout_s:g}: a replica flushes every {slowest:g} s; {_too_slow(progress_timeout_s)}"


def _too_slow(timeout_s: float) -> str:
    return (
        f"one that gives no tokens for {timeout_s:g} s is suspect, and has to flush {FLUSHES_PER_TIMEOUT} times by then"
    )
