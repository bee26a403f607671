"""The trainer: leases, steps, checkpoints, restores, the end. Events in, actions out."""

import pytest

from laminar.core import actions, events, ledger
from laminar.core.records import GroupState
from laminar.ids import Version, WorkerId
from tests.core_world import Driver, of, settings


def started(**changes) -> Driver:
    driver = Driver(settings(**({"batch_groups": 1, "buffer_groups_max": 4} | changes)))
    driver.start("r0")
    return driver


def trained(driver: Driver) -> list[tuple[int, int, list[int]]]:
    return [(a.step, a.attempt, [row.trajectory for row in a.rows]) for a in driver.all(actions.StartTrainStep)]


def one_step(driver: Driver) -> None:
    """A batch is completed and trained."""
    if not driver.core.state.trainer.running:
        driver.complete_all("r0")
    driver.step_done()
    if not driver.generating("r0"):
        driver.ready(Version(driver.core.state.trainer.step, driver.core.state.trainer.branch))
        driver.refreshed("r0")


def failed_save(driver: Driver) -> list[actions.AnyAction]:
    step = driver.all(actions.SaveCheckpoint)[-1].step
    return driver.send(events.CheckpointFailed(step=step, reason="disk full"))


# ---- leases and steps --------------------------------------------------------------------------------------


def test_the_trainer_waits_for_all_its_ranks():
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    driver.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
    assert driver.rank(0, world_size=2) == []
    assert of(driver.rank(1, world_size=2), actions.PublishVersion)


def test_a_rank_that_joins_twice_is_counted_once():
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    driver.rank(0, world_size=2)
    driver.rank(0, world_size=2)
    assert not driver.core.state.trainer.ready


def test_a_batch_is_leased_in_the_order_of_completion_with_siblings_adjacent():
    driver = started(batch_groups=2)
    a, b, c, d = driver.generating("r0")
    driver.report("r0", {c: 1, d: 1}, finish=[c, d], reward={c: 1.0, d: 0.5})
    driver.report("r0", {a: 1, b: 1}, finish=[a, b], reward={a: 0.0, b: 0.25})
    assert trained(driver) == [(1, 1, [c, d, a, b])]


def test_no_batch_is_taken_while_a_step_runs():
    driver = started()
    driver.complete_all("r0")
    driver.complete_all("r0")
    assert len(trained(driver)) == 1
    assert [a.step for a in of(driver.step_done(), actions.StartTrainStep)] == [2]


def test_no_batch_is_taken_before_the_trainer_is_ready():
    driver = started()
    driver.core.state.trainer.ready = False
    driver.complete_all("r0")
    assert not driver.all(actions.StartTrainStep)


def test_an_answer_of_another_step_or_attempt_is_ignored():
    driver = started()
    driver.complete_all("r0")
    for step, attempt in ((1, 2), (2, 1), (7, 1)):
        assert driver.send(events.StepFinished(step=step, attempt=attempt)) == []
        assert driver.send(events.StepFailed(step=step, attempt=attempt, reason="x")) == []
    assert driver.core.state.trainer.running == 1


def test_a_step_is_not_finished_twice():
    driver = started()
    driver.complete_all("r0")
    driver.step_done()
    assert driver.send(events.StepFinished(step=1, attempt=1)) == []
    assert driver.core.state.trainer.step == 1


def test_trained_trajectories_are_recorded_and_stay_leased_until_a_checkpoint():
    driver = started()
    driver.complete_all("r0")
    (record,) = of(driver.step_done(), actions.RecordTrajectories)
    assert [(t.step, t.sample_version) for t in record.trajectories] == [(1, Version(0, 0))] * 2
    books = driver.core.state.ledger.trajectories
    assert (books.leased, books.committed) == (4, 0), "the second step runs already"
    assert not driver.all(actions.ForgetTokens)


def test_a_failed_step_ends_the_run_with_its_reason():
    driver = started()
    driver.complete_all("r0")
    (end,) = of(driver.send(events.StepFailed(step=1, attempt=1, reason="CUDA OOM")), actions.FinishRun)
    assert not end.ok
    assert end.reason == "train step 1 failed: CUDA OOM"


def test_after_a_failed_step_the_next_launch_has_to_bring_all_its_ranks():
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    for rank in (0, 1):
        driver.rank(rank, world_size=2)
    driver.core.state.trainer.running = 0
    driver.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
    driver.ready(Version(0, 0))
    driver.join("r0")
    driver.refreshed("r0")
    driver.complete_all("r0")
    driver.send(events.StepFailed(step=1, attempt=1, reason="nccl"))
    driver.rank(0, incarnation=2, world_size=2)
    assert not driver.core.state.trainer.ready
    driver.rank(1, incarnation=2, world_size=2)
    assert driver.core.state.trainer.ready


# ---- checkpoints -------------------------------------------------------------------------------------------


def test_only_a_checkpoint_commits_and_forgets_tokens():
    driver = started(checkpoint_every=1)
    driver.complete_all("r0")
    (_, _, rows) = trained(driver)[0]
    assert [a.step for a in of(driver.step_done(), actions.SaveCheckpoint)] == [1]
    assert [a.trajectories for a in of(driver.saved(), actions.ForgetTokens)] == [rows]
    books = driver.core.state.ledger.trajectories
    assert (books.leased, books.committed) == (2, 2), "the second step runs already"
    assert list(driver.core.state.steps) == [2]


def test_a_checkpoint_commits_all_steps_before_it_and_none_after_it():
    driver = started(checkpoint_every=2, steps=6)
    for _ in range(2):
        one_step(driver)
    driver.complete_all("r0")
    assert driver.core.state.trainer.running == 3
    driver.saved()
    assert list(driver.core.state.steps) == [3]
    assert driver.core.state.ledger.trajectories.committed == 4


def test_the_checkpoint_is_taken_between_two_steps():
    driver = started(checkpoint_every=1)
    driver.complete_all("r0")
    driver.complete_all("r0")
    new = driver.step_done()
    order = [type(a).__name__ for a in new if isinstance(a, actions.SaveCheckpoint | actions.StartTrainStep)]
    assert order == ["SaveCheckpoint", "StartTrainStep"]


def test_what_is_irreversible_within_the_controller_waits_for_the_disk():
    durable = {kind.__name__ for kind in actions.Action.__subclasses__() if kind.durable_first}
    assert durable == {"ForgetTokens"}, "what workers are told waits in their channels"


def test_a_checkpoint_that_nobody_asked_for_commits_nothing():
    driver = started()
    driver.complete_all("r0")
    driver.step_done()
    assert driver.send(events.CheckpointSaved(step=1)) == []
    assert driver.send(events.CheckpointFailed(step=1, reason="x")) == []
    assert driver.core.state.ledger.trajectories.committed == 0


def test_a_failed_checkpoint_is_told_and_the_run_goes_on():
    driver = started(checkpoint_every=1)
    driver.complete_all("r0")
    driver.step_done()
    new = failed_save(driver)
    assert [a.name for a in of(new, actions.RaiseAlarm)] == ["checkpoint-failed"]
    assert "disk full" in of(new, actions.RaiseAlarm)[0].text
    assert not driver.core.state.stopping
    one_step(driver)
    driver.saved()
    assert driver.core.state.ledger.trajectories.committed == 4


def test_the_last_checkpoint_is_tried_three_times_then_the_run_has_failed():
    driver = started(steps=1)
    driver.complete_all("r0")
    driver.step_done()
    assert [a.step for a in of(failed_save(driver), actions.SaveCheckpoint)] == [1]
    assert [a.step for a in of(failed_save(driver), actions.SaveCheckpoint)] == [1]
    (end,) = of(failed_save(driver), actions.FinishRun)
    assert (end.ok, end.reason) == (False, "the checkpoint of step 1 could not be written: disk full")


def test_a_stopped_run_whose_checkpoint_cannot_be_written_is_not_ok():
    driver = started()
    driver.complete_all("r0")
    driver.send(events.StopRequested(reason="asked"))
    driver.step_done()
    failed_save(driver)
    failed_save(driver)
    (end,) = of(failed_save(driver), actions.FinishRun)
    assert (end.ok, end.reason) == (False, "asked")


def test_a_success_resets_the_count_of_failed_checkpoints():
    driver = started(checkpoint_every=1, steps=9)
    for _ in range(4):
        one_step(driver)
        if driver.core.state.trainer.num_failed_saves < 2:
            failed_save(driver)
        else:
            driver.saved()
    assert not driver.core.state.stopping


# ---- restores ----------------------------------------------------------------------------------------------


def interrupted(checkpoint_every: int = 0, **changes) -> tuple[Driver, list[tuple[int, int, list[int]]]]:
    """Three steps are leased, two of them trained, none is saved; then the trainer starts again."""
    driver = started(steps=8, checkpoint_every=checkpoint_every, **changes)
    one_step(driver)
    one_step(driver)
    if not driver.core.state.trainer.running:
        driver.complete_all("r0")
    before = trained(driver)
    assert [step for step, _, _ in before] == [1, 2, 3]
    return driver, before


def test_after_a_restore_the_unsaved_steps_are_redone_from_the_same_groups_in_the_same_order():
    driver, before = interrupted()
    driver.restore_trainer(step=0)
    for _ in range(3):
        driver.step_done()
    redone = trained(driver)[3:6]
    assert redone == [(step, attempt + 1, rows) for step, attempt, rows in before]


def test_a_restore_starts_a_new_branch():
    driver, _ = interrupted()
    driver.restore_trainer(step=0)
    assert driver.all(actions.PublishVersion)[-1].version == Version(0, 1)
    driver.ready(Version(0, 1))
    driver.step_done()
    assert driver.all(actions.PublishVersion)[-1].version == Version(1, 1)


def test_steps_that_the_restored_checkpoint_contains_are_not_redone():
    driver, before = interrupted()
    driver.restore_trainer(step=2)
    assert trained(driver)[3:] == [(3, 2, before[2][2])]
    contained = driver.core.state.steps[2]
    assert (contained.done, contained.attempt) == (True, 1)


def test_answers_of_the_launch_that_died_change_nothing():
    driver, _ = interrupted(checkpoint_every=2)
    driver.restore_trainer(step=0)
    for late in (
        events.StepFinished(step=1, attempt=1),
        events.StepFailed(step=1, attempt=1, reason="x"),
        events.CheckpointSaved(step=2),
        events.CheckpointFailed(step=2, reason="x"),
    ):
        assert driver.send(late) == []
    assert driver.core.state.trainer.running == 1
    assert driver.core.state.ledger.trajectories.committed == 0


def test_a_rank_of_the_launch_that_died_is_stopped_when_it_returns():
    driver, _ = interrupted()
    driver.lost("trainer-0/0")
    new = driver.rank(incarnation=1)
    assert [(a.worker, a.incarnation) for a in of(new, actions.StopWorker)] == [("trainer-0/0", 1)]
    assert not driver.core.state.trainer.ready


def test_a_new_process_of_a_rank_means_that_the_trainer_was_lost():
    driver, _ = interrupted()
    new = driver.rank(incarnation=2)
    assert "the trainer was lost (trainer-0/0: replaced by a new process)" in [
        a.text for a in of(new, actions.RaiseAlarm)
    ]


def test_the_lost_trainers_leases_stay():
    driver, before = interrupted()
    driver.lost("trainer-0/0")
    state = driver.core.state
    assert state.ledger.trajectories.leased == sum(len(rows) for _, _, rows in before)
    assert all(group.state == GroupState.LEASED for group in state.groups.values())


def test_a_run_whose_trainer_dies_with_unsaved_steps_is_not_ok_although_it_was_stopped():
    driver, _ = interrupted()
    driver.send(events.StopRequested(reason="asked"))
    (end,) = of(driver.lost("trainer-0/0"), actions.FinishRun)
    assert (end.ok, end.reason) == (False, "asked")


def test_a_trainer_that_restores_less_than_what_is_committed_ends_the_run():
    driver = started(steps=8, checkpoint_every=1)
    one_step(driver)
    driver.saved()
    driver.restore_trainer(step=0)
    assert "restored step 0, but step 1 is already committed" in driver.core.state.stopping


def test_a_checkpoint_while_steps_wait_to_be_redone_commits_only_what_it_contains():
    driver, _ = interrupted(checkpoint_every=1)
    driver.restore_trainer(step=0)
    driver.step_done()
    driver.saved()
    books = driver.core.state.ledger.trajectories
    assert (books.committed, books.leased) == (2, 4)
    assert ledger.is_closed(books)


def test_a_stop_does_not_wait_for_steps_that_would_be_redone():
    driver, _ = interrupted()
    driver.restore_trainer(step=0)
    driver.send(events.StopRequested(reason="asked"))
    new = driver.step_done()
    assert not of(new, actions.StartTrainStep)
    assert [a.step for a in of(new, actions.SaveCheckpoint)] == [1]
    assert [(a.ok, a.reason) for a in of(driver.saved(), actions.FinishRun)] == [(True, "asked")]


# ---- stopping and the end ----------------------------------------------------------------------------------


def test_a_stop_finishes_the_step_saves_and_ends():
    driver = started()
    driver.complete_all("r0")
    new = driver.send(events.StopRequested(reason="asked"))
    assert not of(new, actions.SaveCheckpoint)
    new = driver.step_done()
    assert [a.step for a in of(new, actions.SaveCheckpoint)] == [1]
    assert not of(new, actions.FinishRun)
    (end,) = of(driver.saved(), actions.FinishRun)
    assert (end.ok, end.reason) == (True, "asked")


def test_a_stop_starts_nothing_new():
    driver = started()
    driver.complete_all("r0")
    driver.send(events.StopRequested(reason="asked"))
    here = driver.generating("r0")
    new = driver.report("r0", dict.fromkeys(here, 3), finish=here, reward=dict.fromkeys(here, 1.0))
    assert new == []
    assert driver.join("r1") == []


def test_a_stop_aborts_what_runs_and_accounts_for_it():
    driver = started()
    here = driver.generating("r0")
    driver.report("r0", dict.fromkeys(here, 2))
    new = driver.send(events.StopRequested(reason="asked"))
    assert sorted(t for a in of(new, actions.AbortAttempts) for t in a.trajectories) == sorted(here)
    assert driver.core.state.ledger.trajectories.dropped == {"stopped": len(here)}
    assert driver.core.state.ledger.tokens.dropped == {"stopped": 2 * len(here)}


@pytest.mark.parametrize("when", ["before anything", "before the trainer", "before replicas"])
def test_a_stop_before_the_start_ends_at_once(when):
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    if when != "before anything":
        driver.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
    if when == "before replicas":
        driver.rank()
    (end,) = of(driver.send(events.StopRequested(reason="asked")), actions.FinishRun)
    assert (end.ok, end.reason) == (True, "asked")


def test_a_stop_while_a_checkpoint_is_written_waits_for_it():
    driver = started(checkpoint_every=1, batch_groups=2)
    driver.complete_all("r0")
    driver.step_done()
    assert driver.send(events.StopRequested(reason="asked")) == []
    assert of(driver.saved(), actions.FinishRun)


def test_the_first_reason_to_stop_stands():
    driver = started()
    driver.complete_all("r0")
    driver.send(events.StopRequested(reason="asked"))
    driver.send(events.StopRequested(reason="again"))
    driver.send(events.FailureReported(reason="disk"))
    driver.step_done()
    driver.saved()
    assert driver.all(actions.FinishRun)[0].reason == "asked"


def test_a_failure_saves_what_can_be_saved_and_ends_with_its_reason():
    driver = started()
    driver.complete_all("r0")
    driver.send(events.FailureReported(reason="disk"))
    driver.step_done()
    (end,) = of(driver.saved(), actions.FinishRun)
    assert (end.ok, end.reason) == (False, "disk")


def test_a_run_ends_when_its_last_step_is_saved():
    driver = started(steps=1)
    driver.complete_all("r0")
    assert [a.step for a in of(driver.step_done(), actions.SaveCheckpoint)] == [1]
    (end,) = of(driver.saved(), actions.FinishRun)
    assert (end.ok, end.reason) == (True, "completed")


def test_an_older_checkpoint_under_way_at_the_end_is_followed_by_the_last_one():
    driver = started(steps=2, checkpoint_every=1)
    one_step(driver)
    one_step(driver)
    assert [a.step for a in driver.all(actions.SaveCheckpoint)] == [1]
    assert [a.step for a in of(driver.saved(), actions.SaveCheckpoint)] == [2]
    assert of(driver.saved(), actions.FinishRun)


def test_nothing_follows_the_end():
    driver = started(steps=1)
    driver.complete_all("r0")
    driver.step_done()
    driver.saved()
    later = driver.join("r5") + driver.ready(Version(1, 0)) + driver.send(events.StopRequested(reason="late"))
    assert later == []
    assert len(driver.all(actions.FinishRun)) == 1


# ---- checkpoints are written while training goes on --------------------------------------------------------


def saves_of(driver: Driver) -> list[int]:
    return [action.step for action in driver.all(actions.SaveCheckpoint)]


def test_a_checkpoint_that_becomes_due_while_another_is_written_is_made_when_that_is_complete():
    driver = started(checkpoint_every=2, steps=12)
    for _ in range(5):
        one_step(driver)
    assert saves_of(driver) == [2], "one at a time"
    driver.saved()
    assert driver.core.state.ledger.trajectories.committed == 4, "what was trained meanwhile is not in it"
    one_step(driver)
    assert saves_of(driver) == [2, 6]
    driver.saved()
    one_step(driver)
    assert saves_of(driver) == [2, 6]


def test_one_that_became_due_meanwhile_is_made_after_the_next_step_also_between_two_due_ones():
    driver = started(checkpoint_every=2, steps=12)
    for _ in range(4):
        one_step(driver)
    driver.saved()
    one_step(driver)
    assert saves_of(driver) == [2, 5]
    driver.saved()
    one_step(driver)
    assert saves_of(driver) == [2, 5, 6]


def test_a_checkpoint_of_the_same_step_is_made_again_after_a_restore():
    driver = started(checkpoint_every=2, steps=12)
    one_step(driver)
    one_step(driver)
    driver.restore_trainer(0)
    driver.step_done()
    driver.step_done()
    assert saves_of(driver) == [2, 2]
