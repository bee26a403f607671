"""The tables of a run's database `run.db`. Any SQLite client reads them, also while the run goes on.

`boots` has a row per controller process; `events`, `ends` (the last event of each boot), `snapshots`, `segments` and `frames` are
what a controller that takes over reads (`laminar.controller.recovery`), with a `checksum` of every row; `cores` and `answers` are
what a replay needs besides (`laminar.controller.answers`); the others are records for people.
"""

import contextlib
import itertools
import os
import sqlite3
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Statement = tuple[str, Sequence[Any]]
"""SQL and its parameters."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS boots (
    boot INTEGER PRIMARY KEY, started REAL, pid INTEGER, host TEXT, resumed_step INTEGER,
    run_id TEXT, code TEXT, continues INTEGER, outcome TEXT
);
CREATE TABLE IF NOT EXISTS events (
    boot INTEGER, seq INTEGER, at REAL, kind TEXT, body BLOB, crc INTEGER, PRIMARY KEY (boot, seq)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ends (boot INTEGER PRIMARY KEY, seq INTEGER, crc INTEGER);
CREATE TABLE IF NOT EXISTS cores (boot INTEGER PRIMARY KEY, settings BLOB, data_state BLOB, code TEXT);
CREATE TABLE IF NOT EXISTS answers (boot INTEGER, seq INTEGER, actions TEXT, PRIMARY KEY (boot, seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (boot INTEGER, seq INTEGER, body BLOB, crc INTEGER, PRIMARY KEY (boot, seq));
CREATE TABLE IF NOT EXISTS segments (name TEXT PRIMARY KEY, num_bytes INTEGER, crc INTEGER);
CREATE TABLE IF NOT EXISTS frames (
    worker TEXT, incarnation INTEGER, number INTEGER, crc INTEGER, PRIMARY KEY (worker, incarnation)
);
CREATE TABLE IF NOT EXISTS trajectories (
    id INTEGER PRIMARY KEY, prompt INTEGER, group_id INTEGER, sibling INTEGER, attempt INTEGER,
    behavior_version TEXT, finish_version TEXT, sample_version TEXT, digest TEXT,
    num_prompt_tokens INTEGER, num_tokens INTEGER, reward REAL, reward_parts TEXT, finish_reason TEXT,
    step INTEGER, dropped TEXT, s_gen INTEGER, residence INTEGER, s_train INTEGER,
    queued_at REAL, first_token_at REAL, finished_at REAL, rewarded_at REAL, sampled_at REAL, trained_at REAL
);
CREATE INDEX IF NOT EXISTS trajectories_by_step ON trajectories (step);
CREATE TABLE IF NOT EXISTS versions (
    step INTEGER, branch INTEGER, digest TEXT, num_bytes INTEGER, published_at REAL, PRIMARY KEY (step, branch)
);
CREATE TABLE IF NOT EXISTS checkpoints (step INTEGER PRIMARY KEY, path TEXT, data_state BLOB, saved_at REAL);
CREATE TABLE IF NOT EXISTS metrics (step INTEGER, name TEXT, value REAL, PRIMARY KEY (step, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spans (worker TEXT, kind TEXT, start REAL, end REAL, busy_s REAL, version TEXT);
CREATE TABLE IF NOT EXISTS moves (
    trajectory INTEGER, attempt INTEGER, source TEXT, destination TEXT, version TEXT, num_tokens INTEGER, start REAL, end REAL
);
CREATE TABLE IF NOT EXISTS levels (
    at REAL PRIMARY KEY, buffer_groups INTEGER, in_flight INTEGER, generating INTEGER, kv_tokens INTEGER, kv_tokens_max INTEGER
);
CREATE TABLE IF NOT EXISTS gone (what TEXT PRIMARY KEY, num INTEGER);
CREATE TABLE IF NOT EXISTS alarms (at REAL, name TEXT, text TEXT);
"""


def checksum(number: int, body: bytes) -> int:
    """CRC-32 of what belongs to a number."""
    return zlib.crc32(body, number & 0xFFFFFFFF)


def end_checksum(boot: int, seq: int) -> int:
    """Of a row of `ends`."""
    return checksum(seq, str(boot).encode())


def num_gone(database: sqlite3.Connection) -> int:
    """Trajectories whose records have left the database (`log.max_mib`). Raises sqlite3.Error."""
    found = database.execute("SELECT num FROM gone WHERE what = 'trajectories'").fetchone()
    return int(found[0]) if found else 0


def set_aside(database: Path) -> Path:
    """Give a damaged database, and its write-ahead log, another name. Raises OSError."""
    number = next(n for n in itertools.count(1) if not Path(f"{database}.damaged-{n}").exists())
    for suffix in ("-wal", "-shm", ""):  # the database last: it says whether that is done
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{database}{suffix}", f"{database}.damaged-{number}{suffix}")
    return Path(f"{database}.damaged-{number}")


def continued(database: sqlite3.Connection) -> tuple[str, int]:
    """(run id, first boot with this state) of the last boot."""
    run_id, first = database.execute("SELECT run_id, continues FROM boots ORDER BY boot DESC LIMIT 1").fetchone()
    return str(run_id), int(first)


def take_back(database: sqlite3.Connection, resumed_step: int) -> None:
    """What steps after this one left: they are done again, with other trajectories."""
    database.execute("DELETE FROM metrics WHERE step > ?", (resumed_step,))
    database.execute(
        "UPDATE trajectories SET dropped = 'resume', step = NULL, trained_at = NULL WHERE step > ?", (resumed_step,)
    )
    for table in ("snapshots", "frames", "segments"):
        database.execute(f"DELETE FROM {table}")


def prepare(database: sqlite3.Connection) -> None:
    """Make what is missing. For every connection that writes: a commit is on disk when it returns."""
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.executescript(SCHEMA)
