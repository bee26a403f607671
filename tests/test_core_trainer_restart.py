"""A lost trainer is started again from its checkpoint while rollouts go on; the steps since are redone from the same groups."""

import pytest
from core_world import Driver, of, settings

from laminar.core import actions, events
from laminar.core.records import GroupState
from laminar.ids import Version, WorkerId

LAUNCH, RANK = WorkerId("trainer-0"), WorkerId("trainer-0/0")


def driver(restarts: int = 2, **changes) -> Driver:
    base = {"batch_groups": 1, "buffer_groups_max": 8, "steps": 9, "trainer_restarts_max": restarts}
    result = Driver(settings(**(base | changes)))
    result.start("r0")
    return result


def trained(d: Driver) -> list[tuple[int, int, list[int]]]:
    return [(a.step, a.attempt, [row.trajectory for row in a.rows]) for a in d.all(actions.StartTrainStep)]


def pause_over(d: Driver, seconds: float = 1.0) -> list[actions.AnyAction]:
    return d.send(events.TimerFired(), after=seconds)


def did_not_start(d: Driver, worker: WorkerId = LAUNCH, incarnation: int = 0) -> list[actions.AnyAction]:
    return d.send(events.WorkerLost(worker=worker, incarnation=incarnation, reason="no GPU"))


def test_a_lost_trainer_is_started_again_as_a_whole_after_a_pause_and_people_are_told():
    d = driver()
    new = d.lost(RANK)
    assert [a.name for a in of(new, actions.RaiseAlarm)] == ["trainer-lost"]
    assert "started again from the beginning, without a checkpoint" in of(new, actions.RaiseAlarm)[0].text
    assert [(a.worker, a.incarnation) for a in of(new, actions.StopWorker)] == [(RANK, 1)]
    assert not of(new, actions.StartWorker), "not at once"
    assert d.core.next_deadline() == pytest.approx(d.at + 1.0)
    assert [a.worker for a in of(pause_over(d), actions.StartWorker)] == [LAUNCH]
    assert not d.core.state.stopping


def test_the_steps_since_the_checkpoint_are_redone_from_the_same_groups_in_the_same_order():
    d = driver()
    for _ in range(2):
        d.complete_all("r0")
        d.step_done()
    before = trained(d)
    assert [step for step, _, _ in before] == [1, 2, 3]
    d.lost(RANK)
    pause_over(d)
    d.rank(incarnation=2, step=0)
    for _ in range(3):
        d.step_done()
    assert trained(d)[3:6] == [(step, 2, rows) for step, _, rows in before]


def test_groups_complete_and_new_ones_begin_while_the_trainer_is_away():
    d = driver(local_batch_groups=4)
    d.lost(RANK)
    began = len(d.all(actions.StartGroup))
    d.complete_all("r0")
    assert d.core.state.buffer
    assert len(d.all(actions.StartGroup)) > began
    assert not d.all(actions.StartTrainStep)


def test_weights_that_the_dead_trainer_was_handing_over_are_lost_and_never_ready():
    d = driver(await_publication_s=5.0)
    d.complete_all("r0")
    d.step_done()
    assert d.all(actions.PublishVersion)[-1].version == Version(1, 0)
    d.lost(RANK)
    record = d.core.state.versions[-1]
    assert record.lost
    assert not record.awaited_until
    d.ready(Version(1, 0))
    assert not record.ready
    assert d.core.state.replicas[WorkerId("r0")].target is None


def test_weights_that_had_left_the_dead_trainer_become_ready():
    d = driver()
    d.complete_all("r0")
    d.step_done()
    d.send(events.ShardsWritten(version=Version(1, 0), stall_s=0.1))
    d.lost(RANK)
    d.ready(Version(1, 0))
    assert d.core.state.versions[-1].ready


def test_a_checkpoint_that_was_being_written_commits_nothing():
    d = driver(checkpoint_every=1)
    d.complete_all("r0")
    d.step_done()
    assert [a.step for a in d.all(actions.SaveCheckpoint)] == [1]
    d.lost(RANK)
    assert d.saved() == []
    assert d.core.state.ledger.trajectories.committed == 0
    pause_over(d)
    assert trained(d)[-1][:2] != (1, 2)
    d.rank(incarnation=2, step=0)
    assert trained(d)[-1][:2] == (1, 2)


def test_a_checkpoint_that_was_complete_when_the_trainer_died_is_what_it_goes_on_from():
    d = driver(checkpoint_every=1)
    d.complete_all("r0")
    d.step_done()
    d.lost(RANK)
    pause_over(d)
    d.rank(incarnation=2, step=1)
    assert trained(d)[-1][:2] == (2, 2), "step 2 had begun; step 1 is in the checkpoint"
    d.step_done()
    d.saved()
    assert d.core.state.trainer.checkpoint == 2


def test_ranks_of_the_old_launch_are_refused_and_their_answers_ignored():
    d = driver()
    d.complete_all("r0")
    d.lost(RANK)
    assert of(d.rank(incarnation=1), actions.StopWorker)
    assert d.send(events.StepFinished(step=1, attempt=1)) == []
    pause_over(d)
    d.rank(incarnation=2, step=0)
    assert d.send(events.StepFinished(step=1, attempt=1)) == []
    assert d.core.state.trainer.running == 1


def test_a_rank_that_comes_up_after_its_launch_was_given_up_is_refused():
    d = Driver(settings(trainer_restarts_max=2))
    d.send(events.RunStarted(boot=1))
    for rank in (0, 1):
        d.rank(rank, world_size=2)
    d.lost("trainer-0/0")
    pause_over(d)
    d.rank(0, incarnation=2, world_size=2)
    d.lost("trainer-0/0")
    assert of(d.rank(1, incarnation=2, world_size=2), actions.StopWorker)
    pause_over(d, 2.0)
    d.rank(0, incarnation=3, world_size=2)
    assert not d.core.state.trainer.ready
    d.rank(1, incarnation=3, world_size=2)
    assert d.core.state.trainer.ready
    assert not d.core.state.stopping


def test_the_end_of_all_ranks_of_a_launch_is_one_loss():
    d = Driver(settings(trainer_restarts_max=3))
    d.send(events.RunStarted(boot=1))
    for rank in (0, 1):
        d.rank(rank, world_size=2)
    for worker in ("trainer-0/0", "trainer-0/1"):
        d.lost(worker, incarnation=1)
    did_not_start(d)
    assert d.core.state.restarts[LAUNCH].num == 1


@pytest.mark.parametrize(("worker", "incarnation"), [("trainer-0", 0), ("trainer-0/1", 2)])
def test_a_launch_that_does_not_come_up_is_tried_again_and_then_the_run_fails(worker, incarnation):
    d = driver(restarts=2)
    d.lost(RANK)
    pause_over(d)
    did_not_start(d, WorkerId(worker), incarnation)
    assert not d.core.state.stopping
    assert [a.worker for a in of(pause_over(d, 2.0), actions.StartWorker)] == [LAUNCH]
    new = did_not_start(d, WorkerId(worker), incarnation + 1)
    assert [a.name for a in of(new, actions.RaiseAlarm)] == ["worker-evicted", "run-failed"]
    (end,) = of(new, actions.FinishRun)
    assert not end.ok
    assert end.reason == f"the trainer was lost ({worker}: no GPU)"


def test_a_step_that_fails_is_redone_by_a_new_launch():
    d = driver()
    d.complete_all("r0")
    new = d.send(events.StepFailed(step=1, attempt=1, reason="NaN"))
    assert "train step 1 failed: NaN" in of(new, actions.RaiseAlarm)[0].text
    assert of(new, actions.StopWorker), "its processes live, but may differ now"
    pause_over(d)
    d.rank(incarnation=2, step=0)
    assert trained(d)[-1][:2] == (1, 2)


def test_only_restarts_without_a_checkpoint_in_between_are_counted():
    d = driver(restarts=1, checkpoint_every=1)
    for incarnation in (2, 3, 4):
        d.lost(RANK)
        pause_over(d)
        d.rank(incarnation=incarnation, step=max(0, d.core.state.trainer.checkpoint))
        if not d.core.state.trainer.running:
            d.complete_all("r0")
        d.step_done()
        d.saved()
        d.ready(d.core.state.versions[-1].version)
        if d.core.state.replicas[WorkerId("r0")].target:
            d.refreshed("r0")
    assert not d.core.state.stopping
    d.lost(RANK)
    pause_over(d)
    d.rank(incarnation=5, step=d.core.state.trainer.checkpoint)
    d.at += 10_000
    d.lost(RANK)
    assert d.core.state.stopping, "time alone forgives a trainer nothing"


def test_a_trainer_that_may_come_back_is_no_replica_that_may():
    d = driver()
    d.lost(RANK)
    d.lost("r0")
    assert "no rollout replica is left" in d.core.state.stopping


def test_a_stop_while_the_trainer_is_away_ends_the_run_and_starts_nothing():
    d = driver()
    d.complete_all("r0")
    d.step_done()
    d.lost(RANK)
    (end,) = of(d.send(events.StopRequested(reason="asked")), actions.FinishRun)
    assert not end.ok, "a trained step is in no checkpoint"
    assert not of(pause_over(d), actions.StartWorker)


def test_an_evaluation_of_weights_that_a_restore_has_undone_is_made_again():
    d = driver(evaluate=True, steps=1)
    (before,) = d.all(actions.RunEvaluation)
    d.send(events.EvaluationFinished(evaluation=before.evaluation, accuracy=0.5, num_prompts=4))
    d.complete_all("r0")
    d.step_done()
    d.ready(Version(1, 0))
    d.refreshed("r0")
    undone = d.all(actions.RunEvaluation)[-1]
    assert undone.version == Version(1, 0)
    d.lost(RANK)
    pause_over(d)
    d.rank(incarnation=2, step=0)
    d.step_done()
    d.saved()
    d.ready(Version(1, 1))
    d.send(events.EvaluationFinished(evaluation=undone.evaluation, accuracy=0.1, num_prompts=4))
    d.refreshed("r0")
    final = d.all(actions.RunEvaluation)[-1]
    assert final.version == Version(1, 1)
    (end,) = of(
        d.send(events.EvaluationFinished(evaluation=final.evaluation, accuracy=0.9, num_prompts=4)), actions.FinishRun
    )
    assert end.ok
    assert [(e.name, e.accuracy) for e in d.core.state.evaluations] == [
        ("before", 0.5),
        ("superseded", 0.1),
        ("after", 0.9),
    ]


def test_leases_stay_and_groups_in_the_buffer_wait_while_the_trainer_is_away():
    d = driver()
    d.complete_all("r0")
    d.lost(RANK)
    states = [group.state for group in d.core.state.groups.values()]
    assert states.count(GroupState.LEASED) == 1
    assert states.count(GroupState.BUFFERED) == 1


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_groups_that_a_restore_has_made_too_old_are_dropped_and_the_run_goes_on(on_stale):
    d = driver(max_staleness=1, on_stale=on_stale, local_batch_groups=1, buffer_groups_max=4, steps=20)
    d.join("r1")
    d.refreshed("r1")
    for _ in range(3):
        for name in ("r0", "r1"):
            if d.generating(name):
                d.complete_all(name)
        while d.core.state.trainer.running:
            d.step_done()
        d.ready(d.core.state.versions[-1].version)
        for name in ("r0", "r1"):
            if d.core.state.replicas[WorkerId(name)].target:
                d.refreshed(name)
    assert d.core.state.trainer.step >= 3
    d.fill("r0", "r1")
    d.lost(RANK)
    pause_over(d)
    d.rank(incarnation=2, step=0)
    while d.core.state.trainer.running:
        d.step_done()
    old = [g for g in d.core.state.groups.values() if g.state != GroupState.LEASED and g.version.branch == 0]
    assert old == []
    assert d.core.state.ledger.trajectories.dropped["stale"] > 0
    d.ready(d.core.state.versions[-1].version)
    for name in ("r0", "r1", "r0", "r1"):  # first what they pulled already
        if d.core.state.replicas[WorkerId(name)].target:
            d.refreshed(name)
    assert d.generating("r0") or d.generating("r1")
