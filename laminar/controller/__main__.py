"""`python -m laminar.controller`: start a run, resume one, or show what would be started."""

import signal

if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C while the rest is imported ends the process without a traceback

import argparse
import asyncio
import contextlib
import gc
import io
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from laminar import __version__, configfile, descriptors, hosts, samplers
from laminar.commandline import Parser
from laminar.config import Config
from laminar.controller import rundir
from laminar.controller.plan import Process, describe, plan
from laminar.controller.reach import reach
from laminar.controller.runlock import RunLock
from laminar.core import amend
from laminar.errors import ConfigError, LaminarError, StartError
from laminar.logs import Lossy
from laminar.plugins import check_file, is_file_reference

EXIT_INTERRUPTED = 130
MAY_MOVE = ("controller.host", "controller.port", "controller.advertise", "controller.ssh")
"""Keys that may differ for a controller that takes over, perhaps on another machine."""
GC_THRESHOLD = 50_000  # objects: what the controller holds has no cycles; those of a broken connection can wait
EPILOG = """\
examples:
  python -m laminar.controller --cluster hosts.txt --config configs/quickstart/config.toml
  python -m laminar.controller --cluster hosts.txt --config my.toml trainer.lr=1e-5 run.steps=200
  python -m laminar.controller --cluster hosts.txt --config my.toml --dry-run
  python -m laminar.controller --resume runs/my-run run.steps=400

hosts.txt has one host per line: address, role (trainer or rollout), options:
  localhost  trainer  ranks=2
  localhost  rollout  replicas=2

Every key of the configuration is documented in laminar/config.py; key=value on the command line wins over the file.
Ctrl-C finishes the step, saves a checkpoint and stops everything; a second Ctrl-C stops at once.
"""


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 = completed or stopped on request, 1 = failed, 2 = wrong input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without → and – is no reason to fail
    try:
        return _run(_parse(arguments))
    except LaminarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the run has its own handler
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # --dry-run | head
        sys.stdout = None  # type: ignore[assignment]
        return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m laminar.controller",
        description="Laminar: asynchronous RL post-training of language models.",
        epilog=EPILOG,
    )
    parser.add_argument("--cluster", metavar="HOSTS", type=Path, help="hosts file: which machine does what")
    parser.add_argument("--config", metavar="TOML", type=Path, help="configuration file")
    parser.add_argument("--sampler", metavar="REF", help="custom sampler: file.py:Class or pkg.mod:Class")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan and configuration, start nothing"
    )
    parser.add_argument(
        "--resume",
        metavar="RUN_DIR",
        nargs="?",
        const="",
        help="go on with a run (default: the latest): where its controller died, if it did, else from its last checkpoint; its own "
        "hosts and configuration are used",
    )
    parser.add_argument(
        "--from-checkpoint",
        action="store_true",
        help="with --resume: from the last checkpoint, also if the controller died",
    )
    parser.add_argument(
        "--why-stalled",
        metavar="RUN_DIR",
        nargs="?",
        const="",
        help="ask the controller of a run (default: the latest) who waits for what, since when and until when, and print its and "
        "its workers' stacks; docs/stalls.md",
    )
    parser.add_argument("--version", action="version", version=f"laminar {__version__}")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="configuration keys, for example trainer.lr=1e-5"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.resume and "=" in options.resume and not Path(options.resume).exists():
        options.overrides.insert(0, options.resume)  # --resume run.steps=400: the latest run
        options.resume = ""
    return options


def _why_stalled(path: str) -> int:
    from rich.console import Console

    from laminar.controller import waitreport

    run = rundir.reopen(Path(path) if path else rundir.latest(Path("runs")))
    waitreport.show(waitreport.ask(run), Console())
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.why_stalled is not None:
        return _why_stalled(options.why_stalled)
    run = None
    if options.resume is not None:
        run = rundir.reopen(Path(options.resume) if options.resume else rundir.latest(Path("runs")))
    elif options.from_checkpoint:
        raise ConfigError("--from-checkpoint says how to --resume a run; add that")
    elif options.cluster is None:
        raise ConfigError("name a hosts file with --cluster (or a run with --resume); --help shows examples")
    if run is not None and not options.dry_run:
        RunLock(run.database).check()
    if run is not None and not options.from_checkpoint and (why := run.unreadable()):
        raise StartError(why)
    continues = run is not None and not options.from_checkpoint and run.is_interrupted
    if run is not None:
        _check_resume(options, run, continues)
    overrides = list(options.overrides)
    if options.sampler:
        overrides.append(f"buffer.sampler={msgspec.json.encode(options.sampler).decode()}")
    config = configfile.load(options.config or (run.config if run else None), overrides)
    hosts_file = options.cluster or (run.hosts if run else None)
    machines = hosts.load(hosts_file)
    if not continues:  # else workers live, which have loaded it
        _check_reward(config, machines)
    resume = run.last_checkpoint() if run else None
    if options.dry_run:
        return _show(config, machines, resume)
    named = amend.ALL_KEYS if options.config else tuple(override.partition("=")[0].strip() for override in overrides)
    return _start(config, machines, hosts_file.read_text(), run, named, continues)


def _check_reward(config: Config, machines: list[hosts.Host]) -> None:
    """A rollout worker of this machine would find it only after models are loaded. Others are asked before they start."""
    here = any(machine.role == "rollout" and hosts.is_local(machine.address) for machine in machines)
    if here and is_file_reference(config.task.reward):
        check_file(config.task.reward, "task.reward")


def _check_resume(options: argparse.Namespace, run: rundir.RunDirectory, continues: bool) -> None:
    """Raises ConfigError for a run that cannot be resumed, or not so."""
    overrides = [each for each in options.overrides if each.partition("=")[0] not in MAY_MOVE]
    changed = [*overrides, *(options.sampler or "").split(), *filter(None, [options.config, options.cluster])]
    if continues and changed:
        raise ConfigError(
            f"the controller of {run.path} died and its workers may be alive: the run goes on as it was, without {changed[0]}. "
            f"Resume it as it is (only {', '.join(MAY_MOVE)} may differ), stop it with Ctrl-C and resume it with changes, or add "
            "--from-checkpoint"
        )
    if not continues and run.last_checkpoint() is None:
        raise ConfigError(f"{run.path} has no complete checkpoint to resume from; start a new run")
    if continues and not options.dry_run and (why := rundir.why_no_token(run)):
        print(
            f"{run.token} cannot be read ({why}): workers that live cannot come back without it; they end, and are started again"
        )


def _show(config: Config, machines: list[hosts.Host], resume: Path | None) -> int:
    where = reach(config, machines)
    url = where.url(config.controller.port or "PORT")
    processes = plan(config, machines, url, resume)
    print(f"# the controller listens on {where.bind}, workers dial {url}")
    print(f"# {len(processes)} processes; each gets the run's token in LAMINAR_TOKEN\n{describe(processes)}\n")
    print(f"# configuration\n{configfile.dumps(config)}")
    return 0


def _start(
    config: Config,
    machines: list[hosts.Host],
    hosts_text: str,
    run: rundir.RunDirectory | None,
    named: tuple[str, ...],
    continues: bool,
) -> int:
    """`named`: keys of the configuration that were given for this start."""
    from laminar.controller import archive
    from laminar.controller.app import Application
    from laminar.controller.parts import Given
    from laminar.controller.preflight import check_hosts
    from laminar.tasks import datasets

    processes = plan(config, machines, "", None)
    descriptors.require(_num_descriptors(processes), f"{len(processes)} processes")
    if config.log.archive == "parquet":
        archive.require()
    sampler = None if config.buffer.sampler == "fifo" else samplers.load(config.buffer.sampler, "buffer.sampler")
    prompts = datasets.load(config.task)
    resume = run.last_checkpoint() if run else None
    where = reach(config, machines)
    found = run and continues and rundir.last_found(run)  # workers wait for us: the check can wait
    found = found or check_hosts(config, machines, where)
    directory = run or rundir.create(config, hosts_text)
    rundir.write_found(directory, found)

    given = Given(
        config=config,
        hosts=machines,
        run=directory,
        prompts=prompts,
        sampler=sampler,
        resume=resume,
        named=named,
        continues=continues,
        reach=where,
        found=found,
    )

    async def go() -> int:
        application = Application(given)
        gc.freeze()  # what is here stays, imports above all: to look through it again stops the event loop for long
        gc.set_threshold(GC_THRESHOLD)
        return await application.run()

    try:
        with _log_to(directory.logs / "controller.log"):
            return _run_loop(go)
    except StartError as error:
        if run is not None:
            raise
        raise StartError(f"{error}\n{rundir.discard(directory)}") from error


def _num_descriptors(processes: list[Process]) -> int:
    """Open files and sockets of the controller at most: per worker a channel and a request, per process pipes and its log."""
    return 128 + sum(2 * process.num_workers + 4 for process in processes)


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """The controller's own log lies beside those of its workers: the terminal belongs to the display."""
    import structlog

    try:
        opened = path.open("a", buffering=1)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from error
    with contextlib.closing(Lossy(opened)) as file:
        render = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
        stamp = structlog.processors.TimeStamper(fmt="iso")
        structlog.configure(
            processors=[structlog.processors.add_log_level, stamp, render],
            logger_factory=structlog.WriteLoggerFactory(file),
        )
        try:
            yield
        finally:
            structlog.reset_defaults()


def _run_loop(go: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """uvloop where it is installed, the stock loop elsewhere."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(go())
    return uvloop.run(go())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
