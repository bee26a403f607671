"""`python -m laminar.console`: attach to a live run, simulate a cluster, or open a recorded run; one language for all three."""

import argparse
import contextlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path

from laminar.commandline import EXIT_OK, Parser, exit_code_of
from laminar.console.language import UsageError, commands_of
from laminar.console.targets.base import Target
from laminar.controller import rundir

EXIT_REFUSED = 1
RUNS, LATEST = Path("runs"), Path()
EPILOG = """examples:
  python -m laminar.console                                   (the latest run under runs/)
  python -m laminar.console runs/my-run -c "status; fleet"
  python -m laminar.console --sim small                       (a virtual cluster; then: run until step 1)
  python -m laminar.console --sim small --faults engine_crash=2 --seed 7
  python -m laminar.console --log runs/my-run -c "goto step 3; why r0"
  python -m laminar.console -c fleet --json | jq '.tables[0].rows[].kv_share'

With -c, or commands on standard input, it ends at the first command that is refused, with exit code 1; 2 means that the arguments
are wrong. docs/console.md has a session of each kind.
"""


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 = every command did what it says, 1 = one was refused, 2 = the arguments are wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without → and – is no reason to fail
    return exit_code_of(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(given: list[str]) -> int:
    options, rest = _parse(given)
    with contextlib.closing(_target(options, rest)) as target:
        return _sit(target, options)


def _parse(given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those of `python -m laminar.sim`."""
    parser = Parser(
        prog="python -m laminar.console",
        description="Look into a run, ask why, step through its decisions, change it.",
        epilog=EPILOG,
    )
    simulates = any(word == "--sim" or word.startswith("--sim=") for word in given)
    if not simulates:
        parser.add_argument("run", nargs="?", metavar="RUN_DIR", type=Path, help="of a live run; default: the latest")
    parser.add_argument("--controller", metavar="URL", help="of a live run; its token is read from LAMINAR_TOKEN")
    parser.add_argument(
        "--sim", nargs="?", const="small", metavar="PRESET", help="simulate; further options are those of laminar.sim"
    )
    parser.add_argument(
        "--log", nargs="?", const=LATEST, metavar="RUN", type=Path,
        help="a recorded run: its directory or its run.db; default: the latest",
    )  # fmt: skip
    parser.add_argument(
        "--boot", type=int, metavar="N", help="with --log: the part of the run that this controller process belongs to"
    )
    parser.add_argument("-c", dest="commands", metavar="COMMANDS", help="carry these out and end; `;` separates them")
    parser.add_argument("--json", action="store_true", help="one JSON object per command")
    options, rest = parser.parse_known_args(given) if simulates else (parser.parse_args(given), [])
    options.run = None if simulates else options.run
    options.commands = None if options.commands is None else commands_of(options.commands)
    named = [name for name in ("run", "controller", "sim", "log") if getattr(options, name) is not None]
    if len(named) > 1:
        parser.error(f"{' and '.join(named)} name different runs: choose one")
    if options.boot is not None and options.log is None:
        parser.error("--boot goes with --log RUN")
    return options, rest


def _target(options: argparse.Namespace, rest: list[str]) -> Target:
    """Raises ConfigError for one that is not there."""
    if options.sim is not None:
        from laminar.console.targets import sim

        return sim.opened(options.sim, rest)
    if options.log is not None:
        from laminar.console.targets import log

        return log.opened(rundir.latest(RUNS) if options.log == LATEST else options.log, options.boot)
    from laminar.console.targets import live

    if options.controller is not None:
        return live.at_url(options.controller)
    return live.of_run(options.run or rundir.latest(RUNS))


def _sit(target: Target, options: argparse.Namespace) -> int:
    from laminar.console.terminal import render
    from laminar.console.terminal.session import Session

    session = Session(target, render.console(), as_json=options.json)
    if options.commands is not None:
        return EXIT_OK if session.run(options.commands) else EXIT_REFUSED
    if not sys.stdin.isatty():
        return EXIT_OK if session.run(_lines(sys.stdin)) else EXIT_REFUSED
    from laminar.console.terminal import prompt

    session.open()
    prompt.talk(session)
    return EXIT_OK


def _lines(file: Iterable[str]) -> Iterable[str]:
    """Commands of a script, `;` or a new line between them."""
    for line in file:
        try:
            yield from commands_of(line)
        except UsageError:
            yield line  # which is then refused with the same words


if __name__ == "__main__":
    sys.exit(main())
