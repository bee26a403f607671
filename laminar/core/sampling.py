"""Choosing the groups of the next batch.

A sampler is a pure, synchronous choice over an immutable view of the buffer. FIFO is the core's own; a custom one is
user code that runs outside the core (`AskSampler` / `SamplerAnswered`), so that a recorded run replays without it.
See docs/samplers.md.
"""

from typing import Any, Protocol

import msgspec

from laminar.ids import GroupId, Version


class GroupView(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One complete group as a sampler sees it. Tuples have one entry per sibling."""

    id: GroupId
    prompt: int
    age_s: float
    """Seconds since the group completed."""
    behavior_version: Version
    staleness: int
    """s_train if it were trained now: trainer steps since the version that generated it."""
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Response tokens."""


class BufferView(msgspec.Struct, frozen=True, kw_only=True):
    """The buffer at one moment."""

    groups: tuple[GroupView, ...]
    """In order of completion, oldest first."""
    step: int
    """The train step that the batch is for, 1-based."""
    version: Version
    """The trainer's present version."""


class SamplerRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A question to a custom sampler that has not been answered."""

    request: int
    num_groups: int


class SamplerWord(msgspec.Struct, frozen=True, kw_only=True):
    """What a custom sampler said last."""

    request: int
    at: float
    groups: list[GroupId] = []
    fault: str = ""
    """Why it was not used; empty = it was."""


class Sampler(Protocol):
    """User code. `select` is called when the trainer is free and at least `num_groups` groups are complete."""

    def select(self, view: BufferView, num_groups: int) -> list[GroupId]:
        """Ids of exactly `num_groups` different groups of `view`, in training order; or [] to wait until the buffer changes."""

    def state(self) -> dict[str, Any]:
        """What to save with the run: msgpack-able."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Called once with what `state` returned when the run was saved."""


def fifo(view: BufferView, num_groups: int) -> list[GroupId]:
    """The oldest complete groups first."""
    return [group.id for group in view.groups[:num_groups]]


def problem(chosen: list[GroupId], known: dict[GroupId, None], num_groups: int) -> str:
    """What is wrong with a sampler's choice, in one line; empty if it can be used."""
    unknown = [group for group in chosen if group not in known]
    if unknown:
        return f"returned {len(unknown)} ids that are not complete groups in the buffer, first: {unknown[0]!r}"
    if len(set(chosen)) != len(chosen):
        return "returned the same group twice"
    if chosen and len(chosen) != num_groups:
        return f"returned {len(chosen)} groups, the batch needs {num_groups}"
    return ""
