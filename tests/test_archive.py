"""Trained trajectories in Parquet: each once, whole, whatever happens to the controller or the disk."""

import asyncio
import json
import sqlite3
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from laminar import wire
from laminar.controller import archive, schema
from laminar.controller.archive import Archive
from laminar.controller.segments import Past
from laminar.controller.tokens import TokenStore
from laminar.core.records import State
from laminar.errors import ConfigError
from laminar.ids import GroupId, TrajectoryId

pytestmark = pytest.mark.timeout(60)

PER_STEP = 4  # trajectories, in groups of two


def report(number: int, sources: bytes) -> wire.RolloutReport:
    """All tokens of trajectory `number`."""
    return wire.RolloutReport(
        version=None,
        trajectories=wire.pack_i64([number]),
        attempts=wire.pack_i32([1]),
        num_tokens=wire.pack_i32([number]),
        num_new=wire.pack_i32([number]),
        tokens=wire.pack_i32([number] * number),
        logprobs=wire.pack_f32([-0.5] * number),
        sources=sources,
    )


class World:
    """A run's directory with a database and a token store, whose trajectory n has n response tokens: n, n, …"""

    def __init__(self, directory: Path, boot: int = 1) -> None:
        self.directory, self.boot = directory, boot
        self.database = sqlite3.connect(directory / "run.db")
        schema.prepare(self.database)
        self.past = Past(directory / "tokens")
        self.tokens = TokenStore(directory / "tokens", boot)
        self.stalls: list[str | None] = []
        self.archive = Archive(directory / "archive", directory / "run.db", self.tokens, self.stalls.append)

    def train(self, step: int, dropped: int = 0) -> list[TrajectoryId]:
        """Generate and train a step; `dropped` of its trajectories, the first, are dropped instead."""
        ids = [TrajectoryId(PER_STEP * (step - 1) + at) for at in range(1, PER_STEP + 1)]
        for at, number in enumerate(ids):
            group = GroupId(1000 + (number - 1) // 2)
            self.tokens.start(number, 1, group, resume=False)
            self.tokens.put_prompt(group, wire.pack_i32([7, 8]))
            sources = b"\0" * (number - 1) + b"\1" if at == 1 else b""
            self.tokens.take(report(number, sources))
            self._record(step, number, group, at, "late" if at < dropped else None)
        self.tokens.sync()
        self.tokens.committed()
        return ids

    def _record(self, step: int, number: int, group: int, at: int, dropped: str | None) -> None:
        row = (
            number, 100 + number, group, at % 2, 1, "v3", "v3", "v4", "digest", 2, number, 0.5, json.dumps({"format": 1.0}),
            "stop", step, dropped, 0, 1, 1, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
        )  # fmt: skip
        self.database.execute(f"INSERT INTO trajectories VALUES ({', '.join('?' * 25)})", row)
        self.database.commit()

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "archive").iterdir())

    def rows(self) -> list[dict]:
        return [
            row for name in self.files() for row in parquet.read_table(self.directory / "archive" / name).to_pylist()
        ]

    def ids(self) -> list[int]:
        return [row["trajectory_id"] for row in self.rows()]

    def killed(self) -> "World":
        """Another controller in the place of this one."""
        self.database.close()
        return World(self.directory, self.boot + 1)

    def take_over(self, committed: int) -> str:
        """What a start does, and says."""
        state = State()
        state.trainer.checkpoint = committed
        return self.archive.adopt(self.past, state)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_row_has_everything_that_is_known_of_a_trajectory(world: World) -> None:
    world.archive.add(1, world.train(1))
    assert await world.archive.finish() == ""
    assert world.files() == ["steps-000001-000001-1.parquet"]
    row = world.rows()[1]
    assert row == {
        "trajectory_id": 2, "prompt_id": 102, "group_id": 1000, "sibling": 1, "attempt": 1, "step": 1,
        "behavior_version": "v3", "finish_version": "v3", "sample_version": "v4", "weight_digest": "digest",
        "finish_reason": "stop", "reward": 0.5, "reward_parts": [("format", 1.0)], "s_gen": 0, "residence": 1, "s_train": 1,
        "queued_at": 10.0, "first_token_at": 11.0, "finished_at": 12.0, "rewarded_at": 13.0, "sampled_at": 14.0,
        "trained_at": 15.0, "prompt_tokens": [7, 8], "response_tokens": [2, 2], "behavior_logprobs": [-0.5, -0.5],
        "sources": [0, 1],
    }  # fmt: skip


async def test_tokens_are_forgotten_when_their_file_is_there(world: World) -> None:
    ids = world.train(1)
    world.archive.add(1, ids)
    assert world.tokens.prefix(ids[0])[0], "not before"
    await world.archive.finish()
    assert world.tokens.num_bytes == 0


async def test_steps_of_one_checkpoint_are_one_file_up_to_its_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "FILE_TOKENS", 30)
    monkeypatch.setattr(archive, "ROW_GROUP_TOKENS", 12)
    for step in range(1, 6):  # of 10, 26, 42, 58 and 74 tokens
        world.archive.add(step, world.train(step))
    await world.archive.finish()
    assert [name[:19] for name in world.files()] == [
        "steps-000001-000002", "steps-000003-000003", "steps-000004-000004", "steps-000005-000005"
    ]  # fmt: skip
    assert world.ids() == list(range(1, 21))
    assert parquet.ParquetFile(world.directory / "archive" / world.files()[0]).num_row_groups == 3


async def test_what_was_dropped_is_not_there(world: World) -> None:
    ids = world.train(1, dropped=2)
    world.archive.add(1, ids[2:])
    await world.archive.finish()
    assert world.ids() == [3, 4]


async def test_a_controller_that_was_killed_before_it_could_write_has_a_successor_that_does(world: World) -> None:
    world.archive.add(1, world.train(1))
    await asyncio.wait_for(world.archive._writer, 30)
    world.train(2)
    world.train(3)
    world.train(4)
    after = world.killed()
    assert after.take_over(committed=3) == ""
    await after.archive.finish()
    assert after.ids() == list(range(1, 13))
    assert after.tokens.num_bytes == 0


async def test_what_was_written_is_not_written_again_though_its_tokens_are_still_there(world: World) -> None:
    for step in (1, 2):
        world.archive.add(step, world.train(step))
    world.tokens.forget = lambda trajectories: None  # type: ignore[method-assign] - killed at that moment
    await world.archive.finish()
    after = world.killed()
    after.take_over(committed=2)
    await after.archive.finish()
    assert after.ids() == list(range(1, 9))


async def test_a_file_that_was_being_written_is_removed_and_written_anew(world: World) -> None:
    world.train(1)
    (world.directory / "archive" / "steps-000001-000001-1.tmp").write_bytes(b"PAR1")
    after = world.killed()
    assert after.files() == []
    after.take_over(committed=1)
    await after.archive.finish()
    assert after.ids() == [1, 2, 3, 4]


async def test_an_archive_that_begins_late_begins_with_what_there_is(world: World) -> None:
    for step in (1, 2):
        world.tokens.forget(world.train(step))
    world.tokens.sync()
    world.tokens.finish()
    world.tokens.sync()
    world.tokens.committed()
    after = world.killed()
    assert after.take_over(committed=2) == ""
    after.archive.add(3, after.train(3))
    await after.archive.finish()
    assert after.ids() == [9, 10, 11, 12]


async def test_trained_tokens_that_are_lost_are_left_out_and_the_others_are_archived(world: World) -> None:
    world.train(1)
    path = next((world.directory / "tokens").iterdir())
    data = bytearray(path.read_bytes())
    data[data.index(wire.pack_i32([3, 3, 3]))] ^= 1
    path.write_bytes(data)
    after = world.killed()
    assert after.take_over(committed=1).startswith("1 trained trajectories are not in the archive")
    await after.archive.finish()
    assert after.ids() == [1, 2, 4]


async def test_tokens_that_nobody_wants_in_an_archive_are_forgotten_at_once(world: World) -> None:
    world.archive = Archive(world.directory / "none", world.directory / "run.db", world.tokens, print, wanted=False)
    world.archive.add(1, world.train(1))
    assert world.tokens.num_bytes == 0
    assert await world.archive.finish() == ""
    assert not (world.directory / "none").exists()


async def test_a_full_disk_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "RETRY_S", 0.01)
    really, tries = archive.sync, [0]

    def full(path: Path) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError(28, "No space left on device")
        really(path)

    monkeypatch.setattr(archive, "sync", full)
    ids = world.train(1)
    world.archive.add(1, ids)
    await asyncio.wait_for(world.archive._writer, 30)
    assert world.stalls == [f"{world.directory}/archive: No space left on device", None]
    assert world.ids() == ids


async def test_a_table_that_cannot_be_read_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "RETRY_S", 0.01)
    really, told = world.archive._database, world.archive._on_stalled

    def on_stalled(why: str | None) -> None:
        told(why)
        world.archive._database = really

    world.archive._database, world.archive._on_stalled = really.with_name("gone.db"), on_stalled
    ids = world.train(1)
    world.archive.add(1, ids)
    await asyncio.wait_for(world.archive._writer, 30)
    assert world.stalls == [f"{world.directory}/archive: unable to open database file", None]
    assert world.ids() == ids


async def test_a_run_that_ends_on_a_full_disk_says_what_it_could_not_archive_and_keeps_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "sync", full)
    ids = world.train(1)
    world.archive.add(1, ids)
    assert (await world.archive.finish()).startswith("not in the archive yet: steps 1; their tokens are kept")
    assert world.files() == []
    assert world.tokens.prefix(ids[0])[0]


def test_without_pyarrow_it_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    archive.require()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow.*pip install 'laminar-rl\[archive\]'"):
        archive.require()


async def test_whatever_keeps_it_from_writing_is_told_and_waited_for_and_does_not_hold_up_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "RETRY_S", 0.01)
    really, tries = archive._write_file, [0]

    def fails(*arguments: object) -> None:
        tries[0] += 1
        if tries[0] % 2:
            raise pyarrow.ArrowInvalid("not a table")
        really(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(archive, "_write_file", fails)
    ids = world.train(1)
    world.archive.add(1, ids)
    await asyncio.wait_for(world.archive._writer, 30)
    assert world.stalls == [f"{world.directory}/archive: ArrowInvalid: not a table", None]
    assert world.ids() == ids
    monkeypatch.setattr(archive, "_write_file", lambda *arguments: really())  # type: ignore[call-arg]
    world.archive.add(2, world.train(2))
    assert (await world.archive.finish()).startswith("not in the archive yet: steps 2; their tokens are kept")
