"""A network that is down for a while between a worker and its controller, one way or both: nothing is lost or done twice."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from link_proxy import Proxy

from laminar import wire
from laminar.config import Config, ControllerConfig
from laminar.ids import Version, WorkerId
from laminar.workers.link import Link
from tests.test_server import TOKEN, World, lost, received

pytestmark = pytest.mark.timeout(120)

FORGIVEN_S, NOT_FORGIVEN_S = 60.0, 0.3  # of silence: longer than any of these tests, and as short as can be
PARTITIONS = pytest.mark.parametrize("blocked", [("forward",), ("backward",), ("forward", "backward")], ids="+".join)


class Parted:
    """A worker's link, the controller's end of it, and what is between them."""

    def __init__(self, world: World, proxy: Proxy, link: Link) -> None:
        self.world, self.proxy, self.link = world, proxy, link
        self.num_said = 0

    def block(self, *directions: str) -> None:
        """These directions, and no others."""
        self.proxy.forward_blocked = "forward" in directions
        self.proxy.backward_blocked = "backward" in directions

    def say(self, num: int) -> None:
        """Both tell each other the next numbers."""
        for step in range(self.num_said, self.num_said + num):
            self.link.send(lost(step))
            self.world.channels.send(WorkerId("rollout-0"), wire.Publish(version=Version(step, 0)), 0)
        self.num_said += num

    async def everything_was_heard_once_and_in_order(self) -> None:
        expected = list(range(self.num_said))
        got = [await received(self.link) for _ in expected]
        assert [message.version.step for message in got if isinstance(message, wire.Publish)] == expected
        await self.world.until(lambda: len(self.world.steps()) >= self.num_said)
        assert self.world.steps() == expected
        self.world.channels.acknowledge(len(self.world.heard))
        await until(lambda: self.link.pending_bytes == 0)
        channel = self.world.channels.all()[0]
        await until(lambda: channel.session.num_pending == 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - threads count what it waits for
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def parted(timeout_s: float) -> AsyncIterator[Parted]:
    timings = ControllerConfig(heartbeat_s=0.05, heartbeat_timeout_s=timeout_s, orphan_timeout_s=FORGIVEN_S)
    world = World(timeout_s, Config(controller=timings))
    await world.server.start("127.0.0.1", 0)
    proxy = Proxy(world.server.port)
    link = Link(f"http://127.0.0.1:{proxy.port}", worker="rollout-0", role="rollout", token=TOKEN)
    await asyncio.wait_for(link.connect(), 60)
    between = Parted(world, proxy, link)
    try:
        yield between
    finally:
        between.block()
        await link.close()
        proxy.close()
        await asyncio.wait_for(world.server.close(), 60)


@PARTITIONS
async def test_silence_that_is_forgiven_is_nothing_to_anybody(blocked: tuple[str, ...]) -> None:
    async with parted(FORGIVEN_S) as between:
        between.say(5)
        between.block(*blocked)
        between.say(20)
        await until(lambda: between.proxy.num_kept_back >= len(blocked))
        between.block()
        await between.everything_was_heard_once_and_in_order()
        assert between.world.broken == between.world.returned == []


@PARTITIONS
async def test_silence_that_lasts_longer_breaks_the_connection_and_the_next_one_goes_on_where_it_was(
    blocked: tuple[str, ...],
) -> None:
    async with parted(NOT_FORGIVEN_S) as between:
        between.say(5)
        between.block(*blocked)
        between.say(20)
        await between.world.until(lambda: between.world.broken != [])
        between.say(5)
        between.block()
        await between.everything_was_heard_once_and_in_order()
        assert between.world.returned != []
