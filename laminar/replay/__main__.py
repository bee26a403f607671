"""`python -m laminar.replay`: a recorded run through the scheduling core again. docs/replay.md."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from laminar.commandline import EXIT_USAGE, Parser, exit_code_of
from laminar.controller import rundir
from laminar.errors import LaminarError
from laminar.replay.changes import parse
from laminar.replay.meter import TooShort
from laminar.replay.playback import Playback
from laminar.replay.recording import Life, Recording
from laminar.replay.shadow import shadow
from laminar.replay.show import (
    compared,
    plain_comparison,
    plain_shadowing,
    plain_verdict,
    shadowed,
    told,
)
from laminar.replay.verify import verify
from laminar.replay.whatif import whatif

EXIT_SAME, EXIT_DIVERGED = 0, 1
EPILOG = """examples:
  python -m laminar.replay runs/my-run                              (what was recorded)
  python -m laminar.replay runs/my-run --verify
  python -m laminar.replay runs/my-run --shadow mine.py:Freshest
  python -m laminar.replay runs/my-run --whatif rollout.refresh_policy=continuous buffer.max_ready_groups=64
  python -m laminar.replay runs/my-run --whatif replicas=4

Exit status: 0 = done, and for --verify: no divergence; 1 = the present code decides otherwise; 2 = the log or the arguments cannot
be used. Nothing is written to the run, which may be going on. docs/replay.md says what each can and cannot tell.
"""


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    return exit_code_of(lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    options = _parse(arguments)
    with Recording(options.run or rundir.latest(Path("runs"))) as recording:
        if options.run is None:
            print(f"of the latest run: {recording.path}", file=sys.stderr)
        lives = recording.lives if options.boot is None else [recording.life(options.boot)]
        return _chosen(options)(recording, lives, options)


def _chosen(options: argparse.Namespace) -> Callable[[Recording, list[Life], argparse.Namespace], int]:
    if options.verify:
        return _verify
    if options.whatif:
        return _whatif
    return _shadow if options.shadow else _describe


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m laminar.replay",
        description="Replay a recorded run through the scheduling core.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        type=Path,
        help="a run's directory or its run.db; default: the latest under runs/",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="compare every decision with that of the present code")
    what.add_argument(
        "--shadow",
        metavar="REF",
        help="what another sampler would have chosen at each batch: file.py:Class, pkg.mod:Class, or fifo",
    )
    what.add_argument(
        "--whatif",
        metavar="KEY=VALUE",
        nargs="+",
        help="simulate it again as it was, and with these settings, replicas=N, faults=none, speed.trainer=2 or speed.rollout=2",
    )
    parser.add_argument(
        "--boot", type=int, metavar="N", help="only the part of the run that this controller process belongs to"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.whatif and options.run is None and "=" not in options.whatif[-1]:
        parser.error(f"name the run first: python -m laminar.replay {options.whatif[-1]} --whatif …")
    return options


# ---- what was recorded -------------------------------------------------------------------------------------


def _describe(recording: Recording, lives: list[Life], options: argparse.Namespace) -> int:
    found = [_facts(recording, life) for life in lives]
    if options.json:
        print(json.dumps({"run": str(recording.path), "left_out": recording.left_out, "lives": found}, indent=2))
        return EXIT_SAME
    print(recording.path)
    for line in filter(None, [recording.left_out]):
        print(line)
    for life, facts in zip(lives, found, strict=True):
        print(f"\n{life.name}: {facts['events']} events, {facts['began'].replace('T', ' ')}, {facts['ran_s']:.0f} s")
        print("\n".join(f"  {line}" for line in _lines(facts, is_last=life is recording.lives[-1])))
    return EXIT_SAME


def _facts(recording: Recording, life: Life) -> dict[str, Any]:
    first, last = recording.times(life)
    facts: dict[str, Any] = {
        "boots": [boot.number for boot in life.boots],
        "events": recording.last(life)[1],
        "began": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(life.boots[0].started)),
        "ran_s": last - first,
        "resumed_step": life.boots[0].resumed_step,
        "outcome": life.boots[-1].outcome,
        "answers": not recording.unanswered(life),
        "unusable": "",
    }
    try:
        facts["left_out"] = Playback(recording, life).left_out
    except LaminarError as error:
        facts["unusable"] = str(error)
    return facts


def _lines(facts: dict[str, Any], *, is_last: bool) -> Iterator[str]:
    if facts["resumed_step"]:
        yield f"went on from the checkpoint of step {facts['resumed_step']}"
    if facts["outcome"]:
        yield f"ended: {facts['outcome']}"
    else:
        yield "goes on, or was killed" if is_last else "was killed"
    if not facts["answers"]:
        yield "did not record what the core answered: --verify has only the states that were kept"
    if facts["unusable"]:
        yield f"cannot be replayed: {facts['unusable']}"
    elif facts["left_out"]:
        yield facts["left_out"]


# ---- verify, shadow, what-if -------------------------------------------------------------------------------


def _verify(recording: Recording, lives: list[Life], options: argparse.Namespace) -> int:
    verdicts = verify(recording, lives)
    if options.json:
        found = {
            "run": str(recording.path),
            "left_out": recording.left_out,
            "lives": [plain_verdict(v) for v in verdicts],
        }
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(line for line in [recording.left_out, *(told(v, recording.path) for v in verdicts)] if line))
    if any(verdict.divergence for verdict in verdicts):
        return EXIT_DIVERGED
    return EXIT_USAGE if all(verdict.unusable for verdict in verdicts) else EXIT_SAME


def _shadow(recording: Recording, lives: list[Life], options: argparse.Namespace) -> int:
    found = shadow(recording, lives, options.shadow)
    print(json.dumps(plain_shadowing(found), indent=2) if options.json else shadowed(found))
    return EXIT_SAME


def _whatif(recording: Recording, lives: list[Life], options: argparse.Namespace) -> int:
    life, changes = lives[-1], parse(options.whatif)
    others = "; --boot N takes another part of the run" if len(recording.lives) > 1 else ""
    try:
        found = whatif(recording, changes, life)
    except TooShort as error:
        raise TooShort(f"{life.name} of {recording.path}: {error}{others}") from error
    if others and not options.json:
        print(f"{life.name}{others}")
    print(json.dumps(plain_comparison(found), indent=2) if options.json else compared(found))
    return EXIT_SAME


if __name__ == "__main__":
    sys.exit(main())
