"""The console in front of a live run, of the controller that takes over from a killed one, and of the run's log."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from e2e import Run, hosts_file, ledger_is_closed
from e2e_replay import events_of

from laminar.console.__main__ import main
from laminar.console.answers import Answer, records
from laminar.console.targets import live
from laminar.core import events
from laminar.errors import ConfigError

pytestmark = pytest.mark.timeout(240)

OVERRIDES = ("run.steps=5000", "repack.interval_s=0.05", "trainer.lr=0", "controller.orphan_timeout_s=90")
SAMPLER = """
class Newest:
    def select(self, view, num_groups):
        return [group.id for group in view.groups[-num_groups:]]
    def state(self):
        return {}
    def load_state(self, state):
        pass
"""
KEPT = ("settings repack.interval", "settings flush", "break", "sampler")


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """What people type; the JSON of each command."""
    capsys.readouterr()
    assert main([*arguments[:-1], "--json", "-c", arguments[-1]]) == 0
    return [json.loads(found) for found in capsys.readouterr().out.splitlines()]


def ask(target: live.Live, line: str) -> Answer:
    answer = target.ask(line).answer
    assert not answer.error, f"{line}: {answer.error}"
    return answer


def test_a_live_run_is_held_edited_and_changed_which_outlives_its_controller_and_is_in_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run.start(tmp_path, hosts_file(tmp_path, replicas=2), *OVERRIDES, config="longtail.toml") as run:
        run.until_said(r"^step 1/")
        status, broken = typed(capsys, str(run.path), "status; break repack when moves > 0")
        assert status["step"] >= 1
        assert broken["lines"][0].startswith("breakpoint 1 at repack when moves > 0")
        console = live.of_run(run.path)
        number = run.until(lambda: next(iter(console.look().place.held), 0))
        _read_edit_continue(console, number)
        kept = _change(run, console, tmp_path)
        run.signal(signal.SIGKILL)
        run.process.wait(10.0)
        assert "no controller answers" in _refused(console, "status")
        with Run.resume(run.path) as second:
            assert _is_taken_over(second, console, kept)
            step = console.look().place.step
            assert "ends when step" in ask(console, f"stop after {step + 2}").lines[0]
            assert second.wait() == 0, second.output
        assert ledger_is_closed(second.output)
        assert not run.num_dropped().keys() - {"stopped"}
        assert "the run is over" in _refused(console, "status")
        _look_at_the_log(run, number, capsys)


def _refused(console: live.Live, line: str) -> str:
    with pytest.raises(ConfigError) as refused:
        console.ask(line)
    return str(refused.value)


def _read_edit_continue(console: live.Live, number: int) -> None:
    (transfer, *_) = records(ask(console, f"held {number}").tables[0])
    assert transfer["reason"].startswith("left fullest")
    plan = ask(console, "plan")
    assert plan.headline.startswith(f"decision {number} is held: trajectories move: ")
    assert "source: " in " ".join(row["why"] for row in records(plan.tables[0]))
    edited = ask(console, f"edit {number} send {transfer['source']} {transfer['destination']}")
    assert edited.facts["event"]
    assert records(ask(console, f"held {number}").tables[0])[0]["reason"] == "chosen by an operator"
    ask(console, "clear 1")
    went_on = ask(console, "continue")
    assert any(f"decision {number} is" in line for line in went_on.lines), went_on.lines
    assert console.look().place.held == []


def _change(run: Run, console: live.Live, directory: Path) -> list[Answer]:
    """What is to outlive the controller, as the console shows it."""
    changed = ask(
        console, "set repack.interval_s=5 buffer.sampler_budget_ms=1000"
    ).lines  # a busy machine is no bad sampler
    assert any("repack.interval_s 0.05 → 5.0" in line for line in changed), changed
    ask(console, "set rollout.flush_interval_s=0.1 r1")
    assert "`settings` lists what can" in console.ask("set trainer.lr=1").answer.error
    (directory / "mine.py").write_text(SAMPLER)
    assert "is being loaded" in ask(console, f"sampler {directory}/mine.py:Newest").lines[0]
    run.until(lambda: "it chose 6 groups" in ask(console, "sampler").facts.values())
    futures = records(ask(console, "whatif set buffer.max_groups=6 for 2 steps").tables[0])
    (steps,) = [row for row in futures if row["measure"] == "train steps"]
    assert (steps["present"], steps["changed"]) == (2, 2)
    ask(console, "pause repack")
    ask(console, "break step-finished when step > 4000")
    ask(console, "hold sample")
    run.until(lambda: console.look().place.held)
    return [ask(console, line) for line in KEPT]


def _is_taken_over(run: Run, console: live.Live, kept: list[Answer]) -> bool:
    """The same console goes on with another controller, in which all is as it was; then batches are chosen again."""
    changes = r"repack\.interval_s = 5\.0, buffer\.sampler_budget_ms = 1000\.0, buffer\.sampler = "
    run.until_said(rf"^goes on with what an operator has changed: {changes}")
    run.until_said("^goes on after a controller that died")
    # The report for which a batch was held may not have been on disk yet; it comes again.
    place = run.until(lambda: found if (found := console.look().place).held else None)
    assert (place.paused, len(place.held)) == (["repack", "sample"], 1)
    assert [ask(console, line) for line in KEPT] == kept
    ask(console, "resume")
    run.until_said(rf"^step {place.step + 2}/")
    return run.query("SELECT text FROM alarms WHERE name = 'sampler'") == []


def _look_at_the_log(run: Run, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words on what was recorded: the decision is held there as it was."""
    hit = next(event.seq for event in events_of(run) if isinstance(event, events.DecisionEdited))
    line = f"goto event {hit}; held {number}; goto end; status; sampler"
    _, held, _, status, sampler = typed(capsys, "--log", str(run.path), line)
    assert held["tables"][0]["rows"][0]["reason"] == "chosen by an operator"
    assert status["facts"]["run"].startswith("over: ")
    assert status["facts"]["ledger"] == "closed"
    assert sampler["facts"]["sampler"].endswith("mine.py:Newest, chosen by an operator")
