"""Answers on a terminal, and as JSON for programs. Values are formatted by the unit at the end of their name."""

import json
import os
import textwrap
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from laminar.console import answers
from laminar.console.answers import Answer, Cell
from laminar.console.place import Place

PIPED_WIDTH = 200  # columns of output that no terminal limits: rows stay on one line
PADDING = 3  # columns between two columns of a table
STYLES = {
    "generating": "green",
    "draining": "yellow",
    "syncing": "cyan",
    "starting": "cyan",
    "suspect": "bold red",
    "dead": "bold red",
    "quarantined": "red",
    "yes": "green",
    "no": "red",
}


def console(file: Any = None) -> Console:
    """Where answers go. What is piped is not cut to a screen."""
    found = Console(file=file, highlight=False, markup=False, emoji=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = PIPED_WIDTH
    return found


def drawn(answer: Answer) -> RenderableType:
    """The whole answer."""
    parts: list[RenderableType] = [Text(answer.headline, style="bold")] if answer.headline else []
    if answer.facts:
        parts.append(_facts(answer.facts))
    for table in answer.tables:
        parts.append(_Drawn(table))
        if table.num_left_off:
            parts.append(Text(f"… {table.num_left_off:,} more{'; ' + table.note if table.note else ''}", style="dim"))
    parts += [Text(line) for line in answer.lines]
    if answer.error:
        parts.append(Text(f"error: {answer.error}", style="red"))
    return Group(*parts)


def _facts(facts: dict[str, Cell]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            grid.add_row(heading(name), _cell(name, value))
    return grid


class _Drawn:
    """A table as it fits: where room is short, headings of numbers take several lines rather than room from the sentences."""

    def __init__(self, table: answers.Table) -> None:
        self._table = table
        self._places = [
            place for place in range(len(table.columns)) if any(r[place] not in (None, "") for r in table.rows)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [self._texts(place) for place in self._places]
        needed = sum(max(map(cell_len, texts)) + PADDING for texts in columns)
        title = self._table.title or None
        drawn = RichTable(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
        for place, (name, *texts) in zip(self._places, columns, strict=True):
            number = self._is_number(place)
            if number and needed > options.max_width:
                name = name.replace(" (s)", "\N{NO-BREAK SPACE}(s)")
                name = textwrap.fill(name, max(map(len, [*name.split(" "), *texts])))
            drawn.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in self._table.rows:
            drawn.add_row(*(_cell(self._table.columns[place], row[place]) for place in self._places))
        yield drawn

    def _texts(self, place: int) -> list[str]:
        """Heading and cells of a column."""
        name = self._table.columns[place]
        return [heading(name), *(formatted(name, row[place]) for row in self._table.rows)]

    def _is_number(self, place: int) -> bool:
        cells = [row[place] for row in self._table.rows]
        return any(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells)


def _cell(name: str, cell: Cell) -> Text:
    text = formatted(name, cell)
    return Text(text, style=STYLES.get(text, ""))


def heading(name: str) -> str:
    """`age_s` → `age (s)`, `kv_share` → `kv`."""
    words = name.removesuffix("_share").replace("_", " ")
    return f"{words[:-2]} (s)" if name.endswith("_s") else words


def formatted(name: str, value: Cell) -> str:
    """By the unit at the end of the name."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.endswith("_share"):
        return f"{value:.0%}"
    if isinstance(value, float):
        return f"{value:,.1f}" if name.endswith("_s") else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and "tokens" in name else str(value)


def as_json(line: str, answer: Answer, place: Place | None) -> str:
    """One object per command, on one line."""
    tables = [{"title": t.title, "rows": answers.records(t), "num_left_off": t.num_left_off} for t in answer.tables]
    where = {"target": place.target, "event": place.event, "step": place.step, "time_s": place.time_s} if place else {}
    body = {
        "command": line,
        "ok": not answer.error,
        **where,
        "headline": answer.headline,
        "facts": answer.facts,
        "tables": tables,
        "lines": answer.lines,
        "error": answer.error,
    }
    return json.dumps(body, ensure_ascii=False)
