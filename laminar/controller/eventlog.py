"""The run's database `run.db` (SQLite, WAL) and its writer thread: group commit, durability, boot numbers.

Invariants:
* Events reach the disk in order, at most `commit_s` after `append` (at once when someone waits for them).
* What is queued under one `together` commits in one transaction.
* Token segments named by an event are on disk before the event commits (`before_commit`, whose statements commit with it).
* `durable` only grows; waiters of `when_durable(seq)` wake when it reaches their seq.
* A full disk, or a locked database, is waited for: `on_stalled(reason)`, then `on_stalled(None)` when it has taken everything.
* Any other failed write is final and never hidden: `failure` holds it, waiters get it, nothing later is called durable.
* One controller per run: by `run.lock` (`laminar.controller.runlock`), and where the file system has only seemed to lock, by boot
  numbers: a log whose run has a later boot writes no more (`Superseded`).
* What workers are told that they may forget (`frames`) commits with the events made of it, or after them.

Its tables: `laminar.controller.schema`.
"""

import asyncio
import contextlib
import heapq
import itertools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from laminar import __version__
from laminar.controller import damage, schema
from laminar.controller.obstacles import CLEARABLE
from laminar.controller.runlock import RunLock
from laminar.controller.schema import Statement, checksum
from laminar.controller.upkeep import BUSY_MS, Alarm, Upkeep
from laminar.errors import LaminarError, StartError

Frame = tuple[str, int, int]
"""(worker, incarnation, number) of a frame from a worker."""

CLEARABLE_CODES = (
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_CANTOPEN,
)  # fmt: skip
END = "INSERT OR REPLACE INTO ends VALUES (?, ?, ?)"
RETRY_S = 1.0  # a full disk is looked at so often
ROWS_AT_ONCE = (64, 8, 1)  # in one statement; few sizes, because SQLite parses each once
LOCKED_S = 30.0  # someone else may hold a write transaction on the database: a person with an SQLite client


class Superseded(LaminarError):
    """Another controller has taken the run over: this one may write nothing more, and stop nobody."""


class EventLog:
    """Owns `run.db`. All methods are called from the event loop; one thread writes."""

    def __init__(
        self,
        path: Path,
        commit_s: float,
        before_commit: Callable[[], Iterable[Statement]] = tuple,
        after_commit: Callable[[], None] = lambda: None,
        bytes_max: int = 0,
    ) -> None:
        """`bytes_max`: above which old events leave the database (`laminar.controller.upkeep`); 0 = never."""
        self.path = path
        self.failure: Exception | None = None
        """Why the log cannot be written; final."""
        self.durable = 0
        """Highest event seq on disk."""
        self.upkeep = Upkeep(path, bytes_max)
        self.set_aside = ""
        """What became of a damaged database, for people."""
        self.run_id = ""
        """Of this process and of all that it continues."""
        self.continues = 0
        """The first boot of which this process has the state; its own if it began anew."""
        self._commit_s = commit_s
        self._before_commit, self._after_commit = before_commit, after_commit
        self._gathering = self._in_hurry = False
        self._gathered: list[Statement] = []
        self._heard: dict[tuple[str, int], int] = {}
        """Highest frame of each worker that is heard."""
        self._last = 0
        self._pending: list[Statement] = []
        self._frames: dict[tuple[str, int], int] = {}
        self._appended = 0
        """Those three handed over and not written, under `_lock`."""
        self._boot = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._num_waiters = 0
        self._on_durable: Callable[[int], None] = lambda seq: None
        self.on_stalled: Callable[[str | None], None] = lambda reason: None
        """Called on the loop with the reason when nothing can be written, and with None when all that waited has been."""
        self.on_alarm: Callable[[Alarm], None] = lambda alarm: None
        """Called on the loop with what people have to know of the files."""
        self._unwritten_since = 0.0
        """Monotonic time at which the oldest of `_pending` was handed over."""
        self._lag_s_max = 0.0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.run_lock = RunLock(path)
        """Taken by `begin_boot`, if it is not held yet."""

    def begin_boot(
        self,
        started: float,
        pid: int,
        host: str,
        resumed_step: int,
        *,
        run_id: Callable[[int], str] = str,
        continues: bool = False,
    ) -> int:
        """Take the run for this process and the next boot number, durably. Raises StartError if that is impossible.

        What steps after `resumed_step` left is taken back: they are done again, with other trajectories. Not so if this process
        `continues` with the state of the one before. `run_id` makes a new run's name, of the boot. A damaged database is set aside
        by a process that begins anew.
        """
        if not self.run_lock.is_held:
            self.run_lock.take(pid, host)
        try:
            if not continues and (what := damage.of_all(self.path)):
                self.set_aside = (
                    f"{self.path} is damaged ({what}); it is kept as {schema.set_aside(self.path)}, a new one begins"
                )
            with contextlib.closing(sqlite3.connect(self.path, timeout=LOCKED_S)) as database, database:
                schema.prepare(database)
                (last,) = database.execute("SELECT coalesce(max(boot), 0) FROM boots").fetchone()
                self._boot = max(last, self.run_lock.last_boot) + 1
                if continues:
                    self.run_id, first = schema.continued(database)
                else:
                    self.run_id, first = run_id(self._boot), self._boot
                    schema.take_back(database, resumed_step)
                self.continues = first
                database.execute(
                    "INSERT INTO boots VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL)",
                    (self._boot, started, pid, host, resumed_step, self.run_id, __version__, first),
                )
            self.run_lock.note(self._boot)
        except (OSError, sqlite3.Error) as error:
            self.run_lock.release()
            raise StartError(
                f"cannot use the run's database {self.path}: {error}; "
                "free its disk or restore the file, or start a new run under another run.name"
            ) from error
        return self._boot

    def start(self, on_durable: Callable[[int], None]) -> None:
        """Start the writer; `on_durable(seq)` is called on the loop after each commit."""
        self._loop = asyncio.get_running_loop()
        self._on_durable = on_durable
        self._thread = threading.Thread(target=self._write_forever, name="eventlog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is queued inside commits together."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            self._hand_over()

    def append(self, seq: int, at: float, kind: str, body: bytes, frame: Frame | None = None) -> None:
        """Queue one event, with the frame that it came in."""
        row = (self._boot, seq, at, kind, body, checksum(seq, body))
        self._gathered.append(("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row))
        self._last = seq
        if frame is not None:
            self._heard[frame[:2]] = frame[2]
        self._hand_over()

    def answered(self, seq: int, actions: str) -> None:
        """Queue what the core answered to an event (`laminar.controller.answers`)."""
        self.write("INSERT INTO answers VALUES (?, ?, ?)", (self._boot, seq, actions))

    def heard(self, frame: Frame) -> None:
        """Queue word of a frame of which no event was made."""
        self._heard[frame[:2]] = frame[2]
        self._hand_over()

    def write(self, statement: str, parameters: Sequence[Any]) -> None:
        """Queue a statement on one of the other tables; it commits with or after the events before it."""
        self._gathered.append((statement, parameters))
        self._hand_over()

    def _hand_over(self) -> None:
        """To the writer, unless there is more to come that belongs together."""
        if self._gathering:
            return
        gathered, self._gathered = self._gathered, []
        with self._lock:
            if gathered and not self._pending:
                self._unwritten_since = time.monotonic()
            self._pending += gathered
            self._frames |= self._heard
            self._appended = self._last
        self._heard.clear()
        if self._in_hurry:
            self._hurry.set()
        if self._in_hurry or gathered:
            self._wake.set()
        self._in_hurry = False

    def snapshot(self, seq: int, body: bytes) -> None:
        """Queue the state after event `seq`; the last few are kept (`laminar.controller.upkeep`)."""
        row = (self._boot, seq, body, checksum(seq, body))
        self.write("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", row)

    def hurry(self) -> None:
        """Somebody waits for what is queued: do not wait for company."""
        self._in_hurry = True
        self._hand_over()

    def take_lag(self) -> float:
        """The longest that anything waited for the disk since the last call, seconds."""
        lag, self._lag_s_max = self._lag_s_max, 0.0
        return lag

    async def when_durable(self, seq: int) -> None:
        """Return when event `seq` is on disk. Raises the writer's error if it cannot write."""
        if seq <= self.durable:
            return
        if self.failure is not None:
            raise self.failure
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_waiters += 1
        heapq.heappush(self._waiters, (seq, self._num_waiters, waiter))
        self.hurry()
        await waiter

    @property
    def why_unwritable(self) -> str:
        """What its failure means, and what to do."""
        if isinstance(self.failure, Superseded):
            return f"{self.failure}; this one has stopped, and leaves the run and its workers to that one"
        how = "mend its disk or make room, then resume"
        if self.failure is not None and damage.is_damage(self.failure):
            how = "resume it with --from-checkpoint, which sets the damaged file aside"
        return f"the event log {self.path} cannot be written: {self.failure}; {how}"

    def close(self, timeout_s: float = 10.0, outcome: str = "") -> None:
        """Commit what is queued, stop the writer, give the run free. What went wrong is in `failure`.

        `outcome`: how the run ended, in words; without one it counts as interrupted.
        """
        if outcome:
            self.write("UPDATE boots SET outcome = ? WHERE boot = ?", (outcome, self._boot))
        self._closing.set()
        self.hurry()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self.failure = TimeoutError(f"the disk did not take the last events within {timeout_s:g} s")
        self.run_lock.release()

    # ---- writer thread -------------------------------------------------------------------------------------

    def _write_forever(self) -> None:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=LOCKED_S)) as database:
                schema.prepare(database)
                while not self._closing.is_set() or self._pending:
                    self._wait()
                    self._tell(self._advance, self._commit(database))
                    self._look_after(database)
                database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")  # everything is on disk: a reader may go on
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except Exception as error:  # noqa: BLE001 - a thread that died in silence would let everyone wait for ever
            self.failure = error
            self._tell(self._fail, error)

    def _look_after(self, database: sqlite3.Connection) -> None:
        try:
            for alarm in self.upkeep.after_commit(database):
                self._tell(self.on_alarm, alarm)
        except sqlite3.Error as error:
            if not _may_clear(error):
                raise

    def _wait(self) -> None:
        """Until there is something to write, then `commit_s` longer for company, unless someone waits for it."""
        self._wake.wait()
        self._hurry.wait(self._commit_s)
        self._wake.clear()
        self._hurry.clear()

    def _commit(self, database: sqlite3.Connection) -> int:
        with self._lock:
            batch, self._pending = self._pending, []
            frames, self._frames = self._frames, {}
            seq, since = self._appended, self._unwritten_since
        if batch and seq:
            batch.append((END, (self._boot, seq, schema.end_checksum(self._boot, seq))))
        rows = [(*worker, number, checksum(number, repr(worker).encode())) for worker, number in frames.items()]
        if batch or rows:
            self._write_patiently(database, batch, rows)
        if batch:
            self._lag_s_max = max(self._lag_s_max, time.monotonic() - since)
        return seq

    def _write_patiently(
        self, database: sqlite3.Connection, batch: list[Statement], rows: list[tuple[Any, ...]]
    ) -> None:
        """Again and again while the disk is full, until the log is to be closed."""
        stalled = False
        while True:
            try:
                self._write(database, batch, rows)
                break
            except (OSError, sqlite3.Error) as error:
                if self._closing.is_set() or not _may_clear(error):
                    raise
                if not stalled:
                    self._tell(self.on_stalled, f"{self.path.parent}: {error}")
                stalled = True
                self._closing.wait(RETRY_S)
        if stalled:
            self._tell(self.on_stalled, None)

    def _write(self, database: sqlite3.Connection, batch: list[Statement], rows: list[tuple[Any, ...]]) -> None:
        of_segments = self._before_commit() if batch else ()
        with database:
            of_frames = (("INSERT OR REPLACE INTO frames VALUES (?, ?, ?, ?)", row) for row in rows)
            for statement, parameters in joined((*batch, *of_segments, *of_frames)):
                database.execute(statement, parameters)
            self._check_boot(database)
        if batch:
            self._after_commit()

    def _check_boot(self, database: sqlite3.Connection) -> None:
        """Within a transaction that has begun to write. Raises Superseded."""
        boot, pid, host = database.execute("SELECT boot, pid, host FROM boots ORDER BY boot DESC LIMIT 1").fetchone()
        if boot != self._boot:
            raise Superseded(
                f"the controller with pid {pid} on {host} has taken it over (boot {boot}, this one is {self._boot})"
            )

    def _tell(self, function: Callable[..., None], argument: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, argument)

    def _advance(self, seq: int) -> None:
        if seq <= self.durable:
            return
        self.durable = seq
        while self._waiters and self._waiters[0][0] <= seq:
            _, _, waiter = heapq.heappop(self._waiters)
            if not waiter.done():
                waiter.set_result(None)
        self._on_durable(seq)

    def _fail(self, error: Exception) -> None:
        for _, _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiters.clear()


def joined(batch: Iterable[Statement]) -> Iterator[Statement]:
    """The same with the rows of each INSERT together: between two statements the writer waits for the event loop's thread to let
    go of the interpreter, which takes milliseconds while that is busy.

    INSERTs into different tables are not kept in order, nor need they be; what else there is stays between those around it.
    """
    inserts: dict[str, list[Sequence[Any]]] = {}
    for statement, parameters in batch:
        if statement.startswith("INSERT"):
            inserts.setdefault(statement, []).append(parameters)
        else:
            yield from _of_many_rows(inserts)
            inserts = {}
            yield statement, parameters
    yield from _of_many_rows(inserts)


def _of_many_rows(inserts: dict[str, list[Sequence[Any]]]) -> Iterator[Statement]:
    for statement, rows in inserts.items():
        values, begin = statement.partition("VALUES ")[2], 0
        while begin < len(rows):
            size = next(size for size in ROWS_AT_ONCE if size <= len(rows) - begin)
            part = rows[begin : begin + size]
            yield statement + f", {values}" * (size - 1), list(itertools.chain.from_iterable(part))
            begin += size


def _may_clear(error: OSError | sqlite3.Error) -> bool:
    """Whether the same write may succeed later: somebody makes room, gives a permission back, or lets the database go."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in CLEARABLE_CODES
    return error.errno in CLEARABLE
