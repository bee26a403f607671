"""Replicas: joining, refreshing, loss, silence. Events in, actions out."""

import pytest

from laminar.core import actions, events
from laminar.core.records import ReplicaState
from laminar.ids import Version, WorkerId
from tests.core_world import Driver, of, settings

R0 = WorkerId("r0")


def started(*replicas: str, **changes) -> Driver:
    driver = Driver(settings(**changes))
    driver.start(*(replicas or ("r0",)))
    return driver


def pulled(new: list[actions.AnyAction]) -> list[tuple[str, Version]]:
    return [(action.worker, action.version) for action in of(new, actions.PullWeights)]


def stopped(new: list[actions.AnyAction]) -> list[tuple[str, int]]:
    return [(action.worker, action.incarnation) for action in of(new, actions.StopWorker)]


def refresh_failed(driver: Driver, name: str = "r0") -> list[actions.AnyAction]:
    replica = driver.core.state.replicas[WorkerId(name)]
    assert replica.target is not None
    return driver.send(
        events.ReplicaRefreshFailed(
            worker=replica.id, incarnation=replica.incarnation, version=replica.target, reason="slot recycled"
        )
    )


def v1_ready(driver: Driver) -> list[actions.AnyAction]:
    driver.step_done()
    return driver.ready(Version(1, 0))


def test_a_replica_pulls_the_newest_version_as_soon_as_it_joins():
    driver = started()
    assert pulled(driver.join("r1")) == [("r1", Version(0, 0))]


def test_a_replica_that_joins_before_the_first_version_waits_for_it():
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    assert driver.join("r0") == []
    driver.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
    driver.rank()
    assert pulled(driver.ready(Version(0, 0))) == [("r0", Version(0, 0))]


def test_the_pull_names_the_digest_of_the_version():
    assert [action.digest for action in started().all(actions.PullWeights)] == ["dv0"]


def test_a_replica_is_refreshed_only_when_nothing_generates():
    driver = started(batch_groups=1, local_batch_groups=2)
    first, second, third, fourth = driver.generating("r0")
    driver.report("r0", {first: 1, second: 1}, finish=[first, second], reward={first: 1.0, second: 0.0})
    assert pulled(v1_ready(driver)) == []
    assert pulled(driver.report("r0", {third: 1}, finish=[third])) == []
    assert pulled(driver.report("r0", {fourth: 1}, finish=[fourth])) == [("r0", Version(1, 0))]


def test_rewards_arrive_while_the_replica_pulls():
    driver = started(batch_groups=1, local_batch_groups=2)
    first, second, third, fourth = driver.generating("r0")
    driver.report("r0", {first: 1, second: 1}, finish=[first, second], reward={first: 1.0, second: 0.0})
    v1_ready(driver)
    driver.report("r0", {third: 1, fourth: 1}, finish=[third, fourth])
    assert driver.core.state.replicas[R0].state == ReplicaState.SYNCING
    assert of(driver.report("r0", reward={third: 1.0, fourth: 1.0}), actions.StartTrainStep)


def test_a_replica_waits_for_its_queued_siblings_before_it_gives_up_their_version():
    driver = started("r0", batch_groups=1, local_batch_groups=2)
    first, second, third, fourth = driver.generating("r0")
    driver.report("r0", {first: 1, second: 1}, finish=[first, second], reward={first: 1.0, second: 0.0})
    v1_ready(driver)
    new = driver.report("r0", {third: 2, fourth: 2}, finish=[third], fail={fourth: ("infra", "engine_error")})
    assert pulled(new) == []
    assert [(a.version, a.starts[0].trajectory) for a in of(new, actions.StartGroup)] == [(Version(0, 0), fourth)]


def test_a_replica_with_nothing_newer_to_pull_begins_another_local_batch_of_its_version():
    driver = started(local_batch_groups=1, batch_groups=3, buffer_groups_max=6)
    here = driver.generating("r0")
    new = driver.report("r0", dict.fromkeys(here, 1), finish=here)
    assert pulled(new) == []
    assert [a.version for a in of(new, actions.StartGroup)] == [Version(0, 0)]


def test_a_local_batch_is_not_exceeded_while_it_generates():
    driver = started(local_batch_groups=2, batch_groups=4, buffer_groups_max=8)
    here = driver.generating("r0")
    assert len(here) == 4
    assert not of(driver.report("r0", {here[0]: 1}, finish=here[:1]), actions.StartGroup)


def test_a_replica_never_holds_more_requests_than_it_can_decode():
    driver = Driver(settings(local_batch_groups=8, buffer_groups_max=8, batch_groups=4))
    driver.start()
    driver.join("r0", requests=5)
    driver.refreshed("r0")
    assert len(driver.generating("r0")) == 4, "groups of 2: the fifth place stays free"
    here = driver.generating("r0")
    assert len(of(driver.report("r0", {here[0]: 1, here[1]: 1}, finish=here[:2]), actions.StartGroup)) == 1


def test_a_group_larger_than_the_replica_still_starts():
    driver = Driver(settings(group_size=8))
    driver.start()
    driver.join("r0", requests=4)
    assert of(driver.refreshed("r0"), actions.StartGroup)


def test_new_groups_go_to_the_least_loaded_replica():
    driver = started("r0", "r1", "r2", local_batch_groups=2, batch_groups=6, buffer_groups_max=6)
    assert [len(driver.generating(name)) for name in ("r0", "r1", "r2")] == [4, 4, 4]


# ---- joining and losing ------------------------------------------------------------------------------------


def test_joining_twice_changes_nothing():
    driver = started()
    assert driver.join("r0") == []
    assert len(driver.generating("r0")) == 4


def test_an_older_incarnation_is_stopped_and_the_newer_one_goes_on():
    driver = Driver(settings())
    driver.start()
    driver.join("r0", incarnation=5)
    driver.refreshed("r0")
    assert stopped(driver.join("r0", incarnation=4)) == [("r0", 4)]
    assert driver.core.state.replicas[R0].incarnation == 5


def test_an_incarnation_that_was_declared_lost_is_stopped_when_it_returns():
    driver = started("r0", "r1")
    assert stopped(driver.lost("r0")) == [("r0", 1)]
    assert stopped(driver.join("r0", incarnation=1)) == [("r0", 1)]
    assert R0 not in driver.core.state.replicas
    assert pulled(driver.join("r0", incarnation=2)) == [("r0", Version(0, 0))]


def test_a_new_process_takes_the_place_of_the_only_replica_and_the_run_goes_on():
    driver = started()
    here = driver.generating("r0")
    driver.report("r0", dict.fromkeys(here, 2))
    new = driver.join("r0", incarnation=2)
    assert stopped(new) == [("r0", 1)]
    assert pulled(new) == [("r0", Version(0, 0))]
    assert not driver.core.state.stopping
    again = of(driver.refreshed("r0"), actions.StartGroup)
    assert sorted(s.trajectory for a in again for s in a.starts if s.resume) == sorted(here)


def test_the_loss_of_the_last_replica_ends_the_run_with_the_reason():
    (end,) = of(started().lost("r0"), actions.FinishRun)
    assert not end.ok
    assert "no rollout replica is left; the last one, r0, was lost: killed" in end.reason


def test_the_loss_of_an_older_process_changes_nothing():
    driver = started()
    assert driver.lost("r0", incarnation=0) == []
    assert R0 in driver.core.state.replicas


def test_a_worker_that_dies_before_it_joined_ends_the_run_with_its_name():
    (end,) = of(started().lost("r9", incarnation=1), actions.FinishRun)
    assert "r9 did not start: killed" in end.reason


def test_a_lost_replica_is_lost_once():
    driver = started("r0", "r1")
    driver.lost("r0")
    assert driver.lost("r0", incarnation=1) == []


@pytest.mark.parametrize("kind", ["report", "refreshed", "refresh_failed", "returned", "disconnected"])
def test_what_a_lost_replica_still_said_changes_nothing(kind):
    driver = started("r0", "r1")
    t = driver.generating("r0")[0]
    driver.lost("r0")
    late = {
        "report": events.ReplicaReported(
            worker=R0,
            incarnation=1,
            trajectories=t.to_bytes(8, "little"),
            attempts=(1).to_bytes(4, "little"),
            num_tokens=(7).to_bytes(4, "little"),
        ),
        "refreshed": events.ReplicaRefreshed(worker=R0, incarnation=1, version=Version(0, 0), digest="", wait_s=0.0),
        "refresh_failed": events.ReplicaRefreshFailed(worker=R0, incarnation=1, version=Version(0, 0), reason="x"),
        "returned": events.WorkerReturned(worker=R0, incarnation=1),
        "disconnected": events.WorkerDisconnected(worker=R0, incarnation=1),
    }[kind]
    assert driver.send(late) == []
    assert R0 not in driver.core.state.replicas
    assert not driver.core.state.silent
    assert driver.core.state.ledger.tokens.total == 0


def test_a_finished_run_is_not_failed_by_workers_that_leave():
    driver = started(steps=1)
    driver.complete_all("r0")
    driver.step_done()
    driver.saved()
    new = driver.lost("r0") + driver.lost("trainer-0/0") + driver.lost("relay-0", 1)
    assert not of(new, actions.RaiseAlarm)
    assert (driver.core.state.finished, driver.core.state.ok) == ("completed", True)


# ---- pulls that fail ---------------------------------------------------------------------------------------


def test_a_failed_pull_is_tried_again_with_the_newest_version():
    driver = started(batch_groups=1, local_batch_groups=1)
    driver.complete_all("r0")
    v1_ready(driver)
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(Version(2, 0))
    assert pulled(refresh_failed(driver)) == [("r0", Version(2, 0))]


def test_three_failed_pulls_in_a_row_lose_the_replica():
    driver = started("r0")
    driver.join("r1")
    refresh_failed(driver, "r1")
    refresh_failed(driver, "r1")
    assert stopped(refresh_failed(driver, "r1")) == [("r1", 1)]
    assert "3 pulls in a row failed, the last: slot recycled" in driver.all(actions.StopWorker)[-1].reason


def test_a_pull_that_succeeds_resets_the_count():
    driver = started("r0")
    driver.join("r1")
    refresh_failed(driver, "r1")
    driver.refreshed("r1")
    assert driver.core.state.replicas[WorkerId("r1")].num_failed_pulls == 0


def test_a_refresh_of_another_version_than_asked_for_is_ignored():
    driver = started()
    driver.join("r1")
    event = events.ReplicaRefreshed(worker=WorkerId("r1"), incarnation=1, version=Version(9, 0), digest="", wait_s=0.0)
    assert driver.send(event) == []
    assert driver.core.state.replicas[WorkerId("r1")].state == ReplicaState.SYNCING


def test_a_pull_without_an_answer_loses_the_replica_when_its_time_is_up():
    driver = started("r0", refresh_timeout_s=30.0)
    driver.join("r1")
    deadline = driver.core.next_deadline()
    assert deadline == driver.at + 30.0
    assert driver.send(events.TimerFired(), after=29.0) == []
    new = driver.send(events.TimerFired(), after=1.0)
    assert stopped(new) == [("r1", 1)]
    assert driver.core.next_deadline() is None


# ---- silence -----------------------------------------------------------------------------------------------


def disconnect(driver: Driver, name: str) -> list[actions.AnyAction]:
    return driver.send(events.WorkerDisconnected(worker=WorkerId(name), incarnation=1))


def test_a_silent_replica_gets_no_work_and_is_lost_after_the_grace():
    driver = started("r0", "r1", reconnect_grace_s=20.0, batch_groups=4, buffer_groups_max=8)
    disconnect(driver, "r0")
    assert driver.core.next_deadline() == 20.0
    here = driver.generating("r0")
    new = driver.report("r0", dict.fromkeys(here, 1), finish=here, reward=dict.fromkeys(here, 1.0))
    assert not [a for a in of(new, actions.StartGroup) if a.worker == "r0"]
    assert stopped(driver.send(events.TimerFired(), after=20.0)) == [("r0", 1)]
    assert driver.core.next_deadline() is None


def test_a_replica_that_returns_in_time_goes_on_as_if_nothing_had_been():
    driver = started("r0", "r1", batch_groups=4, buffer_groups_max=8)
    disconnect(driver, "r0")
    here = driver.generating("r0")
    driver.report("r0", dict.fromkeys(here, 1), finish=here, reward=dict.fromkeys(here, 1.0))
    new = driver.send(events.WorkerReturned(worker=R0, incarnation=1), after=5.0)
    assert [a.worker for a in of(new, actions.StartGroup)] == ["r0", "r0"]
    assert driver.core.next_deadline() is None


def test_a_timer_that_fires_too_early_does_nothing():
    driver = started("r0", "r1")
    disconnect(driver, "r0")
    assert driver.send(events.TimerFired(), after=1.0) == []


def test_the_trainers_silence_ends_the_run_once_although_two_ranks_are_silent():
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    driver.rank(0, world_size=2)
    driver.rank(1, world_size=2)
    disconnect(driver, "trainer-0/0")
    disconnect(driver, "trainer-0/1")
    new = driver.send(events.TimerFired(), after=60.0)
    assert len(of(new, actions.FinishRun)) == 1
    assert driver.core.next_deadline() is None


def test_time_never_runs_backwards():
    driver = started("r0")
    driver.at = 50.0
    driver.send(events.TimerFired())
    driver.at = 40.0
    driver.send(events.TimerFired())
    assert driver.core.state.at == 50.0


def test_an_event_out_of_order_is_a_bug_of_the_driver():
    driver = started()
    with pytest.raises(AssertionError, match="event 99 after"):
        driver.core.handle(events.TimerFired(seq=99, at=0.0))
