"""The paper's grid: models x GPUs x workloads x systems, by its protocol; resumable, a line of JSON per point.

A point that is in the file already is not run again, so an interrupted grid goes on where it was. A changed table of constants
gives another fingerprint, and old points are refused rather than mixed in.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

from laminar.errors import ConfigError
from laminar.sim import baselines
from laminar.sim.cluster import HARDWARE, MODELS, Software
from laminar.sim.scenario import Scenario, optimized, simulate
from laminar.sim.workload import WORKLOADS, Workload

GPUS = (64, 128, 256, 512, 1024)
SYSTEMS = ("laminar", "laminar-continuous", "sync", "one-step", "stream", "partial")
PAPER_SPLITS = {("72B", 1024): (768, 256), ("32B", 128): (64, 64)}
"""Placements that the paper states for Laminar; elsewhere the best of a few, searched with the batch policy."""
PAPER_SPEEDUPS = {"sync": 2.56, "one-step": 1.98, "stream": 1.93, "partial": 1.39}
"""Mean over the grid, math workload."""
PAPER_LARGEST = ("math", "72B", 1024, 5.48)
"""Its largest speedup, over the synchronous system."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One cell of the grid for one system."""

    system: str
    model: str
    gpus: int
    workload: str

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.system}/{self.model}/{self.gpus}/{self.workload}"


def points(models: Iterable[str], gpus: Iterable[int], workloads: Iterable[str]) -> list[Point]:
    """Small ones first, so that a grid that is cut off has whole rows."""
    return [
        Point(system=system, model=model, gpus=num, workload=workload)
        for num in gpus
        for workload in workloads
        for model in models
        for system in SYSTEMS
    ]


def fingerprint(hardware: str, seed: int) -> str:
    """Of everything that the figures depend on besides the code."""
    text = repr((HARDWARE[hardware], sorted(MODELS.items()), Software(), WORKLOADS, seed))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(wanted: list[Point], path: Path, hardware: str, seed: int) -> list[dict[str, Any]]:
    """All rows, the missing ones computed now and appended to `path`. Raises ConfigError for a file of other constants."""
    mark = fingerprint(hardware, seed)
    rows = {row["key"]: row for row in _read(path, mark)}
    missing = [point for point in wanted if point.key not in rows]
    begun = time.perf_counter()
    for number, point in enumerate(missing, 1):
        row = _measure(point, hardware, seed) | {"key": point.key, "fingerprint": mark}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows[point.key] = row
        spent = time.perf_counter() - begun
        rate = f"{row['throughput_tokens_per_s']:,.0f} tokens/s"
        print(
            f"[{number}/{len(missing)}, {spent:.0f} s] {point.key} {row['split']}: {rate}", file=sys.stderr, flush=True
        )
    return [rows[point.key] for point in wanted]


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
    if not point.system.startswith("laminar"):
        rate, split = baselines.best(point.system, point.model, hardware, point.gpus, workload, seed)
        return name | {"throughput_tokens_per_s": rate, "split": split}
    policy = "continuous" if point.system == "laminar-continuous" else "batch"
    chosen = replace(_placed(point.model, point.gpus, workload, hardware, seed), policy=policy)
    _, found = simulate(chosen)
    return found | name


@lru_cache(maxsize=8)
def _placed(model: str, gpus: int, workload: Workload, hardware: str, seed: int) -> Scenario:
    """Laminar's scenario at the paper's placement, or at the best one found; both policies use the same."""
    split = PAPER_SPLITS.get((model, gpus))
    scenario = Scenario(model=model, hardware=hardware, gpus=gpus, split=split, workload=workload, seed=seed)
    return scenario if split else optimized(scenario)


def table(rows: list[dict[str, Any]]) -> str:
    """Throughputs in thousands of tokens per second, and the speedups of `laminar` over the others beside the paper's."""
    cells = {row["key"]: row for row in rows}
    heads = list(dict.fromkeys((row["workload"], row["model"], row["gpus"]) for row in rows))
    lines = [f"{'':18}" + "".join(f"{system:>20}" for system in SYSTEMS)]
    ratios: dict[str, list[float]] = {}
    for workload, model, gpus in sorted(heads, key=lambda head: (head[0], list(MODELS).index(head[1]), head[2])):
        own = {s: cells[f"{s}/{model}/{gpus}/{workload}"]["throughput_tokens_per_s"] for s in SYSTEMS}
        cell = "".join(f"{own[s] / 1e3:>12.1f} ({own['laminar'] / own[s]:4.2f}x)" for s in SYSTEMS)
        lines.append(f"{workload:5}{model:>5}{gpus:>6}  {cell}")
        for system in SYSTEMS:
            ratios.setdefault(f"{workload} {system}", []).append(own["laminar"] / own[system])
    for key, values in sorted(ratios.items()):
        paper = PAPER_SPEEDUPS.get(key.partition(" ")[2]) if key.startswith("math") else None
        beside = f"; paper {paper}x" if paper else ""
        lines.append(f"mean speedup, {key}: {mean(values):.2f}x, largest {max(values):.2f}x{beside}")
    workload, model, gpus, largest = PAPER_LARGEST
    if (workload, model, gpus) in heads:
        rates = [cells[f"{s}/{model}/{gpus}/{workload}"]["throughput_tokens_per_s"] for s in ("laminar", "sync")]
        lines.append(f"speedup over sync, {workload} {model} {gpus}: {rates[0] / rates[1]:.2f}x; paper {largest}x")
    return "\n".join(lines)
