"""The log of a controller that died, damaged in every place: what is read is what was written, or a clear refusal."""

import random
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from laminar.controller import recovery
from laminar.controller.recovery import History
from laminar.controller.segments import Past
from laminar.core.engine import Core
from laminar.errors import StartError
from tests.core_world import settings
from tests.test_recovery import RICH, record_killed, recovered

pytestmark = pytest.mark.timeout(120)

CUTS = 15


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture
async def run(directory: Path, tmp_path: Path) -> Path:
    """A copy of what a killed controller left: database, write-ahead log, segments. Recorded once."""
    if not (directory / "killed").exists():
        await record_killed(directory / "run", 1, directory / "killed")
    return Path(shutil.copytree(directory / "killed", tmp_path / "killed"))


def again(run: Path) -> Path:
    """Another copy."""
    return Path(shutil.copytree(run, run.with_name("copy"), dirs_exist_ok=True))


def read(run: Path) -> History | None:
    """None = refused, with the way out."""
    try:
        return recovery.read(run / "run.db")
    except StartError as error:
        refusal = str(error)
    assert "--from-checkpoint" in refusal
    return None


def state(history: History) -> bytes:
    """Of the core in the end."""
    core = Core.restore(settings(**RICH), history.snapshot.core)
    for event in history.events:
        core.handle(event)
    return core.snapshot()


def is_same(found: History, whole: History) -> bool:
    """Also if it begins with an older snapshot."""
    same = found == whole or state(found) == state(whole)
    return same and (found.frames, found.segments) == (whole.frames, whole.segments)


async def test_a_write_ahead_log_that_ends_anywhere_gives_the_commits_before_its_end(run: Path) -> None:
    whole, chance = recovery.read(again(run) / "run.db"), random.Random(0)
    assert not whole.left_out
    size, num_told, num_whole = (run / "run.db-wal").stat().st_size, 0, 0
    for length in [0, 5, 31, 33, *(chance.randrange(size) for _ in range(CUTS)), size - 1]:
        copy = again(run)
        with (copy / "run.db-wal").open("r+b") as file:
            file.truncate(length)
        found = read(copy)
        if found is None:
            continue
        same_start = found.snapshot == whole.snapshot
        assert not same_start or found.events == whole.events[: len(found.events)], length
        num_whole += same_start and len(found.events) == len(whole.events)
        num_told += bool(found.left_out)
    assert num_told > CUTS / 2
    assert num_whole < CUTS / 2


async def test_a_changed_byte_of_the_write_ahead_log_cuts_it_there_and_is_told(run: Path) -> None:
    whole, chance = recovery.read(again(run) / "run.db"), random.Random(1)
    size = (run / "run.db-wal").stat().st_size
    for _ in range(CUTS):
        copy = again(run)
        flip(copy / "run.db-wal", chance.randrange(size))
        found = read(copy)
        assert found is None or found.left_out or is_same(found, whole)


async def test_a_changed_byte_of_the_database_is_refused_or_does_not_matter(run: Path) -> None:
    whole = recovery.read(run / "run.db")  # which also empties the write-ahead log
    chance, data = random.Random(2), (run / "run.db").read_bytes()
    bodies = [body for body in map(msgspec.msgpack.encode, whole.events) if body in data]
    in_events = [data.index(body) + chance.randrange(len(body)) for body in bodies[:CUTS]]
    anywhere = [chance.randrange(len(data)) for _ in range(CUTS)]
    refused = []
    for position in in_events + anywhere:
        copy = again(run)
        flip(copy / "run.db", position)
        found = read(copy)
        refused.append(found is None)
        assert found is None or is_same(found, whole)
    assert sum(refused[: len(in_events)]) > len(in_events) / 2, (
        "some bodies are also in pages that are not used any more"
    )


async def test_a_database_that_ends_too_early_is_refused(run: Path) -> None:
    recovery.read(run / "run.db")
    size, chance = (run / "run.db").stat().st_size, random.Random(3)
    for length in [0, 50, 4096, size - 4096, size - 1, *(chance.randrange(size) for _ in range(CUTS))]:
        copy = again(run)
        with (copy / "run.db").open("r+b") as file:
            file.truncate(length)
        assert read(copy) is None


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x20]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("UPDATE events SET body = zeroblob(9) WHERE seq = (SELECT max(seq) FROM events)", "is damaged or missing"),
        ("DELETE FROM events WHERE seq = (SELECT max(seq) - 1 FROM events)", "is damaged or missing"),
        ("UPDATE snapshots SET body = zeroblob(9)", "no snapshot of the state is whole"),
        ("UPDATE boots SET code = '0.0.1'", r"was made by Laminar 0\.0\.1"),
        ("DELETE FROM boots", "cannot go on from the log"),
    ],
)
async def test_what_is_wrong_is_named(run: Path, damage: str, message: str) -> None:
    execute(run, damage)
    with pytest.raises(StartError, match=message):
        recovery.read(run / "run.db")


def execute(run: Path, statement: str) -> None:
    database = sqlite3.connect(run / "run.db")
    with database:
        database.execute(statement)
    database.close()


async def test_if_the_last_snapshot_is_damaged_the_one_before_gives_the_same_state(run: Path) -> None:
    expected = recovered(again(run))
    execute(run, "UPDATE snapshots SET body = zeroblob(99) WHERE seq = (SELECT max(seq) FROM snapshots)")
    found = recovered(run)
    assert found.runtime.core.snapshot() == expected.runtime.core.snapshot()
    for shell in (found, expected):
        await shell.runtime.close()
        shell.close()


async def test_damaged_segments_of_a_real_log_are_refused_and_never_read(run: Path) -> None:
    chance, segments = random.Random(4), sorted((run / "tokens").glob("*.seg"))
    Past(run / "tokens").check(recovery.read(run / "run.db").segments)
    for _ in range(CUTS):
        copy = again(run)
        path = copy / "tokens" / chance.choice(segments).name
        length = recovery.read(copy / "run.db").segments[path.name]
        if chance.random() < 0.5:
            flip(path, chance.randrange(length))
        else:
            with path.open("r+b") as file:
                file.truncate(chance.randrange(length))
        with pytest.raises(StartError, match="token segments are damaged"):
            Past(copy / "tokens").check(recovery.read(copy / "run.db").segments)
