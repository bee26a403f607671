"""What a trace shows: slices on lanes of processes, instants, counters, arrows. Times are seconds since the epoch."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec


class Lane(NamedTuple):
    """A row of a process. What is on it nests or follows one another (`nested`)."""

    process: str
    name: str


class Slice(NamedTuple):
    """Something that took a while."""

    lane: Lane
    name: str
    start: float
    end: float
    args: dict[str, Any]


class Overlapping(NamedTuple):
    """The same where several go on at once: each has a row of its own."""

    lane: Lane
    id: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


class Instant(NamedTuple):
    """Something that happened."""

    lane: Lane
    name: str
    at: float
    args: dict[str, Any]


class Level(NamedTuple):
    """A counter of a process from then on."""

    process: str
    name: str
    at: float
    values: dict[str, float]


class Arrow(NamedTuple):
    """From one slice to another."""

    name: str
    source: Slice
    target: Slice


class Timeline(msgspec.Struct, kw_only=True):
    """Everything of one range."""

    begin: float
    end: float
    slices: list[Slice] = []
    overlapping: list[Overlapping] = []
    instants: list[Instant] = []
    levels: list[Level] = []
    arrows: list[Arrow] = []

    @property
    def processes(self) -> list[str]:
        """In the order in which they are shown."""
        lanes = [s.lane for s in self.slices] + [o.lane for o in self.overlapping] + [i.lane for i in self.instants]
        return sorted({*(lane.process for lane in lanes), *(level.process for level in self.levels)}, key=_place)

    def busy(self) -> dict[str, float]:
        """Seconds by lane of what the database has as spans: how long a replica decoded, not how long its reports are."""
        found: dict[str, float] = {}
        for each in self.slices:
            if "busy_s" in each.args:
                found[each.lane.name] = found.get(each.lane.name, 0.0) + each.args["busy_s"]
        return found


ROLES = ("controller", "trainer", "relay", "rollout")


def _place(process: str) -> tuple[int, list[tuple[int, str]]]:
    """Roles in their order, `rollout-2` before `rollout-10`."""
    role = next((place for place, name in enumerate(ROLES) if process.startswith(name)), len(ROLES))
    parts = process.replace("/", "-").split("-")
    return role, [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def nested(slices: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(place in `slices`, start, end), such that none begins in another and ends after it: it begins at that one's end.

    Outer ones first; none is empty. Of one lane: slices there overlap by what clocks differ, what really goes on at once is
    `Overlapping`.
    """
    ends: list[int] = []
    order = sorted(enumerate(slices), key=lambda each: (each[1][0], -each[1][1]))
    for place, (start, end) in order:
        end = max(end, start + 1)
        while ends and ends[-1] <= start:
            ends.pop()
        while ends and end > ends[-1]:
            start = ends.pop()
        end = max(end, start + 1)
        ends.append(end)
        yield place, start, end
