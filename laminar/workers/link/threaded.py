"""A `Link` for blocking code: the same channel in a background thread with its own event loop.

A trainer rank computes for minutes without yielding; its heartbeats and reconnects go on in that thread.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from laminar import wire
from laminar.config import Config
from laminar.workers.link.asynchronous import Link

T = TypeVar("T")

MARGIN_S = 30.0  # the coroutines end by themselves; this only keeps a broken loop from hanging its caller
FETCH_TIMEOUT_S = 1800.0  # bound of a whole batch; each request has its own in `tokens`


class ThreadLink:
    """A `Link` with blocking methods, callable from any thread. Close it to end the thread."""

    def __init__(
        self,
        url: str,
        worker: str,
        role: str,
        *,
        token: str | None = None,
        orphan_timeout_s: float | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._link = Link(url, worker=worker, role=role, token=token, orphan_timeout_s=orphan_timeout_s)
        self._thread = threading.Thread(target=self._run, name=f"link {worker}", daemon=True)
        self._thread.start()

    @property
    def config(self) -> Config | None:
        """The run's configuration, after `connect`."""
        return self._link.config

    @property
    def orphaned(self) -> bool:
        """The link gave up for want of a controller."""
        return self._link.orphaned

    @property
    def pending_bytes(self) -> int:
        """Bytes sent and not yet acknowledged."""
        return self._link.pending_bytes

    def connect(self, timeout_s: float) -> wire.Welcome:
        """As `Link.connect`; TimeoutError after `timeout_s`. Close the link after an error, too."""
        return self._call(_within(self._link.connect(), timeout_s), timeout_s)

    def send(self, message: wire.Message) -> None:
        """As `Link.send`; messages of one thread keep their order."""
        self._loop.call_soon_threadsafe(self._link.send, message)

    def receive(self, timeout_s: float) -> wire.Message | None:
        """The next message, or None after `timeout_s` without one. Raises as `Link.receive`."""
        return self._call(_or_none(self._link.receive(), timeout_s), timeout_s)

    def fetch_tokens(self, trajectories: list[int]) -> list[wire.TokenRow]:
        """As `Link.fetch_tokens`."""
        return self._call(self._link.fetch_tokens(trajectories), FETCH_TIMEOUT_S)

    def close(self, *, goodbye: bool = True, timeout_s: float = 5.0) -> None:
        """As `Link.close`, and ends the thread. Safe to call twice."""
        if self._loop.is_closed():
            return
        self._call(self._link.close(goodbye=goodbye, timeout_s=timeout_s), timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(MARGIN_S)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s + MARGIN_S)
        except (concurrent.futures.TimeoutError, KeyboardInterrupt):
            future.cancel()
            raise


async def _within(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    async with asyncio.timeout(timeout_s):
        return await coroutine


async def _or_none(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T | None:
    try:
        return await _within(coroutine, timeout_s)
    except TimeoutError:
        return None
