"""`python -m laminar.sim`: simulate a run, an ablation, or the paper's grid, and write down what came out."""

import argparse
import gc
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from laminar.commandline import exit_code_of
from laminar.errors import ConfigError
from laminar.sim import grid, pareto, plots, workload
from laminar.sim.cluster import MODELS
from laminar.sim.options import PRESETS, parse, scenario
from laminar.sim.scenario import Scenario, optimized, simulate
from laminar.sim.world import SimulationError

SHOWN = (
    "split", "replicas", "throughput_tokens_per_s", "generation_tokens_per_s", "iteration_s", "kv_use", "latency_mean_s",
    "latency_max_s", "s_gen_mean", "s_gen_max", "s_train_mean", "s_train_max", "fresh_tokens_per_s",
    "pull_wait_mean_s", "replicas_released", "trajectories_moved", "preemptions", "tokens_lost", "finished", "events", "elapsed_s",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 = done, 1 = an invariant broke, 2 = the arguments are wrong."""
    return exit_code_of(lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    options = parse(arguments)
    gc.set_threshold(grid.GC_THRESHOLD)
    several = {"paper": _grid, "policies": _policies}
    try:
        return several.get(options.preset, _runs)(options)
    except SimulationError as error:
        print(f"error: {error}\nreplay: python -m laminar.sim {shlex.join(arguments or sys.argv[1:])}", file=sys.stderr)
        return 1


def _runs(options: argparse.Namespace) -> int:
    chosen, results = scenario(options), {}
    if options.out:
        _make_directory(options.out)
    chosen = optimized(chosen) if options.optimize_split else chosen
    variants = {"run": chosen}
    if options.ablate:
        variants = {"with repack": chosen, "without repack": _without_repack(chosen)}
    for name, variant in variants.items():
        world, results[name] = simulate(variant)
        if options.out:
            title = f"{variant.model}, {world.cluster.train_gpus}/{world.cluster.rollout_gpus} GPUs, {variant.policy}, {name}"
            plots.run_figure(world.measures, title, options.out / name.replace(" ", "-"))
            if "queue" in results[name]:
                plots.queue_figure(results[name]["queue"], title, options.out / f"{name.replace(' ', '-')}-queue")
    _write(options, results)
    print(json.dumps(results, indent=2) if options.json else _columns(results), flush=True)
    for name, result in results.items():
        _note_window(name, result, chosen.flush_s)
        _complain(name, result)
    return 0 if all(result["ok"] for result in results.values()) else 1


def _note_window(name: str, result: dict[str, Any], flush_s: float) -> None:
    seconds = result["queue"]["seconds"] if "queue" in result else flush_s
    if seconds < flush_s:
        text = f"the measured iterations took {seconds:.0f} s, and replicas report every {flush_s:g} s"
        print(f"note: {name}: {text}: latencies and staleness say little; raise --iterations", file=sys.stderr)


def _without_repack(chosen: Scenario) -> Scenario:
    core = tuple((name, value) for name, value in chosen.core if name != "repack_interval_s")
    return replace(chosen, repack=False, core=core)


def _complain(name: str, result: dict[str, Any]) -> None:
    """What a reader of the numbers has to know about them."""
    for alarm, text in result["alarms"].items():
        if text == result["finished"]:
            continue
        print(f"alarm: {name}, {result['faults'][f'alarm:{alarm}']} times, the first: {text}", file=sys.stderr)
    if not result["ok"]:
        print(f"error: {name}: the simulated training failed: {result['finished']}", file=sys.stderr)


def _make_directory(path: Path) -> None:
    """Before anything runs: a result that cannot be written is a run for nothing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "result.json").touch()
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot write there: {error.strerror}; name another directory") from error


def _columns(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':36}" + "".join(f"{name:>18}" for name in results)]
    for field in SHOWN:
        values = [result.get(field, "") for result in results.values()]
        lines.append(f"{field:36}" + "".join(f"{_number(value):>18}" for value in values))
    for fault in dict.fromkeys(name for result in results.values() for name, num in result["faults"].items() if num):
        lines.append(
            f"faults: {fault:28}" + "".join(f"{result['faults'].get(fault, 0):>18}" for result in results.values())
        )
    queues = [_flat(result.get("queue", {})) for result in results.values()]
    for field in dict.fromkeys(field for queue in queues for field in queue):
        lines.append(f"queue: {field:29}" + "".join(f"{_number(queue.get(field, '')):>18}" for queue in queues))
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
    workloads = [options.workload] if options.workload else list(workload.WORKLOADS)
    if workloads[0] not in workload.WORKLOADS:
        raise ConfigError(f"--preset paper has the workloads {', '.join(workload.WORKLOADS)}, not {options.workload}")
    options.out = options.out or Path("sim-paper")
    _make_directory(options.out)
    models = [options.model] if options.model else list(MODELS)
    gpus = [options.gpus] if options.gpus else list(grid.GPUS)
    wanted = grid.points(models, gpus, workloads)
    rows = grid.run(wanted, options.out / "points.jsonl", options.hardware, options.seed, options.jobs, options.out)
    _write(options, rows)
    plots.grid_figure(rows, options.out / "throughput")
    plots.speedup_figure(rows, grid.PAPER_SPEEDUPS, options.out / "speedup")
    for (model, num, _), name in grid.DRAWN.items():
        if model in models and num in gpus and not (options.out / f"{name}.json").exists():
            _representative(options, name)
    print(json.dumps(rows, indent=2) if options.json else grid.table(rows))
    return 0


def _policies(options: argparse.Namespace) -> int:
    options.out = options.out or Path("sim-policies")
    wanted = pareto.points(options.model, options.gpus)
    if not wanted:
        raise ConfigError(
            f"--preset policies has the points {pareto.named()}; leave --model and --gpus away, or name one"
        )
    _make_directory(options.out)
    rows = grid.run(wanted, options.out / "points.jsonl", options.hardware, options.seed, options.jobs)
    _write(options, rows)
    pareto.figure(rows, options.out / "pareto")
    print(json.dumps(rows, indent=2) if options.json else pareto.table(rows))
    return 0


def _representative(options: argparse.Namespace, name: str) -> None:
    """One run of the grid in pictures, of a grid that had it already or was of other workloads."""
    chosen = Scenario(
        hardware=options.hardware, workload=workload.WORKLOADS["math"], seed=options.seed, **PRESETS[name]
    )
    world, found = simulate(chosen)
    plots.representative(world.measures, found, name, options.out)


if __name__ == "__main__":
    sys.exit(main())
