"""Which replicas to empty into which: the paper's repack, planned (paper §5, Algorithm 1). Pure; docs/policies/repack.md.

Within one weight version, replicas whose KV use has passed its peak are candidates:

    S = { r | C_used(r) < min(C_max, C_prev(r))  and  N_reqs(r) < B }

Best-Fit: sources by C_used ascending; for each, among the other candidates that keep KV <= C_max and requests <= B after the
merge, the one left fullest. A released source is no destination, and a destination is no later source: nothing moves twice in one
plan. `bestfit` finds the destination without comparing all: O(|S| log |S| log B), and |S| list insertions, instead of O(|S|^2).
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from laminar.core.bestfit import Shelf
from laminar.ids import Version, WorkerId


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as the planner sees it."""

    worker: WorkerId
    version: Version
    kv_used: int
    """C_used, tokens of KV cache in use."""
    kv_previous: int
    """C_prev, tokens in use at the previous check; below `kv_used` while the replica still fills up."""
    num_requests: int
    """N_reqs, trajectories generating."""
    kv_max: int
    """C_max, tokens: the replica's KV capacity times the configured share."""
    requests_max: int
    """B, the largest decode batch that is still memory-bound."""
    requests_max_by: str = "as configured"
    """Where B is from, for the explanation."""
    gains: bool = True
    """Whether it would begin something once it is empty; only `laminar.core.spread` asks."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """Generating trajectories of `source` go to `destination`."""

    source: WorkerId
    destination: WorkerId
    num_requests: int
    """How many of them: all, unless the source is divided (`laminar.core.spread`)."""
    kv_after: int
    """Projected KV use of the destination, tokens."""
    requests_after: int
    reason: str
    """Why this destination."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one check decided, and why for every replica."""

    moves: list[Move]
    reasons: dict[WorkerId, str]
    """Why each replica is a source, a destination, or neither."""


def refusal(load: Load) -> str:
    """Why a replica is no candidate; empty if it is one."""
    if load.num_requests == 0:
        return "idle: nothing generates"
    if load.num_requests >= load.requests_max:
        return f"compute-bound: {load.num_requests} requests, B = {load.requests_max} ({load.requests_max_by})"
    if load.kv_used >= load.kv_max:
        return f"full: {load.kv_used} of C_max = {load.kv_max} KV tokens"
    if load.kv_used >= load.kv_previous:
        return f"not past its peak: {load.kv_used} KV tokens now, {load.kv_previous} at the last check"
    return ""


def why_no_room(destination: Load, kv_after: int, requests_after: int) -> str:
    """Why a replica may not be left with so much by a move; empty = it may."""
    if kv_after > destination.kv_max:
        return f"it would hold {kv_after} KV tokens, more than C_max = {destination.kv_max}"
    if requests_after > destination.requests_max:
        return f"it would have {requests_after} requests, more than B = {destination.requests_max}"
    return ""


def plan(loads: list[Load]) -> Plan:
    """The moves of one check over all version groups, in the order of `loads` within ties."""
    reasons: dict[WorkerId, str] = {}
    moves = [move for group in candidates(loads, reasons).values() for move in _plan_version(group, reasons)]
    return Plan(moves=moves, reasons=reasons)


def candidates(loads: list[Load], reasons: dict[WorkerId, str]) -> dict[Version, list[Load]]:
    """S by version; `reasons` gets why each other replica is none."""
    by_version: dict[Version, list[Load]] = {}
    for load in loads:
        why_not = refusal(load)
        if why_not:
            reasons[load.worker] = why_not
        else:
            by_version.setdefault(load.version, []).append(load)
    return by_version


def _plan_version(group: list[Load], reasons: dict[WorkerId, str]) -> list[Move]:
    kv = [load.kv_used for load in group]
    requests = [load.num_requests for load in group]
    shelves = _shelves(group)
    questions = [shelf.fullest for shelf in shelves.values()]
    fullest = questions[0] if len(questions) == 1 else partial(_fullest_of, questions)
    shelf_of = [shelves[load.kv_max, load.requests_max] for load in group]
    receiving: dict[int, None] = {}
    moves = []
    for index in sorted(range(len(group)), key=kv.__getitem__):
        if index in receiving:
            continue
        source = group[index]
        best = fullest(source.kv_used, source.num_requests, index)
        if best < 0:
            reasons[source.worker] = "candidate, but no other replica of its version has room for all it generates"
            continue
        into = shelf_of[index].index_of(best)
        shelf_of[index].take(index)
        shelf_of[into].take(into)
        kv[into] += source.kv_used
        requests[into] += source.num_requests
        if kv[into] + source.kv_used <= group[into].kv_max:  # else it has no room for a later source, none is smaller
            shelf_of[into].put(into, kv[into], requests[into])
        receiving[into] = None
        moves.append(_move(source, group[into], kv[into], requests[into]))
        reasons[source.worker] = f"source: {source.num_requests} requests move to {group[into].worker}"
    for into in receiving:
        reasons[group[into].worker] = f"destination: {kv[into]} KV tokens and {requests[into]} requests after the moves"
    return moves


def _fullest_of(questions: Sequence[Callable[[int, int, int], int]], kv: int, requests: int, besides: int) -> int:
    return max([fullest(kv, requests, besides) for fullest in questions])


def _shelves(group: list[Load]) -> dict[tuple[int, int], Shelf]:
    """Every candidate as a destination, by its limits. Replicas of one kind share theirs, so these are few."""
    shelved: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for index in sorted(range(len(group) - 1, -1, -1), key=[load.kv_used for load in group].__getitem__):  # by rank
        load = group[index]
        shelved.setdefault((load.kv_max, load.requests_max), []).append((index, load.kv_used, load.num_requests))
    shelves = {limits: Shelf(kv_max=limits[0], requests_max=limits[1], size=len(group)) for limits in shelved}
    for limits, shelf in shelves.items():
        shelf.put_on_top(shelved[limits])
    return shelves


def _move(source: Load, destination: Load, kv_after: int, requests_after: int) -> Move:
    return Move(
        source=source.worker,
        destination=destination.worker,
        num_requests=source.num_requests,
        kv_after=kv_after,
        requests_after=requests_after,
        reason=destination_reason(destination, kv_after, requests_after),
    )


def destination_reason(destination: Load, kv_after: int, requests_after: int) -> str:
    """Why a replica was chosen as a destination."""
    return (
        f"left fullest: {kv_after} of {destination.kv_max} KV tokens, "
        f"{requests_after} of B = {destination.requests_max} requests ({destination.requests_max_by})"
    )
