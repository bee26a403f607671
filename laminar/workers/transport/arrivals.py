"""Connections that come in, sorted into links: each begins with a preamble that says which stream of which link it is.

Invariants:
* Who says nothing, or not what is due, keeps nobody else waiting; it is dropped after the progress deadline.
* A link is handed over once all its streams are here. Its mark is a random number that only the two ends know, so nobody else
  can add a stream to it. (Who the other end is gets proved afterwards: `relay.chain_frames`.)
"""

import contextlib
import errno
import selectors
import socket
import struct
import threading
import time

from laminar.workers.transport.base import LinkEnded

MARK_BYTES = 16
_PREAMBLE = struct.Struct(f"<4s{MARK_BYTES}sBB")
"""Magic, the link's mark, this stream's number, the number of streams."""
_MAGIC = b"LML1"
WAITING_MAX = (
    128  # the oldest is dropped for one more; a few links with all their streams come at a time, others are strangers
)
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
AGAIN_S = (
    0.1  # what cannot be accepted stays ready: without a pause, waiting for a free descriptor would take a whole core
)


def preamble(mark: bytes, stream: int, num_streams: int) -> bytes:
    """What the connecting end says first on each connection."""
    return _PREAMBLE.pack(_MAGIC, mark, stream, num_streams)


class _Arrival:
    """One connection whose link is not complete."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self.socket, self.deadline = connected, deadline
        self.said = b""


class Arrivals:
    """Owns the listening socket. `next` is for one thread, `close` for any."""

    def __init__(self, listening: socket.socket, patience_s: float, streams_max: int) -> None:
        self._listening, self._patience_s, self._streams_max = listening, patience_s, streams_max
        self._waiting: dict[socket.socket, _Arrival] = {}
        """In order of arrival."""
        self._complete: list[list[socket.socket]] = []
        self._closed = False
        self._turn = threading.Lock()
        """Held by whoever uses the sockets."""
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        for each in (listening, self._woken):
            self._selector.register(each, selectors.EVENT_READ)

    def next(self) -> list[socket.socket]:
        """All streams of one link, in their order. Raises LinkEnded after `close`."""
        with self._turn:
            while not self._complete:
                if self._closed:
                    raise LinkEnded("the listener was closed")
                for key, _ in self._selector.select(self._left_s()):
                    self._serve(key.fileobj)
                self._drop_overdue()
            return self._complete.pop(0)

    def close(self) -> None:
        """Take no more, drop those that wait."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        with self._turn:
            for connected in [*self._waiting, *(each for link in self._complete for each in link)]:
                connected.close()
            self._waiting.clear()
            self._complete.clear()
            for each in (self._listening, self._wake, self._woken, self._selector):
                each.close()

    def _serve(self, ready: object) -> None:
        if ready is self._listening:
            self._take_one()
        elif isinstance(ready, socket.socket) and ready in self._waiting:
            self._read(self._waiting[ready])

    def _take_one(self) -> None:
        try:
            connected, _ = self._listening.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                time.sleep(AGAIN_S)
            return  # else it went away between the kernel's accept and ours
        connected.setblocking(False)
        self._waiting[connected] = _Arrival(connected, time.monotonic() + self._patience_s)
        self._selector.register(connected, selectors.EVENT_READ)
        if len(self._waiting) > WAITING_MAX:
            self._drop(next(iter(self._waiting.values())))

    def _read(self, arrival: _Arrival) -> None:
        try:
            more = arrival.socket.recv(_PREAMBLE.size - len(arrival.said))
        except OSError:
            more = b""
        arrival.said += more
        if not more or not _MAGIC.startswith(arrival.said[: len(_MAGIC)]):
            self._drop(arrival)
        elif len(arrival.said) == _PREAMBLE.size:
            self._selector.unregister(arrival.socket)
            self._sort(arrival)

    def _sort(self, arrival: _Arrival) -> None:
        """It has said what it is. The second of two that say the same is dropped."""
        _, mark, stream, num_streams = _PREAMBLE.unpack(arrival.said)
        link = [each for each in self._waiting.values() if each.said[len(_MAGIC) :].startswith(mark)]
        streams = {each.said: each for each in reversed(link)}  # of two alike, the first
        wanted = [preamble(mark, number, num_streams) for number in range(num_streams)]
        if not stream < num_streams <= self._streams_max or streams[arrival.said] is not arrival:
            self._drop(arrival)
        elif all(each in streams for each in wanted):
            self._complete.append([streams[each].socket for each in wanted])
            for connected in self._complete[-1]:
                del self._waiting[connected]

    def _left_s(self) -> float | None:
        oldest = next(iter(self._waiting.values()), None)
        return None if oldest is None else max(oldest.deadline - time.monotonic(), 0.0)

    def _drop_overdue(self) -> None:
        now = time.monotonic()
        for arrival in [each for each in self._waiting.values() if each.deadline <= now]:
            self._drop(arrival)

    def _drop(self, arrival: _Arrival) -> None:
        del self._waiting[arrival.socket]
        with contextlib.suppress(KeyError):  # it has said its preamble and waits for the others of its link
            self._selector.unregister(arrival.socket)
        arrival.socket.close()
