"""Pages that are open: a WebSocket each, on which a frame is sent at most every INTERVAL_S.

There is no queue. While a page does not take its frame nothing is made for it; the next one tells what is so by then. A page that
takes none for SEND_S is hung up on.
"""

import asyncio
import contextlib
from collections.abc import Callable

from aiohttp import WSMsgType, web

from laminar.controller.web.board import Board, Cursor

INTERVAL_S = 0.5
SEND_S = 20.0  # a laptop that sleeps comes back with a new connection
CLIENTS_MAX = 32  # each costs an encoded frame per interval, some 20 kB at 256 replicas
CLOSE_S = 1.0
HEARTBEAT_S = 10.0  # finds out that a page is gone whose machine did not say so
MESSAGE_BYTES_MAX = 1024  # pages have nothing to say


class Stream:
    """All pages of a run."""

    def __init__(self, board: Board, now: Callable[[], float]) -> None:
        """`now`: run time, seconds."""
        self._board, self._now = board, now
        self._sockets: dict[web.WebSocketResponse, None] = {}
        self._ticked = asyncio.Event()
        self._opened = asyncio.Event()
        self._over = False

    @property
    def is_watched(self) -> bool:
        """Whether any page is open."""
        return bool(self._sockets)

    async def pause(self) -> None:
        """Until it is time to look again, or a page has been opened."""
        self._opened.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_S):
                await self._opened.wait()

    def tick(self) -> None:
        """The board has changed."""
        self._ticked.set()
        self._ticked = asyncio.Event()

    async def close(self) -> None:
        """Send the last frames, and hang up."""
        self._over = True
        self.tick()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._sockets:
                    await self._ticked.wait()
        for socket in list(self._sockets):
            _cut(socket)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One page, for as long as it is open."""
        if self._over or len(self._sockets) >= CLIENTS_MAX:
            why = "the run is over" if self._over else f"{CLIENTS_MAX} pages are open already"
            return web.json_response({"error": why}, status=503)
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, timeout=CLOSE_S, max_msg_size=MESSAGE_BYTES_MAX, compress=False
        )
        await socket.prepare(request)
        self._sockets[socket] = None
        self._opened.set()
        sender = asyncio.create_task(self._send(socket), name="dashboard")
        try:
            await self._until_closed(socket)
        finally:
            self._sockets.pop(socket, None)
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            if self._over:
                self.tick()
        return socket

    async def _until_closed(self, socket: web.WebSocketResponse) -> None:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                return

    async def _send(self, socket: web.WebSocketResponse) -> None:
        cursor, more = Cursor(), True
        try:
            while True:
                ticked, is_last = self._ticked, self._over
                data, more = self._board.frame(cursor, self._now())
                async with asyncio.timeout(SEND_S):
                    await socket.send_bytes(data)
                if is_last and not more:
                    await socket.close(code=1001, message=b"the run is over")
                    return
                if more:
                    await asyncio.sleep(0)
                else:
                    await ticked.wait()
        except (ConnectionError, TimeoutError, RuntimeError):
            _cut(socket)


def _cut(socket: web.WebSocketResponse) -> None:
    """At once: a page that does not read does not close either."""
    request = socket._req
    if request is not None and request.transport is not None:
        request.transport.abort()
