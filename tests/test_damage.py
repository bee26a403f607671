"""A damaged database: what a take-over needs is checked before it goes on, at once; the rest while it goes on, and told."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import msgspec
import pytest

from laminar.controller import damage, recovery
from laminar.controller.recovery import History
from laminar.errors import StartError
from tests.test_recovery_damage import again, directory, execute, read, run

pytestmark = pytest.mark.timeout(120)
__all__ = ["directory", "run"]  # fixtures

PAGE = 4096


def spoil(database: Path, row: bytes) -> None:
    """The page with the first place at which these bytes are becomes none of any kind."""
    data = database.read_bytes()
    page = data.index(row) // PAGE
    with database.open("r+b") as file:
        file.seek(page * PAGE)
        file.write(bytes(8))


def emptied(run: Path) -> History:
    """What a take-over reads of it; its write-ahead log is in the database from now on."""
    return recovery.read(run / "run.db")


def body(run: Path, seq: int) -> bytes:
    with contextlib.closing(sqlite3.connect(run / "run.db")) as database:
        return database.execute("SELECT body FROM events WHERE seq = ?", (seq,)).fetchone()[0]


async def alarms(database: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    await asyncio.wait_for(damage.look(database, lambda *alarm: found.append(alarm)), 60)
    return found


async def test_what_no_take_over_reads_is_not_read_by_one_and_its_damage_is_told_while_the_run_goes_on(
    run: Path,
) -> None:
    whole = emptied(run)
    assert await alarms(run / "run.db") == []
    spoil(run / "run.db", body(run, 1))
    assert damage.of_all(run / "run.db")
    found = recovery.read(run / "run.db")
    assert found._replace(began=whole.began) == whole, "but for when the first event was, which is for people"
    ((name, text),) = await alarms(run / "run.db")
    assert name == "log-damaged"
    assert "table events is damaged (" in text
    assert "--resume --from-checkpoint" in text


async def test_a_damaged_page_of_what_a_take_over_needs_is_refused(run: Path) -> None:
    whole = emptied(run)
    last = body(run, whole.events[-1].seq)
    name = next(iter(whole.segments))
    for row in (last, name.encode(), msgspec.msgpack.encode(whole.snapshot)[:64]):
        copy = again(run)
        spoil(copy / "run.db", row)
        assert read(copy) is None, row


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM events WHERE seq = (SELECT max(seq) FROM events)",
        "DELETE FROM events WHERE seq > (SELECT max(seq) FROM snapshots)",
        "DELETE FROM ends",
        "UPDATE ends SET crc = crc + 1",
        "UPDATE ends SET seq = seq - 1",
    ],
)
async def test_a_log_that_does_not_end_where_it_ended_is_refused(run: Path, statement: str) -> None:
    execute(run, statement)
    with pytest.raises(
        StartError, match=r"it ends with event \d+ of boot 1, and .* was written last; .*--from-checkpoint"
    ):
        recovery.read(run / "run.db")
