"""The relay's versions as the chain's threads see them: every call is run on the event loop, which owns them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.manifest import Manifest
from laminar.workers.relay.versions import Versions
from laminar.workers.transport import LinkEnded

_Result = TypeVar("_Result")


class ChainStore:
    """Make it on the loop. After the loop has ended every call raises LinkEnded."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._loop = asyncio.get_running_loop()

    def newest(self) -> tuple[Flow, int] | None:
        """The newest version that is here or on its way, under a lease; for `held`."""
        return self._call(self._versions.newest)

    def ready(self, version: Version | None) -> tuple[Flow, int] | None:
        """A complete version (None = the newest), under a lease; for `held`."""
        return self._call(lambda: self._versions.ready(version))

    @contextlib.contextmanager
    def held(self, found: tuple[Flow, int] | None) -> Iterator[Flow | None]:
        """The flow, whose lease ends with the block."""
        try:
            yield found[0] if found else None
        finally:
            if found:
                self._call(lambda: self._versions.table.release(found[1]))

    def accept(self, version: Version, manifest: Manifest) -> "Future[Flow | None]":
        """Where to put a version, or what is here of it. None: no place for it, or it was here and went."""
        work = self._versions.accept(version, manifest)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise LinkEnded("the relay has stopped") from error

    def finish(self, flow: Flow, digest: str, canary: Canary | None) -> None:
        """It is complete and verified: let readers in."""
        self._call(lambda: self._versions.finish(flow, digest, canary))

    def lose(self, flow: Flow, reason: str) -> None:
        """It will never be complete."""
        self._call(lambda: self._versions.lose(flow, reason))

    def lose_incoming(self) -> None:
        """What was coming from upstream will not come."""
        self._call(self._versions.lose_incoming)

    def _call(self, work: Callable[[], _Result]) -> _Result:
        async def run() -> _Result:
            return work()

        running = run()
        try:
            return asyncio.run_coroutine_threadsafe(running, self._loop).result()
        except RuntimeError as error:
            running.close()
            raise LinkEnded("the relay has stopped") from error
