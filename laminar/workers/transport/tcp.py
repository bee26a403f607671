"""Plain blocking TCP sockets, used from threads: as fast as any library through TCP, and a crash is noticed in milliseconds.

Waits are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), a fifth of the deadline each (`silence`), and hold neither the GIL nor a core.
Buffer sizes are left alone: setting them turns the kernel's own tuning off. A link may be striped over several sockets (`stripes`).
"""

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable

from laminar.errors import StartError
from laminar.workers.transport import arrivals
from laminar.workers.transport.base import TCP, Link, LinkEnded, Listener, Stalled
from laminar.workers.transport.silence import Silence
from laminar.workers.transport.stripes import StripedLink

_TIMEVAL = struct.Struct("ll")
BACKLOG = 64  # streams of a few links that are made anew at the same time
STREAMS_MAX = 16  # more than a 400 Gbit/s card needs at 2 to 4 GB/s each; and a bound for what a stranger may announce


class TcpLink:
    """See `Link`: one socket."""

    medium = TCP

    def __init__(self, connected: socket.socket, progress_timeout_s: float) -> None:
        self.peer = "{}:{}".format(*connected.getpeername()[:2])
        self.socket, self.progress_timeout_s = connected, progress_timeout_s
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, fraction = divmod(Silence.look_s(progress_timeout_s), 1.0)
        interval = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def promote(self) -> None:
        """There is nothing better to move to."""

    def send(self, *parts: memoryview | bytes) -> None:
        """All of them, in order."""
        for part in parts:
            rest = memoryview(part)
            while rest.nbytes:
                rest = rest[self._moved(self.socket.send, rest) :]

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        while view.nbytes:
            count = self._moved(self.socket.recv_into, view, view.nbytes, socket.MSG_WAITALL)
            if count == 0:
                raise LinkEnded(f"{self.peer} closed the link")
            view = view[count:]

    def close(self) -> None:
        """End it, waking whoever waits in it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _moved(self, call: Callable[..., int], *arguments: object) -> int:
        """Bytes that a socket call moved; it returns early with fewer when the end of a look falls in the middle of them."""
        silence = Silence(self.progress_timeout_s)
        while True:
            began = time.monotonic()
            try:
                return call(*arguments)
            except BlockingIOError as error:
                if silence.looked(time.monotonic() - began):
                    raise Stalled(f"no byte to or from {self.peer} for {self.progress_timeout_s:g} s") from error
            except OSError as error:
                raise LinkEnded(f"link to {self.peer}: {error.strerror or error}") from error


class TcpListener:
    """See `Listener`."""

    def __init__(self, listening: socket.socket, progress_timeout_s: float, streams_max: int) -> None:
        self._timeout_s = progress_timeout_s
        self._arrivals = arrivals.Arrivals(listening, progress_timeout_s, streams_max)
        self.port: int = listening.getsockname()[1]

    def accept(self) -> Link:
        """The next peer, once all its streams are here."""
        while True:
            sockets = self._arrivals.next()
            try:
                return _link(sockets, self._timeout_s)
            except OSError:  # it went away since
                for each in sockets:
                    each.close()

    def close(self) -> None:
        """Take no more peers."""
        self._arrivals.close()


class TcpTransport:
    """See `Transport`. `streams`: sockets of each link that it makes; a listener takes links of up to `streams_max`."""

    name = "tcp"
    medium = TCP

    def __init__(self, progress_timeout_s: float, streams: int = 1, streams_max: int = STREAMS_MAX) -> None:
        self._timeout_s, self._streams, self._streams_max = progress_timeout_s, streams, streams_max

    def listen(self, host: str, port: int = 0) -> Listener:
        """`port` 0: a free one."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
            return TcpListener(listening, self._timeout_s, self._streams_max)
        except OSError as error:
            raise StartError(f"the relay cannot listen on {host}:{port}: {error.strerror or error}") from error

    def connect(self, host: str, port: int, timeout_s: float) -> Link:
        """One attempt, of all streams."""
        deadline = time.monotonic() + timeout_s
        mark = secrets.token_bytes(arrivals.MARK_BYTES)
        sockets: list[socket.socket] = []
        try:
            for stream in range(self._streams):
                left_s = max(deadline - time.monotonic(), 1e-3)
                sockets.append(socket.create_connection((host, port), left_s))
                sockets[-1].sendall(arrivals.preamble(mark, stream, self._streams))
            return _link(sockets, self._timeout_s)
        except OSError as error:
            for each in sockets:
                each.close()
            raise LinkEnded(f"cannot connect to {host}:{port}: {error.strerror or error}") from error


def _link(sockets: list[socket.socket], progress_timeout_s: float) -> Link:
    links = [TcpLink(each, progress_timeout_s) for each in sockets]
    return links[0] if len(links) == 1 else StripedLink(links)
