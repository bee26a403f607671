"""Replicas: joining, being lost, and the two passes that keep them busy.

A replica admits groups as the refresh policy allows (`laminar.core.refresh`); when nothing of it generates any more and
there is a newer version, it pulls that.

    joined ──► syncing ──► generating ──► (local batch drained, newer version) syncing ──► …
                  └── pull failed ──► what it was before

Only a healthy one is given work (`laminar.core.health`).
"""

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

from laminar.core import bounds, failover, groups, health, limits, recovery, refresh, relays, story, versions
from laminar.core.actions import PullWeights, RaiseAlarm, StopWorker
from laminar.core.decisions import DispatchNew, DispatchQueued, RefreshReplica
from laminar.core.events import DrainRequested, ReplicaJoined, ReplicaRefreshed, ReplicaRefreshFailed
from laminar.core.records import Group, Replica, ReplicaState, State
from laminar.core.turn import Turn
from laminar.ids import TrajectoryId, Version, WorkerId

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
        num_requests_memory_bound=event.num_requests_memory_bound,
        quarantined=event.worker in state.fenced,
    )
    state.silent.pop(event.worker, None)
    state.dirty[event.worker] = None
    state.review_due = True
    recovery.joined(turn, event.worker)
    turn.tell("joined", story.worker(event.worker))


def _refuse(turn: Turn, event: ReplicaJoined, why: str) -> None:
    turn.state.fenced[event.worker] = event.incarnation
    turn.emit(StopWorker(cause=turn.cause, worker=event.worker, incarnation=event.incarnation, reason=why))
    fail_if_none_is_left(turn, event.worker, why)


def lose(turn: Turn, replica: Replica, reason: str) -> None:
    """The replica leaves; its trajectories are queued again, its evaluation too. Without any replica the run fails."""
    _remove(turn, replica, reason)
    recovery.worked(turn, replica.id, replica.progress_at)
    recovery.plan(turn, replica.id, reason)
    fail_if_none_is_left(turn, replica.id, reason)


def fail_if_none_is_left(turn: Turn, last: WorkerId, reason: str) -> None:
    """Without any replica, and without one that may come back, the run cannot go on."""
    if not turn.state.replicas and not recovery.is_expected(turn, "rollout"):
        turn.fail(f"no rollout replica is left; the last one, {last}, was lost: {reason}")


def _remove(turn: Turn, replica: Replica, reason: str, *, lost: bool = True) -> None:
    state = turn.state
    groups.lose_attempts(turn, replica, "replica_lost")
    for trajectory_id in list(replica.incoming):
        groups.unpin(turn, state.trajectories[trajectory_id])
    del state.replicas[replica.id]
    state.failovers.pop(replica.id, None)
    state.pulls.pop(replica.id, None)
    state.superseded.pop(replica.id, None)
    state.review_due = True
    state.dirty.pop(replica.id, None)
    state.silent.pop(replica.id, None)
    state.fenced[replica.id] = max(replica.incarnation, state.fenced.get(replica.id, 0))
    for evaluation in state.evaluations:
        if evaluation.worker == replica.id and not evaluation.done:
            evaluation.worker = None
    state.dirty.update(dict.fromkeys(state.replicas))
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
        turn.emit(RaiseAlarm(cause=turn.cause, name="drain-refused", text=refusal))
        return
    replica = turn.state.replicas[event.worker]
    replica.draining = True
    turn.state.dirty[replica.id] = None
    turn.tell("is drained", story.worker(replica.id))


def release_drained(turn: Turn) -> bool:
    """Replicas that were to leave and have nothing left to do leave. True if there were any."""
    changed = map(turn.state.replicas.__getitem__, turn.state.dirty)
    done = [replica for replica in changed if replica.draining and not replica.attempts and not replica.incoming]
    evaluating = [evaluation.worker for evaluation in turn.state.evaluations if not evaluation.done]
    leaving = [replica for replica in done if replica.id not in evaluating]
    for replica in leaving:
        _remove(turn, replica, "drained", lost=False)
    return bool(leaving)


def on_refreshed(turn: Turn, event: ReplicaRefreshed) -> None:
    """The replica starts a local batch under its new version."""
    replica = _syncing(turn.state, event.worker, event.incarnation, event.version)
    if replica is None:
        return
    replica.version, replica.target = event.version, None
    del turn.state.pulls[replica.id]
    replica.num_failed_pulls, replica.quarantined = 0, False
    turn.state.superseded.pop(replica.id, None)
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


def _next_candidate(turn: Turn, may: Callable[[Replica], bool], load: Callable[[Replica], int]) -> Replica | None:
    """Of the dirty replicas that may, the least loaded, the first among equals.

    One that may not is not asked again in this pass: pulls and new groups take room, they give none to others. So a pass
    over R replicas with D decisions asks R + D times, not R · D.
    """
    replicas = turn.state.replicas
    if turn.candidates is None:
        turn.candidates = [(load(replicas[worker]), place, worker) for place, worker in enumerate(turn.state.dirty)]
        heapify(turn.candidates)
    while turn.candidates:
        known, place, worker = turn.candidates[0]
        replica = replicas[worker]
        if load(replica) != known:
            heapreplace(turn.candidates, (load(replica), place, worker))
        elif may(replica):
            return replica
        else:
            heappop(turn.candidates)
    return None


# ---- the refresh pass --------------------------------------------------------------------------------------


def propose_refresh(turn: Turn) -> RefreshReplica | None:
    """The first replica that has nothing running and is wanted for an old version, or could hold something newer."""
    if turn.state.stopping:
        return None
    replica = _next_candidate(turn, lambda replica: _pull(turn, replica) is not None, lambda replica: 0)
    return _pull(turn, replica) if replica else None


def _pull(turn: Turn, replica: Replica) -> RefreshReplica | None:
    wanted = failover.wanted(turn, replica) or _newer(turn, replica)
    return wanted if wanted and not replica.draining and is_drained(turn, replica) else None


def _newer(turn: Turn, replica: Replica) -> RefreshReplica | None:
    """The newest that its relay has, if it is newer; in quarantine also what it holds already."""
    of_relay = versions.newest_of(relays.source(turn.state, replica.host))
    version = of_relay if replica.quarantined else relays.newer(turn.state, replica)
    return RefreshReplica(worker=replica.id, version=version) if version is not None else None


def is_drained(turn: Turn, replica: Replica) -> bool:
    """Whether nothing generates on it, is on its way to it, or is queued for the version that it holds."""
    if replica.state == ReplicaState.SYNCING or replica.num_generating or replica.id in turn.state.silent:
        return False
    if replica.incoming or replica.suspect:
        return False
    if any(e.worker == replica.id and not e.done for e in turn.state.evaluations):
        return False
    return not (_can_generate(turn, replica) and groups.queued_for(turn, replica))


def apply_refresh(turn: Turn, decision: RefreshReplica) -> None:
    """Start the pull; a decision that no longer fits (it was held for long) is void."""
    state, version = turn.state, decision.version
    replica = state.replicas.get(decision.worker)
    if state.stopping or replica is None or not is_drained(turn, replica):
        return
    if not failover.can_give(turn, replica, version, decision.source):
        return
    if replica.id in state.failovers and state.failovers[replica.id].version != version:
        del state.failovers[replica.id]
    record = versions.find(state, version)
    replica.state, replica.target = ReplicaState.SYNCING, version
    state.pulls[replica.id] = turn.at + turn.settings.refresh_timeout_s
    digest = record.digest if record else ""
    turn.emit(PullWeights(cause=turn.cause, worker=replica.id, version=version, digest=digest, source=decision.source))
    turn.tell(f"pulls {version}", story.worker(replica.id), story.version(version))


# ---- the dispatch pass -------------------------------------------------------------------------------------


def propose_dispatch(turn: Turn) -> DispatchNew | DispatchQueued | None:
    """Queued siblings first, then a new group for the least loaded replica that may admit one."""
    if turn.state.stopping:
        return None
    queued = _propose_queued(turn)
    if queued is not None:
        turn.candidates = None
        return queued
    if turn.state.storage_failure or not (turn.state.dirty and gate_is_open(turn)):
        return None
    replica = _next_candidate(turn, lambda replica: _may_admit(turn, replica), lambda replica: len(replica.attempts))
    return DispatchNew(worker=replica.id) if replica else None


def gate_is_open(turn: Turn) -> bool:
    """Whether a new group is wanted: neither the buffer limit nor the end of the run holds it back."""
    state, settings = turn.state, turn.settings
    last_leased = max(max(state.steps, default=0), state.trainer.step)
    wanted = (settings.steps - last_leased) * settings.batch_groups
    if settings.ready_groups_max and len(state.buffer) >= settings.ready_groups_max:
        return False
    return num_outstanding(state) < min(settings.buffer_groups_max, wanted)


def _may_admit(turn: Turn, replica: Replica) -> bool:
    size = turn.settings.group_size
    if replica.num_generating + size > max(replica.num_requests_max, size):
        return False  # the commonest reason comes first: this is asked of every dirty replica for every new group
    if not _can_generate(turn, replica) or replica.draining:
        return False
    if replica.num_generating == 0 and versions.is_awaited(turn.state, relays.source(turn.state, replica.host)):
        return False
    if replica.id in turn.state.failovers:
        return False
    assert replica.version is not None
    return not replica.leaving and refresh.may_admit(turn, replica) and bounds.admits(turn, replica.version)


def _propose_queued(turn: Turn) -> DispatchQueued | None:
    state = turn.state
    for group_id in state.requeue:
        group = state.groups[group_id]
        queued = groups.queued(state, group)
        expected = _expected(turn, group, queued)
        if expected is not None:
            return expected
        holders = [r for r in state.replicas.values() if r.version == group.version and _can_generate(turn, r)]
        if holders:
            replica = min(holders, key=lambda replica: len(replica.attempts))
            return DispatchQueued(worker=replica.id, group=group_id, trajectories=queued, restart=False)
        scoring = [t for t in queued if state.trajectories[t].finish_reason]
        able = [r for r in state.replicas.values() if _can_generate(turn, r)]
        if not able:
            return None
        replica = min(able, key=lambda replica: len(replica.attempts))
        is_gone = not (may_come_back(state, group.version) or failover.is_possible(turn, group.version))
        if scoring and not (is_gone and len(scoring) < len(queued)):
            return DispatchQueued(worker=replica.id, group=group_id, trajectories=scoring, restart=False)
        able = [r for r in able if r.id not in state.failovers]
        if able and is_gone:
            replica = min(able, key=lambda replica: len(replica.attempts))
            return DispatchQueued(worker=replica.id, group=group_id, trajectories=queued, restart=True)
    return None


def _expected(turn: Turn, group: Group, queued: list[TrajectoryId]) -> DispatchQueued | None:
    """Queued siblings whose move has a destination that still fits; the others are left to the general rule."""
    for trajectory_id in queued:
        trajectory = turn.state.trajectories[trajectory_id]
        destination = turn.state.replicas.get(trajectory.moving_to) if trajectory.moving_to else None
        if destination and destination.version == group.version and _can_generate(turn, destination):
            together = [t for t in queued if turn.state.trajectories[t].moving_to == destination.id]
            return DispatchQueued(worker=destination.id, group=group.id, trajectories=together, restart=False)
    return None


def _can_generate(turn: Turn, replica: Replica) -> bool:
    return replica.state == ReplicaState.GENERATING and health.takes_work(turn.state, replica)


def may_come_back(state: State, version: Version | None) -> bool:
    """Whether a replica that is silent or pulling will hold `version` if all goes well."""
    for replica in state.replicas.values():
        if replica.target == version or (replica.version == version and replica.id in state.silent):
            return True
    return False


def apply_dispatch(turn: Turn, decision: DispatchNew | DispatchQueued) -> None:
    """Start the group's siblings; a decision that no longer fits (it was held for long) is void."""
    replica = turn.state.replicas.get(decision.worker)
    if replica is None or turn.state.stopping or not _can_generate(turn, replica):
        return
    if isinstance(decision, DispatchNew):
        if turn.state.storage_failure or not (gate_is_open(turn) and _may_admit(turn, replica)):
            return
        refresh.admit(turn, replica)
        group = groups.open_group(turn)
        _start(turn, replica, group, list(group.trajectories))
        return
    _start_queued(turn, replica, decision)


def _start_queued(turn: Turn, replica: Replica, decision: DispatchQueued) -> None:
    group = turn.state.groups.get(decision.group)
    if group is None or group.id not in turn.state.requeue:
        return
    queued = groups.queued(turn.state, group)
    chosen = [t for t in decision.trajectories if t in queued]
    if decision.restart:
        chosen = groups.restart(turn, group, "version_gone")
    elif replica.version != group.version:
        chosen = [t for t in chosen if turn.state.trajectories[t].finish_reason]
    failover.count(turn, replica, chosen, decision.restart)
    if chosen:
        _start(turn, replica, group, chosen)
    if not groups.queued(turn.state, group):
        turn.state.requeue.pop(group.id, None)


def _start(turn: Turn, replica: Replica, group: Group, chosen: list[TrajectoryId]) -> None:
    health.given(turn, replica, sum(not turn.state.trajectories[t].finish_reason for t in chosen))
    groups.start(turn, replica, group, chosen)


def num_outstanding(state: State) -> int:
    """Groups in flight or buffered."""
    return len(state.groups) - sum(len(step.groups) for step in state.steps.values())


def interrupt(turn: Turn, reason: str) -> bool:
    """The run ends: everything that no step has leased is dropped. True if there was anything."""
    unleased = [group for group in turn.state.groups.values() if group.step == 0]
    for group in unleased:
        groups.drop_group(turn, group, reason)
    return bool(unleased)
