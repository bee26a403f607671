"""The relay's server: one Unix socket on which local trainer ranks publish versions and rollouts lease them.

It moves no weight bytes: writers and readers map the slot files themselves. What becomes of versions is in `versions.Versions`;
here is who may touch which slot, and the cleaning up after peers that died.

Invariants:
* What a connection opened (publications, leases) ends with it.
* The event loop never works on slot bytes: allocating, prefaulting and digesting run in threads.
* Every version whose first rank got a slot is reported exactly once through `on_event`, as ready or as lost; a ready one once more
  when its slot is recycled.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from laminar.errors import ProtocolError
from laminar.ids import Version
from laminar.wire import Neighbour, Progress, RelayReport, SlotReport
from laminar.workers.relay import protocol
from laminar.workers.relay.chain import Chain, Place
from laminar.workers.relay.chain_store import ChainStore
from laminar.workers.relay.digest import digest
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.old_versions import OldVersions
from laminar.workers.relay.protocol import RelayError
from laminar.workers.relay.slot_files import slot_name
from laminar.workers.relay.slots import Slot
from laminar.workers.relay.versions import Versions

log = structlog.get_logger("laminar.relay")

CONNECTIONS_MAX = 1024  # ranks, replicas and their leases of one host; more is a leak in a client
FRAME_TIMEOUT_S = 10.0  # from a frame's header to its end, and for the peer to take a reply: both are local copies
WORDS_KEPT = 16  # broken and slow links that the status shows
WAIT_S_MAX = 600.0  # longest wait that `Acquire` may ask for
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class _Connection:
    """What one peer has open."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.leases: dict[int, Slot] = {}
        self.writing: dict[tuple[Version, int], int] = {}
        """Version and rank -> publication."""


class RelayServer:
    """Serves `versions`, whose directory (made by `paths.create`) stays the caller's to remove."""

    def __init__(self, versions: Versions) -> None:
        self.directory, self.versions = versions.directory, versions
        self._table = self.versions.table
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._connections: dict[_Connection, None] = {}
        self._chain: Chain | None = None
        self._broken: deque[str] = deque(maxlen=WORDS_KEPT)
        self._slow: deque[str] = deque(maxlen=WORDS_KEPT)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises OSError when the socket cannot be bound."""
        self._server = await asyncio.start_unix_server(self._serve, self.directory / protocol.SOCKET_NAME)

    async def close(self) -> None:
        """Stop listening, drop all peers and threads, unmap. The files stay."""
        if self._server is not None:
            self._server.close()
        if self._chain is not None:
            await asyncio.to_thread(self._chain.close)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.versions.close()

    # ---- the chain

    def join_chain(
        self, place: Place, on_broken: Callable[[str, int], None], on_slow: Callable[[str, int], None]
    ) -> int:
        """Listen for a neighbour upstream; the port. Both are called with (peer, epoch), on the loop. Raises StartError."""
        loop = asyncio.get_running_loop()

        def told_by(kept: deque[str], tell: Callable[[str, int], None]) -> Callable[[str, int], None]:
            def told(peer: str, epoch: int) -> None:
                kept.append(f"{epoch}: {peer}")
                with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who cares
                    loop.call_soon_threadsafe(tell, peer, epoch)

            return told

        broken, slow = told_by(self._broken, on_broken), told_by(self._slow, on_slow)
        self._chain = Chain(place, ChainStore(self.versions), broken, slow)
        self.versions.shards.name = place.name
        self.versions.on_news, self.versions.shards.send = self._chain.wake, self._chain.send_shards
        return self._chain.port

    def arrange(self, epoch: int, upstream: str | None, downstream: Neighbour | None, num_relays: int = 0) -> None:
        """Take this place in the chain. Raises RelayError when it has not joined one."""
        if self._chain is None:
            raise RelayError("this relay takes part in no chain: start it with --listen")
        self._chain.arrange(epoch, upstream, downstream, num_relays)

    def report(self) -> RelayReport:
        """What people may want to see of it in the controller."""
        old = self.versions.old
        alone = RelayReport(
            kept=[kept.version for kept in old.kept],
            kept_bytes=old.num_bytes,
            slots=[
                SlotReport(state=slot.state.value, version=slot.version, num_leases=len(slot.leases))
                for slot in self._table.slots
            ],
            slot_bytes=self.versions.memory.capacity_bytes,
        )
        if self._chain is None:
            return alone
        chain, sent = self._chain_status(self._chain), self._chain.sent
        return msgspec.structs.replace(
            alone,
            transport=chain.transport,
            sent_bytes=sent.version_bytes,
            wire_bytes=sent.wire_bytes,
            receiving=chain.incoming,
            sending=chain.outgoing,
        )

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
        for (version, rank), publication in connection.writing.items():
            reason = f"rank {rank} (pid {connection.pid}) went away before its commit"
            self._table.leave(version, rank, reason, publication)

    # ---- requests

    async def _answer(self, connection: _Connection, request: protocol.Request) -> protocol.Reply:
        match request:
            case protocol.Begin():
                return await self._begin(connection, request)
            case protocol.Wrote():
                return self._wrote(connection, request)
            case protocol.Commit():
                return self._commit(connection, request)
            case protocol.Abandon():
                return self._abandon(connection, request)
            case protocol.Acquire():
                return await self._acquire(connection, request)
            case protocol.Release():
                return self._release(connection, request)
            case protocol.Distrust():
                return await self._distrust(connection, request)
            case protocol.Arrange():
                self.arrange(request.epoch, request.upstream, request.downstream, request.num_relays)
                return protocol.Done()
            case protocol.Retain():
                self.versions.old.want(request.versions)
                return protocol.Done()
            case protocol.GetStatus():
                return self._status()

    async def _begin(self, connection: _Connection, request: protocol.Begin) -> protocol.Begun:
        slot = await self.versions.begin(request)
        if slot is None:
            return protocol.Begun(file=None)
        connection.writing[request.version, request.rank] = request.publication
        try:
            await self.versions.backed(slot, request.rank)
        except RelayError:
            connection.writing.pop((request.version, request.rank), None)
            raise
        return protocol.Begun(file=slot_name(slot.index))

    def _wrote(self, connection: _Connection, request: protocol.Wrote) -> protocol.Done:
        publication = self._publication(connection, request)
        self.versions.shards.wrote(request.version, request.rank, request.num_ranges, publication)
        return protocol.Done()

    def _commit(self, connection: _Connection, request: protocol.Commit) -> protocol.Done:
        publication = self._publication(connection, request)
        del connection.writing[request.version, request.rank]
        self.versions.commit(request.version, request.rank, request.canary, publication)
        return protocol.Done()

    def _abandon(self, connection: _Connection, request: protocol.Abandon) -> protocol.Done:
        publication = self._publication(connection, request)
        del connection.writing[request.version, request.rank]
        reason = f"rank {request.rank} gave up: {request.reason}"
        self._table.leave(request.version, request.rank, reason, publication)
        return protocol.Done()

    def _publication(
        self, connection: _Connection, request: protocol.Wrote | protocol.Commit | protocol.Abandon
    ) -> int:
        """Which one the rank writes for on this connection. Raises RelayError if it does not."""
        publication = connection.writing.get((request.version, request.rank))
        if publication is None:
            raise RelayError(
                f"{request.version}: rank {request.rank} has not begun it on this connection, or has committed it already"
            )
        return publication

    async def _acquire(self, connection: _Connection, request: protocol.Acquire) -> protocol.Leased:
        await self.versions.until_ready(request.version, min(request.wait_s, WAIT_S_MAX))
        lease, slot = self._table.lease(request.version)
        connection.leases[lease] = slot
        assert slot.version is not None
        assert slot.manifest is not None
        return protocol.Leased(
            lease=lease,
            version=slot.version,
            digest=slot.digest,
            file=slot_name(slot.index),
            manifest=slot.manifest,
            canary=slot.canary,
        )

    def _release(self, connection: _Connection, request: protocol.Release) -> protocol.Done:
        if request.lease not in connection.leases:
            raise RelayError(f"release of lease {request.lease}: this connection does not hold it")
        del connection.leases[request.lease]
        self._table.release(request.lease)
        return protocol.Done()

    async def _distrust(self, connection: _Connection, request: protocol.Distrust) -> protocol.Done:
        """Look for oneself: a reader alone cannot take a version away from the others."""
        if request.lease not in connection.leases:
            raise RelayError(f"distrust of lease {request.lease}: this connection does not hold it")
        slot = connection.leases[request.lease]
        if await asyncio.to_thread(digest, self.versions.memory.view(slot)) != slot.digest:
            self.versions.discard(slot)
        return protocol.Done()

    def _status(self) -> protocol.Status:
        return protocol.Status(
            slots=[_slot_status(slot) for slot in self._table.slots],
            capacity_bytes=self.versions.memory.capacity_bytes,
            num_connections=len(self._connections),
            num_prefaulted=self.versions.memory.num_prefaulted,
            old=_old_status(self.versions.old),
            chain_port=self._chain.port if self._chain is not None else 0,
            chain=self._chain_status(self._chain) if self._chain is not None else None,
            chain_epoch=self._chain.epoch if self._chain is not None else 0,
            chain_sent_bytes=self._chain.sent.version_bytes if self._chain is not None else 0,
            chain_wire_bytes=self._chain.sent.wire_bytes if self._chain is not None else 0,
            chain_broken=list(self._broken),
            chain_slow=list(self._slow),
        )

    def _chain_status(self, chain: Chain) -> protocol.ChainStatus:
        coming, going = self.versions.incoming, chain.sent.under_way
        return protocol.ChainStatus(
            transport=chain.transport,
            chunk_bytes=chain.sent.chunk_bytes,
            start_s=chain.sent.cost.start_s,
            byte_s=chain.sent.cost.byte_s,
            incoming=_progress(coming, coming.received) if coming is not None else None,
            outgoing=_progress(*going) if going is not None else None,
        )

    # ---- tasks

    def _own(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._disown)

    def _disown(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("relay_task_failed", task=task.get_name(), exc_info=error)


def _progress(flow: Flow, num_bytes: int) -> Progress:
    return Progress(version=flow.version, num_bytes=num_bytes, total_bytes=flow.num_bytes)


def _old_status(old: OldVersions) -> protocol.OldStatus:
    return protocol.OldStatus(
        kept=[
            protocol.KeptStatus(
                version=kept.version, base=kept.base, num_bytes=kept.num_bytes, is_wanted=old.is_wanted(kept.version)
            )
            for kept in old.kept
        ],
        num_bytes=old.num_bytes,
        bytes_max=old.bytes_max,
        num_rebuilt=old.num_rebuilt,
        refusals=list(old.refusals),
    )


def _slot_status(slot: Slot) -> protocol.SlotStatus:
    return protocol.SlotStatus(
        file=slot_name(slot.index),
        state=slot.state.value,
        version=slot.version,
        digest=slot.digest,
        num_bytes=slot.num_bytes,
        num_leases=len(slot.leases),
        num_writers=len(slot.writing),
    )
