"""A chain of real relay daemons on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from relay_world import LIMIT_S

from laminar.ids import Version
from laminar.wire import Neighbour
from laminar.workers.relay import paths, protocol
from laminar.workers.relay.client import RelayClient
from laminar.workers.relay.manifest import Manifest

TOKEN = "a token of this test"


def manifest_of(num_bytes: int) -> Manifest:
    return Manifest.plan([("weights", "bfloat16", (num_bytes // 2,), 2)])


def content(version: Version, num_bytes: int) -> np.ndarray:
    """What a version of this size holds: different in every block and in every version."""
    return np.random.default_rng(version.step).integers(0, 256, num_bytes, dtype=np.uint8)


class Relay:
    """One daemon of a chain."""

    def __init__(
        self,
        name: str,
        token: str = TOKEN,
        progress_timeout_s: float = 10.0,  # a starved machine may stand still for some seconds
        deltas: str = "auto",
        options: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.run_id = f"test-{uuid.uuid4().hex[:10]}-{name}"
        self.directory = paths.shm_directory(self.run_id)
        self.progress_timeout_s = progress_timeout_s
        self.token, self.deltas, self.options = token, deltas, options
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "laminar.workers.relay", "--run-id", self.run_id, "--name", self.name]
        command += [
            "--listen",
            "127.0.0.1",
            "--progress-timeout",
            str(self.progress_timeout_s),
            "--deltas",
            self.deltas,
            *self.options,
        ]
        environment = {**os.environ, "LAMINAR_TOKEN": self.token}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.client = RelayClient(self.directory, 60.0)

    @property
    def neighbour(self) -> Neighbour:
        return Neighbour(name=self.name, host="127.0.0.1", port=self.client.status().chain_port)

    def publish(self, step: int, num_bytes: int) -> Version:
        return self.publish_bytes(step, content(Version(step, 0), num_bytes))

    def publish_bytes(self, step: int, data: np.ndarray) -> Version:
        assert self.publish_if_free(step, data), "no slot is free"
        return Version(step, 0)

    def publish_if_free(self, step: int, data: np.ndarray) -> bool:
        """False if no slot is free: all are read or written."""
        version = Version(step, 0)
        buffer = self.client.begin(version, manifest_of(data.nbytes), 0, 1)
        if buffer is None:
            return False
        buffer[: data.nbytes] = memoryview(data).cast("B")
        self.client.commit(version)
        return True

    def holds(self, version: Version, num_bytes: int) -> bool:
        """Once it is ready, whether its bytes are those that were published."""
        return self.bytes_of(version, num_bytes) == content(version, num_bytes).tobytes()

    def bytes_of(self, version: Version, num_bytes: int) -> bytes:
        """Once it is ready."""
        with self.client.lease(version, wait_s=LIMIT_S) as lease:
            lease.verify()
            return bytes(lease.buffer[:num_bytes])

    def until(self, condition: Callable[[protocol.Status], bool]) -> protocol.Status:
        deadline = time.monotonic() + LIMIT_S
        while not condition(status := self.client.status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.005)
        return status

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def restart(self) -> None:
        """A new process, empty, after the old one was killed."""
        self.client.close()
        self.process.communicate(timeout=LIMIT_S)
        self.start()

    def end(self) -> str:
        """Its log."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=LIMIT_S)
        paths.remove(self.directory)
        return log


def arrange(epoch: int, relays: list[Relay]) -> None:
    """Chain them in this order, as the controller would; the last is told first."""
    for at in range(len(relays) - 1, -1, -1):
        upstream = relays[at - 1].name if at else None
        downstream = relays[at + 1].neighbour if at + 1 < len(relays) else None
        relays[at].client.arrange(epoch, upstream, downstream, len(relays))


@contextlib.contextmanager
def chain(num_relays: int, **options: Any) -> Iterator[list[Relay]]:
    """Daemons r0 → r1 → …, which must not have failed inside."""
    relays = [Relay(f"r{number}", **options) for number in range(num_relays)]
    try:
        arrange(1, relays)
        yield relays
    finally:
        logs = [relay.end() for relay in relays]
    for log in logs:
        assert "relay_task_failed" not in log, log
        assert "Traceback" not in log, log
