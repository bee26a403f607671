"""Siblings whose version no replica holds any more: a replica pulls the old version for them, or they start again.

    no replica of their version ──► a relay holds it ──► the least busy replica of that host drains, pulls it, continues them
                                └─► else the trainer's checkpoint is of it ──► the same by any replica
                                └─► else they start again under a version that a replica holds

Invariants:
* One replica at most serves an old version; it admits no group, and pulls nothing else while siblings of that version are queued.
* Every failed pull takes away the place it came from, so siblings end up continued or started again.
"""

from typing import Literal

from laminar.core import bounds, groups, health, relays, versions
from laminar.core.decisions import RefreshReplica
from laminar.core.records import Replica, ReplicaState
from laminar.core.relay_records import Failover
from laminar.core.turn import Turn
from laminar.ids import TrajectoryId, Version

Source = Literal["relay", "checkpoint"]
ALMOST_IDLE = 8  # a replica that uses an eighth of its places or less decodes at the same speed for nearly nobody


def plan(turn: Turn) -> None:
    """Note which replica is to serve which old version, and let go those that are not needed any more."""
    state = turn.state
    if state.stopping or not (state.requeue or state.failovers):
        return
    needed = _needed(turn)
    for worker, failover in list(state.failovers.items()):
        if not _is_needed(turn, state.replicas[worker], failover, needed):
            end(turn, state.replicas[worker])
    served = dict.fromkeys(failover.version for failover in state.failovers.values())
    for version in needed:
        if version not in served:
            _choose(turn, version)


def end(turn: Turn, replica: Replica) -> None:
    """The replica serves no old version any more, nor is it to."""
    del turn.state.failovers[replica.id]
    turn.state.dirty[replica.id] = None
    turn.state.review_due = True


def _needed(turn: Turn) -> dict[Version, None]:
    """Versions of queued siblings that no replica has or pulls, and may work under again; oldest group first."""
    state, needed = turn.state, dict[Version, None]()
    at_hand = {replica.target: None for replica in state.replicas.values()}
    at_hand |= {r.version: None for r in state.replicas.values() if not (r.suspect or r.quarantined)}
    for group_id in state.requeue:
        group = state.groups[group_id]
        if group.version is None or group.version in at_hand or group.version in needed:
            continue
        if any(not state.trajectories[t].finish_reason for t in groups.queued(state, group)):
            needed[group.version] = None
    return needed


def _is_needed(turn: Turn, replica: Replica, failover: Failover, needed: dict[Version, None]) -> bool:
    state = turn.state
    if replica.suspect or replica.quarantined:
        return False  # it has to pull the newest version first
    if replica.target == failover.version:
        return True
    if replica.version == failover.version:
        busy = replica.num_generating > 0 or groups.queued_for(turn, replica)
        return busy or relays.newer(state, replica) is not None  # what it pulls next ends it
    return failover.version in needed and can_give(turn, replica, failover.version, failover.source)


def _choose(turn: Turn, version: Version) -> None:
    """The least busy of the replicas that are drained or almost idle and could have the version."""
    for replica, source in sorted(_givers(turn, version), key=lambda pair: pair[0].num_generating):
        if replica.num_generating * ALMOST_IDLE <= replica.num_requests_max and _is_free(turn, replica):
            turn.state.failovers[replica.id] = Failover(version=version, source=source)
            turn.state.dirty[replica.id] = None
            turn.state.review_due = True
            return


def _givers(turn: Turn, version: Version) -> list[tuple[Replica, Source]]:
    """Replicas that could have the version from their relay; only if there is none, those that could from a checkpoint."""
    if not _is_worth(turn, version):
        return []
    state = turn.state
    staying = [r for r in state.replicas.values() if not r.draining]
    beside = [r for r in staying if can_give(turn, r, version, "relay")]
    if beside:
        return [(r, "relay") for r in beside]
    return [(r, "checkpoint") for r in staying if can_give(turn, r, version, "checkpoint")]


def _is_worth(turn: Turn, version: Version) -> bool:
    """Whether what is continued under this version could still be trained."""
    bound = turn.settings.max_staleness
    if bound is None:
        return True
    age = versions.staleness(turn.state.branches, turn.trainer_version, version)
    return bounds.chances(turn, age) > 0


def _is_free(turn: Turn, replica: Replica) -> bool:
    state = turn.state
    if replica.state == ReplicaState.SYNCING or not health.is_healthy(state, replica) or replica.id in state.failovers:
        return False
    if replica.incoming or any(e.worker == replica.id and not e.done for e in state.evaluations):
        return False
    return not groups.queued_for(turn, replica)


def is_possible(turn: Turn, version: Version | None) -> bool:
    """Whether siblings of this version are worth waiting for: some replica could pull it, now or when it is less busy."""
    return version is not None and bool(_givers(turn, version))


def can_give(turn: Turn, replica: Replica, version: Version, source: Source) -> bool:
    """Whether the replica can have this version from there."""
    if source == "checkpoint":
        return turn.settings.checkpoint_pulls and turn.state.trainer.checkpoint_version == version
    relay = relays.source(turn.state, replica.host)
    return relay is not None and version in relay.held and versions.find(turn.state, version) is not None


def wanted(turn: Turn, replica: Replica) -> RefreshReplica | None:
    """The pull that makes the replica serve the old version it was chosen for."""
    failover = turn.state.failovers.get(replica.id)
    if failover is None or replica.version == failover.version:
        return None
    return RefreshReplica(worker=replica.id, version=failover.version, source=failover.source)


def give_up(turn: Turn, replica: Replica, version: Version) -> bool:
    """A pull failed. If it was for an old version, it is not tried there again, and not held against the replica. True if so."""
    failover = turn.state.failovers.get(replica.id)
    if failover is None or failover.version != version:
        return False
    end(turn, replica)
    relay = relays.source(turn.state, replica.host)
    if failover.source == "checkpoint":
        turn.state.trainer.checkpoint_version = None
    elif relay is not None and versions.newest_of(relay) == version:
        return False  # an old version that is all its relay has: pulled like any newest one
    elif relay is not None:
        relays.drop(turn, relay, version)
    return True


def count(turn: Turn, replica: Replica, started: list[TrajectoryId], restarted: bool) -> None:
    """Queued siblings are about to start on the replica: say how those go on that had lost theirs."""
    counts, failover = turn.state.num_failovers, turn.state.failovers.get(replica.id)
    restarted |= turn.settings.pinned
    how = "restarted" if restarted else failover.source if failover else "same_version"
    for trajectory in (turn.state.trajectories[t] for t in started):
        setattr(counts, how, getattr(counts, how) + trajectory.displaced)
        trajectory.displaced = False
