"""One version on its way through this relay: how much of it is here, and who waits for more.

The receiver of the link from upstream advances it, or whoever digests what ranks of this host wrote; the sender to downstream
follows. A flow outlives links: a new upstream goes on where the old one stopped.
"""

import threading

import xxhash

from laminar.errors import ProtocolError
from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay.digest import DIGEST_BYTES, combine, digest_blocks
from laminar.workers.relay.manifest import BLOCK_BYTES, Manifest


class Flow:
    """`buffer`: the version's bytes in their slot, writable if they are still to come.

    Invariant: bytes [0, `received`) are those of the version and never change again; `blocks` has their digests.
    """

    def __init__(self, version: Version, manifest: Manifest, buffer: memoryview) -> None:
        self.version, self.manifest, self.buffer = version, manifest, buffer
        self.num_bytes = manifest.num_bytes
        self.received = 0
        self.blocks = bytearray()
        self.digest = ""
        """Known when it is complete and verified."""
        self.canary: Canary | None = None
        self.lost = False
        self.is_at_rest = False
        """It was READY before: its bytes were verified some time ago."""
        self.is_whole_only = False
        """A delta made wrong bytes, so one of its bases has changed: the rest is to come without."""
        self._changed = threading.Condition()

    @classmethod
    def complete(
        cls, version: Version, manifest: Manifest, buffer: memoryview, blocks: bytes, digest: str, canary: Canary | None
    ) -> "Flow":
        """A version that is READY; `blocks`: the digests of its blocks."""
        flow = cls(version, manifest, buffer)
        flow.received = flow.num_bytes
        flow.blocks, flow.digest, flow.canary = bytearray(blocks), digest, canary
        flow.is_at_rest = True
        return flow

    def next_block(self) -> memoryview:
        """Where the bytes of the next digest block go."""
        return self.buffer[self.received : min(self.received + BLOCK_BYTES, self.num_bytes)]

    def digests(self, start: int, end: int) -> bytes:
        """Of the blocks from byte `start` to `end`, which are here."""
        return bytes(self.blocks[start // BLOCK_BYTES * DIGEST_BYTES : -(-end // BLOCK_BYTES) * DIGEST_BYTES])

    def advance(self, block: memoryview, expected: bytes | None = None) -> None:
        """The next block is in place. Raises ProtocolError, and takes nothing, when it has not the digest that is expected."""
        digest = xxhash.xxh3_128_digest(block)
        if expected is not None and digest != expected:
            raise ProtocolError(f"the bytes of {self.version} from {self.received} on are not what upstream has")
        self.blocks += digest
        with self._changed:
            self.received += block.nbytes
            self._changed.notify_all()

    def take_all(self, stop: threading.Event) -> None:
        """All bytes are in place already; digest them. Ends early at `stop`."""
        while self.received < self.num_bytes and not stop.is_set():
            self.advance(self.next_block())

    def is_intact(self, start: int, end: int) -> bool:
        """Whether the bytes of the blocks from `start` to `end` still have their digests."""
        return digest_blocks(self.buffer[start:end]) == self.digests(start, end)

    def verifies(self, digest: str) -> bool:
        """All bytes are here and they are the master's."""
        return self.received == self.num_bytes and combine(bytes(self.blocks), self.num_bytes) == digest

    def finish(self, digest: str, canary: Canary | None) -> None:
        """Complete and verified."""
        with self._changed:
            self.digest, self.canary = digest, canary
            self._changed.notify_all()

    def lose(self) -> None:
        """It will never be complete, or is not any more."""
        with self._changed:
            self.lost, self.digest = True, ""
            self._changed.notify_all()

    def wait_for(self, num_bytes: int, timeout_s: float) -> int:
        """Bytes that are here, once they are so many, or it is lost, or after the time."""
        with self._changed:
            self._changed.wait_for(lambda: self.received >= num_bytes or self.lost, timeout_s)
            return self.received

    def wait_for_end(self, timeout_s: float) -> None:
        """Until it is complete and verified, or lost, or after the time."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.digest) or self.lost, timeout_s)
