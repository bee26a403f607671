"""Random faults in a real run for some two minutes: the report is clean. `scripts/soak.py` does it for half an hour."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from e2e import SMALL, check_replay
from soak import shortcomings, soak

pytestmark = pytest.mark.timeout(600)

MINUTES = 3.0
SEED = 4496  # early on five kinds that are quickly over: cut, fill_disk, drop_frames, stop_rank, kill_reward


def test_a_run_under_random_faults_loses_nothing_that_it_may_not(tmp_path: Path) -> None:
    overrides = [*SMALL, "task.size=4000", "task.eval_prompts=0", "trainer.checkpoint_every=5", f"run.dir={tmp_path}"]
    report = soak(MINUTES, SEED, [], overrides, gap="1s")
    assert report["clean"], {name: findings for name, findings in report["checks"].items() if findings}
    assert shortcomings(report, MINUTES) == []
    check_replay(Path(report["run"]))
