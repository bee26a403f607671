"""Best-Fit's question, answered without looking at every replica: of those with room for a source, which is the fullest?

Room has two limits, KV tokens and requests. A Fenwick tree over the requests that a replica has room for takes care of the second:
each of its nodes is a list sorted by KV load, and the nodes on one path hold together exactly the replicas with at least so much
room. The first is a bisection in each. A question, and putting a replica in or out, visit at most log2(B) + 1 nodes.

A replica's *rank* is one integer, `kv * size + size - 1 - index`: ranks sort by load, equal loads by place in the fleet's order,
the earlier the higher.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable


class Shelf:
    """Replicas of one version with the same limits, as destinations."""

    def __init__(self, *, kv_max: int, requests_max: int, size: int) -> None:
        """`size`: replicas in the fleet's order; indices are below it."""
        self._kv_max, self._requests_max, self._size = kv_max, requests_max, size
        self._nodes: dict[int, list[int]] = {}
        self._ranks = [-1] * size
        """By index, the last rank of each replica that was ever here."""
        self._nodes_of: list[list[list[int]]] = [[]] * size
        """By index, the nodes that have, or had, it."""
        self._paths: dict[int, list[list[int]]] = {}
        """Room -> the nodes that have replicas with so much room."""
        self._questions: dict[int, list[list[int]]] = {}
        """Requests -> the nodes that have together the replicas with room for so many."""

    def put(self, index: int, kv: int, requests: int) -> None:
        """From now on the replica is a possible destination."""
        rank, room = kv * self._size + self._size - 1 - index, self._requests_max - requests
        nodes = self._paths[room] if room in self._paths else self._path(room)
        for node in nodes:
            insort(node, rank)
        self._ranks[index], self._nodes_of[index] = rank, nodes

    def put_on_top(self, ascending: Iterable[tuple[int, int, int]]) -> None:
        """`put` of many, (index, kv, requests) each, of which each ranks above all that are there."""
        paths, size, requests_max = self._paths, self._size, self._requests_max
        for index, kv, requests in ascending:
            room = requests_max - requests
            nodes = paths[room] if room in paths else self._path(room)
            rank = kv * size + size - 1 - index
            for node in nodes:
                node.append(rank)
            self._ranks[index], self._nodes_of[index] = rank, nodes

    def take(self, index: int) -> None:
        """It is none any more."""
        rank = self._ranks[index]
        for node in self._nodes_of[index]:
            del node[bisect_left(node, rank)]

    def fullest(self, kv: int, requests: int, besides: int) -> int:
        """The rank of the fullest replica other than `besides` that keeps its limits with so much more; -1 = there is none."""
        own = self._ranks[besides]
        beyond = (self._kv_max - kv + 1) * self._size
        best = -1
        for node in self._questions[requests] if requests in self._questions else self._question(requests):
            place = bisect_left(node, beyond)
            if place and node[place - 1] == own:
                place -= 1
            if place and node[place - 1] > best:
                best = node[place - 1]
        return best

    def _question(self, requests: int) -> list[list[int]]:
        nodes, at = [], requests
        while at < self._requests_max:
            nodes.append(self._nodes.setdefault(at, []))
            at += at & -at
        self._questions[requests] = nodes
        return nodes

    def _path(self, room: int) -> list[list[int]]:
        path, at = [], room
        while at > 0:
            path.append(self._nodes.setdefault(at, []))
            at &= at - 1
        self._paths[room] = path
        return path

    def index_of(self, rank: int) -> int:
        """The replica of a rank."""
        return self._size - 1 - rank % self._size
