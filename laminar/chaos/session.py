"""One session: a run with limits that faults do not run into, the faults in it, and its end."""

import itertools
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import psutil

from laminar import processes
from laminar.chaos.injector import Injector
from laminar.chaos.journal import Journal
from laminar.chaos.plan import Fault
from laminar.chaos.strikes import Striker
from laminar.chaos.trial import Tail, Trial
from laminar.config import Config
from laminar.controller.rundir import RunDirectory
from laminar.processes import TOKEN
from laminar.workers.relay import paths

RESTARTS = 1000  # no limit in the way: a loop of crashes would show as a fault from which the run does not recover
STEPS = 1_000_000
CHECKPOINT_EVERY = 10
LEFT_S = 15.0  # for the last processes to go


def raised(config: Config, kinds: list[str], given: list[str]) -> list[str]:
    """Overrides for a run in which these kinds may strike, unless they are given."""
    wanted = {
        "run.steps": STEPS,
        "rollout.restarts": RESTARTS,
        "relay.restarts": RESTARTS,
        "trainer.restarts": RESTARTS,
        "controller.console": "plain",
        "log.max_mib": 0,
    }
    if not config.trainer.checkpoint_every:
        wanted["trainer.checkpoint_every"] = CHECKPOINT_EVERY
    if "corrupt" in kinds:
        wanted["relay.verify_pulls"] = "true"
    keys = {override.partition("=")[0].strip() for override in given}
    return [f"{key}={value}" for key, value in wanted.items() if key not in keys]


def inject(
    trial: Trial, striker: Striker, faults: Iterator[Fault], duration_s: float, say: Callable[[str], None]
) -> dict[str, list[str]]:
    """Until the faults, the time or the run is over; then stop a run of ours. Further checks with their findings."""
    tail = Tail(trial.run.database, from_now=not trial.is_own)
    injector = Injector(trial, Journal(trial.run.path), striker, tail, say)
    token, over_early = "", False
    try:
        if injector.await_first_step():
            token = _token(trial.run)
            injector.run(faults, time.time() + duration_s)
        over_early = trial.is_over
    except KeyboardInterrupt:
        say("interrupted: no more faults")
    finally:
        code = trial.stop()
    checks = {"a fault has struck": [] if injector.num_struck else ["none was possible, or the run was over before"]}
    if not trial.is_own:
        return checks
    findings = []
    if code or over_early:
        early = "before all faults had struck, " if over_early else ""
        findings.append(f"it ended {early}with exit code {code}: {trial.last_words}")
    checks["the run ended when it was told to"] = findings
    checks["nothing left behind"] = left_behind(token, trial.run)
    return checks


def _token(run: RunDirectory) -> str:
    """Empty if the run has just ended."""
    try:
        return run.token.read_text()
    except OSError:
        return ""


def left_behind(token: str, run: RunDirectory) -> list[str]:
    """Processes and shared memory of a run that is over, on this machine."""
    deadline = time.monotonic() + LEFT_S
    names = _run_ids(run)
    for wait in itertools.count():
        found: list[psutil.Process] = processes.marked({TOKEN: token}) if token else []
        shm = [path for name in names for path in paths.SHM_ROOT.glob(f"{paths.PREFIX}{name}*")]
        if not (found or shm) or time.monotonic() > deadline:
            break
        time.sleep(0.1 if wait < 10 else 0.5)
    return [f"pid {process.pid}" for process in found] + [str(path) for path in shm]


def _run_ids(run: RunDirectory) -> list[str]:
    try:
        with closing(sqlite3.connect(f"{run.database.as_uri()}?mode=ro", uri=True)) as database:
            return [name for (name,) in database.execute("SELECT DISTINCT run_id FROM boots WHERE run_id != ''")]
    except sqlite3.Error:
        return []
