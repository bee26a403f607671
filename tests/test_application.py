"""A whole controller in this process, with real child processes that are no workers: how runs end that cannot go on."""

import asyncio
import json
import os
import sqlite3
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from laminar import configfile, hosts, processes
from laminar.controller import launch, rundir
from laminar.controller.app import Application
from laminar.controller.parts import Given
from laminar.core import events
from laminar.ids import WorkerId
from laminar.tasks import datasets
from laminar.workers.relay import paths

pytestmark = pytest.mark.timeout(120)


class World:
    """A run whose processes are a script of the test's choosing instead of Python."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text("{}")
        (directory / "data.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
        self.script("sleeps", "import time\ntime.sleep(600)\n")

    def script(self, name: str, program: str) -> None:
        path = self.directory / name
        path.write_text(f"#!{sys.executable}\n{program}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def application(self, trainer: str = "sleeps", rollout: str = "sleeps") -> Application:
        overrides = [f"model.path={self.directory}/model", f"task.dataset={self.directory}/data.jsonl"]
        overrides += [f"run.dir={self.directory}/runs", "run.name=mine", "controller.console=plain"]
        config = configfile.load(None, overrides)
        text = f"localhost trainer python={self.directory}/{trainer}\nlocalhost rollout python={self.directory}/{rollout}\n"
        return Application(
            Given(
                config=config,
                hosts=hosts.parse(text, "hosts.txt"),
                run=rundir.create(config, text),
                prompts=datasets.load(config.task),
                sampler=None,
                resume=None,
            )
        )

    @property
    def run(self) -> Path:
        return self.directory / "runs" / "mine"

    def check_nothing_is_left(self, application: Application) -> None:
        assert application._parts.crew.launcher.alive == []
        assert not [p for p in psutil.process_iter() if str(self.directory) in " ".join(command_of(p))]
        assert not paths.shm_directory(application._log.run_id).exists()
        assert not (self.run / "token").exists()


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(launch, "ASKED_S", 1.0)
    return World(tmp_path)


async def run(application: Application, when_started: Callable[[], None]) -> int:
    """The exit code; `when_started` is called when all processes are started."""
    running = asyncio.create_task(application.run())
    async with asyncio.timeout(90):
        while not (running.done() or has_started(application)):  # noqa: ASYNC110 - the application has no event for it
            await asyncio.sleep(0.01)
        if not running.done():
            when_started()
        return await running


def has_started(application: Application) -> bool:
    parts = getattr(application, "_parts", None)
    return parts is not None and 0 < len(parts.crew.processes) == len(parts.crew.launcher._children)


async def test_a_worker_that_dies_at_start_ends_the_run_with_its_last_lines(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.script("dies", "import sys\nprint('loading the model')\nsys.exit('no such device: gpu7')\n")
    application = world.application(rollout="dies")
    assert await run(application, lambda: None) == 1
    out = capsys.readouterr().out
    assert "the run failed: rollout-0 did not start: ended with exit code 1; its last lines:" in out
    assert "    loading the model\n    no such device: gpu7" in out
    world.check_nothing_is_left(application)


async def test_the_token_reaches_the_workers_and_no_argument_log_or_file(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.script(
        "tells",
        "import os, pathlib, psutil, sys\n"
        f"seen = pathlib.Path({str(world.directory)!r})\n"
        "(seen / 'arguments').write_text(repr([p.info['cmdline'] for p in psutil.process_iter(['cmdline'])]))\n"
        f"(seen / 'mode').write_text(oct(os.stat({str(world.run)!r} + '/token').st_mode & 0o777))\n"
        "(seen / 'seen').write_text(os.environ['LAMINAR_TOKEN'])\n"
        "sys.exit(3)\n",
    )
    application = world.application(rollout="tells")
    assert await run(application, lambda: None) == 1
    token = (world.directory / "seen").read_text()
    assert len(token) >= 40
    assert (world.directory / "mode").read_text() == "0o600"
    assert token not in (world.directory / "arguments").read_text()
    captured = capsys.readouterr()
    assert token not in captured.out + captured.err
    files = [path for path in world.run.rglob("*") if path.is_file()]
    assert world.run / "run.db" in files
    assert not [path for path in files if token.encode() in path.read_bytes()]


def break_the_disk(application: Application, error: OSError) -> None:
    def broken() -> None:
        raise error

    application._log._before_commit = broken
    application._parts.tokens.sync = broken  # type: ignore[method-assign]
    application._parts.runtime.post(events.WorkerDisconnected(worker=WorkerId("nobody"), incarnation=1))


async def test_a_broken_disk_ends_the_run_with_what_to_do_and_leaves_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    application = world.application()
    error = OSError(5, "Input/output error")
    assert await run(application, lambda: break_the_disk(application, error)) == 1
    out = capsys.readouterr().out
    assert f"the run failed: the event log {world.run / 'run.db'} cannot be written:" in out
    assert "Input/output error; mend its disk or make room, then resume" in out
    world.check_nothing_is_left(application)


async def test_a_disk_that_is_full_when_the_run_is_stopped_ends_it_with_what_is_lost(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    application = world.application()

    def fill_and_stop() -> None:
        break_the_disk(application, OSError(28, "No space left on device"))
        application._parts.runtime.post(events.StopRequested(reason="stopped by SIGINT"))

    assert await run(application, fill_and_stop) == 1
    out = capsys.readouterr().out
    assert "cannot be written: [Errno 28] No space left on device" in out
    world.check_nothing_is_left(application)


async def test_a_controller_whose_run_another_has_taken_ends_and_leaves_everything_to_it(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    application = world.application()

    def take() -> None:
        with sqlite3.connect(world.run / "run.db") as database:
            database.execute("INSERT INTO boots (boot, pid, host) VALUES (2, 77, 'elsewhere')")
        application._parts.runtime.post(events.TimerFired())

    assert await run(application, take) == 1
    out = capsys.readouterr().out
    assert "the run failed: the controller with pid 77 on elsewhere has taken it over (boot 2, this one is 1)" in out
    left = processes.marked({processes.TOKEN: (world.run / "token").read_text()})
    assert len(left) == 3, "relay, trainer, rollout"
    for process in left:
        process.kill()
    await asyncio.gather(*application._parts.crew.launcher._watchers.values())


async def test_a_bug_of_the_controller_ends_the_run_with_its_name_and_a_dump(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    application = world.application()

    def bug(event: events.AnyEvent) -> None:
        raise LookupError("a bug")

    def sabotage() -> None:
        application._parts.runtime.observe = bug
        application._parts.runtime.post(events.TimerFired())

    assert await run(application, sabotage) == 1
    assert "the run failed: the controller failed: LookupError: a bug" in capsys.readouterr().out
    assert list((world.run / "logs").glob("core-dump-*.msgpack"))
    world.check_nothing_is_left(application)


async def test_a_stop_before_anything_joined_ends_the_run_cleanly(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    application = world.application()
    assert await run(application, lambda: os.kill(os.getpid(), 15)) == 0
    assert "stopped by SIGTERM" in capsys.readouterr().out
    world.check_nothing_is_left(application)


async def test_one_signal_that_comes_twice_is_one_stop(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    application = world.application()

    def stop() -> None:
        application._on_signal("SIGTERM")
        application._on_signal("SIGTERM")  # the second of a person would end this process

    assert await run(application, stop) == 0
    assert capsys.readouterr().out.count("finishing the step and saving a checkpoint") == 1
    world.check_nothing_is_left(application)


async def test_the_reader_of_the_output_may_leave(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    application = world.application()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        code = await run(application, lambda: os.kill(os.getpid(), 15))
        monkeypatch.undo()
    assert code == 0
    world.check_nothing_is_left(application)
