"""The options of `python -m laminar.sim`, and the scenario that they describe.

Invariant: no option is silently ignored, and whatever is wrong is one line that says where and what to write instead.
"""

import argparse
import difflib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from laminar import samplers
from laminar.commandline import Parser
from laminar.configrules import PARTNERS
from laminar.core import limits
from laminar.core.settings import RefreshPolicy, Settings
from laminar.errors import ConfigError
from laminar.roofline import HARDWARE
from laminar.sim import faults, workload
from laminar.sim.cluster import MODELS
from laminar.sim.scenario import Scenario

EPILOG = """examples:
  python -m laminar.sim --preset small                          (seconds)
  python -m laminar.sim --model 32B --gpus 128 --split 64/64 --ablate repack
  python -m laminar.sim --preset 32B-128 --policy continuous --repack parts --set ready_groups_max=512
  python -m laminar.sim --preset small --iterations 30 --growth 0.01 --out sim-long
  python -m laminar.sim --gpus 64 --model 7B --faults engine_crash=2,version_lost=0.05 --seed 7
  python -m laminar.sim --preset paper --out sim-paper          (the whole grid; run again to go on with it)

docs/sim/model.md says what is modelled, docs/metrics.md what the printed names mean.
"""
PRESETS: dict[str, dict[str, Any]] = {
    "32B-128": {"model": "32B", "gpus": 128, "split": (64, 64)},
    "72B-1024": {"model": "72B", "gpus": 1024, "split": (768, 256)},
    "small": {"model": "7B", "gpus": 16, "split": (8, 8), "iterations": 4, "warmup": 1, "batch_groups": 64},
}
"""Scenario fields; options given beside a preset win. `paper` and `policies` are grids."""
OF_GRIDS = ("preset", "model", "hardware", "gpus", "seed", "jobs", "json", "out")
GRIDS = {"paper": (*OF_GRIDS, "workload"), "policies": OF_GRIDS}
"""Presets of many runs, and the options that they take."""
GROWTH_MAX = (
    0.1  # per step, either way: five times the batch's tokens in 17 steps is more than anything that was reported
)
ITERATIONS_MAX = 5000  # a run of weeks; what is kept per step would fill the memory some time later
OWN_OPTIONS = {"seed": "--seed", "steps": "--iterations", "refresh_policy": "--policy", "custom_sampler": "--sampler",
               "repack_policy": "--repack"}  # fmt: skip
"""Core settings that have an option of their own, with what else it stands for."""
UNUSED = ("num_prompts", "shuffle", "evaluate", "sampler_budget_ms", "checkpoint_pulls", "trajectory_tokens_max")
"""Core settings of things that the simulated world does not have, or that it sets itself."""
OF_SCENARIO = ("group_size", "batch_groups", "checkpoint_every")
"""Core settings that other choices follow from."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """What was asked for. Exits with 2 and one line if it is not understood."""
    parser = Parser(
        prog="python -m laminar.sim",
        description="Simulate runs of Laminar: the real scheduling core in virtual time.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    _choice(
        parser,
        "--preset",
        [*GRIDS, *PRESETS],
        "paper: the grid of its evaluation beside its figures; policies: all of ours compared",
    )
    _choice(parser, "--model", list(MODELS), "default 32B")
    _choice(parser, "--hardware", list(HARDWARE), "default H800")
    add("--gpus", type=_positive, help="in all; default 128")
    add(
        "--split",
        type=_split,
        metavar="TRAIN/ROLLOUT",
        help="GPUs of each side; default: balanced by the cost formulas",
    )
    add("--optimize-split", action="store_true", help="search the placement with short runs first")
    add("--workload", help="math, tool, or the run.db of a real run; default math (--preset paper: math and tool)")
    add("--median", type=_positive, metavar="TOKENS", help="median response tokens")
    add("--growth", type=_growth, help="relative growth of the median length per train step, for example 0.01")
    _choice(parser, "--policy", list(get_args(RefreshPolicy)), "when replicas refresh; default batch")
    _choice(parser, "--repack", ["whole", "parts", "off"], "whole (default): as in the paper")
    _choice(parser, "--ablate", ["repack"], "run with it and without it")
    add("--set", action="append", default=[], metavar="NAME=VALUE",
        help="any setting of the core (laminar/core/settings.py); can be repeated")  # fmt: skip
    add("--sampler", metavar="REF", help="custom sampler: file.py:Class or pkg.mod:Class")
    add("--faults", metavar="NAME=RATE,…", help=_faults_help())
    add("--seed", type=_whole, help="of prompts, lengths and faults; default 0")
    add("--iterations", type=_positive, help="train steps measured, after the warm-up; default 5")
    add("--warmup", type=_positive, help="train steps before; default 10")
    add("--jobs", type=_positive, help="processes of --preset paper and policies; default: one per CPU")
    add("--json", action="store_true", help="print JSON")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="write result.json and figures (PNG, SVG); default of the grids: sim-paper, sim-policies",
    )
    return _completed(parser, parser.parse_args(arguments))


def _choice(parser: Parser, option: str, choices: list[str], text: str) -> None:
    def chosen(value: str) -> str:
        if value not in choices:
            raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(choices)}{_nearest(value, choices)}")
        return value

    parser.add_argument(option, type=chosen, metavar=f"{{{','.join(choices)}}}", help=text)


def _faults_help() -> str:
    return f"strikes per hour: {', '.join(faults.PER_HOUR)}; share of cases: {', '.join(faults.PER_CASE)}"


def _completed(parser: Parser, options: argparse.Namespace) -> argparse.Namespace:
    """Defaults in the place of what was not given; options that would have no effect are refused before that."""
    given = [name for name, value in vars(options).items() if value not in (None, False, [])]
    if options.preset in GRIDS:
        useless = [name for name in given if name not in GRIDS[options.preset]]
        advice = (
            f"--preset {options.preset} runs fixed scenarios; leave it away, or name one point by --model and --gpus"
        )
    else:
        useless, advice = [name for name in given if name == "jobs"], "one run takes one process"
    if useless:
        parser.error(f"--{useless[0].replace('_', '-')} has no effect here: {advice}")
    if options.ablate and options.repack == "off":
        parser.error("--ablate repack with --repack off compares nothing: leave one away")
    if options.optimize_split and options.split:
        parser.error("--optimize-split searches what --split fixes: leave one away")
    defaults = {"hardware": "H800", "policy": "batch", "repack": "whole", "seed": 0, "jobs": os.cpu_count() or 1}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} does not fit 64 bits")
    return value


def _positive(text: str) -> int:
    if (value := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _growth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not abs(value) <= GROWTH_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between -{GROWTH_MAX} and {GROWTH_MAX} a step")
    return value


def _split(text: str) -> tuple[int, int]:
    train, slash, rollout = text.partition("/")
    if not (slash and train.isdecimal() and rollout.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not TRAIN/ROLLOUT, for example 64/64")
    return int(train), int(rollout)


def scenario(options: argparse.Namespace) -> Scenario:
    """The one run that the options describe. Raises ConfigError."""
    chosen: dict[str, Any] = dict(PRESETS.get(options.preset, {}))
    if (options.gpus or options.model) and not options.split:
        chosen.pop("split", None)
    for name in ("model", "gpus", "split", "warmup"):
        if getattr(options, name) is not None:
            chosen[name] = getattr(options, name)
    if options.iterations or options.warmup:
        chosen["iterations"] = chosen.get("warmup", 10) + (options.iterations or 5)
    if chosen.get("iterations", 0) > ITERATIONS_MAX:
        raise ConfigError(f"--iterations and --warmup make {chosen['iterations']} steps; at most {ITERATIONS_MAX}")
    if "split" in chosen:
        chosen["gpus"] = _total(options, chosen["split"])
    core = settings(options.set)
    chosen |= {name: core.pop(name) for name in OF_SCENARIO if name in core}
    if options.repack == "parts":
        core["repack_policy"] = "parts"
    found = Scenario(
        hardware=options.hardware, workload=_workload(options), policy=options.policy, repack=options.repack != "off",
        seed=options.seed, faults=faults.parse(options.faults or ""), core=tuple(core.items()),
        sampler=samplers.load(options.sampler, "--sampler") if options.sampler else None, **chosen,
    )  # fmt: skip
    _check(core, found.settings(found.cluster()), found.repack)
    return found


def settings(assignments: list[str]) -> dict[str, Any]:
    """Core settings from `name=value`, the last one of a name winning. Raises ConfigError for what the core does not have."""
    kinds, found = get_type_hints(Settings), {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        where = f"--set {assignment}"
        if not equals:
            raise ConfigError(f"{where}: expected NAME=VALUE, for example --set max_staleness=2")
        if name in OWN_OPTIONS:
            raise ConfigError(f"{where}: use {OWN_OPTIONS[name]}")
        if name in UNUSED:
            raise ConfigError(f"{where}: has no effect in the simulator; leave it away")
        if name not in kinds:
            hint = _nearest(name, list(kinds)) or "; laminar/core/settings.py has all"
            raise ConfigError(f"{where}: the core has no setting {name!r}{hint}")
        try:
            found[name] = msgspec.convert(text, kinds[name], strict=False)
        except msgspec.ValidationError:
            raise ConfigError(f"{where}: expected {_expected(kinds[name])}") from None
        if isinstance(found[name], int | float) and not 0 <= found[name] < math.inf:
            raise ConfigError(f"{where}: 0 or more")
    return found


def _check(core: dict[str, Any], chosen: Settings, repack: bool) -> None:
    """Settings that could never train a batch, or that were given in vain. Raises ConfigError."""
    problems = limits.problems(chosen) + _without_effect(core, chosen)
    in_vain = [name for name in core if name.startswith("repack_")]
    if in_vain and not repack:
        problems.append(f"{in_vain[0]} means nothing with --repack off")
    if problems:
        raise ConfigError(f"the settings cannot work: {'; '.join(problems)}")


def _without_effect(core: dict[str, Any], chosen: Settings) -> list[str]:
    """What was set in vain, by the rules of the configuration, whose keys end with the core's names."""
    problems = []
    for key, partner_key, needed in PARTNERS:
        name, partner = key.rpartition(".")[2], partner_key.rpartition(".")[2]
        if name in core and getattr(chosen, partner) != needed:
            option = f"{OWN_OPTIONS[partner]} {needed}" if partner in OWN_OPTIONS else f"--set {partner}={needed}"
            problems.append(f"{name} means nothing without {option}")
    if "on_stale" in core and chosen.max_staleness is None:
        problems.append("on_stale means nothing without --set max_staleness=…")
    return problems


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


def _expected(kind: Any) -> str:
    """A type of the core's settings in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    choices = get_args(kind)
    if type(None) in choices:
        return _expected(choices[0])
    return "one of " + ", ".join(choices) if choices else words.get(kind, "text")


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else ""
