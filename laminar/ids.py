"""Identities that appear in every message, log row and file.

Group and trajectory ids carry the controller's durable *boot number* in their high bits, so an id handed
out once is never handed out again, also after a crash whose last writes were lost.
"""

from typing import NewType

import msgspec

TrajectoryId = NewType("TrajectoryId", int)
GroupId = NewType("GroupId", int)
PromptId = NewType("PromptId", int)
"""Position of a prompt in the data set, 0-based."""
WorkerId = NewType("WorkerId", str)
"""A worker's name, for example ``rollout-0``. The same name with a higher incarnation is a new process."""

BOOT_SHIFT = 40  # 2^40 ids per boot …
BOOT_BITS = 22  # … and 2^22 boots fit SQLite's signed 64-bit integers


class Version(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A weight version: trainer `step` (0 = initial weights) on a `branch`.

    Every restore of the trainer starts a new branch, because redone steps give other bytes.
    """

    step: int
    branch: int

    def __str__(self) -> str:
        return f"v{self.step}" if self.branch == 0 else f"v{self.step}.b{self.branch}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """The inverse of ``str``. Raises ValueError for anything else."""
        step, _, branch = text.removeprefix("v").partition(".b")
        return cls(int(step), int(branch or 0))


def make_id(boot: int, number: int) -> int:
    """The id of the `number`-th object of this kind handed out in `boot`."""
    return (boot << BOOT_SHIFT) | number


def format_id(value: int) -> str:
    """``boot.number``, short for people: make_id(2, 17) -> '2.17'."""
    return f"{value >> BOOT_SHIFT}.{value & ((1 << BOOT_SHIFT) - 1)}"


def derive_seed(seed: int, *parts: int) -> int:
    """A 63-bit seed from a run seed and a path of integers (splitmix64), equal on every machine and Python."""
    return _mixed(seed, parts) >> 1


def derive_seeds(seed: int, *parts: int, num: int) -> list[int]:
    """`derive_seed(seed, *parts, 0)`, `derive_seed(seed, *parts, 1)` … : `num` seeds, and the common path is followed once."""
    state = _mixed(seed, parts)
    return [_mixed(state, (number,)) >> 1 for number in range(num)]


def _mixed(seed: int, parts: tuple[int, ...]) -> int:
    state = seed & 0xFFFFFFFFFFFFFFFF
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
