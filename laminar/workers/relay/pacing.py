"""How much a sender sends in one go, and how fast: the chunk size that suits its link, and a limit that was set."""

import math
import time
from collections.abc import Callable

from laminar.workers.relay.manifest import BLOCK_BYTES

CHUNK_BYTES_MAX = 64 * BLOCK_BYTES  # a new epoch, a delta or a rate limit takes effect after a chunk
SMOOTHING = 0.1  # of what chunks took: links of other traffic change, single chunks vary twofold
BURST_S = 0.1  # what an idle link saves up; as often a waiting sender gives a sign of life


def chain_s(num_bytes: int, num_relays: int, start_s: float, byte_s: float, chunk_bytes: int) -> float:
    """What a chain pipelined broadcast of M bytes in k chunks over p relays, master included, takes (Laminar, section 4):

        T(p, k) = (p + k - 2) (M/k T_byte + T_start)

    `start_s`, `byte_s`: T_start of a message and T_byte of a byte on a link, above 0. A last chunk may be a part of one.
    """
    num_chunks = max(num_bytes / chunk_bytes, 1.0)
    return (max(num_relays, 2) + num_chunks - 2) * (num_bytes / num_chunks * byte_s + start_s)


def best_chunk_bytes(num_bytes: int, num_relays: int, start_s: float, byte_s: float) -> int:
    """Chunk size by which `chain_s` is least, in whole digest blocks, from one to 64.

    Its minimum is at k* = sqrt((p - 2) M T_byte / T_start) chunks; of the two sizes around M / k* the better one is taken.
    """
    num_chunks = math.sqrt(max(num_relays - 2, 0) * num_bytes * byte_s / start_s)
    below = math.floor(num_bytes / max(num_chunks, 1.0) / BLOCK_BYTES) * BLOCK_BYTES
    sizes = [min(max(size, BLOCK_BYTES), CHUNK_BYTES_MAX) for size in (below, below + BLOCK_BYTES)]
    return min(sizes, key=lambda size: chain_s(num_bytes, num_relays, start_s, byte_s, size))


class LinkCost:
    """What messages take on one link, as measured on it; 0 = not measured yet."""

    def __init__(self) -> None:
        self.start_s = self.byte_s = 0.0

    def started(self, seconds: list[float]) -> None:
        """Sending empty messages took so long; the least counts, since other threads may hold one up."""
        self.start_s = max(min(seconds), 1e-7)

    def took(self, num_bytes: int, seconds: float) -> None:
        """A chunk of so many bytes took so long."""
        byte_s = max(seconds - self.start_s, 1e-9) / num_bytes
        self.byte_s = byte_s if not self.byte_s else self.byte_s + (byte_s - self.byte_s) * SMOOTHING

    def best_chunk_bytes(self, num_bytes: int, num_relays: int) -> int:
        """See the function; one block while there is no measurement, or the number of relays is not known (0)."""
        if not num_relays or not self.start_s or not self.byte_s:
            return BLOCK_BYTES
        return best_chunk_bytes(num_bytes, num_relays, self.start_s, self.byte_s)


class TokenBucket:
    """Bytes that may go now, at `bytes_per_s` in the long run (0 = no limit): one chunk may overdraw it, the next one waits."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s, self._clock = bytes_per_s, clock
        self._balance, self._at = 0.0, clock()

    def wait_s(self) -> float:
        """Until the next chunk may go."""
        if not self._bytes_per_s:
            return 0.0
        now = self._clock()
        earned = (now - self._at) * self._bytes_per_s
        self._balance, self._at = min(self._balance + earned, BURST_S * self._bytes_per_s), now
        return max(-self._balance / self._bytes_per_s, 0.0)

    def takes_s(self, num_bytes: int) -> float:
        """What so many bytes cost in the long run."""
        return num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0

    def spend(self, num_bytes: int) -> None:
        """They went."""
        self._balance -= num_bytes
