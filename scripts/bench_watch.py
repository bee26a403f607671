"""What it costs a controller to be watched: `python scripts/bench_watch.py [--command fleet] [--replicas 256] [--seconds 30]`.

The controller and the simulated fleet of `bench_dashboard.py`; beside them, in the second interval, a console in a process of its
own that runs `watch COMMAND`, one answer a second.

Prints how late the controller's event loop was (median / 99th percentile / longest) and how much of a core it used, without the
console and with it. The exit code says whether the 99th percentile was as aimed.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import structlog

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.bench.controller_run import ControllerRun  # noqa: E402 - the repository need not be installed
from scripts.bench_controller import _spread, patiently, percentile  # noqa: E402
from scripts.bench_dashboard import LAG_MAX_S, Window, add_options, look, simulated  # noqa: E402

START_S = 15.0  # of the console: imports on a core that also makes the load
END_S = 10.0


def main() -> int:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--command", default="fleet", help="what the console watches (default: fleet)")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        print("error: two cores are needed, one for the controller and one for the load", file=sys.stderr)
        return 2
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    without, watched, num_answers = asyncio.run(measure(options))
    print("| console | loop late, ms | core used | answers |\n|---|---|---|---|")
    print(row("none", without, 0))
    print(row(f"`watch {options.command}`", watched, num_answers))
    late_s = percentile(watched.lags_s, 0.99)
    met = late_s < LAG_MAX_S and num_answers > 0
    print(f"\n99th percentile: {late_s * 1e3:.1f} ms: {'as aimed' if met else 'TOO LATE, or without an answer'}")
    return 0 if met else 1


def row(name: str, window: Window, num_answers: int) -> str:
    """One line of the table."""
    return f"| {name} | {_spread(window.lags_s)} | {window.cpu_share:.2f} | {num_answers} |"


async def measure(options: argparse.Namespace) -> tuple[Window, Window, int]:
    """(without a console, with one, answers that it got in that time)."""
    async with simulated(options) as (fleet, controller):
        without = await look(fleet, controller, options.seconds, None)
        with watching(controller, options.command) as answers:
            await patiently(fleet, controller, START_S)
            before = num_lines(answers)
            watched = await look(fleet, controller, options.seconds, None)
            return without, watched, num_lines(answers) - before


@contextlib.contextmanager
def watching(controller: ControllerRun, command: str) -> Iterator[Path]:
    """A console that watches. The file that it writes its answers to, one a line."""
    answers = controller.path.parent / "answers.jsonl"
    words = [sys.executable, "-m", "laminar.console", str(controller.path), "--json", "-c", f"watch {command}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with answers.open("wb") as file, subprocess.Popen(words, stdout=file, env=environment) as process:
        try:
            yield answers
        finally:
            process.kill()
            process.wait(END_S)


def num_lines(path: Path) -> int:
    """So far."""
    return path.read_bytes().count(b"\n")


if __name__ == "__main__":
    sys.exit(main())
