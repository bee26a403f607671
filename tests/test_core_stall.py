"""A run that gets nowhere: when people are told, when not, and when it is over. And what is given up when it lasts too long."""

from core_world import Driver, of, settings

from laminar.core import actions, events
from laminar.ids import WorkerId

LIMIT_S = 100.0


def running(**changes) -> Driver:
    driver = Driver(settings(**({"stall_after_s": LIMIT_S, "buffer_groups_max": 8} | changes)))
    driver.start("r0")
    return driver


def pass_time(driver: Driver, seconds: float) -> list[actions.AnyAction]:
    """Timers fire when they are due, as the runtime lets them."""
    end, new = driver.at + seconds, []
    while (due := driver.core.next_deadline()) is not None and due <= end:
        new += driver.send(events.TimerFired(), after=max(0.0, due - driver.at))
    driver.at = end
    return new


def alarms(new: list[actions.AnyAction]) -> list[str]:
    return [action.name for action in of(new, actions.RaiseAlarm)]


def test_a_run_in_which_nothing_happens_is_reported_once():
    driver = running()
    new = pass_time(driver, 1.5 * LIMIT_S)
    assert alarms(new) == ["stalled"]
    (stalled,) = of(new, actions.Stalled)
    assert stalled.since == LIMIT_S / 4  # when it was first seen that nothing had come
    assert not alarms(pass_time(driver, 10 * LIMIT_S))


def test_the_stall_is_over_with_the_first_token_and_may_be_followed_by_another():
    driver = running()
    pass_time(driver, 2 * LIMIT_S)
    (here, *_) = driver.generating("r0")
    assert alarms(driver.report("r0", {here: 1})) == ["stall-over"]
    assert not driver.core.state.stall.told
    assert alarms(pass_time(driver, 2 * LIMIT_S)) == ["stalled"]


def test_tokens_now_and_then_are_no_stall():
    driver = running()
    (here, *_) = driver.generating("r0")
    for num in range(1, 20):
        assert not alarms(pass_time(driver, 0.9 * LIMIT_S))
        driver.report("r0", {here: num})


def test_workers_that_start_are_waited_for_by_others():
    driver = Driver(settings(stall_after_s=LIMIT_S))
    driver.send(events.RunStarted(boot=1))
    assert not alarms(pass_time(driver, 20 * LIMIT_S))


def test_a_held_decision_a_full_disk_and_a_stop_are_no_stalls():
    held = running()
    held.send(events.HoldChanged(pass_name="sample", held=True))
    held.fill("r0")
    assert held.core.state.held
    full = running()
    full.send(events.StorageFailed(reason="full"))
    stopping = running()
    stopping.fill("r0")
    stopping.send(events.StopRequested(reason="asked"))
    for driver in (held, full, stopping):
        assert "stalled" not in alarms(pass_time(driver, 20 * LIMIT_S))


def test_a_run_stalls_for_the_whole_limit_after_a_good_reason_is_gone():
    driver = running()
    driver.send(events.StorageFailed(reason="full"))
    pass_time(driver, 3 * LIMIT_S)
    driver.send(events.StorageRecovered())
    assert not alarms(pass_time(driver, 0.7 * LIMIT_S))
    assert alarms(pass_time(driver, LIMIT_S)) == ["stalled"]


def test_a_step_may_take_three_times_as_long_as_steps_take():
    driver = running(steps=9, batch_groups=1, buffer_groups_max=4, local_batch_groups=4)
    for _ in range(2):
        driver.fill("r0")
        driver.at += 3 * LIMIT_S
        driver.step_done()
    assert driver.core.state.trainer.running
    assert "stalled" not in alarms(pass_time(driver, 8 * LIMIT_S))
    assert "stalled" in alarms(pass_time(driver, 3 * LIMIT_S))


def test_a_controller_that_was_not_listening_calls_nothing_a_stall():
    driver = running()
    assert not alarms(driver.send(events.TimerFired(), after=50 * LIMIT_S))
    assert alarms(pass_time(driver, 2 * LIMIT_S)) == ["stalled"]


# ---- what is given up --------------------------------------------------------------------------------------


def test_a_train_step_that_does_not_end_costs_the_trainer_and_the_batch_is_trained_by_the_next():
    driver = running(step_timeout_s=60.0, trainer_restarts_max=1, stall_after_s=0.0)
    driver.fill("r0")
    assert not driver.all(actions.StartWorker)
    new = pass_time(driver, 61.5)
    assert [action.worker for action in of(new, actions.StartWorker)] == ["trainer-0"]
    (alarm,) = of(new, actions.RaiseAlarm)
    assert "train step 1 did not end within trainer.step_timeout_s = 60" in alarm.text
    driver.rank(incarnation=2)
    assert [(a.step, a.attempt) for a in driver.all(actions.StartTrainStep)] == [(1, 1), (1, 2)]


def test_a_checkpoint_that_does_not_end_fails_a_run_that_restarts_no_trainer():
    driver = running(step_timeout_s=60.0, checkpoint_every=1, stall_after_s=0.0)
    driver.fill("r0")
    driver.step_done()
    pass_time(driver, 61.0)
    (end,) = driver.all(actions.FinishRun)
    assert not end.ok
    assert "the checkpoint of step 1 did not end within" in end.reason


def test_a_worker_that_was_started_again_and_hangs_before_it_joins_is_started_once_more():
    driver = running(restarts_max=2, start_timeout_s=30.0, stall_after_s=0.0)
    driver.lost("r0")
    new = pass_time(driver, 34.0)
    assert [action.worker for action in of(new, actions.StartWorker)] == ["r0", "r0"]
    assert "did not join within 30 s" in driver.core.state.restarts[WorkerId("r0")].reason
    assert [action.worker for action in of(new, actions.StopWorker)] == ["r0"]
    driver.join("r0", incarnation=2)
    assert not driver.core.state.restarts[WorkerId("r0")].start_by


def test_an_evaluation_that_does_not_end_is_given_up_after_a_few_tries_and_the_run_goes_on():
    driver = running(evaluate=True, evaluation_timeout_s=50.0, stall_after_s=0.0)
    assert len(driver.all(actions.RunEvaluation)) == 1
    new = pass_time(driver, 151.0)
    assert len(of(new, actions.RunEvaluation)) == 2
    assert alarms(new) == ["evaluation-timeout"] * 3
    assert driver.core.state.evaluations[0].done
    assert not driver.core.state.finished
