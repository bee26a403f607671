"""The console in front of a virtual cluster, by the command that users type: stepping, holding, going back, scripts."""

import io
import json
from typing import Any

import pytest

from laminar.console.__main__ import main
from laminar.console.answers import Answer, records
from laminar.console.targets import sim

pytestmark = pytest.mark.timeout(100)


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
