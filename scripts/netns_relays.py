#!/usr/bin/env python
"""Relays on eight "hosts": network namespaces on a bridge whose links carry 800 Mbit/s each way. Needs root and iproute2.

    sudo .venv/bin/python scripts/netns_relays.py [--parts chain,star,gloo,repairs,deltas] [--mib 128] [--relays 7] [--repairs 20]
    sudo .venv/bin/python scripts/netns_relays.py --check       # a minute: bytes, order and completion, no times

Prints, in seconds and in multiples of the line time (one plain TCP stream of the same bytes between two of the hosts): the chain
to 1, 3 and 7 relays for chunks of 1, 4 and 16 MiB beside the formula; the star (one receiver after another); gloo's broadcast; how
long a broken link takes to be noticed and replaced; and, at 200 Mbit/s, versions as deltas beside whole ones. What arrived is
verified on every host. A measurement in which a link broke that nobody had cut (a starved machine) is spoilt: it is repeated, and
counted. Exit status: 0 when every goal is met.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
from netns.network import Network  # noqa: E402
from netns.relays import LIMIT_S, MIB, PORT, Relays, SpoiltError  # noqa: E402
from netns.repairs import GOALS_S, repair, restore  # noqa: E402

PARTS = ("chain", "star", "gloo", "repairs", "deltas")
CHUNKS_MIB = (1, 4, 16)
ROUNDS = 3
TRIES = 3  # of a measurement, before the machine is called too busy for it
DETECT_S = 0.5  # the default of relay.link_timeout_s, for repairs
SLOW_RATE = "200mbit"

_Result = TypeVar("_Result")


class Report:
    """What was measured, and which goals are met."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.goals: list[tuple[str, str, bool]] = []
        self.num_spoilt = 0

    def say(self, text: str) -> None:
        """A line of the report, at once."""
        print(text, flush=True)

    def goal(self, name: str, found: str, met: bool) -> None:
        """For the table at the end."""
        self.goals.append((name, found, met))

    def unspoilt(self, work: Callable[[], _Result]) -> _Result:
        """Its result, after up to `TRIES` tries."""
        for left in range(TRIES - 1, -1, -1):
            try:
                return work()
            except SpoiltError as error:
                self.num_spoilt += 1
                print(f"spoilt: {error}", file=sys.stderr, flush=True)
                if not left:
                    raise
        raise AssertionError

    def end(self) -> bool:
        """The table of goals; whether all are met."""
        self.say(f"\n{self.num_spoilt} measurements were spoilt by a link that broke by itself, and repeated.\n")
        self.say("| goal | found | |\n|---|---|---|")
        for name, found, met in self.goals:
            self.say(f"| {name} | {found} | {'met' if met else 'NOT met'} |")
        return all(met for _, _, met in self.goals)


# ---- one stream, gloo --------------------------------------------------------------------------------------


def line_time_s(network: Network, num_bytes: int) -> float:
    """One plain TCP stream of as many bytes between two hosts."""
    receive = (
        f"import socket,time\ns=socket.create_server(('{network.address(1)}',{PORT}));print('up',flush=True);c,_=s.accept()\n"
        f"b=bytearray(1<<20);n=0;t=time.monotonic()\nwhile n<{num_bytes}: n+=c.recv_into(b)\nprint(time.monotonic()-t)"
    )
    send = f"import socket\ns=socket.create_connection(('{network.address(1)}',{PORT}));s.sendall(bytes({num_bytes}))\ns.recv(1)"
    receiver = network.inside(1, [sys.executable, "-c", receive], stdout=subprocess.PIPE)
    sender = None
    try:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = network.inside(0, [sys.executable, "-c", send])
        return float(receiver.communicate(timeout=LIMIT_S)[0])
    finally:
        for process in (receiver, sender):
            if process is not None:
                process.kill()
                process.wait(LIMIT_S)


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
    processes = []
    try:
        for rank in range(num_hosts):
            sizes = [str(rank), str(num_hosts), network.address(0), str(num_bytes), "2"]
            command = [sys.executable, "-c", GLOO, *sizes]
            processes.append(network.inside(rank, command, env=environment, stdout=subprocess.PIPE))
        return max(float(process.communicate(timeout=LIMIT_S)[0].split()[-1]) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait(LIMIT_S)


def formula(num_relays: int, num_bytes: int, chunk_mib: int) -> float:
    """(p + c - 2) / c line times for p hosts and c chunks (the paper's chain pipelined broadcast, without start-up time)."""
    chunks = num_bytes / (chunk_mib * MIB)
    return (num_relays + 1 + chunks - 2) / chunks


# ---- parts -------------------------------------------------------------------------------------------------


def chain(report: Report, network: Network, options: argparse.Namespace, line_s: float) -> None:
    """The chain to 1, 3, … relays over chunk sizes, beside the formula."""
    report.say("\n| relays | forwarded by, MiB | chain, s | line times | (p + c − 2) / c, line times | difference |")
    report.say("|---|---|---|---|---|---|")
    rows, num_bytes = [], options.mib * MIB
    for count in sorted({1, 3, options.relays} & set(range(1, options.relays + 1))):
        for chunk_mib in CHUNKS_MIB:
            seconds = report.unspoilt(lambda: _chain_s(network, count, num_bytes, chunk_mib))  # noqa: B023
            expected, times = formula(count, num_bytes, chunk_mib), seconds / line_s
            rows.append({"relays": count, "chunk_mib": chunk_mib, "seconds": seconds, "formula": expected * line_s})
            report.say(
                f"| {count} | {chunk_mib} | {seconds:.3f} | {times:.2f} | {expected:.2f} | {times / expected - 1:+.0%} |"
            )
    report.results["chain"] = rows
    best = min(row["seconds"] for row in rows if row["relays"] == options.relays) / line_s
    report.goal(f"chain to {options.relays} at most 1.10 line times", f"{best:.2f}", best <= 1.10)
    worst = max(abs(row["seconds"] / row["formula"] - 1) for row in rows)
    report.goal("chain within 5 % of the formula", f"at most {worst:.0%} off", worst <= 0.05)


def _chain_s(network: Network, count: int, num_bytes: int, chunk_mib: int) -> float:
    with Relays(network, count, num_bytes, chunk_mib=chunk_mib, deltas="never") as relays:
        return statistics.median(relays.broadcast() for _ in range(ROUNDS))


def star(report: Report, network: Network, options: argparse.Namespace, line_s: float) -> None:
    """One receiver after another."""

    def measure() -> float:
        with Relays(network, options.relays, options.mib * MIB, deltas="never") as relays:
            return relays.star()

    seconds = report.unspoilt(measure)
    report.say(
        f"\nstar, {options.relays} relays one after another: {seconds:.3f} s = {seconds / line_s:.2f} line times"
    )
    report.results["star_s"] = seconds
    if "chain" in report.results:
        best = min(row["seconds"] for row in report.results["chain"] if row["relays"] == options.relays)
        report.goal("star at least 5 x slower than the chain", f"{seconds / best:.1f} x", seconds >= 5 * best)


def gloo(report: Report, network: Network, options: argparse.Namespace, line_s: float) -> None:
    """torch.distributed beside it."""
    seconds = gloo_s(network, options.relays + 1, options.mib * MIB)
    report.say(f"\ngloo broadcast to {options.relays}: {seconds:.3f} s = {seconds / line_s:.2f} line times")
    report.results["gloo_s"] = seconds


def repairs(report: Report, network: Network, options: argparse.Namespace, line_s: float) -> None:
    """Each fault so many times, of one middle relay after another."""
    report.say("\n| fault of a middle relay | runs | noticed, median (max) s | all survivors ready, median (max) s |")
    report.say("|---|---|---|---|")
    report.results["repairs"] = {}
    for fault, goal_s in GOALS_S.items():
        runs = _repairs(report, network, options, fault, 0.3 * line_s)
        report.results["repairs"][fault] = runs
        noticed, ready = ([run[key] for run in runs] for key in ("noticed_s", "all_ready_s"))
        middle = statistics.median(noticed)
        report.say(
            f"| {fault} | {len(runs)} | {middle:.3f} ({max(noticed):.3f}) | {statistics.median(ready):.3f} ({max(ready):.3f}) |"
        )
        report.goal(f"{fault} noticed within {goal_s:g} s (median)", f"{middle:.3f} s", middle <= goal_s)


def _repairs(
    report: Report, network: Network, options: argparse.Namespace, fault: str, after_s: float
) -> list[dict[str, float]]:
    runs: list[dict[str, float]] = []

    def go_on() -> None:
        with Relays(network, options.relays, options.mib * MIB, timeout_s=DETECT_S, deltas="never") as relays:
            while len(runs) < options.repairs:
                victim = 1 + len(runs) % max(options.relays - 1, 1)
                runs.append(repair(relays, fault, victim, after_s))
                if len(runs) < options.repairs:
                    restore(relays, victim)

    try:
        report.unspoilt(go_on)
    finally:
        for number in range(network.num_hosts):
            network.cable(number, "up")
            network.shape(number, network.rate)
    return runs


def deltas(report: Report, network: Network, options: argparse.Namespace, line_s: float) -> None:
    """Versions as deltas and whole, over slow links."""
    for number in range(network.num_hosts):
        network.shape(number, SLOW_RATE)
    report.say(f"\nAt {SLOW_RATE}, {options.mib} MiB:\n")
    report.say("| what changes | relays | deltas | seconds | on the wire, of the whole | of the time without deltas |")
    report.say("|---|---|---|---|---|---|")
    rows = report.results["deltas"] = []
    for what, versions in _changes(options):
        for count in sorted({1, min(3, options.relays)}):
            times = {}
            for mode in ("never", "auto"):
                seconds, share = report.unspoilt(lambda: _delta_s(network, count, versions(), mode))  # noqa: B023
                times[mode] = seconds
                report.say(
                    f"| {what} | {count} | {mode} | {seconds:.3f} | {share:.4f} | {seconds / times['never']:.3f} |"
                )
                rows.append({"what": what, "relays": count, "deltas": mode, "seconds": seconds, "wire_share": share})
            ratio = times["auto"] / times["never"]
            limit = 0.1 if what != "everything" else 1.05
            report.goal(
                f"deltas, {what}, {count} relays: at most {limit:g} of the time", f"{ratio:.3f}", ratio <= limit
            )
    for number in range(network.num_hosts):
        network.shape(number, network.rate)


def _delta_s(network: Network, count: int, versions: list[np.ndarray], mode: str) -> tuple[float, float]:
    """(median seconds of a version, its share on the master's wire)."""
    with Relays(network, count, versions[0].nbytes, deltas=mode) as relays:
        relays.broadcast(versions[0])
        before, seconds = relays.wire_bytes(), [relays.broadcast(data) for data in versions[1:]]
        share = (relays.wire_bytes() - before) / sum(data.nbytes for data in versions[1:])
    return statistics.median(seconds), share


def _changes(options: argparse.Namespace) -> list[tuple[str, Callable[[], list[np.ndarray]]]]:
    """(what changes from version to version, how to make some versions)"""
    if options.weights:
        return [("real weights", lambda: [np.fromfile(path, np.uint16) for path in options.weights])]
    return [
        ("1 % of the elements", lambda: _versions(options.mib, 0.01)),
        ("everything", lambda: _versions(options.mib, 1.0)),
    ]


def _versions(mib: int, share: float) -> list[np.ndarray]:
    """Weights of which this share of the elements moves by one unit in the last place, from version to version."""
    rng = np.random.default_rng(1)
    versions = [rng.integers(0, 1 << 15, mib * MIB // 2, dtype=np.uint16)]
    for _ in range(ROUNDS):
        data = versions[-1].copy()
        data[rng.random(len(data), np.float32) < share] += 1
        versions.append(data)
    return versions


def check(report: Report) -> None:
    """Bytes, order, completion and repair in small, without times."""
    with Network(4, "800mbit") as network, Relays(network, 3, 24 * MIB, deltas="never") as relays:
        relays.broadcast()
        for at, host in enumerate(relays.hosts):
            sent = host.client.status().chain_sent_bytes
            expected = 3 * relays.num_bytes if at < 3 else 0
            report.goal(f"r{at} sent each version to one neighbour", f"{sent} bytes", sent == expected)
        for fault in ("kill -9", "SIGSTOP", "is not heard"):
            repair(relays, fault, 2, 0.05)
            restore(relays, 2)
            report.goal(f"{fault}: noticed, and all survivors whole", "yes", True)


# ---- the report --------------------------------------------------------------------------------------------


def main() -> int:
    options = _parse()
    if os.geteuid() != 0:
        print("network namespaces need root: run it with sudo", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that what was made is unmade
    report = Report()
    try:
        if options.check:
            check(report)
        else:
            _measure(report, options)
    except SpoiltError as error:
        print(f"given up after {TRIES} tries: {error}", file=sys.stderr)
        return 1
    finally:
        if options.json:
            Path(options.json).write_text(json.dumps(report.results, indent=1))
    return 0 if report.end() else 1


def _measure(report: Report, options: argparse.Namespace) -> None:
    works = {"chain": chain, "star": star, "gloo": gloo, "repairs": repairs, "deltas": deltas}
    with Network(options.relays + 1, options.rate) as network:
        line_s = statistics.median(line_time_s(network, options.mib * MIB) for _ in range(ROUNDS))
        report.say(f"line time of {options.mib} MiB at {options.rate}: {line_s:.3f} s")
        report.results |= {"mib": options.mib, "rate": options.rate, "relays": options.relays, "line_s": line_s}
        for part in options.parts:
            works[part](report, network, options, line_s)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--relays", type=int, default=7)
    parser.add_argument("--rate", default="800mbit")
    parser.add_argument("--repairs", type=int, default=20, help="faults of each kind")
    parser.add_argument(
        "--weights", metavar="FILE", nargs="*", help="versions for the deltas: raw bf16, as bench_delta saves"
    )
    parser.add_argument("--check", action="store_true", help="a short form without times")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"--parts: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
