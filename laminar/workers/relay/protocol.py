"""Frames on the relay's Unix socket: a 4-byte little-endian length, then one msgpack struct. Nothing is pickled.

A connection carries one request at a time and one reply to each. Publications and leases belong to the connection
that opened them and end with it.
"""

import struct

import msgspec

from laminar.errors import LaminarError, ProtocolError
from laminar.ids import Version
from laminar.wire import Neighbour, Progress
from laminar.workers.canary import Canary
from laminar.workers.relay.manifest import Manifest

FRAME_BYTES_MAX = 16 << 20  # a manifest of 100k tensors (a large mixture of experts) is about 10 MB
LENGTH = struct.Struct("<I")
SOCKET_NAME = "relay.sock"


class RelayError(LaminarError):
    """The relay refused a request, lost a version, or does not answer."""


class _Struct(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of requests and replies; the class name is the tag."""


class Begin(_Struct, frozen=True, kw_only=True):
    """Rank `rank` of `world_size` wants to write its shards of `version`."""

    version: Version
    manifest: Manifest
    rank: int
    world_size: int
    ranges: bytes | None = None
    """What it writes (`relay.ranges`), in this order; None = not told, and not checked."""
    publication: int = 0
    """Number of the controller's order; a later one of the same version replaces an earlier one. 0 = there was none."""
    num_here: int = 0
    """Ranks that write to this relay; 0 = all."""
    collector: Neighbour | None = None
    """The relay that gets the shards of all hosts; None = this one."""


class Wrote(_Struct, frozen=True, kw_only=True):
    """The rank has written the first `num_ranges` of its ranges: they may be sent on."""

    version: Version
    rank: int
    num_ranges: int


class Commit(_Struct, frozen=True, kw_only=True):
    """The rank has written all its bytes. One of the ranks brings the canary, if there is one."""

    version: Version
    rank: int
    canary: Canary | None = None


class Abandon(_Struct, frozen=True, kw_only=True):
    """The rank gives up; the version is lost."""

    version: Version
    rank: int
    reason: str


class Acquire(_Struct, frozen=True, kw_only=True):
    """Lease a READY version (None = the newest), waiting up to `wait_s` for it to become READY."""

    version: Version | None
    wait_s: float = 0.0


class Release(_Struct, frozen=True, kw_only=True):
    """End a lease of this connection."""

    lease: int


class Distrust(_Struct, frozen=True, kw_only=True):
    """The bytes of a lease of this connection are not those that the digest is of. If that is so, the version leaves the relay."""

    lease: int


class Arrange(_Struct, frozen=True, kw_only=True):
    """This relay's place in the chain of `epoch`, for one that stands alone; else the controller tells it."""

    epoch: int
    upstream: str | None
    """Name of the relay that will connect; None: this one is the first."""
    downstream: Neighbour | None
    num_relays: int = 0
    """Of the whole chain; 0: not told."""


class Retain(_Struct, frozen=True, kw_only=True):
    """Keep these old versions, if need be as deltas, and no others; for a relay that stands alone, else the controller tells it."""

    versions: list[Version]


class GetStatus(_Struct, frozen=True, kw_only=True):
    """Ask for `Status`."""


class Begun(_Struct, frozen=True, kw_only=True):
    """Where to write; `file` None = the version is superseded, on every rank."""

    file: str | None


class Done(_Struct, frozen=True, kw_only=True):
    """The request took effect."""


class Leased(_Struct, frozen=True, kw_only=True):
    """A lease that lasts until `Release` or the end of the connection."""

    lease: int
    version: Version
    digest: str
    file: str
    manifest: Manifest
    canary: Canary | None = None


class Refusal(_Struct, frozen=True, kw_only=True):
    """The request had no effect on the caller's behalf."""

    reason: str


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One slot as it is now."""

    file: str
    state: str
    """``free``, ``filling`` or ``ready``."""
    version: Version | None
    digest: str
    """Empty unless ready."""
    num_bytes: int
    num_leases: int
    num_writers: int
    """Ranks that began and have not committed."""


class ChainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The relay's part in the chain as it is now."""

    transport: str
    """Its name, and what its links really move bytes over: TCP, shared memory, RDMA."""
    chunk_bytes: int = 0
    """By which the last version was sent downstream; 0 = none was."""
    start_s: float = 0.0
    """T_start of the link downstream: what an empty message takes; 0 = not measured."""
    byte_s: float = 0.0
    """T_byte of it, smoothed over the last chunks; 0 = not measured."""
    incoming: Progress | None = None
    """The version that comes from upstream."""
    outgoing: Progress | None = None
    """The version that goes downstream, and what was sent of it."""


class KeptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An old version that can be rebuilt."""

    version: Version
    base: Version
    """What its delta is to."""
    num_bytes: int
    """Of the delta."""
    is_wanted: bool
    """False: only because another one depends on it."""


class OldStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Old versions that are kept as deltas, beside or instead of their slots."""

    kept: list[KeptStatus] = []
    """Oldest first."""
    num_bytes: int = 0
    """Of all of them."""
    bytes_max: int = 0
    num_rebuilt: int = 0
    """How often one was put back into a slot."""
    refusals: list[str] = []
    """`version: reason` of those that would have taken too much, the last ones."""


class Status(_Struct, frozen=True, kw_only=True):
    """The relay as it is now."""

    slots: list[SlotStatus]
    capacity_bytes: int
    """Bytes per slot; 0 = no manifest seen yet."""
    num_connections: int
    num_prefaulted: int
    """Slots whose pages are all backed."""
    old: OldStatus = OldStatus()
    chain_port: int = 0
    """Where the neighbour upstream connects; 0 = this relay takes part in no chain."""
    chain: ChainStatus | None = None
    """None: this relay takes part in no chain."""
    chain_epoch: int = 0
    chain_sent_bytes: int = 0
    """Of versions, sent downstream so far."""
    chain_wire_bytes: int = 0
    """What went over the wire for them: less, with deltas."""
    chain_broken: list[str] = []
    """`epoch: peer` of the links that broke, the last ones."""
    chain_slow: list[str] = []
    """The same of those that held the chain up."""


Request = Begin | Wrote | Commit | Abandon | Acquire | Release | Distrust | Arrange | Retain | GetStatus
Reply = Begun | Done | Leased | Refusal | Status

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One frame, length included. Raises RelayError for a frame over the limit."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        name = type(message).__name__
        raise RelayError(f"{name} takes {len(body)} bytes, the limit is {FRAME_BYTES_MAX}: the manifest is too long")
    return LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Length of the body behind a 4-byte header. Raises ProtocolError when it is empty or over the limit."""
    length: int = LENGTH.unpack(header)[0]
    if not 0 < length <= FRAME_BYTES_MAX:
        raise ProtocolError(f"frame of {length} bytes on the relay's socket; allowed are 1 to {FRAME_BYTES_MAX}")
    return length


def decode_request(body: bytes) -> Request:
    """Raises ProtocolError for anything that is not a request."""
    try:
        return _requests.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed request of {len(body)} bytes: {error}") from error


def decode_reply(body: bytes) -> Reply:
    """Raises ProtocolError for anything that is not a reply."""
    try:
        return _replies.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed reply of {len(body)} bytes: {error}") from error
