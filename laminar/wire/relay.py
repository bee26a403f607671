"""Messages from a relay to the controller."""

from laminar.ids import Version
from laminar.wire.session import Message


class RelayReady(Message, frozen=True, kw_only=True):
    """The daemon listens for local trainers and rollouts."""

    directory: str
    """The relay's directory under /dev/shm; `relay.sock` and the slots lie there."""


class VersionReady(Message, frozen=True, kw_only=True):
    """A version is complete in this relay and its digest is known."""

    version: Version
    digest: str
    num_bytes: int


class VersionLost(Message, frozen=True, kw_only=True):
    """A version will never become readable (its writer died, or its digest was wrong)."""

    version: Version
    reason: str


class VersionDropped(Message, frozen=True, kw_only=True):
    """A version that was readable no longer is: its slot is filled with another."""

    version: Version


FromRelay = RelayReady | VersionReady | VersionLost | VersionDropped
