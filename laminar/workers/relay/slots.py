"""Version slots: which version lies in which slot. Decisions only, no I/O; `slot_files` has the bytes.

    FREE ──begin──► FILLING(v) ──all ranks committed, digest known──► READY(v) ──recycled by a later begin──► FILLING(w)
      ▲                 │
      └────── lost, and no live writer left

Invariants:
* A version is in one slot at most. Every rank gets the same answer for it, also one that comes late.
* A leased slot is never written; the newest READY slot (in order of publication) is never recycled.
* The slot of a lost version stays FILLING until no live writer can touch it and nobody reads it any more.
"""

import enum
from collections.abc import Callable

import msgspec

from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay.manifest import ALIGN, Manifest, TensorSpec
from laminar.workers.relay.protocol import RelayError

WORLD_SIZE_MAX = 65536
OUTCOMES_KEPT = 256  # versions a late rank may still ask about; ranks are at most a few versions apart


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
    def complete(self) -> bool:
        """All ranks have committed."""
        return self.state is SlotState.FILLING and len(self.committed) == self.world_size


class SlotTable:
    """The decisions, without I/O.

    `on_lost(version, reason)` is called once for each version that is lost, `on_dropped(version)` for each READY one
    that is recycled.
    """

    def __init__(
        self, num_slots: int, on_lost: Callable[[Version, str], None], on_dropped: Callable[[Version], None]
    ) -> None:
        self.slots = [Slot(index=index) for index in range(num_slots)]
        self._on_lost, self._on_dropped = on_lost, on_dropped
        self._outcomes: dict[Version, str | None] = {}
        """Versions settled so far: None = superseded, text = why `begin` is refused."""
        self._num_begun = 0
        self._num_leases = 0

    # ---- writers

    def begin(self, version: Version, manifest: Manifest, rank: int, world_size: int) -> Slot | None:
        """The slot that `rank` writes to; None = superseded, for all ranks of this version. Raises RelayError."""
        if not 0 <= rank < world_size <= WORLD_SIZE_MAX:
            raise RelayError(f"begin of {version}: rank {rank} of {world_size} is not a rank")
        if self.is_superseded(version):
            return None
        slot = self.filling(version) or self._claim(version, manifest, world_size)
        if slot is None:
            self._settle(version, None)
            return None
        self._join(slot, manifest, rank, world_size)
        return slot

    def commit(self, version: Version, rank: int, canary: Canary | None = None) -> Slot | None:
        """The slot, once all ranks have committed; None before. Raises RelayError for a version that is lost."""
        slot = self._writer(version, rank, "commit")
        del slot.writing[rank]
        if slot.lost:
            self._free_if_unused(slot)
            raise RelayError(
                f"commit of {version} by rank {rank}: the version is lost ({slot.lost}); publish the next one"
            )
        slot.committed[rank] = None
        slot.canary = canary or slot.canary
        return slot if slot.complete else None

    def leave(self, version: Version, rank: int, reason: str) -> None:
        """A rank that has not committed gives up or died: the version is lost. Raises RelayError for a stranger."""
        slot = self._writer(version, rank, "abandon")
        del slot.writing[rank]
        self.lose(version, reason)
        self._free_if_unused(slot)

    def lose(self, version: Version, reason: str) -> None:
        """A version that fills will never be READY. Its slot is FREE as soon as no live writer is left."""
        slot = self.filling(version)
        if slot is None or slot.lost:
            return
        slot.lost = reason
        self._settle(version, f"{version} is lost ({reason})")
        self._free_if_unused(slot)
        self._on_lost(version, reason)

    def drop(self, version: Version, rank: int) -> None:
        """The only writer leaves, and nobody is told: the version may begin again."""
        slot = self._writer(version, rank, "drop")
        del slot.writing[rank]
        slot.lost = "dropped"
        self.forget(version)
        self._free_if_unused(slot)

    def forget(self, version: Version) -> None:
        """It may begin again, also if it was superseded."""
        self._outcomes.pop(version, None)

    def refuse(self, version: Version, reason: str) -> None:
        """All ranks of a version that has no slot are to get this error."""
        self._settle(version, reason)

    def finish(self, version: Version, digest: str, blocks: bytes) -> Slot:
        """A complete version becomes READY."""
        slot = self.filling(version)
        assert slot is not None
        assert slot.complete, f"{version} finished with ranks {list(slot.committed)} of {slot.world_size}"
        slot.state, slot.digest, slot.blocks = SlotState.READY, digest, blocks
        return slot

    def is_superseded(self, version: Version) -> bool:
        """True if all ranks are to skip it; False if it may begin. Raises RelayError if it is settled otherwise."""
        if version not in self._outcomes:
            return False
        outcome = self._outcomes[version]
        if outcome is not None:
            raise RelayError(f"begin of {version}: {outcome}")
        return True

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

    def ready(self, version: Version) -> Slot | None:
        """The READY slot with this version."""
        return next((slot for slot in self._in_state(SlotState.READY) if slot.version == version), None)

    def filling(self, version: Version) -> Slot | None:
        """The FILLING slot with this version, lost or not."""
        return next((slot for slot in self._in_state(SlotState.FILLING) if slot.version == version), None)

    def describe(self) -> str:
        """What is here, for error messages."""
        ready = sorted(self._in_state(SlotState.READY), key=lambda slot: slot.order)
        names = ", ".join(str(slot.version) for slot in ready) or "none"
        filling = ", ".join(str(slot.version) for slot in self._in_state(SlotState.FILLING)) or "none"
        return f"ready (oldest first): {names}; filling: {filling}"

    def _in_state(self, state: SlotState) -> list[Slot]:
        return [slot for slot in self.slots if slot.state is state]

    # ---- transitions

    def _claim(self, version: Version, manifest: Manifest, world_size: int) -> Slot | None:
        slot = next(iter(self._in_state(SlotState.FREE)), None) or self._recyclable()
        if slot is None:
            return None
        if slot.version is not None:
            self._on_dropped(slot.version)
        self._num_begun += 1
        slot = self._reset(slot)
        slot.state, slot.version, slot.order = SlotState.FILLING, version, self._num_begun
        slot.manifest, slot.world_size = manifest, world_size
        return slot

    def _recyclable(self) -> Slot | None:
        newest = self.newest
        idle = [slot for slot in self._in_state(SlotState.READY) if not slot.leases and slot is not newest]
        return min(idle, key=lambda slot: slot.order, default=None)

    def _join(self, slot: Slot, manifest: Manifest, rank: int, world_size: int) -> None:
        assert slot.version is not None
        if rank in slot.writing or rank in slot.committed:
            raise RelayError(f"begin of {slot.version}: rank {rank} has begun it already")
        difference = _difference(slot, manifest, world_size)
        if difference:
            self.lose(slot.version, f"rank {rank} disagrees: {difference}")
            raise RelayError(f"begin of {slot.version} by rank {rank}: {difference}; all ranks must publish one layout")
        slot.writing[rank] = None
        if len(slot.writing) + len(slot.committed) == world_size:
            self._settle(slot.version, f"{slot.version} was published already; every version is published once")

    def _writer(self, version: Version, rank: int, what: str) -> Slot:
        slot = self.filling(version)
        if slot is None or rank not in slot.writing:
            raise RelayError(f"{what} of {version}: rank {rank} has not begun it, or has committed it already")
        return slot

    def _free_if_unused(self, slot: Slot) -> None:
        if slot.lost and not slot.writing and not slot.leases:
            self._reset(slot)

    def _reset(self, slot: Slot) -> Slot:
        assert not slot.leases
        assert not slot.writing
        self.slots[slot.index] = Slot(index=slot.index)
        return self.slots[slot.index]

    def _settle(self, version: Version, outcome: str | None) -> None:
        self._outcomes.pop(version, None)
        self._outcomes[version] = outcome
        while len(self._outcomes) > OUTCOMES_KEPT:
            del self._outcomes[next(iter(self._outcomes))]


def check_manifest(manifest: Manifest) -> None:
    """Raises RelayError for a layout whose tensors overlap, are not aligned, or leave the range."""
    end = 0
    for spec in manifest.tensors:
        if spec.offset % ALIGN or spec.offset < end or spec.num_bytes < 0:
            raise RelayError(
                f"manifest: tensor {spec.name!r} at byte {spec.offset} overlaps its predecessor (ends at {end}) "
                f"or is not at a multiple of {ALIGN}; lay tensors out with Manifest.plan"
            )
        end = spec.offset + spec.num_bytes
    if manifest.num_bytes < max(end, 1):
        raise RelayError(f"manifest: the range has {manifest.num_bytes} bytes, its tensors need {max(end, 1)}")


def _difference(slot: Slot, manifest: Manifest, world_size: int) -> str:
    """How a rank's view differs from that of the first rank; empty if it does not."""
    if world_size != slot.world_size:
        return f"world size {world_size} instead of {slot.world_size}"
    if slot.manifest is None or manifest == slot.manifest:
        return ""
    ours, theirs = slot.manifest.tensors, manifest.tensors
    for first, other in zip(ours, theirs, strict=False):
        if first != other:
            return f"tensor {_describe(other)} instead of {_describe(first)}"
    return f"{len(theirs)} tensors in {manifest.num_bytes} bytes instead of {len(ours)} in {slot.manifest.num_bytes}"


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)} at byte {spec.offset}"
