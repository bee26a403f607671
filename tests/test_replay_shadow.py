"""Another sampler's choices at the batches of a recorded run, beside the real ones."""

import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.core import actions, events
from laminar.core.decisions import TakeBatch
from laminar.core.engine import Core
from laminar.core.sampling import BufferView
from laminar.ids import GroupId
from laminar.replay.__main__ import main
from laminar.replay.recording import Recording, RecordingError
from laminar.replay.shadow import Shadowing, shadow
from laminar.samplers import GuardedSampler
from tests.core_world import settings
from tests.replay_world import RecordedWorld

pytestmark = pytest.mark.timeout(60)

SAMPLERS = """
class Base:
    def state(self):
        return {}

    def load_state(self, state):
        pass

class Newest(Base):
    def select(self, view, num_groups):
        return [group.id for group in view.groups[-num_groups:]]

class Waits(Base):
    def select(self, view, num_groups):
        return []

class Raises(Base):
    def select(self, view, num_groups):
        raise RuntimeError("oh")
"""


class Newest:
    """The sampler of a run that has a custom one."""

    def select(self, view: BufferView, num_groups: int) -> list[GroupId]:
        return [group.id for group in view.groups[-num_groups:]]

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


class SampledWorld(RecordedWorld):
    """Asks a custom sampler."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory, settings(steps=6, custom_sampler=True, sampler_budget_ms=1e6), seed)
        self.sampler = GuardedSampler(Newest())

    def send(self, event: events.AnyEvent, after: float = 0.0) -> list[actions.AnyAction]:
        new = super().send(event, after)
        for question in [action for action in new if isinstance(action, actions.AskSampler)]:
            new += self.send(self.sampler.ask(question))
        return new


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SAMPLERS)
    return f"{tmp_path}/mine.py"


def shadowed(directory: Path, reference: str) -> Shadowing:
    with Recording(directory) as recording:
        return shadow(recording, recording.lives, reference)


async def record(directory: Path, outcome: str = "the end") -> RecordedWorld:
    world = RecordedWorld(directory, settings(steps=6, buffer_groups_max=64), 3, faults=0.05)
    world.run()
    await world.close(outcome)
    return world


async def test_fifo_on_a_fifo_run_makes_identical_choices(tmp_path: Path) -> None:
    world = await record(tmp_path / "run")
    found = shadowed(tmp_path / "run", "fifo")
    assert len(found.choices) >= world.core.settings.steps
    assert all(choice.real == choice.shadow for choice in found.choices)
    assert (found.agreement, found.num_same) == (1.0, len(found.choices))
    assert found.real == found.shadow
    rows = [row for action in world.all(actions.StartTrainStep) if action.attempt == 1 for row in action.rows]
    assert found.real.reward_mean == pytest.approx(sum(row.reward for row in rows) / len(rows))
    assert found.real.length_mean == pytest.approx(sum(row.num_tokens for row in rows) / len(rows))


async def test_the_runs_own_custom_sampler_as_its_shadow_makes_identical_choices(tmp_path: Path, mine: str) -> None:
    world = SampledWorld(tmp_path / "run", 3)
    world.run()
    await world.close()
    before = threading.enumerate()
    found = shadowed(tmp_path / "run", f"{mine}:Newest")
    for thread in threading.enumerate():
        if thread.name == "sampler" and thread not in before:
            thread.join(20.0)
            assert not thread.is_alive()
    assert found.num_same == len(found.choices) == 6
    fifo = shadowed(tmp_path / "run", "fifo")
    assert fifo.agreement < 1.0
    assert fifo.shadow.age_mean_s > fifo.real.age_mean_s, "the oldest have waited longest"


async def test_another_sampler_differs_and_its_groups_are_described(
    tmp_path: Path, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await record(tmp_path / "run")
    found = shadowed(tmp_path / "run", f"{mine}:Newest")
    assert 0.0 < found.agreement < 1.0
    assert found.shadow.age_mean_s < found.real.age_mean_s
    assert found.shadow.num_groups == found.real.num_groups
    assert main([str(tmp_path / "run"), "--shadow", f"{mine}:Newest"]) == 0
    out = capsys.readouterr().out
    assert " instead of g1." in out
    assert "What the run would have become it cannot tell" in out
    assert main([str(tmp_path / "run"), "--shadow", f"{mine}:Newest", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["choices"]) == len(found.choices)


async def test_a_sampler_that_waits_or_fails_is_counted(
    tmp_path: Path, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await record(tmp_path / "run")
    waits, raises = shadowed(tmp_path / "run", f"{mine}:Waits"), shadowed(tmp_path / "run", f"{mine}:Raises")
    assert (waits.num_waits, waits.num_errors, waits.agreement) == (len(waits.choices), 0, 0.0)
    assert (raises.num_waits, raises.num_errors) == (0, len(raises.choices))
    assert raises.choices[0].error == "Raises.select raised RuntimeError: oh"
    assert main([str(tmp_path / "run"), "--shadow", f"{mine}:Missing"]) == 2
    assert "Missing" in capsys.readouterr().err


async def test_the_witness_changes_nothing(tmp_path: Path, mine: str) -> None:
    await record(tmp_path / "run")
    shadowed(tmp_path / "run", f"{mine}:Newest")
    with Recording(tmp_path / "run") as recording:
        first = msgspec.msgpack.encode([e for e in recording.events_of(recording.life())])
    assert main([str(tmp_path / "run"), "--verify"]) == 0
    with Recording(tmp_path / "run") as recording:
        assert msgspec.msgpack.encode([e for e in recording.events_of(recording.life())]) == first


async def test_what_could_not_be_replayed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = await record(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as database:
        (last,) = database.execute("SELECT max(seq) FROM events WHERE kind = 'StepFinished'").fetchone()
        database.execute("UPDATE events SET crc = 0 WHERE seq = ?", (last,))
    database.close()
    found = shadowed(tmp_path, "fifo")
    assert len(found.choices) == world.core.settings.steps
    assert found.notes == [f"boot 1: event {last} is damaged: what follows is left out"]
    assert main([str(tmp_path), "--shadow", "fifo"]) == 0
    assert found.notes[0] in capsys.readouterr().out


async def test_of_several_lives_one_that_cannot_be_replayed_is_left_out(tmp_path: Path) -> None:
    await record(tmp_path)
    with sqlite3.connect(tmp_path / "run.db") as database:
        database.execute("DELETE FROM events WHERE seq < 20")
        database.execute("DELETE FROM snapshots")
    database.close()
    with pytest.raises(RecordingError, match="it cannot be replayed"):
        shadowed(tmp_path, "fifo")
    second = RecordedWorld(tmp_path, settings(steps=2, buffer_groups_max=64), 3)
    second.run()
    await second.close()
    found = shadowed(tmp_path, "fifo")
    assert len(found.choices) == second.core.settings.steps
    assert found.notes[0].startswith("boot 1: left out: ")


async def test_a_run_whose_core_raised_is_looked_at_up_to_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await record(tmp_path, outcome="the controller failed: KeyError: 'r0'; its state is dumped beside the logs")

    def broken(core: Core, event: events.AnyEvent, handle: Any = Core.handle) -> Any:
        if event.seq == world.seq:
            raise KeyError("r0")
        return handle(core, event)

    monkeypatch.setattr(Core, "handle", broken)
    found = shadowed(tmp_path, "fifo")
    assert len(found.choices) == world.core.settings.steps
    assert found.notes == ["boot 1: its core raised at the last event, as it does now"]


async def test_a_batch_that_an_operator_edited_counts_if_it_was_taken(tmp_path: Path) -> None:
    world = RecordedWorld(tmp_path, settings(), 1)
    world.start("r0")
    world.send(events.HoldChanged(pass_name="sample", held=True))
    world.complete_all("r0")
    (held,) = world.core.state.held.values()
    void = TakeBatch(step=1, groups=[GroupId(99)])
    world.send(events.DecisionResolved(decision=held.id, verdict="apply", replacement=void))
    (held,) = world.core.state.held.values()
    world.send(events.DecisionResolved(decision=held.id, verdict="apply"))
    await world.close()
    (choice,) = shadowed(tmp_path, "fifo").choices
    assert choice.real == choice.shadow == world.core.state.steps[1].groups
