"""The worker's end of its channel to the controller: dial in, stay in, lose nothing.

Invariants:
* A message given to `send` reaches the controller exactly once and in order, whatever happens to the connection in
  between; it is kept until the controller vouches for it. The same holds for what `receive` returns.
* One connection at a time, served by three tasks (read, write, beat). When any of them ends, the connection is
  closed and dialled again with exponential backoff; a link without a controller for `orphan_timeout_s` gives up.
* A worker never obeys a controller with a lower boot number than one it has seen.
"""

import asyncio
import os
import random
import socket
import time
from typing import Any

import aiohttp
import msgspec
import structlog

from laminar import stacks, wire
from laminar.channel import Session
from laminar.config import Config, ControllerConfig
from laminar.errors import LaminarError, ProtocolError
from laminar.ids import WorkerId
from laminar.workers.link import rendezvous
from laminar.workers.link.connection import CLOSE_TIMEOUT_S, Connection, binary
from laminar.workers.link.tokens import fetch_tokens

log = structlog.get_logger("laminar.link")

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0  # a restarted controller waits at most this long for its workers
HANDSHAKE_TIMEOUT_S = 10.0  # dial + Hello + Welcome; the controller answers from memory
INBOX_MESSAGES_MAX = 4096  # beyond it the link stops reading, and TCP holds the controller back
PROTOCOL_ERRORS_MAX = 5  # connections in a row that brought nothing but malformed frames

_LOST = (aiohttp.ClientError, OSError, TimeoutError, ProtocolError)
"""What a connection may end with; anything else is a bug and ends the link."""


class LinkRefused(LaminarError):
    """Controller or worker does not accept the other; dialling again is useless."""


class Orphaned(LaminarError):
    """No controller for `orphan_timeout_s`: the worker has to stop and unlink what it made."""


class LinkClosed(LaminarError):
    """`receive` after `close`."""


class Link:
    """A reliable channel to the controller at `url` (``http://host:port``).

    `token` defaults to the environment variable LAMINAR_TOKEN. `orphan_timeout_s` defaults to the controller's
    configuration, before that is known to what its launcher says. Use from one event loop only.
    """

    def __init__(
        self,
        url: str,
        *,
        worker: str,
        role: str,
        token: str | None = None,
        orphan_timeout_s: float | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.welcome: wire.Welcome | None = None
        """Of the latest connection."""
        self.config: Config | None = None
        """The run's configuration, from the first Welcome on."""
        self.orphaned = False
        self._worker, self._role = worker, role
        self._token = os.environ.get("LAMINAR_TOKEN", "") if token is None else token
        self._orphan_timeout_s = orphan_timeout_s
        default_s = ControllerConfig().orphan_timeout_s
        self._timings = ControllerConfig(orphan_timeout_s=float(os.environ.get(wire.ORPHAN_VARIABLE, default_s)))
        self._incarnation = max(int(time.time() * 1000), int(os.environ.get(wire.INCARNATION_VARIABLE, "0")))
        self._boot = 0
        self._session = Session(wire.WorkerEnvelope)
        self._inbox: asyncio.Queue[wire.Message | None] = asyncio.Queue(INBOX_MESSAGES_MAX)
        self._ended = asyncio.Event()
        self._connected = asyncio.Event()
        self._connection: Connection | None = None
        self._failure: BaseException | None = None
        self._http: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempt = 0
        self._num_protocol_errors = 0
        self._lag_s = 0.0

    # ---- what a worker calls -------------------------------------------------------------------------------

    @property
    def pending_bytes(self) -> int:
        """Bytes sent and not yet acknowledged. Above `channel.PENDING_BYTES_MAX` the worker has to stop producing."""
        return self._session.pending_bytes

    @property
    def connected(self) -> bool:
        """A controller listens right now."""
        return self._connected.is_set()

    async def connect(self) -> wire.Welcome:
        """Dial until a controller answers. Raises LinkRefused, or Orphaned after `orphan_timeout_s` without one."""
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"})
        self._task = asyncio.create_task(self._keep_connected(), name=f"link {self._worker}")
        self._task.add_done_callback(self._finish)
        ended = asyncio.create_task(self._ended.wait())
        connected = asyncio.create_task(self._connected.wait())
        try:
            await asyncio.wait({ended, connected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            connected.cancel()
            if self.welcome is None:
                await self._shut()
        if self.welcome is None:
            raise self._failure or LinkClosed(f"the link to {self.url} was closed before a controller answered")
        return self.welcome

    def send(self, message: wire.Message) -> None:
        """Queue a message for reliable delivery; never blocks. Dropped when the link has ended."""
        if self._ended.is_set():
            return
        frame = self._session.reliable(message)
        if self._connection is not None:
            self._connection.put(frame)

    async def receive(self) -> wire.Message:
        """The controller's next message. Raises Orphaned, LinkRefused or LinkClosed once the link has ended."""
        if self._inbox.empty() and self._ended.is_set():
            raise self._failure or LinkClosed(f"the link to {self.url} is closed")
        message = await self._inbox.get()
        if message is None:
            raise self._failure or LinkClosed(f"the link to {self.url} is closed")
        return message

    async def fetch_tokens(self, trajectories: list[int]) -> list[wire.TokenRow]:
        """The rows of these trajectories, in this order; see `laminar.workers.link.tokens`."""
        assert self._http is not None, "connect() first"
        patience_s = self._orphan_timeout_s or self._timings.orphan_timeout_s
        return await fetch_tokens(self._http, lambda: self.url, trajectories, patience_s)

    async def close(self, *, goodbye: bool = True, timeout_s: float = 5.0) -> None:
        """Say Goodbye (unless the worker failed), write out what is queued for at most `timeout_s`, hang up."""
        if goodbye:
            self.send(wire.Goodbye())
        if self._task is not None and not self._ended.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._flushed()
            except TimeoutError:
                log.warning("closed_with_unsent_frames", url=self.url, frames=self._session.num_pending)
        await self._shut()

    # ---- life of the link ----------------------------------------------------------------------------------

    async def _flushed(self) -> None:
        while not self._ended.is_set():
            await self._connected.wait()
            connection = self._connection
            assert connection is not None
            await connection.drained()
            if connection is self._connection:
                return

    async def _shut(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._http is not None:
            await self._http.close()

    def _finish(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._failure = task.exception()
            self.orphaned = isinstance(self._failure, Orphaned)
        self._ended.set()
        if not self._inbox.full():
            self._inbox.put_nowait(None)

    async def _keep_connected(self) -> None:
        while True:
            connection = await self._dial()
            self._connection = connection
            self._connected.set()
            try:
                await self._serve(connection)
            finally:
                self._connected.clear()
                self._connection = None

    async def _dial(self) -> Connection:
        limit_s = self._orphan_timeout_s or self._timings.orphan_timeout_s
        deadline = time.monotonic() + limit_s
        why = "not dialled"
        while time.monotonic() < deadline:
            if self._attempt:
                await asyncio.sleep(self._backoff_s(deadline))
            self._attempt += 1
            try:
                async with asyncio.timeout(min(HANDSHAKE_TIMEOUT_S, max(0.1, deadline - time.monotonic()))):
                    return await self._handshake()
            except _LOST as error:
                why = str(error) or type(error).__name__
                if urls := rendezvous.candidates():
                    self.url = urls[self._attempt % len(urls)]
        raise Orphaned(f"no controller at {self.url} for {limit_s:g} s (last try: {why}); {self._worker} stops")

    def _backoff_s(self, deadline: float) -> float:
        delay_s: float = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._attempt - 1, 10))
        return max(0.0, min(delay_s * random.uniform(0.5, 1.0), deadline - time.monotonic()))

    # ---- one connection ------------------------------------------------------------------------------------

    async def _handshake(self) -> Connection:
        assert self._http is not None
        try:
            ws = await self._http.ws_connect(
                f"{self.url}/v1/channel",
                max_msg_size=wire.FRAME_BYTES_MAX,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
            )
        except aiohttp.WSServerHandshakeError as error:
            raise self._explain(error) from error
        try:
            await ws.send_bytes(self._session.unreliable(self._hello()))
            return Connection(ws, self._take(self._first(await ws.receive())))
        except BaseException:
            await ws.close()
            raise

    def _hello(self) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL,
            worker=WorkerId(self._worker),
            role=self._role,
            incarnation=self._incarnation,
            boot=self._boot,
            received=self._session.received,
            pid=os.getpid(),
            host=os.environ.get(wire.HOST_VARIABLE) or socket.gethostname(),
        )

    def _explain(self, error: aiohttp.WSServerHandshakeError) -> Exception:
        if error.status in (401, 403):
            return LinkRefused(
                f"the controller at {self.url} refused the run token of {self._worker} (HTTP {error.status}); "
                "LAMINAR_TOKEN must hold the token of this run"
            )
        if error.status == 404:
            return LinkRefused(f"{self.url} is no Laminar controller (HTTP 404 for /v1/channel); check the URL")
        return error

    def _first(self, message: aiohttp.WSMessage) -> wire.Welcome:
        answer = wire.decode_from_controller(binary(message)).message
        if isinstance(answer, wire.Refused):
            raise LinkRefused(f"the controller at {self.url} refused {self._worker}: {answer.reason}")
        if not isinstance(answer, wire.Welcome):
            raise ProtocolError(f"the controller at {self.url} answered Hello with {type(answer).__name__}")
        if answer.protocol != wire.PROTOCOL:
            raise LinkRefused(
                f"the controller at {self.url} speaks protocol {answer.protocol}, {self._worker} speaks "
                f"{wire.PROTOCOL}; install the same version of Laminar on all hosts"
            )
        if answer.boot < self._boot:
            raise ProtocolError(  # dialled again: the newer one may be elsewhere
                f"the controller at {self.url} has boot number {answer.boot}, but {self._worker} has already obeyed "
                f"boot {self._boot}; stop the older controller"
            )
        return answer

    def _take(self, welcome: wire.Welcome) -> list[bytes]:
        """Agree with the controller on the numbers; the frames that it has not received yet."""
        if welcome.received > self._session.sent:
            raise LinkRefused(
                f"the controller at {self.url} has {welcome.received} frames of {self._worker}, which sent only "
                f"{self._session.sent}; is another worker of that name running?"
            )
        is_other = self._boot not in (0, welcome.boot)
        has_lost = welcome.received < self._session.forgotten
        if is_other and 0 < welcome.continues <= self._boot:
            log.warning("controller_restarted", url=self.url, boot=welcome.boot, has_lost_frames=has_lost)
            if has_lost:
                self._session.renumber(welcome.received)
        elif is_other or has_lost:
            log.warning("new_controller", url=self.url, boot=welcome.boot, kept_frames=self._session.num_pending)
            self._session.restart(welcome.received)
        if self.config is None:
            self.config = self._read_config(welcome.config)
            self._timings = self.config.controller
        self._boot, self.welcome = welcome.boot, welcome
        return self._session.resend(welcome.received)

    def _read_config(self, data: bytes) -> Config:
        try:
            return msgspec.msgpack.decode(data, type=Config)
        except msgspec.MsgspecError as error:
            raise LinkRefused(
                f"{self._worker} cannot read the configuration that the controller at {self.url} sent: {error}; "
                "install the same version of Laminar on all hosts"
            ) from error

    async def _serve(self, connection: Connection) -> None:
        """Until the connection is lost. Raises LinkRefused or, after too many malformed frames, ProtocolError."""
        parts: list[Any] = [
            self._read(connection),
            connection.write(self._timings.heartbeat_timeout_s),
            self._beat(connection),
        ]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await connection.close()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        self._judge([result for result in results if isinstance(result, Exception)])

    def _judge(self, errors: list[Exception]) -> None:
        for error in errors:
            if not isinstance(error, _LOST):
                raise error
            if isinstance(error, ProtocolError):
                self._num_protocol_errors += 1
                if self._num_protocol_errors >= PROTOCOL_ERRORS_MAX:
                    raise ProtocolError(f"{PROTOCOL_ERRORS_MAX} connections to {self.url} in a row broke: {error}")
            log.warning("connection_lost", url=self.url, why=str(error) or type(error).__name__)

    async def _read(self, connection: Connection) -> None:
        while True:
            data = binary(await connection.ws.receive())
            connection.heard_at = time.monotonic()
            frame = wire.decode_from_controller(data)
            is_new = self._session.accept(frame.number, frame.received)
            self._session.acknowledge = self._session.received
            self._attempt = self._num_protocol_errors = 0
            if isinstance(frame.message, wire.Refused):
                raise LinkRefused(f"the controller at {self.url} refused {self._worker}: {frame.message.reason}")
            if isinstance(frame.message, wire.AskStacks):
                answer = wire.Stacks(request=frame.message.request, text=stacks.of_process(asyncio.all_tasks()))
                connection.put(self._session.unreliable(answer))
            elif is_new and not isinstance(frame.message, wire.Heartbeat | wire.Welcome):
                await self._inbox.put(frame.message)

    async def _beat(self, connection: Connection) -> None:
        """Heartbeats, and an end to a silent connection, or one to a controller whose place another has taken. A round that came
        late itself says nothing about the peer.
        """
        timings, known = self._timings, rendezvous.by_supervisor()
        while True:
            connection.put(self._session.unreliable(wire.Heartbeat(lag_s=self._lag_s)))
            before = time.monotonic()
            await asyncio.sleep(timings.heartbeat_s)
            if connection.heard_at > before:
                rendezvous.tell_supervisor()
            now = time.monotonic()
            self._lag_s = max(0.0, now - before - timings.heartbeat_s)
            if self._lag_s > timings.heartbeat_s or self._inbox.full():
                continue
            if now - connection.heard_at > timings.heartbeat_timeout_s:
                raise TimeoutError(f"nothing heard for {now - connection.heard_at:.1f} s")
            if (url := rendezvous.by_supervisor()) not in ("", known, self.url):
                self.url = url
                raise ConnectionResetError(f"a controller is at {url} now")
