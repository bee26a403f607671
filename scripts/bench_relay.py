#!/usr/bin/env python
"""What moving a version costs between relays of one machine, in multiples of one memcpy of the same bytes in the same run.

    .venv/bin/python scripts/bench_relay.py [--mib 256] [--rounds 5] [--relays 1,3,7] [--transports tcp,ucx] [--no-gloo]

Real relay daemons, linked over loopback, so all of them share this machine's cores and memory: it shows what the copies cost, not
what the chain gains on a network (that is `netns_relays.py`). Times of chains are from the commit at the master until the last
relay is READY, digests included; each time is taken beside a memcpy of its own. Prints a table in Markdown, ends within
`--limit-s`, and leaves nothing.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from bench.bare_chain import broadcasts  # noqa: E402
from chain_world import Relay, arrange, manifest_of  # noqa: E402
from netns_relays import GLOO, MIB  # noqa: E402

from laminar.ids import Version  # noqa: E402
from laminar.workers.relay.slot_files import free_bytes  # noqa: E402
from laminar.workers.transport import TRANSPORTS  # noqa: E402

SLOTS = 2
LINK_TIMEOUT_S = 20.0  # nothing is to break here: all relays share two cores, and stand still for a while now and then
WAIT_S = 120.0
MEMORY_SHARE = 0.7  # of what is free now


class Bench:
    """The bytes, and rows of (what, seconds, multiples of a memcpy)."""

    def __init__(self, num_bytes: int, rounds: int) -> None:
        self.num_bytes, self.rounds = num_bytes, rounds
        self.source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        self.memcpy: list[float] = []
        self.rows: list[tuple[str, list[float], list[float]]] = []
        self._step = 0

    def row(self, what: str, seconds: list[float], memcpy: list[float]) -> None:
        """One line of the table; each time beside the memcpy that was taken next to it."""
        times = [one / copy for one, copy in zip(seconds, memcpy, strict=True)]
        self.rows.append((what, seconds, times))
        print(f"# {what}: {statistics.median(seconds):.3f} s = {statistics.median(times):.1f} memcpy", file=sys.stderr)

    def copy(self) -> float:
        """Seconds of one memcpy, warm to warm."""
        self.memcpy.append(clocked(lambda: np.copyto(self.target, self.source)))
        return self.memcpy[-1]

    def repeat(self, what: str, work: Callable[[], float]) -> None:
        """A row of `work`, which returns its seconds; the first time, cold, does not count."""
        work()
        pairs = [(self.copy(), work()) for _ in range(self.rounds)]
        self.row(what, [seconds for _, seconds in pairs], [copy for copy, _ in pairs])

    def publish(self, relay: Relay) -> tuple[Version, float]:
        """A new version, and the seconds of begin, copy and commit."""
        while True:
            self._step += 1
            version, began = Version(self._step, 0), time.perf_counter()
            buffer = relay.client.begin(version, manifest_of(self.num_bytes), 0, 1)
            if buffer is not None:
                np.copyto(np.frombuffer(buffer, np.uint8)[: self.num_bytes], self.source)
                relay.client.commit(version)
                return version, time.perf_counter() - began
            time.sleep(0.01)  # the sender is about to let go of the version before

    def local(self) -> None:
        """One relay, one writer, one reader."""
        phases: dict[str, list[float]] = {}
        with relays(0, "tcp") as (relay,):
            for _ in range(self.rounds + 1):
                for phase, seconds in self._local_round(relay).items():
                    phases.setdefault(phase, []).append(seconds)
        memcpy = phases.pop("memcpy")[1:]
        for phase, seconds in phases.items():
            self.row(phase, seconds[1:], memcpy)

    def _local_round(self, relay: Relay) -> dict[str, float]:
        seconds = {"memcpy": self.copy()}
        version, seconds["publish (begin, copy, commit)"] = self.publish(relay)
        seconds["READY after the commit (digest)"] = clocked(lambda: ready(relay, version))
        began = time.perf_counter()
        with relay.client.lease(version) as lease:
            seconds["attach (lease, map)"] = time.perf_counter() - began
            weights = np.frombuffer(lease.buffer, np.uint8)[: self.num_bytes]
            seconds["first read (copy out)"] = clocked(partial(np.copyto, self.target, weights))
            assert np.array_equal(self.target, self.source), "the bytes are others"
            del weights
        return seconds

    def chain(self, num_relays: int, transport: str) -> None:
        """A master and so many relays behind it."""
        with relays(num_relays, transport) as chained:

            def broadcast() -> float:
                version, _ = self.publish(chained[0])
                return clocked(lambda: [ready(relay, version) for relay in chained])

            self.repeat(f"chain of {num_relays} over {transport}", broadcast)
            print(f"# its links: {chained[0].client.status().chain}", file=sys.stderr)
            with chained[-1].client.lease() as lease:
                lease.verify()

    def bare(self, num_relays: int) -> None:
        """Processes that only receive and send on."""
        pairs = [(self.copy(), seconds) for seconds in broadcasts(self.source, num_relays, self.rounds)]
        self.row(
            f"bare sockets in a chain of {num_relays}", [seconds for _, seconds in pairs], [copy for copy, _ in pairs]
        )

    def star(self, num_relays: int) -> None:
        """The master sends to one relay after another."""
        with relays(num_relays, "tcp") as (master, *others):
            epochs = iter(range(2, 10**6))

            def broadcast() -> float:
                arrange(next(epochs), [master])
                version, _ = self.publish(master)
                ready(master, version)
                began = time.perf_counter()
                for other in others:
                    arrange(next(epochs), [master, other])
                    ready(other, version)
                return time.perf_counter() - began

            self.repeat(f"star of {num_relays} over tcp, one after another, without the master's digest", broadcast)

    def gloo(self, num_relays: int) -> None:
        """torch.distributed's broadcast to as many processes."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        sizes = [str(num_relays + 1), "127.0.0.1", str(self.num_bytes), str(self.rounds + 1)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", GLOO, str(rank), *sizes], env=environment, stdout=subprocess.PIPE, text=True
            )
            for rank in range(num_relays + 1)
        ]
        try:
            said = [process.communicate(timeout=WAIT_S)[0].split() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        seconds = [max(float(one) for one in each) for each in zip(*said, strict=True)][1:]
        self.row(f"gloo broadcast to {num_relays}", seconds, [self.copy() for _ in seconds])


def clocked(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ready(relay: Relay, version: Version) -> None:
    """Wait until the relay has it."""
    relay.client.lease(version, wait_s=WAIT_S).release()


@contextlib.contextmanager
def relays(num_relays: int, transport: str) -> Iterator[list[Relay]]:
    """A master and `num_relays` behind it, chained, and gone afterwards."""
    options = ("--transport", transport, "--slots", str(SLOTS))
    made: list[Relay] = []
    try:
        for number in range(num_relays + 1):
            made.append(Relay(f"r{number}", progress_timeout_s=LINK_TIMEOUT_S, deltas="never", options=options))
        arrange(1, made)
        yield made
    finally:
        for relay in made:
            relay.end()


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGALRM, _too_late)
    signal.signal(signal.SIGTERM, _too_late)
    signal.alarm(options.limit_s)
    num_bytes = options.mib * MIB
    needed = (max(options.relays) + 1) * SLOTS * num_bytes + 3 * num_bytes
    free = min(psutil.virtual_memory().available, free_bytes(Path("/dev/shm")))
    if needed > MEMORY_SHARE * free:
        print(f"{needed >> 20} MiB are needed and {free >> 20} MiB are free: use a smaller --mib", file=sys.stderr)
        return 1
    bench = Bench(num_bytes, options.rounds)
    bench.copy()
    bench.local()
    for transport in options.transports:
        for num_relays in options.relays:
            bench.chain(num_relays, transport)
    bench.bare(max(options.relays))
    bench.star(max(options.relays))
    if not options.no_gloo:
        bench.gloo(max(options.relays))
    _report(bench, options)
    return 0


def _report(bench: Bench, options: argparse.Namespace) -> None:
    memcpy = statistics.median(bench.memcpy)
    print(
        f"{options.mib} MiB, {os.cpu_count()} cores, medians of {options.rounds}; one memcpy of the same bytes: {memcpy:.3f} s\n"
    )
    print("| what | s | × memcpy | least – most |\n|---|---|---|---|")
    for what, seconds, times in bench.rows:
        median = statistics.median(times)
        print(f"| {what} | {statistics.median(seconds):.3f} | {median:.1f} | {min(times):.1f} – {max(times):.1f} |")


def _too_late(*_: object) -> None:
    raise SystemExit("it took longer than --limit-s, or was told to stop")


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in TRANSPORTS]:
        raise argparse.ArgumentTypeError(f"no transport {unknown[0]!r}; there is: {', '.join(TRANSPORTS)}")
    return names


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of a version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--relays", type=_numbers, default=[1, 3, 7], help="lengths of chains behind the master")
    parser.add_argument("--transports", type=_names, default=["tcp"])
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--limit-s", type=int, default=900)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
