"""`python -m laminar.trace`: a time range of a run for Perfetto."""

import argparse
import re
import sys
from pathlib import Path

from laminar.commandline import Parser
from laminar.controller import rundir
from laminar.errors import ConfigError, LaminarError
from laminar.replay.recording import Recording
from laminar.trace import chrome, records
from laminar.trace.records import Window
from laminar.trace.timeline import Timeline

EPOCH_S = 1e9  # what is more than that is no time since a run's start, but since the epoch
EPILOG = """\
examples:
  python -m laminar.trace                                 # the latest run in runs/, from its start to now
  python -m laminar.trace runs/my-run --steps 40-60
  python -m laminar.trace runs/my-run --from 90 --to 120 -o slow.json.gz

Open the file at https://ui.perfetto.dev (it is read in your browser and goes nowhere) or in chrome://tracing. The run may still
be going on. docs/observability.md says what is shown.
"""


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 = written, 2 = wrong input."""
    options = _parse(arguments)
    try:
        run = options.run or rundir.latest(Path("runs"))
        with Recording(run) as recording:
            return _export(recording, options)
    except LaminarError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: cannot write {options.output or 'the trace'}: {error.strerror or error}", file=sys.stderr)
    return 2


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m laminar.trace",
        description="Write a time range of a run as a trace for Perfetto.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "run", nargs="?", type=Path, help="a run's directory, or its run.db (default: the latest in runs/)"
    )
    parser.add_argument("--steps", metavar="A-B", help="train steps A to B, from the end of the one before")
    parser.add_argument(
        "--from", dest="begin", type=float, metavar="T", help="seconds since the run's start, or since the epoch"
    )
    parser.add_argument("--to", dest="end", type=float, metavar="T", help="the same")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: trace.json beside run.db; .gz compresses it"
    )
    return parser.parse_args(arguments)


def _export(recording: Recording, options: argparse.Namespace) -> int:
    origin = recording.lives[0].boots[0].started
    window = _window(recording, options, origin)
    timeline = records.read(recording, window)
    path = options.output or recording.path.parent / "trace.json"
    about = {
        "run": recording.path.parent.name,
        "start": origin,
        "from": window.begin - origin,
        "to": window.end - origin,
    }
    num = chrome.write(path, chrome.Trace(timeline, origin), about)
    print(_summary(path, num, timeline, origin))
    return 0


def _window(recording: Recording, options: argparse.Namespace, origin: float) -> Window:
    if options.steps is not None:
        if options.begin is not None or options.end is not None:
            raise ConfigError("choose the range by --steps, or by --from and --to")
        return records.of_steps(recording, *_steps(options.steps))
    known = records.whole(recording)
    begin, end = (
        default if given is None else given + (origin if given < EPOCH_S else 0.0)
        for given, default in ((options.begin, known.begin), (options.end, known.end))
    )
    if not begin < end or begin >= known.end or end <= known.begin:
        raise ConfigError(
            f"--from {begin - origin:g} --to {end - origin:g}: the run is known from 0 to {known.end - origin:.1f} s, and "
            "the first has to be before the second"
        )
    return Window(begin, end)


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise ConfigError(f"--steps {text}: a step, or the first and the last one, are expected: 12 or 10-20")
    return int(match[1]), int(match[2] or match[1])


def _summary(path: Path, num: int, timeline: Timeline, origin: float) -> str:
    totals = ", ".join(f"{kind} {seconds:.3f} s" for kind, seconds in timeline.busy().items())
    return (
        f"{path}: {num:,} events of {len(timeline.processes)} processes, {max(0.0, timeline.begin - origin):.1f} to "
        f"{timeline.end - origin:.1f} s after the run's start\n{totals or 'nothing took any time'}\n"
        "open it at https://ui.perfetto.dev"
    )


if __name__ == "__main__":
    sys.exit(main())
