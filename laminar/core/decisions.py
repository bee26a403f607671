"""What the passes decide, before it becomes actions: a driver may hold a pass, look at its next decision, edit or skip it."""

from typing import Literal

import msgspec

from laminar.ids import GroupId, TrajectoryId, Version, WorkerId, format_id


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all decisions; the class name is the tag."""


class DispatchNew(Decision, frozen=True, kw_only=True):
    """Draw the next prompt and start its group on `worker`."""

    worker: WorkerId


class DispatchQueued(Decision, frozen=True, kw_only=True):
    """(Re)start the queued siblings of `group` on `worker`. `restart`: from scratch under the worker's version."""

    worker: WorkerId
    group: GroupId
    trajectories: list[TrajectoryId]
    restart: bool


class RefreshReplica(Decision, frozen=True, kw_only=True):
    """`worker` has nothing running and pulls `version`: the newest of its relay, or an old one that queued siblings need."""

    worker: WorkerId
    version: Version
    source: Literal["relay", "checkpoint"] = "relay"


class Transfer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Trajectories that `source` generates are to be continued by `destination`, which holds the same version."""

    source: WorkerId
    destination: WorkerId
    trajectories: list[TrajectoryId]
    reason: str = ""


class Repack(Decision, frozen=True, kw_only=True):
    """Empty some replicas into others of their version."""

    transfers: list[Transfer]


class TakeBatch(Decision, frozen=True, kw_only=True):
    """Lease these buffered groups to train step `step`."""

    step: int
    groups: list[GroupId]


AnyDecision = DispatchNew | DispatchQueued | RefreshReplica | Repack | TakeBatch


def in_words(decision: AnyDecision) -> str:
    """What it would do, in a line."""
    if isinstance(decision, DispatchNew):
        return f"a new group begins on {decision.worker}"
    if isinstance(decision, DispatchQueued):
        how = "start again" if decision.restart else "go on"
        return (
            f"{len(decision.trajectories)} queued siblings of g{format_id(decision.group)} {how} on {decision.worker}"
        )
    if isinstance(decision, RefreshReplica):
        return f"{decision.worker} pulls {decision.version} from its {decision.source}"
    if isinstance(decision, TakeBatch):
        return f"step {decision.step} gets a batch of {len(decision.groups)} groups"
    moves = [f"{len(t.trajectories)} from {t.source} to {t.destination}" for t in decision.transfers]
    return f"trajectories move: {', '.join(moves)}"
