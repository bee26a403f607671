"""What keeps a run's files small while it goes on: old events leave `run.db`, its write-ahead log begins anew, sizes are known.

    events:  … gone │ base ─ … ─ base ─ … ─ base ─ …  ─ snapshot ─ … ─ snapshot ─ … now
                    └ oldest snapshot                   └──── what a take-over needs ────┘

Bases are snapshots that are kept, so that events leave in whole train steps (long ones in parts, as snapshots are made), about an
eighth of the limit at a time, and what is left can be replayed from its oldest snapshot. They are deleted, not moved: a second file
would hold the same bytes on the same disk, and who wants them all can do without a limit. Answers go with their events, spans and
moves with the events of their time. When no more events can go, the oldest records of trajectories do, and `gone` says how many;
the others (metrics, versions, alarms …) are few and stay.

Invariants:
* All events after the oldest snapshot are there; the last SNAPSHOTS_KEPT snapshots are never deleted.
* A record stays until its trajectory was dropped, or trained by a step before the last two checkpoints and archived.
* Everything here runs in the log's writer thread, between two commits, a few rows at a time.
"""

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from laminar.controller import wal

MIB = 1 << 20
SNAPSHOTS_KEPT = 2  # one that is torn must not be the only one
SHARES = 8  # of the limit: few enough snapshots, and not much of the log at once
LOOK_S = 1.0  # sizes are looked at so often
ROWS_AT_ONCE = 1000  # deleted between two commits: some milliseconds, and more than arrive meanwhile
WAL_BYTES_MAX = 64 * MIB  # sixteen times what SQLite lets it grow to when no reader holds it up
FOREVER = 1 << 62  # a step that no run reaches
BUSY_MS, PATIENCE_MS = 10, 30_000  # for a reader to end, while commits wait; for a person's write transaction

GONE = "INSERT INTO gone VALUES ('trajectories', ?) ON CONFLICT (what) DO UPDATE SET num = num + excluded.num"

Place = tuple[int, int]
"""(boot, seq) of an event."""


class Alarm(NamedTuple):
    """For people."""

    name: str
    text: str


class Sizes(NamedTuple):
    """Of a run's files, bytes."""

    database: int = 0
    wal: int = 0
    tokens: int = 0
    archive: int = 0

    def in_mib(self) -> dict[str, float]:
        """By name, `_mib` last."""
        return {f"{name}_mib": round(size / MIB, 3) for name, size in self._asdict().items()}


class Upkeep:
    """Of one database and the directories beside it. `bytes_max`: of what `run.db` holds; 0 = no limit."""

    def __init__(self, database: Path, bytes_max: int) -> None:
        self.sizes = Sizes()
        """As of the last look; may be read in any thread."""
        self.first_step_needed: Callable[[], int] = lambda: FOREVER
        """The first step whose records somebody has yet to read (the archive). Called in the writer thread."""
        self._path, self._bytes_max = database, bytes_max
        self._looked_at = 0.0
        self._leaving: Place | None = None
        """Up to where events are being deleted."""
        self._records_leave = False
        self._thinned: Place | None = None
        self._since_base = 0
        """Bytes of events from the last base to `_thinned`."""
        self._told: dict[str, bool] = {}

    def after_commit(self, database: sqlite3.Connection) -> list[Alarm]:
        """Whatever is due. Raises sqlite3.Error."""
        if self._leaving is not None:
            self._delete_some(database, self._leaving)
        elif self._records_leave:
            self._records_leave = self._delete_records(database)
        now = time.monotonic()
        if now < self._looked_at + LOOK_S:
            return []
        self._looked_at = now
        self._thin_out(database)
        self.sizes = self._measure()
        return [alarm for alarm in (*self._keep_limit(database), self._keep_wal_short(database)) if alarm]

    def _measure(self) -> Sizes:
        run = self._path.parent
        wal_size = _size(wal.path_of(self._path))
        return Sizes(_size(self._path), wal_size, _size_of_files(run / "tokens"), _size_of_files(run / "archive"))

    # ---- events --------------------------------------------------------------------------------------------

    def _thin_out(self, database: sqlite3.Connection) -> None:
        """Of the snapshots that a take-over does not need, keep a base for every share of the limit."""
        old = _snapshots(database)[:-SNAPSHOTS_KEPT]
        if self._thinned is None:
            self._thinned = old[-1] if old else (0, 0)  # bases of the controller before this one
        for place in [place for place in old if place > self._thinned]:
            self._since_base += _bytes_between(database, self._thinned, place)
            self._thinned = place
            if self._bytes_max and self._since_base * SHARES >= self._bytes_max:
                self._since_base = 0
            else:
                with database:
                    database.execute("DELETE FROM snapshots WHERE (boot, seq) = (?, ?)", place)

    def _keep_limit(self, database: sqlite3.Connection) -> list[Alarm | None]:
        """Let the oldest go if the database holds more than it may: events, else records. Alarms, if it is not events."""
        if not self._bytes_max or self._leaving is not None:
            return []
        used = _used_bytes(database)
        too_much = used > self._bytes_max
        if too_much:
            self._leaving = self._next_to_go(database)
        self._records_leave = too_much and self._leaving is None and self._delete_records(database)
        is_stuck = too_much and self._leaving is None and not self._records_leave
        holds = f"{self._path} holds {used // MIB} MiB, more than log.max_mib = {self._bytes_max // MIB}: its old events are gone,"
        records = f"{holds} and now the records of the oldest trajectories go; give it more at the next --resume"
        rest = f"{holds} and records, too; what is left is needed, or is of the last steps; give it more at the next --resume"
        return [
            self._tell_once("records-leave", self._records_leave or self._told.get("records-leave", False), records),
            self._tell_once("log-too-large", is_stuck or (too_much and self._told.get("log-too-large", False)), rest),
        ]

    def _next_to_go(self, database: sqlite3.Connection) -> Place | None:
        """Up to where the oldest events may go; the snapshot that they began with goes first."""
        first = database.execute("SELECT boot, seq FROM events ORDER BY boot, seq LIMIT 1").fetchone()
        places = _snapshots(database)
        if first is None or len(places) < SNAPSHOTS_KEPT:
            return None
        if first > places[0]:
            if len(places) == SNAPSHOTS_KEPT:
                return None
            with database:
                database.execute("DELETE FROM snapshots WHERE (boot, seq) = (?, ?)", places.pop(0))
        return places[0]

    def _delete_some(self, database: sqlite3.Connection, until: Place) -> None:
        oldest = "SELECT boot, seq FROM events WHERE (boot, seq) <= (?, ?) ORDER BY boot, seq LIMIT ?"
        with database:
            gone = database.execute(
                f"DELETE FROM events WHERE (boot, seq) IN ({oldest})", (*until, ROWS_AT_ONCE)
            ).rowcount
            first = "SELECT boot, seq, at FROM events ORDER BY boot, seq LIMIT 1"
            boot, seq, at = database.execute(first).fetchone() or (*until, 0.0)
            database.execute("DELETE FROM answers WHERE (boot, seq) < (?, ?)", (boot, seq))
            for table, time_of in (("spans", "end"), ("moves", "end"), ("levels", "at")):
                gone += database.execute(
                    f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} ORDER BY rowid LIMIT ?) AND {time_of} < ?",
                    (ROWS_AT_ONCE, at),
                ).rowcount
        if not gone:
            self._leaving = None

    # ---- records -------------------------------------------------------------------------------------------

    def _delete_records(self, database: sqlite3.Connection) -> bool:
        """The oldest that may go; whether there were any."""
        saved = "SELECT step FROM checkpoints WHERE saved_at IS NOT NULL ORDER BY step DESC LIMIT 1 OFFSET 1"
        (before,) = database.execute(saved).fetchone() or (0,)
        over = "(step < ? AND trained_at IS NOT NULL) OR (step IS NULL AND dropped IS NOT NULL)"
        oldest = f"SELECT id FROM trajectories WHERE {over} ORDER BY id LIMIT ?"
        before = min(before, self.first_step_needed())
        with database:
            num = database.execute(f"DELETE FROM trajectories WHERE id IN ({oldest})", (before, ROWS_AT_ONCE)).rowcount
            if num:
                database.execute(GONE, (num,))
        return bool(num)

    # ---- the write-ahead log -------------------------------------------------------------------------------

    def _keep_wal_short(self, database: sqlite3.Connection) -> Alarm | None:
        """A reader whose transaction does not end keeps SQLite from using the write-ahead log again from its beginning."""
        held_up = False
        if self.sizes.wal > WAL_BYTES_MAX:
            database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
            held_up = bool(database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
            database.execute(f"PRAGMA busy_timeout = {PATIENCE_MS}")
        if not held_up and not self._told.get("log-held-up"):
            return None
        readers = ", ".join(str(pid) for pid in wal.readers(self._path)) or "unknown"
        return self._tell_once(
            "log-held-up",
            held_up,
            f"{wal.path_of(self._path)} has grown to {self.sizes.wal // MIB} MiB and cannot shrink, because someone reads the "
            f"database in a transaction that does not end (processes that have it open: {readers}); end that, or it fills the disk",
        )

    def _tell_once(self, name: str, is_so: bool, text: str) -> Alarm | None:
        """An alarm when it becomes so."""
        before, self._told[name] = self._told.get(name, False), is_so
        return Alarm(name, text) if is_so and not before else None


def _snapshots(database: sqlite3.Connection) -> list[Place]:
    return database.execute("SELECT boot, seq FROM snapshots ORDER BY boot, seq").fetchall()


def _bytes_between(database: sqlite3.Connection, after: Place, until: Place) -> int:
    query = "SELECT coalesce(sum(length(body)), 0) FROM events WHERE (boot, seq) > (?, ?) AND (boot, seq) <= (?, ?)"
    return int(database.execute(query, (*after, *until)).fetchone()[0])


def _used_bytes(database: sqlite3.Connection) -> int:
    """Without pages that are free to be used again."""
    total, free, size = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((total - free) * size)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _size_of_files(directory: Path) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(_size(Path(entry.path)) for entry in entries)
    except OSError:
        return 0
