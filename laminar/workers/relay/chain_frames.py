"""What two neighbours of the chain say to each other over one link.

    upstream (nearer the master)                      downstream
            ── Hello{epoch, nonce} ──────────────────────►
            ◄───────────────────────────── Challenge{…} ──      both prove that they know the run's token
            ── Proof ────────────────────────────────────►
            ◄────────────────────────── Welcome | Refused ──
            ── Offer{version, manifest} ─────────────────►
            ◄──────────────────────── Have{offset, base} ──      from where on it lacks bytes
            ── bytes, a delta to the base, bytes, … ─────►      each after its blocks' digests, and forwarded as it arrives
            ── End{digest} ──────────────────────────────►
            ◄────────────────────────────────── Done{…} ──
    both    ── nothing ──                                       whenever they have nothing else to say

On a shard link, from a relay with some ranks of the trainer to the one that collects a version, after the same handshake:

            ── Shards{version, manifest} ────────────────►
            ── Share{rank, ranges} ──────────────────────►      the rank is going to write these bytes
            ── bytes, … ─────────────────────────────────►      as it writes them
            ── Whole{rank, digest} ──────────────────────►      they were all
            ◄────────────────────────────────── Done{…} ──      when all ranks of all hosts have written

A frame is a header and a body: a message in msgpack, or the bytes of a version. Whoever waits says `nothing` now and then, so
that silence means a dead or hanging peer.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from laminar.errors import ProtocolError
from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay.digest import DIGEST_BYTES
from laminar.workers.relay.manifest import BLOCK_BYTES, Manifest
from laminar.workers.transport import Link

HEADER = struct.Struct("<BQQ")
"""Kind, length of the body, offset in the version."""
NOTHING, MESSAGE, BYTES, DELTA, DIGESTS = 0, 1, 2, 3, 4
MESSAGE_BYTES_MAX = 64 << 20  # a manifest of a million tensors
CHUNK_BYTES_MAX = 1 << 30
DIGESTS_BYTES_MAX = CHUNK_BYTES_MAX // BLOCK_BYTES * DIGEST_BYTES
NONCE_BYTES = 16
SIGN_OF_LIFE_S = 0.1  # a fifth of the default progress deadline


class _Struct(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag."""


class Hello(_Struct, frozen=True, kw_only=True):
    """The first word, from upstream."""

    name: str
    epoch: int
    nonce: bytes
    publication: int = 0
    """Not 0: the link is for shards of this publication, and has no part in the chain."""


class Challenge(_Struct, frozen=True, kw_only=True):
    """The downstream end's proof, and its own challenge."""

    proof: bytes
    nonce: bytes


class Proof(_Struct, frozen=True, kw_only=True):
    """The upstream end's proof."""

    proof: bytes


class Welcome(_Struct, frozen=True, kw_only=True):
    """Both are neighbours in this epoch."""


class Refused(_Struct, frozen=True, kw_only=True):
    """`early`: the downstream end has not heard of that epoch yet; try again soon. Else this link is of no use."""

    reason: str
    early: bool = False


class Offer(_Struct, frozen=True, kw_only=True):
    """Upstream has this version, or gets it right now."""

    version: Version
    manifest: Manifest


class Have(_Struct, frozen=True, kw_only=True):
    """Send from `offset` on; -1: it has no place for it now, or had it once."""

    version: Version
    offset: int
    complete: bool = False
    """Nothing is missing and the digest is known."""
    base: Version | None = None
    """Held until the version's end: chunks may come as deltas to it."""


class End(_Struct, frozen=True, kw_only=True):
    """All bytes are sent; empty digest = upstream lost the version in mid-way."""

    version: Version
    digest: str
    canary: Canary | None = None


class Done(_Struct, frozen=True, kw_only=True):
    """Complete and verified, or not."""

    version: Version
    verified: bool


class Shards(_Struct, frozen=True, kw_only=True):
    """Shards of `num_ranks` of the ranks of this version are to follow."""

    version: Version
    manifest: Manifest
    world_size: int
    num_ranks: int


class Share(_Struct, frozen=True, kw_only=True):
    """A rank is going to write these ranges (`relay.ranges`), in this order."""

    rank: int
    ranges: bytes


class Whole(_Struct, frozen=True, kw_only=True):
    """All bytes of the rank are sent; xxh3_128 of them."""

    rank: int
    digest: bytes
    canary: Canary | None = None


Message = Hello | Challenge | Proof | Welcome | Refused | Offer | Have | End | Done | Shards | Share | Whole

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_NOTHING = HEADER.pack(NOTHING, 0, 0)


def proof(token: str, role: Literal["upstream", "downstream"], hello: Hello, challenge_nonce: bytes) -> bytes:
    """What only a process of this run can compute. Each role has its own, so none can be sent back."""
    fence = f"{hello.epoch}/{hello.publication}".encode()
    text = b"\0".join((role.encode(), hello.name.encode(), fence, hello.nonce, challenge_nonce))
    return hmac.digest(token.encode(), text, hashlib.sha256)


def send_nothing(link: Link) -> None:
    """A sign of life."""
    link.send(_NOTHING)


def send(link: Link, message: Message) -> None:
    """One message."""
    body = _encoder.encode(message)
    link.send(HEADER.pack(MESSAGE, len(body), 0) + body)


def send_bytes(link: Link, offset: int, part: memoryview, digests: bytes = b"") -> None:
    """Bytes of the version that was offered last, from `offset` on. `digests`: of the blocks that they are, in the chain."""
    link.send(_digests(digests) + HEADER.pack(BYTES, part.nbytes, offset), part)


def send_delta(link: Link, offset: int, delta: bytes, digests: bytes) -> None:
    """The same as a delta (`relay.delta`) to the base that the receiver named."""
    link.send(_digests(digests) + HEADER.pack(DELTA, len(delta), offset), delta)


def _digests(digests: bytes) -> bytes:
    return HEADER.pack(DIGESTS, len(digests), 0) + digests if digests else b""


class Chunk(NamedTuple):
    """Announced bytes, which are still to be taken off the link."""

    offset: int
    """In the version."""
    length: int
    """On the wire."""
    is_delta: bool
    digests: bytes
    """Of its blocks, as upstream computed them; what does not have them is not taken, and so not forwarded either."""


class Frames:
    """The receiving side of one link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._header = bytearray(HEADER.size)
        self.on_nothing: Callable[[], None] = lambda: None
        """Called at every sign of life."""
        self._digests = b""
        """For the next chunk."""

    def next(self) -> Message | Chunk:
        """A message; or a chunk, whose bytes the caller takes off the link. Signs of life are skipped.

        Raises LinkEnded; ProtocolError for what is neither.
        """
        while True:
            self._link.receive_into(memoryview(self._header))
            kind, length, offset = HEADER.unpack(self._header)
            if kind in (BYTES, DELTA) and 0 < length <= CHUNK_BYTES_MAX:
                digests, self._digests = self._digests, b""
                return Chunk(offset, length, kind == DELTA, digests)
            if kind == DIGESTS and 0 < length <= DIGESTS_BYTES_MAX:
                self._digests = bytes(self._body(length))
                continue
            if kind == MESSAGE and 0 < length <= MESSAGE_BYTES_MAX:
                return self._message(length)
            if kind != NOTHING or length:
                raise ProtocolError(f"{self._link.peer} sent a frame of kind {kind} with {length} bytes")
            self.on_nothing()

    def expect(self, *kinds: type) -> Message:
        """The next message, of one of these kinds. Raises ProtocolError for another, else as `next`."""
        message = self.next()
        if not isinstance(message, kinds):
            raise ProtocolError(
                f"{self._link.peer} sent {message!r} instead of {' or '.join(k.__name__ for k in kinds)}"
            )
        return message

    def _message(self, length: int) -> Message:
        try:
            return _decoder.decode(self._body(length))
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self._link.peer} sent a malformed message of {length} bytes: {error}") from error

    def _body(self, length: int) -> bytearray:
        body = bytearray(length)
        self._link.receive_into(memoryview(body))
        return body
