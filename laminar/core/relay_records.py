"""The part of the core's state (`laminar.core.records`) about relays, and about replicas that serve old versions."""

from typing import Literal

import msgspec

from laminar.ids import Version, WorkerId


class Relay(msgspec.Struct, kw_only=True):
    """One relay daemon. The relays of `State` are in order of joining."""

    id: WorkerId
    incarnation: int
    host: str
    rack: str = ""
    held: list[Version] = []
    """Versions that it holds completely and verified, in publication order."""
    retained: list[Version] = []
    """What it was told to keep of these (`laminar.core.retention`)."""
    slow_since: int = 0
    """Seq of the event that told that its link holds the chain up; 0 = it does not."""
    called_slow: bool = False
    """It has called a neighbour slow; one that calls a second so is slow itself."""
    num_broken: int = 0
    """Broken links in a row that it was a party to."""


class Chain(msgspec.Struct, kw_only=True):
    """How weights flow from relay to relay."""

    epoch: int = 0
    """Grows with every change."""
    order: list[WorkerId] = []
    master: WorkerId | None = None
    """First of the order; None = there is no relay."""


class Failover(msgspec.Struct, kw_only=True, frozen=True):
    """A replica is to continue siblings of an old version that no replica holds; it admits no group meanwhile."""

    version: Version
    source: Literal["relay", "checkpoint"]


class Failovers(msgspec.Struct, kw_only=True):
    """How trajectories went on whose replica was lost while it generated them."""

    same_version: int = 0
    """On another replica of their version."""
    relay: int = 0
    """On a replica that pulled their version from its relay for them."""
    checkpoint: int = 0
    """On a replica that loaded their version from a checkpoint for them."""
    restarted: int = 0
    """From the beginning, under a version that a replica held, or because they were pinned."""
