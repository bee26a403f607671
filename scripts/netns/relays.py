"""Real relays on the hosts of a `Network`, chained by a script that plays the controller."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
from netns.network import Network

from laminar.ids import Version
from laminar.wire import Neighbour
from laminar.workers.relay import paths
from laminar.workers.relay.client import RelayClient, RelayError
from laminar.workers.relay.digest import digest
from laminar.workers.relay.manifest import Manifest

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20
TOKEN = uuid.uuid4().hex
PORT = 7311
LIMIT_S = 120.0
WATCH_S = 0.5  # between two looks whether a link broke that nobody cut
PATIENT_S = 5.0  # deadline of links that no fault is tried on: a starved process is no finding there


class SpoiltError(RuntimeError):
    """A link broke, or a relay ended, that nobody had hurt: this measurement is none."""


class Host:
    """A relay on one of them."""

    def __init__(self, network: Network, number: int, chunk_mib: int, timeout_s: float, deltas: str) -> None:
        self.network, self.number, self.name = network, number, f"r{number}"
        self.run_id = f"netns-{uuid.uuid4().hex[:8]}-{number}"
        self.directory = paths.shm_directory(self.run_id)
        command = [sys.executable, "-m", "laminar.workers.relay", "--run-id", self.run_id, "--name", self.name]
        command += ["--listen", f"{network.address(number)}:{PORT}", "--chunk-mib", str(chunk_mib)]
        command += ["--progress-timeout", str(timeout_s), "--deltas", deltas]
        environment = {**os.environ, "LAMINAR_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self.process = network.inside(number, command, env=environment, stderr=self._log, stdout=subprocess.DEVNULL)
        self.client = RelayClient(self.directory, 60.0)

    @property
    def neighbour(self) -> Neighbour:
        """As others are told of it."""
        return Neighbour(name=self.name, host=self.network.address(self.number), port=PORT)

    def await_version(self, version: Version) -> float:
        """Time at which it was ready."""
        with self.client.lease(version, wait_s=LIMIT_S):
            return time.monotonic()

    def check(self, version: Version, expected: str) -> None:
        """Its bytes have this digest, computed from them here."""
        with self.client.lease(version) as lease:
            lease.verify()
            assert lease.digest == expected, f"{self.name} holds other bytes of {version}"

    def broken(self) -> list[str]:
        """`epoch: peer` of the links that it saw break; nothing if it does not answer."""
        try:
            return list(self.client.status().chain_broken)
        except RelayError:
            return []

    def log(self) -> str:
        """What it wrote so far, the end of it."""
        self._log.seek(0)
        return self._log.read()[-2000:]

    def end(self) -> None:
        """Leaves nothing."""
        self.client.close()
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
        self.process.wait(10)
        self._log.close()
        paths.remove(self.directory)


class Relays:
    """A master and receivers; plays the controller."""

    def __init__(
        self,
        network: Network,
        num_relays: int,
        num_bytes: int,
        *,
        chunk_mib: int = 1,
        timeout_s: float = PATIENT_S,
        deltas: str = "auto",
    ) -> None:
        self.network, self.num_bytes = network, num_bytes
        self._options = (chunk_mib, timeout_s, deltas)
        self.hosts: list[Host] = []
        self._num_relays = num_relays
        self.epoch = self.step = 0
        self.digest = ""
        """Of the version published last."""

    def __enter__(self) -> "Relays":
        try:
            for number in range(self._num_relays + 1):
                self.hosts.append(self.start(number))
            for host in self.hosts:
                host.client.connect()
            self.arrange(self.hosts)
            self.broadcast()  # slots are allocated and backed now
            self.broadcast()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end()

    def start(self, number: int) -> Host:
        """A new relay."""
        return Host(self.network, number, *self._options)

    def arrange(self, order: list[Host]) -> None:
        """A new epoch."""
        self.epoch += 1
        for at in range(len(order) - 1, -1, -1):
            upstream = order[at - 1].name if at else None
            downstream = order[at + 1].neighbour if at + 1 < len(order) else None
            order[at].client.arrange(self.epoch, upstream, downstream)

    def publish(self, data: np.ndarray | None = None) -> Version:
        """A new version in the master's slot, committed. `data`: else random bytes."""
        self.step += 1
        version = Version(self.step, 0)
        if data is None:
            data = np.random.default_rng(self.step).integers(0, 1 << 63, self.num_bytes // 8, dtype=np.uint64)
        buffer = self.hosts[0].client.begin(version, Manifest.plan([("w", "bfloat16", (data.nbytes // 2,), 2)]), 0, 1)
        assert buffer is not None, "no slot is free"
        buffer[: data.nbytes] = memoryview(data).cast("B")
        self.digest = digest(buffer)
        self.hosts[0].client.commit(version)
        return version

    def broadcast(self, data: np.ndarray | None = None) -> float:
        """Seconds from the commit until all are ready with it; what they hold is verified then. Raises SpoiltError."""
        version = self.publish(data)
        began = time.monotonic()
        return self.await_version(version, self.hosts) - began

    def await_version(self, version: Version, hosts: list[Host]) -> float:
        """Time at which the last of them was ready; what they hold is verified then. Raises SpoiltError."""
        works = [lambda host=host: host.await_version(version) for host in hosts]
        ended = together(works, lambda: self._look(hosts))  # type: ignore[arg-type]
        for host in hosts:
            host.check(version, self.digest)
        return max(ended)

    def star(self) -> float:
        """Seconds for one receiver after another, over the same links. Raises SpoiltError."""
        self.arrange(self.hosts[:1])
        version = self.publish()
        self.hosts[0].await_version(version)
        began = time.monotonic()
        for host in self.hosts[1:]:
            self.arrange([self.hosts[0], host])
            self.await_version(version, [host])
        return time.monotonic() - began

    def wire_bytes(self) -> int:
        """Sent by the master over its link so far."""
        return self.hosts[0].client.status().chain_wire_bytes

    def _look(self, hosts: list[Host]) -> None:
        for host in hosts:
            broken = [each for each in host.broken() if each.startswith(f"{self.epoch}: ")]
            if broken or host.process.poll() is not None:
                raise SpoiltError(f"{host.name} {'lost its link' if broken else 'ended'} ({broken}):\n{host.log()}")


def together(works: list[Callable[[], float]], look: Callable[[], None]) -> list[float]:
    """Results of calls that block, each in a thread, while `look` is called now and then. Raises the first error, of either."""
    results: list[float | BaseException] = [0.0] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(WATCH_S)
            look()
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if isinstance(each, float)]
