"""Whether a run's database is damaged: all of it, or what a controller that takes over needs, at a cost that does not grow with it.

    take-over:  the small tables ─► events since the snapshot, to the end that was noted ─► the run goes on
                                                         the rest, in a thread, table by table ─► `log-damaged`

Workers wait for a take-over for `controller.orphan_timeout_s` only, and to read some GB takes as long. What is needed is checked
before it is used: its pages here, its rows by their checksums (`laminar.controller.recovery`). A damage elsewhere concerns what
people read (`laminar.replay`, records), and writes that meet it.
"""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from laminar.controller import wal

NEEDED = ("boots", "snapshots", "segments", "frames", "ends")
WAL_BYTES_MAX = (
    32 << 20
)  # that a check may let the write-ahead log grow to: below what `laminar.controller.upkeep` calls held up
TICKS = 100_000  # steps of SQLite's machine between two looks at that; some milliseconds
AWAY_S = 30.0  # for a write that is under way
MEANING = (
    "What the run needs is whole, so it goes on; a replay or a report may fail, and a write that meets the damage ends the run. To "
    "be rid of it, stop the run and go on with --resume --from-checkpoint, which sets the file aside and begins a new one"
)


def of_all(database: Path) -> str:
    """What is wrong with the file, if there is one; empty = nothing. Reads all of it. Raises sqlite3.Error if it cannot be read."""
    if not database.exists():
        return ""
    try:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            return _found(connection, "PRAGMA quick_check(1)")
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        return str(error)


def of_needed(connection: sqlite3.Connection) -> str:
    """What is wrong with the tables that a take-over reads as a whole; empty = nothing. Raises sqlite3.Error."""
    found = {table: _found(connection, f"PRAGMA quick_check({table})") for table in NEEDED}
    return "; ".join(f"table {table}: {what}" for table, what in found.items() if what)


def of_length(database: Path, connection: sqlite3.Connection, num_frames: int) -> str:
    """Whether the file ends too early, of which SQLite takes a last page that is cut for one that ends with zeros; empty = it does
    not. `num_frames`: pages in the write-ahead log, which need not be in the file yet."""
    (pages,), (page_bytes,) = (connection.execute(f"PRAGMA {what}").fetchone() for what in ("page_count", "page_size"))
    whole = database.stat().st_size // page_bytes
    return f"{whole} of its {pages} pages are there" if pages - whole > num_frames else ""


def is_damage(error: BaseException) -> bool:
    """Whether SQLite means that the file is no whole database."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, sqlite3.Error) and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


async def look(database: Path, alarm: Callable[[str, str], None]) -> None:
    """Once through all of it, while the run goes on. Nobody waits for the thread: a file system may hang."""
    loop, over = asyncio.get_running_loop(), threading.Event()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def tell(found: list[str]) -> None:
        if not answer.done():
            answer.set_result(found)

    def work() -> None:
        found = _of_tables(database, over)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=work, name="check the database", daemon=True).start()
    try:
        if found := await answer:
            alarm("log-damaged", f"{database}: {'; '.join(found)}. {MEANING}")
    finally:
        over.set()


def _of_tables(database: Path, over: threading.Event) -> list[str]:
    """Damages of all tables that are not needed. Each is looked at in a transaction of its own, and broken off when it is `over`,
    or the write-ahead log, which cannot begin anew meanwhile, grows too long.
    """
    log, found = wal.path_of(database), list[str]()

    def is_over() -> bool:
        return over.is_set() or (log.exists() and log.stat().st_size > WAL_BYTES_MAX)

    try:
        with contextlib.closing(
            sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=AWAY_S)
        ) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            connection.set_progress_handler(is_over, TICKS)
            for (table,) in tables:
                if table not in NEEDED and not over.is_set():
                    found.append(_of_table(connection, table))
    except (OSError, sqlite3.Error) as error:
        found.append(str(error) if is_damage(error) else "")  # whether it can be read is seen by those who read it
    return [what for what in found if what]


def _of_table(connection: sqlite3.Connection, table: str) -> str:
    try:
        what = _found(connection, f'PRAGMA quick_check("{table}")')
    except sqlite3.DatabaseError as error:
        what = str(error) if is_damage(error) else ""
    return what and f"table {table} is damaged ({what})"


def _found(connection: sqlite3.Connection, check: str) -> str:
    (found,) = connection.execute(check).fetchone()
    return "" if found == "ok" else " ".join(str(found).split())
