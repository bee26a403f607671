"""UCX through `ucxx`: shared memory between relays of one machine, TCP between machines, RDMA where UCX is built with it.

The wheels of PyPI are not: for RDMA `ucxx` must find a UCX of the site, see docs/relays.md. `medium` says what is used.

A link begins as a TCP connection. Once both ends have proved who they are (`promote`), each tells the other over it the address of
a UCX worker of its own, made for this link alone, and a random tag. From then on bytes go by tagged messages, and the connection
only tells that the other end still lives: UCX itself notices neither a stopped process nor a dead link.

Invariants:
* A message that fits in what is asked for is received in place; sender and receivers of versions cut at the same places.
* The receiver fetches (rendezvous by get): nothing that a peer does after the link has ended reaches this process's memory.
* The UCX objects are released by the last thread that is inside a call, never under another one's feet.
"""

import contextlib
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from laminar.workers.transport.base import Link, LinkEnded, Listener, Stalled
from laminar.workers.transport.silence import Watch
from laminar.workers.transport.tcp import TcpLink, TcpTransport
from laminar.workers.transport.ucx_route import Route, medium_of, resources_of, ucx

PIECE_BYTES = 1 << 20  # a digest block, in which versions are received
PIECES_MAX = 8  # under way at a time: enough that the link does not wait for this process between two
ADDRESS_BYTES_MAX = 64 << 10  # of a worker; a few hundred bytes per device
_INTRODUCTION = struct.Struct("<4sQH")
"""Magic, tag of the messages to this end, length of its worker's address, which follows."""
_MAGIC = b"LMU1"


class UcxTransport:
    """See `Transport`."""

    name = "ucx"

    def __init__(self, progress_timeout_s: float) -> None:
        self._context = ucx.UCXContext(feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._tcp = TcpTransport(progress_timeout_s, streams_max=1)
        self.medium = medium_of(resources_of(self._context.info))

    def listen(self, host: str, port: int = 0) -> Listener:
        """`port` 0: a free one."""
        return _UcxListener(self._tcp.listen(host, port), self._context)

    def connect(self, host: str, port: int, timeout_s: float) -> Link:
        """One attempt."""
        return UcxLink(self._tcp.connect(host, port, timeout_s), self._context)


class _UcxListener:
    """See `Listener`."""

    def __init__(self, listener: Listener, context: Any) -> None:
        self._listener, self._context = listener, context
        self.port = listener.port

    def accept(self) -> Link:
        """The next peer."""
        return UcxLink(self._listener.accept(), self._context)

    def close(self) -> None:
        """Take no more peers."""
        self._listener.close()


class UcxLink:
    """See `Link`."""

    def __init__(self, life: Link, context: Any) -> None:
        assert isinstance(life, TcpLink)
        self.peer, self.medium = life.peer, life.medium
        self._life, self._context = life, context
        self._timeout_s = life.progress_timeout_s
        self._route: Route | None = None
        self._rest = memoryview(b"")
        """Of a message that was longer than what had been asked for."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._num_inside = 0
        self._closed = False

    def promote(self) -> None:
        """Move to UCX. Returns when a byte has come and gone over it."""
        with _as_link_ended(self.peer):
            worker, tag = ucx.UCXWorker(self._context), secrets.randbits(64)
            address = bytes(memoryview(worker.address))
        self._life.send(_INTRODUCTION.pack(_MAGIC, tag, len(address)), address)
        header = bytearray(_INTRODUCTION.size)
        self._life.receive_into(memoryview(header))
        magic, their_tag, length = _INTRODUCTION.unpack(header)
        if magic != _MAGIC or not 0 < length <= ADDRESS_BYTES_MAX:
            raise LinkEnded(f"{self.peer} does not speak UCX: the relays of a run use the same relay.transport")
        theirs = bytearray(length)
        self._life.receive_into(memoryview(theirs))
        with _as_link_ended(self.peer):
            self._route = Route(worker, bytes(theirs), tag, their_tag)
        self.send(b"\0")
        self.receive_into(memoryview(bytearray(1)))
        with self._inside() as route:
            assert route is not None
            self.medium = medium_of(route.transports())

    def send(self, *parts: memoryview | bytes) -> None:
        """All of them, in order."""
        with self._inside() as route:
            if route is None:
                self._life.send(*parts)
                return
            sending: deque[tuple[Any, memoryview]] = deque()
            for piece in _pieces(parts):
                sending.append((route.send(piece), piece))
                if len(sending) == PIECES_MAX:
                    self._finish(route, sending.popleft()[0])
            while sending:
                self._finish(route, sending.popleft()[0])

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        with self._inside() as route:
            if route is None:
                self._life.receive_into(view)
                return
            while view.nbytes:
                if not self._rest:
                    view = view[self._receive(route, view) :]
                count = min(self._rest.nbytes, view.nbytes)
                view[:count] = self._rest[:count]
                view, self._rest = view[count:], self._rest[count:]

    def close(self) -> None:
        """End it, waking whoever waits in it."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):
            self._life.socket.shutdown(socket.SHUT_RDWR)
        self._release()

    def _receive(self, route: "Route", view: memoryview) -> int:
        """Take one message, into `view` if it fits; else all of it is in `_rest`. Bytes that were put into `view`."""
        found: list[Any] = []

        def is_here() -> bool:
            found[:] = [route.next_message()]
            return bool(found[0])

        self._await(route, is_here)
        length = found[0].length
        fits = length <= view.nbytes
        target = view[:length] if fits else memoryview(bytearray(length))
        self._finish(route, route.receive(target, found[0]))
        self._rest = memoryview(b"") if fits else target
        return length if fits else 0

    def _finish(self, route: "Route", request: Any) -> None:
        """Wait for it. After an error nothing touches its memory any more."""
        try:
            self._await(route, lambda: request.completed)
            with _as_link_ended(self.peer):
                request.check_error()
        except BaseException:
            route.abort(request)
            raise

    def _await(self, route: "Route", is_done: Callable[[], bool]) -> None:
        """Until `is_done`. Raises LinkEnded; Stalled when nothing moves for the deadline."""
        watch = Watch(self._timeout_s)
        while not is_done():
            if self._closed:
                raise LinkEnded(f"the link to {self.peer} was closed")
            if route.progress():
                watch.moved()
            elif watch.is_over():
                raise Stalled(f"no byte to or from {self.peer} for {self._timeout_s:g} s")
            elif not route.sleep(self._life.socket) and not is_done():
                raise LinkEnded(f"{self.peer} closed the link")

    @contextlib.contextmanager
    def _inside(self) -> "Iterator[Route | None]":
        """The route, which stays until the block ends; None: it is still TCP."""
        with self._lock:
            if self._closed:
                raise LinkEnded(f"the link to {self.peer} was closed")
            self._num_inside += 1
        try:
            yield self._route
        finally:
            with self._lock:
                self._num_inside -= 1
            if self._closed:
                self._release()

    def _release(self) -> None:
        with self._lock:
            if self._num_inside:
                return
            route, self._route = self._route, None
        self._life.close()
        if route is not None:
            route.close()


def _pieces(parts: tuple[memoryview | bytes, ...]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, view.nbytes, PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


@contextlib.contextmanager
def _as_link_ended(peer: str) -> Iterator[None]:
    try:
        yield
    except ucx.UCXError as error:
        raise LinkEnded(f"link to {peer}: {error}") from error
