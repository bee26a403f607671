"""What people may look at and ask for, over real HTTP."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from core_world import Driver, settings

from laminar import wire
from laminar.controller.channels import Channels
from laminar.controller.operator import Operator
from laminar.core import events
from laminar.ids import WorkerId

pytestmark = pytest.mark.timeout(60)

REPLICAS = ("rollout-0", "rollout-1")


class World(Driver):
    """A fleet that generates, with its channels; what people ask for is posted to its core."""

    def __init__(self) -> None:
        super().__init__(settings())
        self.start(*REPLICAS)
        self.channels = Channels(1)
        for worker in REPLICAS:
            self.channels.greet(
                wire.Hello(protocol=wire.PROTOCOL, worker=WorkerId(worker), role="rollout", incarnation=1)
            )

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
