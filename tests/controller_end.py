"""A small, faithful controller end of the channel for worker tests: real sockets, `Session`, auth, acknowledgements.

It acknowledges what it has accepted. `boot` and `session` can be replaced to play a restarted controller.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
from aiohttp import WSMsgType, web

from laminar import wire
from laminar.channel import Session
from laminar.config import Config, ControllerConfig

TOKEN = "secret-of-this-run"
# A starved machine may stand still for a second: only tests of the end without a controller give up so early.
FAST = Config(controller=ControllerConfig(heartbeat_s=0.05, heartbeat_timeout_s=3.0, orphan_timeout_s=30.0))
ORPHANING = Config(controller=ControllerConfig(heartbeat_s=0.05, heartbeat_timeout_s=3.0, orphan_timeout_s=0.6))


class ControllerEnd:
    """`messages` holds every reliable message accepted from the one worker that dials in, in order."""

    def __init__(self, config: Config = FAST) -> None:
        self.config, self.boot, self.protocol, self.refuse = config, 1, wire.PROTOCOL, ""
        self.continues = 0
        self.session = Session(wire.ControllerEnvelope)
        self.messages: list[wire.Message] = []
        self.hellos: list[wire.Hello] = []
        self.heartbeats = 0
        self.mute = False
        """Send nothing, not even heartbeats."""
        self.changed = asyncio.Condition()
        self.on_frame: Callable[[int], bool] = lambda number: True
        """Called with a frame's number before it is accepted; False drops the connection."""
        self.token_answers: list[Callable[[wire.TokenRequest], web.Response]] = []
        self.num_token_requests = 0
        self.port = 0
        self._ws: web.WebSocketResponse | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/channel", self._channel)
        app.router.add_post("/v1/tokens", self._tokens)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Hang up at once and free the port."""
        self.drop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def drop(self) -> None:
        """Cut the connection as a dead network would: no closing frame."""
        if self._ws is not None and self._ws._req is not None and self._ws._req.transport is not None:
            self._ws._req.transport.abort()

    async def send(self, message: wire.Message) -> None:
        """Reliable; kept for the next connection when there is none."""
        frame = self.session.reliable(message)
        if self._ws is not None:
            await self.send_raw(frame)

    async def send_raw(self, data: bytes) -> None:
        assert self._ws is not None
        with contextlib.suppress(ConnectionError):
            await self._ws.send_bytes(data)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until `condition()` holds; looked at after every frame and (dis)connect."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    def of(self, kind: type) -> list:
        return [message for message in self.messages if isinstance(message, kind)]

    # ---- handlers ------------------------------------------------------------------------------------------

    def _authorised(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {TOKEN}"

    async def _channel(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return web.Response(status=401)
        ws = web.WebSocketResponse(max_msg_size=wire.FRAME_BYTES_MAX)
        await ws.prepare(request)
        hello = wire.decode_from_worker((await ws.receive()).data).message
        assert isinstance(hello, wire.Hello)
        self.hellos.append(hello)
        if self.refuse:
            await ws.send_bytes(self.session.unreliable(wire.Refused(reason=self.refuse)))
            await ws.close()
            return ws
        self._ws = ws
        await self._serve(ws, hello)
        return ws

    async def _serve(self, ws: web.WebSocketResponse, hello: wire.Hello) -> None:
        config = msgspec.msgpack.encode(self.config)
        welcome = wire.Welcome(
            protocol=self.protocol,
            boot=self.boot,
            run_id="test",
            received=self.session.received,
            continues=self.continues,
            config=config,
        )
        await ws.send_bytes(self.session.unreliable(welcome))
        is_known = hello.boot in (0, self.boot) or 0 < self.continues <= hello.boot
        resend = self.session.resend(hello.received if is_known else 0)
        for frame in resend:
            await ws.send_bytes(frame)
        beat = asyncio.create_task(self._beat(ws))
        try:
            await self._read(ws)
        finally:
            beat.cancel()
            if self._ws is ws:
                self._ws = None
            await self._notify()

    async def _read(self, ws: web.WebSocketResponse) -> None:
        async for message in ws:
            assert message.type is WSMsgType.BINARY
            frame = wire.decode_from_worker(message.data)
            if frame.number and not self.on_frame(frame.number):
                self.drop()
                return
            if self.session.accept(frame.number, frame.received):
                self.session.acknowledge = self.session.received
                self._take(frame.message)
            await self._notify()

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.Heartbeat):
            self.heartbeats += 1
        else:
            self.messages.append(message)

    async def _beat(self, ws: web.WebSocketResponse) -> None:
        while True:
            if not self.mute:
                with contextlib.suppress(ConnectionError):
                    await ws.send_bytes(self.session.unreliable(wire.Heartbeat()))
            await asyncio.sleep(self.config.controller.heartbeat_s)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _tokens(self, request: web.Request) -> web.Response:
        if not self._authorised(request):
            return web.Response(status=401, text="wrong token")
        self.num_token_requests += 1
        body = msgspec.msgpack.decode(await request.read(), type=wire.TokenRequest)
        if self.token_answers:
            return self.token_answers.pop(0)(body)
        rows = [token_row(trajectory) for trajectory in body.trajectories]
        return web.Response(body=msgspec.msgpack.encode(rows))


def token_row(trajectory: int) -> wire.TokenRow:
    """A row that can be told from every other."""
    return wire.TokenRow(trajectory, wire.pack_i32([1, trajectory]), wire.pack_i32([trajectory]), b"\0" * 4, b"")


@contextlib.asynccontextmanager
async def controller_end(config: Config = FAST) -> AsyncIterator[ControllerEnd]:
    end = ControllerEnd(config)
    await end.start()
    try:
        yield end
    finally:
        await end.stop()
