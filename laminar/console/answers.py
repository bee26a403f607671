"""What a command answers: plain data, for a terminal to draw and for programs to read."""

from collections.abc import Sequence

import msgspec

from laminar.core.events import AnyEvent

Cell = str | int | float | bool | None
ROWS_MAX = 512  # twice the largest fleet that the console was tried with; a screen shows fifty


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of cells. Column names are keys, units last (`age_s`, `kv_share`): what draws them formats by that."""

    columns: list[str]
    rows: list[list[Cell]]
    title: str = ""
    num_left_off: int = 0
    """Rows that are not shown."""
    note: str = ""
    """How to see those, or what to know of the table."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say, in this order."""

    headline: str = ""
    """The answer in one sentence, if it has one."""
    facts: dict[str, Cell] = {}
    """Single values by name; None = not known, or nothing."""
    tables: list[Table] = []
    lines: list[str] = []
    """Sentences."""
    error: str = ""
    """What is wrong, where, and what to do; empty = the command did what it says."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What a command wants to happen: events for the core, and what they will lead to, in words."""

    events: list[AnyEvent]
    lines: list[str] = []


def table(
    title: str, columns: str, rows: Sequence[list[Cell]], *, rows_max: int = ROWS_MAX, left_off: int = 0, note: str = ""
) -> Table:
    """The first `rows_max` rows. `columns`: their names, separated by spaces; `left_off`: rows that were left off before."""
    return Table(
        title=title,
        columns=columns.split(),
        rows=list(rows[:rows_max]),
        num_left_off=left_off + max(0, len(rows) - rows_max),
        note=note,
    )


def records(table: Table) -> list[dict[str, Cell]]:
    """The rows as objects, for programs."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]
