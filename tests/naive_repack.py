"""Best-Fit word for word, every source against every other candidate: what `laminar.core.repack` must agree with."""

from laminar.core.repack import Load, Move, Plan, refusal
from laminar.ids import WorkerId


def plan(loads: list[Load]) -> Plan:
    reasons = {load.worker: refusal(load) for load in loads if refusal(load)}
    able = [load for load in loads if load.worker not in reasons]
    moves = []
    for version in dict.fromkeys(load.version for load in able):
        moves += _plan_version([load for load in able if load.version == version], reasons)
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
        moves.append(
            Move(
                source=source.worker,
                destination=best.worker,
                num_requests=source.num_requests,
                kv_after=kv[best.worker],
                requests_after=requests[best.worker],
                reason=f"left fullest: {kv[best.worker]} of {best.kv_max} KV tokens, "
                f"{requests[best.worker]} of B = {best.requests_max} requests ({best.requests_max_by})",
            )
        )
        reasons[source.worker] = f"source: {source.num_requests} requests move to {best.worker}"
    for worker in receiving:
        reasons[worker] = f"destination: {kv[worker]} KV tokens and {requests[worker]} requests after the moves"
    return moves
