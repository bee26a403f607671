"""One WebSocket of a link: frames are written in the order they were put, by one task."""

import asyncio
import contextlib
import time
from collections import deque

import aiohttp

from laminar.errors import ProtocolError

CLOSE_TIMEOUT_S = 2.0  # for the peer's closing frame; after it the socket is just dropped


class Connection:
    """One WebSocket after its Welcome, and the frames that wait to be written to it."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, frames: list[bytes]) -> None:
        self.ws = ws
        self.heard_at = time.monotonic()
        self._frames = deque(frames)
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._changed.set()

    def put(self, frame: bytes) -> None:
        """Queue a frame; never blocks."""
        self._frames.append(frame)
        self._drained.clear()
        self._changed.set()

    async def write(self, timeout_s: float) -> None:
        """Write frames in order, for ever. TimeoutError when the peer does not take one within `timeout_s`."""
        while True:
            while self._frames:
                async with asyncio.timeout(timeout_s):
                    await self.ws.send_bytes(self._frames.popleft())
            self._changed.clear()
            self._drained.set()
            await self._changed.wait()

    async def drained(self) -> None:
        """All frames are written."""
        await self._drained.wait()

    async def close(self) -> None:
        """Hang up with a closing handshake; call it while a task still reads.

        Without the handshake the kernel may discard what was just written.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.ws.close()


def binary(message: aiohttp.WSMessage) -> bytes:
    """The data of a binary message. Raises ConnectionResetError at the end, ProtocolError for any other message."""
    if message.type is aiohttp.WSMsgType.BINARY:
        data: bytes = message.data
        return data
    if message.type is aiohttp.WSMsgType.ERROR:
        raise ProtocolError(f"the WebSocket broke: {message.data}")
    if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
        raise ConnectionResetError("the controller closed the connection")
    raise ProtocolError(f"a {message.type.name} message where only binary frames are allowed")
