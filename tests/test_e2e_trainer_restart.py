"""A trainer rank is killed in a real run: a new launch goes on from the checkpoint while the rollouts go on."""

import re
from pathlib import Path

import pytest
from e2e import SMALL, Run, hosts_file, ledger_is_closed
from e2e_replay import events_of

from laminar.core import events

pytestmark = pytest.mark.timeout(240)

STEPS = 40


def test_a_run_whose_trainer_rank_is_killed_redoes_the_steps_since_the_checkpoint_and_ends_well(tmp_path: Path) -> None:
    room = f"buffer.max_groups={4 * STEPS}"  # rollouts are not held back while the trainer is away
    overrides = (*SMALL, room, f"run.steps={STEPS}", "trainer.checkpoint_every=4", "trainer.restarts=1")
    with Run.start(tmp_path, hosts_file(tmp_path, ranks=2), *overrides) as run:
        run.until_said(r"^step 6/")
        run.kill_worker("laminar.workers.trainer", "trainer-0")
        run.until_said(r"^alarm: trainer-lost: the trainer was lost \(trainer-0/")
        run.until_said(r"^trainer-0 is started again")
        assert run.wait() == 0, run.output
    assert ledger_is_closed(run.output)
    assert run.num_dropped().keys() <= {"run_complete"}, run.output
    _check_steps(run)
    _check_that_rollouts_went_on(run)


def _check_steps(run: Run) -> None:
    """The ones since the checkpoint were trained again, on a new branch; every trajectory belongs to one step."""
    ready = [event for event in events_of(run) if isinstance(event, events.TrainerRankReady)]
    (restored,) = {event.step for event in ready if event.incarnation != ready[0].incarnation and event.step > 0}
    assert restored % 4 == 0
    done = [(event.step, event.attempt) for event in events_of(run) if isinstance(event, events.StepFinished)]
    again = [step for step, attempt in done if attempt == 2]
    assert again == list(range(restored + 1, again[-1] + 1))
    assert sorted({step for step, _ in done}) == list(range(1, STEPS + 1))
    steps = run.query(
        "SELECT count(*), count(DISTINCT id) FROM trajectories WHERE trained_at IS NOT NULL GROUP BY step"
    )
    assert steps == [(16, 16)] * STEPS
    assert re.search(r"@v\d+\.b1", run.output), "replicas pulled weights of the new branch"


def _check_that_rollouts_went_on(run: Run) -> None:
    away, finished = False, 0
    for event in events_of(run):
        if isinstance(event, events.WorkerLost) and event.worker.startswith("trainer-0/"):
            away = True
        elif isinstance(event, events.TrainerRankReady):
            away = False
        elif away and isinstance(event, events.ReplicaReported):
            finished += len(event.finished)
            assert event.incarnation > 0
    lost = [e for e in events_of(run) if isinstance(e, events.WorkerLost) and e.worker.startswith("rollout")]
    assert finished > 0
    assert not [event for event in lost if event.reason != "said goodbye"]
