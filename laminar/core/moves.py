"""Repacking carried out: when it is checked, and how a trajectory moves from one replica to another.

    check ──► Repack decision ──► AbortAttempts at the source ──► its last tokens and `aborted` ──► attempt + 1 at the destination

Invariants:
* From the decision until it starts there, a moving trajectory pins its destination: no pull, KV reserved.
* The source's word ends the attempt: a trajectory that finishes first is finished, the move is off.
* If the destination is lost or no longer fits, the trajectory is queued like any other of its version.
"""

from laminar.core import groups, health, repack, story
from laminar.core.actions import AbortAttempts
from laminar.core.decisions import Repack, Transfer
from laminar.core.records import Replica, ReplicaState, TrajectoryState
from laminar.core.turn import Turn
from laminar.ids import TrajectoryId


def trigger(turn: Turn) -> None:
    """A check is due: the period is over, or a train step has finished."""
    if turn.settings.repack_interval_s:
        turn.state.repack.due = True
        turn.state.repack.next_at = turn.at + turn.settings.repack_interval_s


def check(turn: Turn) -> None:
    """If due: plan, and keep the explanation."""
    record = turn.state.repack
    if not record.due or turn.state.stopping:
        return
    record.due = False
    replicas = [r for r in turn.state.replicas.values() if _takes_part(turn, r)]
    plan = repack.plan([load(turn, replica) for replica in replicas])
    for replica in replicas:
        replica.kv_previous = replica.kv_tokens
    record.reasons, record.checked_at, record.num_checks = plan.reasons, turn.at, record.num_checks + 1
    record.planned = [
        Transfer(
            source=move.source,
            destination=move.destination,
            trajectories=generating(turn, turn.state.replicas[move.source]),
            reason=move.reason,
        )
        for move in plan.moves
    ]


def _takes_part(turn: Turn, replica: Replica) -> bool:
    settled = replica.state == ReplicaState.GENERATING and health.takes_work(turn.state, replica)
    return settled and replica.version is not None and not replica.leaving and not replica.draining


def load(turn: Turn, replica: Replica) -> repack.Load:
    """The replica as the planner sees it, with what is on its way."""
    settings = turn.settings
    assert replica.version is not None
    requests_max, source = _memory_bound(turn, replica)
    return repack.Load(
        worker=replica.id,
        version=replica.version,
        kv_used=replica.kv_tokens + sum(replica.incoming.values()),
        kv_previous=replica.kv_previous,
        num_requests=replica.num_generating + len(replica.incoming),
        kv_max=int(settings.repack_kv_share * replica.kv_tokens_max),
        requests_max=requests_max,
        requests_max_by=source,
    )


def _memory_bound(turn: Turn, replica: Replica) -> tuple[int, str]:
    """B, and what says so."""
    if turn.settings.repack_requests_max:
        return turn.settings.repack_requests_max, "as configured"
    if 0 < replica.num_requests_memory_bound < replica.num_requests_max:
        return replica.num_requests_memory_bound, "by the roofline of its GPU"
    return replica.num_requests_max, "as many as it decodes at once"


def generating(turn: Turn, replica: Replica) -> list[TrajectoryId]:
    """What the replica generates now, in order of start."""
    records = turn.state.trajectories
    return [t for t in replica.attempts if records[t].state == TrajectoryState.GENERATING]


def propose(turn: Turn) -> Repack | None:
    """All transfers of the last check, as one decision."""
    planned = turn.state.repack.planned
    if not planned or turn.state.stopping:
        return None
    return Repack(transfers=planned)


def apply(turn: Turn, decision: Repack) -> None:
    """Tell the sources to stop. Transfers that no longer fit (the decision was held for long) are void."""
    turn.state.repack.planned = []
    for transfer in decision.transfers:
        source = turn.state.replicas.get(transfer.source)
        destination = turn.state.replicas.get(transfer.destination)
        if source and destination and not turn.state.stopping and _fits(turn, source, destination):
            _release(turn, source, destination, transfer)


def _fits(turn: Turn, source: Replica, destination: Replica) -> bool:
    both = _takes_part(turn, source) and _takes_part(turn, destination)
    return both and source.id != destination.id and source.version == destination.version and not source.incoming


def _release(turn: Turn, source: Replica, destination: Replica, transfer: Transfer) -> None:
    here = dict.fromkeys(generating(turn, source))
    chosen = [t for t in transfer.trajectories if t in here]
    if not chosen:
        return
    for trajectory_id in chosen:
        groups.pin(turn, turn.state.trajectories[trajectory_id], destination, source.kv_tokens // len(here))
        source.leaving[trajectory_id] = None
    source.admit_left = 0
    turn.state.repack.num_released += len(chosen) == len(here)
    attempts = [source.attempts[t] for t in chosen]
    turn.emit(AbortAttempts(cause=turn.cause, worker=source.id, trajectories=chosen, attempts=attempts))
    turn.tell(
        f"{len(chosen)} trajectories move from {source.id} to {destination.id}: {transfer.reason}",
        story.worker(source.id),
        story.worker(destination.id),
        *(story.trajectory(t) for t in chosen),
    )
