"""The controller's end of the channels, with real links and raw WebSocket peers on real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import WSMessage, WSMsgType, web

from laminar import wire
from laminar.channel import Session
from laminar.config import Config, ControllerConfig
from laminar.controller import channels
from laminar.controller import server as server_module
from laminar.controller.channels import Channel, Channels
from laminar.controller.eventlog import EventLog
from laminar.controller.server import Server
from laminar.controller.tokens import TokenStore
from laminar.errors import StartError
from laminar.ids import GroupId, TrajectoryId, Version, WorkerId
from laminar.workers.link import Link, LinkRefused, TokensUnavailable
from tests.test_tokens import report

pytestmark = pytest.mark.timeout(60)

TOKEN = "token-of-this-run"
CONFIG = Config(controller=ControllerConfig(heartbeat_s=0.05, heartbeat_timeout_s=5.0, orphan_timeout_s=5.0))
BOOT = 3


class World:
    """A server that hears; every message becomes the next event, durable when the test says so."""

    def __init__(self, timeout_s: float = 5.0, config: Config = CONFIG) -> None:
        self.channels = Channels(BOOT)
        self.server = Server(
            self.channels, token=TOKEN, run_id="test", config=wire.encode(config), heartbeat_s=0.05, timeout_s=timeout_s
        )
        self.heard: list[tuple[str, wire.Message]] = []
        self.broken: list[tuple[str, int]] = []
        self.returned: list[tuple[str, int]] = []
        self.changed = asyncio.Condition()
        self.server.on_message = self._on_message
        self.server.on_broken = lambda c: self._note(self.broken, (c.worker, c.incarnation))
        self.server.on_returned = lambda c: self._note(self.returned, (c.worker, c.incarnation))
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def _on_message(self, channel: Channel, message: wire.Message, number: int) -> int:
        self._note(self.heard, (channel.worker, message))
        return len(self.heard)

    def _note(self, into: list, what: object) -> None:
        into.append(what)
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(condition)

    def steps(self, worker: str = "rollout-0") -> list[int]:
        return [m.version.step for name, m in self.heard if name == worker and isinstance(m, wire.VersionLost)]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.server.start("127.0.0.1", 0)
    yield world
    await asyncio.wait_for(world.server.close(), 60)


@contextlib.asynccontextmanager
async def linked(world: World, worker: str = "rollout-0") -> AsyncIterator[Link]:
    link = Link(world.url, worker=worker, role="rollout", token=TOKEN)
    await asyncio.wait_for(link.connect(), 60)
    try:
        yield link
    finally:
        await link.close()


def lost(step: int) -> wire.VersionLost:
    return wire.VersionLost(version=Version(step, 0), reason="numbered")


async def received(link: Link) -> wire.Message:
    return await asyncio.wait_for(link.receive(), 60)


def hello(**changes: object) -> wire.Hello:
    standard = {"protocol": wire.PROTOCOL, "worker": WorkerId("rollout-0"), "role": "rollout", "incarnation": 10}
    return wire.Hello(**(standard | changes))  # type: ignore[arg-type]


class Backlog:
    """A socket that has everything there already, so that reading it never waits."""

    def __init__(self, messages: list[wire.Message]) -> None:
        session = Session(wire.WorkerEnvelope)
        self._frames = [WSMessage(WSMsgType.BINARY, session.reliable(message), "") for message in messages]

    async def receive(self) -> WSMessage:
        return self._frames.pop(0) if self._frames else WSMessage(WSMsgType.CLOSED, None, "")


async def test_a_worker_with_much_to_say_lets_others_come_between(world: World) -> None:
    channel, _ = world.channels.greet(hello())
    socket = Backlog([lost(step) for step in range(50)])
    channel.socket = socket  # type: ignore[assignment]
    heard_at_turns: list[int] = []

    async def other() -> None:
        while len(world.heard) < 50:
            heard_at_turns.append(len(world.heard))
            await asyncio.sleep(0)

    turns = asyncio.create_task(other())
    assert await world.server._receive(channel, socket) == "closed by the worker"  # type: ignore[arg-type]
    await turns
    assert len(set(heard_at_turns)) > 40
    channel.socket = None


class Peer:
    """A worker by hand: raw frames over a real WebSocket."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.session = Session(wire.WorkerEnvelope)

    async def say(self, message: wire.Message) -> None:
        await self.ws.send_bytes(self.session.reliable(message))

    async def greet(self, message: wire.Hello) -> wire.ControllerEnvelope:
        await self.ws.send_bytes(self.session.unreliable(message))
        return await self.next()

    async def next(self) -> wire.ControllerEnvelope:
        """The next frame, heartbeats included."""
        frame = await asyncio.wait_for(self.ws.receive(), 60)
        assert frame.type is WSMsgType.BINARY, frame
        return wire.decode_from_controller(frame.data)

    async def message(self) -> tuple[int, wire.Message]:
        """The next frame that is no heartbeat: (number, message)."""
        while True:
            envelope = await self.next()
            if not isinstance(envelope.message, wire.Heartbeat):
                return envelope.number, envelope.message

    async def acknowledged(self, number: int) -> None:
        while (await self.next()).received < number:
            pass

    async def end(self) -> None:
        """Read until the server hangs up."""
        while (await asyncio.wait_for(self.ws.receive(), 60)).type is WSMsgType.BINARY:
            pass

    def cut(self) -> None:
        """As a dead network does it: no closing frame."""
        self.ws.get_extra_info("socket")  # the connection exists
        self.ws._response.connection.transport.abort()


@contextlib.asynccontextmanager
async def dialled(world: World) -> AsyncIterator[Peer]:
    timeout = aiohttp.ClientWSTimeout(ws_close=1.0)
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
        http.ws_connect(f"{world.url}/v1/channel", timeout=timeout, max_msg_size=0) as ws,
    ):
        yield Peer(ws)


# ---- who may come in ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", b"Bearer \xff\xfe".decode("latin1")],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "channel"), ("POST", "tokens"), ("GET", "status"), ("GET", "nothing")]
)
async def test_every_route_needs_the_token(world: World, header: str | None, method: str, path: str) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, f"{world.url}/v1/{path}", headers=headers) as answer,
    ):
        text = await answer.text()
        assert answer.status == 401
        assert "token" in text
        assert TOKEN not in text


async def test_a_header_that_is_no_text_is_refused(world: World) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
    writer.write(
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\x80\r\nConnection: close\r\n\r\n"
    )
    assert (await asyncio.wait_for(reader.readline(), 10)).startswith((b"HTTP/1.1 401", b"HTTP/1.1 400"))
    writer.close()
    await writer.wait_closed()


async def test_a_route_for_people_is_open_to_who_has_the_token() -> None:
    async def look(request: web.Request) -> web.Response:
        return web.json_response({"step": 7})

    world = World()
    world.server.routes = [web.get("/v1/look", look)]
    await world.server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{world.url}/v1/look") as answer:
            assert answer.status == 401
        async with http.get(f"{world.url}/v1/look", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert await answer.json() == {"step": 7}
    await world.server.close()


async def test_an_occupied_port_is_a_start_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*controller\.port="):
            await World().server.start("127.0.0.1", port)


async def test_an_address_that_is_not_ours_is_a_start_error() -> None:
    with pytest.raises(StartError, match="cannot listen on 192"):
        await World().server.start("192.0.2.1", 0)


# ---- hello -------------------------------------------------------------------------------------------------


async def test_a_worker_is_welcomed_with_the_boot_number_and_the_configuration(world: World) -> None:
    async with dialled(world) as peer:
        answer = (await peer.greet(hello())).message
        assert isinstance(answer, wire.Welcome)
        assert (answer.protocol, answer.boot, answer.run_id, answer.received) == (wire.PROTOCOL, BOOT, "test", 0)
        assert msgspec.msgpack.decode(answer.config, type=Config) == CONFIG
        assert world.channels.workers("rollout") == ["rollout-0"]
        assert world.channels.workers("trainer") == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": wire.PROTOCOL + 1}, "install the same Laminar"),
        ({"incarnation": 5}, "given up: it hung"),
        ({"incarnation": 4}, "given up: it hung"),
        ({"worker": WorkerId("rollout-1"), "incarnation": 9}, "a newer process of this name is here"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_with_the_reason(
    world: World, changes: dict[str, object], reason: str
) -> None:
    world.channels.fence(WorkerId("rollout-0"), 5, "it hung")
    async with dialled(world) as newer, dialled(world) as peer:
        await newer.greet(hello(worker=WorkerId("rollout-1")))
        answer = (await peer.greet(hello(**changes))).message
        assert isinstance(answer, wire.Refused)
        assert reason in answer.reason
        await peer.end()
    assert world.heard == []


@pytest.mark.parametrize("first", [b"", b"\xc1", b"junk", "text", None])
async def test_a_peer_that_does_not_say_hello_is_hung_up_on(world: World, first: bytes | str | None) -> None:
    async with dialled(world) as peer:
        if first is None:
            await peer.say(lost(1))
        elif isinstance(first, str):
            await peer.ws.send_str(first)
        else:
            await peer.ws.send_bytes(first)
        await peer.end()
    async with linked(world):
        pass
    assert world.steps() == []


async def test_a_worker_that_obeys_a_newer_controller_is_hung_up_on_and_not_told_to_end(world: World) -> None:
    async with dialled(world) as peer:
        await peer.ws.send_bytes(wire.encode(wire.WorkerEnvelope(0, 0, hello(boot=BOOT + 1))))
        await peer.end()
    assert world.channels.all() == []


async def test_a_peer_that_says_nothing_is_hung_up_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HELLO_TIMEOUT_S", 0.05)
    async with dialled(world) as peer:
        await peer.end()
    assert world.channels.all() == []


async def test_a_peer_that_leaves_before_its_hello_does_no_harm(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with dialled(world):
        pass
    async with dialled(world) as peer:
        peer.cut()
    async with linked(world) as link:
        link.send(lost(1))
        await world.until(lambda: world.steps() == [1])
    assert "Traceback" not in caplog.text


# ---- frames ------------------------------------------------------------------------------------------------


async def test_messages_arrive_in_order_both_ways(world: World) -> None:
    async with linked(world) as link:
        for step in range(100):
            link.send(lost(step))
            world.channels.send(WorkerId("rollout-0"), wire.Publish(version=Version(step, 0)), 0)
        assert [(await received(link)).version.step for _ in range(100)] == list(range(100))
        await world.until(lambda: world.steps() == list(range(100)))


async def test_a_frame_is_acknowledged_only_when_its_event_is_durable(world: World) -> None:
    async with dialled(world) as peer:
        await peer.greet(hello())
        for step in range(3):
            await peer.say(lost(step))
        await world.until(lambda: len(world.heard) == 3)
        for _ in range(4):
            assert (await peer.next()).received == 0, "acknowledged before anything was on disk"
        world.channels.acknowledge(2)
        await peer.acknowledged(2)
        for _ in range(4):
            assert (await peer.next()).received == 2
        world.channels.acknowledge(3)
        await peer.acknowledged(3)


async def test_many_frames_are_acknowledged_without_waiting_for_a_heartbeat(world: World) -> None:
    world.server._heartbeat_s = 3600.0
    async with dialled(world) as peer:
        await peer.greet(hello())
        for step in range(channels.ACKNOWLEDGE_EVERY):
            await peer.say(lost(step))
        await world.until(lambda: len(world.heard) == channels.ACKNOWLEDGE_EVERY)
        world.channels.acknowledge(len(world.heard))
        await peer.acknowledged(channels.ACKNOWLEDGE_EVERY)


async def test_a_link_forgets_its_frames_when_a_real_log_has_them(world: World, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run.db", 0.005)
    log.begin_boot(1.0, 1, "here", 0)

    def on_message(channel: Channel, message: wire.Message, number: int) -> int:
        seq = world._on_message(channel, message, number)
        log.append(seq, 0.0, type(message).__name__, b"")
        return seq

    world.server.on_message = on_message
    async with linked(world) as link:
        for step in range(10):
            link.send(lost(step))
        await world.until(lambda: len(world.heard) == 10)
        assert link.pending_bytes > 0
        log.start(world.channels.acknowledge)
        async with asyncio.timeout(60):
            while link.pending_bytes:  # noqa: ASYNC110 - a link has no event for it
                await asyncio.sleep(0.01)
    await asyncio.to_thread(log.close)


async def test_an_unnumbered_frame_cannot_turn_acknowledgements_back(world: World) -> None:
    async with dialled(world) as peer:
        await peer.greet(hello())
        await peer.say(lost(1))
        await peer.ws.send_bytes(peer.session.unreliable(lost(2)))
        await world.until(lambda: len(world.heard) == 2)
        world.channels.acknowledge(2)
        await peer.acknowledged(1)
        assert (await peer.next()).received == 1


def junk_frames() -> dict[str, bytes | str]:
    return {
        "empty": b"",
        "no msgpack": b"\xc1",
        "cut short": wire.encode(wire.WorkerEnvelope(1, 0, lost(1)))[:-3],
        "unknown kind": wire.encode([1, 0, {"type": "Nonsense"}]),
        "wrong field": wire.encode([1, 0, {"type": "StepDone", "step": "x", "attempt": 1, "metrics": {}}]),
        "a gap": wire.encode(wire.WorkerEnvelope(5, 0, lost(1))),
        "acknowledges what was never sent": wire.encode(wire.WorkerEnvelope(1, 99, lost(1))),
        "text": "hello",
    }


@pytest.mark.parametrize("kind", junk_frames())
async def test_a_broken_frame_closes_that_channel_only_and_the_worker_is_reported(world: World, kind: str) -> None:
    frame = junk_frames()[kind]
    async with linked(world, "rollout-1") as good, dialled(world) as bad:
        await bad.greet(hello())
        await (bad.ws.send_str(frame) if isinstance(frame, str) else bad.ws.send_bytes(frame))
        await world.until(lambda: bool(world.heard))
        name, message = world.heard[0]
        assert name == "rollout-0"
        assert isinstance(message, wire.WorkerFailed)
        assert message.reason.startswith("protocol error: ")
        await bad.end()
        good.send(lost(7))
        await world.until(lambda: world.steps("rollout-1") == [7])
        assert good.connected


async def test_a_frame_too_large_closes_that_channel_and_the_worker_is_reported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 10_000)
    async with dialled(world) as peer:
        await peer.greet(hello())
        await peer.ws.send_bytes(b"x" * 20_000)
        await world.until(lambda: bool(world.heard))
        await peer.end()
    message = world.heard[0][1]
    assert isinstance(message, wire.WorkerFailed)
    assert "at most 10000 bytes" in message.reason


# ---- reconnects --------------------------------------------------------------------------------------------


async def test_a_connection_that_breaks_is_reported_and_so_is_its_return(world: World) -> None:
    async with dialled(world) as peer:
        await peer.greet(hello())
        peer.cut()
        await world.until(lambda: world.broken == [("rollout-0", 10)])
    async with dialled(world) as peer:
        await peer.greet(hello(boot=BOOT))
        await world.until(lambda: world.returned == [("rollout-0", 10)])


async def test_a_goodbye_is_no_broken_connection(world: World) -> None:
    async with linked(world) as link:
        link.send(lost(1))
    await world.until(lambda: len(world.heard) == 2)
    assert world.channels.workers("rollout") == []
    async with linked(world, "rollout-1"):
        pass
    assert world.broken == []


async def test_frames_are_sent_again_after_a_reconnect_in_order_and_only_those_not_received(world: World) -> None:
    name = WorkerId("rollout-0")
    async with dialled(world) as peer:
        await peer.greet(hello())
        for step in (1, 2):
            world.channels.send(name, wire.Publish(version=Version(step, 0)), 0)
        assert [(await peer.message())[0] for _ in range(2)] == [1, 2]
        peer.cut()
        await world.until(lambda: bool(world.broken))
    for step in (3, 4):
        world.channels.send(name, wire.Publish(version=Version(step, 0)), 0)
    async with dialled(world) as peer:
        await peer.greet(hello(boot=BOOT, received=1))
        world.channels.send(name, wire.Publish(version=Version(5, 0)), 0)
        assert [(await peer.message())[0] for _ in range(4)] == [2, 3, 4, 5]


async def test_what_a_worker_received_from_another_boot_says_nothing_about_our_frames(world: World) -> None:
    name = WorkerId("rollout-0")
    async with dialled(world) as peer:
        await peer.greet(hello(boot=BOOT - 1, received=500))
        world.channels.send(name, wire.Publish(version=Version(1, 0)), 0)
        await world.until(lambda: True)
        peer.cut()  # before it could note the new boot
        await world.until(lambda: bool(world.broken))
    async with dialled(world) as peer:
        welcome = await peer.greet(hello(boot=BOOT - 1, received=500))
        assert isinstance(welcome.message, wire.Welcome)
        assert await peer.message() == (1, wire.Publish(version=Version(1, 0)))


async def test_a_frame_that_comes_twice_is_heard_once(world: World) -> None:
    async with dialled(world) as peer:
        await peer.greet(hello())
        frame = peer.session.reliable(lost(1))
        await peer.ws.send_bytes(frame)
        await world.until(lambda: world.steps() == [1])
        session = peer.session
        peer.cut()
        await world.until(lambda: bool(world.broken))
    async with dialled(world) as peer:
        peer.session = session
        welcome = (await peer.greet(hello(boot=BOOT))).message
        assert isinstance(welcome, wire.Welcome)
        assert welcome.received == 1
        await peer.ws.send_bytes(frame)
        await peer.say(lost(2))
        await world.until(lambda: 2 in world.steps())
        assert world.steps() == [1, 2]


async def test_the_newer_connection_of_a_process_takes_over_and_the_old_one_is_no_loss(world: World) -> None:
    name = WorkerId("rollout-0")
    async with dialled(world) as old, dialled(world) as new:
        await old.greet(hello())
        await new.greet(hello(boot=BOOT))
        world.channels.send(name, wire.Publish(version=Version(1, 0)), 0)
        assert await new.message() == (1, wire.Publish(version=Version(1, 0)))
        old.cut()
        await new.say(lost(1))
        await world.until(lambda: world.steps() == [1])
        world.channels.send(name, wire.Publish(version=Version(2, 0)), 0)
        assert (await new.message())[0] == 2
    assert world.broken in ([], [("rollout-0", 10)])  # at most that of the new one, when it left


async def test_a_newer_process_replaces_an_older_one_whose_connection_is_gone(world: World) -> None:
    name = WorkerId("rollout-0")
    async with dialled(world) as old:
        await old.greet(hello())
        world.channels.send(name, wire.Publish(version=Version(1, 0)), 0)
        assert (await old.message())[0] == 1
        old.cut()
        await world.until(lambda: world.broken == [("rollout-0", 10)])
    async with dialled(world) as new:
        await new.greet(hello(incarnation=11))
        world.channels.send(name, wire.Publish(version=Version(2, 0)), 0)
        assert await new.message() == (1, wire.Publish(version=Version(2, 0))), "a fresh session begins with 1"
        await new.say(lost(1))
        await world.until(lambda: world.steps() == [1])
        assert world.returned == []


async def test_a_process_under_the_name_of_a_living_one_is_refused(world: World) -> None:
    async with dialled(world) as first, dialled(world) as second:
        await first.greet(hello())
        answer = (await second.greet(hello(incarnation=11))).message
        assert isinstance(answer, wire.Refused)
        assert "rollout-0 is connected already" in answer.reason
        await second.end()
        await first.say(lost(1))
        await world.until(lambda: world.steps() == [1])
        assert world.broken == []


async def test_a_fenced_worker_is_told_to_stop_and_refused_afterwards(world: World) -> None:
    link = Link(world.url, worker="rollout-0", role="rollout", token=TOKEN)
    await asyncio.wait_for(link.connect(), 60)
    channel = world.channels.all()[0]
    world.channels.fence(channel.worker, channel.incarnation, "its pull did not end")
    assert await received(link) == wire.Stop(reason="its pull did not end")
    assert world.channels.workers("rollout") == []
    world.channels.send(channel.worker, wire.Publish(version=Version(1, 0)), 0)  # to nobody: logged, no error
    channel.transport.abort()
    with pytest.raises(LinkRefused, match="its pull did not end"):
        await received(link)
    await link.close()


# ---- peers that hang ---------------------------------------------------------------------------------------


async def short_world() -> World:
    world = World(timeout_s=0.3)
    await world.server.start("127.0.0.1", 0)
    return world


async def test_a_silent_peer_is_reported_broken() -> None:
    world = await short_world()
    async with dialled(world) as peer:
        await peer.greet(hello())
        await world.until(lambda: world.broken == [("rollout-0", 10)])
    await world.server.close()


async def test_a_peer_that_reads_nothing_is_reported_broken_and_does_not_hold_up_the_end() -> None:
    world = await short_world()
    async with dialled(world) as peer:
        await peer.greet(hello())
        peer.ws._response.connection.transport.pause_reading()
        for step in range(40):
            detail = wire.Prompt(prompt=0, text="x" * 1_000_000)  # type: ignore[arg-type]
            message = wire.Evaluate(evaluation=step, version=Version(0, 0), prompts=[detail])
            world.channels.send(WorkerId("rollout-0"), message, 0)
        await world.until(lambda: world.broken == [("rollout-0", 10)])
        await asyncio.wait_for(world.server.close(), 60)
        peer.cut()


async def test_a_queue_that_is_full_breaks_the_connection_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "OUTGOING_FRAMES_MAX", 50)
    world = World()
    await world.server.start("127.0.0.1", 0)
    async with linked(world) as link:
        for step in range(400):  # in one go: the sender has no turn
            world.channels.send(WorkerId("rollout-0"), wire.Publish(version=Version(step, 0)), 0)
        await world.until(lambda: bool(world.broken))
        monkeypatch.setattr(channels, "OUTGOING_FRAMES_MAX", 10_000)
        assert [(await received(link)).version.step for _ in range(400)] == list(range(400))
    await world.server.close()


# ---- many --------------------------------------------------------------------------------------------------


async def test_sixty_four_channels_keep_their_order_while_some_of_them_break(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        names = [f"rollout-{number}" for number in range(64)]
        links = [await stack.enter_async_context(linked(world, name)) for name in names]
        for step in range(20):
            for link in links:
                link.send(lost(step))
            channel = world.channels.all()[3 * step]
            if channel.transport is not None:
                channel.transport.abort()
            await asyncio.sleep(0)
        await world.until(lambda: sum(isinstance(m, wire.VersionLost) for _, m in world.heard) == 64 * 20)
        assert all(world.steps(name) == list(range(20)) for name in names)


# ---- tokens ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(world: World, tmp_path: Path) -> TokenStore:
    store = TokenStore(tmp_path, 1)
    world.server.token_rows = store.rows
    for number in range(1, 301):
        trajectory, group = TrajectoryId(number), GroupId(1000 + number)
        store.start(trajectory, 1, group, resume=False)
        store.put_prompt(group, wire.pack_i32([number]))
        store.take(report([(trajectory, 1, 2, [number, 5])]))
    return store


async def test_ranks_fetch_their_tokens(world: World, store: TokenStore) -> None:
    async with linked(world) as link:
        rows = await asyncio.wait_for(link.fetch_tokens(list(range(300, 0, -1))), 60)
    assert rows == store.rows([TrajectoryId(number) for number in range(300, 0, -1)])


@pytest.mark.usefixtures("store")
async def test_a_trajectory_that_is_not_held_is_named(world: World) -> None:
    async with linked(world) as link:
        with pytest.raises(TokensUnavailable, match="trajectory 999 is not held"):
            await asyncio.wait_for(link.fetch_tokens([1, 999]), 60)


@pytest.mark.parametrize("body", [b"", b"\xc1", wire.encode([["x"]]), wire.encode({"trajectories": [1]})])
async def test_a_malformed_token_request_is_refused(world: World, body: bytes) -> None:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
        http.post(f"{world.url}/v1/tokens", data=body) as answer,
    ):
        assert answer.status == 400
        assert "malformed" in (await answer.json())["error"]
