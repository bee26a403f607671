"""Greedy accuracy before and after the run."""

from laminar.core import actions, events
from laminar.ids import Version, WorkerId
from tests.core_world import Driver, of, settings


def started(*replicas: str, **changes) -> Driver:
    driver = Driver(settings(**({"evaluate": True, "batch_groups": 1, "steps": 1} | changes)))
    driver.start(*(replicas or ("r0",)))
    return driver


def asked(new: list[actions.AnyAction]) -> list[tuple[str, int, Version]]:
    return [(a.worker, a.evaluation, a.version) for a in of(new, actions.RunEvaluation)]


def answer(driver: Driver, evaluation: int, accuracy: float = 0.5) -> list[actions.AnyAction]:
    return driver.send(events.EvaluationFinished(evaluation=evaluation, accuracy=accuracy, num_prompts=8))


def failed(driver: Driver, evaluation: int) -> list[actions.AnyAction]:
    return driver.send(events.EvaluationFailed(evaluation=evaluation, reason="engine"))


def trained(*replicas: str) -> Driver:
    """The only step is done; v1 is being published, the checkpoint written."""
    driver = started(*replicas)
    driver.complete_all("r0")
    answer(driver, 1)
    driver.step_done()
    return driver


def test_the_first_replica_evaluates_the_first_weights():
    assert asked(started().actions) == [("r0", 1, Version(0, 0))]


def test_the_replica_is_not_refreshed_while_it_evaluates():
    driver = started()
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(Version(1, 0))
    assert len(driver.all(actions.PullWeights)) == 1
    assert [a.version for a in of(answer(driver, 1), actions.PullWeights)] == [Version(1, 0)]


def test_the_last_weights_are_evaluated_before_the_run_ends():
    driver = trained()
    driver.saved()
    assert not driver.all(actions.FinishRun)
    driver.ready(Version(1, 0))
    assert asked(driver.refreshed("r0")) == [("r0", 2, Version(1, 0))]
    (end,) = of(answer(driver, 2, 0.9), actions.FinishRun)
    assert end.ok
    assert [(e.name, e.accuracy) for e in driver.core.state.evaluations] == [("before", 0.5), ("after", 0.9)]


def test_the_run_does_not_end_while_the_last_version_is_still_being_published():
    driver = trained()
    driver.saved()
    driver.ready(Version(1, 0))
    driver.refreshed("r0")
    assert not driver.all(actions.FinishRun)
    assert driver.core.state.evaluations[-1].name == "after"


def test_the_run_ends_without_the_second_evaluation_if_its_version_cannot_be_published():
    driver = trained()
    driver.saved()
    for _ in range(2):
        driver.send(events.VersionLost(version=Version(1, 0), reason="digest"))
    assert driver.core.state.versions[-1].retry_at
    assert not driver.all(actions.FinishRun), "it may still be published"
    (end,) = of(driver.unpublishable(Version(1, 0), "digest"), actions.FinishRun)
    assert end.ok


def test_another_replica_takes_over_when_the_first_is_lost():
    driver = started("r0", "r1")
    assert asked(driver.lost("r0")) == [("r1", 1, Version(0, 0))]


def test_a_failed_evaluation_is_tried_three_times_and_then_left_out():
    driver = started()
    assert asked(failed(driver, 1)) == [("r0", 1, Version(0, 0))]
    assert asked(failed(driver, 1)) == [("r0", 1, Version(0, 0))]
    assert asked(failed(driver, 1)) == []
    assert driver.core.state.evaluations[0].done


def test_an_answer_counts_once():
    driver = started()
    answer(driver, 1, 0.25)
    answer(driver, 1, 0.75)
    assert failed(driver, 1) == []
    assert driver.core.state.evaluations[0].accuracy == 0.25


def test_an_evaluation_waits_for_a_silent_holder_of_its_version():
    driver = started("r0")
    driver.send(events.WorkerDisconnected(worker=WorkerId("r0"), incarnation=1))
    failed(driver, 1)
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(Version(1, 0))
    assert driver.core.state.evaluations[0].version == Version(0, 0)
    new = driver.send(events.WorkerReturned(worker=WorkerId("r0"), incarnation=1))
    assert asked(new) == [("r0", 1, Version(0, 0))]


def test_without_a_holder_the_evaluation_is_of_the_newest_version():
    driver = started("r0", "r1", local_batch_groups=1, steps=3)
    driver.complete_all("r1")
    driver.step_done()
    driver.ready(Version(1, 0))
    driver.complete_all("r1")
    driver.refreshed("r1")
    driver.dropped(Version(0, 0))
    driver.lost("r0")
    assert asked(driver.actions)[-1] == ("r1", 1, Version(1, 0))


def test_a_stop_does_not_wait_for_an_evaluation_nor_for_its_replica():
    driver = started("r0", "r1")
    assert of(driver.send(events.StopRequested(reason="asked")), actions.FinishRun)
    driver = started("r0", "r1")
    driver.complete_all("r0")
    driver.send(events.StopRequested(reason="asked"))
    assert asked(driver.lost("r0")) == []
    driver.step_done()
    assert of(driver.saved(), actions.FinishRun)


def test_a_run_without_evaluation_asks_for_none():
    driver = started(evaluate=False)
    driver.complete_all("r0")
    driver.step_done()
    assert of(driver.saved(), actions.FinishRun)
    assert asked(driver.actions) == []
