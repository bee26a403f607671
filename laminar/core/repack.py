"""Which replicas to empty into which: the paper's repack, planned (paper §5, Algorithm 1). Pure; docs/policies/repack.md.

Within one weight version, replicas whose KV use has passed its peak are candidates:

    S = { r | C_used(r) < min(C_max, C_prev(r))  and  N_reqs(r) < B }

Best-Fit: sources by C_used ascending; for each, among the other candidates that keep KV <= C_max and requests <= B after the
merge, the one left fullest. A released source is no destination, and a destination is no later source: nothing moves twice in one
plan. Projected loads are cached, so planning is O(|S|^2).
"""

import msgspec

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


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """All generating trajectories of `source` go to `destination`."""

    source: WorkerId
    destination: WorkerId
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
        return f"compute-bound: {load.num_requests} requests, B = {load.requests_max}"
    if load.kv_used >= load.kv_max:
        return f"full: {load.kv_used} of C_max = {load.kv_max} KV tokens"
    if load.kv_used >= load.kv_previous:
        return f"not past its peak: {load.kv_used} KV tokens now, {load.kv_previous} at the last check"
    return ""


def plan(loads: list[Load]) -> Plan:
    """The moves of one check over all version groups, in the order of `loads` within ties."""
    reasons: dict[WorkerId, str] = {}
    by_version: dict[Version, list[Load]] = {}
    for load in loads:
        why_not = refusal(load)
        if why_not:
            reasons[load.worker] = why_not
        else:
            by_version.setdefault(load.version, []).append(load)
    moves = [move for candidates in by_version.values() for move in _plan_version(candidates, reasons)]
    return Plan(moves=moves, reasons=reasons)


def _plan_version(candidates: list[Load], reasons: dict[WorkerId, str]) -> list[Move]:
    kv = {load.worker: load.kv_used for load in candidates}
    requests = {load.worker: load.num_requests for load in candidates}
    released: dict[WorkerId, None] = {}
    receiving: dict[WorkerId, None] = {}
    moves = []
    for source in sorted(candidates, key=lambda load: load.kv_used):
        if source.worker in receiving:
            continue
        best = None
        for other in candidates:
            if other.worker == source.worker or other.worker in released:
                continue
            fits = kv[other.worker] + source.kv_used <= other.kv_max
            fits = fits and requests[other.worker] + source.num_requests <= other.requests_max
            if fits and (best is None or kv[other.worker] > kv[best.worker]):
                best = other
        if best is None:
            reasons[source.worker] = "candidate, but no other replica of its version has room for all it generates"
            continue
        kv[best.worker] += source.kv_used
        requests[best.worker] += source.num_requests
        released[source.worker] = None
        receiving[best.worker] = None
        moves.append(_move(source, best, kv[best.worker], requests[best.worker]))
        reasons[source.worker] = f"source: {source.num_requests} requests move to {best.worker}"
    for worker in receiving:
        reasons[worker] = f"destination: {kv[worker]} KV tokens and {requests[worker]} requests after the moves"
    return moves


def _move(source: Load, destination: Load, kv_after: int, requests_after: int) -> Move:
    return Move(
        source=source.worker,
        destination=destination.worker,
        kv_after=kv_after,
        requests_after=requests_after,
        reason=f"left fullest: {kv_after} of {destination.kv_max} KV tokens, "
        f"{requests_after} of {destination.requests_max} requests",
    )
