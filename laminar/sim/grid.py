"""The paper's grid: models x GPUs x workloads x systems, by its protocol; resumable, a line of JSON per point.

A point that is in the file already is not run again, so an interrupted grid goes on where it was. A changed table of constants
gives another fingerprint, and old points are refused rather than mixed in.
"""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from laminar.errors import ConfigError
from laminar.roofline import HARDWARE
from laminar.sim import baselines
from laminar.sim.cluster import MODELS, Software
from laminar.sim.freshness import HALF_LIFE
from laminar.sim.policies import POLICIES, RECOMMENDED, Policy
from laminar.sim.scenario import Scenario, searched, simulate
from laminar.sim.workload import WORKLOADS

ROW_FORMAT = 3  # of a line; raised when rows gain fields that the table or the figures need
GC_THRESHOLD = (
    100_000  # objects; a run holds some hundred thousand that live long, and hardly makes cycles: 700 costs a seventh
)
GPUS = (64, 128, 256, 512, 1024)
LAMINAR = {
    "laminar": POLICIES["batch"],
    "laminar-parts": POLICIES[RECOMMENDED],
}
"""The paper's own policy, and the one that we recommend."""
SYSTEMS = (*LAMINAR, "sync", "one-step", "stream", "partial")
PAPER_SPLITS = {
    ("laminar", "72B", 1024): (768, 256),
    ("one-step", "72B", 1024): (256, 768),
    ("stream", "72B", 1024): (256, 768),
    ("partial", "72B", 1024): (640, 384),
}
"""Placements (train, rollout) that the paper states; elsewhere each system gets the best of a few. Laminar's policies share the one
that is best with the paper's."""
PLACEMENT = "placement"
"""The system whose row is the search for Laminar's placement."""
PAPER_SPEEDUPS = {"sync": 2.56, "one-step": 1.98, "stream": 1.93, "partial": 1.39}
"""Mean over the grid, math workload."""
PAPER_TOOL = 2.62
"""Mean over the grid and the baselines, tool workload."""
PAPER_LARGEST = ("math", "72B", 1024, 5.48)
"""Its largest speedup, over the synchronous system."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of the grid for one system."""

    system: str
    model: str
    gpus: int
    workload: str
    split: tuple[int, int] | None = None
    """(train, rollout) GPUs; None = the paper's, or the best one found."""

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.system}/{self.model}/{self.gpus}/{self.workload}"

    @property
    def cost(self) -> float:
        """Roughly proportional to the time it takes, for the time left: GPUs count, and whether the system runs the core."""
        if self.policy or self.system == PLACEMENT:
            return float(self.gpus)
        return self.gpus * (0.4 if self.system == "partial" else 0.05)

    @property
    def policy(self) -> Policy | None:
        """What Laminar's scheduler does there; None = the system is another."""
        return LAMINAR.get(self.system) or POLICIES.get(self.system)

    @property
    def search(self) -> "Point | None":
        """What must be run before, to know the placement; None = nothing."""
        is_known = self.split or ("laminar", self.model, self.gpus) in PAPER_SPLITS
        return None if is_known or self.policy is None else replace(self, system=PLACEMENT)


def points(models: Iterable[str], gpus: Iterable[int], workloads: Iterable[str]) -> list[Point]:
    """Small and cheap ones first, so that a grid that is cut off has whole rows, and an error shows early."""
    return [
        Point(system=system, model=model, gpus=num, workload=workload)
        for num in gpus
        for workload in workloads
        for model in models
        for system in (*baselines.BASELINES, *LAMINAR)
    ]


def fingerprint(hardware: str, seed: int) -> str:
    """Of everything that the figures depend on besides the code."""
    text = repr((ROW_FORMAT, HARDWARE[hardware], sorted(MODELS.items()), Software(), WORKLOADS, seed))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(wanted: list[Point], path: Path, hardware: str, seed: int, jobs: int = 1) -> list[dict[str, Any]]:
    """All rows, the missing ones computed now by `jobs` processes and appended to `path` by this one alone.

    Raises ConfigError for a file of other constants.
    """
    mark = fingerprint(hardware, seed)
    rows = {row["key"]: row for row in _read(path, mark)}
    missing = [point for point in wanted if point.key not in rows]
    searches = [point.search for point in missing if point.search and point.search.key not in rows]
    others, own = [p for p in missing if p.policy is None], [p for p in missing if p.policy]
    stages = [[*others, *dict.fromkeys(searches)], own]
    progress = _Progress([point for stage in stages for point in stage])
    for stage in stages:
        placed = [_placed(point, rows) for point in stage]
        with contextlib.closing(_measured(placed, hardware, seed, jobs)) as measured:
            for point, row in measured:
                rows[point.key] = row | {"key": point.key, "fingerprint": mark}
                with path.open("a") as file:
                    file.write(json.dumps(rows[point.key]) + "\n")
                progress.show(point, row)
    return [rows[point.key] for point in wanted]


def _placed(point: Point, rows: dict[str, dict[str, Any]]) -> Point:
    """The point with the placement that was found for it, if one was searched."""
    if point.search is None:
        return point
    train, rollout = rows[point.search.key]["split"].split("/")
    return replace(point, split=(int(train), int(rollout)))


def _measured(
    missing: list[Point], hardware: str, seed: int, jobs: int
) -> Generator[tuple[Point, dict[str, Any]], None, None]:
    """The points with their rows, as they are done. Whatever ends this also ends the processes."""
    measure = partial(_measure, hardware=hardware, seed=seed)
    if jobs == 1 or len(missing) <= 1:
        yield from ((point, measure(point)) for point in missing)
        return
    context = multiprocessing.get_context("spawn")  # forked children would share locks in whatever state they are
    with ProcessPoolExecutor(min(jobs, len(missing)), context, _begin_process) as pool:
        terminated = signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # as Ctrl-C: no child outlives this process
        try:
            futures = _submitted(pool, measure, missing)
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            for child in multiprocessing.active_children():
                child.kill()  # a point can take minutes, and an unfinished one is worth nothing
            raise
        finally:
            signal.signal(signal.SIGTERM, terminated)


def _submitted(
    pool: ProcessPoolExecutor, measure: Callable[[Point], dict[str, Any]], missing: list[Point]
) -> dict[Future[dict[str, Any]], Point]:
    """All points, handed to processes that begin, and so live, with Ctrl-C blocked. It reaches all processes of a terminal, and one
    that it ends while it starts would leave the pool waiting for it; only the parent acts on it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {pool.submit(measure, point): point for point in missing}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_process() -> None:
    gc.set_threshold(GC_THRESHOLD)


class _Progress:
    """A line on stderr per point, with the time left as the points' costs so far tell it."""

    def __init__(self, missing: list[Point]) -> None:
        self.number, self.num = 0, len(missing)
        self.done, self.total = 0.0, sum(point.cost for point in missing)
        self.begun = time.perf_counter()

    def show(self, point: Point, row: dict[str, Any]) -> None:
        """One more is done."""
        self.number, self.done = self.number + 1, self.done + point.cost
        spent = time.perf_counter() - self.begun
        left = spent * (self.total - self.done) / self.done
        rate = f"{row['throughput_tokens_per_s']:,.0f} tokens/s"
        head = f"[{self.number}/{self.num}, {spent:.0f} s, about {left:.0f} s left]"
        print(f"{head} {point.key} {row['split']}: {rate}", file=sys.stderr, flush=True)


def _read(path: Path, mark: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a grid that was killed
        if row.get("fingerprint") != mark:
            raise ConfigError(
                f"{path}, line {number}: made with other constants or another seed; remove it, or name another --out"
            )
        rows.append(row)
    return rows


def _measure(point: Point, hardware: str, seed: int) -> dict[str, Any]:
    workload = WORKLOADS[point.workload]
    name = {"system": point.system, "model": point.model, "gpus": point.gpus, "workload": point.workload}
    system = "laminar" if point.policy else point.system
    split = point.split or PAPER_SPLITS.get((system, point.model, point.gpus))
    if point.policy is None and point.system != PLACEMENT:
        found = baselines.place(point.system, point.model, hardware, point.gpus, workload, seed, split)
        rate = {"throughput_tokens_per_s": found.pace.tokens_per_s}
        return name | rate | found.pace.report() | {"split": found.split}
    scenario = Scenario(
        model=point.model, hardware=hardware, gpus=point.gpus, split=split, workload=workload, seed=seed
    )
    if point.policy is None:
        return name | searched(scenario)
    row = simulate(scenario.under(point.policy))[1] | name
    del row["queue"]["series"]  # of long runs
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Throughput and fresh throughput of all systems, and the speedups of `laminar` beside the paper's."""
    parts = [
        _block(rows, "throughput_tokens_per_s", "throughput, thousands of tokens/s (laminar's speedup)"),
        _block(
            rows, "fresh_tokens_per_s", f"fresh throughput, the same; half-life {HALF_LIFE:g} versions, an assumption"
        ),
        _staleness(rows),
    ]
    return "\n\n".join(parts)


def _block(rows: list[dict[str, Any]], field: str, title: str) -> str:
    cells = {row["key"]: float(row[field]) for row in rows}
    heads = _heads(rows)
    lines = [title, f"{'':18}" + "".join(f"{system:>20}" for system in SYSTEMS)]
    ratios: dict[tuple[str, str], list[float]] = {}
    for workload, model, gpus in heads:
        own = {s: cells[f"{s}/{model}/{gpus}/{workload}"] for s in SYSTEMS}
        cell = "".join(f"{own[s] / 1e3:>12.1f} ({own['laminar'] / own[s]:4.2f}x)" for s in SYSTEMS)
        lines.append(f"{workload:5}{model:>5}{gpus:>6}  {cell}")
        for system in SYSTEMS:
            ratios.setdefault((workload, system), []).append(own["laminar"] / own[system])
    paper = field == "throughput_tokens_per_s"
    lines += [_mean_line(workload, system, values, paper) for (workload, system), values in sorted(ratios.items())]
    if paper:
        lines += _paper_lines(cells, heads, ratios)
    return "\n".join(lines)


def _heads(rows: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    heads = dict.fromkeys((row["workload"], row["model"], row["gpus"]) for row in rows)
    return sorted(heads, key=lambda head: (head[0], list(MODELS).index(head[1]), head[2]))


def _mean_line(workload: str, system: str, values: list[float], paper: bool) -> str:
    stated = PAPER_SPEEDUPS.get(system) if paper and workload == "math" else None
    beside = f"; paper {stated}x" if stated else ""
    return f"mean speedup, {workload} {system}: {mean(values):.2f}x, largest {max(values):.2f}x{beside}"


def _paper_lines(
    cells: dict[str, float], heads: list[tuple[str, str, int]], ratios: dict[tuple[str, str], list[float]]
) -> list[str]:
    """The figures that the paper states for more than one system, or for one point."""
    lines = []
    over_all = [value for (workload, system), values in ratios.items() for value in values
                if workload == "tool" and system in PAPER_SPEEDUPS]  # fmt: skip
    if over_all:
        lines.append(f"mean speedup, tool, over the baselines: {mean(over_all):.2f}x; paper {PAPER_TOOL}x")
    workload, model, gpus, largest = PAPER_LARGEST
    if (workload, model, gpus) in heads:
        own, sync = (cells[f"{s}/{model}/{gpus}/{workload}"] for s in ("laminar", "sync"))
        lines.append(f"speedup over sync, {workload} {model} {gpus}: {own / sync:.2f}x; paper {largest}x")
    return lines


def _staleness(rows: list[dict[str, Any]]) -> str:
    cells = {row["key"]: row for row in rows}
    lines = ["s_train, versions, mean/max; split", f"{'':18}" + "".join(f"{system:>20}" for system in SYSTEMS)]
    for workload, model, gpus in _heads(rows):
        own = [cells[f"{s}/{model}/{gpus}/{workload}"] for s in SYSTEMS]
        texts = [
            f"{row['s_train_mean']:.1f}/{row['s_train_max']} {row['split'].replace('colocated', '')}" for row in own
        ]
        lines.append(f"{workload:5}{model:>5}{gpus:>6}  " + "".join(f"{text:>20}" for text in texts))
    return "\n".join(lines)
