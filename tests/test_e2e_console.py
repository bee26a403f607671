"""The console in front of a live run, and of its log: break on a repack, read it, edit it, go on; change settings, fleet, end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e import ROOT, Run, hosts_file, ledger_is_closed
from e2e_replay import events_of

from laminar.console.__main__ import main
from laminar.console.answers import Answer, records
from laminar.console.targets.live import Live
from laminar.controller.asking import Address
from laminar.controller.rundir import reopen
from laminar.core import events

pytestmark = pytest.mark.timeout(240)

COMMAND_S = 60.0  # the imports of one command on a busy machine
REPACKING = ("run.steps=5000", "repack.interval_s=0.05", "trainer.lr=0")


def command(run: Run, line: str) -> list[dict[str, Any]]:
    """What people type; its JSON."""
    environment = {**os.environ, **run.mark, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "laminar.console", str(run.path), "--json", "-c", line]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(found) for found in done.stdout.splitlines()]


def ask(live: Live, line: str) -> Answer:
    answer = live.ask(line).answer
    assert not answer.error, f"{line}: {answer.error}"
    return answer


def test_a_repack_is_held_read_edited_and_continued_and_the_run_is_changed_and_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run.start(tmp_path, hosts_file(tmp_path, replicas=2), *REPACKING, config="longtail.toml") as run:
        run.until_said(r"^step 1/")
        status, broken = command(run, "status; break repack when moves > 0")
        assert status["step"] >= 1
        assert broken["lines"][0].startswith("breakpoint 1 at repack when moves > 0")
        live = Live(Address.of_run(reopen(run.path)))
        number = run.until(lambda: next(iter(live.look().place.held), 0))
        _read_edit_continue(live, number)
        _change(run, live)
        step = live.look().place.step
        assert "ends when step" in ask(live, f"stop after {step + 2}").lines[0]
        assert run.wait() == 0, run.output
    assert ledger_is_closed(run.output)
    assert not run.num_dropped().keys() - {"stopped"}
    _look_at_the_log(run, number, capsys)


def _read_edit_continue(live: Live, number: int) -> None:
    (transfer, *_) = records(ask(live, f"held {number}").tables[0])
    assert transfer["reason"].startswith("left fullest")
    plan = ask(live, "plan")
    assert plan.headline.startswith(f"decision {number} is held: trajectories move: ")
    assert "source: " in " ".join(row["why"] for row in records(plan.tables[0]))
    edited = ask(live, f"edit {number} send {transfer['source']} {transfer['destination']}")
    assert edited.facts["event"]
    assert records(ask(live, f"held {number}").tables[0])[0]["reason"] == "chosen by an operator"
    ask(live, "clear 1")
    went_on = ask(live, "continue")
    assert any(f"decision {number} is" in line for line in went_on.lines), went_on.lines
    assert live.look().place.held == []


def _change(run: Run, live: Live) -> None:
    assert "5.0" in ask(live, "set repack.interval_s=5").lines[0]
    (row,) = records(ask(live, "settings repack.interval").tables[0])
    assert (row["value"], row["note"]) == (5.0, "changed by an operator")
    assert "rollout-2 is being started on localhost" in ask(live, "join").lines[0]
    run.until(lambda: run.status()["replicas"].get("rollout-2", {}).get("generating"))
    assert "`settings` lists what can" in live.ask("set trainer.lr=1").answer.error
    assert "there is no replica 'rollout-9'" in live.ask("drain rollout-9").answer.error
    ask(live, "drain rollout-2")
    run.until(lambda: "rollout-2" not in run.status()["replicas"])


def _look_at_the_log(run: Run, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words on what was recorded: the decision is held there as it was."""
    hit = next(event.seq for event in events_of(run) if isinstance(event, events.DecisionEdited))
    capsys.readouterr()
    assert main(["--log", str(run.path), "--json", "-c", f"goto event {hit}; held {number}; goto end; status"]) == 0
    _, held, _, status = map(json.loads, capsys.readouterr().out.splitlines())
    assert held["tables"][0]["rows"][0]["reason"] == "chosen by an operator"
    assert status["facts"]["run"].startswith("over: ")
    assert status["facts"]["ledger"] == "closed"
