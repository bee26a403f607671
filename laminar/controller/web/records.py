"""What of a run is only in `run.db`: read by threads, in connections of their own that write nothing and hold nothing up."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laminar.controller import schema
from laminar.controller.web.lanes import Activity
from laminar.ids import BOOT_SHIFT

PATIENCE_S = 5.0  # of somebody who looks at a page; a query that takes longer is broken off
TICKS = 10_000  # steps of SQLite's machine between two looks at the clock: a millisecond or so
SIBLINGS_MAX = 256
ALARMS_MAX = 200  # of earlier processes: what a page shows of its list at once
LANE_PARTS = 400  # of the time that is asked for: a pixel or two each
SPAN_S_MAX = 60.0  # a report or a pull that lasts longer may be missing at the end of what is asked for
GAP_S = 2.0  # two reports of one version that are no further apart are one stretch of generation
MOVES_MAX = 2_000


class Records:
    """Of one database. Every method may block for PATIENCE_S, and raises sqlite3.Error."""

    def __init__(self, database: Path) -> None:
        self._uri = f"{database.absolute().as_uri()}?mode=ro"

    def steps(self, names: tuple[str, ...], before: int, num: int) -> list[tuple[int, list[float | None]]]:
        """(step, values of these metrics) of the last steps before one: at most about `num`, evenly if there were more."""
        with self._opened() as database:
            (last,) = database.execute("SELECT max(step) FROM metrics WHERE step < ?", (before,)).fetchone()
            stride = 1 + (last or 0) // num
            rows = database.execute(
                f"SELECT step, name, value FROM metrics WHERE step < ? AND step % ? = 0 AND name IN ({_marks(names)})",
                (before, stride, *names),
            )
            found: dict[int, dict[str, float]] = {}
            for step, name, value in rows:
                found.setdefault(step, {})[name] = value
        return [(step, [values.get(name) for name in names]) for step, values in sorted(found.items())]

    def alarms(self) -> list[tuple[float, str, str]]:
        """(when, name, text) of the last ALARMS_MAX of the processes before the last one, oldest first."""
        with self._opened() as database:
            query = (
                "SELECT at, name, text FROM alarms WHERE at < (SELECT max(started) FROM boots) ORDER BY at DESC LIMIT ?"
            )
            return database.execute(query, (ALARMS_MAX,)).fetchall()[::-1]

    def began(self) -> float | None:
        """When the first process of the run did, seconds since the epoch."""
        with self._opened() as database:
            (began,) = database.execute("SELECT min(started) FROM boots").fetchone()
            return began

    def trajectory(self, trajectory: int) -> dict[str, Any] | None:
        """Its record; None if there is none."""
        with self._opened() as database:
            return next(_records(database, "id = ?", trajectory), None)

    def num_gone(self) -> int:
        """Trajectories whose records are not here any more (`log.max_mib`)."""
        with self._opened() as database:
            return schema.num_gone(database)

    def siblings(self, group: int) -> list[dict[str, Any]]:
        """The records of a group. Ids of groups and of their trajectories grow together, which is how they are found."""
        with self._opened() as database:
            low, high = _bounds(database, group >> BOOT_SHIFT)
            while low < high:
                middle = (low + high) // 2
                found = database.execute(
                    "SELECT id, group_id FROM trajectories WHERE id >= ? ORDER BY id LIMIT 1", (middle,)
                ).fetchone()
                if found is None or found[1] >= group:
                    high = middle
                else:
                    low = found[0] + 1
            return list(_records(database, "id >= ? AND id < ? AND group_id = ?", low, low + SIBLINGS_MAX, group))

    def lanes(self, begin: float, end: float) -> dict[str, list[tuple[float, float, int, str]]]:
        """Replica -> what it did from one moment to another (run time), as far as the table `spans` tells: it decoded or pulled
        under a version. Times are exact to a LANE_PARTS-th of what is asked for.
        """
        with self._opened() as database:
            first = _first_row(database, begin)
            last = _first_row(database, end + SPAN_S_MAX)
            rows = database.execute(
                "SELECT worker, kind, version, min(start) AS begun, max(end) FROM spans WHERE rowid >= ? AND rowid < ? "
                "AND end > ? AND start < ? AND kind IN ('decode', 'pull') "
                "GROUP BY worker, kind, version, CAST(start / ? AS INTEGER) ORDER BY begun",
                (first, last, begin, end, (end - begin) / LANE_PARTS),
            )
            found: dict[str, list[tuple[float, float, int, str]]] = {}
            for worker, kind, version, begun, ended in rows:
                activity = Activity.GENERATING if kind == "decode" else Activity.SYNCING
                _join(found.setdefault(worker, []), (begun, ended, int(activity), version))
        return found

    def moves(self, begin: float, end: float) -> list[tuple[float, str, str, int]]:
        """(when, source, destination, trajectories) from one moment to another, at most MOVES_MAX."""
        with self._opened() as database:
            return database.execute(
                "SELECT start, source, destination, count(*) FROM moves WHERE start >= ? AND start < ? "
                "GROUP BY start, source, destination ORDER BY start LIMIT ?",
                (begin, end, MOVES_MAX),
            ).fetchall()

    def trains(self, begin: float, end: float) -> list[tuple[float, float, str]]:
        """(start, end, step) of the train steps from one moment to another."""
        with self._opened() as database:
            first, last = _first_row(database, begin), _first_row(database, end + SPAN_S_MAX)
            return database.execute(
                "SELECT start, end, version FROM spans WHERE rowid >= ? AND rowid < ? AND kind = 'train' AND end > ? AND start < ?",
                (first, last, begin, end),
            ).fetchall()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        deadline = time.monotonic() + PATIENCE_S
        with contextlib.closing(sqlite3.connect(self._uri, uri=True, timeout=PATIENCE_S)) as database:
            database.set_progress_handler(lambda: time.monotonic() > deadline, TICKS)
            yield database


def _first_row(database: sqlite3.Connection, moment: float) -> int:
    """The first row of `spans` that ends after a moment: rows are written when they end."""
    low, high = database.execute("SELECT coalesce(min(rowid), 0), coalesce(max(rowid), -1) + 1 FROM spans").fetchone()
    while low < high:
        middle = (low + high) // 2
        found = database.execute(
            "SELECT rowid, end FROM spans WHERE rowid >= ? ORDER BY rowid LIMIT 1", (middle,)
        ).fetchone()
        if found is None or found[1] > moment:
            high = middle
        else:
            low = found[0] + 1
    return int(low)


def _join(rows: list[tuple[float, float, int, str]], row: tuple[float, float, int, str]) -> None:
    """Add it, or lengthen the last one by it if that goes on."""
    if rows and rows[-1][2:] == row[2:] and row[0] - rows[-1][1] < GAP_S:
        rows[-1] = (rows[-1][0], max(rows[-1][1], row[1]), *row[2:])
    else:
        rows.append(row)


def _marks(values: tuple[Any, ...]) -> str:
    return ", ".join("?" * len(values))


def _bounds(database: sqlite3.Connection, boot: int) -> tuple[int, int]:
    """Trajectory ids of a boot: (first, one more than the last)."""
    first, last = boot << BOOT_SHIFT, (boot + 1) << BOOT_SHIFT
    (highest,) = database.execute("SELECT max(id) FROM trajectories WHERE id < ?", (last,)).fetchone()
    return first, max(first, (highest or 0) + 1)


def _records(database: sqlite3.Connection, condition: str, *parameters: int) -> Iterator[dict[str, Any]]:
    rows = database.execute(f"SELECT * FROM trajectories WHERE {condition} ORDER BY id", parameters)
    names = [column[0] for column in rows.description]
    for row in rows:
        yield dict(zip(names, row, strict=True))
