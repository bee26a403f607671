"""Repack by parts: what a replica generates is divided among several others of its version. Pure; docs/policies/repack.md.

The paper moves all that a source generates to one destination, so two replicas merge only when each is less than half full. Here a
source is emptied as soon as the others *together* have room for it. Candidates as in `laminar.core.repack`; sources are those that
gain by being emptied, C_used ascending; destinations from the other end of that order, the fullest first, each filled up to C_max
and B before the next. A request counts as the mean of its source. A source is emptied whole or not at all; the two ends meet in the
middle, so no destination is a source. O(|S| log |S|).
"""

from laminar.core.repack import Load, Move, Plan, candidates, destination_reason
from laminar.ids import WorkerId


def plan(loads: list[Load]) -> Plan:
    """The moves of one check over all version groups, in the order of `loads` within ties."""
    reasons: dict[WorkerId, str] = {}
    moves = [move for group in candidates(loads, reasons).values() for move in _Ends(group, reasons).moves()]
    return Plan(moves=moves, reasons=reasons)


NOT_REACHED = "candidate, but it comes after the last source that could be emptied"
NO_USE = "candidate, but of no use when empty: it has nothing newer to pull, or new groups are held back"


class _Ends:
    """The candidates of one version in order of KV use, taken from both ends."""

    def __init__(self, group: list[Load], reasons: dict[WorkerId, str]) -> None:
        self._order = sorted(group, key=lambda load: load.kv_used)
        self._kv = [load.kv_used for load in self._order]
        self._requests = [load.num_requests for load in self._order]
        self._top = len(self._order) - 1
        """The present destination; those above it are full."""
        self._reasons = reasons
        reasons.update({load.worker: NOT_REACHED if load.gains else NO_USE for load in self._order})

    def moves(self) -> list[Move]:
        """From the emptiest source on, until one cannot be emptied."""
        moves: list[Move] = []
        for low, source in enumerate(self._order):
            if low >= self._top:
                break
            if not source.gains:
                continue
            parts = self._parts(low)
            if not parts:
                text = "candidate, but the others of its version together have no room for all it generates"
                self._reasons[source.worker] = text
                break
            moves += [self._take(low, index, num) for index, num in parts]
            self._top = parts[-1][0]
            self._reasons[source.worker] = f"source: {source.num_requests} requests move to {len(parts)} replicas"
        return moves

    def _parts(self, low: int) -> list[tuple[int, int]]:
        """(destination, requests) for all that the source generates; empty if the others have no room for it."""
        parts, left = [], self._order[low].num_requests
        for index in range(self._top, low, -1):
            num = min(left, self._room(low, index))
            if num > 0:
                parts.append((index, num))
                left -= num
            if not left:
                return parts
        return []

    def _room(self, low: int, index: int) -> int:
        other = self._order[index]
        by_kv = (other.kv_max - self._kv[index]) // self._each(low)
        return min(by_kv, other.requests_max - self._requests[index])

    def _each(self, low: int) -> int:
        source = self._order[low]
        return max(1, -(-source.kv_used // source.num_requests))

    def _take(self, low: int, index: int, num: int) -> Move:
        source, other = self._order[low], self._order[index]
        self._kv[index] += num * self._each(low)
        self._requests[index] += num
        kv, requests = self._kv[index], self._requests[index]
        self._reasons[other.worker] = f"destination: {kv} KV tokens and {requests} requests after the moves"
        return Move(
            source=source.worker,
            destination=other.worker,
            num_requests=num,
            kv_after=kv,
            requests_after=requests,
            reason=destination_reason(other, kv, requests),
        )
