"""The relay's versions as a thread of the chain sees them: every call is run on the event loop, which owns them."""

import asyncio
import contextlib
import copy
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.manifest import Manifest
from laminar.workers.relay.protocol import Begin
from laminar.workers.relay.shards import Collection, Outgoing
from laminar.workers.relay.versions import Versions
from laminar.workers.transport import Link, LinkEnded

_Result = TypeVar("_Result")


class ChainStore:
    """Make it on the loop. After the loop has ended every call raises LinkEnded."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None

    def behind(self, link: Link) -> "ChainStore":
        """The same, for the thread of a link, whose other end gets signs of life while `accept` and `finish` take their time."""
        store = copy.copy(self)
        store._link = link
        return store

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

    def accept(self, version: Version, manifest: Manifest) -> Flow | None:
        """Where to put a version, or what is here of it. None: no place for it, or it was here and went.

        Backing the first slot with memory may take minutes.
        """
        return self._run(self._versions.accept(version, manifest), self._link)

    def finish(self, flow: Flow, digest: str, canary: Canary | None) -> None:
        """It is complete and verified: let readers in."""
        self._call(lambda: self._versions.finish(flow, digest, canary), self._link)

    def lose(self, flow: Flow, reason: str) -> None:
        """It will never be complete."""
        self._call(lambda: self._versions.lose(flow, reason))

    def discard(self, flow: Flow) -> None:
        """A READY version's bytes have changed in memory."""
        flow.lose()
        slot = self._call(lambda: self._versions.table.ready(flow.version))
        if slot is not None:
            self._call(lambda: self._versions.discard(slot))

    # ---- shards

    def refusal(self, publication: int) -> tuple[str, bool] | None:
        """As `ShardTraffic.refusal`."""
        return self._call(lambda: self._versions.shards.refusal(publication))

    def join(self, wanted: Begin) -> Collection:
        """As `Versions.join`."""
        return self._call(lambda: self._versions.join(wanted))

    def commit(self, version: Version, rank: int, canary: Canary | None, publication: int) -> None:
        """As `Versions.commit`."""
        self._call(lambda: self._versions.commit(version, rank, canary, publication))

    def leave(self, version: Version, rank: int, reason: str, publication: int) -> None:
        """As `SlotTable.leave`."""
        self._call(lambda: self._versions.table.leave(version, rank, reason, publication))

    def read(self, shards: Outgoing) -> None:
        """As `Versions.read`."""
        self._call(lambda: self._versions.read(shards))

    def sent(self, shards: Outgoing, failure: str) -> None:
        """As `Versions.sent`."""
        self._call(lambda: self._versions.sent(shards, failure))

    def lose_incoming(self) -> None:
        """What was coming from upstream will not come."""
        self._run(self._versions.lose_incoming(), None)

    def _call(self, work: Callable[[], _Result], link: Link | None = None) -> _Result:
        async def run() -> _Result:
            return work()

        return self._run(run(), link)

    def _run(self, work: Coroutine[Any, Any, _Result], link: Link | None) -> _Result:
        """With a link it may raise LinkEnded while the work goes on: not for what takes a lease, which nobody would end."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise LinkEnded("the relay has stopped") from error
        while True:
            try:
                return future.result(frames.SIGN_OF_LIFE_S)
            except CancelledError as error:
                raise LinkEnded("the relay has stopped") from error
            except TimeoutError:
                if future.done():
                    raise
                if link is not None:
                    frames.send_nothing(link)
