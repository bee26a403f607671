"""The console in front of a virtual cluster, by the command that users type: stepping, holding, going back, scripts."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from laminar.console.__main__ import main
from laminar.console.answers import Answer, records
from laminar.console.targets import sim

pytestmark = pytest.mark.timeout(100)

SAMPLER = """
class Last:
    def select(self, view, num_groups): return [group.id for group in view.groups[-num_groups:]]
    def state(self): return {}
    def load_state(self, state): pass
"""


@pytest.fixture
def small() -> sim.Simulated:
    return sim.opened("small", [])


def ask(target: sim.Simulated, line: str) -> Answer:
    answer = target.ask(line).answer
    assert not answer.error, f"{line}: {answer.error}"
    return answer


def event(target: sim.Simulated) -> int:
    return target.look().place.event


def test_a_step_goes_to_the_next_event_and_says_what_happened(small: sim.Simulated) -> None:
    before = event(small)
    answer = ask(small, "step")
    assert event(small) > before
    assert answer.facts["new_events"] == event(small) - before
    assert records(answer.tables[0])[-1]["event"] == event(small)


def test_a_run_stops_where_it_was_told_to(small: sim.Simulated) -> None:
    ask(small, "run until event 100")
    assert event(small) >= 100
    ask(small, "run until time 30")
    assert 30 <= small.look().place.time_s < 40
    with_more = event(small)
    ask(small, "run for 10 events")
    assert with_more + 10 <= event(small) < with_more + 60


def test_a_held_repack_is_read_edited_and_continued(small: sim.Simulated) -> None:
    ask(small, "hold repack")
    answer = ask(small, "run")
    place = small.look().place
    assert place.held
    assert place.step == 0
    assert "a decision is held" in answer.lines[0]
    shown = records(ask(small, f"held {place.held[0]}").tables[0])
    source, free = shown[0]["source"], idle(small, shown)
    ask(small, f"edit {place.held[0]} send {source} {free}")
    assert records(ask(small, f"held {place.held[0]}").tables[0])[0]["destination"] == free
    ask(small, "continue for 1 events")
    told = [row["what"] for row in records(ask(small, "timeline 60 move").tables[0])]
    assert any(f"move from {source} to {free}: chosen by an operator" in what for what in told)


def idle(target: sim.Simulated, transfers: list[dict[str, Any]]) -> str:
    """A replica that has no part in these transfers, with the least to do."""
    busy = {row[end] for row in transfers for end in ("source", "destination")}
    fleet = records(ask(target, "fleet").tables[0])
    return str(min((row for row in fleet if row["replica"] not in busy), key=lambda row: row["kv_share"])["replica"])


def test_going_back_and_on_again_is_the_same_run(small: sim.Simulated) -> None:
    ask(small, "run until time 70")
    there, seen = event(small), ask(small, "fleet")
    ask(small, "back 50")
    assert event(small) <= there - 50
    ask(small, f"goto event {there}")
    assert event(small) == there
    assert ask(small, "fleet") == seen


def test_what_was_changed_after_the_moment_gone_back_to_is_unsaid(small: sim.Simulated) -> None:
    ask(small, "run until time 20")
    before = event(small)
    ask(small, "pause sample")
    ask(small, "run for 5")
    ask(small, f"goto event {before}")
    assert small.look().place.paused == []


def test_what_was_changed_before_it_is_done_again(small: sim.Simulated) -> None:
    ask(small, "pause sample")
    ask(small, "run until time 20")
    ask(small, "back")
    assert small.look().place.paused == ["sample"]


def test_a_run_that_is_held_stops_when_it_gets_nowhere(small: sim.Simulated) -> None:
    ask(small, "run until time 30")
    ask(small, "pause dispatch sample")
    for _ in range(4):
        answer = small.ask("run until step 5").answer
        if answer.lines[0].startswith("nothing has moved"):
            break
    assert answer.lines[0] == "nothing has moved for 600 s of the run, because of what is held"
    assert small.look().place.step == 0


def test_time_may_pass_for_as_long_as_somebody_likes_while_a_run_is_held(small: sim.Simulated) -> None:
    small._track.world.stall_s = 60.0  # hours, else
    ask(small, "run until time 10")
    ask(small, "pause all")
    ask(small, "run for 2000")
    assert small.look().place.time_s >= 2000


def test_a_run_that_is_over_is_looked_at_but_not_changed() -> None:
    over = sim.opened("small", ["--iterations", "1"])
    ask(over, "run")
    assert ask(over, "status").facts["run"] == "over: completed"
    assert ask(over, "status").facts["trainer"] is None
    for line in ("pause repack", "set buffer.max_groups=300", "join", "break sample", "whatif join"):
        assert "the run is over (completed)" in over.ask(line).answer.error, line


def test_a_place_is_gone_to_whatever_is_held_on_the_way(small: sim.Simulated) -> None:
    ask(small, "hold repack")
    ask(small, "goto time 80")
    assert small.look().place.time_s >= 80
    assert small.look().place.held


def test_back_beyond_the_beginning_is_refused(small: sim.Simulated) -> None:
    assert "not so many before it" in small.ask("back 1000").answer.error


def test_places_that_cannot_be_meant_are_refused(small: sim.Simulated) -> None:
    before = event(small)
    for line in ("run until", "run until step x", "run for -3", "goto nowhere 3", "step 0", "run for 3 moons"):
        assert small.ask(line).answer.error, line
    assert event(small) == before


# ---- try ---------------------------------------------------------------------------------------------------


def test_a_change_is_tried_on_copies_and_the_run_stays_as_it_is(small: sim.Simulated) -> None:
    ask(small, "run until time 60")
    before, seen = event(small), ask(small, "fleet")
    answer = ask(small, "whatif set buffer.max_groups=64 for 30")
    rows = {row["measure"]: row for row in records(answer.tables[0])}
    assert rows["seconds"]["present"] == pytest.approx(30, abs=2)
    assert rows["generated tokens/s"]["changed"] < rows["generated tokens/s"]["present"], "a quarter is live"
    assert (event(small), ask(small, "fleet")) == (before, seen)


def test_a_change_that_changes_nothing_has_no_effect_on_what_is_simulated(small: sim.Simulated) -> None:
    ask(small, "run until time 30")
    table = records(ask(small, "whatif set repack.interval_s=5 for 20").tables[0])
    assert {row["ratio"] for row in table} <= {1.0, None}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("whatif fleet", "`fleet` changes nothing that could be compared"),
        ("whatif pause repack", "`pause` changes nothing that could be compared"),
        ("whatif run for 3", "`run` changes nothing"),
        ("whatif sampler", "`sampler` changes nothing"),
        ("whatif set buffer.max_groups=1", "would never fill"),
        ("whatif set buffer.max_groups=99 for ever", "seconds are expected"),
        ("whatif drain r77", "there is no replica 'r77'"),
        ("whatif sampler nowhere.py:X", "no file"),
        ("whatif", "usage: whatif CHANGE"),
    ],
)
def test_what_cannot_be_tried_is_refused(small: sim.Simulated, line: str, error: str) -> None:
    assert error in small.ask(line).answer.error


def test_the_sampler_of_a_simulation_can_be_changed_and_gone_back_from(small: sim.Simulated, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SAMPLER)
    ask(small, "run until time 20")
    there = event(small)
    assert ask(small, "sampler").facts["sampler"] == "fifo: batches are taken first in, first out"
    assert "no file" in small.ask(f"sampler {tmp_path}/gone.py:Last").answer.error
    ask(small, f"sampler {tmp_path}/mine.py:Last")
    ask(small, "run until step 1")
    assert ask(small, "sampler").facts["last_word"] == "it chose 64 groups"
    ask(small, f"goto event {there}")
    assert not small.core.settings.custom_sampler


# ---- the command -------------------------------------------------------------------------------------------


def test_commands_are_carried_out_up_to_the_first_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sim", "small", "-c", "run until time 1; fleet; replica r77; ledger"]) == 1
    output = capsys.readouterr().out
    assert "rollout-7" in output
    assert "error: there is no replica 'r77'" in output
    assert "> ledger" not in output


def test_json_is_one_object_per_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sim", "small", "--seed", "3", "--json", "-c", "run until time 1; fleet; help"]) == 0
    run, fleet, helped = map(json.loads, capsys.readouterr().out.splitlines())
    assert (run["ok"], run["target"]) == (True, "sim")
    assert run["event"] > 12
    assert [row["replica"] for row in fleet["tables"][0]["rows"]] == [f"rollout-{index}" for index in range(8)]
    assert any(row["command"].startswith("fleet") for row in helped["tables"][0]["rows"])


def test_commands_come_from_standard_input_if_that_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("step\n\n# a remark\nledger; quit\nfleet\n"))
    assert main(["--sim", "small"]) == 0
    output = capsys.readouterr().out
    assert "closed: everything is in exactly one place" in output
    assert "> fleet" not in output


def test_a_line_of_a_script_that_cannot_be_read_is_refused_like_any_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("status\ntimeline 'x\nfleet\n"))
    assert main(["--sim", "small"]) == 1
    output = capsys.readouterr().out
    assert "a quote is not closed" in output
    assert "> fleet" not in output


def test_the_latest_run_is_looked_at_if_none_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["-c", "status"], ["--log", "-c", "status"]):
        assert main(arguments) == 2
        assert f"there is no run in {tmp_path}/runs; name the directory of one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--sim", "smal", "-c", "status"], "did you mean small?"),
        (["--sim", "paper", "-c", "status"], "there are: 32B-128, 72B-1024, small"),
        (["--sim", "small", "--out", "x", "-c", "status"], "--out has no effect here"),
        (["--sim", "small", "--set", "max_stalenes=1", "-c", "status"], "did you mean max_staleness?"),
        (["/nowhere", "-c", "status"], "is not a run's directory"),
        (["--controller", "somewhere", "-c", "status"], "is no URL of a controller"),
        (["--sim", "small", "-c", "timeline 'x"], "a quote is not closed"),
        (["--log", "/nowhere", "-c", "status"], "no such file"),
    ],
)
def test_wrong_arguments_are_one_line_that_says_what_to_write(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1


def test_options_that_are_not_known_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--sim", "small", "--seeds", "3"], ["--sim", "small", "--log", "x"], ["--nonsense"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith("error: ")
