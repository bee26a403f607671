"""The relay's server: one Unix socket on which local trainer ranks publish versions and rollouts lease them.

It moves no weight bytes: writers and readers map the slot files themselves. What it adds is who may touch which slot
(`slots.SlotTable`), the digest of a complete version, and the cleaning up after peers that died.

Invariants:
* What a connection opened (publications, leases) ends with it.
* The event loop never works on slot bytes: allocating, prefaulting and digesting run in threads.
* Every version whose first rank got a slot is reported exactly once through `on_event`, as ready or as lost; a ready one once more
  when its slot is recycled.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog

from laminar.errors import ProtocolError
from laminar.ids import Version
from laminar.wire import VersionDropped, VersionLost, VersionReady
from laminar.workers.relay import protocol
from laminar.workers.relay.digest import combine, digest_blocks
from laminar.workers.relay.protocol import RelayError
from laminar.workers.relay.slot_files import SlotFiles, free_bytes
from laminar.workers.relay.slots import Slot, SlotTable, check_manifest

log = structlog.get_logger("laminar.relay")

CONNECTIONS_MAX = 1024  # ranks, replicas and their leases of one host; more is a leak in a client
FRAME_TIMEOUT_S = 10.0  # from a frame's header to its end, and for the peer to take a reply: both are local copies
WAIT_S_MAX = 600.0  # longest wait that `Acquire` may ask for
FILL_TIMEOUT_S = 600.0  # a rank that has not committed after this hangs; the version is lost, the run goes on
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class _Connection:
    """What one peer has open."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.leases: dict[int, None] = {}
        self.writing: dict[tuple[Version, int], None] = {}


class RelayServer:
    """Serves `directory` (made by `paths.create`), whose removal stays with the caller.

    `on_event` gets `VersionReady`, `VersionLost` and `VersionDropped` on the event loop and must not block. `free` tells the bytes
    that can still be allocated under a directory.
    """

    def __init__(
        self,
        directory: Path,
        num_slots: int,
        on_event: Callable[[VersionReady | VersionLost | VersionDropped], None],
        *,
        free: Callable[[Path], int] = free_bytes,
        fill_timeout_s: float = FILL_TIMEOUT_S,
    ) -> None:
        self.directory = directory
        self._table = SlotTable(num_slots, self._report_lost, self._report_dropped)
        self._num_slots = num_slots
        self._on_event = on_event
        self._free = free
        self._fill_timeout_s = fill_timeout_s
        self._files: SlotFiles | None = None
        self._allocating = asyncio.Lock()
        self._prefaulted: list[asyncio.Future[None]] = []
        self._deadlines: dict[Version, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._connections: dict[_Connection, None] = {}
        # Two threads: one may prefault the later slots while the first version is digested in the other.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="relay")
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises OSError when the socket cannot be bound."""
        self._server = await asyncio.start_unix_server(self._serve, self.directory / protocol.SOCKET_NAME)

    async def close(self) -> None:
        """Stop listening, drop all peers and threads, unmap. The files stay."""
        if self._server is not None:
            self._server.close()
        if self._files is not None:
            self._files.stop.set()
        for deadline in self._deadlines.values():
            deadline.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._files is not None:
            self._files.close()

    # ---- connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._own(task)
        connection = _Connection(0)
        try:
            connection.pid = self._admit(writer)
            self._connections[connection] = None
            await self._converse(connection, reader, writer)
        except ProtocolError as error:
            log.warning("relay_peer_refused", pid=connection.pid, reason=str(error))
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.info("relay_peer_gone", pid=connection.pid, reason=repr(error))
        except asyncio.CancelledError:
            pass  # only `close` cancels, and asyncio's own callback would log the cancellation as a failure
        finally:
            self._connections.pop(connection, None)
            self._drop(connection)
            writer.close()

    def _admit(self, writer: asyncio.StreamWriter) -> int:
        """The peer's pid. Raises ProtocolError for another user or one connection too many."""
        raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            raise ProtocolError(f"process {pid} of user {uid} may not use the relay of user {os.geteuid()}")
        if len(self._connections) >= CONNECTIONS_MAX:
            raise ProtocolError(
                f"process {pid} opened connection {CONNECTIONS_MAX + 1}; the limit is {CONNECTIONS_MAX}"
            )
        return int(pid)

    async def _converse(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while (request := await self._read(reader)) is not None:
            try:
                reply = await self._answer(connection, request)
            except RelayError as error:
                reply = protocol.Refusal(reason=str(error))
            writer.write(protocol.encode(reply))
            async with asyncio.timeout(FRAME_TIMEOUT_S):
                await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> protocol.Request | None:
        """The next request; None at the end. A peer may be idle for ever, but not in mid-frame."""
        first = await reader.read(1)
        if not first:
            return None
        async with asyncio.timeout(FRAME_TIMEOUT_S):
            header = first + await reader.readexactly(protocol.LENGTH.size - 1)
            body = await reader.readexactly(protocol.body_length(header))
        return protocol.decode_request(body)

    def _drop(self, connection: _Connection) -> None:
        for lease in connection.leases:
            self._table.release(lease)
        for version, rank in connection.writing:
            self._table.leave(version, rank, f"rank {rank} (pid {connection.pid}) went away before its commit")

    # ---- requests

    async def _answer(self, connection: _Connection, request: protocol.Request) -> protocol.Reply:
        match request:
            case protocol.Begin():
                return await self._begin(connection, request)
            case protocol.Commit():
                return self._commit(connection, request)
            case protocol.Abandon():
                return self._abandon(connection, request)
            case protocol.Acquire():
                return await self._acquire(connection, request)
            case protocol.Release():
                return self._release(connection, request)
            case protocol.GetStatus():
                return self._status()

    async def _begin(self, connection: _Connection, request: protocol.Begin) -> protocol.Begun:
        version, manifest = request.version, request.manifest
        check_manifest(manifest)
        files = await self._allocated(version, manifest.num_bytes)
        if manifest.num_bytes > files.capacity_bytes:
            raise RelayError(
                f"begin of {version}: {manifest.num_bytes} bytes do not fit in slots of {files.capacity_bytes} bytes, "
                f"which were made for the first version; restart the run to change the model's size"
            )
        slot = self._table.begin(version, manifest, request.rank, request.world_size)
        if slot is None:
            return protocol.Begun(file=None)
        connection.writing[version, request.rank] = None
        if len(slot.writing) + len(slot.committed) == 1:
            loop = asyncio.get_running_loop()
            self._deadlines[version] = loop.call_later(self._fill_timeout_s, self._expire, version)
        await self._backed(connection, slot, request.rank)
        return protocol.Begun(file=files.names[slot.index])

    async def _backed(self, connection: _Connection, slot: Slot, rank: int) -> None:
        """Wait until the slot's pages are there; if they cannot be had, the version is lost."""
        version = slot.version
        assert version is not None
        try:
            await asyncio.shield(self._prefaulted[slot.index])
        except OSError as error:
            reason = f"the pages of slot {slot.index} cannot be backed: {error}; free memory on this host"
            del connection.writing[version, rank]
            self._table.leave(version, rank, reason)
            raise RelayError(f"begin of {version}: {reason}") from error

    def _commit(self, connection: _Connection, request: protocol.Commit) -> protocol.Done:
        self._check_writer(connection, request.version, request.rank)
        del connection.writing[request.version, request.rank]
        complete = self._table.commit(request.version, request.rank, request.canary)
        if complete is not None:
            self._start(self._finish(complete), f"digest of {request.version}")
        return protocol.Done()

    def _abandon(self, connection: _Connection, request: protocol.Abandon) -> protocol.Done:
        self._check_writer(connection, request.version, request.rank)
        del connection.writing[request.version, request.rank]
        self._table.leave(request.version, request.rank, f"rank {request.rank} gave up: {request.reason}")
        return protocol.Done()

    def _check_writer(self, connection: _Connection, version: Version, rank: int) -> None:
        if (version, rank) not in connection.writing:
            raise RelayError(f"{version}: rank {rank} has not begun it on this connection, or has committed it already")

    async def _acquire(self, connection: _Connection, request: protocol.Acquire) -> protocol.Leased:
        if request.wait_s > 0:
            await self._wait_until_ready(request.version, min(request.wait_s, WAIT_S_MAX))
        lease, slot = self._table.lease(request.version)
        connection.leases[lease] = None
        assert self._files is not None
        assert slot.version is not None
        assert slot.manifest is not None
        file = self._files.names[slot.index]
        return protocol.Leased(
            lease=lease,
            version=slot.version,
            digest=slot.digest,
            file=file,
            manifest=slot.manifest,
            canary=slot.canary,
        )

    async def _wait_until_ready(self, version: Version | None, wait_s: float) -> None:
        def decided() -> bool:
            if version is None:
                return self._table.newest is not None
            return self._table.ready(version) is not None or self._table.is_settled(version)

        try:
            async with asyncio.timeout(wait_s):
                while not decided():
                    await self._changed.wait()
        except TimeoutError:
            pass  # the lease that follows says what is here instead

    def _release(self, connection: _Connection, request: protocol.Release) -> protocol.Done:
        if request.lease not in connection.leases:
            raise RelayError(f"release of lease {request.lease}: this connection does not hold it")
        del connection.leases[request.lease]
        self._table.release(request.lease)
        return protocol.Done()

    def _status(self) -> protocol.Status:
        names = self._files.names if self._files is not None else [f"slot-{slot.index}" for slot in self._table.slots]
        return protocol.Status(
            slots=[_slot_status(slot, names[slot.index]) for slot in self._table.slots],
            capacity_bytes=self._files.capacity_bytes if self._files is not None else 0,
            num_connections=len(self._connections),
            num_prefaulted=sum(future.done() for future in self._prefaulted),
        )

    # ---- slots

    async def _allocated(self, version: Version, num_bytes: int) -> SlotFiles:
        """The slot files, made now if this is the first manifest. Raises RelayError, the same to every rank."""
        async with self._allocating:
            if self._files is not None:
                return self._files
            self._table.is_superseded(version)
            files = SlotFiles(self.directory, self._num_slots, num_bytes)
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._threads, files.allocate, self._free)
            except RelayError as error:
                self._table.refuse(version, str(error))
                raise
            self._prefaulted = [loop.create_future() for _ in range(self._num_slots)]
            self._files = files
            self._start(self._prefault(files), "prefault")
            return files

    async def _prefault(self, files: SlotFiles) -> None:
        for index, backed in enumerate(self._prefaulted):
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, files.prefault, index)
            except OSError as error:
                backed.set_exception(error)
                backed.exception()  # retrieved, also if no version ever comes to this slot
            else:
                backed.set_result(None)

    async def _finish(self, slot: Slot) -> None:
        """Digest a complete version, then let readers in."""
        assert self._files is not None
        assert slot.version is not None
        with self._files.view(slot.index, slot.num_bytes) as view:
            blocks = await asyncio.get_running_loop().run_in_executor(
                self._threads, digest_blocks, view, self._files.stop
            )
        digest = combine(blocks, slot.num_bytes)
        if slot.lost:
            return
        self._cancel_deadline(slot.version)
        self._table.finish(slot.version, digest, blocks)
        self._wake()
        self._on_event(VersionReady(version=slot.version, digest=digest, num_bytes=slot.num_bytes))

    def _expire(self, version: Version) -> None:
        """A publication that is not READY in time is lost, so that a hung rank cannot keep a slot in silence."""
        slot = self._table.filling(version)
        if slot is not None:
            missing = [rank for rank in range(slot.world_size) if rank not in slot.committed]
            self._table.lose(version, f"ranks {missing} did not commit within {self._fill_timeout_s:g} s")

    def _cancel_deadline(self, version: Version) -> None:
        deadline = self._deadlines.pop(version, None)
        if deadline is not None:
            deadline.cancel()

    def _report_lost(self, version: Version, reason: str) -> None:
        self._cancel_deadline(version)
        self._wake()
        self._on_event(VersionLost(version=version, reason=reason))

    def _report_dropped(self, version: Version) -> None:
        self._on_event(VersionDropped(version=version))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- tasks

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._own(asyncio.create_task(work, name=name))

    def _own(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._disown)

    def _disown(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("relay_task_failed", task=task.get_name(), exc_info=error)


def _slot_status(slot: Slot, file: str) -> protocol.SlotStatus:
    return protocol.SlotStatus(
        file=file,
        state=slot.state.value,
        version=slot.version,
        digest=slot.digest,
        num_bytes=slot.num_bytes,
        num_leases=len(slot.leases),
        num_writers=len(slot.writing),
    )
