"""Why nothing happens: the report of a controller with real channels, as data and as text; the loop watch on a loop that blocks."""

import asyncio
import io
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from core_world import settings
from rich.console import Console

from laminar import stacks, wire
from laminar.config import Config, ControllerConfig
from laminar.controller import loopwatch, waitreport, whystalled
from laminar.controller.__main__ import main
from laminar.controller.channels import Channel, Channels
from laminar.controller.eventlog import EventLog
from laminar.controller.loopwatch import LoopWatch
from laminar.controller.operator import Operator
from laminar.controller.rundir import RunDirectory
from laminar.controller.runtime import Runtime
from laminar.controller.server import Server
from laminar.controller.whystalled import WhyStalled
from laminar.core import events
from laminar.core.engine import Core
from laminar.workers.link import Link, ThreadLink

pytestmark = pytest.mark.timeout(60)

TOKEN = "token-of-this-run"
CONFIG = Config(controller=ControllerConfig(heartbeat_s=0.1, heartbeat_timeout_s=30.0, orphan_timeout_s=30.0))


class World:
    """A core with its log and a server, whose channels nobody but `why` listens to."""

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory(path)
        self.run.logs.mkdir(parents=True)
        self.log = EventLog(self.run.database, 0.01)
        boot = self.log.begin_boot(0.0, os.getpid(), "here", 0)
        self.runtime = Runtime(Core(settings()), self.log, self.run.logs)
        self.channels = Channels(boot)
        self.server = Server(
            self.channels, token=TOKEN, run_id="test", config=wire.encode(CONFIG), heartbeat_s=0.1, timeout_s=30.0
        )
        self.why = WhyStalled(path, self.runtime, self.channels, self.log, self.run.logs)
        self.server.on_message = self.on_message
        operator = Operator(self.runtime, self.channels, status=dict, why_stalled=self.why.report)
        self.server.routes = operator.routes()

    def on_message(self, channel: Channel, message: wire.Message, number: int) -> int:
        if isinstance(message, wire.Stacks):
            self.why.on_stacks(channel, message)
        return 0

    async def attached(self, worker: str) -> None:
        """Its connection takes frames: that is a little later than its welcome is sent."""
        for _ in range(2000):
            if any(each.worker == worker and each.socket is not None for each in self.channels.all()):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{worker} is not connected")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(whystalled, "ANSWER_S", 20.0)
    world = World(tmp_path / "run")
    world.log.start(lambda seq: None)
    await world.server.start("127.0.0.1", 0)
    world.runtime.post(events.RunStarted(boot=1))
    yield world
    await world.runtime.close()
    await world.server.close()
    world.log.close()


async def test_the_report_has_the_waits_of_the_core_and_the_stacks_of_workers_that_answer(world: World) -> None:
    link = Link(world.url, worker="rollout-0", role="rollout", token=TOKEN)
    await link.connect()
    await world.attached("rollout-0")
    world.runtime.own(asyncio.Event().wait(), "something-owned")  # type: ignore[arg-type]
    report = await world.why.report()
    assert [row["who"] for row in report["waits"]] == ["trainer", "new groups"]
    assert report["cycles"] == []
    assert report["stalled_for_s"] is None
    assert "task link rollout-0" in report["workers"]["rollout-0"]["stacks"]
    (channel,) = report["channels"]
    assert (channel["worker"], channel["connected"]) == ("rollout-0", True)
    assert "something-owned" in [task["name"] for task in report["controller"]["tasks"]]
    assert "eventlog" in report["controller"]["threads"]
    await link.close()


async def test_a_worker_whose_main_thread_is_busy_is_shown_in_what(world: World) -> None:
    link = await asyncio.to_thread(ThreadLink, world.url, "trainer-0/0", "trainer", token=TOKEN)
    await asyncio.to_thread(link.connect, 10.0)
    await world.attached("trainer-0/0")
    report = await world.why.report()
    assert "thread MainThread" in report["workers"]["trainer-0/0"]["stacks"]
    await asyncio.to_thread(link.close)


STOPPED = """
import asyncio, sys
from laminar import wire
from laminar.workers.link import Link
async def main():
    link = Link(sys.argv[1], worker="rollout-0", role="rollout", token=sys.argv[2])
    await link.connect()
    link.send(wire.Goodbye())
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_stopped_worker_is_reported_as_not_answering_and_two_who_ask_do_not_disturb_each_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whystalled, "ANSWER_S", 5.0)
    greeted = asyncio.Event()
    world.server.on_message = lambda channel, message, number: greeted.set() or 0  # type: ignore[func-returns-value]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STOPPED, world.url, TOKEN)
    try:
        await asyncio.wait_for(greeted.wait(), 40.0)
        world.server.on_message = world.on_message
        process.send_signal(signal.SIGSTOP)
        link = Link(world.url, worker="rollout-1", role="rollout", token=TOKEN)
        await link.connect()
        await world.attached("rollout-1")
        for report in await asyncio.gather(world.why.report(), world.why.report()):
            assert "no answer within 5 s" in report["workers"]["rollout-0"]["error"]
            assert report["workers"]["rollout-1"]["stacks"]
        await link.close()
    finally:
        process.kill()
        await asyncio.wait_for(process.wait(), 10.0)


async def test_the_command_shows_what_a_running_controller_answers(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.run.url.write_text(world.url)
    world.run.token.write_text(TOKEN)
    world.run.config.write_text("")
    assert await asyncio.to_thread(main, ["--why-stalled", str(world.run.path)]) == 0
    out = capsys.readouterr().out
    assert "who waits for what" in out
    assert "all its ranks" in out
    world.run.token.write_text("another")
    assert await asyncio.to_thread(main, ["--why-stalled", str(world.run.path)]) == 2
    assert "HTTP 401" in capsys.readouterr().err


async def test_a_run_that_is_over_or_whose_controller_died_is_told_apart(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.run.config.write_text("")
    assert await asyncio.to_thread(main, ["--why-stalled", str(world.run.path)]) == 2
    assert "the run is over, or has not begun" in capsys.readouterr().err
    world.run.url.write_text("http://127.0.0.1:9")
    world.run.token.write_text(TOKEN)
    assert await asyncio.to_thread(main, ["--why-stalled", str(world.run.path)]) == 2
    assert "--resume" in capsys.readouterr().err


async def test_a_report_that_is_written_down_names_rings_and_how_long_nothing_happened(world: World) -> None:
    world.runtime.core.state.stall.told = True
    world.runtime.core.state.stall.since = world.runtime.now() - 400.0
    await world.why.write()
    (path,) = world.run.logs.glob("why-stalled-*.txt")
    assert "nothing useful has happened for 6.7 min" in path.read_text()


def test_a_ring_comes_first_and_markup_of_others_is_shown_as_it_is() -> None:
    row = {"who": "a[b]", "what": "[red]", "on": ["b"], "for_s": 1.0, "given_up_in_s": None, "ends": ""}
    controller = {
        "tasks": [], "num_tasks": 0, "threads": {}, "events_not_on_disk": 0, "actions_waiting_for_the_disk": 0,
        "log_failure": "",
    }  # fmt: skip
    report: dict[str, Any] = {
        "run": "r", "at": 0.0, "finished": "", "stalled_for_s": 3.0, "waits": [row], "cycles": [["a", "b"]],
        "controller": controller, "channels": [], "workers": {"w": {"error": "no answer"}},
    }  # fmt: skip
    file = io.StringIO()
    waitreport.show(report, Console(file=file, width=120))
    assert "in a ring: a → b → a" in file.getvalue()
    assert "a[b]" in file.getvalue()
    assert "[red]" in file.getvalue()


def test_threads_that_share_a_name_are_all_told_the_main_thread_first_and_those_that_share_a_stack_once() -> None:
    over = threading.Event()

    def waits_elsewhere() -> None:
        over.wait()

    targets = [over.wait] * 3 + [waits_elsewhere]
    threads = [threading.Thread(target=target, name="alike", daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    told: list[dict[str, list[str]]] = []
    asks = threading.Thread(target=lambda: told.append(stacks.of_threads()))
    try:
        while sum(line.count("wait") > 0 for thread in threads for line in stacks.of_thread(thread.ident or 0)) < 4:
            time.sleep(0.01)  # until all of them have come there
        asks.start()
        asks.join(20.0)
    finally:
        over.set()
        for thread in threads:
            thread.join(20.0)
    assert next(iter(told[0])) == "MainThread"
    assert "alike and 2 more" in told[0]
    assert any("waits_elsewhere" in line for line in told[0]["alike"])


def test_stacks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TEXT_CHARACTERS_MAX", 50)
    text = stacks.of_process()
    assert len(text) < 100


# ---- the loop ----------------------------------------------------------------------------------------------


async def test_a_loop_that_stands_still_leaves_its_stacks_and_says_so_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopwatch, "BLOCKED_S", 0.5)
    monkeypatch.setattr(loopwatch, "BEAT_S", 0.1)
    told: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    watch = LoopWatch(tmp_path, lambda seconds: None if told.done() else told.set_result(seconds))
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)

    def blocks_the_loop() -> None:
        time.sleep(1.5)  # what a custom sampler that holds on to the loop does

    blocks_the_loop()
    assert await asyncio.wait_for(told, 30.0) >= 0.4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    watch.close()
    assert "blocks_the_loop" in watch.path.read_text()


async def test_a_loop_that_stands_still_is_shown_among_more_threads_than_are_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopwatch, "BLOCKED_S", 0.5)
    monkeypatch.setattr(loopwatch, "BEAT_S", 0.1)
    over, told = threading.Event(), asyncio.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(120)]
    watch = LoopWatch(tmp_path, lambda seconds: told.set())
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    try:
        for thread in threads:
            thread.start()

        def blocks_the_loop() -> None:
            while not watch.path.stat().st_size:
                time.sleep(0.1)
            time.sleep(1.0)

        blocks_the_loop()
        await asyncio.wait_for(told.wait(), 30.0)
    finally:
        over.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        watch.close()
    assert "blocks_the_loop" in watch.path.read_text()


async def test_a_loop_that_was_never_blocked_leaves_no_file(tmp_path: Path) -> None:
    watch = LoopWatch(tmp_path, lambda seconds: None)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    watch.close()
    assert not watch.path.exists()
