"""The present code decides as a run did, or the first event after which it does not is found and explained."""

import contextlib
import json
import re
import shlex
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.console.__main__ import main as console
from laminar.controller import answers
from laminar.controller.channels import Kept
from laminar.controller.eventlog import EventLog
from laminar.controller.recovery import Snapshot
from laminar.controller.schema import checksum
from laminar.core import dispatch, engine, fleet, passes, snapshot, training
from laminar.core.decisions import DispatchNew
from laminar.core.events import HoldChanged
from laminar.core.turn import Turn
from laminar.replay.__main__ import main
from laminar.replay.recording import Recording
from laminar.replay.show import told
from laminar.replay.verify import Verdict, verify
from tests.core_world import settings
from tests.replay_world import RecordedWorld

pytestmark = pytest.mark.timeout(60)

RICH = {"checkpoint_every": 2, "steps": 5, "group_size": 3, "trainer_restarts_max": 3, "restarts_max": 3}


async def record(directory: Path, seed: int = 1, outcome: str = "the end", **options: bool) -> RecordedWorld:
    world = RecordedWorld(directory, settings(**RICH), seed, faults=0.1)
    for name, value in options.items():
        setattr(world, name, value)
    world.run()
    await world.close(outcome)
    return world


def verified(directory: Path) -> Verdict:
    with Recording(directory) as recording:
        (verdict,) = verify(recording, recording.lives)
        return verdict


def change(directory: Path, *statements: str) -> None:
    with sqlite3.connect(directory / "run.db") as database:
        for statement in statements:
            database.execute(statement)
    database.close()


@pytest.mark.parametrize(
    "options", [{}, {"controller_crashes": True}, {"operator": True}, {"disk_fills": True}], ids=repr
)
async def test_the_same_code_decides_the_same(tmp_path: Path, options: dict[str, bool]) -> None:
    world = await record(tmp_path, 5, **options)
    verdict = verified(tmp_path)
    assert verdict.divergence is None, told(verdict, tmp_path)
    assert (verdict.num_events, verdict.notes, verdict.unusable) == (world.seq, [], "")
    assert verdict.num_answers > 20
    assert verdict.num_states > 1
    assert main([str(tmp_path), "--verify"]) == 0


async def test_a_changed_decision_is_found_at_its_event_with_what_was_answered_then_and_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await record(tmp_path)
    wanted = settings(**RICH).local_batch_groups

    def fewer(turn: Turn, decision: DispatchNew, apply: Callable[..., str] = dispatch.apply) -> str:
        void = apply(turn, decision)
        for replica in turn.state.replicas.values():
            replica.admit_left = min(replica.admit_left, wanted - 2)
        return void

    monkeypatch.setitem(passes.PASSES, "dispatch", (dispatch.propose, fewer))
    divergence = verified(tmp_path).divergence
    assert divergence is not None
    with sqlite3.connect(tmp_path / "run.db") as database:
        (words,) = database.execute("SELECT actions FROM answers WHERE seq = ?", (divergence.seq,)).fetchone()
    database.close()
    assert words.count("StartGroup") > 1
    assert divergence.what[0].startswith("answered then: ")
    assert f"StartGroup ×{words.count('StartGroup')}" in divergence.what[0]
    assert divergence.what[1].startswith("answered now: ")
    assert divergence.what[0] != divergence.what[1]
    assert "this very code" in divergence.code
    assert main([str(tmp_path), "--verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["lives"][0]["divergence"]["seq"] == divergence.seq
    assert main([str(tmp_path), "--verify"]) == 1
    (hint,) = [line for line in capsys.readouterr().out.splitlines() if "look at it: " in line]
    assert console(shlex.split(hint.partition("laminar.console ")[2])) == 0
    assert re.search(rf"^events +{divergence.seq}\b", capsys.readouterr().out, re.MULTILINE)


async def test_an_answer_of_the_same_kinds_that_says_something_else_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(tmp_path)

    def other_seeds(turn: Turn, event: Any, on_started: Any = engine._HANDLERS[engine.events.RunStarted]) -> None:
        on_started(turn, event)
        turn.settings = engine.Settings(
            **{**{f: getattr(turn.settings, f) for f in turn.settings.__struct_fields__}, "seed": 99}
        )

    def refreshed(turn: Turn, event: Any) -> None:
        other_seeds(turn, event, fleet.on_refreshed)

    monkeypatch.setitem(engine._HANDLERS, engine.events.ReplicaRefreshed, refreshed)
    divergence = verified(tmp_path).divergence
    assert divergence is not None
    assert divergence.what[2] == "the same kinds; StartGroup says something else"
    assert divergence.what[3].startswith('  now: {"type":"StartGroup"')


async def test_a_decision_that_was_held_and_says_something_else_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = RecordedWorld(tmp_path, settings(), 1)
    world.start("r0")
    world.send(HoldChanged(pass_name="sample", held=True))
    world.complete_all("r0")
    assert world.core.state.held
    await world.close()

    def turned(turn: Turn) -> Any:
        batch = training.propose_batch(turn)
        return batch and msgspec.structs.replace(batch, groups=batch.groups[::-1])

    monkeypatch.setitem(passes.PASSES, "sample", (turned, training.apply_batch))
    divergence = verified(tmp_path).divergence
    assert divergence is not None
    assert divergence.what[2] == "the same kinds; held.TakeBatch says something else"
    assert divergence.what[3].startswith('  now: {"type":"TakeBatch","step":1,"groups":[')


async def test_a_state_that_differs_while_the_answers_do_not_is_found_where_one_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(tmp_path)

    def forgetful(turn: Turn, event: Any) -> None:
        fleet.on_joined(turn, event)
        turn.state.replicas[event.worker].kv_previous = 7

    monkeypatch.setitem(engine._HANDLERS, engine.events.ReplicaJoined, forgetful)
    divergence = verified(tmp_path).divergence
    assert divergence is not None
    assert divergence.what[0].startswith("the same answer, another state: state.replicas.r2.kv_previous was 0, is 7")


async def test_whole_numbers_of_a_live_state_are_those_of_a_restored_one(tmp_path: Path) -> None:
    await record(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as database:
        for seq, body in database.execute("SELECT seq, body FROM snapshots WHERE seq > 20").fetchall():
            kept = msgspec.msgpack.decode(body, type=Snapshot)
            restored = snapshot.encode(snapshot.decode(kept.core))
            body = msgspec.msgpack.encode(msgspec.structs.replace(kept, core=msgspec.Raw(restored)))
            database.execute("UPDATE snapshots SET body = ?, crc = ? WHERE seq = ?", (body, checksum(seq, body), seq))
    database.close()
    assert verified(tmp_path).divergence is None


async def test_the_order_of_what_a_state_has_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await record(tmp_path)

    def turned(turn: Turn, event: Any) -> None:
        engine._on_step_finished(turn, event)
        turn.state.replicas = dict(reversed(turn.state.replicas.items()))

    monkeypatch.setitem(engine._HANDLERS, engine.events.StepFinished, turned)
    divergence = verified(tmp_path).divergence
    assert divergence is not None
    assert "state.replicas had the order r1, r2, has r2, r1" in divergence.what[0]


async def test_a_controller_that_heard_nothing_has_nothing_to_compare(tmp_path: Path) -> None:
    await record(tmp_path)
    EventLog(tmp_path / "run.db", 0.01).begin_boot(1.0, 1, "here", 0)
    with Recording(tmp_path) as recording:
        verdicts = verify(recording, recording.lives)
    assert [(verdict.unusable, verdict.num_events > 0) for verdict in verdicts] == [("", True), ("", False)]


async def test_a_controller_that_was_killed_before_it_heard_anything_left_nothing_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await record(tmp_path, outcome="")
    change(tmp_path, "INSERT INTO boots SELECT 2, started, pid, host, 0, run_id, code, 1, 'the end' FROM boots")
    assert verified(tmp_path).notes == []
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "boots 1 to 2: " in out
    assert "did not record" not in out


async def test_a_core_that_raises_now_and_did_not_then_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(tmp_path)

    def broken(turn: Turn, event: Any) -> None:
        raise KeyError("r0")

    monkeypatch.setitem(engine._HANDLERS, engine.events.StepFinished, broken)
    divergence = verified(tmp_path).divergence
    assert divergence is not None
    assert divergence.event == "StepFinished"
    assert divergence.what == [f"now: event {divergence.seq} (StepFinished): the core raised KeyError: 'r0'"]


async def test_a_core_that_raised_then_and_raises_now_does_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(tmp_path, outcome="the controller failed: KeyError: 'r0'; its state is dumped beside the logs")
    with Recording(tmp_path) as recording:
        query = "SELECT max(seq) FROM events WHERE kind = 'StepFinished'"
        last = recording.query(query)[0][0]
    change(tmp_path, *(f"DELETE FROM {table} WHERE seq >= {last}" for table in ("answers", "snapshots")))
    change(tmp_path, f"DELETE FROM events WHERE seq > {last}")

    who = "r0"

    def broken(turn: Turn, event: Any) -> None:
        if event.seq == last:
            raise KeyError(who)
        engine._on_step_finished(turn, event)

    monkeypatch.setitem(engine._HANDLERS, engine.events.StepFinished, broken)
    verdict = verified(tmp_path)
    assert verdict.divergence is None
    assert verdict.notes == ["its core raised at the last event, as it does now"]
    who = "r1"
    divergence = verified(tmp_path).divergence
    assert divergence is not None, "what it raised then was something else"
    assert divergence.what == [f"now: event {last} (StepFinished): the core raised KeyError: 'r1'"]


async def test_the_code_that_recorded_is_told_from_the_code_that_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(tmp_path)
    change(tmp_path, "UPDATE answers SET actions = actions || ' StartGroup:00000000' WHERE seq > 40")
    monkeypatch.setattr(answers, "code", lambda: "12345678")
    divergence = verified(tmp_path).divergence
    assert divergence is not None
    assert "this is core 12345678 of 0.1.0: the code differs" in divergence.code


async def test_what_was_recorded_without_answers_is_compared_by_its_states(tmp_path: Path) -> None:
    await record(tmp_path)
    change(
        tmp_path,
        "UPDATE cores SET boot = 2",
        "INSERT INTO boots SELECT 2, started, pid, host, 0, run_id, code, 1, outcome FROM boots",
    )
    change(tmp_path, "DELETE FROM answers")
    verdict = verified(tmp_path)
    assert verdict.divergence is None
    assert (verdict.num_answers, verdict.num_states > 1) == (0, True)
    assert verdict.notes == ["boot 1 did not record what it answered: only the states kept are compared"]
    change(tmp_path, "DELETE FROM snapshots")
    assert verified(tmp_path).unusable == "neither answers nor states that this Laminar can read were recorded"
    assert main([str(tmp_path), "--verify"]) == 2


async def test_a_state_of_another_laminar_is_left_out_and_told(tmp_path: Path) -> None:
    world = await record(tmp_path)
    strange = Snapshot(core=msgspec.Raw(msgspec.msgpack.encode({"replicas": 3})), channels=Kept(), relay_addresses={})
    body = msgspec.msgpack.encode(strange)
    with sqlite3.connect(tmp_path / "run.db") as database:
        (seq,) = database.execute("SELECT max(seq) FROM snapshots").fetchone()
        database.execute("UPDATE snapshots SET body = ?, crc = ? WHERE seq = ?", (body, checksum(seq, body), seq))
    database.close()
    divergence = verified(tmp_path).divergence
    assert divergence is not None, "this very code has written it"
    assert divergence.what[0].startswith("the state that was kept cannot be read: ")
    change(tmp_path, "UPDATE cores SET code = '12345678'")
    verdict = verified(tmp_path)
    assert (verdict.divergence, verdict.num_events) == (None, world.seq)
    assert verdict.notes == [f"the state kept after event {seq} is not of this Laminar, and was not compared"]


async def test_a_damaged_end_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await record(tmp_path)
    change(tmp_path, "UPDATE events SET crc = 0 WHERE seq = 90")
    assert main([str(tmp_path), "--verify"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("boot 1: no divergence in 89 events; ")
    assert "event 90 is damaged: what follows is left out" in out
    assert verified(tmp_path).cut == "event 90 is damaged"


async def test_a_recording_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = await record(tmp_path, 5, controller_crashes=True)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"boots 1 to {len(world.logs)}: {world.seq} events" in out
    assert "ended: the end" in out


async def test_which_run_is_the_latest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    await record(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert main(["--verify"]) == 0
    assert capsys.readouterr().err == f"of the latest run: {tmp_path}/runs/mine/run.db\n"
    assert main(["runs/mine", "--verify"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such file; give a run's directory, or its run.db"),
        (["--nonsense"], "unrecognized arguments: --nonsense; --help has examples"),
        (["--boot", "x"], "argument --boot: invalid int value: 'x'"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
