"""Plain blocking TCP sockets, used from threads: as fast as any library through TCP, and a crash is noticed in milliseconds.

Deadlines are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), so a call that waits for bytes holds neither the GIL nor a core. Buffer
sizes are left alone: setting them turns the kernel's own tuning off.
"""

import contextlib
import socket
import struct

from laminar.errors import StartError
from laminar.workers.transport.base import Link, LinkEnded, Listener, Stalled

_TIMEVAL = struct.Struct("ll")
BACKLOG = 16


class TcpLink:
    """See `Link`."""

    def __init__(self, connected: socket.socket, progress_timeout_s: float) -> None:
        self.peer = "{}:{}".format(*connected.getpeername()[:2])
        self._timeout_s = progress_timeout_s
        self._socket = connected
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, fraction = divmod(progress_timeout_s, 1.0)
        interval = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    def send(self, *parts: memoryview | bytes) -> None:
        """All of them, in order."""
        for part in parts:
            rest = memoryview(part)
            while rest.nbytes:
                rest = rest[self._moved(self._socket.send, rest) :]

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        while view.nbytes:
            count = self._moved(self._socket.recv_into, view, view.nbytes, socket.MSG_WAITALL)
            if count == 0:
                raise LinkEnded(f"{self.peer} closed the link")
            view = view[count:]

    def close(self) -> None:
        """End it, waking whoever waits in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _moved(self, call, *arguments) -> int:  # type: ignore[no-untyped-def]
        """Bytes that a socket call moved; it returns early with fewer when the deadline falls in the middle of them."""
        try:
            return call(*arguments)
        except BlockingIOError as error:
            raise Stalled(f"no byte to or from {self.peer} for {self._timeout_s:g} s") from error
        except OSError as error:
            raise LinkEnded(f"link to {self.peer}: {error.strerror or error}") from error


class TcpListener:
    """See `Listener`."""

    def __init__(self, listening: socket.socket, progress_timeout_s: float) -> None:
        self.port = listening.getsockname()[1]
        self._socket, self._timeout_s = listening, progress_timeout_s

    def accept(self) -> Link:
        """The next peer."""
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError as error:
                raise LinkEnded(f"the listener on port {self.port} was closed ({error.strerror or error})") from error
            try:
                return TcpLink(connected, self._timeout_s)
            except OSError:  # it went away between the kernel's accept and ours
                connected.close()

    def close(self) -> None:
        """Take no more peers."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self._socket.close()


class TcpTransport:
    """See `Transport`."""

    name = "tcp"
    medium = "TCP"

    def __init__(self, progress_timeout_s: float) -> None:
        self._timeout_s = progress_timeout_s

    def listen(self, host: str, port: int = 0) -> Listener:
        """`port` 0: a free one."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return TcpListener(socket.create_server((host, port), family=family, backlog=BACKLOG), self._timeout_s)
        except OSError as error:
            raise StartError(f"the relay cannot listen on {host}:{port}: {error.strerror or error}") from error

    def connect(self, host: str, port: int, timeout_s: float) -> Link:
        """One attempt."""
        try:
            return TcpLink(socket.create_connection((host, port), timeout_s), self._timeout_s)
        except OSError as error:
            raise LinkEnded(f"cannot connect to {host}:{port}: {error.strerror or error}") from error
