"""A chain of processes that do nothing but receive over TCP, a MiB at a time, and send it on: the floor of any chain over loopback.

No digests, no epochs, no deadlines, no threads. `bench_relay.py`, whose `--limit-s` bounds it, times it beside the real one.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

PIECE_BYTES = 1 << 20


def broadcasts(source: np.ndarray, num_relays: int, rounds: int) -> list[float]:
    """Seconds of each, until the last process has all bytes (`source`: uint8); the first, cold, is left out."""
    with contextlib.ExitStack() as stack:
        links = [_link(stack) for _ in range(num_relays)]
        for at, (_, incoming) in enumerate(links):
            outgoing = links[at + 1][0] if at + 1 < num_relays else None
            stack.enter_context(_relay(source.nbytes, incoming, outgoing))
        return [_seconds(links[0][0], source) for _ in range(rounds + 1)][1:]


def _seconds(master: socket.socket, source: np.ndarray) -> float:
    began = time.perf_counter()
    master.sendall(memoryview(source))
    if master.recv(1) != b"x":
        raise RuntimeError("a process of the bare chain ended early")
    return time.perf_counter() - began


def _link(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = stack.enter_context(socket.create_connection(listening.getsockname()))
        receiver = stack.enter_context(listening.accept()[0])
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sender, receiver


@contextlib.contextmanager
def _relay(num_bytes: int, incoming: socket.socket, outgoing: socket.socket | None) -> Iterator[None]:
    fds = [incoming.fileno()] + ([outgoing.fileno()] if outgoing else [])
    process = subprocess.Popen([sys.executable, __file__, str(num_bytes), *map(str, fds)], pass_fds=fds)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main(num_bytes: int, incoming: socket.socket, outgoing: socket.socket | None) -> None:
    """Versions, one after another; once one is through, a byte goes back up the chain."""
    whole = memoryview(np.ones(num_bytes, np.uint8))
    while True:
        for start in range(0, num_bytes, PIECE_BYTES):
            rest = piece = whole[start : start + PIECE_BYTES]
            while rest.nbytes:
                count = incoming.recv_into(rest, rest.nbytes, socket.MSG_WAITALL)
                if not count:
                    return
                rest = rest[count:]
            if outgoing:
                outgoing.sendall(piece)
        if outgoing:
            outgoing.recv(1)
        incoming.sendall(b"x")


if __name__ == "__main__":
    num_bytes, *fds = map(int, sys.argv[1:])
    incoming, *outgoing = [socket.socket(fileno=fd) for fd in fds]
    main(num_bytes, incoming, outgoing[0] if outgoing else None)
