"""Old events leave the database, the write-ahead log stays short, people hear of what cannot be kept."""

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from laminar.controller import schema, upkeep
from laminar.controller.upkeep import MIB, Alarm, Upkeep

pytestmark = pytest.mark.timeout(60)

BODY = b"x" * 2000
PER_STEP = 40  # events


class World:
    """A database that is written step by step, as the log does, and looked after."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self.directory, self.path = directory, directory / "run.db"
        self.database = sqlite3.connect(self.path)
        schema.prepare(self.database)
        self.upkeep = Upkeep(self.path, bytes_max)
        self.seq, self.num_records, self.alarms = 0, 0, list[Alarm]()

    def steps(self, num: int, body: bytes = BODY) -> None:
        for _ in range(num):
            for _ in range(PER_STEP):
                self.seq += 1
                self.write("INSERT INTO events VALUES (1, ?, ?, 'e', ?, 0)", (self.seq, float(self.seq), body))
                self.write("INSERT INTO spans VALUES ('r', 'decode', ?, ?, 0.1, '')", (self.seq - 1.0, float(self.seq)))
                self.write(
                    "INSERT INTO moves VALUES (1, 2, 'r', 's', 'v0', 9, ?, ?)", (self.seq - 1.0, float(self.seq))
                )
                self.write("INSERT INTO levels VALUES (?, 1, 2, 3, 4, 5)", (float(self.seq),))
            self.write("INSERT INTO snapshots VALUES (1, ?, ?, 0)", (self.seq, b"state"))
            self.look()

    def write(self, statement: str, parameters: tuple = ()) -> None:
        self.database.execute(statement, parameters)

    def look(self) -> None:
        self.database.commit()
        self.alarms += self.upkeep.after_commit(self.database)

    def column(self, query: str) -> list[int]:
        return [row[0] for row in self.database.execute(query)]

    @property
    def snapshots(self) -> list[int]:
        return self.column("SELECT seq FROM snapshots ORDER BY seq")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(upkeep, "LOOK_S", 0.0)
    world = World(tmp_path, MIB)
    yield world
    world.database.close()


def test_old_events_leave_in_whole_steps_and_the_rest_begins_with_a_snapshot(world: World) -> None:
    for _ in range(60):
        world.steps(1)
        oldest, events = world.snapshots[0], world.column("SELECT seq FROM events ORDER BY seq")
        assert set(range(oldest + 1, world.seq + 1)) <= set(events), "all after the oldest snapshot are there"
        assert world.snapshots[-2:] == [seq for seq in (world.seq - PER_STEP, world.seq) if seq > 0]
    world.look()
    assert world.column("SELECT min(seq) FROM events")[0] > 20 * PER_STEP
    assert world.column("SELECT min(seq) FROM events")[0] <= world.snapshots[0] + 1
    assert 4 <= len(world.snapshots) <= upkeep.SHARES + 3
    assert not world.alarms


def test_the_file_stays_as_large_as_it_was_when_it_first_reached_its_limit(world: World) -> None:
    world.steps(20)
    size = world.path.stat().st_size
    world.steps(100)
    assert world.path.stat().st_size <= size + MIB / 4
    assert world.column("SELECT sum(length(body)) FROM events")[0] <= MIB


@pytest.mark.parametrize(("table", "time_of"), [("spans", "end"), ("moves", "end"), ("levels", "at")])
def test_spans_moves_and_levels_go_with_the_events_of_their_time(world: World, table: str, time_of: str) -> None:
    world.steps(60)
    for _ in range(5):
        world.look()
    assert world.column(f"SELECT min({time_of}) FROM {table}")[0] >= world.column("SELECT min(at) FROM events")[0]
    assert len(world.column(f"SELECT rowid FROM {table}")) < 20 * PER_STEP


def test_without_a_limit_everything_stays_but_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOOK_S", 0.0)
    world = World(tmp_path, 0)
    with contextlib.closing(world.database):
        world.steps(30)
        assert len(world.column("SELECT seq FROM events")) == 30 * PER_STEP
        assert world.snapshots == [29 * PER_STEP, 30 * PER_STEP]


def test_another_controller_keeps_the_bases_of_the_one_before(world: World) -> None:
    world.steps(10)
    before = world.snapshots
    world.upkeep = Upkeep(world.path, MIB)
    world.look()
    assert world.snapshots == before
    world.steps(60)
    assert len(world.snapshots) > 3


RECORD = "INSERT INTO trajectories (id, step, trained_at, dropped, digest) VALUES (?, ?, ?, ?, ?)"


def recorded(world: World, num: int, saved: Collection[int] = range(2, 1000, 2)) -> None:
    """Steps that leave large records and few events; every eighth trajectory is dropped."""
    for step in range(1, num + 1):
        for _ in range(8):
            world.num_records += 1
            dropped = "stale" if world.num_records % 8 == 0 else None
            trained = (None, None) if dropped else (step, float(step))
            world.write(RECORD, (world.num_records, *trained, dropped, "x" * 3000))
        if step in saved:
            world.write("INSERT OR REPLACE INTO checkpoints VALUES (?, '', NULL, 1.0)", (step,))
        world.steps(1, body=b"")
        for _ in range(4):  # more commits than steps
            world.look()


def test_records_of_old_trajectories_leave_when_no_more_events_can_and_people_are_told_how_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "ROWS_AT_ONCE", 100)  # of some 250 for which there is room
    recorded(world, 70)
    assert [alarm.name for alarm in world.alarms] == ["records-leave"], "once, and the limit is kept"
    assert "more than log.max_mib = 1" in world.alarms[0].text
    left = world.column("SELECT id FROM trajectories ORDER BY id")
    assert left == list(range(left[0], 561)), "the oldest have left"
    assert schema.num_gone(world.database) == left[0] - 1 > 200
    assert world.path.stat().st_size < 2 * MIB


def test_records_that_somebody_has_yet_to_read_stay(world: World) -> None:
    world.upkeep.first_step_needed = lambda: 30
    recorded(world, 70)
    assert world.column("SELECT min(step) FROM trajectories") == [30]
    assert [alarm.name for alarm in world.alarms] == ["records-leave", "log-too-large"]


def test_records_of_steps_that_no_two_checkpoints_follow_stay(world: World) -> None:
    recorded(world, 60, saved=(10, 20))
    assert world.column("SELECT min(step) FROM trajectories") == [10]
    assert "log-too-large" in [alarm.name for alarm in world.alarms]


def test_a_limit_that_cannot_be_kept_is_told_once_and_again_after_it_could(world: World) -> None:
    world.steps(3, body=b"x" * 30_000)  # two steps are needed, and are more than the limit
    assert [alarm.name for alarm in world.alarms] == ["log-too-large"]
    assert "more than log.max_mib = 1" in world.alarms[0].text
    world.steps(3, body=b"x" * 30_000)
    assert len(world.alarms) == 1
    world.steps(6, body=b"")
    for _ in range(6):
        world.look()
    world.steps(3, body=b"x" * 30_000)
    for _ in range(6):
        world.look()
    assert len(world.alarms) == 2


READER = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("BEGIN")
database.execute("SELECT count(*) FROM events").fetchone()
print("reads", flush=True)
sys.stdin.read()
"""


def test_a_reader_that_does_not_end_is_named_and_the_log_begins_anew_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "WAL_BYTES_MAX", MIB)
    world.steps(1)
    command = [sys.executable, "-c", READER, str(world.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        world.steps(40)
        assert [alarm.name for alarm in world.alarms] == ["log-held-up"]
        assert f"processes that have it open: {reader.pid})" in world.alarms[0].text
        assert world.upkeep.sizes.wal > MIB
        reader.kill()
    world.steps(1)
    world.look()
    assert world.upkeep.sizes.wal < MIB
    assert len(world.alarms) == 1


def test_sizes_are_those_of_the_files(world: World) -> None:
    for name, size in (("tokens/0001-000001.seg", 300), ("tokens/0001-000002.seg", 50), ("archive/a.parquet", 7)):
        (world.directory / name).parent.mkdir(exist_ok=True)
        (world.directory / name).write_bytes(bytes(size))
    world.steps(1)
    sizes = world.upkeep.sizes
    assert (sizes.tokens, sizes.archive) == (350, 7)
    assert sizes.database == world.path.stat().st_size
    assert sizes.wal > 0
