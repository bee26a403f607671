"""`python -m laminar.chaos`: faults into a real run, and a report of what they cost."""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from laminar import configfile, hosts
from laminar.chaos import disk, journal, plan, report, session
from laminar.chaos.injector import START_S
from laminar.chaos.kinds import KINDS, Kind
from laminar.chaos.plan import Fault
from laminar.chaos.roster import Roster, roster
from laminar.chaos.strikes import Striker
from laminar.chaos.targets import Targets
from laminar.chaos.trial import Trial
from laminar.commandline import Parser
from laminar.config import Config
from laminar.controller import rundir
from laminar.controller.rundir import RunDirectory
from laminar.errors import ConfigError, LaminarError

EXIT_INTERRUPTED = 130
DURATION, GAP = "10m", "10s"
OF_RANDOM = ("duration", "gap", "kinds")
NEEDS = {"cut": ("ss",), "drop_frames": ("ss",), "partition": ("nsenter", "ip")}
"""Kinds that need root, and these programs."""
NEEDS_FROM = {"ss": "iproute2", "ip": "iproute2", "nsenter": "util-linux"}
EPILOG = """\
examples:
  python -m laminar.chaos --cluster hosts.txt --config my.toml --random --seed 7 --duration 10m
  python -m laminar.chaos --cluster hosts.txt --config my.toml --plan faults.toml trainer.lr=1e-5
  python -m laminar.chaos --run runs/my-run --random --duration 5m        # a run that somebody else has started
  python -m laminar.chaos --report runs/chaos-20260101-120000             # judge it again
  python -m laminar.chaos --list                                          # all kinds of faults

Exit status: 0 = the report is clean, 1 = it is not, 2 = wrong input. docs/chaos.md explains kinds and report.
"""


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # undo, stop the run and report, as for Ctrl-C
    try:
        if options.list:
            return _list_kinds()
        _check(options)
        if options.report:
            return _tell(options, report.make(options.report))
        return _run(options)
    except LaminarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # outside a run: nothing is to be undone
        return EXIT_INTERRUPTED


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m laminar.chaos",
        description="Inject faults into a real run and report what they cost.",
        epilog=EPILOG,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--cluster", metavar="HOSTS", type=Path, help="start one on these hosts")
    run.add_argument("--config", metavar="TOML", type=Path, help="its configuration")
    run.add_argument("overrides", metavar="key=value", nargs="*", help="configuration keys, as for laminar.controller")
    run.add_argument(
        "--run", metavar="RUN_DIR", type=Path, help="attach to one that runs; without faults that it could not undo"
    )
    faults = parser.add_argument_group("the faults")
    faults.add_argument("--plan", metavar="TOML", type=Path, help="faults at given times")
    faults.add_argument(
        "--random", action="store_true", help="faults drawn from --seed, each after the last one is over"
    )
    faults.add_argument("--seed", type=int, default=0)
    faults.add_argument(
        "--duration", metavar="TIME", help=f"of --random, from the first train step on (default: {DURATION})"
    )
    faults.add_argument("--gap", metavar="TIME", help=f"of --random: mean pause after a recovery (default: {GAP})")
    faults.add_argument("--kinds", metavar="A,B,…", help="of --random: only these")
    faults.add_argument("--list", action="store_true", help="print all kinds and end")
    disks = parser.add_argument_group("fill_disk")
    disks.add_argument(
        "--disk-mib", type=_mib, default=512, help="as root: size of the run's own file system (default: %(default)s)"
    )
    disks.add_argument(
        "--disk-quota-mib", type=_mib, default=1024, help="else: most that is written (default: %(default)s)"
    )
    told = parser.add_argument_group("the report")
    told.add_argument("--report", metavar="RUN_DIR", type=Path, help="only judge a run that is over")
    told.add_argument("--json", action="store_true", help="the report as JSON on stdout, everything else on stderr")
    told.add_argument("--quiet", action="store_true", help="do not print what the run says")
    return parser.parse_intermixed_args(arguments)


def _mib(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 30:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of MiB")
    return int(text)


def _list_kinds() -> int:
    for kind in KINDS.values():
        print(f"{kind.name:<16} {kind.strikes}: {kind.what}; may cost {kind.cost}")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for words that do not go together: nothing is ignored without a word."""
    given = [name for name, value in vars(options).items() if value not in (None, False, [])]
    of_faults = [name for name in ("plan", "random", *OF_RANDOM) if name in given]
    if options.report:
        of_run = [name for name in ("cluster", "config", "run", "overrides") if name in given]
        if others := [*of_run, *of_faults]:
            word = f"--{others[0]}" if others[0] != "overrides" else options.overrides[0]
            raise ConfigError(f"--report only judges a run that is over: leave {word} away")
        return
    if bool(options.cluster) == bool(options.run):
        raise ConfigError(
            "give --cluster HOSTS to start a run, or --run RUN_DIR to attach to one; --help shows examples"
        )
    if bool(options.plan) == options.random:
        raise ConfigError("give --plan FILE, or --random; --help shows examples")
    if options.run and (options.overrides or options.config):
        raise ConfigError("--run takes a run as it is: leave --config and key=value away")
    if options.plan and of_faults != ["plan"]:
        raise ConfigError(f"--{of_faults[1]} is for --random: a plan says itself what strikes when")


def _run(options: argparse.Namespace) -> int:
    duration_s = plan.seconds(DURATION if options.duration is None else options.duration, "--duration")
    gap_s = plan.seconds(GAP if options.gap is None else options.gap, "--gap")
    say = _teller(options)
    existing = rundir.reopen(options.run) if options.run else None
    overrides = [] if existing else [f"run.name={time.strftime('chaos-%Y%m%d-%H%M%S')}", *options.overrides]
    config = configfile.load(existing.config if existing else options.config, overrides)
    hosts_file = existing.hosts if existing else options.cluster
    machines = hosts.load(hosts_file)
    who = roster(machines)
    faults, kinds = _faults(options, who, config, gap_s, say)
    run = existing or RunDirectory((Path(config.run.dir) / config.run.name).absolute())
    if existing is None and (not config.run.name or os.path.lexists(run.database)):
        taken = f"the run {run.path} exists" if config.run.name else "run.name is empty"
        raise ConfigError(f"{taken}; choose another run.name, or leave it away")
    own_disk = existing is None and "fill_disk" in kinds and not disk.why_not()
    with contextlib.ExitStack() as stack:
        if own_disk:
            say(f"{run.path} is on a file system of its own ({options.disk_mib} MiB) until the end")
            stack.enter_context(disk.small(run.path, options.disk_mib))
        trial = Trial(run, (lambda line: None) if options.quiet else say)
        if existing is not None:
            trial.attach()
        else:
            raised = session.raised(config, kinds, options.overrides)
            say(f"set for this run: {' '.join(raised)}")
            files = ["--cluster", str(options.cluster), *(["--config", str(options.config)] if options.config else [])]
            trial.start([*files, *overrides, *raised])
        striker = Striker(trial, Targets(run, lambda: trial.pid), who, fill_bytes(options, own_disk), options.seed)
        also = session.inject(trial, striker, faults, duration_s if options.random else math.inf, say)
    if not (run.path / journal.NAME).exists():
        why = trial.last_words.removeprefix("error: ")
        raise ConfigError(
            f"no fault struck; the run was over, or {START_S:g} s had passed, before its first train step: {why}"
        )
    return _tell(options, report.make(run.path, also=also))


def fill_bytes(options: argparse.Namespace, own_disk: bool) -> int:
    """Most that is written to fill the run's file system: all of one of its own."""
    return (options.disk_mib if own_disk else options.disk_quota_mib) << 20


def _teller(options: argparse.Namespace) -> Callable[[str], None]:
    stream = sys.stderr if options.json else sys.stdout
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:7.1f}] {line}", file=stream, flush=True)

    return say


def _faults(
    options: argparse.Namespace, who: Roster, config: Config, gap_s: float, say: Callable[[str], None]
) -> tuple[Iterator[Fault], list[str]]:
    """The faults, and the names of the kinds that may come up. Raises ConfigError for what cannot be done here."""
    if options.plan:
        planned = plan.read(options.plan, who, config, options.seed)
        for fault in planned:
            if why := _why_not(KINDS[fault.kind], who, config, options):
                raise ConfigError(f"{options.plan}: fault {fault.number}: {fault.kind} is not possible: {why}")
        return iter(planned), sorted({fault.kind for fault in planned})
    names = [] if options.kinds is None else options.kinds.split(",")
    wanted = [plan.kind_named(name.strip(), "--kinds") for name in names]
    able = []
    for kind in wanted or KINDS.values():
        why = _why_not(kind, who, config, options)
        if why and wanted:
            raise ConfigError(f"--kinds: {kind.name} is not possible: {why}")
        if why:
            say(f"without {kind.name}: {why}")
        else:
            able.append(kind)
    if not able:
        raise ConfigError("no kind of fault is possible here")
    return plan.draw(options.seed, able, who, config, gap_s), [kind.name for kind in able]


def _why_not(kind: Kind, who: Roster, config: Config, options: argparse.Namespace) -> str:
    """Why a kind cannot strike in this run; empty = it can."""
    if not kind.targets(who):
        return f"there is nothing to strike ({kind.strikes})"
    if kind.own_run and options.run:
        return "it could not be undone in a run that somebody else has started"
    limits = {"rollout": config.rollout.restarts, "relay": config.relay.restarts, "trainer": config.trainer.restarts}
    if options.run and (ending := [part for part in kind.may_lose if not limits[part]]):
        return f"it may end this run, which has {ending[0]}.restarts = 0"
    if kind.name in NEEDS and os.geteuid() != 0:
        return "it needs root"
    missing = [program for program in NEEDS.get(kind.name, ()) if shutil.which(program) is None]
    return f"it needs {missing[0]} ({NEEDS_FROM[missing[0]]}), which is not installed" if missing else ""


def _tell(options: argparse.Namespace, found: report.Report) -> int:
    if options.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        width = None if sys.stdout.isatty() else 180
        report.show(found, Console(width=width))
    return 0 if found.clean else 1


if __name__ == "__main__":
    sys.exit(main())
