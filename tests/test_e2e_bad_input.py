"""Whole runs that cannot work: one clear screen, exit code 1, nothing left."""

import shutil
from pathlib import Path

import pytest
from e2e import QUICKSTART, SMALL, Run, hosts_file, ledger_is_closed

pytestmark = pytest.mark.timeout(180)

JUDGE = """
def reward(prompt, response):
    raise RuntimeError("the judge is not there")
"""


def test_a_worker_that_dies_at_its_start_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    model = shutil.copytree(QUICKSTART / "model", tmp_path / "model")
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with Run.start(tmp_path, hosts_file(tmp_path), *SMALL, f"model.path={model}") as run:
        assert run.wait() == 1, run.output
    assert run.until_said(rf"^the run failed: .*{model}.*invalid header length")
    assert "Traceback" not in run.output
    assert len(run.lines) < 20, run.output


def test_a_reward_that_always_raises_ends_the_run_soon_and_is_shown(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    with Run.start(tmp_path, hosts_file(tmp_path), *SMALL, f"task.reward={tmp_path / 'judge.py'}:reward") as run:
        assert run.wait() == 1, run.output
    assert run.until_said(r"^alarm: reward_error: .*RuntimeError: the judge is not there$")
    assert run.until_said(r"^the run failed: 64 groups in a row were dropped, the last because of reward_error")
    assert ledger_is_closed(run.output)
    assert "greedy accuracy" not in run.output  # no score is not a score of 0
    assert run.query("SELECT count(*) FROM trajectories WHERE reward IS NOT NULL") == [(0,)]
