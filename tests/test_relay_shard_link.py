"""What a shard link does with a peer that breaks the rules: nothing outside the announced bytes is written, the version is lost."""

import pytest
import xxhash
from memory_link import Peer, Wire

from laminar.errors import ProtocolError
from laminar.ids import Version
from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay.manifest import Manifest
from laminar.workers.relay.protocol import Begin
from laminar.workers.relay.ranges import pack
from laminar.workers.relay.shards import Collection
from laminar.workers.relay.shards_receive import ShardReceiver
from laminar.workers.transport import LinkEnded

V1 = Version(1, 0)
MANIFEST = Manifest.plan([("w", "float32", (64,), 4)])
FIRST, SECOND = (0, 64), (128, 192)
DATA = bytes(range(128))


class Store:
    """The relay that collects."""

    def __init__(self) -> None:
        self.slot = bytearray(MANIFEST.num_bytes)
        self.collection = Collection(V1, memoryview(self.slot))
        self.committed: list[int] = []
        self.left: list[tuple[int, str]] = []
        self.fails_at = -1

    def join(self, wanted: Begin) -> Collection:
        return self.collection

    def commit(self, version: Version, rank: int, canary: object, publication: int) -> None:
        if rank == self.fails_at:
            raise BufferError("a bug")
        self.committed.append(rank)
        self.collection.end(ready=True)

    def leave(self, version: Version, rank: int, reason: str, publication: int) -> None:
        self.left.append((rank, reason))


def received(*said: object) -> tuple[Store, Wire]:
    """What a relay makes of these messages and chunks ((offset, bytes)), of rank 3 that writes two ranges."""
    link, store = Wire(), Store()
    peer = Peer(link)
    frames.send(peer, frames.Shards(version=V1, manifest=MANIFEST, world_size=4, num_ranks=1))
    frames.send(peer, frames.Share(rank=3, ranges=pack([FIRST, SECOND])))
    for each in said:
        if isinstance(each, tuple):
            frames.send_bytes(peer, each[0], memoryview(each[1]))
        else:
            frames.send(peer, each)
    try:
        ShardReceiver(link, frames.Frames(link), store, 7).run()  # type: ignore[arg-type]
    except (ProtocolError, LinkEnded):
        assert [rank for rank, _ in store.left] == [3], "the version is lost"
        assert store.slot[64:128] + store.slot[192:] == bytes(128), (
            "nothing is written where the rank announced nothing"
        )
        raise
    return store, link


def whole(data: bytes = DATA) -> frames.Whole:
    return frames.Whole(rank=3, digest=xxhash.xxh3_128_digest(data))


def test_what_a_rank_announced_is_written_in_parts_of_any_size():
    store, link = received((0, DATA[:10]), (10, DATA[10:64]), (128, DATA[64:]), whole())
    assert (store.committed, store.left) == ([3], [])
    assert store.slot == DATA[:64] + bytes(64) + DATA[64:] + bytes(64)
    assert link.answered, "the peer is told that the version is whole"


@pytest.mark.parametrize(
    "chunk",
    [(64, DATA[:8]), (192, DATA[:8]), (0, DATA[:65]), (8, DATA[:8]), (128, DATA[:64]), (1 << 40, DATA[:8])],
    ids=["between", "behind", "too long", "not the next", "the second range first", "out of the slot"],
)
def test_bytes_that_are_not_the_next_of_a_rank_are_not_written(chunk: tuple[int, bytes]):
    with pytest.raises(ProtocolError, match="which are nobody's next"):
        received(chunk, whole())


def test_a_chunk_that_comes_twice_is_refused():
    with pytest.raises(ProtocolError, match="nobody's next"):
        received((0, DATA[:64]), (0, DATA[:64]), (128, DATA[64:]), whole())


def test_a_bit_that_flipped_on_the_way_loses_the_version():
    flipped = bytes([DATA[0] ^ 1]) + DATA[1:64]
    with pytest.raises(ProtocolError, match="the shards of rank 3 did not arrive as peer sent them"):
        received((0, flipped), (128, DATA[64:]), whole())


def test_a_rank_that_ends_with_bytes_missing_loses_the_version():
    with pytest.raises(ProtocolError, match="of which bytes are missing"):
        received((0, DATA[:64]), whole(DATA[:64]))


def test_a_link_that_ends_in_the_middle_loses_the_version():
    with pytest.raises(LinkEnded):
        received((0, DATA[:64]))


def test_a_bug_in_the_thread_of_a_link_loses_the_version_and_keeps_no_slot():
    link, store = Wire(), Store()
    store.fails_at = 3
    peer = Peer(link)
    frames.send(peer, frames.Shards(version=V1, manifest=MANIFEST, world_size=4, num_ranks=2))
    for rank, span in ((2, SECOND), (3, FIRST)):
        frames.send(peer, frames.Share(rank=rank, ranges=pack([span])))
    frames.send_bytes(peer, 0, memoryview(DATA[:64]))
    frames.send(peer, whole(DATA[:64]))
    with pytest.raises(BufferError):
        ShardReceiver(link, frames.Frames(link), store, 7).run()  # type: ignore[arg-type]
    assert [rank for rank, _ in store.left] == [2, 3]
