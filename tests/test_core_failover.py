"""Siblings whose replica was lost: another of their version, an old version from a relay or a checkpoint, or from the beginning."""

from core_world import Driver, of, settings

from laminar.core import actions, events
from laminar.core.records import ReplicaState
from laminar.core.relay_records import Failover
from laminar.ids import Version, WorkerId

V0, V1, V2 = Version(0, 0), Version(1, 0), Version(2, 0)
R1 = WorkerId("r1")


def one_on_v0_one_on_v1(**changes) -> tuple[Driver, list[int]]:
    """r0 generates two siblings of v0; r1 holds v1 and generates two of another group. v0 lies in the relay still."""
    base = {"local_batch_groups": 1, "batch_groups": 1, "buffer_groups_max": 3, "steps": 9, "restarts_max": 3}
    driver = Driver(settings(**(base | changes)))
    driver.start("r0", "r1")
    driver.complete_all("r1")
    driver.step_done()
    driver.ready(V1)
    driver.complete_all("r1")
    driver.refreshed("r1")
    here = driver.generating("r0")
    driver.report("r0", dict.fromkeys(here, 4))
    return driver, here


def failovers(driver: Driver) -> dict[str, int]:
    counts = driver.core.state.num_failovers
    names = ("same_version", "relay", "checkpoint", "restarted")
    return {name: getattr(counts, name) for name in names if getattr(counts, name)}


def pulls(new: list[actions.AnyAction]) -> list[tuple[str, Version, str]]:
    return [(a.worker, a.version, a.source) for a in of(new, actions.PullWeights)]


def continued(new: list[actions.AnyAction]) -> list[tuple[str, Version, list[tuple[int, int, bool]]]]:
    return [
        (a.worker, a.version, [(s.trajectory, s.attempt, s.resume) for s in a.starts])
        for a in of(new, actions.StartGroup)
        if any(s.resume for s in a.starts)
    ]


def test_another_replica_of_the_version_takes_them_at_once():
    driver = Driver(settings())
    driver.start("r0", "r1")
    here = driver.generating("r0")
    new = driver.lost("r0")
    assert {a.worker for a in of(new, actions.StartGroup)} == {"r1"}
    assert failovers(driver) == {"same_version": len(here)}


def test_without_one_an_almost_idle_replica_drains_pulls_the_old_version_and_continues_them():
    driver, here = one_on_v0_one_on_v1()
    assert pulls(driver.lost("r0")) == []
    assert driver.core.state.failovers == {R1: Failover(version=V0, source="relay")}
    new = driver.complete_all("r1")
    assert pulls(new) == [("r1", V0, "relay")]
    assert continued(driver.refreshed("r1")) == [("r1", V0, [(t, 2, True) for t in here])]
    assert failovers(driver) == {"relay": 2}


def test_it_admits_nothing_until_they_are_done_and_goes_back_to_the_newest():
    driver, _ = one_on_v0_one_on_v1()
    driver.lost("r0")
    new = [*driver.complete_all("r1"), *driver.refreshed("r1")]
    assert all(s.resume for a in of(new, actions.StartGroup) for s in a.starts)
    new = driver.complete_all("r1")
    assert pulls(new) == [("r1", V1, "relay")]
    assert driver.core.state.failovers == {}
    assert of(driver.refreshed("r1"), actions.StartGroup)


def test_a_busy_replica_is_not_taken_from_its_work():
    driver, here = one_on_v0_one_on_v1()
    driver.core.state.replicas[R1].num_requests_max = 8
    driver.lost("r0")
    assert driver.core.state.failovers == {}
    first, second = driver.generating("r1")
    driver.report("r1", {first: 1}, finish=[first])
    assert list(driver.core.state.failovers) == [R1], "one of eight places is almost idle"
    assert pulls(driver.report("r1", {second: 1}, finish=[second])) == [("r1", V0, "relay")]
    assert len(continued(driver.refreshed("r1"))[0][2]) == len(here)


def test_one_replica_at_most_pulls_an_old_version():
    driver, _ = one_on_v0_one_on_v1()
    driver.join("r2")
    driver.refreshed("r2")
    driver.lost("r0")
    assert len(driver.core.state.failovers) == 1
    new = [*driver.complete_all("r1"), *driver.complete_all("r2")]
    assert [version for _, version, _ in pulls(new)].count(V0) == 1


def test_the_lost_process_that_comes_back_is_the_first_choice_once_it_has_shown_that_it_works():
    driver, here = one_on_v0_one_on_v1()
    driver.core.state.replicas[R1].num_requests_max = 4
    driver.lost("r0")
    assert pulls(driver.join("r0", 2)) == [("r0", V1, "relay")], "out of quarantine"
    assert pulls(driver.refreshed("r0")) == [("r0", V0, "relay")]
    assert continued(driver.refreshed("r0")) == [("r0", V0, [(t, 2, True) for t in here])]


def test_they_start_again_when_the_relay_has_recycled_the_version():
    driver, here = one_on_v0_one_on_v1()
    driver.dropped(V0)
    new = driver.lost("r0")
    (again,) = [a for a in of(new, actions.StartGroup) if a.starts[0].trajectory == here[0]]
    assert (again.worker, again.version, [s.resume for s in again.starts]) == ("r1", V1, [False, False])
    assert failovers(driver) == {"restarted": 2}
    assert driver.core.state.ledger.tokens.dropped == {"version_gone": 8}


def test_a_pull_of_an_old_version_that_fails_is_not_tried_there_again():
    driver, _ = one_on_v0_one_on_v1()
    driver.lost("r0")
    driver.complete_all("r1")
    new = driver.send(
        events.ReplicaRefreshFailed(worker=R1, incarnation=1, version=V0, reason="v0 was recycled meanwhile")
    )
    assert pulls(new) == []
    assert driver.core.state.replicas[R1].num_failed_pulls == 0
    assert failovers(driver) == {"restarted": 2}


def test_a_recycled_version_lets_the_replica_that_was_to_pull_it_go():
    driver, _ = one_on_v0_one_on_v1()
    driver.lost("r0")
    driver.dropped(V0)
    assert driver.core.state.failovers == {}
    assert failovers(driver) == {"restarted": 2}


def test_a_lost_helper_is_replaced_by_another():
    driver, here = one_on_v0_one_on_v1()
    driver.join("r2")
    driver.refreshed("r2")
    driver.lost("r0")
    (helper,) = driver.core.state.failovers
    driver.complete_all(helper)
    driver.lost(helper)
    (other,) = driver.core.state.failovers
    assert other != helper
    assert pulls(driver.complete_all(other)) == [(other, V0, "relay")]
    assert (other, V0, [(t, 2, True) for t in here]) in continued(driver.refreshed(other))


def test_a_checkpoint_of_exactly_that_version_serves_when_no_relay_does():
    driver, here = one_on_v0_one_on_v1(checkpoint_pulls=True)
    driver.core.state.trainer.checkpoint_version = V0
    driver.dropped(V0)
    driver.lost("r0")
    assert pulls(driver.complete_all("r1")) == [("r1", V0, "checkpoint")]
    assert continued(driver.refreshed("r1")) == [("r1", V0, [(t, 2, True) for t in here])]
    assert failovers(driver) == {"checkpoint": 2}


def test_a_checkpoint_of_another_version_does_not():
    driver, _ = one_on_v0_one_on_v1(checkpoint_pulls=True)
    driver.core.state.trainer.checkpoint_version = V1
    driver.dropped(V0)
    driver.lost("r0")
    assert failovers(driver) == {"restarted": 2}


def test_a_saved_checkpoint_is_of_the_version_of_its_step():
    driver, _ = one_on_v0_one_on_v1(checkpoint_every=1)
    driver.saved()
    assert driver.core.state.trainer.checkpoint_version == V1


def test_what_could_not_be_trained_any_more_is_not_continued():
    driver, _ = one_on_v0_one_on_v1(max_staleness=0)
    driver.lost("r0")
    assert "relay" not in failovers(driver)
    assert driver.core.state.failovers == {}


def test_a_helper_that_has_nothing_newer_to_pull_is_a_replica_like_any_other_again():
    """The relay is gone when the siblings are done: it begins a local batch of the version that it holds."""
    driver, _ = one_on_v0_one_on_v1(relay_restarts_max=3)
    driver.lost("r0")
    driver.complete_all("r1")
    driver.refreshed("r1")
    driver.lost("relay-0")
    new = driver.complete_all("r1")
    assert driver.core.state.failovers == {}
    assert driver.core.state.replicas[R1].state == ReplicaState.GENERATING
    assert [a.version for a in of(new, actions.StartGroup)] == [V0]
