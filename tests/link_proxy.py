"""A TCP forwarder between two ends of a link, which a test can slow down, block in either direction, or corrupt."""

import contextlib
import socket
import threading
import time

BURST_BYTES = 64 << 10


class Proxy:
    """Forwards connections to `127.0.0.1:target_port`. *Forward* is from who connects to the target."""

    def __init__(self, target_port: int) -> None:
        self.rate_bytes_per_s = 0.0
        """Of forward bytes; 0 = as fast as they come."""
        self.forward_blocked = self.backward_blocked = False
        """Nothing goes on in that direction; to both ends it looks as if the network lost it."""
        self.num_kept_back = 0
        """Pieces that came while they were to be blocked."""
        self.flip_in = -1
        """After so many more forward bytes the lowest bit of one is flipped; -1 = of none."""
        self._target_port = target_port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listening]
        self._closed = False
        self._start(self._accept)

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _start(self, work, *arguments) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return  # this is the end
            self._sockets.append(near)
            try:
                far = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                near.close()  # nobody is at the target
                continue
            self._sockets.append(far)
            self._start(self._pump, near, far, True)
            self._start(self._pump, far, near, False)

    def _pump(self, source: socket.socket, sink: socket.socket, is_forward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(BURST_BYTES):
                self.num_kept_back += self._is_blocked(is_forward)
                while not self._closed and self._is_blocked(is_forward):
                    time.sleep(0.01)
                if is_forward:
                    data = self._changed(data)
                    if self.rate_bytes_per_s:
                        time.sleep(len(data) / self.rate_bytes_per_s)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _is_blocked(self, is_forward: bool) -> bool:
        return self.forward_blocked if is_forward else self.backward_blocked

    def _changed(self, data: bytes) -> bytes:
        at = self.flip_in
        if at >= len(data):
            self.flip_in -= len(data)
        if not 0 <= at < len(data):
            return data
        self.flip_in = -1
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
