"""The controller's HTTP side: worker channels (WebSocket), token rows for trainer ranks, and routes for people that it is given.

Every route needs the run's token (`laminar.controller.access`), but for those that tell nothing of it. A reconnect of the same
worker process continues its channel (`laminar.controller.channels`), a new process (higher incarnation) replaces one whose
connection is gone. Frames are acknowledged only when the event made of them is on disk.

Invariants: a connection that ends, for whatever reason, is reported broken unless a newer one took its place or the worker
said goodbye; a peer that neither reads nor writes cannot delay that, nor the end of the run.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import WebSocketError, WSMessage, WSMsgType, web

from laminar import wire
from laminar.controller.access import Access
from laminar.controller.channels import Channel, Channels
from laminar.errors import ProtocolError, StartError

logger = structlog.get_logger(__name__)

HELLO_TIMEOUT_S = 10.0  # a peer that opens a channel and says nothing is not a worker
CLOSE_TIMEOUT_S = 2.0  # for the peer's closing frame; after it the socket is just dropped


class Server:
    """Serves `channels`. Callbacks: `on_message(channel, message, frame number)`, which gives the seq of the event that vouches for
    the frame once it is on disk; `on_broken(channel)`, `on_returned(channel)`.
    """

    def __init__(
        self, channels: Channels, *, token: str, run_id: str, config: bytes, heartbeat_s: float, timeout_s: float
    ) -> None:
        self.on_message: Callable[[Channel, wire.Message, int], int] = lambda channel, message, number: 0
        self.on_broken: Callable[[Channel], None] = lambda channel: None
        self.on_returned: Callable[[Channel], None] = lambda channel: None
        self.routes: list[web.RouteDef] = []
        """More of them, for people (`laminar.controller.operator`); known before `start`."""
        self.open_routes: list[web.RouteDef] = []
        """Those of them that need no token, because they tell nothing of the run."""
        self.access = Access(token)
        self.token_rows: Callable[[list[Any]], list[wire.TokenRow]] = lambda trajectories: []
        self.port = 0
        self._channels, self._run_id, self._config = channels, run_id, config
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._runner: web.AppRunner | None = None
        self._closing = False

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises StartError when the address cannot be bound."""
        app = web.Application(middlewares=[self._authenticate], client_max_size=wire.FRAME_BYTES_MAX)
        app.router.add_get("/v1/channel", self._channel)
        app.router.add_post("/v1/tokens", self._tokens)
        app.router.add_routes([*self.routes, *self.open_routes])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            has_no_such = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            advice = "choose another with controller.port=… (0 = any free port)"
            if has_no_such:
                advice = "name an address of this machine with controller.host=…"
            raise StartError(f"cannot listen on {host}:{port} ({reason}); {advice}") from error
        self.port = self.access.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def close(self) -> None:
        """Close all connections."""
        self._closing = True
        sockets = [channel.socket for channel in self._channels.all() if channel.socket is not None]
        await asyncio.gather(*(_close(socket) for socket in sockets))
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- routes --------------------------------------------------------------------------------------------

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not any(handler == route.handler for route in self.open_routes):
            of_people = any(handler == route.handler for route in self.routes)
            if (refusal := self.access.refusal(request, of_people=of_people)) is not None:
                return refusal
        response: web.StreamResponse = await handler(request)
        return response

    async def _tokens(self, request: web.Request) -> web.Response:
        try:
            body = await asyncio.wait_for(request.read(), self._timeout_s)
        except TimeoutError:
            return web.json_response({"error": f"the request did not come within {self._timeout_s:g} s"}, status=503)
        try:
            wanted = wire.decode_token_request(body).trajectories
            data = await asyncio.to_thread(lambda: wire.encode(self.token_rows(wanted)))
        except ProtocolError as error:
            return web.json_response({"error": str(error)}, status=400)
        except KeyError as error:
            return web.json_response({"error": f"trajectory {error} is not held here"}, status=404)
        return web.Response(body=data, content_type="application/msgpack")

    async def _channel(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=wire.FRAME_BYTES_MAX, compress=False)
        await socket.prepare(request)
        try:
            channel = await self._greet(socket)
        except (ProtocolError, TimeoutError, ConnectionError) as error:
            logger.warning("channel.refused", peer=request.remote, reason=str(error) or "no Hello in time")
            await _close(socket)
            return socket
        if channel is not None:
            await self._serve(channel, socket)
        return socket

    async def _greet(self, socket: web.WebSocketResponse) -> Channel | None:
        frame = await asyncio.wait_for(socket.receive(), HELLO_TIMEOUT_S)
        hello = wire.decode_from_worker(_binary(frame)).message
        if not isinstance(hello, wire.Hello):
            raise ProtocolError(f"the first frame is a {type(hello).__name__}, not a Hello")
        if hello.boot > self._channels.boot:  # hung up on, not refused: it looks for that one elsewhere
            raise ProtocolError(
                f"{hello.worker} obeys a newer controller, of boot {hello.boot}; this is {self._channels.boot}"
            )
        reason = self._channels.reason_to_refuse(hello)
        if reason:
            logger.warning("channel.refused", worker=hello.worker, reason=reason)
            refused = wire.encode(wire.ControllerEnvelope(0, 0, wire.Refused(reason=reason)))
            await asyncio.wait_for(socket.send_bytes(refused), HELLO_TIMEOUT_S)
            await _close(socket)
            return None
        channel, returning = self._channels.greet(hello)
        welcome = wire.Welcome(
            protocol=wire.PROTOCOL,
            boot=self._channels.boot,
            run_id=self._run_id,
            received=channel.session.received,
            continues=self._channels.continues,
            config=self._config,
        )
        await asyncio.wait_for(socket.send_bytes(channel.session.unreliable(welcome)), HELLO_TIMEOUT_S)
        self._attach(channel, socket, hello)
        if returning:
            self.on_returned(channel)
        return channel

    def _attach(self, channel: Channel, socket: web.WebSocketResponse, hello: wire.Hello) -> None:
        """From now on frames go to this connection, first those that the worker has not received."""
        channel.attach(socket, _transport(socket))
        for frame in self._channels.unheard(channel, hello):
            channel.put(frame)

    async def _serve(self, channel: Channel, socket: web.WebSocketResponse) -> None:
        sending = self._send(channel, socket, channel.outgoing)
        sender = asyncio.create_task(sending, name=f"send-{channel.worker}")
        reason = "closed"
        try:
            reason = await self._receive(channel, socket)
        finally:
            sender.cancel()
            if channel.socket is socket:
                channel.socket = channel.transport = None
                if self._channels.is_known(channel) and not channel.said_goodbye and not self._closing:
                    logger.warning("channel.broken", worker=channel.worker, reason=reason)
                    self.on_broken(channel)
            await asyncio.gather(sender, return_exceptions=True)
            await _close(socket)

    async def _receive(self, channel: Channel, socket: web.WebSocketResponse) -> str:
        while channel.socket is socket:
            try:
                async with asyncio.timeout(self._timeout_s):  # `wait_for` would make a task for every frame
                    frame = await socket.receive()
            except TimeoutError:
                return f"silent for {self._timeout_s:g} s"
            try:
                self._take(channel, wire.decode_from_worker(_binary(frame)))
            except ConnectionError as error:
                return str(error)
            except ProtocolError as error:
                logger.error("channel.protocol", worker=channel.worker, error=str(error))
                self.on_message(channel, wire.WorkerFailed(reason=f"protocol error: {error}"), 0)
                return str(error)
            await asyncio.sleep(0)  # one that has much to say lets the others, and timers, come between
        return "replaced by a new connection"

    def _take(self, channel: Channel, envelope: wire.WorkerEnvelope) -> None:
        if not channel.session.accept(envelope.number, envelope.received):
            return
        if isinstance(envelope.message, wire.Heartbeat):
            return
        channel.said_goodbye |= isinstance(envelope.message, wire.Goodbye)
        seq = self.on_message(channel, envelope.message, envelope.number)
        if envelope.number:
            channel.undurable.append((seq, envelope.number))

    async def _send(self, channel: Channel, socket: web.WebSocketResponse, outgoing: "asyncio.Queue[bytes]") -> None:
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):  # wait_for may lose the cancellation that ends this task
                    frame = await outgoing.get()
            except TimeoutError:
                frame = channel.session.unreliable(wire.Heartbeat())
            try:
                async with asyncio.timeout(self._timeout_s):
                    await socket.send_bytes(frame)
            except (ConnectionError, TimeoutError, RuntimeError):
                await _close(socket)
                return


def _binary(frame: WSMessage) -> bytes:
    """The data of a binary message. Raises ConnectionError at the end of the connection, ProtocolError for anything else."""
    if frame.type is WSMsgType.BINARY:
        data: bytes = frame.data
        return data
    if frame.type is WSMsgType.ERROR and isinstance(frame.data, WebSocketError):
        raise ProtocolError(f"broken WebSocket frame (at most {wire.FRAME_BYTES_MAX} bytes are taken): {frame.data}")
    if frame.type is WSMsgType.TEXT:
        raise ProtocolError("a text frame where only binary ones are allowed")
    raise ConnectionError("closed by the worker")


def _transport(socket: web.WebSocketResponse) -> asyncio.Transport | None:
    request = socket._req
    return request.transport if request is not None else None  # type: ignore[return-value]


async def _close(socket: web.WebSocketResponse) -> None:
    """Close politely, or else at once: a peer that does not read cannot hold us."""
    transport = _transport(socket)
    with contextlib.suppress(TimeoutError, ConnectionError):
        await asyncio.wait_for(socket.close(), CLOSE_TIMEOUT_S)
    if transport is not None and transport.get_write_buffer_size() > 0:
        transport.abort()
