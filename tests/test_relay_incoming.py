"""What comes from upstream, or is digested, when something else happens to the same relay meanwhile: no slot is lost to it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from chain_world import content, manifest_of

from laminar import wire
from laminar.ids import Version
from laminar.workers.relay.digest import combine
from laminar.workers.relay.flow import Flow
from laminar.workers.relay.manifest import BLOCK_BYTES
from laminar.workers.relay.protocol import Begin
from laminar.workers.relay.slot_files import SlotFiles
from laminar.workers.relay.slots import SlotState
from laminar.workers.relay.versions import Told, Versions

pytestmark = pytest.mark.timeout(60)

NUM_BYTES = 2 * BLOCK_BYTES
MANIFEST = manifest_of(NUM_BYTES)
V1, V2 = Version(1, 0), Version(2, 0)


class Relay:
    """The versions of one, and what it told the controller."""

    def __init__(self, directory: Path) -> None:
        self.told: list[Told] = []
        self.versions = Versions(directory, 3, self.told.append)

    def slots(self) -> list[Version | None]:
        return [slot.version for slot in self.versions.table.slots if slot.state is not SlotState.FREE]

    def is_ready(self, version: Version) -> bool:
        return self.versions.table.ready(version) is not None

    async def publish(self, version: Version, publication: int, *, commit: bool = True) -> None:
        """By one rank, whose bytes are zeros."""
        wanted = Begin(version=version, manifest=MANIFEST, rank=0, world_size=1, publication=publication)
        slot = await self.versions.begin(wanted)
        assert slot is not None
        await self.versions.backed(slot, 0)
        if commit:
            self.versions.commit(version, 0, None, publication)

    def receive(self, flow: Flow) -> None:
        """The rest of a version from upstream."""
        flow.buffer[:] = memoryview(content(flow.version, NUM_BYTES))
        while flow.received < NUM_BYTES:
            flow.advance(flow.next_block())
        self.versions.finish(flow, combine(bytes(flow.blocks), NUM_BYTES), None)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    made = Relay(tmp_path)
    yield made
    await made.versions.close()


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - what it looks at tells nobody of a change
        await asyncio.sleep(0.001)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Slots are backed once it is set."""
    come, prefault = threading.Event(), SlotFiles.prefault

    def wait(files: SlotFiles, index: int) -> None:
        come.wait(30.0)
        prefault(files, index)

    monkeypatch.setattr(SlotFiles, "prefault", wait)
    return come


async def test_a_version_whose_link_ended_while_its_slot_was_backed_gives_way_to_the_next(
    relay: Relay, pages: threading.Event
) -> None:
    first = asyncio.create_task(relay.versions.accept(V1, MANIFEST))
    await until(lambda: relay.slots() == [V1])
    second = asyncio.create_task(relay.versions.accept(V2, MANIFEST))
    pages.set()
    gone, flow = await first, await second
    assert gone is not None
    assert flow is not None
    assert gone.lost
    assert relay.slots() == [V2]
    relay.receive(flow)
    assert relay.is_ready(V2)


async def test_the_next_link_goes_on_with_a_version_whose_slot_was_being_backed(
    relay: Relay, pages: threading.Event
) -> None:
    first = asyncio.create_task(relay.versions.accept(V1, MANIFEST))
    await until(lambda: relay.slots() == [V1])
    second = asyncio.create_task(relay.versions.accept(V1, MANIFEST))
    pages.set()
    assert await first is await second is relay.versions.incoming


async def test_a_relay_that_becomes_the_master_while_a_slot_is_backed_waits_for_no_upstream(
    relay: Relay, pages: threading.Event
) -> None:
    first = asyncio.create_task(relay.versions.accept(V1, MANIFEST))
    await until(lambda: relay.slots() == [V1])
    losing = asyncio.create_task(relay.versions.lose_incoming())
    pages.set()
    await asyncio.gather(first, losing)
    assert relay.versions.incoming is None
    assert relay.slots() == []
    assert relay.versions.newest() is None, "its neighbour is offered nothing that will never come"


async def test_what_comes_from_upstream_gives_way_to_ranks_that_publish_it_anew(relay: Relay) -> None:
    flow = await relay.versions.accept(V1, MANIFEST)
    assert flow is not None
    await relay.publish(V1, 4, commit=False)
    relay.receive(flow)
    assert not relay.is_ready(V1)
    assert await relay.versions.accept(V1, MANIFEST) is None, "ranks of this host write it"
    relay.versions.commit(V1, 0, None, 4)
    await until(lambda: relay.told)
    assert [type(each) for each in relay.told] == [wire.VersionReady], "no publication was lost"
    assert relay.slots() == [V1]


async def test_a_version_that_is_published_anew_while_it_is_digested_becomes_ready_once(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, take_all = threading.Event(), Flow.take_all

    def wait(flow: Flow, stop: threading.Event) -> None:
        digests.wait(30.0)
        take_all(flow, stop)

    monkeypatch.setattr(Flow, "take_all", wait)
    await relay.publish(V1, 1)
    await relay.publish(V1, 2)
    digests.set()
    await until(lambda: relay.is_ready(V1))
    assert [(type(each), each.version) for each in relay.told] == [(wire.VersionLost, V1), (wire.VersionReady, V1)]
