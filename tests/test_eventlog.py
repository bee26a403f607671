"""The event log on real files: order, durability, group commit, failures, boots, the lock."""

import asyncio
import errno
import os
import random
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from laminar.controller import eventlog, runlock
from laminar.controller.eventlog import EventLog, Statement, Superseded
from laminar.errors import StartError

pytestmark = pytest.mark.timeout(30)


def begun(path: Path, commit_s: float = 0.01, **options: object) -> EventLog:
    log = EventLog(path / "run.db", commit_s, **options)  # type: ignore[arg-type]
    log.begin_boot(started=1.0, pid=os.getpid(), host="here", resumed_step=0)
    return log


def rows(path: Path, query: str) -> list[tuple]:
    database = sqlite3.connect(path / "run.db")
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


async def durable(log: EventLog, seq: int) -> None:
    await asyncio.wait_for(log.when_durable(seq), 10)


async def test_events_are_on_disk_in_order_when_they_are_called_durable(tmp_path: Path) -> None:
    log = begun(tmp_path)
    seen: list[int] = []
    log.start(seen.append)
    for seq in range(1, 101):
        log.append(seq, seq / 10, "TimerFired", b"%d" % seq)
    await durable(log, 100)
    assert log.durable == 100
    expected = [(1, seq, seq / 10, "TimerFired", b"%d" % seq) for seq in range(1, 101)]
    assert rows(tmp_path, "SELECT boot, seq, at, kind, body FROM events") == expected
    assert seen == sorted(seen)
    assert seen[-1] == 100
    log.close()


async def test_token_segments_are_synced_before_the_events_that_name_them_commit(tmp_path: Path) -> None:
    committed_at_sync: list[int] = []
    log = EventLog(
        tmp_path / "run.db",
        0.001,
        lambda: committed_at_sync.append(rows(tmp_path, "SELECT count(*) FROM events")[0][0]) or (),
    )
    log.begin_boot(1.0, 1, "here", 0)
    log.start(lambda seq: None)
    for seq in (1, 2):
        log.append(seq, 0.0, "e", b"")
        await durable(log, seq)
    assert committed_at_sync == [0, 1]
    log.close()


async def test_nothing_is_durable_while_the_sync_of_the_segments_lasts(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow_sync() -> tuple[()]:
        entered.set()
        go_on.wait(10)
        return ()

    log = begun(tmp_path, before_commit=slow_sync)
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    waiting = asyncio.create_task(log.when_durable(1))
    await asyncio.to_thread(entered.wait, 10)
    assert (waiting.done(), log.durable) == (False, 0)
    assert rows(tmp_path, "SELECT * FROM events") == []
    go_on.set()
    await asyncio.wait_for(waiting, 10)
    log.close()


async def test_many_appends_share_few_commits(tmp_path: Path) -> None:
    commits: list[int] = []
    log = begun(tmp_path, commit_s=0.05, before_commit=lambda: commits.append(1) or ())
    log.start(lambda seq: None)
    for seq in range(1, 2001):
        log.append(seq, 0.0, "e", b"x")
    await durable(log, 2000)
    log.close()
    assert len(commits) <= 5


async def test_one_who_waits_does_not_wait_for_company(tmp_path: Path) -> None:
    log = begun(tmp_path, commit_s=3600.0)
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    await durable(log, 1)
    log.close()


async def test_waiters_wake_in_order_and_only_when_their_event_is_durable(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.start(lambda seq: None)
    woken: list[int] = []

    async def wait_for(seq: int) -> None:
        await durable(log, seq)
        woken.append(seq)

    tasks = [asyncio.create_task(wait_for(seq)) for seq in (3, 1, 2)]
    await asyncio.sleep(0)
    for seq in (1, 2):
        log.append(seq, 0.0, "e", b"")
    await durable(log, 2)
    assert 3 not in woken
    log.append(3, 0.0, "e", b"")
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert sorted(woken) == [1, 2, 3]
    log.close()


async def test_a_row_of_another_table_commits_with_the_events_before_it(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.start(lambda seq: None)
    log.write("INSERT INTO alarms VALUES (?, ?, ?)", (1.0, "name", "text"))
    log.append(1, 0.0, "e", b"")
    await durable(log, 1)
    assert rows(tmp_path, "SELECT * FROM alarms") == [(1.0, "name", "text")]
    log.close()


async def test_what_was_queued_together_commits_together(tmp_path: Path) -> None:
    log = begun(tmp_path, commit_s=0.001)
    log.start(lambda seq: None)
    with log.together():
        log.append(1, 0.0, "e", b"")
        log.hurry()
        log._wake.set()
        for _ in range(3):  # the writer has nothing, however often it looks
            await asyncio.sleep(0.01)
            assert rows(tmp_path, "SELECT * FROM events") == []
        log.write("INSERT INTO alarms VALUES (?, ?, ?)", (1.0, "name", "text"))
    await durable(log, 1)
    assert len(rows(tmp_path, "SELECT * FROM events, alarms")) == 1
    log.close()


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_are_inserted_together_leave_what_they_leave_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [
        lambda at: ("INSERT INTO a VALUES (?, ?)", (at, seed)),
        lambda at: ("INSERT OR REPLACE INTO b VALUES (?, ?, ?)", (chance.randrange(9), "x", at)),
        lambda at: ("UPDATE b SET name = ? WHERE id < ?", (str(at), chance.randrange(9))),
        lambda at: ("DELETE FROM a WHERE id = ?", (chance.randrange(1 + at),)),
    ]
    batch = [chance.choices(kinds, (200, 200, 1, 1))[0](at) for at in range(chance.randrange(1200))]
    few = list(eventlog.joined(batch))
    assert len(few) < 20 + len(batch) / 4
    assert left_by(few) == left_by(batch)


def left_by(batch: list[Statement]) -> list[list[tuple]]:
    database = sqlite3.connect(":memory:")
    database.executescript("CREATE TABLE a (id, x); CREATE TABLE b (id INTEGER PRIMARY KEY, name, at)")
    for statement, parameters in batch:
        database.execute(statement, parameters)
    found = [database.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in "ab"]
    database.close()
    return found


async def test_close_commits_what_is_queued(tmp_path: Path) -> None:
    log = begun(tmp_path, commit_s=3600.0)
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    await asyncio.to_thread(log.close)
    assert rows(tmp_path, "SELECT seq FROM events") == [(1,)]
    assert log.failure is None


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def bug() -> None:
    raise ValueError("not an error of the disk at all")


def broken_disk() -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("before_commit", [broken_disk, bug])
async def test_a_failed_write_reaches_those_who_wait_and_those_who_ask_later(tmp_path: Path, before_commit) -> None:
    log = begun(tmp_path, before_commit=before_commit)
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    for _ in range(2):
        with pytest.raises((OSError, ValueError), match=r"Input/output|not an error of the disk"):
            await durable(log, 1)
    assert log.failure is not None
    assert log.durable == 0
    log.close()


async def test_a_value_that_sqlite_does_not_take_is_a_failure_and_no_silent_end(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.start(lambda seq: None)
    log.write("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", (1, 0, "d", 1 << 70, 1.0))
    log.append(1, 0.0, "e", b"")
    with pytest.raises(OverflowError):
        await durable(log, 1)
    log.close()


class Stalls:
    """What a log says of its disk; `heard` is set with every word."""

    def __init__(self, log: EventLog) -> None:
        self.words: list[str | None] = []
        self.heard = asyncio.Event()
        log.on_stalled = self._note

    def _note(self, reason: str | None) -> None:
        self.words.append(reason)
        self.heard.set()

    async def next(self) -> str | None:
        await asyncio.wait_for(self.heard.wait(), 10)
        self.heard.clear()
        return self.words[-1]


async def test_a_full_disk_is_waited_for_and_everything_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eventlog, "RETRY_S", 0.01)
    is_full = True

    def before_commit() -> tuple[()]:
        if is_full:
            full_disk()
        return ()

    log = begun(tmp_path, before_commit=before_commit)
    stalls = Stalls(log)
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    assert "No space left" in str(await stalls.next())
    log.append(2, 0.0, "e", b"")
    assert log.durable == 0
    is_full = False
    assert await stalls.next() is None
    await durable(log, 2)
    assert rows(tmp_path, "SELECT seq FROM events") == [(1,), (2,)]
    assert len(stalls.words) == 2
    log.close()


async def test_a_database_that_reached_its_size_limit_is_waited_for_until_the_end_and_then_a_failure(
    tmp_path: Path,
) -> None:
    log = begun(tmp_path)
    stalls = Stalls(log)
    log.start(lambda seq: None)
    log.write("PRAGMA max_page_count = 1", ())  # SQLite's own full disk: SQLITE_FULL
    log.append(1, 0.0, "e", b"x" * 2_000_000)
    assert "full" in str(await stalls.next())
    assert log.durable == 0
    await asyncio.to_thread(log.close)
    assert isinstance(log.failure, sqlite3.OperationalError)
    assert rows(tmp_path, "SELECT * FROM events") == []


async def test_a_failure_of_the_last_commit_is_not_hidden(tmp_path: Path) -> None:
    log = begun(tmp_path, commit_s=3600.0, before_commit=full_disk)
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    log.close()
    assert isinstance(log.failure, OSError)


async def test_a_disk_that_hangs_does_not_hang_the_end(tmp_path: Path) -> None:
    go_on = threading.Event()
    log = begun(tmp_path, before_commit=lambda: go_on.wait(20) and ())
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    log.close(timeout_s=0.05)
    assert isinstance(log.failure, TimeoutError)
    go_on.set()


async def test_a_reader_that_does_not_end_does_not_hold_up_the_end(tmp_path: Path) -> None:
    log = begun(tmp_path)
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    await durable(log, 1)
    reader = sqlite3.connect(tmp_path / "run.db")
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,)
    log.append(2, 0.0, "e", b"")
    log.close(timeout_s=8.0)
    assert log.failure is None
    assert reader.execute("SELECT count(*) FROM events").fetchone() == (1,), "it reads on"
    reader.close()
    assert rows(tmp_path, "SELECT seq FROM events") == [(1,), (2,)]


def test_boot_numbers_never_repeat(tmp_path: Path) -> None:
    boots = []
    for _ in range(3):
        log = EventLog(tmp_path / "run.db", 0.01)
        boots.append(log.begin_boot(1.0, 1, "here", 0))
        log.close()
    assert boots == [1, 2, 3]


def test_a_second_controller_is_refused_and_told_who_holds_the_run(tmp_path: Path) -> None:
    log = begun(tmp_path)
    with pytest.raises(StartError, match=f"in use by the controller with pid {os.getpid()} on here"):
        begun(tmp_path)
    log.close()
    begun(tmp_path).close()
    assert rows(tmp_path, "SELECT boot FROM boots") == [(1,), (2,)]


async def test_a_controller_whose_run_another_has_taken_all_the_same_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(tmp_path)
    first.start(lambda seq: None)
    first.append(1, 0.0, "e", b"")
    await durable(first, 1)
    first.run_lock.release()  # a file system that forgets locks, or whose machines do not see each other's
    second = begun(tmp_path)
    first.append(2, 0.0, "e", b"")
    with pytest.raises(Superseded, match=rf"pid {os.getpid()} on here has taken it over \(boot 2, this one is 1\)"):
        await durable(first, 2)
    first.close(outcome="stopped")
    second.close()
    assert rows(tmp_path, "SELECT boot, seq FROM events") == [(1, 1)]
    assert rows(tmp_path, "SELECT boot, outcome FROM boots") == [(1, None), (2, None)]


def test_a_killed_controller_leaves_the_run_free(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib\n"
        "from laminar.controller.eventlog import EventLog\n"
        "EventLog(pathlib.Path(sys.argv[1]) / 'run.db', 0.01).begin_boot(1.0, os.getpid(), 'here', 0)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(StartError, match=f"pid {child.pid}"):
            begun(tmp_path)
        child.kill()
    begun(tmp_path).close()


def test_a_corrupt_database_is_a_start_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"this is no database, but long enough to be read as one" * 100)
    with pytest.raises(StartError, match=r"cannot use the run's database .*run\.db: file is not a database"):
        EventLog(tmp_path / "run.db", 0.01).begin_boot(1.0, 1, "here", 0, continues=True)


def test_a_damaged_database_is_set_aside_by_a_run_that_begins_anew_and_boots_go_on(tmp_path: Path) -> None:
    for _ in range(3):
        begun(tmp_path).close()
    (tmp_path / "run.db").write_bytes(b"this is no database, but long enough to be read as one" * 100)
    log = begun(tmp_path)
    assert log.set_aside == (
        f"{tmp_path}/run.db is damaged (file is not a database); it is kept as {tmp_path}/run.db.damaged-1, a new one begins"
    )
    assert log._boot == 4
    assert (tmp_path / "run.db.damaged-1").read_bytes().startswith(b"this is no database")
    log.close()


def test_a_missing_directory_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot lock the run"):
        begun(tmp_path / "nowhere")


def test_a_file_system_without_working_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlock.fcntl, "flock", lambda file, how: None)
    with pytest.raises(StartError, match=r"no working locks .*choose a local one with run\.dir"):
        begun(tmp_path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE])
async def test_a_permission_that_is_lost_is_waited_for_like_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(eventlog, "RETRY_S", 0.01)
    is_refused = True

    def before_commit() -> tuple[()]:
        if is_refused:
            raise OSError(number, os.strerror(number))
        return ()

    log = begun(tmp_path, before_commit=before_commit)
    stalls = Stalls(log)
    log.start(lambda seq: None)
    log.append(1, 0.0, "e", b"")
    assert os.strerror(number) in str(await stalls.next())
    is_refused = False
    assert await stalls.next() is None
    await durable(log, 1)
    log.close()


async def test_a_database_that_becomes_read_only_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eventlog, "RETRY_S", 0.01)
    log = begun(tmp_path)
    stalls = Stalls(log)
    log.start(lambda seq: None)
    log.write("PRAGMA query_only = 1", ())  # what SQLite then says is what it says of a read-only file: SQLITE_READONLY
    log.append(1, 0.0, "e", b"")
    assert "readonly" in str(await stalls.next())
    assert log.failure is None
    await asyncio.to_thread(log.close)
    assert "readonly" in str(log.failure)
