"""The part of the core's state (`laminar.core.records`) about the trainer and its steps."""

import msgspec

from laminar.ids import GroupId, Version, WorkerId


class Branch(msgspec.Struct, kw_only=True, frozen=True):
    """A restore of the trainer: `branch` goes on from `fork_step` of the branch before."""

    branch: int
    fork_step: int


class Step(msgspec.Struct, kw_only=True):
    """A leased batch and what became of it."""

    step: int
    attempt: int
    groups: list[GroupId]
    done: bool = False


class Trainer(msgspec.Struct, kw_only=True):
    """The trainer as the core sees it. Commands are executed in the order sent."""

    launch: WorkerId | None = None
    """What is started again as a whole, named after the node whose rank was ready first: ``trainer-0`` of ``trainer-0/1``."""
    ranks: dict[WorkerId, int] = {}
    """Ready ranks of the present launch: worker -> incarnation."""
    hosts: dict[WorkerId, str] = {}
    """Where each rank runs, or ran last."""
    world_size: int = 0
    ready: bool = False
    step: int = 0
    """Last step whose updates are applied."""
    branch: int = -1
    """-1 = no trainer has been ready yet."""
    running: int = 0
    """Step in progress, 0 = none."""
    running_since: float = 0.0
    saving: int = -1
    """Step whose checkpoint is being written, -1 = none."""
    saving_since: float = 0.0
    checkpoint: int = -1
    """Last step with a complete checkpoint, -1 = none."""
    checkpoint_version: Version | None = None
    """The version whose weights are in it, as far as this run saved it."""
    save_began: int = -1
    """Last step of which a checkpoint was begun."""
    save_wanted: bool = False
    """An operator wants a checkpoint as soon as one can be made."""
    num_failed_saves: int = 0
    attempt_floor: int = 0
    """Attempts of steps are numbered from above this, see `laminar.core.rollback`."""
