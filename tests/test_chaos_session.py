"""What a run with faults is given, and what it must not leave."""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from laminar.chaos import session
from laminar.chaos.trial import Tail
from laminar.config import Config, TrainerConfig
from laminar.controller.rundir import RunDirectory
from laminar.processes import TOKEN
from laminar.workers.relay import paths
from tests.chaos_world import Cluster, doctor, leave


def test_limits_are_raised_unless_they_are_given() -> None:
    found = session.raised(Config(), ["corrupt"], ["run.steps=7"])
    assert "trainer.restarts=1000" in found
    assert "trainer.checkpoint_every=10" in found
    assert "relay.verify_pulls=true" in found
    assert not [override for override in found if override.startswith("run.steps")]
    saved = session.raised(Config(trainer=TrainerConfig(checkpoint_every=3)), ["slow"], [])
    assert not [override for override in saved if override.startswith(("trainer.checkpoint_every", "relay.verify"))]


def test_processes_and_shared_memory_that_a_run_leaves_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LEFT_S", 0.0)
    run = RunDirectory(leave(Cluster(1), tmp_path / "run"))
    name, token = f"left_{uuid.uuid4().hex}", uuid.uuid4().hex
    doctor(run.path, "UPDATE boots SET run_id = ?", name)
    assert session.left_behind(token, run) == []
    shm = paths.SHM_ROOT / f"{paths.PREFIX}{name}-127.0.0.2"
    shm.mkdir()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={TOKEN: token})
    try:
        assert session.left_behind(token, run) == [f"pid {child.pid}", str(shm)]
    finally:
        child.communicate()
        shm.rmdir()


class Nothing:
    """A run that is over before anything could strike it; somebody else's."""

    is_own, is_over, last_words = False, True, ""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def stop(self) -> None:
        """It is not ours."""


def test_a_session_in_which_nothing_struck_is_not_clean(tmp_path: Path) -> None:
    trial = Nothing(RunDirectory(tmp_path))
    checks = session.inject(trial, None, iter([]), 1.0, lambda line: None)  # type: ignore[arg-type]
    assert checks == {"a fault has struck": ["none was possible, or the run was over before"]}


def test_a_tail_begins_where_the_log_ends_and_tells_what_comes_after_that(tmp_path: Path) -> None:
    world = Cluster(1)
    world.run()
    run = RunDirectory(leave(world, tmp_path / "run"))
    assert [event.seq for event in Tail(run.database).new()] == list(range(1, len(world.log) + 1))
    tail = Tail(run.database, from_now=True)
    assert tail.new() == []
    body = world.log[-1]
    for boot, seq in ((1, len(world.log) + 1), (2, 1)):
        doctor(run.path, "INSERT INTO events (boot, seq, at, kind, body) VALUES (?, ?, 0, '', ?)", boot, seq, body)
    assert len(tail.new()) == 2
    assert tail.new() == []
    assert Tail(tmp_path / "none" / "run.db").new() == []
