"""The console in front of a recorded run: any moment of it can be gone to, and nothing can be changed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_world import settings
from replay_world import RecordedWorld
from test_replay_whatif import run as simulated_run

from laminar.console.__main__ import main
from laminar.console.answers import Answer, records
from laminar.console.targets import log
from laminar.core import explain

pytestmark = pytest.mark.timeout(60)

SAMPLER = """
class Patient:
    def select(self, view, num_groups):
        return [group.id for group in view.groups[:num_groups]] if len(view.groups) >= 20 else []
    def state(self):
        return {}
    def load_state(self, state):
        pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of three steps."""

    async def make() -> Path:
        world = RecordedWorld(tmp_path_factory.mktemp("run"), settings(), seed=3)
        world.run()
        await world.close()
        return world.directory

    return asyncio.run(make())


@pytest.fixture
def recorded(run: Path) -> Iterator[log.Recorded]:
    target = log.opened(run)
    yield target
    target.close()


def ask(target: log.Recorded, line: str) -> Answer:
    answer = target.ask(line).answer
    assert not answer.error, f"{line}: {answer.error}"
    return answer


def event(target: log.Recorded) -> int:
    return target.look().place.event


def test_it_begins_before_the_first_event_and_says_how_far_it_goes(recorded: log.Recorded) -> None:
    assert event(recorded) == 0
    assert recorded.look().answer.lines[0].startswith("events 1 to ")
    assert ask(recorded, "step").facts["new_events"] == 1


def test_a_moment_is_the_same_whether_gone_to_forward_or_back(recorded: log.Recorded) -> None:
    ask(recorded, "goto step 1")
    there, seen = event(recorded), [ask(recorded, line) for line in ("status", "fleet", "ledger", "groups all")]
    ask(recorded, "goto end")
    assert event(recorded) > there
    ask(recorded, f"goto event {there}")
    assert [ask(recorded, line) for line in ("status", "fleet", "ledger", "groups all")] == seen
    ask(recorded, "back 5")
    assert event(recorded) == there - 5


def test_why_is_answered_by_the_core_of_that_moment(recorded: log.Recorded) -> None:
    ask(recorded, "goto step 2")
    replica = recorded.look().names["replica"][0]
    assert ask(recorded, f"why {replica}").headline == explain.why(recorded.core.look(), replica).text


def test_the_end_is_said(recorded: log.Recorded) -> None:
    answer = ask(recorded, "run")
    assert answer.lines[0] == "this is the last event in the log: completed"
    assert ask(recorded, "status").facts["run"] == "over: completed"


@pytest.mark.parametrize("line", ["pause repack", "approve", "resume"])
def test_nothing_can_be_changed(recorded: log.Recorded, line: str) -> None:
    ask(recorded, "goto step 1")
    before = event(recorded)
    assert recorded.ask(line).answer.error
    assert event(recorded) == before
    assert "a recorded one is what it was" in recorded.ask("pause repack").answer.error


def test_a_what_if_goes_on_from_here_changed_and_not_beside_what_was_recorded(tmp_path: Path) -> None:
    simulated_run(tmp_path / "run")
    (tmp_path / "mine.py").write_text(SAMPLER)
    target = log.opened(tmp_path / "run")
    try:
        assert "the run has not begun" in target.ask("whatif set buffer.max_groups=12").answer.error
        ask(target, "goto step 4")
        there = event(target)
        rows = what_if(target, "whatif set buffer.max_groups=12 for 3 steps")
        assert [rows["train steps"][name] for name in ("recorded", "present", "changed")] == [3, 3, 3]
        assert rows["seconds"]["present"] == pytest.approx(rows["seconds"]["recorded"], rel=0.15)
        assert rows["seconds"]["changed"] > rows["seconds"]["present"], "one batch is live, not four"
        assert what_if(target, "whatif drain r0 for 100")["seconds"]["changed"] == pytest.approx(100.0)
        rows = what_if(target, f"whatif sampler {tmp_path}/mine.py:Patient for 3 steps")
        assert rows["complete groups at the end"]["changed"] > rows["complete groups at the end"]["present"]
        assert "did you mean buffer.max_groups?" in target.ask("whatif set buffer.max_group=1").answer.error
        assert "changes nothing" in target.ask("whatif status").answer.error
        assert event(target) == there
        ask(target, "goto end")
        assert "the run is over" in target.ask("whatif drain r0").answer.error
    finally:
        target.close()


def what_if(target: log.Recorded, line: str) -> dict[str, dict[str, Any]]:
    return {str(row["measure"]): row for row in records(ask(target, line).tables[0])}


def test_what_is_no_recorded_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.db").write_text("nonsense")
    for path in (tmp_path / "run.db", tmp_path / "nothing"):
        assert main(["--log", str(path), "-c", "status"]) == 2
        said: Any = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
