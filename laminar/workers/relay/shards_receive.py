"""The receiving half of a shard link: shards that ranks of another host wrote, straight into the slot of the version.

Invariants:
* Only bytes that a rank announced, and that no other rank writes, are written, each rank's in its order.
* A rank is among the slot's writers as long as its link may write, so a slot is never used for another version meanwhile.
"""

import contextlib

import xxhash

from laminar.errors import ProtocolError
from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay.chain_store import ChainStore
from laminar.workers.relay.protocol import Begin, RelayError
from laminar.workers.relay.ranges import unpack
from laminar.workers.relay.shards import Collection
from laminar.workers.transport import Link, LinkEnded


class _Writer:
    """One rank of the other host: which bytes are due next."""

    def __init__(self, rank: int, packed: bytes) -> None:
        self.rank, self.digest = rank, xxhash.xxh3_128()
        self._ranges = unpack(packed).tolist()
        self._at = 0
        self._position: int = self._ranges[0][0] if self._ranges else -1

    @property
    def position(self) -> int:
        """Where its next bytes go; -1 = it has written all."""
        return self._position

    def advance(self, num_bytes: int) -> None:
        """They are there."""
        self._position += num_bytes
        if self._position == self._ranges[self._at][1]:
            self._at += 1
            self._position = self._ranges[self._at][0] if self._at < len(self._ranges) else -1

    @property
    def end(self) -> int:
        """Of the range that it is in."""
        return int(self._ranges[self._at][1])


class ShardReceiver:
    """Takes the shards of one publication over one link."""

    def __init__(self, link: Link, incoming: frames.Frames, store: ChainStore, publication: int) -> None:
        self._link, self._incoming, self._store, self._publication = link, incoming, store, publication
        self._writers: dict[int, _Writer] = {}
        self._num_whole = 0
        self._collection: Collection | None = None

    def run(self) -> None:
        """To the end of the version. Raises LinkEnded or a LaminarError; whatever it was, what is not complete by then is lost."""
        first = self._incoming.expect(frames.Shards)
        assert isinstance(first, frames.Shards)
        self._incoming.on_nothing = self._check_lost
        try:
            self._take(first)
        except BaseException as error:
            self._leave(first, f"the link from {self._link.peer} ended: {str(error) or repr(error)}")
            raise

    def _take(self, first: frames.Shards) -> None:
        while self._num_whole < first.num_ranks:
            said = self._incoming.next()
            if isinstance(said, frames.Chunk):
                self._take_chunk(said)
            elif isinstance(said, frames.Share):
                self._join(first, said)
            elif isinstance(said, frames.Whole):
                self._commit(first, said)
            else:
                raise ProtocolError(f"{self._link.peer} sent {said!r} in the middle of shards of {first.version}")
        self._tell_end(self._collection)

    def _join(self, first: frames.Shards, share: frames.Share) -> None:
        wanted = Begin(
            version=first.version,
            manifest=first.manifest,
            rank=share.rank,
            world_size=first.world_size,
            ranges=share.ranges,
            publication=self._publication,
        )
        self._collection = self._store.join(wanted)
        self._writers[share.rank] = _Writer(share.rank, share.ranges)

    def _take_chunk(self, chunk: frames.Chunk) -> None:
        self._check_lost()
        writer = next((w for w in self._writers.values() if w.position == chunk.offset), None)
        if writer is None or chunk.is_delta or chunk.offset + chunk.length > writer.end or self._collection is None:
            raise ProtocolError(
                f"{self._link.peer} sent {chunk.length} bytes at {chunk.offset}, which are nobody's next"
            )
        place = self._collection.buffer[chunk.offset : chunk.offset + chunk.length]
        self._link.receive_into(place)
        writer.digest.update(place)
        writer.advance(chunk.length)

    def _commit(self, first: frames.Shards, whole: frames.Whole) -> None:
        writer = self._writers.get(whole.rank)
        if writer is None or writer.position >= 0:
            raise ProtocolError(f"{self._link.peer} ended the shards of rank {whole.rank}, of which bytes are missing")
        if writer.digest.digest() != whole.digest:
            raise ProtocolError(f"the shards of rank {whole.rank} did not arrive as {self._link.peer} sent them")
        self._store.commit(first.version, whole.rank, whole.canary, self._publication)
        del self._writers[whole.rank]
        self._num_whole += 1

    def _check_lost(self) -> None:
        if self._collection is not None and self._collection.lost:
            raise LinkEnded("the version was lost here")

    def _tell_end(self, collection: Collection | None) -> None:
        assert collection is not None
        while not (collection.ready or collection.lost):
            collection.wait_for_end(frames.SIGN_OF_LIFE_S)
            frames.send_nothing(self._link)
        frames.send(self._link, frames.Done(version=collection.version, verified=collection.ready))

    def _leave(self, first: frames.Shards, reason: str) -> None:
        for rank in self._writers:
            with contextlib.suppress(RelayError, LinkEnded):
                self._store.leave(first.version, rank, reason, self._publication)
