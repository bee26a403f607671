"""Real relay daemons and peers for tests, each in a process of its own."""

import contextlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import msgspec

from laminar.ids import Version
from laminar.workers.relay import paths, protocol
from laminar.workers.relay.client import Lease, RelayClient
from laminar.workers.relay.manifest import Manifest

MANIFEST = Manifest.plan([("embed", "float32", (600, 1024), 4), ("head", "float32", (1000,), 4)])
LIMIT_S = 60.0


def version(step: int) -> Version:
    return Version(step, 0)


class Daemon:
    """A real daemon that stands alone, under a name of its own."""

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id or f"test-{uuid.uuid4().hex[:12]}"
        self.directory = paths.shm_directory(self.run_id)
        command = [sys.executable, "-m", "laminar.workers.relay", "--run-id", self.run_id]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def client(self, timeout_s: float = LIMIT_S) -> RelayClient:
        client = RelayClient(self.directory, timeout_s)
        client.connect()
        return client

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """(exit status, log)"""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, log = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, log


@contextlib.contextmanager
def running_daemon() -> Iterator[Daemon]:
    """A daemon that must neither have failed inside nor have left anything at the end."""
    daemon = Daemon()
    try:
        yield daemon
    finally:
        status, log = daemon.end()
        leftover = daemon.directory.exists()
        paths.remove(daemon.directory)
    assert "relay_task_failed" not in log, log
    assert "Traceback" not in log, log
    assert status == -signal.SIGKILL or not leftover


PEER = """
import sys
from laminar.ids import Version
from laminar.workers.relay.client import RelayClient
from laminar.workers.relay.manifest import Manifest
import msgspec

def say(word):
    print(word, flush=True)
    sys.stdin.readline()

directory, layout, step, rank, world_size = sys.argv[2:]
client, rank, world_size = RelayClient(directory, 20.0), int(rank), int(world_size)
if sys.argv[1] == "write":
    manifest = msgspec.json.decode(layout, type=Manifest)
    buffer = client.begin(Version(int(step), 0), manifest, rank, world_size)
    part = len(buffer) // world_size
    buffer[rank * part : (rank + 1) * part] = bytes([10 * int(step) + rank]) * part
    say("written")
    client.commit(Version(int(step), 0))
    say("committed")
else:
    lease = client.lease(Version(int(step), 0))
    say("leased")
"""


class Peer:
    """A writer or reader in its own process, which goes on at each `step`."""

    def __init__(self, role: str, daemon: Daemon, step: int, rank: int = 0, world_size: int = 1) -> None:
        layout = msgspec.json.encode(MANIFEST).decode()
        arguments = [role, str(daemon.directory), layout, str(step), str(rank), str(world_size)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=LIMIT_S)


def publish(client: RelayClient, step: int) -> bool:
    """Publish a version of bytes that are all `step`; False = superseded."""
    buffer = client.begin(version(step), MANIFEST, 0, 1)
    if buffer is None:
        return False
    buffer[:] = bytes([step]) * MANIFEST.num_bytes
    client.commit(version(step))
    return True


def publish_and_wait(client: RelayClient, step: int) -> None:
    assert publish(client, step)
    client.lease(version(step), wait_s=LIMIT_S).release()


def holds(lease: Lease, step: int) -> bool:
    return bytes(lease.buffer) == bytes([step]) * MANIFEST.num_bytes


def until(client: RelayClient, condition: Callable[[protocol.Status], bool]) -> protocol.Status:
    """Ask for the status again and again: the end of a peer reaches the daemon a few loop rounds after its death."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        status = client.status()
        if condition(status):
            return status
        assert time.monotonic() < deadline, status


def slots(status: protocol.Status) -> list[tuple[str, int | None]]:
    return [(slot.state, slot.version.step if slot.version else None) for slot in status.slots]
