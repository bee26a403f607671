"""How much the controller takes in: `python scripts/bench_controller.py [--seconds 30] [--replicas 64,256,1024] [--alone]`.

A real controller (`python -m laminar.controller` with log, token segments and group commit as configured by default) on one core;
on another this process simulates its workers over real WebSockets: replicas that report the tokens of all their trajectories four
times a second and keep each report until it is acknowledged, which it is when it is on disk; a trainer that fetches every batch.
Prompts, groups, batches and checkpoints are those of a run, so that what comes in also goes out.

Prints a row per fleet: tokens/s acknowledged, the controller's processor time, how late its event loop was, how late the disk.
Then, unless `--alone`, a table of the same tokens through TransferQueue's client (`bench/transferqueue_rows.py`, in an environment
of its own, `.venv-transferqueue`, which is made when it is missing), both as fast as they go.
"""

import argparse
import asyncio
import bisect
import logging
import os
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from laminar import __version__  # noqa: E402 - the repository need not be installed
from scripts.bench import transferqueue  # noqa: E402
from scripts.bench.controller_run import BATCH_GROUPS, ControllerRun  # noqa: E402
from scripts.bench.fleet import PENDING_FRAMES_MAX, Fleet, Load  # noqa: E402

LAG_PROBE_S = 0.005


@dataclass(frozen=True)
class Window:
    """One measurement. Rates are per second of `seconds`."""

    load: Load
    seconds: float
    tokens_acknowledged: int
    tokens_fetched: int
    reports: int
    report_bytes: int
    held_back: int
    finished: int
    steps: int
    load_late_s: list[float]
    """How late each report was made: the load's own speed."""
    cpu_s: float
    load_cpu_s: float
    written_bytes: int
    num_generating: int
    lags_s: list[float]
    commits_s: list[float]
    collections_s: list[float]


def main() -> int:
    """Measure and print Markdown."""
    options = parse()
    if len(os.sched_getaffinity(0)) < 2:
        print("error: two cores are needed, one for the controller and one for the load", file=sys.stderr)
        return 1
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # links tell of every try
    print(HEADER, flush=True)
    notes: list[str] = []
    for load in options.loads:
        window = asyncio.run(measure(load, options))
        print(row(window), flush=True)
        notes += [f"* {load.replicas:,} replicas: {remark}" for remark in remarks(window)]
    print("", *notes, sep="\n", flush=True)
    if not options.alone:
        compare(options)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement (default 30)")
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds before it (default 20)")
    parser.add_argument("--replicas", default="64,256,1024", help="sizes of fleets (default 64,256,1024)")
    parser.add_argument("--in-flight", type=int, default=26_624, help="trajectories of a whole fleet (default 26624)")
    parser.add_argument("--tokens-per-report", type=int, default=10, help="of each trajectory (default 10)")
    parser.add_argument("--mean-tokens", type=int, default=2000, help="of a response (default 2000)")
    parser.add_argument("--directory", type=Path, help="where the runs are written (default: a temporary one)")
    parser.add_argument("--alone", action="store_true", help="without TransferQueue")
    parser.add_argument(
        "--transferqueue-python", type=Path, help="interpreter that has TransferQueue (default: one is made)"
    )
    parser.add_argument("--override", action="append", default=[], help="section.key=value for the controller")
    options = parser.parse_args()
    options.loads = [
        Load(
            replicas=int(number),
            trajectories=max(8, options.in_flight // int(number) // 8 * 8),
            tokens_per_report=options.tokens_per_report,
            mean_tokens=options.mean_tokens,
        )
        for number in options.replicas.split(",")
    ]
    return options


async def measure(load: Load, options: argparse.Namespace) -> Window:
    """One fleet against one controller."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-controller-") as directory:
        run = ControllerRun(Path(directory), load, cores[0], tuple(options.override))
        os.sched_setaffinity(0, {cores[1]})
        try:
            with run as controller:
                return await observe(controller, load, options)
        finally:
            os.sched_setaffinity(0, set(cores))


async def observe(controller: ControllerRun, load: Load, options: argparse.Namespace) -> Window:
    """Start the fleet, wait for the steady state, then look for as long as asked."""
    fleet = Fleet(controller.url, controller.token, load)
    await fleet.start()
    try:
        await patiently(fleet, controller, options.warm_up)
        before, began = _sums(fleet), time.time()
        cpu_s, load_cpu_s, written = controller.cpu_s(), time.process_time(), controller.written_bytes()
        fleet.count.late_s.clear()
        await patiently(fleet, controller, options.seconds)
        after, ended = _sums(fleet), time.time()
        cpu_s, load_cpu_s = controller.cpu_s() - cpu_s, time.process_time() - load_cpu_s
        written = controller.written_bytes() - written
        num_generating = sum(replica.num_generating for replica in fleet.replicas)
        late_s = list(fleet.count.late_s)
        probes = controller.probes()
    finally:
        await fleet.close()
    within = {name: [entry for entry in seen if began <= entry[0] < ended] for name, seen in probes.items()}
    return Window(
        load=load,
        seconds=ended - began,
        **{name: after[name] - before[name] for name in before},
        load_late_s=late_s,
        cpu_s=cpu_s,
        load_cpu_s=load_cpu_s,
        written_bytes=written,
        num_generating=num_generating,
        lags_s=felt([lag for _, lag in within["lags"]]),
        commits_s=commit_lags(controller.path / "run.db", within["commits"]),
        collections_s=[lasted for _, lasted, _ in within["collections"]],
    )


async def patiently(fleet: Fleet, controller: ControllerRun, seconds: float) -> None:
    """Sleep, while everything lives."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        fleet.check()
        if controller.process.poll() is not None:
            raise RuntimeError(f"the controller ended:\n{controller.output()}")


def _sums(fleet: Fleet) -> dict[str, int]:
    names = ("tokens_acknowledged", "tokens_fetched", "reports", "report_bytes", "held_back", "finished", "steps")
    return {name: getattr(fleet.count, name) for name in names}


def felt(lags_s: Sequence[float]) -> list[float]:
    """The lag that something due at any moment would have met: a stall counts for every probe that it kept from being made."""
    each = []
    for lag_s in lags_s:
        while lag_s >= 0:
            each.append(lag_s)
            lag_s -= LAG_PROBE_S
    return each


def commit_lags(database: Path, commits: list[Any]) -> list[float]:
    """Of every event: from when it was appended to when it was known to be on disk."""
    seqs = [seq for _, seq in commits]
    lags = []
    connection = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)
    rows = connection.execute("SELECT seq, at FROM events WHERE seq > ? AND seq <= ?", (seqs[0], seqs[-1]))
    for seq, at in rows:
        lags.append(commits[bisect.bisect_left(seqs, seq)][0] - at)
    connection.close()
    return lags


def percentile(values: Sequence[float], share: float) -> float:
    """0 for nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


HEADER = """\
| replicas × trajectories | offered, tokens/s | acknowledged | fetched | core used | CPU s per 1 M tokens | µs per report \
| loop late, ms | disk late, ms | written, MB/s | load: core, late ms |
|---|---|---|---|---|---|---|---|---|---|---|"""


def row(window: Window) -> str:
    """One line of the table; what is late: median / 99th percentile / longest."""
    load, seconds = window.load, window.seconds
    cells = [
        f"{load.replicas:,} × {load.trajectories}",
        f"{load.tokens_per_s:,.0f}",
        f"{window.tokens_acknowledged / seconds:,.0f}",
        f"{window.tokens_fetched / seconds:,.0f}",
        f"{window.cpu_s / seconds:.2f}",
        f"{window.cpu_s / max(1, window.tokens_acknowledged) * 1e6:.3f}",
        f"{window.cpu_s / max(1, window.reports) * 1e6:.0f}",
        _spread(window.lags_s),
        _spread(window.commits_s),
        f"{window.written_bytes / seconds / 1e6:.1f}",
        f"{window.load_cpu_s / seconds:.2f}, {percentile(window.load_late_s, 0.99) * 1e3:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def remarks(window: Window) -> list[str]:
    """What the row does not say."""
    longest_ms = max(window.collections_s, default=0.0) * 1e3
    found = [
        f"{window.num_generating:,} in flight at the end, {window.finished:,} finished, {window.steps} steps of {BATCH_GROUPS} "
        f"groups; {len(window.collections_s)} garbage collections, the longest {longest_ms:.0f} ms"
    ]
    if percentile(window.load_late_s, 0.99) > 1.0 / window.load.reports_per_s:
        found.append(
            "THE LOAD WAS THE LIMIT: it was late by more than a report's interval, so the controller could take more"
        )
    if window.held_back:
        found.append(f"{window.held_back:,} reports were not made: the controller was {PENDING_FRAMES_MAX} behind")
    return found


COMPARED = {"reports": "104 rows × 10 tokens at a time", "groups": "8 whole rows at a time"}


def compare(options: argparse.Namespace) -> None:
    """Print the table of both systems, each as fast as it goes."""
    mean = options.mean_tokens
    loads = {
        "reports": Load(256, 104, reports_per_s=16.0, mean_tokens=mean),
        "groups": Load(256, 8, tokens_per_report=2 * mean, reports_per_s=8.0, mean_tokens=mean),
    }
    print(f"\n{COMPARISON}", flush=True)
    for kind, load in loads.items():
        window = asyncio.run(measure(load, options))
        cells = [
            f"Laminar {__version__}",
            COMPARED[kind],
            window.tokens_acknowledged,
            window.tokens_fetched,
            window.cpu_s,
        ]
        print(compared(*cells, window.seconds, "yes"), flush=True)
    cores = sorted(os.sched_getaffinity(0))
    try:
        python = options.transferqueue_python or transferqueue.environment()
        for found in transferqueue.measure(python, cores, options.seconds, mean):
            cells = [f"TransferQueue {found.version}", COMPARED[found.kind], found.tokens_put, found.tokens_got]
            print(compared(*cells, found.servers_cpu_s, found.seconds, "no"), flush=True)
    except transferqueue.Unavailable as error:
        print(f"\nTransferQueue is not part of this run: {error}")


COMPARISON = """\
| system | work | taken in, tokens/s | fetched | its processes: cores used | CPU s per 1 M tokens | on disk |
|---|---|---|---|---|---|---|"""


def compared(system: str, work: str, taken: int, fetched: int, cpu_s: float, seconds: float, durable: str) -> str:
    """One line of it."""
    rates = f"{taken / seconds:,.0f} | {fetched / seconds:,.0f}"
    return f"| {system} | {work} | {rates} | {cpu_s / seconds:.2f} | {cpu_s / max(1, taken) * 1e6:.3f} | {durable} |"


def _spread(values_s: list[float]) -> str:
    if not values_s:
        return "–"
    return (
        f"{statistics.median(values_s) * 1e3:.1f} / {percentile(values_s, 0.99) * 1e3:.1f} / {max(values_s) * 1e3:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
