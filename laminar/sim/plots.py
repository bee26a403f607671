"""Figures of simulated runs and grids, PNG and SVG. matplotlib is imported only here, and only when a figure is wanted."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from laminar.errors import ConfigError
from laminar.sim.measure import Measures

LANES_MAX = 64  # more replicas than lines that an eye can tell apart
DPI = 120


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("figures need matplotlib: install laminar-rl[sim], or leave --out away") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def save(figure: Any, path: Path) -> list[Path]:
    """Both formats; without dates, so that the same run gives the same bytes."""
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(paths[0], dpi=DPI)
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot().close(figure)
    return paths


def run_figure(measures: Measures, title: str, path: Path) -> list[Path]:
    """KV use and buffer over time, the three staleness histograms, and the version that each replica holds when."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    figure.suptitle(title)
    _timeline(axes[0][0], measures)
    _staleness(axes[0][1], measures)
    _latencies(axes[1][0], measures)
    _lanes(axes[1][1], measures)
    return save(figure, path)


def representative(measures: Measures, found: dict[str, Any], name: str, directory: Path) -> None:
    """One run of a grid in pictures, with its summary beside them."""
    run_figure(measures, f"{name}, split {found['split']}, batch policy, math", directory / name)
    (directory / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")


QUEUE_PANELS = (
    ("groups", (("depth_groups", "complete, in the buffer"), ("in_flight_groups", "in flight"))),
    ("residence, s", (("residence_s", "mean age of the groups of a batch"),)),
    ("s_train, versions", (("s_train", "mean of a batch"),)),
    ("share of the iteration", (("trainer_waits_share", "trainer waits for a batch"),)),
)


def queue_figure(queue: dict[str, Any], title: str, path: Path) -> list[Path]:
    """The buffer over a long run: depth and groups in flight, residence, staleness, and how long the trainer waits."""
    plt = pyplot()
    figure, axes = plt.subplots(len(QUEUE_PANELS), 1, figsize=(9, 10), layout="constrained", sharex=True)
    figure.suptitle(title)
    steps = [row["step"] for row in queue["series"]]
    for panel, (label, lines) in zip(axes, QUEUE_PANELS, strict=True):
        for field, name in lines:
            panel.plot(
                steps, [row[field] for row in queue["series"]], marker=".", markersize=3, linewidth=1, label=name
            )
        highest = max(row[field] for row in queue["series"] for field, _ in lines)
        panel.set(ylabel=label, ylim=(0, 1.3 * highest or 1.0))  # room for the legend
        panel.legend(loc="upper left", fontsize=8, ncols=2, frameon=False)
    axes[-1].set_xlabel("train step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return save(figure, path)


def _timeline(axes: Any, measures: Measures) -> None:
    axes.plot(*zip(*measures.kv_use, strict=True), color="tab:blue", linewidth=0.8)
    axes.set(xlabel="run time, s", ylabel="mean KV use", ylim=(0, 1))
    buffer = axes.twinx()
    buffer.plot(*zip(*measures.buffered, strict=True), color="tab:orange", linewidth=0.8)
    buffer.set_ylabel("complete groups in the buffer", color="tab:orange")
    for iteration in measures.iterations:
        axes.axvline(iteration.at, color="lightgray", linewidth=0.6, zorder=0)


def _staleness(axes: Any, measures: Measures) -> None:
    kinds: list[tuple[str, Counter[int]]] = [
        ("s_gen", measures.s_gen), ("residence", measures.residence), ("s_train", measures.s_train)
    ]  # fmt: skip
    for index, (name, counts) in enumerate(kinds):
        total = sum(counts.values()) or 1
        values = sorted(counts)
        axes.bar([v + 0.27 * (index - 1) for v in values], [counts[v] / total for v in values], width=0.25, label=name)
    axes.set(xlabel="staleness, versions", ylabel="share of trained trajectories")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(title="mean: " + ", ".join(f"{name} {_mean(counts):.2f}" for name, counts in kinds), frameon=False)


def _mean(counts: Counter[int]) -> float:
    return sum(value * num for value, num in counts.items()) / (sum(counts.values()) or 1)


def _latencies(axes: Any, measures: Measures) -> None:
    axes.hist([seconds for _, seconds in measures.latencies], bins=60, color="tab:green")
    axes.set(xlabel="trajectory latency, s", ylabel="trajectories", yscale="log")


def _lanes(axes: Any, measures: Measures) -> None:
    end = max((at for at, _ in measures.kv_use), default=0.0)
    colors = pyplot().get_cmap("tab20").colors
    for row, name in enumerate(list(measures.lanes)[:LANES_MAX]):
        held = [*measures.lanes[name], (end, -1)]
        for (begin, version), (until, _) in pairwise(held):
            axes.broken_barh([(begin, max(0.0, until - begin))], (row, 0.9), color=colors[version % len(colors)])
    axes.set(xlabel="run time, s", ylabel="replica; one colour per weight version")
    axes.yaxis.get_major_locator().set_params(integer=True)


def grid_figure(rows: list[dict[str, Any]], path: Path) -> list[Path]:
    """Throughput over GPUs, one panel per model and workload, one line per system."""
    plt = pyplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = plt.subplots(
        len(workloads),
        len(models),
        figsize=(4.5 * len(models), 3.6 * len(workloads)),
        layout="constrained",
        squeeze=False,
    )
    for line, workload in enumerate(workloads):
        for column, model in enumerate(models):
            panel = axes[line][column]
            chosen = [row for row in rows if (row["model"], row["workload"]) == (model, workload)]
            for system in dict.fromkeys(row["system"] for row in chosen):
                points = sorted((r["gpus"], r["throughput_tokens_per_s"]) for r in chosen if r["system"] == system)
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=system)
            panel.set(xscale="log", yscale="log", title=f"{model} {workload}", xlabel="GPUs", ylabel="tokens/s")
            ticks = sorted({row["gpus"] for row in chosen})
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.minorticks_off()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    return save(figure, path)


def speedup_figure(rows: list[dict[str, Any]], paper: dict[str, float], path: Path) -> list[Path]:
    """Throughput of `laminar` over each baseline's, a bar per point; a line where the paper's mean is (math only)."""
    plt = pyplot()
    rates = {(r["workload"], r["model"], r["gpus"], r["system"]): r["throughput_tokens_per_s"] for r in rows}
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = plt.subplots(
        len(paper), len(workloads), figsize=(7 * len(workloads), 2.4 * len(paper)), layout="constrained", squeeze=False
    )
    for line, (system, mean) in enumerate(paper.items()):
        for column, workload in enumerate(workloads):
            panel = axes[line][column]
            heads = [key[1:3] for key in rates if key[0] == workload and key[3] == "laminar"]
            heads.sort(key=lambda head: ([row["model"] for row in rows].index(head[0]), head[1]))
            for own, color in (("laminar", "tab:blue"), ("laminar-parts", "tab:cyan")):
                shift = -0.2 if own == "laminar" else 0.2
                ratios = [rates[workload, *head, own] / rates[workload, *head, system] for head in heads]
                panel.bar([i + shift for i in range(len(heads))], ratios, width=0.38, color=color, label=own)
            panel.axhline(1.0, color="gray", linewidth=0.6)
            if workload == "math":
                panel.axhline(mean, color="tab:red", linestyle="--", linewidth=1, label="paper, mean")
            panel.set_xticks(range(len(heads)), [f"{model}\n{gpus}" for model, gpus in heads], fontsize=7)
            panel.set(title=f"over {system}, {workload}", ylabel="speedup")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    for panel in axes[-1]:
        panel.set_xlabel("model, GPUs")
    return save(figure, path)
