"""Messages between a relay and the controller."""

import msgspec

from laminar.ids import Version
from laminar.wire.session import Message


class RelayReady(Message, frozen=True, kw_only=True):
    """The daemon listens for local trainers and rollouts."""

    directory: str
    """The relay's directory under /dev/shm; `relay.sock` and the slots lie there."""
    chain_port: int = 0
    """Where the neighbour upstream connects on this host; 0 = it takes part in no chain."""
    chain_host: str = ""
    """The host as its neighbour reaches it; empty = as the hosts file names it."""


class VersionReady(Message, frozen=True, kw_only=True):
    """A version is complete in this relay and its digest is known."""

    version: Version
    digest: str
    num_bytes: int


class VersionHeld(Message, frozen=True, kw_only=True):
    """A version came through the chain: it is complete in this relay and its digest is the master's."""

    version: Version
    digest: str


class VersionLost(Message, frozen=True, kw_only=True):
    """A version will never become readable (its writer died, or its digest was wrong)."""

    version: Version
    reason: str
    publication: int = 0
    """As in `Publish`."""


class VersionDropped(Message, frozen=True, kw_only=True):
    """A version that was readable no longer is: its slot is filled with another."""

    version: Version


class LinkBroken(Message, frozen=True, kw_only=True):
    """The link to this neighbour ended, could not be made, or made no progress."""

    peer: str
    epoch: int


class LinkSlow(Message, frozen=True, kw_only=True):
    """The link to this neighbour works, but carries far less than another link of this relay did."""

    peer: str
    epoch: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A version on its way over a link."""

    version: Version
    num_bytes: int
    """That are there."""
    total_bytes: int


class SlotReport(msgspec.Struct, frozen=True, kw_only=True):
    """One version slot."""

    state: str
    """``free``, ``filling`` or ``ready``."""
    version: Version | None = None
    num_leases: int = 0
    """Of readers: replicas, and the links that send it."""


class RelayReport(Message, frozen=True, kw_only=True):
    """How it goes; for people, at most once a second and only when something has changed."""

    transport: str = ""
    """Its name, and what its links really move bytes over; empty = it takes part in no chain."""
    sent_bytes: int = 0
    """Of versions, sent downstream so far."""
    wire_bytes: int = 0
    """What went over the wire for them: less, with deltas."""
    receiving: Progress | None = None
    """The version that comes from upstream."""
    sending: Progress | None = None
    """The version that goes downstream, and what was sent of it."""
    kept: list[Version] = []
    """Old versions that it has as deltas, oldest first."""
    kept_bytes: int = 0
    slots: list[SlotReport] = []
    slot_bytes: int = 0
    """Shared memory of each slot; 0 = they are not made yet."""


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A relay to connect to."""

    name: str
    host: str
    port: int


class ArrangeChain(Message, frozen=True, kw_only=True):
    """This relay's place in the chain of `epoch`; links of older epochs are void."""

    epoch: int
    upstream: str | None
    """Name of the relay that will connect; None: this one is the first."""
    downstream: Neighbour | None
    """The relay to connect to; None: this one is the last."""
    num_relays: int = 0
    """Of the whole chain; 0: not told."""


class RetainVersions(Message, frozen=True, kw_only=True):
    """Keep these old versions for as long as can be, as deltas where a slot is needed for a newer one; and no others."""

    versions: list[Version]


FromRelay = RelayReady | VersionReady | VersionHeld | VersionLost | VersionDropped | LinkBroken | LinkSlow | RelayReport
ToRelay = ArrangeChain | RetainVersions
