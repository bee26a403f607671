"""Which publications' shards leave this relay for the one that collects them, and which come in. On the event loop.

Invariants: shards that leave are read under a lease of their slot, which ends with `read`; every `Outgoing` and `Collection` is
told how its publication ended.
"""

from collections.abc import Callable

from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay.protocol import Begin, RelayError
from laminar.workers.relay.shards import Collection, Outgoing
from laminar.workers.relay.slots import Slot, SlotState, SlotTable

Key = tuple[Version, int]
"""Version and publication."""


class ShardTraffic:
    """`name`: of this relay in the chain; empty = it takes part in none. `send` is called once for each version whose first
    shards are written here and collected elsewhere, and is to call `sent` at the end."""

    def __init__(self, table: SlotTable) -> None:
        self.name = ""
        self.send: Callable[[Outgoing], None] = lambda shards: None
        self._table = table
        self._outgoing: dict[Key, tuple[Outgoing, int]] = {}
        """With the lease under which they are read."""
        self._under_way: dict[Outgoing, None] = {}
        self._collections: dict[Key, Collection] = {}

    def close(self) -> None:
        """Nothing more comes or leaves."""
        for shards, _ in self._outgoing.values():
            shards.lose()
        for collection in self._collections.values():
            collection.end(ready=False)

    def end(self, version: Version, publication: int, *, ready: bool) -> None:
        """The version is READY here, or this publication of it is lost here."""
        if (collection := self._collections.pop((version, publication), None)) is not None:
            collection.end(ready=ready)
        if (shards := self.outgoing(version, publication)) is not None:
            shards.lose()
            if shards not in self._under_way:
                self._end(shards)

    # ---- from ranks of this host to another relay

    def num_here(self, wanted: Begin) -> int:
        """How many ranks write to the slot: those of this host if another relay collects the version, else all of the world."""
        collected_here = wanted.collector is None or wanted.collector.name == self.name or not wanted.num_here
        return wanted.world_size if collected_here else wanted.num_here

    def is_leaving(self, version: Version) -> bool:
        """Whether shards of it are still to be sent."""
        return any(key[0] == version for key in self._outgoing)

    def outgoing(self, version: Version, publication: int) -> Outgoing | None:
        """The shards of this publication that leave, if they do."""
        found = self._outgoing.get((version, publication))
        return found[0] if found else None

    def follow(self, slot: Slot, wanted: Begin, view: Callable[[Slot], memoryview]) -> None:
        """A rank has begun to write shards that another relay collects. Raises RelayError if they cannot be sent there."""
        assert wanted.collector is not None
        if not self.name:
            raise RelayError(f"this relay takes part in no chain, and cannot send shards to {wanted.collector.name}")
        if wanted.ranges is None:
            raise RelayError(f"rank {wanted.rank} did not tell what it writes, for {wanted.collector.name} to collect")
        key = (wanted.version, wanted.publication)
        if key not in self._outgoing:
            shards = Outgoing(wanted, wanted.collector, view(slot))
            self._outgoing[key] = shards, self._table.follow(slot)
        self._outgoing[key][0].begin(wanted.rank, wanted.ranges)

    def wrote(self, version: Version, rank: int, num_ranges: int, publication: int) -> None:
        """The rank has written the first of its ranges."""
        if (shards := self.outgoing(version, publication)) is not None:
            shards.wrote(rank, num_ranges)
            self._begin(shards)

    def commit(self, version: Version, rank: int, canary: Canary | None, publication: int) -> None:
        """The rank has written all."""
        if (shards := self.outgoing(version, publication)) is not None:
            shards.commit(rank, canary)
            self._begin(shards)

    def read(self, shards: Outgoing) -> None:
        """They are all sent, or will not be: nobody reads them here any more. Any number of times."""
        if self.outgoing(shards.version, shards.publication) is shards:
            self._end(shards)

    def sent(self, shards: Outgoing, failure: str) -> None:
        """The other relay holds the whole version; or why it never will, as far as this relay can tell."""
        self._under_way.pop(shards, None)
        self.read(shards)
        if failure:
            self._table.lose(shards.version, failure, shards.publication)

    def _begin(self, shards: Outgoing) -> None:
        if shards not in self._under_way:
            self._under_way[shards] = None
            self.send(shards)

    def _end(self, shards: Outgoing) -> None:
        _, lease = self._outgoing.pop((shards.version, shards.publication))
        self._table.release(lease)

    # ---- from ranks of other hosts

    def refusal(self, publication: int) -> tuple[str, bool] | None:
        """Why shards of this publication are not taken, and whether they may be later; None = they are."""
        for slot in self._table.slots:
            is_filling = slot.state is SlotState.FILLING and not (slot.lost or slot.is_part)
            if is_filling and slot.publication == publication:
                return None
        if publication > self._table.newest_publication:
            return f"{self.name} has not heard of publication {publication}", True
        return f"publication {publication} is over", False

    def collection(self, slot: Slot, view: Callable[[Slot], memoryview]) -> Collection:
        """Where ranks of other hosts write what fills this slot."""
        assert slot.version is not None
        key = (slot.version, slot.publication)
        if key not in self._collections:
            self._collections[key] = Collection(slot.version, view(slot))
        return self._collections[key]
