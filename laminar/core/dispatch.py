"""The dispatch pass: queued siblings go on, then new groups begin while the buffer limit allows.

    queued siblings ──► the destination of their move ──► any replica of their version ──► wait, or start again (`failover`)
    a new group     ──► the least loaded replica that may admit one

Only a replica that takes work is given any (`laminar.core.health`).
"""

from laminar.core import bounds, failover, fleet, groups, health, refresh, relays, story, versions
from laminar.core.decisions import DispatchNew, DispatchQueued
from laminar.core.records import Group, Replica, State
from laminar.core.turn import Turn
from laminar.ids import TrajectoryId

TOO_OLD = "a group of its version could not be trained within max_staleness"


def propose(turn: Turn) -> DispatchNew | DispatchQueued | None:
    """Queued siblings first, then a new group for the least loaded replica that may admit one."""
    if turn.state.stopping:
        return None
    queued = _propose_queued(turn)
    if queued is not None:
        turn.begin_pass()  # started again elsewhere, it leaves room behind
        return queued
    if why_none_begins(turn):
        return None
    replica = turn.next_candidate(
        lambda replica: not why_no_new_group(turn, replica), lambda replica: len(replica.attempts)
    )
    return DispatchNew(worker=replica.id) if replica else None


def gate_is_open(turn: Turn) -> bool:
    """Whether a new group is wanted: neither a limit of the buffer nor the end of the run holds it back."""
    return not held_back_by(turn)


def why_none_begins(turn: Turn) -> str:
    """Why no replica is given a new group, whatever it is like; empty = it is a question of each replica."""
    state = turn.state
    if state.stopping:
        return f"the run is stopping: {state.stopping}"
    return f"nothing can be written: {state.storage_failure}" if state.storage_failure else ""


def wants_room(turn: Turn) -> bool:
    """Whether an emptied replica would soon have something to begin: a full buffer empties with the next batch."""
    return held_back_by(turn) in ("", "ready_groups_max")


def held_back_by(turn: Turn) -> str:
    """The setting whose limit holds new groups back now; empty if none does."""
    state, settings = turn.state, turn.settings
    if settings.ready_groups_max and len(state.buffer) >= settings.ready_groups_max:
        return "ready_groups_max"
    outstanding = num_outstanding(state)
    last_leased = max(max(state.steps, default=0), state.trainer.step)
    last = min(settings.steps, state.stop_after or settings.steps)
    if outstanding >= (last - last_leased) * settings.batch_groups:
        return "steps"
    return "buffer_groups_max" if outstanding >= settings.buffer_groups_max else ""


def why_no_new_group(turn: Turn, replica: Replica) -> str:
    """Why no new group begins on the replica now; empty = one may."""
    size = turn.settings.group_size
    if replica.num_generating + size > max(replica.num_requests_max, size):
        return "it has no room for a whole group"  # the commonest comes first: every dirty replica is asked for every group
    if reason := health.why_no_work(turn.state, replica):
        return reason
    if replica.draining:
        return "an operator takes it out"
    if replica.num_generating == 0 and versions.is_awaited(turn.state, relays.source(turn.state, replica.host)):
        return "it awaits the weights that are being published"
    if replica.id in turn.state.failovers:
        return "it serves an old version"
    assert replica.version is not None
    if replica.leaving:
        return "it is being emptied by a repack"
    if reason := refresh.why_not_admitting(turn, replica):
        return reason
    if limit := held_back_by(turn):
        return f"{limit} holds new groups back"
    return "" if bounds.admits(turn, replica.version) else TOO_OLD


def _propose_queued(turn: Turn) -> DispatchQueued | None:
    for group in turn.state.requeue:
        decision = for_siblings(turn, turn.state.groups[group])
        if not isinstance(decision, str):
            return decision
    return None


def for_siblings(turn: Turn, group: Group) -> DispatchQueued | str:
    """Where the queued siblings of a group go now, or why they have to wait."""
    state, queued = turn.state, groups.queued(turn.state, group)
    expected = _expected(turn, group, queued)
    able = [replica for replica in state.replicas.values() if health.takes_work(state, replica)]
    if expected is not None:
        return expected
    if not able:
        return "no replica takes work"
    holders = [replica for replica in able if replica.version == group.version]
    if holders:
        return _queued_to(holders, group, queued)
    is_gone = not (fleet.may_come_back(state, group.version) or failover.is_possible(turn, group.version))
    scoring = [t for t in queued if state.trajectories[t].finish_reason]
    if scoring and not (is_gone and len(scoring) < len(queued)):
        return _queued_to(able, group, scoring)
    if not is_gone:
        return f"no replica that takes work holds {group.version}, but one may get it, or is coming back with it"
    admitting = [replica for replica in able if not (replica.draining or replica.id in state.failovers)]
    admitting = [replica for replica in admitting if replica.id not in state.draining_to_refresh] or admitting
    if not admitting:
        return f"{group.version} is gone, and no replica may begin them again: all leave, or serve an old version"
    return _queued_to(admitting, group, queued, restart=True)


def _queued_to(able: list[Replica], group: Group, chosen: list[TrajectoryId], restart: bool = False) -> DispatchQueued:
    replica = min(able, key=lambda replica: len(replica.attempts))
    return DispatchQueued(worker=replica.id, group=group.id, trajectories=chosen, restart=restart)


def _expected(turn: Turn, group: Group, queued: list[TrajectoryId]) -> DispatchQueued | None:
    """Queued siblings whose move has a destination that still fits; the others are left to the general rule."""
    for trajectory_id in queued:
        trajectory = turn.state.trajectories[trajectory_id]
        destination = turn.state.replicas.get(trajectory.moving_to) if trajectory.moving_to else None
        if destination and destination.version == group.version and health.takes_work(turn.state, destination):
            together = [t for t in queued if turn.state.trajectories[t].moving_to == destination.id]
            return DispatchQueued(worker=destination.id, group=group.id, trajectories=together, restart=False)
    return None


def apply(turn: Turn, decision: DispatchNew | DispatchQueued) -> str:
    """Start the group's siblings. Why the decision is void (it was held for long, or edited); empty = it is done."""
    replica = turn.state.replicas.get(decision.worker)
    if turn.state.stopping:
        return "the run is stopping"
    if replica is None:
        return f"there is no replica {decision.worker}"
    if reason := health.why_no_work(turn.state, replica):
        return f"{replica.id} is given nothing: {reason}"
    if isinstance(decision, DispatchQueued):
        return _start_queued(turn, replica, decision)
    if reason := why_none_begins(turn) or why_no_new_group(turn, replica):
        return f"no group begins on {replica.id}: {reason}"
    refresh.admit(turn, replica)
    group = groups.open_group(turn)
    _start(turn, replica, group, list(group.trajectories))
    return ""


def _start_queued(turn: Turn, replica: Replica, decision: DispatchQueued) -> str:
    group = turn.state.groups.get(decision.group)
    if group is None or group.id not in turn.state.requeue:
        return f"{story.group(decision.group)} has no queued siblings"
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
    return "" if chosen else f"{replica.id} can go on with none of these siblings, which are of {group.version}"


def _start(turn: Turn, replica: Replica, group: Group, chosen: list[TrajectoryId]) -> None:
    if not replica.num_generating:
        replica.kv_tokens = replica.kv_previous = 0  # it fills up from nothing; what it held before was another peak
    health.given(turn, replica, sum(not turn.state.trajectories[t].finish_reason for t in chosen))
    groups.start(turn, replica, group, chosen)


def num_outstanding(state: State) -> int:
    """Groups in flight or buffered."""
    return len(state.groups) - sum(len(step.groups) for step in state.steps.values())
