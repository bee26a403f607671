"""The versions of one relay: slots, the files behind them, and what becomes of a version from its first byte to READY or lost.

Lives on the event loop; slow work (allocation, first touch of pages, digests) goes on in two threads. Ranks of this host fill
versions through the daemon's socket, ranks of other hosts through links from their relays, the neighbour upstream through the
chain. When only some of the ranks are here, and another relay collects the version, their shards are sent there and kept here
until the whole version comes through the chain.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog

from laminar.ids import Version
from laminar.wire import VersionDropped, VersionHeld, VersionLost, VersionReady
from laminar.workers.canary import Canary
from laminar.workers.relay.digest import combine
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.manifest import Manifest
from laminar.workers.relay.old_versions import OldVersions
from laminar.workers.relay.protocol import Begin, RelayError
from laminar.workers.relay.ranges import check_manifest
from laminar.workers.relay.shard_traffic import ShardTraffic
from laminar.workers.relay.shards import Collection, Outgoing
from laminar.workers.relay.slot_files import SlotFiles, free_bytes
from laminar.workers.relay.slot_memory import SlotMemory
from laminar.workers.relay.slots import UPSTREAM, Slot, SlotTable

log = structlog.get_logger("laminar.relay")

FILL_TIMEOUT_S = 600.0  # a rank that has not committed after this hangs; the version is lost, the run goes on
OTHERS_TIMEOUT_S = 30.0  # all ranks begin before one commits: those not heard of by then are on a host that is gone
READ_TIMEOUT_S = 5.0  # what the chain brings, the other relay has: its sender here has only to say that it has ended

Told = VersionReady | VersionHeld | VersionLost | VersionDropped


class Versions:
    """`on_event` gets what the controller is to know; it must not block. `free`: bytes that a directory still takes."""

    def __init__(
        self,
        directory: Path,
        num_slots: int,
        on_event: Callable[[Told], None],
        *,
        old_versions_share: float = 0.0,
        free: Callable[[Path], int] = free_bytes,
        fill_timeout_s: float = FILL_TIMEOUT_S,
    ) -> None:
        self.directory = directory
        # Two threads: one may prefault the later slots while the first version is digested in the other.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="relay")
        self.memory = SlotMemory(directory, num_slots, free, self._threads)
        self.table = SlotTable(num_slots, self._report_lost, lambda version: self.old.recycled(version))
        self.old = OldVersions(
            self.table,
            old_versions_share,
            view=self.memory.view,
            writable=self.memory.writable,
            capacity=lambda: self.memory.capacity_bytes,
            on_gone=lambda version: on_event(VersionDropped(version=version)),
            start=self._start,
        )
        self.shards = ShardTraffic(self.table)
        self.on_news: Callable[[], None] = lambda: None
        """Called when there is a version that there was not: READY, or digested."""
        self.on_unusable: Callable[[str], None] = lambda reason: None
        """Called when this host has no room for the slots: nothing can ever come through here."""
        self._on_event, self._fill_timeout_s = on_event, fill_timeout_s
        self._allocating = asyncio.Lock()
        self._deadlines: dict[Version, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._accepting = asyncio.Lock()
        """Held by whoever changes what comes from upstream."""
        self._incoming: tuple[Flow, Slot] | None = None
        """What the neighbour upstream sends, or sent last."""
        self._digesting: dict[Flow, Slot] = {}
        """What ranks of this host wrote, until its digest is known: it flows on meanwhile."""

    @property
    def incoming(self) -> Flow | None:
        """The version that comes from the neighbour upstream."""
        return self._incoming[0] if self._incoming is not None else None

    async def close(self) -> None:
        """End the threads, unmap. The files stay."""
        self.memory.stop()
        for deadline in self._deadlines.values():
            deadline.cancel()
        self.shards.close()
        self.old.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.old.close()
        self._incoming = None
        self.memory.close()

    # ---- filling

    async def begin(self, wanted: Begin) -> Slot | None:
        """The slot that this rank writes to; call `backed` before it does. None = superseded. Raises RelayError."""
        await self._make_fit(wanted.version, wanted.manifest, wanted.publication)
        slot = self._join(wanted, self.shards.num_here(wanted))
        if slot is not None and slot.is_part:
            try:
                self.shards.follow(slot, wanted, self.memory.view)
            except RelayError as error:
                self.table.leave(wanted.version, wanted.rank, str(error), wanted.publication)
                raise
        return slot

    def _join(self, wanted: Begin, num_here: int) -> Slot | None:
        slot = self.table.begin(
            wanted.version,
            wanted.manifest,
            wanted.rank,
            wanted.world_size,
            ranges=wanted.ranges,
            publication=wanted.publication,
            num_here=num_here,
        )
        if slot is not None:
            self._watch(slot)
            self.old.look()
        return slot

    async def _make_fit(self, version: Version, manifest: Manifest, publication: int = 0) -> None:
        """Slots are there, and the version fits in one. Raises RelayError."""
        check_manifest(manifest)
        files = await self._allocated(version, manifest.num_bytes, publication)
        if manifest.num_bytes > files.capacity_bytes:
            raise RelayError(
                f"begin of {version}: {manifest.num_bytes} bytes do not fit in slots of {files.capacity_bytes} bytes, "
                f"which were made for the first version; restart the run to change the model's size"
            )

    async def backed(self, slot: Slot, rank: int) -> None:
        """Wait until the slot's pages are there; if they cannot be had, the version is lost and RelayError raised."""
        version = slot.version
        assert version is not None
        try:
            await self.memory.backed(slot)
        except RelayError as error:
            self.table.leave(version, rank, str(error), slot.publication)
            raise RelayError(f"begin of {version}: {error}") from error

    def commit(self, version: Version, rank: int, canary: Canary | None, publication: int = 0) -> None:
        """The rank has written all its bytes; READY follows when all have. Raises RelayError."""
        complete = self.table.commit(version, rank, canary, publication)
        self.shards.commit(version, rank, canary, publication)
        slot = complete or self.table.filling(version)
        if slot is not None and not slot.complete:
            self._watch(slot)
        elif slot is not None and slot.is_part:
            self._cancel_deadline(version)  # its sender has deadlines of its own
        elif slot is not None:
            self._start(self._digest(slot), f"digest of {version}")

    async def _digest(self, slot: Slot) -> None:
        """Digest what ranks wrote, then let readers in. Downstream it goes at once: its digest comes after its bytes."""
        assert self.memory.files is not None
        assert slot.version is not None
        assert slot.manifest is not None
        flow, stop = Flow(slot.version, slot.manifest, self.memory.view(slot)), self.memory.files.stop
        self._digesting[flow] = slot
        self.on_news()
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, flow.take_all, stop)
        finally:
            del self._digesting[flow]
        if slot.lost:
            flow.lose()
            return
        digest = combine(bytes(flow.blocks), slot.num_bytes)
        self._ready(slot.version, digest, bytes(flow.blocks))
        flow.finish(digest, slot.canary)
        self._on_event(VersionReady(version=slot.version, digest=digest, num_bytes=slot.num_bytes))

    def _ready(self, version: Version, digest: str, blocks: bytes) -> None:
        self._cancel_deadline(version)
        slot = self.table.finish(version, digest, blocks)
        self.shards.end(version, slot.publication, ready=True)
        self.old.look()
        self._wake()
        self.on_news()

    def _watch(self, slot: Slot) -> None:
        """A publication that makes no progress is lost, so that a rank that hangs or never comes cannot keep a slot in silence."""
        assert slot.version is not None
        self._cancel_deadline(slot.version)
        waits_for_others = slot.publication and slot.committed and not slot.writing
        timeout_s = min(OTHERS_TIMEOUT_S, self._fill_timeout_s) if waits_for_others else self._fill_timeout_s
        deadline = asyncio.get_running_loop().call_later(timeout_s, self._expire, slot.version, timeout_s)
        self._deadlines[slot.version] = deadline

    def _expire(self, version: Version, timeout_s: float) -> None:
        slot = self.table.filling(version)
        if slot is not None:
            expected = list(slot.writing) if slot.is_part else range(slot.world_size)
            missing = [rank for rank in expected if rank not in slot.committed]
            self.table.lose(version, f"ranks {missing} did not commit within {timeout_s:g} s")

    def _cancel_deadline(self, version: Version) -> None:
        deadline = self._deadlines.pop(version, None)
        if deadline is not None:
            deadline.cancel()

    # ---- shards of several hosts

    def join(self, wanted: Begin) -> Collection:
        """A rank of another host is to write to a version that is collected here. Raises RelayError."""
        if refused := self.shards.refusal(wanted.publication):
            raise RelayError(refused[0])
        slot = self._join(wanted, wanted.world_size)
        assert slot is not None
        return self.shards.collection(slot, self.memory.writable)

    def read(self, shards: Outgoing) -> None:
        """As `ShardTraffic.read`."""
        self.shards.read(shards)
        self._wake()

    def sent(self, shards: Outgoing, failure: str) -> None:
        """As `ShardTraffic.sent`."""
        self.shards.sent(shards, failure)
        self._wake()

    # ---- the chain

    async def accept(self, version: Version, manifest: Manifest) -> Flow | None:
        """Where the neighbour upstream is to go on with this version; None: there is no place for it, or it was here and went.

        A link that ends meanwhile does not end this: the next link's call waits for it, lest both take a slot.
        """
        async with self._accepting:
            ready = self.table.ready(version)
            if ready is not None:
                return self._flow_of(ready)
            if self._incoming is not None:
                flow, slot = self._incoming
                if flow.version == version and not slot.lost:
                    return flow
                self.lose(flow, slot.lost or f"upstream went on with {version}")
            return await self._take_in(version, manifest)

    async def _take_in(self, version: Version, manifest: Manifest) -> Flow | None:
        """A version of which nothing is here, but perhaps shards."""
        try:
            await self._make_fit(version, manifest)
            await self._until(lambda: not self.shards.is_leaving(version), READ_TIMEOUT_S)
            slot = self.table.receive(version, manifest)
            if slot is None:
                return None
            self.old.look()
            await self.backed(slot, UPSTREAM)
        except RelayError as error:
            log.warning("relay_version_not_taken", version=str(version), reason=str(error))
            if self.memory.files is None:
                self.on_unusable(str(error))
            return None
        flow = Flow(version, manifest, self.memory.writable(slot))
        self._incoming = flow, slot
        return flow

    def finish(self, flow: Flow, digest: str, canary: Canary | None) -> None:
        """What came from upstream is complete and verified."""
        if flow is not self.incoming or self._incoming is None:
            return
        _, slot = self._incoming
        if slot.lost:
            self.lose(flow, slot.lost)
            return
        self.table.commit(flow.version, UPSTREAM, canary)
        self._ready(flow.version, digest, bytes(flow.blocks))
        flow.finish(digest, canary)
        self._incoming = None
        self._on_event(VersionHeld(version=flow.version, digest=digest))

    def lose(self, flow: Flow, reason: str) -> None:
        """It will never be complete. The controller is not told: it counts on complete holders only."""
        if flow is not self.incoming:
            return
        self._incoming = None
        log.info("relay_flow_lost", version=str(flow.version), received=flow.received, reason=reason)
        flow.lose()
        self.table.drop(flow.version)

    async def lose_incoming(self) -> None:
        """This relay is the master now: nobody sends the rest of what was coming."""
        async with self._accepting:
            if self._incoming is not None:
                self.lose(self._incoming[0], "this relay is the first of the chain now")

    def discard(self, slot: Slot) -> None:
        """Its bytes have changed in memory: nobody gets the version here until it has come anew."""
        log.error("relay_version_changed", version=str(slot.version), slot=slot.index)
        self.table.discard(slot)

    def ready(self, version: Version | None) -> tuple[Flow, int] | None:
        """A READY version (None = the newest), under a lease; None if it is not."""
        slot = self.table.newest if version is None else self.table.ready(version)
        return None if slot is None else (self._flow_of(slot), self.table.follow(slot))

    def newest(self) -> tuple[Flow, int] | None:
        """The newest version that is READY, or comes from upstream, or is digested, under a lease."""
        flows = [*self._digesting.items(), *([self._incoming] if self._incoming is not None else [])]
        coming = [(flow, slot) for flow, slot in flows if not slot.lost]
        flow, slot = max(coming, key=lambda found: found[1].order, default=(None, None))
        ready = self.table.newest
        if slot is not None and flow is not None and (ready is None or slot.order > ready.order):
            return flow, self.table.follow(slot)
        return self.ready(None)

    def _flow_of(self, slot: Slot) -> Flow:
        assert slot.version is not None
        assert slot.manifest is not None
        view = self.memory.view(slot)
        return Flow.complete(slot.version, slot.manifest, view, slot.blocks, slot.digest, slot.canary)

    # ---- readers

    async def until_ready(self, version: Version | None, wait_s: float) -> None:
        """Wait until the version (None = any) is READY or never will be, or the time is over; an old one is rebuilt if it is kept
        (RelayError if it cannot be)."""
        if version is not None:
            await self.old.restore(version)

        def decided() -> bool:
            if version is None:
                return self.table.newest is not None
            return self.table.ready(version) is not None or self.table.is_settled(version)

        await self._until(decided, wait_s)  # if it is not, the lease that follows says what is here instead

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """At most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()

    # ---- memory

    async def _allocated(self, version: Version, num_bytes: int, publication: int) -> SlotFiles:
        """The slot files, made now if this is the first manifest. Raises RelayError, the same to every rank."""
        async with self._allocating:
            if self.memory.files is not None:
                return self.memory.files
            self.table.is_superseded(version, publication)
            try:
                files = await self.memory.allocate(num_bytes)
            except RelayError as error:
                self.table.refuse(version, str(error), publication)
                raise
            self._start(self.memory.prefault(), "prefault")
            return files

    # ---- reports and tasks

    def _report_lost(self, version: Version, reason: str, publication: int) -> None:
        self._cancel_deadline(version)
        self.shards.end(version, publication, ready=False)
        self._wake()
        self._on_event(VersionLost(version=version, reason=reason, publication=publication))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("relay_task_failed", task=task.get_name(), exc_info=error)
