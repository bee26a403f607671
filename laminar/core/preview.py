"""What would come next if nothing else happened: the repack of now, candidate by candidate, and the timers. Nothing is changed.

The plan is the planner's own (`moves.plan`), made of the state of now; the check that is really due sees a later state. Why
Best-Fit chose a destination is read from `Choice.others`: where else the source could have gone, and how full that would have been.
"""

import msgspec

from laminar.core import holds, moves, repack, waits
from laminar.core.timers import Timer, timers
from laminar.core.turn import Turn
from laminar.ids import Version, WorkerId

OTHERS_SHOWN = 8  # the fullest of those with room, then some of those without
CHOICES_EXPLAINED = (
    24  # more than anybody reads; all moves of a fleet of 256 would hold up the controller for a tenth of a second
)


EMPTIED = "it is emptied itself"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica in a repack check."""

    worker: WorkerId
    version: Version | None
    role: str
    """``source``, ``destination``, ``candidate`` (it could be either) or ``none``."""
    reason: str
    load: repack.Load | None
    """As the planner sees it; None = it takes no part."""
    kv_after: int = 0
    """KV tokens after the moves: 0 for a source that is emptied."""
    requests_after: int = 0


class Other(msgspec.Struct, frozen=True, array_like=True):
    """A destination that was not chosen."""

    worker: WorkerId
    kv_after: int
    requests_after: int
    why_not: str
    """Empty = it has room, and would have been left less full."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One move, and where else it could have gone."""

    move: repack.Move
    others: list[Other]
    """At most `OTHERS_SHOWN`, of the first `CHOICES_EXPLAINED` moves; empty if a source is divided among several
    (`laminar.core.spread`), which are filled in order."""


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What a repack check would decide now."""

    policy: str
    why_none: str
    """Why there are no moves, whatever the replicas are like; empty = it is a question of each."""
    candidates: list[Candidate]
    choices: list[Choice]
    checked_at: float
    """Run time of the last check, seconds; 0 = there was none."""
    next_at: float
    """When the next is due; 0 = none is."""


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """What the core waits for."""

    timers: list[Timer]
    """All that run, the next one first."""
    waits: list[waits.Wait]


def ahead(turn: Turn) -> Ahead:
    """What the core waits for, and which timer ends the wait if nothing else does."""
    return Ahead(timers=timers(turn.state, turn.settings), waits=waits.waits(turn))


def plan(turn: Turn) -> Preview:
    """What a repack check would decide now."""
    record = turn.state.repack
    loads, found = moves.plan(turn)
    return Preview(
        policy=turn.settings.repack_policy,
        why_none=moves.why_no_check(turn) or holds.why(turn.state, "repack"),
        candidates=_candidates(turn, loads, found),
        choices=_choices(turn, loads, found),
        checked_at=record.checked_at,
        next_at=record.next_at,
    )


def _candidates(turn: Turn, loads: list[repack.Load], found: repack.Plan) -> list[Candidate]:
    """Every replica, in the order of the fleet."""
    load_of = {load.worker: load for load in loads}
    after = {move.destination: (move.kv_after, move.requests_after) for move in found.moves}
    after |= {move.source: (0, 0) for move in found.moves}
    sources = {move.source: None for move in found.moves}
    rows = []
    for replica in turn.state.replicas.values():
        load = load_of.get(replica.id)
        now = (load.kv_used, load.num_requests) if load else (replica.kv_tokens, replica.num_generating)
        kv_after, requests_after = after.get(replica.id, now)
        can = load is not None and not repack.refusal(load)
        role = (
            "source"
            if replica.id in sources
            else "destination"
            if replica.id in after
            else "candidate"
            if can
            else "none"
        )
        rows.append(
            Candidate(
                worker=replica.id,
                version=replica.version,
                role=role,
                reason=found.reasons[replica.id],
                load=load,
                kv_after=kv_after,
                requests_after=requests_after,
            )
        )
    return rows


def _choices(turn: Turn, loads: list[repack.Load], found: repack.Plan) -> list[Choice]:
    """The moves in the order in which they were planned, the first ones with what the others of their version would have become."""
    if turn.settings.repack_policy == "parts":
        return [Choice(move=move, others=[]) for move in found.moves]
    by_version = repack.candidates(loads, {})
    load_of = {load.worker: load for load in loads}
    after = {load.worker: (load.kv_used, load.num_requests) for load in loads}
    emptied: dict[WorkerId, None] = {}
    choices = []
    for number, move in enumerate(found.moves):
        source, others = load_of[move.source], list[Other]()
        if number < CHOICES_EXPLAINED:
            rest = [load for load in by_version[source.version] if load.worker not in (move.source, move.destination)]
            others = _others(source, rest, after, emptied)
        choices.append(Choice(move=move, others=others))
        after[move.destination] = move.kv_after, move.requests_after
        emptied[move.source] = None
    return choices


def _others(
    source: repack.Load,
    rest: list[repack.Load],
    after: dict[WorkerId, tuple[int, int]],
    emptied: dict[WorkerId, None],
) -> list[Other]:
    """Those with room first, the fullest first."""
    others = []
    for load in rest:
        kv_after, requests_after = after[load.worker][0] + source.kv_used, after[load.worker][1] + source.num_requests
        why_not = EMPTIED if load.worker in emptied else repack.why_no_room(load, kv_after, requests_after)
        others.append(Other(load.worker, kv_after, requests_after, why_not))
    return sorted(others, key=lambda other: (bool(other.why_not), -other.kv_after))[:OTHERS_SHOWN]
