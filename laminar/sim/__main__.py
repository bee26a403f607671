"""`python -m laminar.sim`: simulate a run, an ablation, or the paper's grid, and write down what came out."""

import argparse
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from laminar.errors import ConfigError, LaminarError
from laminar.plugins import load_object
from laminar.roofline import HARDWARE
from laminar.sim import faults, grid, pareto, plots, workload
from laminar.sim.cluster import MODELS
from laminar.sim.scenario import Scenario, optimized, simulate
from laminar.sim.world import SimulationError

EPILOG = """examples:
  python -m laminar.sim --model 32B --gpus 128 --split 64/64
  python -m laminar.sim --model 32B --gpus 128 --split 64/64 --ablate repack
  python -m laminar.sim --preset 72B-1024 --policy continuous --out sim-72B
  python -m laminar.sim --gpus 64 --model 7B --faults engine_crash=2,version_lost=0.05 --seed 7
  python -m laminar.sim --preset paper --out sim-paper          (the whole grid; run again to go on with it)
"""
PRESETS: dict[str, dict[str, Any]] = {
    "32B-128": {"model": "32B", "gpus": 128, "split": (64, 64)},
    "72B-1024": {"model": "72B", "gpus": 1024, "split": (768, 256)},
    "small": {"model": "7B", "gpus": 16, "split": (8, 8), "iterations": 4, "warmup": 1, "batch_groups": 64},
}
"""Scenario fields; options given beside a preset win. `paper` is the grid."""
REPRESENTATIVE = ("32B-128", "72B-1024")  # runs of the grid that are also drawn
SHOWN = (
    "split", "replicas", "throughput_tokens_per_s", "generation_tokens_per_s", "iteration_s", "kv_use", "latency_mean_s",
    "latency_max_s", "s_gen_mean", "s_gen_max", "s_train_mean", "s_train_max", "fresh_tokens_per_s",
    "pull_wait_mean_s", "replicas_released", "trajectories_moved", "preemptions", "tokens_lost", "finished", "events", "elapsed_s",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 = done, 1 = an invariant broke, 2 = the arguments are wrong."""
    options = _parse(arguments)
    gc.set_threshold(grid.GC_THRESHOLD)
    try:
        several = {"paper": _grid, "policies": _policies}
        return several.get(options.preset, _runs)(options)
    except SimulationError as error:
        print(f"error: {error}\nreplay: python -m laminar.sim {' '.join(arguments or sys.argv[1:])}", file=sys.stderr)
        return 1
    except LaminarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # … | head
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the interpreter flushes it at exit
        return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m laminar.sim",
        description="Simulate runs of Laminar: the real scheduling core in virtual time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=["paper", "policies", *PRESETS], help="paper: its grid; policies: all of ours compared")
    add("--model", choices=list(MODELS), help="default 32B")
    add("--hardware", choices=list(HARDWARE), default="H800", help="default H800")
    add("--gpus", type=_positive, help="in all; default 128")
    add(
        "--split",
        type=_split,
        metavar="TRAIN/ROLLOUT",
        help="GPUs of each side; default: balanced by the cost formulas",
    )
    add("--optimize-split", action="store_true", help="search the placement with short runs first")
    add(
        "--workload", help="math, tool, or the run.db of a real run; default math, for --preset paper both of the first"
    )
    add("--median", type=_positive, help="median response tokens")
    add("--growth", type=float, help="relative growth of the median length per train step, for example 0.01")
    add("--policy", choices=["batch", "continuous", "rolling"], default="batch", help="refresh policy; default batch")
    add("--ablate", choices=["repack"], help="run with it and without it")
    add("--sampler", metavar="REF", help="custom sampler: file.py:Class or pkg.mod:Class")
    add("--faults", default="", metavar="NAME=RATE,…", help="; ".join((*faults.PER_HOUR, *faults.PER_CASE)))
    add("--seed", type=int, default=0)
    add("--iterations", type=_positive, help="train steps measured, after the warm-up; default 5")
    add("--warmup", type=_positive, help="train steps before; default 10")
    add("--jobs", type=_positive, default=os.cpu_count() or 1, help="processes of --preset paper; default: one per CPU")
    add("--json", action="store_true", help="print JSON")
    add("--out", type=Path, metavar="DIR", help="write result.json and figures (PNG, SVG); for paper default sim-paper")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _split(text: str) -> tuple[int, int]:
    train, slash, rollout = text.partition("/")
    if not (slash and train.isdigit() and rollout.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not TRAIN/ROLLOUT, for example 64/64")
    return int(train), int(rollout)


def _scenario(options: argparse.Namespace) -> Scenario:
    chosen: dict[str, Any] = dict(PRESETS.get(options.preset, {}))
    if (options.gpus or options.model) and not options.split:
        chosen.pop("split", None)
    for name in ("model", "gpus", "split", "warmup"):
        if getattr(options, name) is not None:
            chosen[name] = getattr(options, name)
    warmup = chosen.get("warmup", 10)
    if options.iterations:
        chosen["iterations"] = warmup + options.iterations
    elif options.warmup:
        chosen["iterations"] = warmup + 5
    if "split" in chosen:
        chosen["gpus"] = _total(options, chosen["split"])
    sampler = load_object(options.sampler, "--sampler")() if options.sampler else None
    return Scenario(
        hardware=options.hardware, workload=_workload(options), policy=options.policy, seed=options.seed,
        faults=faults.parse(options.faults), sampler=sampler, **chosen,
    )  # fmt: skip


def _total(options: argparse.Namespace, split: tuple[int, int]) -> int:
    total = sum(split)
    if options.gpus and options.gpus != total:
        raise ConfigError(
            f"--split {split[0]}/{split[1]} makes {total} GPUs, --gpus says {options.gpus}: leave one away"
        )
    return total


def _workload(options: argparse.Namespace) -> workload.Workload:
    name = options.workload or "math"
    chosen = workload.WORKLOADS.get(name) or workload.observed(Path(name))
    if options.median and chosen.lengths:
        raise ConfigError("--median goes with math and tool only; a run.db has its own lengths")
    if options.median:
        chosen = replace(chosen, median=float(options.median))
    if options.growth is not None:
        chosen = replace(chosen, growth_per_step=options.growth)
    return chosen


def _runs(options: argparse.Namespace) -> int:
    scenario, results = _scenario(options), {}
    if options.optimize_split and options.split:
        raise ConfigError("--optimize-split searches what --split fixes: leave one away")
    scenario = optimized(scenario) if options.optimize_split else scenario
    variants = {"run": scenario}
    if options.ablate:
        variants = {"with repack": scenario, "without repack": replace(scenario, repack=False)}
    for name, variant in variants.items():
        world, results[name] = simulate(variant)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            title = f"{variant.model}, {world.cluster.train_gpus}/{world.cluster.rollout_gpus} GPUs, {variant.policy}, {name}"
            plots.run_figure(world.measures, title, options.out / name.replace(" ", "-"))
            if "queue" in results[name]:
                plots.queue_figure(results[name]["queue"], title, options.out / f"{name.replace(' ', '-')}-queue")
    _write(options, results)
    print(json.dumps(results, indent=2) if options.json else _columns(results))
    return 0 if all(result["ok"] for result in results.values()) else 1


def _columns(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':36}" + "".join(f"{name:>18}" for name in results)]
    for field in SHOWN:
        values = [result.get(field, "") for result in results.values()]
        lines.append(f"{field:36}" + "".join(f"{_number(value):>18}" for value in values))
    queues = [_flat(result.get("queue", {})) for result in results.values()]
    for field in queues[0]:
        lines.append(f"queue: {field:29}" + "".join(f"{_number(queue[field]):>18}" for queue in queues))
    return "\n".join(lines)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested numbers by joined names, lists left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name} ")
        elif not isinstance(value, list):
            found[prefix + name] = value
    return found


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
    return str(value)


def _write(options: argparse.Namespace, results: Any) -> None:
    if options.out:
        (options.out / "result.json").write_text(json.dumps(results, indent=2) + "\n")


def _grid(options: argparse.Namespace) -> int:
    options.out = options.out or Path("sim-paper")
    options.out.mkdir(parents=True, exist_ok=True)
    workloads = [options.workload] if options.workload else list(workload.WORKLOADS)
    if workloads[0] not in workload.WORKLOADS:
        raise ConfigError(f"--preset paper has the workloads {', '.join(workload.WORKLOADS)}, not {options.workload}")
    models = [options.model] if options.model else list(MODELS)
    gpus = [options.gpus] if options.gpus else list(grid.GPUS)
    wanted = grid.points(models, gpus, workloads)
    rows = grid.run(wanted, options.out / "points.jsonl", options.hardware, options.seed, options.jobs)
    _write(options, rows)
    plots.grid_figure(rows, options.out / "throughput")
    plots.speedup_figure(rows, grid.PAPER_SPEEDUPS, options.out / "speedup")
    for name in REPRESENTATIVE:
        chosen = PRESETS[name]
        if chosen["model"] in models and chosen["gpus"] in gpus and not (options.out / f"{name}.json").exists():
            _representative(options, name)
    print(json.dumps(rows, indent=2) if options.json else grid.table(rows))
    return 0


def _policies(options: argparse.Namespace) -> int:
    options.out = options.out or Path("sim-policies")
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = pareto.points(options.model, options.gpus)
    if not wanted:
        raise ConfigError(
            f"--preset policies has the points {pareto.named()}; leave --model and --gpus away, or name one"
        )
    rows = grid.run(wanted, options.out / "points.jsonl", options.hardware, options.seed, options.jobs)
    _write(options, rows)
    pareto.figure(rows, options.out / "pareto")
    print(json.dumps(rows, indent=2) if options.json else pareto.table(rows))
    return 0


def _representative(options: argparse.Namespace, name: str) -> None:
    """One run of the grid in pictures: KV use, staleness, latencies, version lanes."""
    scenario = Scenario(
        hardware=options.hardware, workload=workload.WORKLOADS["math"], seed=options.seed, **PRESETS[name]
    )
    world, found = simulate(scenario)
    plots.run_figure(world.measures, f"{name}, split {found['split']}, batch policy, math", options.out / name)
    (options.out / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
