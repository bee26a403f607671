"""A version whose ranks are on several hosts, as the threads that move its shards see it.

`Outgoing` is on a host with some of the ranks: what they have written so far, to be sent to the relay that collects the version.
`Collection` is there: where the shards of other hosts go. Both are made and changed on the event loop.
"""

import threading

from laminar.ids import Version
from laminar.wire import Neighbour
from laminar.workers.canary import Canary
from laminar.workers.relay.protocol import Begin
from laminar.workers.relay.ranges import unpack


class Share:
    """What one rank writes. `num_written`: that many of its `ranges` are in the slot."""

    def __init__(self, rank: int, packed: bytes) -> None:
        self.rank, self.packed = rank, packed
        self.ranges: list[tuple[int, int]] = [(start, end) for start, end in unpack(packed).tolist()]
        self.num_written = 0
        self.committed = False
        self.canary: Canary | None = None


class Outgoing:
    """Shards of `num_here` ranks, in `buffer` as far as they are written, on their way to `collector`."""

    def __init__(self, first: Begin, collector: Neighbour, buffer: memoryview) -> None:
        """`first`: of any rank."""
        self.version, self.publication, self.manifest = first.version, first.publication, first.manifest
        self.world_size, self.num_here, self.collector, self.buffer = (
            first.world_size,
            first.num_here,
            collector,
            buffer,
        )
        self.lost = False
        self._shares: dict[int, Share] = {}
        self._num_changes = 0
        self._changed = threading.Condition()

    def begin(self, rank: int, packed: bytes) -> None:
        """A rank is going to write these ranges."""
        with self._changed:
            self._shares[rank] = Share(rank, packed)
            self._tell()

    def wrote(self, rank: int, num_ranges: int) -> None:
        """The first of them are written."""
        with self._changed:
            share = self._shares[rank]
            share.num_written = max(share.num_written, min(num_ranges, len(share.ranges)))
            self._tell()

    def commit(self, rank: int, canary: Canary | None) -> None:
        """All of them are."""
        with self._changed:
            share = self._shares[rank]
            share.num_written, share.canary, share.committed = len(share.ranges), canary, True
            self._tell()

    def lose(self) -> None:
        """It will never be complete."""
        with self._changed:
            self.lost = True
            self._tell()

    def shares(self) -> tuple[list[Share], int]:
        """What there is now, and a number for `wait`."""
        with self._changed:
            return list(self._shares.values()), self._num_changes

    def wait(self, num_changes: int, timeout_s: float) -> None:
        """Until there is more than `shares` gave with that number."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_changes != num_changes, timeout_s)

    def _tell(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()


class Collection:
    """`buffer`: all bytes of a version that fills here; ranks of other hosts write theirs over links."""

    def __init__(self, version: Version, buffer: memoryview) -> None:
        self.version, self.buffer = version, buffer
        self.lost = self.ready = False
        self._changed = threading.Condition()

    def end(self, *, ready: bool) -> None:
        """It is READY, or lost."""
        with self._changed:
            self.ready, self.lost = ready, not ready
            self._changed.notify_all()

    def wait_for_end(self, timeout_s: float) -> None:
        """Until it is READY or lost, or after the time."""
        with self._changed:
            self._changed.wait_for(lambda: self.ready or self.lost, timeout_s)
