"""The dispatch pass: queued siblings go on, then new groups begin while the buffer limit allows.

    queued siblings ──► the destination of their move ──► any replica of their version ──► wait, or start again (`failover`)
    a new group     ──► the least loaded replica that may admit one

Only a replica that takes work is given any (`laminar.core.health`).
"""

from laminar.core import bounds, failover, fleet, groups, health, refresh, relays, versions
from laminar.core.decisions import DispatchNew, DispatchQueued
from laminar.core.records import Group, Replica, State
from laminar.core.turn import Turn
from laminar.ids import TrajectoryId


def propose(turn: Turn) -> DispatchNew | DispatchQueued | None:
    """Queued siblings first, then a new group for the least loaded replica that may admit one."""
    if turn.state.stopping:
        return None
    queued = _propose_queued(turn)
    if queued is not None:
        turn.begin_pass()  # started again elsewhere, it leaves room behind
        return queued
    if turn.state.storage_failure:
        return None
    replica = turn.next_candidate(lambda replica: _may_admit(turn, replica), lambda replica: len(replica.attempts))
    return DispatchNew(worker=replica.id) if replica else None


def gate_is_open(turn: Turn) -> bool:
    """Whether a new group is wanted: neither a limit of the buffer nor the end of the run holds it back."""
    return not held_back_by(turn)


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
    if outstanding >= (settings.steps - last_leased) * settings.batch_groups:
        return "steps"
    return "buffer_groups_max" if outstanding >= settings.buffer_groups_max else ""


def _may_admit(turn: Turn, replica: Replica) -> bool:
    size = turn.settings.group_size
    if replica.num_generating + size > max(replica.num_requests_max, size):
        return False  # the commonest reason comes first: this is asked of every dirty replica for every new group
    if not health.takes_work(turn.state, replica) or replica.draining:
        return False
    if replica.num_generating == 0 and versions.is_awaited(turn.state, relays.source(turn.state, replica.host)):
        return False
    if replica.id in turn.state.failovers:
        return False
    assert replica.version is not None
    if replica.leaving or not refresh.may_admit(turn, replica):
        return False
    return gate_is_open(turn) and bounds.admits(turn, replica.version)


def _propose_queued(turn: Turn) -> DispatchQueued | None:
    for group in turn.state.requeue:
        decision = _for_siblings(turn, turn.state.groups[group])
        if decision is not None:
            return decision
    return None


def _for_siblings(turn: Turn, group: Group) -> DispatchQueued | None:
    """Where the queued siblings of a group go now; None while they have to wait."""
    state, queued = turn.state, groups.queued(turn.state, group)
    expected = _expected(turn, group, queued)
    able = [replica for replica in state.replicas.values() if health.takes_work(state, replica)]
    if expected is not None or not able:
        return expected
    holders = [replica for replica in able if replica.version == group.version]
    if holders:
        return _queued_to(holders, group, queued)
    is_gone = not (fleet.may_come_back(state, group.version) or failover.is_possible(turn, group.version))
    scoring = [t for t in queued if state.trajectories[t].finish_reason]
    if scoring and not (is_gone and len(scoring) < len(queued)):
        return _queued_to(able, group, scoring)
    admitting = [replica for replica in able if not (replica.draining or replica.id in state.failovers)]
    admitting = [replica for replica in admitting if replica.id not in state.draining_to_refresh] or admitting
    return _queued_to(admitting, group, queued, restart=True) if admitting and is_gone else None


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


def apply(turn: Turn, decision: DispatchNew | DispatchQueued) -> None:
    """Start the group's siblings; a decision that no longer fits (it was held for long) is void."""
    replica = turn.state.replicas.get(decision.worker)
    if replica is None or turn.state.stopping or not health.takes_work(turn.state, replica):
        return
    if isinstance(decision, DispatchNew):
        if turn.state.storage_failure or not _may_admit(turn, replica):
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
    if not replica.num_generating:
        replica.kv_tokens = replica.kv_previous = 0  # it fills up from nothing; what it held before was another peak
    health.given(turn, replica, sum(not turn.state.trajectories[t].finish_reason for t in chosen))
    groups.start(turn, replica, group, chosen)


def num_outstanding(state: State) -> int:
    """Groups in flight or buffered."""
    return len(state.groups) - sum(len(step.groups) for step in state.steps.values())
