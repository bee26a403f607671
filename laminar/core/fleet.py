"""Replicas: joining, leaving, being lost, and the refresh pass.

A replica admits groups (`laminar.core.dispatch`) as the refresh policy allows (`laminar.core.refresh`); when nothing of it
generates any more and there is a newer version, it pulls that.

    joined ──► syncing ──► generating ──► (local batch drained, newer version) syncing ──► …
                  └── pull failed ──► what it was before

Only a healthy one is given work (`laminar.core.health`).
"""

from laminar.core import failover, groups, health, limits, recovery, relays, story, tuning, versions
from laminar.core.actions import PullWeights, RaiseAlarm, StopWorker
from laminar.core.decisions import RefreshReplica
from laminar.core.events import DrainRequested, ReplicaJoined, ReplicaRefreshed, ReplicaRefreshFailed
from laminar.core.records import Replica, ReplicaState, State
from laminar.core.turn import Turn
from laminar.ids import Version, WorkerId

PULL_FAILURES_MAX = 3  # a relay slot recycled in mid-request may fail one pull, not three


def on_joined(turn: Turn, event: ReplicaJoined) -> None:
    """A new process takes the place of an older one of the same name; an older one than that is fenced off."""
    state = turn.state
    known = state.replicas.get(event.worker)
    if known and event.incarnation == known.incarnation:
        return
    newest_known = max(known.incarnation if known else 0, state.fenced.get(event.worker, 0))
    if event.incarnation <= newest_known:
        reason = "this process was given up, or a newer one of its name was already here"
        turn.emit(StopWorker(cause=turn.cause, worker=event.worker, incarnation=event.incarnation, reason=reason))
        return
    if known:
        _remove(turn, known, "replaced by a new process")
    if why := limits.refusal(turn.settings, event.num_requests_max, event.kv_tokens_max):
        _refuse(turn, event, why)
        return
    state.replicas[event.worker] = Replica(
        id=event.worker,
        incarnation=event.incarnation,
        host=event.host,
        num_requests_max=event.num_requests_max,
        kv_tokens_max=event.kv_tokens_max,
        num_requests_able=event.num_requests_max,
        num_requests_memory_bound=event.num_requests_memory_bound,
        quarantined=event.worker in state.fenced,
    )
    state.silent.pop(event.worker, None)
    state.dirty[event.worker] = None
    state.review_due = True
    recovery.joined(turn, event.worker)
    turn.tell("joined", story.worker(event.worker))
    tuning.joined(turn, state.replicas[event.worker])


def _refuse(turn: Turn, event: ReplicaJoined, why: str) -> None:
    turn.state.fenced[event.worker] = event.incarnation
    turn.emit(StopWorker(cause=turn.cause, worker=event.worker, incarnation=event.incarnation, reason=why))
    _keep_one_that_admits(turn, event.worker, why)


def lose(turn: Turn, replica: Replica, reason: str) -> None:
    """The replica leaves; its trajectories are queued again, its evaluation too. Without any replica the run fails."""
    _remove(turn, replica, reason)
    recovery.worked(turn, replica.id, replica.progress_at)
    lose_starting(turn, replica.id, reason)


def lose_starting(turn: Turn, worker: WorkerId, reason: str) -> None:
    """It is not there: start it again, or do without it."""
    recovery.plan(turn, worker, reason)
    _keep_one_that_admits(turn, worker, reason)


def _keep_one_that_admits(turn: Turn, last: WorkerId, reason: str) -> None:
    """If no replica that admits is left or may come back, one that was to leave stays; without any, the run has failed."""
    state = turn.state
    leaving = [replica for replica in state.replicas.values() if replica.draining]
    if state.stopping or len(leaving) < len(state.replicas) or recovery.is_expected(turn, "rollout"):
        return
    if not leaving:
        turn.fail(f"no rollout replica is left; the last one, {last}, was lost: {reason}")
        return
    leaving[0].draining = False
    state.dirty[leaving[0].id] = None
    text = f"{leaving[0].id} stays: it is the last replica that could admit groups, since {last} was lost: {reason}"
    turn.emit(RaiseAlarm(cause=turn.cause, name="drain-refused", text=text))
    turn.tell("stays", story.worker(leaving[0].id))


def _remove(turn: Turn, replica: Replica, reason: str, *, lost: bool = True) -> None:
    state = turn.state
    groups.lose_attempts(turn, replica, "replica_lost")
    for trajectory_id in list(replica.incoming):
        groups.unpin(turn, state.trajectories[trajectory_id])
    del state.replicas[replica.id]
    state.failovers.pop(replica.id, None)
    state.pulls.pop(replica.id, None)
    state.draining_to_refresh.pop(replica.id, None)
    state.review_due = True
    state.dirty.pop(replica.id, None)
    state.silent.pop(replica.id, None)
    state.fenced[replica.id] = max(replica.incarnation, state.fenced.get(replica.id, 0))
    for evaluation in state.evaluations:
        if evaluation.worker == replica.id and not evaluation.done:
            evaluation.worker = None
    turn.look_again()
    turn.emit(
        StopWorker(cause=turn.cause, worker=replica.id, incarnation=replica.incarnation, reason=reason, lost=lost)
    )
    turn.tell(f"{'lost' if lost else 'leaves'}: {reason}", story.worker(replica.id))


def why_not_drained(state: State, worker: WorkerId) -> str:
    """Why a replica would not be drained; empty = it would. The last one that admits is kept: the run could not go on."""
    if worker not in state.replicas:
        return f"{worker} is not drained: there is no such replica"
    if all(replica.draining for replica in state.replicas.values() if replica.id != worker):
        return f"{worker} is not drained: it is the last replica that admits groups"
    return ""


def on_drain(turn: Turn, event: DrainRequested) -> None:
    """The replica admits nothing more, if it can be spared."""
    refusal = why_not_drained(turn.state, event.worker)
    if refusal:
        turn.refuse("drain", refusal)
        return
    replica = turn.state.replicas[event.worker]
    replica.draining = True
    turn.state.review_due = True
    turn.state.dirty[replica.id] = None
    turn.tell("is drained", story.worker(replica.id))


def release_drained(turn: Turn) -> bool:
    """Replicas that were to leave and have nothing left to do leave. True if there were any."""
    replicas = turn.state.replicas
    leaving = [replicas[worker] for worker in turn.state.dirty if replicas[worker].draining]
    done = [replica for replica in leaving if not (replica.attempts or replica.incoming)]
    if not done:
        return False
    evaluating = [evaluation.worker for evaluation in turn.state.evaluations if not evaluation.done]
    free = [replica for replica in done if replica.id not in evaluating]
    for replica in free:
        _remove(turn, replica, "drained", lost=False)
    return bool(free)


def on_refreshed(turn: Turn, event: ReplicaRefreshed) -> None:
    """The replica starts a local batch under its new version."""
    replica = _syncing(turn.state, event.worker, event.incarnation, event.version)
    if replica is None:
        return
    replica.version, replica.target = event.version, None
    del turn.state.pulls[replica.id]
    replica.num_failed_pulls, replica.quarantined = 0, False
    turn.state.draining_to_refresh.pop(replica.id, None)
    turn.state.review_due = True
    replica.state = ReplicaState.GENERATING
    replica.admit_left = 0 if replica.id in turn.state.failovers else turn.settings.local_batch_groups
    turn.state.dirty[replica.id] = None
    turn.tell(f"holds {event.version}", story.worker(replica.id), story.version(event.version))


def on_refresh_failed(turn: Turn, event: ReplicaRefreshFailed) -> None:
    """It holds what it had and tries again, with the newest version of that moment; it is lost after a few in a row."""
    replica = _syncing(turn.state, event.worker, event.incarnation, event.version)
    if replica is None:
        return
    replica.target = None
    del turn.state.pulls[replica.id]
    replica.num_failed_pulls += not failover.give_up(turn, replica, event.version)
    turn.tell(f"pull of {event.version} failed: {event.reason}", story.worker(replica.id))
    if replica.num_failed_pulls >= PULL_FAILURES_MAX:
        lose(turn, replica, f"{replica.num_failed_pulls} pulls in a row failed, the last: {event.reason}")
        return
    replica.state = ReplicaState.GENERATING if replica.version else ReplicaState.JOINED
    replica.admit_left = turn.settings.local_batch_groups
    turn.state.dirty[replica.id] = None


def _syncing(state: State, worker: WorkerId, incarnation: int, version: Version) -> Replica | None:
    replica = state.replicas.get(worker)
    if replica is None or replica.incarnation != incarnation or replica.target != version:
        return None
    return replica


def may_come_back(state: State, version: Version | None) -> bool:
    """Whether a replica that is silent or pulling will hold `version` if all goes well."""
    for replica in state.replicas.values():
        if replica.target == version or (replica.version == version and replica.id in state.silent):
            return True
    return False


# ---- the refresh pass --------------------------------------------------------------------------------------


def propose_refresh(turn: Turn) -> RefreshReplica | None:
    """The first replica that has nothing running and is wanted for an old version, or could hold something newer."""
    if turn.state.stopping:
        return None
    replica = turn.next_candidate(lambda replica: _pull(turn, replica) is not None, lambda replica: 0)
    return _pull(turn, replica) if replica else None


def _pull(turn: Turn, replica: Replica) -> RefreshReplica | None:
    if replica.draining or not is_drained(turn, replica):
        return None
    return failover.wanted(turn, replica) or _newer(turn, replica)


def _newer(turn: Turn, replica: Replica) -> RefreshReplica | None:
    """The newest that its relay has, if it is newer; in quarantine also what it holds already."""
    of_relay = versions.newest_of(relays.source(turn.state, replica.host))
    version = of_relay if replica.quarantined else relays.newer(turn.state, replica)
    return RefreshReplica(worker=replica.id, version=version) if version is not None else None


def is_drained(turn: Turn, replica: Replica) -> bool:
    """Whether nothing generates on it, is on its way to it, or is queued for the version that it holds."""
    return not why_occupied(turn, replica)


def why_occupied(turn: Turn, replica: Replica) -> str:
    """What keeps its version on the replica, so that it may not pull another; empty = nothing."""
    if replica.num_generating:
        return "trajectories generate on it"
    if replica.state == ReplicaState.SYNCING:
        return "a pull is under way"
    if replica.id in turn.state.silent:
        return "its channel is broken"
    if replica.incoming:
        return "trajectories are on their way to it"
    if replica.suspect:
        return "it is suspect"
    if any(e.worker == replica.id and not e.done for e in turn.state.evaluations):
        return "it evaluates"
    if health.takes_work(turn.state, replica) and groups.queued_for(turn, replica):
        return "siblings of its version are queued"
    return ""


def why_no_pull(turn: Turn, replica: Replica) -> str:
    """Why the replica pulls nothing now; empty = the refresh pass lets it."""
    if turn.state.stopping:
        return f"the run is stopping: {turn.state.stopping}"
    if replica.draining:
        return "an operator takes it out"
    if reason := why_occupied(turn, replica):
        return reason
    return "" if _pull(turn, replica) else "there is nothing newer for it at its relay"


def apply_refresh(turn: Turn, decision: RefreshReplica) -> str:
    """Start the pull. Why the decision is void (it was held for long, or edited); empty = it is done."""
    state, version = turn.state, decision.version
    replica = state.replicas.get(decision.worker)
    if state.stopping:
        return "the run is stopping"
    if replica is None:
        return f"there is no replica {decision.worker}"
    if reason := why_occupied(turn, replica):
        return f"{replica.id} cannot pull now: {reason}"
    if not failover.can_give(turn, replica, version, decision.source):
        return f"no {decision.source} can give {version} to {replica.id}"
    if replica.id in state.failovers and state.failovers[replica.id].version != version:
        failover.end(turn, replica)
    record = versions.find(state, version)
    replica.state, replica.target = ReplicaState.SYNCING, version
    state.pulls[replica.id] = turn.at + turn.settings.refresh_timeout_s
    digest = record.digest if record else ""
    turn.emit(PullWeights(cause=turn.cause, worker=replica.id, version=version, digest=digest, source=decision.source))
    turn.tell(f"pulls {version}", story.worker(replica.id), story.version(version))
    return ""
