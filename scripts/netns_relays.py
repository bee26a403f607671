#!/usr/bin/env python
"""Relays on eight "hosts": network namespaces on a bridge whose links carry 800 Mbit/s each way. Needs root and iproute2.

    sudo .venv/bin/python scripts/netns_relays.py [--mib 128] [--relays 7] [--repairs 20] [--no-gloo] [--json FILE]

Prints, in seconds and in multiples of the line time (one plain TCP stream of the same bytes between two of the hosts): the chain
to 1, 3 and 7 relays for chunks of 1, 4 and 16 MiB beside the formula, the star (one receiver after another), gloo's broadcast, and
how long a broken link takes to be noticed and replaced. What the chain carried is verified on every host.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from chain_world import content, manifest_of  # noqa: E402

from laminar.ids import Version  # noqa: E402
from laminar.wire import Neighbour  # noqa: E402
from laminar.workers.relay import paths  # noqa: E402
from laminar.workers.relay.client import RelayClient, RelayError  # noqa: E402

MIB = 1 << 20
TOKEN = uuid.uuid4().hex
PORT = 7311
LIMIT_S = 120.0


class Network:
    """Namespaces `<mark>0`, `<mark>1`, … with addresses 10.77.0.1, 10.77.0.2, …"""

    def __init__(self, num_hosts: int, rate: str) -> None:
        self.mark = f"lm{uuid.uuid4().hex[:4]}"
        self.num_hosts, self._rate = num_hosts, rate

    def __enter__(self) -> "Network":
        self._ip("link", "add", self.mark, "type", "bridge")
        self._ip("link", "set", self.mark, "up")
        for number in range(self.num_hosts):
            self._add(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(self.num_hosts):
            subprocess.run(["ip", "netns", "del", self.name(number)], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", self.outside(number)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.mark], check=False, capture_output=True)

    def name(self, number: int) -> str:
        return f"{self.mark}n{number}"

    def outside(self, number: int) -> str:
        """The host's cable, at the bridge."""
        return f"{self.mark}v{number}"

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def inside(self, number: int, command: list[str], **options: object) -> subprocess.Popen[str]:
        """Start a command on a host."""
        whole = ["ip", "netns", "exec", self.name(number), *command]
        return subprocess.Popen(whole, text=True, **options)  # type: ignore[call-overload, no-any-return]

    def cable(self, number: int, state: str) -> None:
        """``up`` or ``down``."""
        self._ip("link", "set", self.outside(number), state)

    def _add(self, number: int) -> None:
        name, outside = self.name(number), self.outside(number)
        self._ip("netns", "add", name)
        self._ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._ip("link", "set", outside, "master", self.mark, "up")
        self._ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip("-n", name, "link", "set", device, "up")
        shape = ["root", "tbf", "rate", self._rate, "burst", "512kb", "latency", "100ms"]
        _run(["tc", "qdisc", "add", "dev", outside, *shape])
        _run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape])

    def _ip(self, *arguments: str) -> None:
        _run(["ip", *arguments])


class Host:
    """A relay on one of them."""

    def __init__(self, network: Network, number: int, chunk_mib: int, progress_timeout_s: float = 0.5) -> None:
        self.network, self.number, self.name = network, number, f"r{number}"
        self.run_id = f"netns-{uuid.uuid4().hex[:8]}-{number}"
        self.directory = paths.shm_directory(self.run_id)
        command = [sys.executable, "-m", "laminar.workers.relay", "--run-id", self.run_id, "--name", self.name]
        command += ["--listen", f"{network.address(number)}:{PORT}", "--chunk-mib", str(chunk_mib)]
        command += ["--progress-timeout", str(progress_timeout_s)]
        environment = {**os.environ, "LAMINAR_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        self.process = network.inside(number, command, env=environment, stderr=subprocess.DEVNULL)
        self.client = RelayClient(self.directory, 60.0)

    @property
    def neighbour(self) -> Neighbour:
        return Neighbour(name=self.name, host=self.network.address(self.number), port=PORT)

    def await_version(self, version: Version, num_bytes: int | None = None) -> float:
        """Time at which it was ready; its bytes are compared if their number is given."""
        with self.client.lease(version, wait_s=LIMIT_S) as lease:
            at = time.monotonic()
            if num_bytes is not None:
                assert bytes(lease.buffer[:num_bytes]) == content(version, num_bytes).tobytes(), (
                    f"{self.name}: wrong bytes"
                )
        return at

    def broken(self) -> list[str]:
        try:
            return list(self.client.status().chain_broken)
        except RelayError:
            return []

    def end(self) -> None:
        self.client.close()
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
        self.process.wait(10)
        paths.remove(self.directory)


class Relays:
    """A master and receivers; plays the controller."""

    def __init__(self, network: Network, num_relays: int, chunk_mib: int, num_bytes: int) -> None:
        self.hosts = [Host(network, number, chunk_mib) for number in range(num_relays + 1)]
        self.network, self.chunk_mib, self.num_bytes = network, chunk_mib, num_bytes
        self.epoch = self.step = 0

    def __enter__(self) -> "Relays":
        for host in self.hosts:
            host.client.connect()
        self.arrange(self.hosts)
        self.broadcast(self.hosts)  # slots are allocated and backed now
        self.broadcast(self.hosts)
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end()

    def arrange(self, order: list[Host]) -> None:
        self.epoch += 1
        for at in range(len(order) - 1, -1, -1):
            upstream = order[at - 1].name if at else None
            downstream = order[at + 1].neighbour if at + 1 < len(order) else None
            order[at].client.arrange(self.epoch, upstream, downstream)

    def publish(self) -> Version:
        """A new version in the master's slot, committed."""
        self.step += 1
        version = Version(self.step, 0)
        buffer = self.hosts[0].client.begin(version, manifest_of(self.num_bytes), 0, 1)
        assert buffer is not None, "no slot is free"
        buffer[: self.num_bytes] = memoryview(content(version, self.num_bytes))
        self.hosts[0].client.commit(version)
        return version

    def broadcast(self, receivers: list[Host]) -> float:
        """Seconds from the commit until all of them are ready with it."""
        version = self.publish()
        began = time.monotonic()
        ended = _together([lambda host=host: host.await_version(version) for host in receivers])  # type: ignore[misc]
        for host in receivers:
            host.await_version(version, self.num_bytes)
        return max(ended) - began

    def star(self) -> float:
        """Seconds for one receiver after another, over the same links."""
        self.arrange(self.hosts[:1])
        version = self.publish()
        self.hosts[0].await_version(version)
        began = time.monotonic()
        for host in self.hosts[1:]:
            self.arrange([self.hosts[0], host])
            host.await_version(version)
        return time.monotonic() - began


def line_time_s(network: Network, num_bytes: int) -> float:
    """One plain TCP stream of as many bytes between two hosts."""
    receive = (
        f"import socket,time\ns=socket.create_server(('{network.address(1)}',{PORT}));print('up',flush=True);c,_=s.accept()\n"
        f"b=bytearray(1<<20);n=0;t=time.monotonic()\nwhile n<{num_bytes}: n+=c.recv_into(b)\nprint(time.monotonic()-t)"
    )
    send = f"import socket\ns=socket.create_connection(('{network.address(1)}',{PORT}));s.sendall(bytes({num_bytes}))\ns.recv(1)"
    receiver = network.inside(1, [sys.executable, "-c", receive], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    sender = network.inside(0, [sys.executable, "-c", send])
    seconds = float(receiver.communicate(timeout=LIMIT_S)[0])
    sender.wait(LIMIT_S)
    return seconds


GLOO = """
import sys, time, torch, torch.distributed as dist
rank, world, address, size, rounds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://{address}:7312", rank=rank, world_size=world)
data = torch.zeros(size, dtype=torch.uint8)
for _ in range(rounds):
    dist.barrier()
    began = time.monotonic()
    dist.broadcast(data, 0)
    dist.barrier()
    print(time.monotonic() - began)
"""


def gloo_s(network: Network, num_hosts: int, num_bytes: int) -> float:
    """torch.distributed's broadcast over gloo."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, "-c", GLOO]
    processes = [
        network.inside(
            rank,
            [*command, str(rank), str(num_hosts), network.address(0), str(num_bytes), "2"],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for rank in range(num_hosts)
    ]
    return max(float(process.communicate(timeout=300)[0].split()[-1]) for process in processes)


def formula(num_relays: int, num_bytes: int, chunk_mib: int) -> float:
    """(p + c - 2) / c line times for p hosts and c chunks (paper.md §4, without start-up time)."""
    chunks = num_bytes / (chunk_mib * MIB)
    return (num_relays + 1 + chunks - 2) / chunks


# ---- repair ------------------------------------------------------------------------------------------------


def repair(relays: Relays, fault: str, victim: int) -> dict[str, float]:
    """One fault in the middle of a version: seconds until it is noticed, and until every survivor is ready, each from the fault."""
    version = relays.publish()
    host = relays.hosts[victim]
    while all(slot.version != version for slot in host.client.status().slots):
        time.sleep(0.002)
    time.sleep(0.4)  # some 30 % of 128 MiB have passed
    faulty = {
        "kill -9": lambda: host.process.send_signal(signal.SIGKILL),
        "SIGSTOP": lambda: host.process.send_signal(signal.SIGSTOP),
        "link down": lambda: relays.network.cable(victim, "down"),
    }[fault]
    survivors = [each for each in relays.hosts if each is not host]
    epoch = f"{relays.epoch}: {host.name}"
    faulty()
    began = time.monotonic()
    while not any(
        epoch in each.broken() for each in (relays.hosts[victim - 1], *relays.hosts[victim + 1 : victim + 2])
    ):
        assert time.monotonic() - began < 30, f"{fault} was not noticed"
        time.sleep(0.001)
    noticed = time.monotonic() - began
    relays.arrange(survivors)
    linked = time.monotonic() - began
    ended = _together([lambda each=each: each.await_version(version) for each in survivors])  # type: ignore[misc]
    for each in survivors:
        each.await_version(version, relays.num_bytes)
    return {"noticed_s": noticed, "rearranged_s": linked, "all_ready_s": max(ended) - began}


def restore(relays: Relays, fault: str, victim: int) -> None:
    """The victim comes back as a new relay."""
    relays.hosts[victim].end()
    if fault == "link down":
        relays.network.cable(victim, "up")
    relays.hosts[victim] = Host(relays.network, victim, relays.chunk_mib)
    relays.hosts[victim].client.connect()
    relays.arrange(relays.hosts)
    relays.broadcast(relays.hosts)


# ---- the report --------------------------------------------------------------------------------------------


def main() -> int:
    options = _parse()
    if os.geteuid() != 0:
        print("network namespaces need root: run it with sudo", file=sys.stderr)
        return 1
    num_bytes = options.mib * MIB
    result: dict[str, object] = {"mib": options.mib, "rate": options.rate, "relays": options.relays}
    with Network(options.relays + 1, options.rate) as network:
        line = statistics.median(line_time_s(network, num_bytes) for _ in range(3))
        print(f"line time of {options.mib} MiB at {options.rate}: {line:.3f} s")
        result["line_s"] = line
        result["chain"] = _chains(network, options, line, num_bytes)
        with Relays(network, options.relays, 4, num_bytes) as relays:
            star = relays.star()
            relays.arrange(relays.hosts)
            print(f"star, {options.relays} relays one after another: {star:.3f} s = {star / line:.2f} line times")
            result["star_s"] = star
            result["repairs"] = _repairs(relays, options)
        if not options.no_gloo:
            gloo = gloo_s(network, options.relays + 1, num_bytes)
            print(f"gloo broadcast to {options.relays}: {gloo:.3f} s = {gloo / line:.2f} line times")
            result["gloo_s"] = gloo
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    return 0


def _chains(network: Network, options: argparse.Namespace, line: float, num_bytes: int) -> list[dict[str, float]]:
    rows = []
    print("| relays | chunk MiB | chain s | line times | formula | difference |\n|---|---|---|---|---|---|")
    for count in sorted({1, 3, options.relays} & set(range(1, options.relays + 1))):
        for chunk_mib in (1, 4, 16):
            with Relays(network, count, chunk_mib, num_bytes) as relays:
                seconds = statistics.median(relays.broadcast(relays.hosts) for _ in range(3))
            expected = formula(count, num_bytes, chunk_mib)
            times = seconds / line
            rows.append(
                {"relays": count, "chunk_mib": chunk_mib, "seconds": seconds, "times": times, "formula": expected}
            )
            print(
                f"| {count} | {chunk_mib} | {seconds:.3f} | {times:.3f} | {expected:.3f} | {times / expected - 1:+.1%} |"
            )
    return rows


def _repairs(relays: Relays, options: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    print(
        "| fault of a middle relay | runs | noticed, median (max) s | all survivors ready, median (max) s |\n|---|---|---|---|"
    )
    for fault in ("kill -9", "SIGSTOP", "link down") if options.repairs else ():
        runs = []
        for number in range(options.repairs):
            victim = 1 + number % (options.relays - 1)
            runs.append(repair(relays, fault, victim))
            restore(relays, fault, victim)
        noticed, ready = ([run[key] for run in runs] for key in ("noticed_s", "all_ready_s"))
        rows.append({"fault": fault, "runs": runs})
        print(
            f"| {fault} | {len(runs)} | {statistics.median(noticed):.3f} ({max(noticed):.3f}) "
            f"| {statistics.median(ready):.3f} ({max(ready):.3f}) |"
        )
    return rows


def _together(works: list[Callable[[], float]]) -> list[float]:
    """Results of calls that block, each in a thread. Raises the first error."""
    results: list[float | BaseException] = [0.0] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return [each for each in results if isinstance(each, float)]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--relays", type=int, default=7)
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--repairs", type=int, default=20, help="faults of each kind; 0 = none")
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
