"""A controller dies and another goes on with its state: who is waited for, what stands still, what is asked again."""

import pytest

from laminar.core import actions, events, outage
from laminar.core.engine import Core
from laminar.ids import WorkerId
from tests.core_world import Driver, World, of, settings
from tests.test_core_fuzz import SETTINGS, check_end


def restarted(driver: Driver, away_s: float = 50.0) -> list[actions.AnyAction]:
    """The core of the next controller process."""
    driver.core = Core.restore(driver.core.settings, driver.core.snapshot())
    return driver.send(events.ControllerRestarted(boot=driver.core.state.boot + 1, away_s=away_s), after=away_s)


def running(**changes) -> Driver:
    driver = Driver(settings(**changes))
    driver.start("r0", "r1")
    return driver


def test_every_known_worker_is_waited_for_and_given_nothing_before_it_is_back():
    driver = running()
    here = driver.generating("r0")
    assert restarted(driver) == []
    assert list(driver.core.state.silent) == ["relay-0", "trainer-0/0", "r0", "r1"]
    for worker in ("relay-0", "trainer-0/0", "r0"):
        driver.send(events.WorkerReturned(worker=WorkerId(worker), incarnation=1))
    assert driver.generating("r0") == here
    new = driver.complete_all("r0")
    assert {action.worker for action in of(new, actions.StartGroup)} <= {"r0"}


def test_a_worker_that_does_not_come_back_is_lost_and_its_trajectories_go_on_elsewhere():
    driver = running(reconnect_grace_s=20.0)
    left_behind = driver.generating("r1")
    driver.report("r1", dict.fromkeys(left_behind, 2))
    restarted(driver)
    for worker in ("relay-0", "trainer-0/0", "r0"):
        driver.send(events.WorkerReturned(worker=WorkerId(worker), incarnation=1))
    assert driver.core.next_deadline() == driver.core.state.silent["r1"]
    driver.send(events.TimerFired(), after=20.0)
    assert list(driver.core.state.replicas) == ["r0"]
    assert set(left_behind) <= set(driver.core.state.trajectories)


def test_time_limits_stand_still_while_nobody_listened():
    driver = running()
    driver.fill("r0", "r1")
    driver.step_done()
    driver.join("r2")
    state = driver.core.state
    left_s = state.pulls["r2"] - driver.at, state.versions[-1].deadline - driver.at
    restarted(driver, away_s=50_000.0)
    state = driver.core.state
    assert (state.pulls["r2"] - driver.at, state.versions[-1].deadline - driver.at) == pytest.approx(left_s)
    assert not of(driver.send(events.TimerFired()), actions.StopWorker)


def test_a_run_that_was_over_when_its_controller_died_is_over_for_the_next_one_which_starts_nothing():
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    driver.send(events.StopRequested(reason="stopped by SIGINT"))
    assert driver.core.state.finished
    [action] = restarted(driver)
    assert (type(action), action.reason, action.ok) == (actions.FinishRun, "stopped by SIGINT", True)
    assert outage.what_to_do(driver.core.state, "rollout-0") == "nothing"


def test_a_sampler_whose_answer_died_with_the_controller_is_asked_again():
    driver = running(custom_sampler=True)
    driver.fill("r0", "r1")
    asked = driver.all(actions.AskSampler)[-1]
    again = of(restarted(driver), actions.AskSampler)
    assert [action.request for action in again] == [asked.request + 1]
    driver.send(events.SamplerAnswered(request=asked.request, groups=[g.id for g in asked.view.groups][:2]))
    assert not driver.all(actions.StartTrainStep), "the answer to the question of a dead controller was taken"


def test_ids_of_the_next_controller_are_its_own():
    driver = running()
    before = set(driver.core.state.trajectories)
    restarted(driver)
    for worker in ("relay-0", "trainer-0/0", "r0", "r1"):
        driver.send(events.WorkerReturned(worker=WorkerId(worker), incarnation=1))
    driver.fill("r0", "r1")
    after = set(driver.core.state.trajectories) - before
    assert after
    assert min(after) >> 40 == 2


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_whose_controller_dies_again_and_again_ends_with_a_closed_ledger(name):
    num_crashes = 0
    for seed in range(12):
        world = World(settings(**SETTINGS[name]), seed, faults=0.15)
        world.controller_crashes = True
        world.run()
        check_end(world)
        num_crashes += world.core.state.boot - 1
    assert num_crashes > 5


def test_a_controller_that_stood_still_gives_nobody_up_for_what_it_did_not_hear():
    driver = running(step_timeout_s=100.0, progress_timeout_s=10.0)
    driver.fill("r0", "r1")
    driver.join("r2")
    driver.send(events.WorkerDisconnected(worker=WorkerId("r1"), incarnation=1))
    left_s = driver.core.next_deadline() - driver.at
    assert not driver.send(events.ControllerPaused(away_s=5000.0), after=5000.0)
    assert not of(driver.send(events.TimerFired()), actions.StopWorker)
    assert driver.core.next_deadline() - driver.at == pytest.approx(left_s, abs=10.0)
    assert driver.core.state.silent["r1"] - driver.at == pytest.approx(driver.core.settings.reconnect_grace_s)
    assert driver.core.state.trainer.running


def test_a_new_process_has_a_higher_incarnation_than_all_that_were_there_whatever_the_clock_says():
    driver = running(restarts_max=1)
    driver.join("r0", incarnation=1_700_000_000_000)
    assert outage.next_incarnation(driver.core.state, "r0") == 1_700_000_000_001
    driver.lost("r0")
    assert outage.next_incarnation(driver.core.state, "r0") == 1_700_000_000_001
    assert outage.next_incarnation(driver.core.state, "trainer-0") == 2
    assert outage.next_incarnation(driver.core.state, "r9") == 1
