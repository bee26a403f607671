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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from laminar.errors import ConfigError
from laminar.roofline import HARDWARE
from laminar.sim import baselines, plots
from laminar.sim.cluster import MODELS, Software
from laminar.sim.freshness import HALF_LIFE
from laminar.sim.policies import POLICIES, RECOMMENDED, Policy
from laminar.sim.scenario import Begun, Scenario, searched, simulate
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
SHARED = {PLACEMENT: "search", "laminar": "search", "one-step": "batches", "stream": "batches"}
"""Systems that share work at a cell of the grid: `laminar` goes on with the short run that won the search, two baselines generate
the same batches."""
DRAWN = {("32B", 128, "math"): "32B-128", ("72B", 1024, "math"): "72B-1024"}
"""Cells whose run of `laminar` is also drawn, and the name of the picture."""
COSTS = {
    PLACEMENT: (8.0, 0.06),
    "partial": (3.0, 0.05),
    "stream": (1.0, 0.0),
    "one-step": (1.0, 0.0),
    "sync": (0.2, 0.0),
}
"""CPU seconds of a point, and of each replica that its GPUs make; twice as much with tool calls."""
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
    def cell(self) -> tuple[str, int, str]:
        """Model, GPUs and workload."""
        return self.model, self.gpus, self.workload

    @property
    def cost(self) -> float:
        """Roughly proportional to the time it takes: some of it goes with the trajectories, some with the replicas."""
        fixed, each = (12.0, 0.05) if self.policy else COSTS[self.system]
        num_replicas = self.gpus / MODELS[self.model].tensor_parallel
        return (fixed + each * num_replicas) * (2.0 if WORKLOADS[self.workload].calls_max else 1.0)

    @property
    def policy(self) -> Policy | None:
        """What Laminar's scheduler does there; None = the system is another."""
        return LAMINAR.get(self.system) or POLICIES.get(self.system)

    @property
    def search(self) -> "Point | None":
        """What must be run before, to know the placement; None = nothing."""
        is_known = self.split or ("laminar", self.model, self.gpus) in PAPER_SPLITS
        return None if is_known or self.policy is None else replace(self, system=PLACEMENT)


Task = tuple[Point, ...]
"""Points that one process computes together, in this order, because they share work."""


def points(models: Iterable[str], gpus: Iterable[int], workloads: Iterable[str]) -> list[Point]:
    """All of them, in the order of the rows."""
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


def run(
    wanted: list[Point], path: Path, hardware: str, seed: int, jobs: int = 1, drawn: Path | None = None
) -> list[dict[str, Any]]:
    """All rows, the missing ones computed now by `jobs` processes and appended to `path` by this one alone. Pictures of
    representative ones that are computed go to the directory `drawn`.

    Raises ConfigError for a file of other constants.
    """
    mark = fingerprint(hardware, seed)
    rows = {row["key"]: row for row in _read(path, mark)}
    missing = [point for point in wanted if point.key not in rows]
    searches = [point.search for point in missing if point.search and point.search.key not in rows]
    tasks = tasks_of([*dict.fromkeys(searches), *missing])
    progress = _Progress([point for task in tasks for point in task])
    measure = partial(_measure, hardware=hardware, seed=seed, drawn=drawn)
    take = partial(_take, tasks, rows)
    with contextlib.closing(_measured(take, measure, min(jobs, len(tasks)))) as measured:
        for point, row in measured:
            rows[point.key] = row | {"key": point.key, "fingerprint": mark}
            with path.open("a") as file:
                file.write(json.dumps(rows[point.key]) + "\n")
            progress.show(point, row)
    return [rows[point.key] for point in wanted]


def tasks_of(points: Iterable[Point]) -> list[Task]:
    """In the order of work: the cheapest of each kind, so that an error shows early, then the longest first, so that no process
    is idle while another has the last long one."""
    shared: dict[tuple[str, str, int, str], list[Point]] = {}
    for point in points:
        shared.setdefault((SHARED.get(point.system, point.system), *point.cell), []).append(point)
    by_cost = sorted(map(tuple, shared.values()), key=_cost)
    cheapest = {tuple(point.system for point in task): task for task in reversed(by_cost)}
    return [*sorted(cheapest.values(), key=_cost), *(t for t in reversed(by_cost) if t not in cheapest.values())]


def _cost(task: Task) -> float:
    return sum(point.cost for point in task)


def _take(tasks: list[Task], rows: dict[str, dict[str, Any]]) -> Task | None:
    """Remove the first task that waits for no search, and place its points; None while there is none."""
    for task in tasks:
        searches = [point.search for point in task if point.search not in task]
        if all(search is None or search.key in rows for search in searches):
            tasks.remove(task)
            return tuple(point if point.search in task else _placed(point, rows) for point in task)
    return None


def _placed(point: Point, rows: dict[str, dict[str, Any]]) -> Point:
    """The point with the placement that was found for it, if one was searched."""
    if point.search is None:
        return point
    train, rollout = rows[point.search.key]["split"].split("/")
    return replace(point, split=(int(train), int(rollout)))


def _measured(
    take: Callable[[], Task | None], measure: Callable[[Task], list[dict[str, Any]]], jobs: int
) -> Generator[tuple[Point, dict[str, Any]], None, None]:
    """The points of all tasks with their rows, as they are done. Whatever ends this also ends the processes."""
    if jobs <= 1:
        while task := take():
            yield from zip(task, measure(task), strict=True)
        return
    context = multiprocessing.get_context("spawn")  # forked children would share locks in whatever state they are
    with ProcessPoolExecutor(jobs, context, _begin_process) as pool:
        terminated = signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # as Ctrl-C: no child outlives this process
        try:
            running: dict[Future[list[dict[str, Any]]], Task] = {}
            while _submit(pool, measure, take, running, jobs):
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield from zip(running.pop(future), future.result(), strict=True)
        except BaseException:
            for child in multiprocessing.active_children():
                child.kill()  # a point can take minutes, and an unfinished one is worth nothing
            raise
        finally:
            signal.signal(signal.SIGTERM, terminated)


def _submit(
    pool: ProcessPoolExecutor,
    measure: Callable[[Task], list[dict[str, Any]]],
    take: Callable[[], Task | None],
    running: dict[Future[list[dict[str, Any]]], Task],
    jobs: int,
) -> bool:
    """Keep all processes at work; False if none is. They begin, and so live, with Ctrl-C blocked: it reaches all processes of a
    terminal, and one that it ends while it starts would leave the pool waiting for it; only the parent acts on it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        while len(running) < jobs and (task := take()):
            running[pool.submit(measure, task)] = task
        return bool(running)
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


def _measure(task: Task, hardware: str, seed: int, drawn: Path | None = None) -> list[dict[str, Any]]:
    """The rows of its points; pictures of representative ones go to `drawn`."""
    begun: Begun | None = None
    rows = []
    for point in task:
        name = {"system": point.system, "model": point.model, "gpus": point.gpus, "workload": point.workload}
        if point.system == PLACEMENT:
            begun = searched(_scenario(point, hardware, seed))
            train, rollout = begun.scenario.split or (0, 0)
            rows.append(name | {"split": f"{train}/{rollout}", "throughput_tokens_per_s": begun.tokens_per_s})
        elif point.policy is None:
            rows.append(name | _baseline(point, hardware, seed))
        else:
            scenario = _scenario(point, hardware, seed).under(point.policy)
            assert begun is None or begun.scenario == replace(scenario, split=begun.scenario.split), "another run"
            world, found = begun.finish() if begun else simulate(scenario)
            if drawn and point.system == "laminar" and point.cell in DRAWN:
                plots.representative(world.measures, found, DRAWN[point.cell], drawn)
            row = found | name
            del row["queue"]["series"]  # of long runs
            rows.append(row)
    return rows


def _baseline(point: Point, hardware: str, seed: int) -> dict[str, Any]:
    workload, split = (
        WORKLOADS[point.workload],
        point.split or PAPER_SPLITS.get((point.system, point.model, point.gpus)),
    )
    found = baselines.place(point.system, point.model, hardware, point.gpus, workload, seed, split)
    return {"throughput_tokens_per_s": found.pace.tokens_per_s} | found.pace.report() | {"split": found.split}


def _scenario(point: Point, hardware: str, seed: int) -> Scenario:
    """Of Laminar at this point, under the paper's policy."""
    split = point.split or PAPER_SPLITS.get(("laminar", point.model, point.gpus))
    return Scenario(
        model=point.model,
        hardware=hardware,
        gpus=point.gpus,
        split=split,
        workload=WORKLOADS[point.workload],
        seed=seed,
    )


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
