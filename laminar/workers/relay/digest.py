"""Digests of weight bytes: xxh3_128 of every block of `BLOCK_BYTES`, and one over those for the whole version.

The blocks' digests are kept, so that chunks (whole blocks) can be checked one by one. xxh3 guards against torn
reads and transport faults, not against an adversary.
"""

import xxhash

from laminar.workers.relay.manifest import BLOCK_BYTES

DIGEST_BYTES = 16


def digest_blocks(buffer: memoryview) -> bytes:
    """16 bytes per block of `buffer` (1-D bytes), in order; the last block may be short."""
    digests = bytearray()
    for start in range(0, len(buffer), BLOCK_BYTES):
        digests += xxhash.xxh3_128_digest(buffer[start : start + BLOCK_BYTES])
    return bytes(digests)


def combine(blocks: bytes, num_bytes: int) -> str:
    """The version's digest, 32 hex digits, from its blocks' digests and its size in bytes."""
    return xxhash.xxh3_128_hexdigest(blocks + num_bytes.to_bytes(8, "little"))


def digest(buffer: memoryview) -> str:
    """The digest of a whole version."""
    return combine(digest_blocks(buffer), len(buffer))
