"""Where two mechanisms of the core meet: health and refresh, relays and replicas, drains and losses, failover and quarantine."""

import pytest
from core_world import Driver, of, settings
from test_core_failover import R1, one_on_v0_one_on_v1, pulls
from test_core_refresh import fleet, with_a_second_version
from test_core_relays import V0, V1, chained

from laminar.core import actions, events, limits
from laminar.ids import WorkerId

R0, R2 = WorkerId("r0"), WorkerId("r2")


def drain(driver: Driver, name: str) -> list[actions.AnyAction]:
    return driver.send(events.DrainRequested(worker=WorkerId(name)))


def hang(driver: Driver, name: str, timeout_s: float) -> None:
    """The replica runs something, gives nothing, and is suspect; all others report progress."""
    for _ in range(3):
        driver.at += timeout_s / 2
        for other in list(driver.core.state.replicas):
            here = driver.generating(other)
            if other != name and here:
                records = driver.core.state.trajectories
                driver.report(other, {t: records[t].num_tokens + 1 for t in here}, running=len(here))
        driver.report(name, running=1)
        driver.send(events.TimerFired())
    assert driver.core.state.replicas[WorkerId(name)].suspect


# ---- relays and replicas -----------------------------------------------------------------------------------


def test_a_host_whose_relay_is_given_up_while_it_starts_is_served_by_the_masters_at_once() -> None:
    driver = chained("a1", "a2", relay_restarts_max=1)
    driver.ready(V0)
    driver.lost("relay-a2")
    driver.join("r0", host="a2")
    driver.send(events.TimerFired(), after=10.0)
    assert [a.worker for a in driver.all(actions.StartWorker)] == ["relay-a2"]
    assert not driver.all(actions.PullWeights), "its own relay may come back"
    new = driver.send(events.WorkerLost(worker=WorkerId("relay-a2"), incarnation=0, reason="did not start"))
    assert pulls(new) == [("r0", V0, "relay")]


def test_what_drains_is_chosen_again_when_a_relay_joins_a_host_that_had_none() -> None:
    policy = {"refresh_policy": "continuous", "draining_share": 0.5, "progress_timeout_s": 1e6}
    driver = chained("a1", **policy, buffer_groups_max=16, steps=9)
    driver.ready(V0)
    for name, host in (("r0", "b1"), ("r1", "a1")):
        driver.join(name, requests=4, host=host)
        driver.refreshed(name)
    with_a_second_version(driver, "r1")
    driver.complete_all("r1")
    driver.refreshed("r1")
    assert list(driver.core.state.draining_to_refresh) == ["r0"]
    driver.relay("relay-b1", host="b1", rack="b")
    assert list(driver.core.state.draining_to_refresh) == [], "its relay has nothing newer, nor anything at all"


# ---- health and refresh ------------------------------------------------------------------------------------


def test_a_replica_that_an_operator_takes_out_holds_up_no_refresh() -> None:
    driver = fleet("continuous", "r0", "r1", "r2", draining_share=0.34, buffer_groups_max=16)
    with_a_second_version(driver, "r0")
    (first,) = driver.core.state.draining_to_refresh
    drain(driver, first)
    (second,) = driver.core.state.draining_to_refresh
    assert second != first


def test_a_suspect_replica_holds_up_no_refresh() -> None:
    timeout_s = 8.0
    driver = fleet(
        "continuous", "r0", "r1", "r2", draining_share=0.34, buffer_groups_max=16, progress_timeout_s=timeout_s
    )
    with_a_second_version(driver, "r0")
    (first,) = driver.core.state.draining_to_refresh
    hang(driver, first, timeout_s)
    (second,) = driver.core.state.draining_to_refresh
    assert second != first


def test_a_replica_that_serves_an_old_version_holds_up_no_refresh() -> None:
    driver, _ = one_on_v0_one_on_v1(restarts_max=0)
    driver.lost("r0")
    driver.complete_all("r1")
    driver.refreshed("r1")
    driver.core.settings = settings(refresh_policy="continuous", steps=9)
    driver.join("r2", requests=4)
    driver.refreshed("r2")
    assert (driver.core.state.replicas[R1].version, list(driver.core.state.failovers)) == (V0, [R1])
    assert list(driver.core.state.draining_to_refresh) == []


def test_one_that_was_suspect_pulls_the_newest_version_before_it_serves_an_old_one() -> None:
    timeout_s = 8.0
    driver, _ = one_on_v0_one_on_v1(progress_timeout_s=timeout_s)
    driver.lost("r0")
    assert list(driver.core.state.failovers) == [R1]
    hang(driver, "r1", timeout_s)
    assert not driver.core.state.failovers, "another may serve it"
    assert pulls(driver.complete_all("r1")) == [("r1", V1, "relay")]


def test_what_starts_again_does_not_keep_a_replica_from_its_refresh() -> None:
    driver = fleet("continuous", "r0", "r1", "r2", draining_share=0.34, buffer_groups_max=16)
    with_a_second_version(driver, "r0")
    for _ in range(2):
        (name,) = driver.core.state.draining_to_refresh
        driver.complete_all(name)
        driver.refreshed(name)
    (last,) = driver.core.state.draining_to_refresh
    driver.step_done()
    driver.ready(driver.all(actions.PublishVersion)[-1].version)
    driver.dropped(V0)
    new = driver.lost(last)
    (draining,) = driver.core.state.draining_to_refresh
    again = [start.worker for start in of(new, actions.StartGroup)]
    assert again
    assert draining not in again


# ---- leaving and being lost --------------------------------------------------------------------------------


def test_a_replica_that_was_to_leave_stays_when_the_last_other_one_is_lost() -> None:
    driver = Driver(settings(local_batch_groups=2, buffer_groups_max=8, steps=9))
    driver.start("r0", "r1")
    drain(driver, "r0")
    new = driver.lost("r1")
    assert [alarm.name for alarm in of(new, actions.RaiseAlarm)] == ["drain-refused"]
    assert of(driver.complete_all("r0"), actions.StopWorker) == []
    assert not driver.core.state.stopping


def test_it_leaves_when_the_lost_one_is_to_be_started_again_and_the_run_fails_when_that_comes_to_nothing() -> None:
    driver = Driver(settings(local_batch_groups=2, buffer_groups_max=8, steps=9, restarts_max=1))
    driver.start("r0", "r1")
    drain(driver, "r0")
    driver.lost("r1")
    while driver.core.state.replicas:
        driver.complete_all("r0")
    assert not driver.core.state.stopping
    driver.send(events.TimerFired(), after=100.0)
    driver.send(events.WorkerLost(worker=R1, incarnation=0, reason="did not start"))
    assert driver.core.state.stopping.startswith("no rollout replica is left")


def test_word_of_a_process_that_was_given_up_says_nothing_of_the_one_being_started() -> None:
    driver = Driver(settings(restarts_max=1))
    driver.start("r0", "r1")
    driver.lost("r0")
    driver.send(events.TimerFired(), after=100.0)
    assert [a.worker for a in driver.all(actions.StartWorker)] == ["r0"]
    driver.send(events.WorkerLost(worker=R0, incarnation=1, reason="killed"))
    assert not driver.core.state.restarts[R0].evicted
    driver.join("r0", incarnation=2)
    assert R0 in driver.core.state.replicas


def test_nothing_is_started_or_awaited_after_the_end() -> None:
    driver = Driver(settings(restarts_max=3, steps=1))
    driver.start("r0", "r1")
    driver.send(events.WorkerDisconnected(worker=R1, incarnation=1))
    driver.complete_all("r0")
    driver.step_done()
    driver.saved()
    assert driver.core.state.finished == "completed"
    assert driver.core.next_deadline() is None
    assert driver.send(events.TimerFired(), after=1000.0) == []


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"ready_groups_max": 1, "batch_groups": 2},
        {"ready_groups_max": -1},
        {"progress_timeout_s": -1.0},
        {"relay_restarts_max": -1},
        {"staleness_budget": -0.5},
        {"stragglers": "drop", "min_group_size": 0},
        {"stragglers": "drop", "straggler_factor": 0.0},
    ],
)
def test_settings_with_which_a_run_would_stand_still_or_break_are_refused(changes: dict[str, object]) -> None:
    (text,) = limits.problems(settings(**changes))
    assert next(iter(changes)) in text or "min_group_size" in text or "straggler_factor" in text


# ---- samplers that wait ------------------------------------------------------------------------------------


def starved(**changes: object) -> Driver:
    """Two groups are complete and the custom sampler waits for a third, which r0 generates."""
    driver = Driver(settings(**({"custom_sampler": True, "buffer_groups_max": 3, "local_batch_groups": 3} | changes)))
    driver.start("r0")
    first, second, third = ([t for t in driver.generating("r0") if t % 6 in pair] for pair in ((1, 2), (3, 4), (5, 0)))
    done = [*first, *second]
    driver.report("r0", dict.fromkeys(done, 3), finish=done, reward=dict.fromkeys(done, 1.0))
    assert len(driver.core.state.buffer) == 2
    assert driver.generating("r0") == third
    (ask,) = driver.all(actions.AskSampler)
    driver.send(events.SamplerAnswered(request=ask.request, groups=[]))
    assert driver.core.state.sampler_starved
    return driver


def test_a_sampler_that_waits_for_a_group_which_is_dropped_does_not_wait_for_ever() -> None:
    driver = starved(ready_groups_max=2)
    data_failure = ("data", "reward_error")
    new = driver.report("r0", fail=dict.fromkeys(driver.generating("r0"), data_failure))
    assert [alarm.name for alarm in of(new, actions.RaiseAlarm)] == ["sampler"]
    assert len(of(new, actions.StartTrainStep)) == 1, "no other group can begin while two complete ones wait"


def test_a_sampler_that_waits_is_left_alone_while_another_group_may_begin() -> None:
    driver = starved()
    new = driver.report("r0", fail=dict.fromkeys(driver.generating("r0"), ("data", "reward_error")))
    assert of(new, actions.StartGroup)
    assert driver.core.state.sampler_starved
