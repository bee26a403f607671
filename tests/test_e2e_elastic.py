"""Replicas that come and go by an operator's hand while a run goes on: the commands of the README, and wrong ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e import ROOT, SMALL, Run, hosts_file, ledger_is_closed
from e2e_replay import events_of

from laminar.console.targets import live
from laminar.core import events

pytestmark = pytest.mark.timeout(240)

LEAVE_S = 60.0


@contextmanager
def one_more(run: Run, name: str, token: str = "") -> Iterator[subprocess.Popen[str]]:
    """A rollout worker, started by hand."""
    url, own = (run.path / "url").read_text(), (run.path / "token").read_text()
    command = [sys.executable, "-m", "laminar.workers.rollout", "--controller", url, "--name", name]
    environment = {**os.environ, **run.mark, "PYTHONPATH": str(ROOT), "LAMINAR_TOKEN": token or own}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def generates(run: Run, name: str) -> bool:
    return bool(run.status()["replicas"].get(name, {}).get("generating"))


def test_replicas_join_and_leave_a_run_that_loses_nothing_and_strangers_are_turned_away(tmp_path: Path) -> None:
    with Run.start(tmp_path, hosts_file(tmp_path), *SMALL, "run.steps=5000") as run:
        run.until_said(r"^step 1/")
        _turn_away(run)
        with one_more(run, "rollout-8") as passing:
            assert _typed(run, "join")[0].startswith("rollout-1 is being started on localhost; it joins")
            run.until(lambda: generates(run, "rollout-8") and generates(run, "rollout-1"))
            assert run.ask("POST", "/v1/drain/rollout-8") == (200, {"draining": "rollout-8"})
            assert passing.wait(LEAVE_S) == 0
            assert passing.stderr is not None
            assert passing.stderr.read().splitlines()[-1] == "rollout-8 stopped: drained"
            _drain_one_that_the_controller_started(run)
            _refuse_what_cannot_be(run)
            step = run.status()["step"]
            run.until_said(rf"^step {step + 3}/")
            run.signal(signal.SIGINT)
            assert run.wait() == 0, run.output
    _check_books(run)


def _typed(run: Run, line: str) -> list[str]:
    """What the console says to a command that is not refused."""
    answer = live.of_run(run.path).ask(line).answer
    assert not answer.error, answer.error
    return answer.lines


def _drain_one_that_the_controller_started(run: Run) -> None:
    assert "leaves when its" in _typed(run, "drain r0")[0]
    run.until(lambda: run.worker("laminar.workers.rollout", "rollout-0") is None, LEAVE_S)
    assert "rollout-0 stopped: drained" in (run.path / "logs" / "rollout-0.log").read_text()
    assert list(run.status()["replicas"]) == ["rollout-1"]


def _refuse_what_cannot_be(run: Run) -> None:
    status, answer = run.ask("POST", "/v1/drain/rollout-1")
    assert (status, answer["error"]) == (409, "rollout-1 is not drained: it is the last replica that admits groups")
    status, answer = run.ask("POST", "/v1/drain/rollout-7")
    assert (status, answer["error"]) == (404, "there is no replica 'rollout-7'; there are: rollout-1")
    for method, path in (("POST", "/v1/drain/rollout-1"), ("GET", "/v1/status")):
        assert run.ask(method, path, token="guessed")[0] == 401
    assert list(run.status()["replicas"]) == ["rollout-1"]


def _check_books(run: Run) -> None:
    assert ledger_is_closed(run.output)
    assert run.num_dropped().keys() <= {"stopped"}, run.output
    assert not [line for line in run.lines if "is started again" in line or "was lost" in line]
    finished: dict[str, int] = {}
    for event in events_of(run):
        if isinstance(event, events.ReplicaReported):
            finished[event.worker] = finished.get(event.worker, 0) + len(event.finished)
    assert finished.keys() == {"rollout-0", "rollout-1", "rollout-8"}
    assert min(finished.values()) > 0
    steps = run.query(
        "SELECT count(*), count(DISTINCT id) FROM trajectories WHERE trained_at IS NOT NULL GROUP BY step"
    )
    assert set(steps) == {(16, 16)}


def _turn_away(run: Run) -> None:
    """Strangers, who learn why; nothing comes of them."""
    with one_more(run, "rollout-9", token="guessed") as stranger, one_more(run, "rollout-0") as double:
        _is_turned_away(stranger, "LAMINAR_TOKEN must hold the token of this run")
        _is_turned_away(double, "rollout-0 is connected already")
    assert not [line for line in run.lines if line.startswith("alarm")]


def _is_turned_away(worker: subprocess.Popen[str], reason: str) -> None:
    assert worker.wait(60.0) == 1
    assert worker.stderr is not None
    assert reason in worker.stderr.read()
