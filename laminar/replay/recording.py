"""A run's `run.db` opened for reading: its lives, what their cores were made of, their events.

    boot 1 ──► boot 2 ──► boot 3          a life: a controller process, and those that took over from it when it was killed
    boot 4                                another, which went on from a checkpoint (`--resume`)

The run may be going on, have ended, or have been killed. Every read is short: a long one would keep the log of a run that goes on
from shrinking (`laminar.controller.upkeep`).
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from laminar import __version__, checkpoints, configfile
from laminar.controller import wal
from laminar.controller.coresettings import settings_of
from laminar.controller.recovery import Snapshot
from laminar.controller.schema import checksum
from laminar.core import events
from laminar.core.engine import Core
from laminar.core.settings import Settings
from laminar.errors import ConfigError, LaminarError

BUSY_S = 10.0  # the run's own writer holds the database for milliseconds
EVENTS_AT_ONCE = 1000  # of a read: some milliseconds, about a megabyte


class RecordingError(LaminarError):
    """The log cannot be used; the message says what is wrong with it."""


class Boot(NamedTuple):
    """One controller process."""

    number: int
    started: float
    """Seconds since the epoch."""
    pid: int
    host: str
    resumed_step: int
    version: str
    """Of Laminar."""
    outcome: str
    """How it ended, in words; empty = it lives or was killed."""
    code: str | None
    """Of its core, `laminar.controller.answers.code`; None = it recorded neither what the core was made of nor what it answered."""

    def raised(self, error: str) -> bool:
        """Whether it ended because its core, or what carries out its actions, raised this (`laminar.controller.app`)."""
        return self.outcome.startswith(f"the controller failed: {error};")


class Life(NamedTuple):
    """What ran with one state, event 1, 2, 3 …: a controller process and those that took over from it."""

    boots: tuple[Boot, ...]

    @property
    def number(self) -> int:
        """Of its first boot."""
        return self.boots[0].number

    @property
    def span(self) -> tuple[int, int]:
        """First and last boot."""
        return self.boots[0].number, self.boots[-1].number

    @property
    def name(self) -> str:
        """``boot 1``, ``boots 1 to 3``."""
        first, last = self.span
        return f"boot {first}" if first == last else f"boots {first} to {last}"


Place = tuple[int, int]
"""(boot, seq) of an event."""


class Beginning(NamedTuple):
    """A core from which a life can be replayed."""

    core: Core
    """As of the event at `place`."""
    place: Place
    left_out: str
    """Why it does not begin with the first event, for people; empty = it does."""


class Recorded(NamedTuple):
    """One event of the log."""

    boot: int
    event: events.AnyEvent
    answer: str
    """`laminar.controller.answers.answer`; empty = none, or not recorded."""


class Recording:
    """A run's database, opened. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """`path`: a run's directory, or its run.db. Raises RecordingError."""
        self.path = (path / "run.db" if path.is_dir() else path).absolute()
        self._open()
        with self._reading():
            self.lives = self._lives()

    def _open(self) -> None:
        self._is_at_rest = not wal.path_of(self.path).exists()
        self._database, self.left_out = _opened(self.path, is_at_rest=self._is_at_rest)
        """`left_out`: what of the end of the write-ahead log is no whole commit, for people; empty = nothing."""

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, TypeError) as error:  # TypeError: a damaged row has other columns
            raise RecordingError(_unreadable(self.path, error)) from error

    def query(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of any table. Raises RecordingError."""
        if self._is_at_rest and wal.path_of(self.path).exists():  # the run goes on again
            self._database.close()
            self._open()
        with self._reading():
            return self._database.execute(statement, parameters).fetchall()

    # ---- lives -----------------------------------------------------------------------------------------------

    def life(self, number: int | None = None) -> Life:
        """The one that boot `number` belongs to; None = the last. Raises RecordingError."""
        for life in reversed(self.lives):
            if number is None or life.span[0] <= number <= life.span[1]:
                return life
        known = ", ".join(str(boot.number) for life in self.lives for boot in life.boots)
        raise RecordingError(f"{self.path} has no boot {number}; it has {known}")

    def unanswered(self, life: Life) -> list[int]:
        """Its boots that heard something and did not record what their cores answered."""
        heard = "SELECT 1 FROM events WHERE boot = ? LIMIT 1"
        return [boot.number for boot in life.boots if boot.code is None and self.query(heard, boot.number)]

    def _lives(self) -> list[Life]:
        tables = [name for (name,) in self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        codes = dict(self._database.execute("SELECT boot, code FROM cores")) if "cores" in tables else {}
        lives: dict[int, list[Boot]] = {}
        query = "SELECT continues, boot, started, pid, host, resumed_step, code, coalesce(outcome, '') FROM boots ORDER BY boot"
        for first, boot, *others in self._database.execute(query):
            lives.setdefault(first, []).append(Boot._make((boot, *others, codes.get(boot))))
        if not lives:
            raise RecordingError(f"{self.path} has no controller in it: the run has not begun")
        return [Life(tuple(boots)) for boots in lives.values()]

    # ---- where a life begins ---------------------------------------------------------------------------------

    def settings(self, life: Life) -> Settings:
        """As the run began with them. Raises RecordingError."""
        known = next((boot.number for boot in life.boots if boot.code is not None), None)
        if known is None:
            return self._settings_of_config()
        (body,) = self.query("SELECT settings FROM cores WHERE boot = ?", known)[0]
        try:
            return msgspec.msgpack.decode(body, type=Settings)
        except msgspec.MsgspecError as error:
            raise self._strange(life, "settings", error) from error

    def _strange(self, life: Life, what: str, error: Exception) -> RecordingError:
        recorded = f"recorded by Laminar {life.boots[0].version}, this is {__version__}"
        return RecordingError(f"{self.path}: the {what} cannot be read: {error}; {recorded}")

    def _settings_of_config(self) -> Settings:
        """For a run of a Laminar that did not record them: the size of the data set decides which prompts are drawn."""
        from laminar.tasks import datasets  # only here: nothing else needs the data set

        try:
            config = configfile.load(self.path.parent / "config.toml", [])
            return settings_of(config, datasets.load(config.task))
        except LaminarError as error:
            raise RecordingError(
                f"{self.path} is of a Laminar that did not record the core's settings, which are made of its config.toml and data "
                f"set: {error}"
            ) from error

    def begin(self, life: Life) -> Beginning:
        """Where its replay begins. Raises RecordingError if it cannot be replayed."""
        first = self._first_event(life)
        if first is None and all(boot.code is None for boot in life.boots):
            raise RecordingError(
                f"{self.path}: {life.name} recorded nothing: it has just begun, or was killed as it began"
            )
        settings = self.settings(life)
        if first is None or first == (life.number, 1):
            return Beginning(self._core(life, settings), (life.number, 0), "")
        return self._from_snapshot(life, settings, first)

    def _first_event(self, life: Life) -> Place | None:
        return self._outermost(life, "boot, seq", "ASC")

    def _outermost(self, life: Life, columns: str, order: str) -> tuple[Any, ...] | None:
        """Of its first (`ASC`) or last (`DESC`) event in the log; None = there is none."""
        where = f"WHERE boot BETWEEN ? AND ? ORDER BY boot {order}, seq {order} LIMIT 1"
        rows = self.query(f"SELECT {columns} FROM events {where}", *life.span)
        return rows[0] if rows else None

    def _core(self, life: Life, settings: Settings) -> Core:
        try:
            data_state = self._data_state(life)
            return Core.resumed(settings, data_state) if data_state else Core(settings)
        except msgspec.MsgspecError as error:
            raise RecordingError(f"{self.path}: what boot {life.number} went on from is damaged: {error}") from error
        except ConfigError as error:
            raise RecordingError(f"{self.path}: this Laminar refuses the settings of the run: {error}") from error

    def _data_state(self, life: Life) -> bytes:
        """Of the checkpoint that it went on from; empty = it began anew."""
        if life.boots[0].code is not None:
            return bytes(self.query("SELECT data_state FROM cores WHERE boot = ?", life.number)[0][0])
        step = life.boots[0].resumed_step
        if life.number == 1 or not step:
            return b""
        rows = self.query("SELECT data_state FROM checkpoints WHERE step = ?", step)
        file = self.path.parent / "checkpoints" / f"step-{step}" / checkpoints.DATA_STATE
        if rows and rows[0][0] is not None:
            return bytes(rows[0][0])
        try:
            return file.read_bytes()
        except OSError as error:
            raise RecordingError(
                f"boot {life.number} went on from the checkpoint of step {step}, which neither the log nor {file} has "
                f"({error.strerror})"
            ) from error

    def _from_snapshot(self, life: Life, settings: Settings, first: Place) -> Beginning:
        """The oldest state that all later events are there for."""
        query = (
            "SELECT boot, seq, body, crc FROM snapshots WHERE boot BETWEEN ? AND ? AND seq >= ? - 1 ORDER BY boot, seq"
        )
        for boot, seq, body, crc in self.query(query, *life.span, first[1]):
            if checksum(seq, body) == crc:
                try:
                    core = Core.restore(settings, msgspec.msgpack.decode(body, type=Snapshot).core)
                except msgspec.MsgspecError as error:
                    raise self._strange(life, f"state after event {seq}", error) from error
                return Beginning(core, (boot, seq), f"events 1 to {seq} have left the log (log.max_mib)")
        raise RecordingError(
            f"{self.path}: the first events of boot {life.number} have left the log (log.max_mib), and no snapshot of its state is "
            "there to go on from: it cannot be replayed"
        )

    # ---- events ----------------------------------------------------------------------------------------------

    def last(self, life: Life) -> Place:
        """The last event so far; seq 0 = there is none."""
        return self._outermost(life, "boot, seq", "DESC") or (life.number, 0)

    def times(self, life: Life) -> tuple[float, float]:
        """Of its first and last event in the log, seconds since the epoch; (0, 0) if there is none."""
        first, last = (self._outermost(life, "at", order) or (0.0,) for order in ("ASC", "DESC"))
        return first[0], last[0]

    def events_of(self, life: Life) -> Iterator[events.AnyEvent]:
        """Those that are in the log, in order, up to damage. Raises RecordingError."""
        boot, seq = self._first_event(life) or (life.number, 1)
        place = boot, seq - 1
        while found := self.after(life, place)[0]:
            yield from (recorded.event for recorded in found)
            place = found[-1].boot, found[-1].event.seq

    def after(self, life: Life, place: Place) -> tuple[list[Recorded], str]:
        """Some of the events after `place`, and what is wrong with the one that follows them; ([], "") = there are no more yet."""
        known = any(boot.code is not None for boot in life.boots)
        answer = "(SELECT actions FROM answers a WHERE (a.boot, a.seq) = (e.boot, e.seq))" if known else "NULL"
        where = "(boot, seq) > (?, ?) AND boot <= ? ORDER BY boot, seq LIMIT ?"
        query = f"SELECT boot, seq, body, crc, {answer} FROM events e WHERE {where}"
        rows = self.query(query, *place, life.span[1], EVENTS_AT_ONCE)
        found: list[Recorded] = []
        for expected, (boot, number, body, crc, answer) in enumerate(rows, place[1] + 1):
            if number != expected:
                return found, f"event {expected} is missing"
            if checksum(number, body) != crc:
                return found, f"event {expected} is damaged"
            try:
                event = msgspec.msgpack.decode(body, type=events.AnyEvent)
            except msgspec.MsgspecError as error:
                return found, f"event {expected} is of a kind that this Laminar does not know ({error})"
            found.append(Recorded(boot, event, answer or ""))
        return found, ""


def _opened(path: Path, *, is_at_rest: bool) -> tuple[sqlite3.Connection, str]:
    if not path.is_file():
        raise RecordingError(f"{path}: no such file; give a run's directory, or its run.db")
    log, database = wal.path_of(path), None
    try:
        frames = wal.num_frames(log)
        # without a write-ahead log nobody writes, and SQLite needs no files of its own beside the database
        mode = "immutable=1" if is_at_rest else "mode=ro"
        database = sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=BUSY_S)
        database.execute("SELECT boot FROM boots LIMIT 1").fetchone()
        return database, wal.not_taken(path, frames)
    except (OSError, sqlite3.Error) as error:
        if database is not None:
            database.close()
        raise RecordingError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    log = wal.path_of(path)
    hint = f"; with {log.name} beside it SQLite has to write there: if it may not, copy both to another directory"
    return f"cannot read {path}: {error}; a run.db of Laminar is expected, undamaged" + (hint if log.exists() else "")
