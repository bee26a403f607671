"""What pages are told: what has changed, once; and open pages over real WebSockets, slow ones among them."""

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from web_world import TOKEN, World, served, until

from laminar.controller.web import board as board_module
from laminar.controller.web import stream
from laminar.controller.web.board import CURVES, Cursor
from laminar.controller.web.journal import is_of_run, is_routine
from laminar.core import events, story
from laminar.core.records import Evaluation
from laminar.core.story import Row
from laminar.ids import Version, WorkerId

pytestmark = pytest.mark.timeout(60)

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with served(World(tmp_path)) as world:
        yield world


async def frame(world: World, cursor: Cursor) -> dict[str, Any]:
    await world.dashboard._look()
    await world.dashboard._board.refresh()
    told: dict[str, Any] = json.loads(world.dashboard._board.frame(cursor, world.at)[0])
    return told


async def test_a_page_is_told_everything_first_and_then_what_has_changed(world: World) -> None:
    world.start("r0", "r1")
    cursor = Cursor()
    first = await frame(world, cursor)
    assert first["sections"]["run"] == {"name": "spelling"}
    assert first["sections"]["settings"] == [["trainer.lr", "1e-05", "1e-06"]]
    assert [row[0] for row in first["sections"]["lanes"]] == ["r0", "r1"]
    assert first["sections"]["fleet"]["generating"] == [4, 4]
    assert first["sections"]["metric_names"] == list(CURVES)
    assert [mark[1:] for mark in first["logs"]["marks"]] == [["version", "v0"]]
    assert await frame(world, cursor) == {"at": first["at"], "sections": {}, "logs": {}}
    world.complete_all("r0")
    second = await frame(world, cursor)
    assert "run" not in second["sections"]
    assert second["sections"]["ledger"]["trajectories"]["leased"] == 4
    assert "marks" not in second["logs"]


async def test_what_is_told_is_what_the_core_has(world: World) -> None:
    world.start("r0")
    world.complete_all("r0")
    world.step_with(reward__mean=0.5)
    told = (await frame(world, Cursor()))["sections"]
    state = world.core.state
    assert told["progress"]["step"] == state.trainer.step == 1
    assert told["ledger"]["trajectories"]["total"] == state.ledger.trajectories.total
    assert told["ledger"]["tokens"]["closed"]
    assert told["metrics"] == world.telemetry.history[-1]
    assert told["relays"]["newest"] == "v0"
    assert sum(told["buffer"]["ages_s"]) == sum(num for _, num in told["buffer"]["ages_steps"]) == len(state.buffer)
    assert told["staleness"] == {"steps": 1, "s_gen": [[0, 4]], "residence": [[0, 4]], "s_train": [[0, 4]]}
    complete = [group.id for group in state.groups.values() if group.completed_at]
    assert sorted(group[0] for group in told["samples"]) == sorted(story.group(group) for group in complete)


async def test_a_page_that_is_told_while_the_controller_looks_misses_nothing(world: World) -> None:
    world.start("r0")
    board, cursor, known = world.dashboard._board, Cursor(), {}
    looking = asyncio.create_task(board.refresh())
    while not looking.done():
        known |= json.loads(board.frame(cursor, world.at)[0])["sections"]
        await asyncio.sleep(0)
    known |= json.loads(board.frame(cursor, world.at)[0])["sections"]
    assert known == json.loads(board.frame(Cursor(), world.at)[0])["sections"]


async def test_a_log_comes_in_pieces_and_each_row_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "ROWS_AT_ONCE", 2)
    world.start("r0")
    for number in range(1, 4):
        world.complete_all("r0")
        world.step_with()
        world.ready(Version(number, 0))
        if world.core.state.replicas[WorkerId("r0")].target:
            world.refreshed("r0")
    board, cursor, marks, more = world.dashboard._board, Cursor(), [], True
    while more:
        data, more = board.frame(cursor, world.at)
        marks += json.loads(data)["logs"].get("marks", [])
    assert marks == [list(mark) for mark in world.dashboard._lanes.marks.since(0, 99)[1]]
    assert len(marks) > 4


async def test_what_an_operator_holds_and_has_changed_is_told(world: World) -> None:
    world.start("r0")
    world.send(events.HoldChanged(pass_name="sample", held=True, mode="pause"))
    world.send(events.SettingsChanged(changes={"buffer_groups_max": 9}))
    told = (await frame(world, Cursor()))["sections"]
    assert told["operator"]["holds"] == ["the pass sample is paused by an operator"]
    assert told["operator"]["settings"] == {"buffer.max_groups": 9}
    assert (told["verdict"]["limit"], told["verdict"]["headline"]) == ("held", "The run is held")


async def test_evaluations_are_told_once_they_are_done(world: World) -> None:
    world.start("r0")
    assert (await frame(world, Cursor()))["sections"]["progress"]["evaluations"] == []
    done = Evaluation(id=1, name="before", version=Version(0, 0), done=True, accuracy=0.25, score=0.5, num_prompts=8)
    world.core.state.evaluations += [done, Evaluation(id=2, name="after")]
    told = (await frame(world, Cursor()))["sections"]["progress"]["evaluations"]
    assert told == [["before", "v0", 0.25, 0.5, 8]]


async def test_a_controller_that_takes_over_tells_earlier_alarms_and_when_the_run_began(tmp_path: Path) -> None:
    world = World(tmp_path)
    alarms = [(50.0, "early", "a"), (60.0, "late", "b"), (101.0, "own", "c")]
    with contextlib.closing(sqlite3.connect(tmp_path / "run.db")) as database, database:
        database.execute("INSERT INTO boots (boot, started) VALUES (2, 100.0)")
        database.executemany("INSERT INTO alarms VALUES (?, ?, ?)", alarms)
    async with served(world):
        board = world.dashboard._board
        await until(lambda: "began" in board._sections)
        told: dict[str, Any] = json.loads(board.frame(Cursor(), world.at)[0])
    assert told["sections"]["began"] == 1.0
    assert [row[:4] for row in told["logs"]["journal"]] == [
        [50.0, "alarm", "a", ["early"]], [60.0, "alarm", "b", ["late"]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("subjects", "shown"),
    [(("g1.2", "rollout-0"), False), (("t1.2",), False), (("rollout-0", "v3"), False), (("rollout-0",), True),
     (("v3",), True), (("s3",), True), (("rollout-0", "rollout-1", "t1.2"), False), ((), True)],
)  # fmt: skip
def test_the_journal_leaves_out_what_happens_to_each_sample_and_each_pull(
    subjects: tuple[str, ...], shown: bool
) -> None:
    assert is_of_run(Row(1, 0.0, "something", subjects)) is shown


def test_the_journal_tells_what_every_step_brings_from_the_rest() -> None:
    for because, subjects, expected in (
        ("StepFinished of trainer-0/0", ("s3",), True),
        ("VersionReady", ("v3.b1",), True),
        ("StepFailed of trainer-0/0", ("s3",), False),
        ("CheckpointSaved of trainer-0/0", ("s3",), False),
        ("ReplicaReported of rollout-0", ("rollout-0",), False),
    ):
        assert is_routine(Row(1, 0.0, "something", subjects, because)) is expected, because


# ---- open pages --------------------------------------------------------------------------------------------


async def test_an_open_page_hears_of_a_step_without_asking(world: World) -> None:
    world.start("r0")
    async with (
        aiohttp.ClientSession(world.url, headers=HEADERS) as session,
        session.ws_connect("/v1/dashboard") as page,
    ):
        await _until_step(page, 0)
        world.complete_all("r0")
        world.step_with(reward__mean=0.25)
        told = await _until_step(page, 1)
        assert told["metrics"]["reward/mean"] == 0.25


async def _until_step(page: aiohttp.ClientWebSocketResponse, step: int) -> dict[str, Any]:
    known: dict[str, Any] = {}
    async with asyncio.timeout(30):
        while known.get("progress", {}).get("step") != step:
            known |= json.loads(await page.receive_bytes())["sections"]
    return known


async def test_a_page_that_does_not_read_holds_up_nobody_and_is_hung_up_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SEND_S", 1.0)
    world.start("r0")
    board, sockets = world.dashboard._board, world.dashboard._stream._sockets
    board.put("run", {"name": "x" * (16 << 20)})  # more than sockets hold for somebody who does not read
    reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port, limit=1024)
    writer.write(
        f"GET /v1/dashboard HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    )
    await until(lambda: any(socket._req.transport.get_write_buffer_size() for socket in sockets))  # type: ignore[union-attr]
    board.put("run", {"name": "small again"})
    async with (
        aiohttp.ClientSession(world.url, headers=HEADERS) as session,
        session.ws_connect("/v1/dashboard") as page,
    ):
        await _until_step(page, 0)
        world.complete_all("r0")
        world.step_with()
        await _until_step(page, 1)
        await until(lambda: len(sockets) == 1)
    writer.close()
    del reader


async def test_no_more_pages_than_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CLIENTS_MAX", 1)
    async with aiohttp.ClientSession(world.url, headers=HEADERS) as session, session.ws_connect("/v1/dashboard"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect("/v1/dashboard")
        assert refused.value.status == 503


async def test_open_pages_see_the_end_before_they_are_hung_up_on(world: World) -> None:
    world.start("r0")
    async with (
        aiohttp.ClientSession(world.url, headers=HEADERS) as session,
        session.ws_connect("/v1/dashboard") as page,
    ):
        await _until_step(page, 0)
        world.lost("trainer-0/0")
        assert world.core.state.finished
        closing = asyncio.create_task(world.dashboard.close())
        known: dict[str, Any] = {}
        async with asyncio.timeout(30):
            async for message in page:
                known |= json.loads(message.data)["sections"]
        await closing
    assert known["progress"]["finished"] == world.core.state.finished
    assert known["verdict"]["limit"] == "over"
