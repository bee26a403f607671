"""All policies at some points of the grid: what throughput each gives, and how stale the data is that it trains on.

A policy is *efficient* at a point if no other there is both faster and fresher (throughput, mean s_train). Placements are fixed,
the same for all, so that only the policy differs.
"""

import math
from pathlib import Path
from statistics import mean
from typing import Any

from laminar.sim.freshness import HALF_LIFE, break_even, pace_of
from laminar.sim.grid import Point
from laminar.sim.plots import pyplot, save
from laminar.sim.policies import POLICIES

POINTS = {
    ("7B", 64): (32, 32),
    ("32B", 128): (64, 64),
    ("32B", 256): (128, 128),
    ("72B", 1024): (768, 256),
}
"""(model, GPUs) -> (train, rollout)."""
BASE = "batch"
"""The paper's policy: what the others are compared with."""
COLUMNS = (("tokens/s", 9), ("gain", 7), ("KV use", 8), ("s_gen", 10), ("s_train", 10), ("fresh gain", 12), ("break-even", 12),
           ("longest", 9))  # fmt: skip
HEAD = " " * 34 + "".join(f"{name:>{width}}" for name, width in COLUMNS)


def named() -> str:
    """The points, for people."""
    return ", ".join(f"{model} {gpus}" for model, gpus in POINTS)


def points(model: str | None, gpus: int | None) -> list[Point]:
    """Every policy at every point, or at those of a model or a size; small ones first."""
    chosen = [p for p in POINTS if model in (None, p[0]) and gpus in (None, p[1])]
    return [
        Point(system=name, model=m, gpus=g, workload="math", split=POINTS[m, g])
        for m, g in sorted(chosen, key=lambda p: p[1])
        for name in POLICIES
    ]


def efficient(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of one point that nothing there beats in both, fastest first."""
    found: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda r: (-r["throughput_tokens_per_s"], r["s_train_mean"])):
        if not found or row["s_train_mean"] < found[-1]["s_train_mean"]:
            found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A block per point, then the means over the points."""
    heads = list(dict.fromkeys((row["model"], row["gpus"]) for row in rows))
    blocks = [_block([r for r in rows if (r["model"], r["gpus"]) == head]) for head in heads]
    return "\n\n".join([*blocks, _means(rows, heads)])


def _block(rows: list[dict[str, Any]]) -> str:
    base = next(row for row in rows if row["system"] == BASE)
    best = [row["system"] for row in efficient(rows)]
    lines = [f"{base['model']}, {base['gpus']} GPUs ({base['split']}); * = efficient", HEAD]
    return "\n".join([*lines, *(_line(row, base, row["system"] in best) for row in rows)])


def _line(row: dict[str, Any], base: dict[str, Any], is_efficient: bool) -> str:
    even = break_even(pace_of(row), pace_of(base)) if row is not base else None
    cells = (
        f"{row['throughput_tokens_per_s'] / 1e3:>8.1f}k",
        f"{_gain(row, base, 'throughput_tokens_per_s'):>+6.1%}",
        f"{row['kv_use']:>7.1%}",
        f"{row['s_gen_mean']:>6.2f} /{row['s_gen_max']:>2}",
        f"{row['s_train_mean']:>6.2f} /{row['s_train_max']:>2}",
        f"{_gain(row, base, 'fresh_tokens_per_s'):>+11.1%}",
        f"{'' if even is None else f'{even:.1f}':>11}",
        f"{row['latency_max_s']:>7.0f}s",
    )
    return f"{'* ' if is_efficient else '  '}{row['system']:32}" + " ".join(cells)


def _gain(row: dict[str, Any], base: dict[str, Any], field: str) -> float:
    return float(row[field] / base[field]) - 1.0


def _means(rows: list[dict[str, Any]], heads: list[tuple[str, int]]) -> str:
    lines = [
        f"means over {len(heads)} points, against {BASE!r}; fresh = by the half-life of {HALF_LIFE:g} versions, an assumption",
        f"{'':34}{'gain':>8}{'generation':>12}{'s_gen':>8}{'s_train':>9}{'fresh gain':>12}",
    ]
    bases = {(r["model"], r["gpus"]): r for r in rows if r["system"] == BASE}
    for name in dict.fromkeys(row["system"] for row in rows):
        pairs = [(row, bases[row["model"], row["gpus"]]) for row in rows if row["system"] == name]
        lines.append(
            f"  {name:32}{mean(_gain(r, b, 'throughput_tokens_per_s') for r, b in pairs):>+8.1%}"
            f"{mean(_gain(r, b, 'generation_tokens_per_s') for r, b in pairs):>+12.1%}"
            f"{mean(r['s_gen_mean'] - b['s_gen_mean'] for r, b in pairs):>+8.2f}"
            f"{mean(r['s_train_mean'] - b['s_train_mean'] for r, b in pairs):>+9.2f}"
            f"{mean(_gain(r, b, 'fresh_tokens_per_s') for r, b in pairs):>+12.1%}"
        )
    return "\n".join(lines)


def figure(rows: list[dict[str, Any]], path: Path) -> list[Path]:
    """A panel per point: throughput over mean staleness, the efficient policies joined by a line. PNG and SVG."""
    heads = list(dict.fromkeys((row["model"], row["gpus"]) for row in rows))
    columns = math.ceil(math.sqrt(len(heads)))
    lines = -(-len(heads) // columns)
    drawing, axes = pyplot().subplots(
        lines, columns, figsize=(5.5 * columns, 4.2 * lines + 1.2), layout="constrained", squeeze=False
    )
    names = list(dict.fromkeys(row["system"] for row in rows))
    for panel, head in zip(axes.flat, heads, strict=False):
        _panel(panel, [r for r in rows if (r["model"], r["gpus"]) == head], names, f"{head[0]}, {head[1]} GPUs")
    for panel in list(axes.flat)[len(heads) :]:
        panel.set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return save(drawing, path)


def _panel(panel: Any, rows: list[dict[str, Any]], names: list[str], title: str) -> None:
    colors, markers = pyplot().get_cmap("tab20").colors, "osD^vP*X<>"
    best = efficient(rows)
    panel.plot(
        [r["s_train_mean"] for r in best], [r["throughput_tokens_per_s"] / 1e3 for r in best],
        color="lightgray", zorder=0,
    )  # fmt: skip
    for row in rows:
        index = names.index(row["system"])
        panel.scatter(
            row["s_train_mean"], row["throughput_tokens_per_s"] / 1e3, label=row["system"], s=36,
            color=colors[index % len(colors)], marker=markers[index % len(markers)],
        )  # fmt: skip
    panel.set(title=title, xlabel="mean s_train, versions", ylabel="thousand tokens/s")
