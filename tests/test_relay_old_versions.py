"""Old versions that a relay keeps as reverse deltas: rebuilt bit for bit, in bounded memory; what it cannot keep it says."""

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from chain_world import Relay, manifest_of
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_world import until

from laminar.ids import Version
from laminar.workers.relay import old_versions, protocol
from laminar.workers.relay.client import RelayError
from laminar.workers.relay.digest import combine, digest_blocks
from laminar.workers.relay.manifest import BLOCK_BYTES
from laminar.workers.relay.slots import SlotState, SlotTable

NUM_BYTES = 2 * BLOCK_BYTES + 256
ITEMS = NUM_BYTES // 2
KEEP_ALL = lambda: False  # noqa: E731


def steps(num: int, share: float, seed: int = 0) -> list[np.ndarray]:
    """Versions, each with so many elements changed by a little."""
    rng = np.random.default_rng(seed)
    out = [rng.integers(0, 1 << 16, ITEMS, dtype=np.uint16)]
    for _ in range(num - 1):
        new = out[-1].copy()
        at = rng.choice(ITEMS, int(share * ITEMS), replace=False)
        new[at] += rng.choice(np.array([1, 1, 1, -1, 3], np.int16), len(at)).astype(np.uint16)
        out.append(new)
    return out


def raw(items: np.ndarray) -> memoryview:
    return memoryview(items).cast("B")


def kept_as(old: np.ndarray, new: np.ndarray, version: int, base: int) -> old_versions.Kept:
    parts = old_versions.reverse(raw(old), raw(new), 2, old.nbytes, KEEP_ALL)
    assert parts is not None
    blocks = digest_blocks(raw(old))
    digest = combine(blocks, old.nbytes)
    return old_versions.Kept(
        Version(version, 0), Version(base, 0), version, manifest_of(old.nbytes), digest, blocks, None, parts
    )


# ---- deltas of whole versions ------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.6]), min_size=1, max_size=3))
def test_a_chain_of_deltas_gives_the_very_bytes_however_much_changed(shares: list[float]):
    made = [steps(1, 0)[0]]
    for seed, share in enumerate(shares):
        rng = np.random.default_rng(seed)
        new = made[-1].copy()
        at = rng.choice(ITEMS, int(share * ITEMS), replace=False)
        new[at] += rng.integers(1, 1 << 16, len(at), dtype=np.uint16)
        made.append(new)
    chain = [kept_as(made[at], made[at + 1], at, at + 1) for at in reversed(range(len(shares)))]
    target = bytearray(NUM_BYTES)
    old_versions.rebuild(raw(made[-1]), chain, memoryview(target), threading.Event())
    assert target == made[0].tobytes()


@pytest.mark.parametrize("damage", ["another delta", "no delta at all"])
def test_a_damaged_delta_is_found_out(damage: str):
    old, new = steps(2, 0.01)
    kept = kept_as(old, new, 0, 1)
    other = kept_as(new, old, 0, 1).parts[1] if damage == "another delta" else old_versions.Part(b"garbage", True)
    wrong = kept._replace(parts=[*kept.parts[:1], other, *kept.parts[2:]])
    with pytest.raises(RelayError, match="not what they were"):
        old_versions.rebuild(raw(new), [wrong], memoryview(bytearray(NUM_BYTES)), threading.Event())


def test_a_difference_that_is_too_large_is_given_up_early():
    old, new = steps(2, 0.5)
    assert old_versions.reverse(raw(old), raw(new), 2, NUM_BYTES // 5, KEEP_ALL) is None


# ---- who waits for whom ----------------------------------------------------------------------------------------


class Slots:
    """Versions v0, v1, … in a table of three slots, all the same bytes, in memory."""

    def __init__(self) -> None:
        self.gone: list[Version] = []
        self.bytes = [bytearray(NUM_BYTES) for _ in range(3)]
        self.table = SlotTable(3, lambda *_: None, lambda version: self.old.recycled(version))
        self.tasks: list[asyncio.Task[None]] = []
        self.old = old_versions.OldVersions(
            self.table,
            0.5,
            view=lambda slot: memoryview(self.bytes[slot.index]),
            writable=lambda slot: memoryview(self.bytes[slot.index]),
            capacity=lambda: NUM_BYTES,
            on_gone=self.gone.append,
            start=lambda work, name: self.tasks.append(asyncio.create_task(work, name=name)),
        )

    def publish(self, step: int) -> None:
        version, blocks = Version(step, 0), digest_blocks(memoryview(bytes(NUM_BYTES)))
        assert self.table.begin(version, manifest_of(NUM_BYTES), 0, 1) is not None
        self.table.commit(version, 0)
        self.table.finish(version, combine(blocks, NUM_BYTES), blocks)

    async def settled(self) -> None:
        while self.tasks:
            await self.tasks.pop()


async def test_a_delta_under_way_keeps_no_reader_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots()
    slots.publish(0)
    slots.publish(1)
    slots.publish(2)
    slots.old.want([Version(0, 0)])
    await slots.settled()
    slots.publish(3)
    assert [(kept.version, kept.base) for kept in slots.old.kept] == [(Version(0, 0), Version(2, 0))]
    begun = threading.Event()

    def never_done(old, new, item_bytes, bytes_max, is_over):
        begun.set()
        while not is_over():
            time.sleep(0.001)
        raise old_versions.GaveWayError

    with monkeypatch.context() as patched:
        patched.setattr(old_versions, "reverse", never_done)
        slots.old.look()
        assert await asyncio.to_thread(begun.wait, 30)
        async with asyncio.timeout(30):
            await slots.old.restore(Version(3, 0))
            assert len(slots.tasks) == 1
            assert not slots.tasks[0].done(), "whoever reads what is READY does not even end it"
        patched.undo()
        async with asyncio.timeout(30):
            await slots.old.restore(Version(0, 0))
    assert slots.table.ready(Version(0, 0)) is not None
    await slots.settled()
    slots.old.close()


async def test_a_delta_that_is_damaged_in_memory_costs_its_version_and_no_slot() -> None:
    slots = Slots()
    for step in range(3):
        slots.publish(step)
    slots.old.want([Version(0, 0)])
    await slots.settled()
    slots.publish(3)
    slots.old.kept[0].parts[0] = old_versions.Part(b"garbage", True)
    with pytest.raises(RelayError, match="v0 was kept as a delta"):
        await slots.old.restore(Version(0, 0))
    assert slots.gone[-1] == Version(0, 0), "the controller is told"
    assert [slot.state for slot in slots.table.slots].count(SlotState.FREE) == 1
    await slots.settled()
    slots.old.close()


# ---- a real relay ------------------------------------------------------------------------------------------


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay("old")
    yield made
    log = made.end()
    assert "Traceback" not in log, log
    assert "relay_task_failed" not in log, log


def publish(relay: Relay, made: list[np.ndarray], *numbers: int) -> None:
    for number in numbers:
        relay.publish_bytes(number, made[number])
        relay.client.lease(Version(number, 0), wait_s=60.0).release()


def versions(relay: Relay) -> tuple[list[int], list[int]]:
    """(kept as deltas, oldest first; READY in slots)"""
    status = relay.client.status()
    ready = sorted(slot.version.step for slot in status.slots if slot.state == "ready" and slot.version)
    return [kept.version.step for kept in status.old.kept], ready


def settled(relay: Relay, *wanted: int) -> None:
    """Wait until every slot is READY, and what is needed of them but the newest is kept."""

    def nothing_is_due(status: protocol.Status) -> bool:
        ready = sorted(slot.version for slot in status.slots if slot.state == "ready" and slot.version is not None)
        needed = {*(Version(step, 0) for step in wanted), *(kept.base for kept in status.old.kept)}
        return len(ready) == 3 and needed & set(ready[:-1]) <= {kept.version for kept in status.old.kept}

    until(relay.client, nothing_is_due)


def reads(relay: Relay, made: list[np.ndarray], number: int) -> None:
    with relay.client.lease(Version(number, 0), verify=True) as lease:
        assert bytes(lease.buffer) == made[number].tobytes()


def test_a_wanted_version_outlives_its_slot_over_many_newer_ones_and_is_read_bit_for_bit(relay: Relay):
    made = steps(9, 0.002)
    publish(relay, made, 0, 1)
    relay.client.retain([Version(0, 0)])
    publish(relay, made, 2)
    for number in range(3, 9):
        settled(relay, 0)
        publish(relay, made, number)
        kept, ready = versions(relay)
        assert 0 in kept
        assert ready == [number - 2, number - 1, number]
    status = relay.client.status()
    assert 0 < status.old.num_bytes == sum(kept.num_bytes for kept in status.old.kept) <= status.old.bytes_max
    assert [kept.is_wanted for kept in status.old.kept] == [kept.version.step == 0 for kept in status.old.kept]
    reads(relay, made, 0)
    assert relay.client.status().old.num_rebuilt == 1
    reads(relay, made, 8)
    with relay.client.lease() as newest:
        assert newest.version == Version(8, 0), "what is rebuilt is as old as it was"


def test_what_nobody_wants_any_more_goes_with_what_was_kept_for_it(relay: Relay):
    made = steps(6, 0.002)
    publish(relay, made, 0, 1)
    relay.client.retain([Version(0, 0)])
    publish(relay, made, 2)
    for number in (3, 4):
        settled(relay, 0)
        publish(relay, made, number)
    assert len(versions(relay)[0]) > 1
    relay.client.retain([])
    assert versions(relay)[0] == []
    assert relay.client.status().old.num_bytes == 0
    with pytest.raises(RelayError, match="not ready in this relay"):
        relay.client.lease(Version(0, 0))


def test_versions_that_changed_everywhere_are_not_kept_and_the_relay_says_why(relay: Relay):
    made = [np.random.default_rng(seed).integers(0, 1 << 16, ITEMS, dtype=np.uint16) for seed in range(4)]
    publish(relay, made, 0, 1)
    relay.client.retain([Version(0, 0)])
    publish(relay, made, 2)
    status = until(relay.client, lambda status: bool(status.old.refusals))
    assert "its difference to the newest takes more than" in status.old.refusals[0]
    publish(relay, made, 3)
    assert versions(relay) == ([], [1, 2, 3])


def test_when_there_is_no_room_for_all_the_oldest_goes(relay: Relay):
    made = steps(12, 0.04)  # each delta takes some 4 % of a version's bytes, all together may take 20 %
    publish(relay, made, 0, 1)
    relay.client.retain([Version(number, 0) for number in range(12)])
    for number in range(2, 12):
        publish(relay, made, number)
        settled(relay, *range(12))
    status = relay.client.status()
    kept, _ = versions(relay)
    assert kept == list(range(kept[0], 11))
    assert kept[0] > 0
    assert "v0" in status.old.refusals[0]
    assert "all deltas together" in status.old.refusals[0]
    reads(relay, made, kept[0])


def test_old_versions_are_rebuilt_under_readers_and_publications(relay: Relay):
    made = steps(24, 0.0005)
    publish(relay, made, 0, 1)
    relay.client.retain([Version(0, 0), Version(1, 0)])
    publish(relay, made, 2)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(10):
                for number in (0, 1):
                    with relay.client.lease(Version(number, 0), verify=True) as lease:
                        assert bytes(lease.buffer) == made[number].tobytes()
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)

    settled(relay, 0, 1)
    publish(relay, made, 3)
    settled(relay, 0, 1)
    thread = threading.Thread(target=read)
    thread.start()
    number = 4
    while thread.is_alive() and number < len(made):
        if relay.publish_if_free(number, made[number]):  # else both others are read: the next serves
            settled(relay, 0, 1)
        number += 1
    thread.join()
    assert not failures, failures
