"""The transports that are installed here, and peers in processes of their own."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from relay_world import LIMIT_S

from laminar.workers.transport import Link, Transport, make_transport


class Kind(NamedTuple):
    """One way to make links."""

    name: str
    streams: int = 1

    def make(self, progress_timeout_s: float = LIMIT_S) -> Transport:
        return make_transport(self.name, progress_timeout_s, streams=self.streams)

    @property
    def options(self) -> tuple[str, ...]:
        """Of a relay's command line."""
        return ("--transport", self.name, "--streams", str(self.streams))


def _needs(package: str, extra: str) -> list[pytest.MarkDecorator]:
    missing = importlib.util.find_spec(package) is None
    return [pytest.mark.skipif(missing, reason=f"{package} is not installed (scripts/setup with the extra {extra})")]


KINDS = [
    pytest.param(Kind("tcp"), id="tcp"),
    pytest.param(Kind("tcp", 4), id="tcp-4-streams"),
    pytest.param(Kind("ucx"), id="ucx", marks=_needs("ucxx", "ucx")),
    pytest.param(Kind("nixl"), id="nixl", marks=_needs("nixl_cu12", "nixl")),
]
over_each = pytest.mark.parametrize("kind", KINDS)


def together(*works: Callable[[], object]) -> list[object]:
    """Results of calls that wait for each other, each in a thread. Raises the first error."""
    results: list[object] = [None] * len(works)

    def run(at: int) -> None:
        try:
            results[at] = works[at]()
        except BaseException as error:  # noqa: BLE001 - raised below
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@contextlib.contextmanager
def linked(kind: Kind) -> Iterator[tuple[Link, Link]]:
    """Both ends of a link, in this process: the one that connected, the one that was accepted."""
    listener = kind.make().listen("127.0.0.1")
    connected = kind.make().connect("127.0.0.1", listener.port, LIMIT_S)
    accepted = listener.accept()
    try:
        together(connected.promote, accepted.promote)
        yield connected, accepted
    finally:
        for each in (connected, accepted, listener):
            each.close()


PEER = """
import mmap, sys
from laminar.workers.transport import make_transport

name, streams, role, begin = sys.argv[1:5]
transport = make_transport(name, 60.0, streams=int(streams))
if begin == "listen":
    listener = transport.listen("127.0.0.1")
    print(listener.port, flush=True)
    link = listener.accept()
else:
    link = transport.connect("127.0.0.1", int(sys.stdin.readline()), 60.0)
link.promote()
block = memoryview(mmap.mmap(-1, 1 << 20))
block[:] = b"p" * (1 << 20)
if role == "one":
    link.send(block)
print("linked", link.medium, flush=True)
while role == "reads":
    link.receive_into(block)
while role == "writes":
    link.send(block)
sys.stdin.read()
"""


class Peer:
    """A process with the other end of a link; it reads or writes all the time, or does nothing (or sends `one` MiB before)."""

    def __init__(self, kind: Kind, role: str, begin: str, progress_timeout_s: float, **environment: str) -> None:
        command = [sys.executable, "-c", PEER, kind.name, str(kind.streams), role, begin]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        transport = kind.make(progress_timeout_s)
        if begin == "listen":
            self.link = transport.connect("127.0.0.1", int(self.process.stdout.readline()), LIMIT_S)
        else:
            listener = transport.listen("127.0.0.1")
            self.process.stdin.write(f"{listener.port}\n")
            self.process.stdin.flush()
            self.link = listener.accept()
            listener.close()
        self.link.promote()

    def medium(self) -> str:
        """Of its end; once it is linked."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip().removeprefix("linked ")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.link.close()
        for number in (signal.SIGKILL, signal.SIGCONT):
            self.process.send_signal(number)
        self.process.communicate(timeout=LIMIT_S)


@contextlib.contextmanager
def peer(
    kind: Kind, role: str, begin: str = "listen", progress_timeout_s: float = LIMIT_S, **environment: str
) -> Iterator[Peer]:
    other = Peer(kind, role, begin, progress_timeout_s, **environment)
    try:
        yield other
    finally:
        other.end()
