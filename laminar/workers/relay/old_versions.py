"""Old versions that the controller wants kept, as reverse deltas: what makes an older version of a newer one.

    slot of v3, the next to go ──encode against v5──► v3 = v5 + delta      its slot may go
    slot of v5, when it is next ──encode against v7──► v5 = v7 + delta     v3 depends on it, so it is kept as long
    a reader asks for v3: a slot ◄── bytes of v7, the delta to v5, the delta to v3 ── READY when the digest is v3's

Deltas are made while the slot is still there, by a thread that gives way to everything else, rebuilding among it; a slot is
recycled whether its delta is done or not. So nobody waits for a delta but who asks for a version without a slot.

Invariants:
* A version is kept only while what it is made of is READY or kept itself; with its base it goes too, and the controller is told.
* All deltas together take at most `share` of a slot's bytes.
* Readers get rebuilt bytes only if every block has the digest that the version had.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import structlog
import xxhash

from laminar.errors import ProtocolError
from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay import delta
from laminar.workers.relay.digest import DIGEST_BYTES
from laminar.workers.relay.manifest import BLOCK_BYTES, Manifest
from laminar.workers.relay.protocol import RelayError
from laminar.workers.relay.slots import UPSTREAM, Slot, SlotTable

log = structlog.get_logger("laminar.relay")

NICENESS = 10  # a delta that comes too late costs an old version; one in the way of a publication costs everybody
REFUSALS_KEPT = 8  # that the status shows
SAMPLES = 16  # blocks by which a version is judged first, lest a fifth of it is copied in vain
HOPELESS = 2  # times what would fit: so far a sample may err


class GaveWayError(Exception):
    """A delta was not made to its end: something else is more urgent."""


class Part(NamedTuple):
    """What one block of an older version is made of."""

    data: bytes
    is_delta: bool
    """To the same block of the base; else the block itself."""


class Kept(NamedTuple):
    """A version without a slot, or whose slot is the next to go."""

    version: Version
    base: Version
    order: int
    """Of its slot: a rebuilt version is as old as it was."""
    manifest: Manifest
    digest: str
    blocks: bytes
    canary: Canary | None
    parts: list[Part]

    @property
    def num_bytes(self) -> int:
        """Of the deltas."""
        return sum(len(part.data) for part in self.parts)


def reverse(
    old: memoryview, new: memoryview, item_bytes: int, bytes_max: int, is_over: Callable[[], bool]
) -> list[Part] | None:
    """What makes `old` of `new`, block by block; None if it takes more than `bytes_max`. Raises GaveWayError once it `is_over`."""
    starts = range(0, len(old), BLOCK_BYTES)
    sampled = [_part(old, new, start, item_bytes) for start in starts[:: -(-len(starts) // SAMPLES)]]
    if sum(len(part.data) for part in sampled) * len(starts) > HOPELESS * bytes_max * len(sampled):
        return None
    parts, num_bytes = [], 0
    for start in starts:
        parts.append(_part(old, new, start, item_bytes))
        num_bytes += len(parts[-1].data)
        if num_bytes > bytes_max:
            return None
        if is_over():
            raise GaveWayError
    return parts


def _part(old: memoryview, new: memoryview, start: int, item_bytes: int) -> Part:
    block = old[start : start + BLOCK_BYTES]
    made = None
    if len(block) % delta.WORD_BYTES == 0:
        made = delta.encode(block, new[start : start + BLOCK_BYTES], item_bytes)
    return Part(bytes(block), False) if made is None else Part(made, True)


def rebuild(root: memoryview, chain: list[Kept], target: memoryview, stop: threading.Event) -> None:
    """Make the last version of `chain` of `root`, the base of the first, in `target`, which may be the same.

    Raises RelayError if its bytes are not what they were.
    """
    wanted = chain[-1]
    changed = f"{wanted.version} was kept as a delta, and its bytes from {{}} on are not what they were"
    for index, start in enumerate(range(0, len(target), BLOCK_BYTES)):
        if stop.is_set():
            raise RelayError("the relay stops")
        block = target[start : start + BLOCK_BYTES]
        block[:] = root[start : start + BLOCK_BYTES]  # the same bytes when it is made in place
        try:
            for kept in chain:
                _apply(kept.parts[index], block, kept.manifest.item_bytes)
        except ProtocolError as error:
            raise RelayError(changed.format(start)) from error
        if xxhash.xxh3_128_digest(block) != wanted.blocks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
            raise RelayError(changed.format(start))


def _apply(part: Part, block: memoryview, item_bytes: int) -> None:
    if part.is_delta:
        delta.apply(part.data, block, item_bytes)
    else:
        block[:] = part.data


class OldVersions:
    """Lives on the event loop. `view` and `writable` give a slot's bytes, `capacity` those of a whole slot.

    `on_gone(version)` is called when nobody can have a version here any more that was kept; `start` runs a task, and owns it.
    """

    def __init__(
        self,
        table: SlotTable,
        share: float,
        *,
        view: Callable[[Slot], memoryview],
        writable: Callable[[Slot], memoryview],
        capacity: Callable[[], int],
        on_gone: Callable[[Version], None],
        start: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._table, self._share, self._view, self._writable = table, share, view, writable
        self._capacity, self._on_gone, self._start = capacity, on_gone, start
        self._wanted: dict[Version, None] = {}
        self._kept: dict[Version, Kept] = {}
        """In the order in which they were made, so what a version depends on comes after it."""
        self._refused: dict[Version, None] = {}
        """Not tried again before other versions are wanted."""
        self.refusals: deque[str] = deque(maxlen=REFUSALS_KEPT)
        self.num_rebuilt = 0
        self._is_looking = False
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        """Readers that wait for their turn, which ends that of a delta."""
        self._stop = threading.Event()
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="relay-delta", initializer=_give_way)
        self._rebuilding = ThreadPoolExecutor(1, thread_name_prefix="relay-rebuild")

    @property
    def kept(self) -> list[Kept]:
        """Oldest first."""
        return sorted(self._kept.values(), key=lambda kept: kept.order)

    @property
    def bytes_max(self) -> int:
        """Of all deltas together."""
        return int(self._share * self._capacity())

    @property
    def num_bytes(self) -> int:
        """Of all deltas together."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def is_wanted(self, version: Version) -> bool:
        """Whether the controller wants it, and not only another version that depends on it."""
        return version in self._wanted

    def stop(self) -> None:
        """What is under way ends early."""
        self._stop.set()

    def close(self) -> None:
        """End the threads; blocks until they have."""
        self.stop()
        for threads in (self._encoding, self._rebuilding):
            threads.shutdown(wait=True, cancel_futures=True)

    def want(self, versions: Iterable[Version]) -> None:
        """These are to be kept as long as can be, and no others."""
        self._wanted = dict.fromkeys(versions)
        self._refused.clear()
        self._forget_what_is_not_needed()
        self.look()

    def recycled(self, version: Version) -> None:
        """Its slot is another's from now on: it is gone, with all that depends on it, unless it is kept."""
        if version not in self._kept:
            self._on_gone(version)
        self._forget_orphans()

    def look(self) -> None:
        """Begin the deltas of versions that are needed and whose slots may go."""
        if not self._is_looking and self._due() is not None:
            self._is_looking = True
            self._start(self._keep_what_is_due(), "reverse delta")

    async def restore(self, version: Version) -> None:
        """Put a kept version into a slot, READY, if it is in none. Raises RelayError."""
        if self._is_here(version):
            return
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1
        try:
            await self._keep_due(gives_way=False)  # or else the slot that this takes would cost another old version
            if not self._is_here(version):
                await self._rebuild(self._chain(version))
        finally:
            self._turn.release()
            self.look()

    def _is_here(self, version: Version) -> bool:
        """Or there is nothing to make it of."""
        return version not in self._kept or self._table.ready(version) is not None

    # ---- making

    def _is_needed(self, version: Version | None) -> bool:
        return version in self._wanted or any(kept.base == version for kept in self._kept.values())

    def _due(self) -> tuple[Slot, Slot] | None:
        """A slot that may go, if its version is needed and not kept yet, and the slot of its base."""
        base = self._table.newest
        if base is None or self._share <= 0:
            return None
        for slot in self._table.next_to_go:
            is_settled = slot.version in self._kept or slot.version in self._refused
            if self._is_needed(slot.version) and not is_settled and slot.manifest == base.manifest:
                return slot, base
        return None

    async def _keep_what_is_due(self) -> None:
        try:
            async with self._turn:
                await self._keep_due(gives_way=True)
        finally:
            self._is_looking = False

    async def _keep_due(self, *, gives_way: bool) -> None:
        while (due := self._due()) is not None and not (self._stop.is_set() or (gives_way and self._num_waiting)):
            await self._keep(*due, gives_way)

    async def _keep(self, slot: Slot, base: Slot, gives_way: bool) -> None:
        """Nothing is locked meanwhile: a delta of slots that were recycled under it is thrown away."""
        assert slot.version is not None
        assert slot.manifest is not None
        assert base.version is not None
        parts, room = None, self.bytes_max - self.num_bytes

        def is_over() -> bool:
            return self._stop.is_set() or not self._table.has(slot) or (gives_way and self._num_waiting > 0)

        work = partial(reverse, self._view(slot), self._view(base), slot.manifest.item_bytes, room, is_over)
        thread = self._encoding if gives_way else self._rebuilding
        try:
            parts = await asyncio.get_running_loop().run_in_executor(thread, work)
        except GaveWayError:
            if self._table.has(slot):
                return
        if not (self._table.has(slot) and self._table.has(base)) or self._stop.is_set():
            reason = "its slot was needed before its delta was done"
            log.info("relay_version_not_kept", version=str(slot.version), reason=reason)
        elif parts is None:
            self._make_room_for(slot.version, slot.order)
        elif self._is_needed(slot.version):
            self._kept[slot.version] = Kept(
                slot.version, base.version, slot.order, slot.manifest, slot.digest, slot.blocks, slot.canary, parts
            )
            log.info("relay_version_kept", version=str(slot.version), base=str(base.version), bytes=self.num_bytes)

    def _make_room_for(self, version: Version, order: int) -> None:
        """The oldest one goes, which fewer trajectories need; without an older one this does."""
        oldest = min(self._kept.values(), key=lambda kept: kept.order, default=None)
        if oldest is None or oldest.order > order:
            self._refuse(version, f"its difference to the newest takes more than the {self.bytes_max} bytes of all")
            return
        self._forget(oldest.version)
        self._refuse(oldest.version, f"all deltas together may take {self.bytes_max} bytes, and newer ones go first")
        self._forget_what_is_not_needed()

    def _refuse(self, version: Version, reason: str) -> None:
        tell = log.info if self.refusals else log.warning  # at a high learning rate it is so with every version
        tell("relay_version_not_kept", version=str(version), reason=reason)
        self._refused[version] = None
        self.refusals.append(f"{version}: {reason}")

    def _forget(self, version: Version) -> None:
        self._kept.pop(version, None)
        if self._table.ready(version) is None:
            self._on_gone(version)

    def _forget_what_is_not_needed(self) -> None:
        for version in list(self._kept):
            if not self._is_needed(version):
                self._forget(version)

    def _forget_orphans(self) -> None:
        for kept in reversed(list(self._kept.values())):
            if self._table.ready(kept.base) is None and kept.base not in self._kept:
                self._forget(kept.version)

    # ---- rebuilding

    def _chain(self, version: Version) -> list[Kept]:
        """What to apply to a READY version, one after another, to get this one."""
        chain = [self._kept[version]]
        while self._table.ready(chain[0].base) is None:
            chain.insert(0, self._kept[chain[0].base])
        return chain

    async def _rebuild(self, chain: list[Kept]) -> None:
        """It may be made in place, in the slot of what it is made of."""
        kept, root = chain[-1], self._table.ready(chain[0].base)
        assert root is not None
        slot = self._table.restore(kept.version, kept.manifest, kept.order)
        if slot is None:
            raise RelayError(
                f"{kept.version} is kept as a delta, and no slot is free to rebuild it; {self._table.describe()}"
            )
        lease = self._table.follow(root) if self._table.has(root) else None
        try:
            work = partial(rebuild, self._view(root), chain, self._writable(slot), self._stop)
            await asyncio.get_running_loop().run_in_executor(self._rebuilding, work)
        except RelayError:
            self._table.drop(kept.version)
            self._forget(kept.version)
            self._forget_orphans()
            raise
        finally:
            if lease is not None:
                self._table.release(lease)
        self._table.commit(kept.version, UPSTREAM, kept.canary)
        self._table.finish(kept.version, kept.digest, kept.blocks)
        self.num_rebuilt += 1
        log.info("relay_version_rebuilt", version=str(kept.version), deltas=len(chain))


def _give_way() -> None:
    """This thread only (Linux counts niceness per thread)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
