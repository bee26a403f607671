"""The slot table (pure), digests and slot files."""

import mmap
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from laminar.ids import Version
from laminar.workers.relay.digest import DIGEST_BYTES, combine, digest, digest_blocks
from laminar.workers.relay.manifest import BLOCK_BYTES, Manifest, TensorSpec
from laminar.workers.relay.protocol import RelayError
from laminar.workers.relay.ranges import check_manifest, pack
from laminar.workers.relay.slot_files import SlotFiles
from laminar.workers.relay.slots import OUTCOMES_KEPT, UPSTREAM, Slot, SlotState, SlotTable

MANIFEST = Manifest.plan([("embed", "float32", (5, 3), 4), ("head", "bfloat16", (7,), 2)])


def make_table(num_slots: int = 3) -> tuple[SlotTable, list[tuple[Version, str]]]:
    lost: list[tuple[Version, str]] = []
    return SlotTable(num_slots, lambda version, reason, _: lost.append((version, reason)), lambda version: None), lost


def version(step: int) -> Version:
    return Version(step, 0)


def publish(table: SlotTable, step: int) -> None:
    assert table.begin(version(step), MANIFEST, 0, 1) is not None
    assert table.commit(version(step), 0) is not None
    table.finish(version(step), f"digest-{step}", b"")


def states(table: SlotTable) -> list[tuple[str, int | None]]:
    return [(slot.state.value, slot.version.step if slot.version else None) for slot in table.slots]


def test_a_version_is_ready_only_after_all_ranks_committed():
    table, _ = make_table()
    assert table.begin(version(1), MANIFEST, 0, 2) is table.begin(version(1), MANIFEST, 1, 2)
    assert table.commit(version(1), 1) is None
    with pytest.raises(RelayError, match=r"lease of v1: not ready.*filling: v1"):
        table.lease(version(1))
    assert table.commit(version(1), 0) is not None
    table.finish(version(1), "d", b"")
    assert table.lease(None)[1].version == version(1)


def test_the_oldest_unleased_slot_is_recycled_and_never_the_newest():
    table, _ = make_table()
    for step in (1, 2, 3):
        publish(table, step)
    table.lease(version(1))
    publish(table, 4)
    assert states(table) == [("ready", 1), ("ready", 4), ("ready", 3)]
    publish(table, 5)
    assert states(table) == [("ready", 1), ("ready", 4), ("ready", 5)]


def test_a_version_whose_bytes_have_changed_is_given_to_nobody_and_may_come_again():
    dropped: list[Version] = []
    table = SlotTable(2, lambda version, reason, _: None, dropped.append)
    publish(table, 1)
    lease, slot = table.lease(version(1))
    table.discard(slot)
    table.discard(slot)
    assert dropped == [version(1)]
    assert (table.newest, table.is_settled(version(1))) == (None, False)
    publish(table, 1)
    assert states(table) == [("filling", 1), ("ready", 1)]
    table.release(lease)
    assert states(table) == [("free", None), ("ready", 1)]


def test_newest_means_order_of_publication_not_order_of_completion():
    table, _ = make_table()
    for step in (1, 2):
        table.begin(version(step), MANIFEST, 0, 1)
        table.commit(version(step), 0)
    table.finish(version(2), "d2", b"")
    table.finish(version(1), "d1", b"")
    assert table.lease(None)[1].version == version(2)


def test_a_version_without_a_free_slot_is_superseded_on_every_rank_even_when_a_slot_frees_in_between():
    table, lost = make_table()
    publish(table, 1)
    table.begin(version(2), MANIFEST, 0, 1)
    table.begin(version(3), MANIFEST, 0, 1)
    assert table.begin(version(4), MANIFEST, 0, 2) is None
    table.leave(version(3), 0, "rank 0 died")
    assert table.begin(version(4), MANIFEST, 1, 2) is None
    assert table.begin(version(5), MANIFEST, 0, 1) is not None
    assert lost == [(version(3), "rank 0 died")]


def test_the_slot_of_a_lost_version_is_kept_until_the_last_live_writer_is_gone():
    table, lost = make_table(2)
    for rank in range(3):
        table.begin(version(1), MANIFEST, rank, 3)
    table.commit(version(1), 2)
    table.leave(version(1), 0, "rank 0 died")
    assert lost == [(version(1), "rank 0 died")]
    assert states(table)[0] == ("filling", 1)
    with pytest.raises(RelayError, match="commit of v1 by rank 1: the version is lost"):
        table.commit(version(1), 1)
    assert states(table)[0] == ("free", None)
    with pytest.raises(RelayError, match="rank 0 died"):
        table.begin(version(1), MANIFEST, 0, 3)
    assert len(lost) == 1


def test_ranks_that_disagree_about_the_layout_lose_the_version():
    table, lost = make_table()
    table.begin(version(1), MANIFEST, 0, 2)
    other = Manifest.plan([("embed", "float32", (5, 4), 4), ("head", "bfloat16", (7,), 2)])
    with pytest.raises(RelayError, match=r"tensor 'embed' float32\[5, 4\].* instead of 'embed' float32\[5, 3\]"):
        table.begin(version(1), other, 1, 2)
    with pytest.raises(RelayError, match="lost"):
        table.commit(version(1), 0)
    assert [name for name, _ in lost] == [version(1)]
    assert states(table)[0] == ("free", None)


def test_ranks_that_disagree_about_the_world_size_lose_the_version():
    table, lost = make_table()
    table.begin(version(1), MANIFEST, 0, 2)
    with pytest.raises(RelayError, match="world size 3 instead of 2"):
        table.begin(version(1), MANIFEST, 1, 3)
    assert len(lost) == 1


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, 1 << 30)])
def test_a_rank_outside_the_world_is_refused_and_changes_nothing(rank: int, world_size: int):
    table, lost = make_table()
    with pytest.raises(RelayError, match="is not a rank"):
        table.begin(version(1), MANIFEST, rank, world_size)
    assert states(table) == [("free", None)] * 3
    assert not lost


def test_what_was_published_is_not_published_again():
    table, _ = make_table()
    publish(table, 1)
    with pytest.raises(RelayError, match="v1 was published already"):
        table.begin(version(1), MANIFEST, 0, 1)
    assert states(table)[0] == ("ready", 1)


def test_a_second_begin_or_commit_of_one_rank_is_refused():
    table, lost = make_table()
    table.begin(version(1), MANIFEST, 0, 2)
    with pytest.raises(RelayError, match="rank 0 has begun it already"):
        table.begin(version(1), MANIFEST, 0, 2)
    table.commit(version(1), 0)
    with pytest.raises(RelayError, match="has committed it already"):
        table.commit(version(1), 0)
    assert not lost


def test_the_memory_of_settled_versions_is_bounded():
    table, _ = make_table()
    for step in range(2 * OUTCOMES_KEPT):
        table.refuse(version(step), "no space")
    assert not table.is_settled(version(0))
    assert table.is_settled(version(2 * OUTCOMES_KEPT - 1))
    assert len(table._outcomes) == OUTCOMES_KEPT


def test_release_of_a_lease_that_is_not_held_is_refused():
    table, _ = make_table()
    publish(table, 1)
    lease, _slot = table.lease(None)
    table.release(lease)
    with pytest.raises(RelayError, match="no such lease"):
        table.release(lease)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (Manifest((TensorSpec("a", "float32", (64,), 0, 257), TensorSpec("b", "float32", (1,), 256, 4)), 512), "'b'"),
        (Manifest((TensorSpec("a", "float32", (1,), 4, 4),), 256), "multiple of 256"),
        (Manifest((TensorSpec("a", "float32", (1,), -256, 4),), 256), "overlaps"),
        (Manifest((TensorSpec("a", "float32", (1,), 0, -4),), 256), "'a'"),
        (Manifest((TensorSpec("a", "float32", (64,), 0, 512),), 256), "its tensors need 512"),
        (Manifest((), 0), "its tensors need 1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(manifest: Manifest, message: str):
    with pytest.raises(RelayError, match=message):
        check_manifest(manifest)


def test_a_planned_layout_is_accepted():
    check_manifest(MANIFEST)


# ---- ranks on several hosts ----------------------------------------------------------------------------------


def write_part(table: SlotTable, step: int, publication: int = 1) -> Slot:
    """The only rank of this host writes its shards, which another relay collects."""
    slot = table.begin(version(step), MANIFEST, 1, 2, publication=publication, num_here=1)
    assert slot is not None
    assert table.commit(version(step), 1, publication=publication) is slot
    return slot


def receive(table: SlotTable, step: int) -> Slot:
    """The whole version comes through the chain."""
    slot = table.receive(version(step), MANIFEST)
    assert slot is not None
    table.commit(version(step), UPSTREAM)
    return table.finish(version(step), f"digest-{step}", b"")


def test_shards_of_one_host_stay_until_the_chain_brings_the_whole_version_into_their_slot():
    table, lost = make_table()
    part = write_part(table, 1)
    assert part.is_part
    with pytest.raises(RelayError, match="not ready"):
        table.lease(version(1))
    assert receive(table, 1) is part
    assert table.lease(None)[1].version == version(1)
    assert not lost


def test_shards_that_are_still_being_written_or_sent_are_not_overwritten_by_the_chain():
    table, _ = make_table()
    table.begin(version(1), MANIFEST, 1, 2, publication=1, num_here=1)
    assert table.receive(version(1), MANIFEST) is None
    slot = table.commit(version(1), 1, publication=1)
    assert slot is not None
    lease = table.follow(slot)
    assert table.receive(version(1), MANIFEST) is None
    table.release(lease)
    assert table.receive(version(1), MANIFEST) is slot


def test_shards_give_way_to_another_version_and_may_come_through_the_chain_afterwards():
    table, lost = make_table(2)
    publish(table, 1)
    write_part(table, 2, publication=2)
    assert write_part(table, 3, publication=3).version == version(3)
    assert table.filling(version(2)) is None
    receive(table, 3)
    receive(table, 2)
    assert not lost, "they had been sent"


def test_shards_under_a_lease_give_way_to_nothing():
    table, _ = make_table(2)
    publish(table, 1)
    table.follow(write_part(table, 2, publication=2))
    assert table.begin(version(3), MANIFEST, 1, 2, publication=3, num_here=1) is None


def test_a_lost_version_begins_again_when_it_is_published_anew_and_late_ranks_of_before_are_refused():
    table, lost = make_table()
    table.begin(version(1), MANIFEST, 0, 2, publication=1)
    table.leave(version(1), 0, "rank 0 died", 1)
    with pytest.raises(RelayError, match="rank 0 died"):
        table.begin(version(1), MANIFEST, 1, 2, publication=1)
    for rank in (0, 1):
        assert table.begin(version(1), MANIFEST, rank, 2, publication=2) is not None
    with pytest.raises(RelayError, match="rank 0 has not begun it"):
        table.commit(version(1), 0, publication=1)
    table.commit(version(1), 0, publication=2)
    assert table.commit(version(1), 1, publication=2) is not None
    assert len(lost) == 1


def test_a_publication_that_still_fills_is_lost_when_its_version_is_published_anew():
    table, lost = make_table()
    old = table.begin(version(1), MANIFEST, 0, 2, publication=1)
    new = table.begin(version(1), MANIFEST, 0, 2, publication=2)
    assert old is not None
    assert new is not None
    assert old.index != new.index, "a live writer of the first may still touch its slot"
    assert lost == [(version(1), "it is published anew")]
    table.leave(version(1), 0, "gone", 1)
    assert [slot.publication for slot in table.slots] == [0, 2, 0]


def test_a_copy_that_its_ranks_publish_anew_is_no_lost_publication():
    table, lost = make_table()
    copy = table.receive(version(1), MANIFEST)
    assert copy is not None
    assert table.begin(version(1), MANIFEST, 0, 1, publication=4) is not copy
    assert copy.lost
    assert not lost, "the controller would take it for the publication that is under way"
    table.drop(version(1))
    with pytest.raises(RelayError, match="published already"):
        table.begin(version(1), MANIFEST, 0, 2, publication=4)
    table.commit(version(1), 0, publication=4)
    table.finish(version(1), "digest", b"")
    assert states(table) == [("free", None), ("ready", 1), ("free", None)]


def test_a_version_that_was_ready_is_not_published_again():
    table, _ = make_table()
    publish(table, 1)
    with pytest.raises(RelayError, match="published already"):
        table.begin(version(1), MANIFEST, 0, 1, publication=7)
    assert table.receive(version(1), MANIFEST) is None


def test_ranks_that_together_write_too_little_or_too_much_lose_the_version():
    embed = MANIFEST.tensors[0]
    table, lost = make_table()
    whole = pack((spec.offset, spec.offset + spec.num_bytes) for spec in MANIFEST.tensors)
    table.begin(version(1), MANIFEST, 0, 2, ranges=whole)
    with pytest.raises(RelayError, match=r"ranks 0 and 1 both write elements 0 to 3 of 'embed'"):
        table.begin(version(1), MANIFEST, 1, 2, ranges=pack([(embed.offset, embed.offset + 12)]))
    with pytest.raises(RelayError, match="both write"):
        table.commit(version(1), 0)
    assert states(table)[0] == ("free", None)
    with pytest.raises(RelayError, match="no rank writes elements 0 to 7 of 'head'"):
        table.begin(version(2), MANIFEST, 0, 1, ranges=pack([(embed.offset, embed.offset + embed.num_bytes)]))
    assert [name for name, _ in lost] == [version(1), version(2)]


class SlotTableMachine(RuleBasedStateMachine):
    """Two ranks, three slots, versions in any order, deaths and time-outs anywhere."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.lost: dict[Version, str] = {}
        self.dropped: dict[Version, None] = {}
        self.table = SlotTable(3, self._note_lost, self._note_dropped)
        self.held: dict[int, tuple[int, Version, str]] = {}
        self.superseded: dict[Version, None] = {}
        self.newest_order = 0

    def _note_dropped(self, name: Version) -> None:
        assert name not in self.dropped, "reported twice"
        assert name not in [held for _, held, _ in self.held.values()], "somebody reads it"
        slot = self.table.ready(name)
        assert slot is not None
        assert slot is not self.table.newest
        self.dropped[name] = None

    def _note_lost(self, name: Version, reason: str, publication: int) -> None:
        assert name not in self.lost, "reported twice"
        self.lost[name] = reason

    @rule(step=st.integers(0, 12), rank=st.integers(0, 1))
    def begin(self, step: int, rank: int) -> None:
        name = version(step)
        try:
            slot = self.table.begin(name, MANIFEST, rank, 2)
        except RelayError:
            return
        assert (slot is None) or name not in self.superseded, "ranks got different answers"
        assert name not in self.lost
        if slot is None:
            self.superseded[name] = None

    @rule(step=st.integers(0, 12), rank=st.integers(0, 1))
    def commit(self, step: int, rank: int) -> None:
        try:
            self.table.commit(version(step), rank)
        except RelayError:
            return
        assert version(step) not in self.lost

    @rule(step=st.integers(0, 12), rank=st.integers(0, 1))
    def die(self, step: int, rank: int) -> None:
        slot = self.table.filling(version(step))
        if slot is not None and rank in slot.writing:
            self.table.leave(version(step), rank, "died")
            assert version(step) in self.lost

    @rule(step=st.integers(0, 12))
    def time_out(self, step: int) -> None:
        slot = self.table.filling(version(step))
        if slot is not None and not slot.complete:
            self.table.lose(version(step), "late")

    @rule(index=st.integers(0, 2))
    def finish(self, index: int) -> None:
        slot = self.table.slots[index]
        if slot.complete:
            assert slot.version is not None
            self.table.finish(slot.version, f"digest of {slot.version}", b"")
            self.newest_order = max(self.newest_order, slot.order)

    @rule(target=leases, step=st.none() | st.integers(0, 12))
    def lease(self, step: int | None):
        try:
            number, slot = self.table.lease(None if step is None else version(step))
        except RelayError:
            return multiple()
        assert slot.version is not None
        self.held[number] = (slot.index, slot.version, slot.digest)
        return number

    @rule(number=consumes(leases))
    def release(self, number: int) -> None:
        self.table.release(number)
        del self.held[number]

    @invariant()
    def a_leased_slot_is_untouched(self) -> None:
        for index, name, digest_then in self.held.values():
            slot = self.table.slots[index]
            assert (slot.state, slot.version, slot.digest) == (SlotState.READY, name, digest_then)

    @invariant()
    def the_newest_ready_version_stays(self) -> None:
        if self.newest_order:
            assert self.table.newest is not None
            assert self.table.newest.order == self.newest_order

    @invariant()
    def every_slot_is_in_one_state_and_every_version_in_one_slot(self) -> None:
        names = [slot.version for slot in self.table.slots if slot.version is not None]
        assert len(names) == len(dict.fromkeys(names))
        for slot in self.table.slots:
            assert (slot.state is SlotState.FREE) == (slot.version is None)
            if slot.state is not SlotState.READY:
                assert not slot.leases
                assert not slot.digest
            if slot.state is not SlotState.FILLING:
                assert not slot.writing
                assert not slot.lost
            if slot.lost:
                assert slot.writing, "kept without a live writer"
            if slot.state is SlotState.READY:
                assert len(slot.committed) == 2
                assert slot.version not in self.lost


TestSlotTable = SlotTableMachine.TestCase
TestSlotTable.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_a_digest_covers_every_byte_the_block_order_and_the_length():
    data = bytearray(os.urandom(2 * BLOCK_BYTES + 77))
    reference = digest(memoryview(data))
    assert len(digest_blocks(memoryview(data))) == 3 * DIGEST_BYTES
    for position in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(data) - 1):
        data[position] ^= 1
        assert digest(memoryview(data)) != reference
        data[position] ^= 1
    assert digest(memoryview(data)) == reference
    blocks = digest_blocks(memoryview(data))
    swapped = blocks[DIGEST_BYTES : 2 * DIGEST_BYTES] + blocks[:DIGEST_BYTES] + blocks[2 * DIGEST_BYTES :]
    assert combine(swapped, len(data)) != reference
    assert combine(blocks, len(data) + 1) != reference


def test_slot_files_are_made_at_capacity_and_prefault_leaves_no_hole(tmp_path):
    capacity = 2 * BLOCK_BYTES + 4096 + 1
    files = SlotFiles(tmp_path, 2, capacity)
    files.allocate()
    for index in range(2):
        files.prefault(index)
        info = (tmp_path / files.names[index]).stat()
        assert info.st_size == capacity
        assert info.st_blocks * 512 >= capacity
        assert info.st_mode & 0o777 == 0o600
        with files.view(index, capacity) as view:
            assert bytes(view) == bytes(capacity)
    files.close()


def test_a_slot_view_shows_what_a_writer_put_into_the_file(tmp_path):
    files = SlotFiles(tmp_path, 1, mmap.PAGESIZE)
    files.allocate()
    with (tmp_path / "slot-0").open("r+b") as file:
        file.write(b"weights")
    with files.view(0, 7) as view:
        assert bytes(view) == b"weights"
        assert view.readonly
    files.close()


def test_too_little_space_is_refused_before_any_file_exists(tmp_path):
    files = SlotFiles(tmp_path, 3, 1000)
    with pytest.raises(RelayError, match=r"3 slots x 1000 bytes, there are 2999 bytes free.*--shm-size"):
        files.allocate(lambda directory: 2999)
    assert list(tmp_path.iterdir()) == []


def test_space_that_runs_out_while_allocating_is_reported_and_leaves_nothing(tmp_path):
    impossible = 1 << 60
    files = SlotFiles(tmp_path, 2, impossible)
    with pytest.raises(RelayError, match="slots x"):
        files.allocate(lambda directory: 4 * impossible)
    assert list(tmp_path.iterdir()) == []
