"""What happened to whom, and because of which event: the rows behind `story(key)`."""

from collections import deque
from collections.abc import Iterable
from itertools import islice

import msgspec

from laminar.core.events import AnyEvent
from laminar.ids import GroupId, TrajectoryId, Version, WorkerId, format_id

SETTINGS = "settings"  # subject of what an operator changes of the run as a whole
ROWS_MAX = 50_000  # a few minutes of a large run, some 10 MB; older rows are in the event log


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One line of the story."""

    cause: int
    """Sequence number of the event that led to it."""
    at: float
    text: str
    subjects: tuple[str, ...]
    because: str = ""
    """What that event was: ``ReplicaReported of rollout-3``."""


class Story:
    """A bounded log; not part of the state, so a restored core starts with an empty one, unless it is given `rows`."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: deque[Row] = deque(rows, maxlen=ROWS_MAX)
        self._keys: deque[str] = deque(map(_key, (row.subjects for row in self._rows)), maxlen=ROWS_MAX)
        """Of each row its subjects as one text: looked through ten times faster than tuples, while an event loop waits."""
        self._event: AnyEvent | None = None

    def begin(self, event: AnyEvent) -> None:
        """What is told from now on is because of this event."""
        self._event = event

    def add(self, cause: int, at: float, text: str, subjects: tuple[str, ...]) -> None:
        """Append one row."""
        self._rows.append(Row(cause, at, text, subjects, name_of(self._event) if self._event else ""))
        self._keys.append(_key(subjects))

    def rows(self) -> list[Row]:
        """All that is kept, oldest first."""
        return list(self._rows)

    def of(self, subject: str) -> list[Row]:
        """All rows that name `subject`, oldest first."""
        wanted = _key((subject,))
        return [row for row, key in zip(self._rows, self._keys, strict=True) if wanted in key]

    def latest(self, num: int) -> list[Row]:
        """The last so many rows of all subjects, oldest first."""
        return list(islice(reversed(self._rows), num))[::-1]


def _key(subjects: tuple[str, ...]) -> str:
    return "\n".join(("", *subjects, ""))


def name_of(event: AnyEvent) -> str:
    """What an event was, in a few words: its kind and its worker."""
    kind, who = type(event).__name__, getattr(event, "worker", None)
    return f"{kind} of {who}" if who else kind


def trajectory(value: TrajectoryId) -> str:
    """Subject of a trajectory: ``t1.17``."""
    return f"t{format_id(value)}"


def group(value: GroupId) -> str:
    """Subject of a group: ``g1.2``."""
    return f"g{format_id(value)}"


def worker(value: WorkerId) -> str:
    """Subject of a worker: its name."""
    return value


def version(value: Version) -> str:
    """Subject of a weight version: ``v12`` or ``v12.b1``."""
    return str(value)


def step(value: int) -> str:
    """Subject of a train step: ``s12``."""
    return f"s{value}"


def of_pass(value: str) -> str:
    """Subject of a pass: ``pass repack``."""
    return f"pass {value}"


def break_at(value: int) -> str:
    """Subject of a breakpoint: ``breakpoint 2``."""
    return f"breakpoint {value}"
