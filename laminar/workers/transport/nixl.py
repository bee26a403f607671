"""NIXL: one-sided reads of the neighbour's memory, by RDMA where there is a card; its wheel brings all that this needs.

A link begins as a TCP connection and keeps it for all that is small. Once both ends have proved who they are (`promote`), bytes
that lie in a mapped file (a slot) are not sent: the sender says where they are, and the receiver reads them, as much as it is asked
for at a time, straight into its own slot. Each read notifies the sender.

The paper's relays write into the receiver's memory instead. Reading costs a round trip per chunk. In return only this process ever
moves anything into its slots: a neighbour that was stopped and wakes up after its epoch has nothing to write with.

Invariant: after an error nothing is read any more; a read that does not end is ended by cutting the other process off.
"""

import mmap
import secrets
import socket
import struct
import time
from typing import NamedTuple

from laminar.workers.transport.base import RDMA, Link, LinkEnded, Listener, Stalled
from laminar.workers.transport.nixl_agent import ERRORS, NOTICE, Agent, address_of, has_rdma
from laminar.workers.transport.silence import Watch
from laminar.workers.transport.tcp import TcpLink, TcpTransport

DIRECT_BYTES_MIN = 64 << 10  # less is sent faster than announced and read
BOUNCE_BYTES = 1 << 20
POLL_S = 1e-4  # there is nothing to wait on: the library must be asked
METADATA_BYTES_MAX = 16 << 20
INLINE, DIRECT, METADATA = 0, 1, 2
_FRAME = struct.Struct("<BQQ")
"""Kind; length; address in the sender's memory (`DIRECT`)."""
_INTRODUCTION = struct.Struct("<4sQI")
"""Magic, the link's mark at this end, length of the introduction that follows."""
_MAGIC = b"LMN1"


class NixlTransport:
    """See `Transport`."""

    name = "nixl"

    def __init__(self, progress_timeout_s: float) -> None:
        self._tcp = TcpTransport(progress_timeout_s, streams_max=1)
        self._agent = Agent()
        self.medium = RDMA if has_rdma() else "TCP or shared memory"

    def listen(self, host: str, port: int = 0) -> Listener:
        """`port` 0: a free one."""
        return _NixlListener(self._tcp.listen(host, port), self._agent)

    def connect(self, host: str, port: int, timeout_s: float) -> Link:
        """One attempt."""
        return NixlLink(self._tcp.connect(host, port, timeout_s), self._agent)


class _NixlListener:
    """See `Listener`."""

    def __init__(self, listener: Listener, agent: Agent) -> None:
        self._listener, self._agent = listener, agent
        self.port = listener.port

    def accept(self) -> Link:
        """The next peer."""
        return NixlLink(self._listener.accept(), self._agent)

    def close(self) -> None:
        """Take no more peers."""
        self._listener.close()


class _Coming(NamedTuple):
    """What is still to come of one part."""

    kind: int
    left: int
    address: int


class NixlLink:
    """See `Link`."""

    def __init__(self, tcp: Link, agent: Agent) -> None:
        assert isinstance(tcp, TcpLink)
        self.peer, self.medium = tcp.peer, tcp.medium
        self._tcp, self._agent = tcp, agent
        self._timeout_s = tcp.progress_timeout_s
        self._name = ""
        """The other process; empty before `promote`."""
        self._mark, self._their_mark = secrets.randbits(64), 0
        self._announced: dict[int, None] = {}
        """Mappings, by identity, that the other end was told how to read."""
        self._coming = _Coming(INLINE, 0, 0)
        self._bounce: memoryview | None = None

    def promote(self) -> None:
        """Tell each other whom to read from."""
        introduction = self._agent.introduction()
        self._tcp.send(_INTRODUCTION.pack(_MAGIC, self._mark, len(introduction)), introduction)
        magic, self._their_mark, length = _INTRODUCTION.unpack(self._take(_INTRODUCTION.size))
        if magic != _MAGIC or length > METADATA_BYTES_MAX:
            raise LinkEnded(f"{self.peer} does not speak NIXL: the relays of a run use the same relay.transport")
        try:
            self._name = self._agent.meet(bytes(self._take(length)), self._mark)
        except ERRORS as error:
            raise self._ended(error) from error
        self.medium = RDMA if has_rdma() else "TCP or shared memory"

    def send(self, *parts: memoryview | bytes) -> None:
        """All of them, in order."""
        for part in parts:
            view = memoryview(part)
            if not self._name:
                self._tcp.send(view)
            elif view.nbytes >= DIRECT_BYTES_MIN and isinstance(view.obj, mmap.mmap):
                self._offer(view)
            elif view.nbytes:
                self._tcp.send(_FRAME.pack(INLINE, view.nbytes, 0), view)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        if not self._name:
            self._tcp.receive_into(view)
            return
        while view.nbytes:
            while not self._coming.left:
                self._next_part()
            kind, left, address = self._coming
            count = min(left, view.nbytes)
            if kind == DIRECT:
                count = self._read(address, view[:count])
            else:
                self._tcp.receive_into(view[:count])
            self._coming = _Coming(kind, left - count, address + count)
            view = view[count:]

    def close(self) -> None:
        """End it, waking whoever waits in it."""
        self._tcp.close()
        if self._name:
            self._agent.part(self._name, self._mark)

    def _offer(self, view: memoryview) -> None:
        """Say where the bytes are, and wait until they were read."""
        try:
            region = self._agent.region(view)
        except ERRORS as error:
            raise self._ended(error) from error
        if id(region.mapping) not in self._announced:
            self._tcp.send(_FRAME.pack(METADATA, len(region.metadata), 0), region.metadata)
            self._announced[id(region.mapping)] = None
        self._tcp.send(_FRAME.pack(DIRECT, view.nbytes, address_of(view)))
        left, watch = view.nbytes, Watch(self._timeout_s)
        while left > 0:
            if count := self._agent.take_read(self._mark):
                left -= count
                watch.moved()
            else:
                self._wait(watch)

    def _next_part(self) -> None:
        kind, length, address = _FRAME.unpack(self._take(_FRAME.size))
        if kind == METADATA and length <= METADATA_BYTES_MAX:
            try:
                self._agent.learn(bytes(self._take(length)))
            except ERRORS as error:
                raise self._ended(error) from error
        elif kind in (INLINE, DIRECT):
            self._coming = _Coming(kind, length, address)
        else:
            raise LinkEnded(f"{self.peer} sent a part of kind {kind} with {length} bytes")

    def _read(self, address: int, view: memoryview) -> int:
        """Read from there into `view`, or as much of it as the bounce buffer takes. Bytes."""
        target = view
        if not isinstance(view.obj, mmap.mmap):  # not a slot
            if self._bounce is None:
                self._bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
            target = self._bounce[: min(view.nbytes, BOUNCE_BYTES)]
        self._fetch(address, target)
        if target is not view:
            view[: target.nbytes] = target
        return target.nbytes

    def _fetch(self, address: int, target: memoryview) -> None:
        try:
            self._agent.region(target)
            notice = NOTICE.pack(self._their_mark, target.nbytes)
            self._agent.begin(self._name, self._mark, address, target, notice)
            watch = Watch(self._timeout_s)
            while not self._agent.has_read(self._mark):
                self._wait(watch)
        except ERRORS as error:
            raise self._ended(error) from error
        finally:
            self._agent.end(self._name, self._mark)

    def _wait(self, watch: Watch) -> None:
        """A moment. Raises LinkEnded when the connection has, Stalled after the deadline."""
        if watch.is_over():
            raise Stalled(f"no byte to or from {self.peer} for {self._timeout_s:g} s")
        try:
            alive = bool(self._tcp.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            alive = True
        except OSError as error:
            raise self._ended(error) from error
        if not alive:
            raise LinkEnded(f"{self.peer} closed the link")
        time.sleep(POLL_S)

    def _take(self, length: int) -> bytearray:
        taken = bytearray(length)
        self._tcp.receive_into(memoryview(taken))
        return taken

    def _ended(self, error: Exception) -> LinkEnded:
        return LinkEnded(f"link to {self.peer}: {error}")
