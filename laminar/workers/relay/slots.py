"""Version slots: which version lies in which slot. Decisions only, no I/O; `slot_files` has the bytes.

    FREE ──begin──► FILLING(v) ──all ranks committed, digest known──► READY(v) ──recycled by a later begin──► FILLING(w)
      ▲                 │
      └────── lost, and no live writer left

A slot that only some ranks write (`is_part`: the others are on other hosts) stays FILLING when these have committed. It keeps
their shards until the whole version comes through the chain, into the same slot, or until the slot is needed for another.

Invariants:
* A version is in one slot at most, but for lost ones. Every rank gets the same answer for it, also one that comes late.
* A leased slot is never written; the newest READY slot (in order of publication) is never recycled.
* The slot of a lost version stays FILLING until no live writer can touch it and nobody reads it any more.
* A version is complete only if its ranks, together, said that they write every byte of every tensor once.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay import ranges as byte_ranges
from laminar.workers.relay.manifest import Manifest
from laminar.workers.relay.protocol import RelayError

WORLD_SIZE_MAX = 65536
OUTCOMES_KEPT = 256  # versions a late rank may still ask about; ranks are at most a few versions apart
UPSTREAM = 0
"""The chain fills a slot as the only rank of a world of one."""
_PUBLISHED = "{} was published already; every version is published once"


class SlotState(enum.Enum):
    """See the diagram of this module."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"


class Slot(msgspec.Struct, kw_only=True):
    """One slot. What does not apply in its state is empty."""

    index: int
    state: SlotState = SlotState.FREE
    version: Version | None = None
    order: int = 0
    """Publications are numbered from 1 as their first rank begins."""
    manifest: Manifest | None = None
    world_size: int = 0
    publication: int = 0
    """Number of the order that its ranks follow; 0 = of none."""
    num_here: int = 0
    """Ranks that write to it."""
    is_copy: bool = False
    """The chain brings it, or a delta: its end is this relay's own business, and no publication's."""
    ranges: dict[int, bytes] = {}
    """What each rank that told so writes."""
    writing: dict[int, None] = {}
    """Ranks that began and have neither committed nor gone."""
    committed: dict[int, None] = {}
    lost: str = ""
    """Why the version will never be READY; empty = it still may."""
    digest: str = ""
    blocks: bytes = b""
    """Digests of its blocks, 16 bytes each."""
    canary: Canary | None = None
    leases: dict[int, None] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the version in it."""
        return self.manifest.num_bytes if self.manifest is not None else 0

    @property
    def is_part(self) -> bool:
        """Other ranks write to relays of other hosts."""
        return self.num_here < self.world_size

    @property
    def complete(self) -> bool:
        """All ranks that write to it have committed."""
        return self.state is SlotState.FILLING and len(self.committed) == self.num_here


class Outcome(NamedTuple):
    """What became of a version."""

    publication: int
    refusal: str | None
    """Why `begin` is refused; None = superseded."""
    is_final: bool
    """It was READY: no later publication, nor the chain, brings it again."""


class SlotTable:
    """The decisions, without I/O.

    `on_lost(version, reason, publication)` is called once for each publication that is lost, `on_dropped(version)` for each
    READY version that is recycled. Nobody is told of a copy that is given up.
    """

    def __init__(
        self, num_slots: int, on_lost: Callable[[Version, str, int], None], on_dropped: Callable[[Version], None]
    ) -> None:
        self.slots = [Slot(index=index) for index in range(num_slots)]
        self._on_lost, self._on_dropped = on_lost, on_dropped
        self._outcomes: dict[Version, Outcome] = {}
        """Of the versions settled so far."""
        self.newest_publication = 0
        """The highest number that was begun."""
        self._num_begun = 0
        self._num_leases = 0

    # ---- writers

    def begin(
        self,
        version: Version,
        manifest: Manifest,
        rank: int,
        world_size: int,
        *,
        ranges: bytes | None = None,
        publication: int = 0,
        num_here: int = 0,
    ) -> Slot | None:
        """The slot that `rank` writes to; None = superseded, for all ranks of this version. Options as in `protocol.Begin`.

        Raises RelayError.
        """
        if not 0 <= rank < world_size <= WORLD_SIZE_MAX:
            raise RelayError(f"begin of {version}: rank {rank} of {world_size} is not a rank")
        self.newest_publication = max(self.newest_publication, publication)
        if self.is_superseded(version, publication):
            return None
        slot = self.filling(version)
        if slot is not None and (slot.lost or slot.publication < publication):
            self._lose(slot, "it is published anew")
            slot = None
        slot = slot or self._claim(version, manifest, world_size, publication, num_here or world_size)
        if slot is None:
            self._settle(version, publication, None)
            return None
        self._join(slot, manifest, rank, world_size, num_here or world_size)
        self._declare(slot, rank, ranges)
        return slot

    def commit(self, version: Version, rank: int, canary: Canary | None = None, publication: int = 0) -> Slot | None:
        """The slot, once all its ranks have committed; None before. Raises RelayError for a version that is lost."""
        slot = self._writer(version, rank, publication, "commit")
        del slot.writing[rank]
        if slot.lost:
            self._free_if_unused(slot)
            raise RelayError(
                f"commit of {version} by rank {rank}: the version is lost ({slot.lost}); publish the next one"
            )
        slot.committed[rank] = None
        slot.canary = canary or slot.canary
        return slot if slot.complete else None

    def leave(self, version: Version, rank: int, reason: str, publication: int = 0) -> None:
        """A rank that has not committed gives up or died: the version is lost. Raises RelayError for a stranger."""
        slot = self._writer(version, rank, publication, "abandon")
        del slot.writing[rank]
        self._lose(slot, reason)
        self._free_if_unused(slot)

    def lose(self, version: Version, reason: str, publication: int | None = None) -> None:
        """A version that fills (None = whoever publishes it) will never be READY. Its slot is FREE once no live writer is left."""
        slot = self.filling(version)
        if slot is not None and publication in (None, slot.publication):
            self._lose(slot, reason)

    def _lose(self, slot: Slot, reason: str) -> None:
        if slot.lost:
            return
        assert slot.version is not None
        slot.lost = reason
        version, publication = slot.version, slot.publication
        if not slot.is_copy:
            self._settle(version, publication, f"{version} is lost ({reason})")
        self._free_if_unused(slot)
        if not slot.is_copy:
            self._on_lost(version, reason, publication)

    def refuse(self, version: Version, reason: str, publication: int = 0) -> None:
        """All ranks of a publication that has no slot are to get this error."""
        self._settle(version, publication, reason)

    def finish(self, version: Version, digest: str, blocks: bytes) -> Slot:
        """A complete version becomes READY."""
        slot = self.filling(version)
        assert slot is not None
        assert slot.complete, f"{version} finished with ranks {list(slot.committed)} of {slot.num_here}"
        assert not slot.is_part, f"{version} finished with the shards of one host"
        slot.state, slot.digest, slot.blocks = SlotState.READY, digest, blocks
        self._settle(version, slot.publication, _PUBLISHED.format(version), is_final=True)
        return slot

    def is_superseded(self, version: Version, publication: int = 0) -> bool:
        """True if all ranks are to skip it; False if it may begin. Raises RelayError if it is settled otherwise."""
        outcome = self._outcomes.get(version)
        if outcome is None or (outcome.publication < publication and not outcome.is_final):
            return False
        if outcome.refusal is not None:
            raise RelayError(f"begin of {version}: {outcome.refusal}")
        return True

    # ---- the chain

    def receive(self, version: Version, manifest: Manifest) -> Slot | None:
        """The slot for what comes from upstream; shards of it that are here become part of it.

        None: there is no place, it was here and went, or ranks of this host write it.
        """
        outcome, slot = self._outcomes.get(version), self.filling(version)
        if outcome is not None and outcome.is_final:
            return None
        if slot is None or slot.lost:
            slot = self._claim(version, manifest, 1, 0, 1)
        elif not (slot.is_part and slot.complete) or slot.leases or slot.manifest != manifest:
            return None
        if slot is not None:
            slot.world_size, slot.num_here, slot.is_copy = 1, 1, True
            slot.publication, slot.committed, slot.writing = 0, {}, {UPSTREAM: None}
        return slot

    def restore(self, version: Version, manifest: Manifest, order: int) -> Slot | None:
        """The slot for a version that was READY here and is rebuilt; it stays as old as it was. None: there is no place."""
        slot = self._claim(version, manifest, 1, 0, 1)
        if slot is not None:
            slot.order, slot.is_copy, slot.writing = order, True, {UPSTREAM: None}
        return slot

    def drop(self, version: Version) -> None:
        """What came from upstream, or was rebuilt, is given up, and nobody is told: it may come again."""
        slot = self._writer(version, UPSTREAM, 0, "drop")
        del slot.writing[UPSTREAM]
        if not slot.lost:  # else ranks publish it anew, and what becomes of that is to be remembered
            self._outcomes.pop(version, None)
        slot.lost = slot.lost or "dropped"
        self._free_if_unused(slot)

    def discard(self, slot: Slot) -> None:
        """A READY version whose bytes have changed is gone; it may be published, or come through the chain, again."""
        if slot.version is not None and slot.state is SlotState.READY:
            slot.state, slot.lost = SlotState.FILLING, "its bytes have changed"
            self._outcomes.pop(slot.version, None)
            self._on_dropped(slot.version)
            self._free_if_unused(slot)

    def is_settled(self, version: Version) -> bool:
        """Superseded, lost, refused or recycled: it will not become READY (again)."""
        slot = self.filling(version)
        return version in self._outcomes and self.ready(version) is None and (slot is None or slot.lost != "")

    # ---- readers

    def lease(self, version: Version | None) -> tuple[int, Slot]:
        """(lease id, slot) of a READY version; None = the newest. Raises RelayError naming what is here."""
        slot = self.newest if version is None else self.ready(version)
        if slot is None:
            wanted = "a version" if version is None else str(version)
            raise RelayError(f"lease of {wanted}: not ready in this relay; {self.describe()}")
        return self.follow(slot), slot

    def follow(self, slot: Slot) -> int:
        """A lease of a slot whose version may still be coming."""
        self._num_leases += 1
        slot.leases[self._num_leases] = None
        return self._num_leases

    def release(self, lease: int) -> None:
        """Raises RelayError for a lease that is not held."""
        for slot in self.slots:
            if lease in slot.leases:
                del slot.leases[lease]
                self._free_if_unused(slot)
                return
        raise RelayError(f"release of lease {lease}: no such lease")

    # ---- views

    @property
    def newest(self) -> Slot | None:
        """The READY slot whose publication began last."""
        return max(self._in_state(SlotState.READY), key=lambda slot: slot.order, default=None)

    @property
    def next_to_go(self) -> list[Slot]:
        """READY slots that may be recycled, the oldest first; none while one is free."""
        newest = self.newest
        others = [slot for slot in self._in_state(SlotState.READY) if slot is not newest]
        return [] if self._in_state(SlotState.FREE) else sorted(others, key=lambda slot: slot.order)

    def has(self, slot: Slot) -> bool:
        """Whether it has not been recycled."""
        return self.slots[slot.index] is slot

    def ready(self, version: Version) -> Slot | None:
        """The READY slot with this version."""
        return next((slot for slot in self._in_state(SlotState.READY) if slot.version == version), None)

    def filling(self, version: Version) -> Slot | None:
        """The FILLING slot with this version; a lost one only if there is no other."""
        found = [slot for slot in self._in_state(SlotState.FILLING) if slot.version == version]
        return min(found, key=lambda slot: bool(slot.lost), default=None)

    def describe(self) -> str:
        """What is here, for error messages."""
        ready = sorted(self._in_state(SlotState.READY), key=lambda slot: slot.order)
        names = ", ".join(str(slot.version) for slot in ready) or "none"
        filling = ", ".join(str(slot.version) for slot in self._in_state(SlotState.FILLING)) or "none"
        return f"ready (oldest first): {names}; filling: {filling}"

    def _in_state(self, state: SlotState) -> list[Slot]:
        return [slot for slot in self.slots if slot.state is state]

    # ---- transitions

    def _claim(
        self, version: Version, manifest: Manifest, world_size: int, publication: int, num_here: int
    ) -> Slot | None:
        old = next(iter(self._in_state(SlotState.FREE)), None) or self._recyclable()
        if old is None:
            return None
        self._num_begun += 1
        slot = self._reset(old)
        slot.state, slot.version, slot.order = SlotState.FILLING, version, self._num_begun
        slot.manifest, slot.world_size = manifest, world_size
        slot.publication, slot.num_here = publication, num_here
        if old.version is not None and old.state is SlotState.READY:
            self._on_dropped(old.version)
        elif old.version is not None:
            self._outcomes.pop(old.version, None)  # the chain may still bring it
        return slot

    def _recyclable(self) -> Slot | None:
        """The oldest READY slot that is not needed; else shards of this host that have been sent on."""
        newest = self.newest
        idle = [slot for slot in self._in_state(SlotState.READY) if not slot.leases and slot is not newest]
        kept = [s for s in self._in_state(SlotState.FILLING) if s.is_part and s.complete and not (s.leases or s.lost)]
        return min(idle or kept, key=lambda slot: slot.order, default=None)

    def _join(self, slot: Slot, manifest: Manifest, rank: int, world_size: int, num_here: int) -> None:
        assert slot.version is not None
        if rank in slot.writing or rank in slot.committed:
            raise RelayError(f"begin of {slot.version}: rank {rank} has begun it already")
        difference = _difference(slot, manifest, world_size, num_here)
        if difference:
            self._lose(slot, f"rank {rank} disagrees: {difference}")
            raise RelayError(f"begin of {slot.version} by rank {rank}: {difference}; all ranks must publish one layout")
        slot.writing[rank] = None
        if len(slot.writing) + len(slot.committed) == slot.num_here:
            self._settle(slot.version, slot.publication, _PUBLISHED.format(slot.version))

    def _declare(self, slot: Slot, rank: int, ranges: bytes | None) -> None:
        """Note what the rank writes; once all of the world have told, it has to be every byte of every tensor, once."""
        if ranges is None or slot.manifest is None:
            return
        slot.ranges[rank] = ranges
        try:
            byte_ranges.check_rank(slot.manifest, rank, ranges)
            if len(slot.ranges) == slot.world_size:
                byte_ranges.check_world(slot.manifest, slot.ranges)
        except RelayError as error:
            del slot.writing[rank]
            self._lose(slot, str(error))
            self._free_if_unused(slot)
            raise RelayError(f"begin of {slot.version}: {error}") from error

    def _writer(self, version: Version, rank: int, publication: int, what: str) -> Slot:
        for slot in self._in_state(SlotState.FILLING):
            if (slot.version, slot.publication) == (version, publication) and rank in slot.writing:
                return slot
        raise RelayError(f"{what} of {version}: rank {rank} has not begun it, or has committed it already")

    def _free_if_unused(self, slot: Slot) -> None:
        if slot.lost and not slot.writing and not slot.leases:
            self._reset(slot)

    def _reset(self, slot: Slot) -> Slot:
        assert not slot.leases
        assert not slot.writing
        self.slots[slot.index] = Slot(index=slot.index)
        return self.slots[slot.index]

    def _settle(self, version: Version, publication: int, refusal: str | None, *, is_final: bool = False) -> None:
        self._outcomes.pop(version, None)
        self._outcomes[version] = Outcome(publication, refusal, is_final)
        while len(self._outcomes) > OUTCOMES_KEPT:
            del self._outcomes[next(iter(self._outcomes))]


def _difference(slot: Slot, manifest: Manifest, world_size: int, num_here: int) -> str:
    """How a rank's view differs from that of the first rank; empty if it does not."""
    if world_size != slot.world_size:
        return f"world size {world_size} instead of {slot.world_size}"
    if num_here != slot.num_here:
        return f"{num_here} ranks on this host instead of {slot.num_here}"
    if slot.manifest is None or manifest == slot.manifest:
        return ""
    return slot.manifest.difference(manifest)
