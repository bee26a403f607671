"""The sending half of a shard link: what ranks of this host write, to the relay that collects the version, as they write it."""

import threading
import time
from collections.abc import Callable

import xxhash

from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay.pacing import TokenBucket
from laminar.workers.relay.shards import Outgoing, Share
from laminar.workers.transport import Link, LinkEnded

CHUNK_BYTES = 4 << 20  # nothing waits for a whole chunk here, so only the cost of a start counts


class _Progress:
    """How much of a rank's share has been sent."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.digest = xxhash.xxh3_128()
        self.is_whole = False


class ShardSender:
    """Sends one publication over one link."""

    def __init__(self, link: Link, shards: Outgoing, turn: threading.Lock, bytes_per_s_max: float) -> None:
        """`turn` is held while bytes are sent; `bytes_per_s_max` 0: as fast as they go."""
        self._link, self._shards, self._turn = link, shards, turn
        self._bucket = TokenBucket(bytes_per_s_max)
        self._progress: dict[int, _Progress] = {}
        self._is_on = False

    def run(self, on_sent: Callable[[], None]) -> None:
        """Until the other relay holds the whole version; `on_sent` is called when the shards are not read any more.

        Raises LinkEnded; ProtocolError for a peer that does not keep to the rules.
        """
        shards = self._shards
        first = frames.Shards(
            version=shards.version,
            manifest=shards.manifest,
            world_size=shards.world_size,
            num_ranks=shards.num_here,
        )
        frames.send(self._link, first)
        try:
            self._send_all()
        finally:
            if self._is_on:
                self._turn.release()
        on_sent()
        done = frames.Frames(self._link).expect(frames.Done)
        assert isinstance(done, frames.Done)
        if not done.verified:
            raise LinkEnded(f"{shards.collector.name} lost the version")

    def _send_all(self) -> None:
        shards = self._shards
        while sum(progress.is_whole for progress in self._progress.values()) < shards.num_here:
            shares, num_changes = shards.shares()
            for share in shares:
                self._announce(share)
            self._is_on = self._is_on or self._turn.acquire(blocking=False)
            if not (self._is_on and any([self._send(share) for share in shares])):
                shards.wait(num_changes, frames.SIGN_OF_LIFE_S)
                frames.send_nothing(self._link)
            if shards.lost:
                raise LinkEnded("the version was lost here")

    def _announce(self, share: Share) -> None:
        if share.rank not in self._progress:
            frames.send(self._link, frames.Share(rank=share.rank, ranges=share.packed))
            self._progress[share.rank] = _Progress()

    def _send(self, share: Share) -> bool:
        """What the rank has written since. Whether there was anything."""
        progress = self._progress[share.rank]
        committed, end = share.committed, share.num_written
        moved = end > progress.num_sent
        for first, last in share.ranges[progress.num_sent : end]:
            self._send_range(first, last, progress)
        progress.num_sent = end
        if committed and not progress.is_whole:
            whole = frames.Whole(rank=share.rank, digest=progress.digest.digest(), canary=share.canary)
            frames.send(self._link, whole)
            progress.is_whole = moved = True
        return moved

    def _send_range(self, start: int, end: int, progress: _Progress) -> None:
        for position in range(start, end, CHUNK_BYTES):
            while (wait_s := self._bucket.wait_s()) > 0 and not self._shards.lost:
                time.sleep(min(wait_s, frames.SIGN_OF_LIFE_S))
                frames.send_nothing(self._link)
            if self._shards.lost:
                raise LinkEnded("the version was lost here")
            part = self._shards.buffer[position : min(position + CHUNK_BYTES, end)]
            progress.digest.update(part)
            frames.send_bytes(self._link, position, part)
            self._bucket.spend(part.nbytes)
