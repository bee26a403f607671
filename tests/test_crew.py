"""How the run's processes fare, told to the core: what an end of an ssh connection means."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from core_world import settings

from laminar import hosts, wire
from laminar.config import Config, ModelConfig, RunConfig, TaskConfig
from laminar.controller import rundir
from laminar.controller.channels import Channels
from laminar.controller.crew import Crew
from laminar.controller.plan import Process
from laminar.controller.runtime import Runtime
from laminar.core import events
from laminar.core.engine import Core
from laminar.ids import WorkerId
from laminar.remote import LOST

pytestmark = pytest.mark.timeout(20)

THERE = Process(name="rollout-0", role="rollout", address="node1", command=[], environment={}, ssh=["ssh"])


class World:
    """A crew of one process on another host, which has joined."""

    def __init__(self, directory: Path) -> None:
        self.core = Core(settings())
        self.events: list[Any] = []
        self.said: list[str] = []
        self.channels = Channels(boot=1)
        config = Config(run=RunConfig(dir=str(directory)), model=ModelConfig(path="m"), task=TaskConfig(dataset="d:d"))
        self.crew = Crew(
            config=config,
            hosts=[],
            run=rundir.create(config, ""),
            resume=None,
            found=None,
            token="secret",
            runtime=cast(Runtime, self),
            channels=self.channels,
            joined=set(),
            say=self.said.append,
        )
        self.crew.processes = {"rollout-0": THERE}
        hello = wire.Hello(protocol=wire.PROTOCOL, worker=WorkerId("rollout-0"), role="rollout", incarnation=7)
        self.channel, _ = self.channels.greet(hello)

    def own(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """What would start a process is not begun."""
        coroutine.close()

    def post(self, event: events.AnyEvent) -> int:
        self.events.append(event)
        return 0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_process_that_ssh_finds_no_more_goes_on_while_it_is_heard(world: World) -> None:
    world.channel.attach(web.WebSocketResponse(), None)
    world.crew._on_exit("rollout-0", LOST, "")
    assert world.events == []
    assert world.said == ["ssh to node1 finds rollout-0 no more; it goes on as long as it is heard by its own channel"]


def test_a_process_that_neither_ssh_nor_its_channel_finds_is_lost(world: World) -> None:
    world.crew._on_exit("rollout-0", LOST, "last words")
    (lost,) = world.events
    assert (lost.worker, lost.incarnation) == ("rollout-0", 7)
    assert lost.reason == "lost: ssh to node1 finds it no more; its last lines:\n    last words"


def test_a_process_that_ended_is_lost_though_its_channel_is_open_still(world: World) -> None:
    world.channel.attach(web.WebSocketResponse(), None)
    world.crew._on_exit("rollout-0", 1, "")
    (lost,) = world.events
    assert lost.reason == "ended with exit code 1 without a word"


async def test_a_replica_that_an_operator_started_and_that_fails_to_join_does_not_end_the_run(world: World) -> None:
    world.crew._hosts = hosts.parse("localhost trainer\nlocalhost rollout\n", "hosts.txt")
    process = world.crew.join("")
    assert process.name == "rollout-1"
    world.crew._on_exit("rollout-1", 1, "no memory")
    assert world.events == []
    assert world.said == ["alarm: join-failed: rollout-1 ended with exit code 1; its last lines:\n    no memory"]
    world.crew.check_started()
    assert "rollout-1" not in str(world.events)


async def test_a_replica_that_an_operator_started_is_lost_like_any_other_once_it_has_joined(world: World) -> None:
    world.crew._hosts = hosts.parse("localhost trainer\nlocalhost rollout\n", "hosts.txt")
    world.crew.join("")
    world.crew._joined.add("rollout-1")
    world.crew._on_exit("rollout-1", 1, "")
    assert [event.worker for event in world.events] == ["rollout-1"]
