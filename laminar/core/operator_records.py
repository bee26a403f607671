"""The part of the core's state (`laminar.core.records`) about what an operator holds, waits for, and has changed."""

from typing import Literal

import msgspec

from laminar.core.decisions import AnyDecision

Mode = Literal["step", "pause"]
"""``step``: the pass shows its next decision and waits for a word on it. ``pause``: it does not decide at all."""

Value = int | float | str | bool | None
"""Of a setting, or what a condition compares with."""

HITS_KEPT = 64  # of breakpoints; older ones are in the event log


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A pass that an operator, or a breakpoint, keeps from deciding."""

    mode: Mode = "step"
    since: float = 0.0
    """Run time, seconds."""
    breakpoint: int = 0
    """The one that was hit; 0 = an operator said so."""


class HeldDecision(msgspec.Struct, kw_only=True):
    """A decision that waits for the operator."""

    id: int
    pass_name: str
    decision: AnyDecision
    held_at: float
    breakpoint: int = 0
    """The one that it hit; when the pass is let go, such a decision is applied first, or it would be hit again."""


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a held decision."""

    decision: int
    verdict: str
    void: str = ""
    """Why it, or a part of it, was not done after all; empty = all of it was, or it was skipped."""


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """A field of a decision or an event (`laminar.core.breakpoints.FIELDS`), compared with a value."""

    field: str
    op: Literal["==", "!=", "<", "<=", ">", ">="]
    value: int | float | str


class Breakpoint(msgspec.Struct, kw_only=True):
    """Decisions of a pass, or events of a kind, at which the run is to be held."""

    id: int
    where: str
    conditions: list[Condition] = []
    """All of them have to hold."""
    num_hits: int = 0


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A breakpoint was hit."""

    breakpoint: int
    seq: int
    at: float
    """Run time, seconds."""
    text: str
    decision: int = 0
    """The held decision; 0 = it was an event."""


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator has changed of a replica; 0 = as it was started."""

    flush_interval_s: float = 0.0
    num_requests_max: int = 0
    """Requests that it is given at once."""
