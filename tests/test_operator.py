"""What people may look at and ask for, over real HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from core_world import Driver, settings

from laminar import wire
from laminar.controller.channels import Channels
from laminar.controller.operator import NOT_ON_DISK, Operator
from laminar.core import events
from laminar.ids import WorkerId

pytestmark = pytest.mark.timeout(60)

REPLICAS = ("rollout-0", "rollout-1")


class World(Driver):
    """A fleet that generates, with its channels; what people ask for is posted to its core."""

    def __init__(self) -> None:
        super().__init__(settings())
        self.began, self.disk_works, self.asked_of_disk = self.at, True, 0
        self.start(*REPLICAS)
        self.channels = Channels(1)
        for worker in REPLICAS:
            self.channels.greet(
                wire.Hello(protocol=wire.PROTOCOL, worker=WorkerId(worker), role="rollout", incarnation=1)
            )

    def now(self) -> float:
        return self.at

    async def reaches_disk(self, seq: int, timeout_s: float) -> bool:
        self.asked_of_disk = seq
        return self.disk_works

    def post(self, event: events.AnyEvent) -> int:
        self.send(event)
        return self.core.state.seq


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def client(world: World) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    operator = Operator(world, world.channels, status=lambda: {"step": 7}, why_stalled=_nothing)
    app = web.Application()
    app.add_routes(operator.routes())
    async with TestClient(TestServer(app)) as client:
        yield client


async def _nothing() -> dict[str, object]:
    return {"waits": []}


async def _answer(response: ClientResponse) -> tuple[int, object]:
    return response.status, await response.json()


async def test_the_status_is_that_of_now(client: TestClient[web.Request, web.Application]) -> None:
    assert await _answer(await client.get("/v1/status")) == (200, {"step": 7})
    assert await _answer(await client.get("/v1/why-stalled")) == (200, {"waits": []})


async def test_a_replica_is_drained_by_its_name_unless_it_is_the_last(
    client: TestClient[web.Request, web.Application], world: World
) -> None:
    state = world.core.state
    assert await _answer(await client.post("/v1/drain/rollout-1")) == (200, {"draining": "rollout-1"})
    assert state.replicas[WorkerId("rollout-1")].draining
    status, body = await _answer(await client.post("/v1/drain/rollout-0"))
    assert status == 409
    assert "it is the last replica that admits groups" in str(body)
    assert not state.replicas[WorkerId("rollout-0")].draining
    status, body = await _answer(await client.post("/v1/drain/rollout-4"))
    assert status == 404
    assert "there are: rollout-0, rollout-1" in str(body)


async def test_a_line_of_the_console_is_answered_by_the_core_of_now(
    client: TestClient[web.Request, web.Application], world: World
) -> None:
    status, reply = await _reply(client, b'{"line": "fleet"}')
    assert status == 200
    rows = [row[0] for row in reply["answer"]["tables"][0]["rows"]]
    assert rows == list(world.core.state.replicas)
    assert reply["place"]["target"] == "live"
    assert reply["names"]["replica"] == list(REPLICAS)


async def test_what_a_line_changes_is_an_event_and_the_next_look_sees_it(
    client: TestClient[web.Request, web.Application], world: World
) -> None:
    _, reply = await _reply(client, b'{"line": "pause repack"}')
    assert reply["answer"]["facts"] == {"event": str(world.core.state.seq)}
    assert list(world.core.state.holds) == ["repack"]
    look = await (await client.get("/v1/console")).json()
    assert look["place"]["paused"] == ["repack"]


async def test_what_a_line_changes_is_on_disk_before_it_is_answered_or_the_answer_says_that_it_is_not(
    client: TestClient[web.Request, web.Application], world: World
) -> None:
    await _reply(client, b'{"line": "fleet"}')
    assert world.asked_of_disk == 0, "a look waits for nothing"
    _, reply = await _reply(client, b'{"line": "pause repack"}')
    assert world.asked_of_disk == world.seq
    assert NOT_ON_DISK not in reply["answer"]["lines"]
    world.disk_works = False
    _, reply = await _reply(client, b'{"line": "resume"}')
    assert reply["answer"]["lines"][-1] == NOT_ON_DISK
    assert not world.core.state.holds


@pytest.mark.parametrize("body", [b"", b"fleet", b'{"line": 3}', b"\xff"])
async def test_a_body_that_is_no_line_is_refused_with_what_to_write(
    client: TestClient[web.Request, web.Application], body: bytes
) -> None:
    status, reply = await _reply(client, body)
    assert status == 400
    assert 'write {"line": "status"}' in reply["error"]


async def test_a_line_that_is_no_command_is_answered_not_raised(
    client: TestClient[web.Request, web.Application], world: World
) -> None:
    seq = world.core.state.seq
    for line, error in (
        ("fleeet", "did you mean fleet?"),
        ("x" * 5000, "at most 4096"),
        ("step", "make it wait for you"),
    ):
        _, reply = await _reply(client, json.dumps({"line": line}).encode())
        assert error in reply["answer"]["error"]
    assert world.core.state.seq == seq


async def _reply(client: TestClient[web.Request, web.Application], body: bytes) -> tuple[int, dict[str, Any]]:
    response = await client.post("/v1/console", data=body)
    return response.status, await response.json()
