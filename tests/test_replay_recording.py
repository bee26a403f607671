"""A run's log, read again: every event of every life, forward and back, also of runs that go on, were killed, or lost a part."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from laminar.controller import schema
from laminar.core import actions, events, invariants
from laminar.replay import playback
from laminar.replay.playback import Playback, ReplayError
from laminar.replay.recording import Recording, RecordingError
from tests.core_world import settings
from tests.replay_world import RecordedWorld

pytestmark = pytest.mark.timeout(60)

MODEL = Path(__file__).resolve().parent.parent / "configs" / "quickstart" / "model"
RICH = {"checkpoint_every": 2, "steps": 5, "group_size": 3, "trainer_restarts_max": 3, "restarts_max": 3}


async def record(directory: Path, seed: int = 1, **options: bool) -> RecordedWorld:
    world = RecordedWorld(directory, settings(**RICH), seed, faults=0.1)
    for name, value in options.items():
        setattr(world, name, value)
    world.run()
    await world.close()
    return world


def change(directory: Path, *statements: str) -> None:
    with sqlite3.connect(directory / "run.db") as database:
        for statement in statements:
            database.execute(statement)
    database.close()


@pytest.mark.parametrize("seed", range(3))
async def test_a_replayed_run_ends_in_the_state_and_with_the_story_of_the_run(tmp_path: Path, seed: int) -> None:
    world = await record(tmp_path, seed)
    with Recording(tmp_path) as recording:
        replay = Playback(recording)
        steps = list(iter(replay.step, None))
        assert [type(action) for step in steps for action in step.actions][:-1] == [type(a) for a in world.actions]
        assert replay.core.snapshot() == world.core.snapshot()
        assert replay.core.story.rows() == world.core.story.rows()
        assert (replay.seq, replay.last_seq, replay.begins_after) == (world.seq, world.seq, 0)
        assert (recording.left_out, replay.left_out, replay.cut) == ("", "", "")


async def test_any_event_is_found_from_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playback, "KEYFRAME_EVENTS", 16)
    monkeypatch.setattr(playback, "KEYFRAMES_MAX", 4)
    world = await record(tmp_path)
    with Recording(tmp_path) as recording:
        forward, other = Playback(recording), Playback(recording)
        other.seek(world.seq)
        for seq in sorted(range(0, world.seq, 37), reverse=True):
            other.seek(seq)
            fresh = Playback(recording)
            fresh.seek(seq)
            assert (other.seq, other.core.snapshot()) == (seq, fresh.core.snapshot())
            assert other.core.story.rows() == fresh.core.story.rows()
        other.seek(10**9)
        assert other.seq == world.seq
        assert forward.next_event == events.RunStarted(seq=1, boot=1)


async def test_the_boots_of_a_run_that_was_taken_over_are_one_life(tmp_path: Path) -> None:
    world = await record(tmp_path, 5, controller_crashes=True)
    assert len(world.logs) > 2, "the controller was killed more than once"
    with Recording(tmp_path) as recording:
        assert [life.span for life in recording.lives] == [(1, len(world.logs))]
        replay = Playback(recording)
        boots = [step.boot for step in iter(replay.step, None)]
        assert boots == sorted(boots)
        assert set(boots) == set(range(1, len(world.logs) + 1))
        assert replay.core.snapshot() == world.core.snapshot()


async def test_a_run_that_went_on_from_a_checkpoint_has_two_lives(tmp_path: Path) -> None:
    first = await record(tmp_path)
    saved = next(action for action in first.all(actions.SaveCheckpoint) if action.step == 2)
    second = RecordedWorld(tmp_path, settings(**RICH), 7, saved.data_state)
    second.checkpoint, second.saves = 2, {2: saved.data_state}
    second.start("r0", "r1", step=2, boot=2, branch_floor=1)
    await second.close()
    with Recording(tmp_path) as recording:
        assert [life.span for life in recording.lives] == [(1, 1), (2, 2)]
        for life, world in zip(recording.lives, (first, second), strict=True):
            replay = Playback(recording, life)
            replay.seek(10**9)
            assert replay.core.snapshot() == world.core.snapshot()
            invariants.check(replay.core.state)
        assert recording.life(1) == recording.lives[0]
        with pytest.raises(RecordingError, match=r"has no boot 3; it has 1, 2"):
            recording.life(3)


async def test_nothing_is_left_beside_a_run_that_has_ended(tmp_path: Path) -> None:
    world = await record(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with Recording(tmp_path) as recording:
        replay = Playback(recording)
        replay.seek(10**9)
        assert replay.seq == world.seq
    assert sorted(os.listdir(tmp_path)) == before


async def test_a_run_that_goes_on_again_is_read_by_those_who_had_it_open(tmp_path: Path) -> None:
    first = await record(tmp_path)
    with Recording(tmp_path) as recording:
        replay = Playback(recording)
        replay.seek(10)
        second = RecordedWorld(tmp_path, settings(**RICH), 7)
        second.start("r0", "r1", boot=2)
        await second.logs[-1].when_durable(second.seq)
        replay.seek(10**9)
        assert (replay.seq, replay.cut) == (first.seq, "")
        assert recording.query("SELECT max(seq) FROM events WHERE boot = 2") == [(second.seq,)]
        await second.close()


async def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    world = RecordedWorld(tmp_path, settings(**RICH), 1)
    world.start("r0")
    await world.logs[-1].when_durable(world.seq)
    with Recording(tmp_path) as recording:
        replay = Playback(recording)
        replay.seek(10**9)
        assert replay.seq == world.seq
        assert replay.step() is None
        world.join("r1")
        await world.logs[-1].when_durable(world.seq)
        step = replay.step()
        assert step is not None
        assert isinstance(step.event, events.ReplicaJoined)
        assert replay.core.snapshot() == world.core.snapshot()
    await world.close()


async def test_what_a_killed_controller_left_is_read_up_to_its_last_whole_commit(tmp_path: Path) -> None:
    world = RecordedWorld(tmp_path / "run", settings(**RICH), 1)
    world.start("r0", "r1")
    await world.logs[-1].when_durable(world.seq)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    await world.close()
    (tmp_path / "killed" / "run.db-shm").unlink()
    salts = (tmp_path / "killed" / "run.db-wal").read_bytes()[16:24]
    with (tmp_path / "killed" / "run.db-wal").open("ab") as log:
        log.write(bytes(8) + salts + bytes(8 + 4096))  # of a commit that was not finished
    with Recording(tmp_path / "killed") as recording:
        replay = Playback(recording)
        replay.seek(10**9)
        assert replay.seq == world.seq
        assert "no whole commit" in recording.left_out
        assert recording.life().boots[0].outcome == ""


async def test_a_log_without_its_first_events_is_replayed_from_its_oldest_snapshot(tmp_path: Path) -> None:
    world = await record(tmp_path)
    with Recording(tmp_path) as recording:
        (oldest,) = recording.query("SELECT min(seq) FROM snapshots WHERE seq > 100")[0]
    change(tmp_path, f"DELETE FROM snapshots WHERE seq < {oldest}", f"DELETE FROM events WHERE seq <= {oldest - 7}")
    with Recording(tmp_path) as recording:
        replay = Playback(recording)
        assert replay.begins_after == oldest
        assert replay.left_out == f"events 1 to {oldest} have left the log (log.max_mib)"
        replay.seek(10**9)
        assert replay.core.snapshot() == world.core.snapshot()
        replay.seek(3)
        assert replay.seq == oldest, "no further back than the log"
    change(tmp_path, "DELETE FROM snapshots")
    with Recording(tmp_path) as recording, pytest.raises(RecordingError, match="no snapshot of its state is there"):
        Playback(recording)


@pytest.mark.parametrize(
    ("statement", "cut"),
    [
        ("UPDATE events SET body = x'00' WHERE seq = 50", "event 50 is damaged"),
        ("DELETE FROM events WHERE seq = 50", "event 50 is missing"),
    ],
)
async def test_damage_ends_the_replay_before_it_and_is_told(tmp_path: Path, statement: str, cut: str) -> None:
    await record(tmp_path)
    change(tmp_path, statement)
    with Recording(tmp_path) as recording:
        replay = Playback(recording)
        replay.seek(10**9)
        assert (replay.seq, replay.cut) == (49, cut)
        replay.seek(20)
        assert (replay.seq, replay.cut) == (20, "")


async def test_an_event_that_the_core_refuses_is_named(tmp_path: Path) -> None:
    await record(tmp_path)
    bad = msgspec.msgpack.encode(
        events.ReplicaRefreshed(seq=99, worker="r0", incarnation=1, version=(0, 0), digest="", wait_s=0.0)
    )  # type: ignore[arg-type]
    with sqlite3.connect(tmp_path / "run.db") as database:
        database.execute("UPDATE events SET body = ?, crc = ? WHERE seq = 50", (bad, schema.checksum(50, bad)))
    database.close()
    with Recording(tmp_path) as recording:
        replay = Playback(recording)
        with pytest.raises(
            ReplayError, match=r"event 99 \(ReplicaRefreshed\): the core raised AssertionError: event 99"
        ):
            replay.seek(10**9)
        replay.seek(10)
        assert replay.seq == 10


# ---- what is no log, or an old one -------------------------------------------------------------------------


def text_file(directory: Path) -> None:
    (directory / "run.db").write_text("no database " * 1000)


def other_database(directory: Path) -> None:
    change(directory, "CREATE TABLE other (x)")


def empty_log(directory: Path) -> None:
    database = sqlite3.connect(directory / "run.db")
    schema.prepare(database)
    database.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda directory: None, "no such file; give a run's directory, or its run.db"),
        (text_file, "file is not a database"),
        (other_database, "no such table: boots"),
        (empty_log, "the run has not begun"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_reason(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path)
    with pytest.raises(RecordingError, match=message):
        Recording(tmp_path)


async def test_what_another_laminar_has_recorded_is_named_with_both_versions(tmp_path: Path) -> None:
    await record(tmp_path)
    with Recording(tmp_path) as recording:
        (seq,) = recording.query("SELECT max(seq) FROM snapshots")[0]
    change(
        tmp_path,
        "UPDATE boots SET code = '0.0.9'",
        f"DELETE FROM snapshots WHERE seq < {seq}",
        f"DELETE FROM events WHERE seq < {seq}",
        f"UPDATE snapshots SET body = x'80', crc = {schema.checksum(seq, bytes([0x80]))}",
    )
    versions = r"cannot be read: .*; recorded by Laminar 0\.0\.9, this is "
    with (
        Recording(tmp_path) as recording,
        pytest.raises(RecordingError, match=f"the state after event {seq} {versions}"),
    ):
        Playback(recording)
    change(tmp_path, "UPDATE cores SET settings = x'80'")
    with Recording(tmp_path) as recording, pytest.raises(RecordingError, match=f"the settings {versions}"):
        Playback(recording)


async def test_a_log_of_before_cores_were_recorded_needs_the_configuration_and_the_data_set(tmp_path: Path) -> None:
    await record(tmp_path)
    change(tmp_path, "DROP TABLE cores", "DROP TABLE answers")
    with Recording(tmp_path) as recording:
        assert recording.life().boots[0].code is None
        with pytest.raises(RecordingError, match=r"did not record the core's settings"):
            Playback(recording)
        (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 40)
        (tmp_path / "config.toml").write_text(
            f'[model]\npath = "{MODEL}"\n[task]\ndataset = "{tmp_path}/data.jsonl"\nreward = "exact"\n'
        )
        replay = Playback(recording)
        assert replay.core.settings.num_prompts <= 40
