"""Repacking carried out: when it is checked, and how a trajectory moves from one replica to another.

    check ──► Repack decision ──► AbortAttempts at the source ──► its last tokens and `aborted` ──► attempt + 1 at the destination

Invariants:
* From the decision until it starts there, a moving trajectory pins its destination: no pull, KV reserved.
* The source's word ends the attempt: a trajectory that finishes first is finished, the move is off.
* If the destination is lost or no longer fits, the trajectory is queued like any other of its version.
* Pinned trajectories are not moved.
"""

from laminar.core import dispatch, groups, health, refresh, repack, spread, story
from laminar.core.actions import AbortAttempts
from laminar.core.decisions import Repack, Transfer
from laminar.core.records import Replica, TrajectoryState
from laminar.core.turn import Turn
from laminar.ids import TrajectoryId, WorkerId

PINNED = "pinned: what it generates has state on its host"


def trigger(turn: Turn) -> None:
    """A check is due: the period is over, or a train step has finished."""
    if turn.settings.repack_interval_s:
        turn.state.repack.due = True
        turn.state.repack.next_at = turn.at + turn.settings.repack_interval_s


def interval_changed(turn: Turn) -> None:
    """The period begins anew; without one nothing is checked or moved any more."""
    record, interval_s = turn.state.repack, turn.settings.repack_interval_s
    record.next_at = turn.at + interval_s if interval_s else 0.0
    if not interval_s:
        record.due, record.planned = False, []


def why_no_check(turn: Turn) -> str:
    """Why nothing is repacked now, whatever the replicas are like; empty = it is a question of each."""
    if over := turn.state.stopping or turn.state.finished:
        return f"the run is stopping or over: {over}"
    return "" if turn.settings.repack_interval_s else "it is off, its interval is 0"


def check(turn: Turn) -> None:
    """If due: plan, and keep the explanation."""
    record = turn.state.repack
    if not record.due or why_no_check(turn):
        return
    record.due = False
    loads, found = plan(turn)
    for each in loads:
        replica = turn.state.replicas[each.worker]
        replica.kv_previous = replica.kv_tokens
    record.reasons, record.checked_at, record.num_checks = found.reasons, turn.at, record.num_checks + 1
    if found.moves:
        record.moved_reasons, record.moved_at = record.reasons, turn.at
    record.planned = _transfers(turn, found.moves)


def plan(turn: Turn) -> tuple[list[repack.Load], repack.Plan]:
    """What a check would find now: the replicas that take part, as the planner sees them, and its plan. Nothing is changed."""
    absent = {replica.id: _why_absent(turn, replica) for replica in turn.state.replicas.values()}
    loads = [load(turn, turn.state.replicas[worker]) for worker, why in absent.items() if not why]
    if turn.settings.pinned:
        found = repack.Plan(moves=[], reasons=dict.fromkeys((each.worker for each in loads), PINNED))
    else:
        found = (spread.plan if turn.settings.repack_policy == "parts" else repack.plan)(loads)
    outside = {worker: f"takes no part: {why}" for worker, why in absent.items() if why}
    return loads, repack.Plan(moves=found.moves, reasons=found.reasons | outside)


def _why_absent(turn: Turn, replica: Replica) -> str:
    """Why the replica takes no part in a check; empty = it does."""
    if replica.leaving:
        return "it is being emptied by an earlier check"
    if replica.draining or not health.takes_work(turn.state, replica):
        return health.status(turn, replica).reason
    return ""


def _transfers(turn: Turn, moves: list[repack.Move]) -> list[Transfer]:
    """Which trajectories go where: those of a divided source in order of start, destination by destination."""
    transfers: list[Transfer] = []
    left: dict[WorkerId, list[TrajectoryId]] = {}
    for move in moves:
        if move.source not in left:
            left[move.source] = generating(turn, turn.state.replicas[move.source])
        chosen, left[move.source] = left[move.source][: move.num_requests], left[move.source][move.num_requests :]
        transfers.append(
            Transfer(source=move.source, destination=move.destination, trajectories=chosen, reason=move.reason)
        )
    return transfers


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
        gains=dispatch.wants_room(turn) and refresh.gains_when_empty(turn, replica),
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


def apply(turn: Turn, decision: Repack) -> str:
    """Tell the sources to stop. What no longer fits (the decision was held for long, or edited) is void, source by source; why,
    empty = all of it is done."""
    turn.state.repack.planned = []
    by_source: dict[WorkerId, list[Transfer]] = {}
    for transfer in decision.transfers:
        by_source.setdefault(transfer.source, []).append(transfer)
    reasons = {worker: _release(turn, worker, transfers) for worker, transfers in by_source.items()}
    return "; ".join(f"nothing leaves {worker}: {reason}" for worker, reason in reasons.items() if reason)


def _release(turn: Turn, worker: WorkerId, transfers: list[Transfer]) -> str:
    """All of a source's transfers or none: one that is not emptied has moved for nothing. Why none; empty = all."""
    source = turn.state.replicas.get(worker)
    if source is None:
        return "there is no such replica"
    if reason := _why_it_stays(turn, source):
        return reason
    chosen, num_left = _still_there(turn, source, transfers)
    if not chosen:
        return "it generates none of these trajectories any more"
    unfit = [_why_unfit(turn, source, into, len(moving)) for into, moving in chosen.items()]
    if reason := next(filter(None, unfit), ""):
        return reason
    reasons = {transfer.destination: transfer.reason for transfer in transfers}
    kv_each = source.kv_tokens // source.num_generating
    for into, moving in chosen.items():
        _send(turn, source, turn.state.replicas[into], moving, kv_each, reasons[into])
    source.admit_left = 0
    turn.state.repack.num_released += num_left == 0
    return ""


def _still_there(
    turn: Turn, source: Replica, transfers: list[Transfer]
) -> tuple[dict[WorkerId, list[TrajectoryId]], int]:
    """What of the transfers the source still generates, by destination; how much else it generates."""
    chosen: dict[WorkerId, list[TrajectoryId]] = {}
    left = dict.fromkeys(generating(turn, source))
    for transfer in transfers:
        moving = dict.fromkeys(t for t in transfer.trajectories if t in left)
        left = dict.fromkeys(t for t in left if t not in moving)
        if moving:
            chosen.setdefault(transfer.destination, []).extend(moving)
    return chosen, len(left)


def _why_it_stays(turn: Turn, source: Replica) -> str:
    """Why nothing may leave the source; empty = something may."""
    if turn.state.stopping:
        return "the run is stopping"
    if turn.settings.pinned:
        return PINNED
    if source.incoming:
        return "others move to it"
    return _why_absent(turn, source)


def _why_unfit(turn: Turn, source: Replica, worker: WorkerId, num_requests: int) -> str:
    """Why so many of the source's, each counted as the mean, may not go there; empty = they may."""
    destination = turn.state.replicas.get(worker)
    if destination is None or destination.id == source.id:
        return f"{worker} is no other replica"
    if destination.version != source.version:
        return f"{worker} holds {destination.version}, not {source.version}"
    if reason := _why_absent(turn, destination):
        return f"{worker} takes no part: {reason}"
    now = load(turn, destination)
    kv_after = now.kv_used + source.kv_tokens * num_requests // source.num_generating
    reason = repack.why_no_room(now, kv_after, now.num_requests + num_requests)
    return f"{worker} has no room: {reason}" if reason else ""


def _send(
    turn: Turn, source: Replica, destination: Replica, chosen: list[TrajectoryId], kv_each: int, reason: str
) -> None:
    for trajectory_id in chosen:
        groups.pin(turn.state.trajectories[trajectory_id], destination, kv_each)
        source.leaving[trajectory_id] = None
    attempts = [source.attempts[t] for t in chosen]
    turn.emit(AbortAttempts(cause=turn.cause, worker=source.id, trajectories=chosen, attempts=attempts))
    turn.tell(
        f"{len(chosen)} trajectories move from {source.id} to {destination.id}: {reason}",
        story.worker(source.id),
        story.worker(destination.id),
        *(story.trajectory(t) for t in chosen),
    )
