"""An operator takes a replica out of a running job."""

from core_world import Driver, World, of, settings

from laminar.core import actions, events
from laminar.ids import Version, WorkerId

R0 = WorkerId("r0")


def drain(driver: Driver, name: str) -> list[actions.AnyAction]:
    return driver.send(events.DrainRequested(worker=WorkerId(name)))


def two_replicas() -> Driver:
    driver = Driver(settings(local_batch_groups=2, buffer_groups_max=8, steps=9, restarts_max=2))
    driver.start("r0", "r1")
    return driver


def test_a_drained_replica_finishes_what_it_has_and_leaves() -> None:
    driver = two_replicas()
    assert driver.generating("r0")
    assert not of(drain(driver, "r0"), actions.StopWorker)
    new = driver.complete_all("r0")
    assert [(a.worker, a.reason) for a in of(new, actions.StopWorker)] == [("r0", "drained")]
    assert not [start for start in of(new, actions.StartGroup) if start.worker == "r0"]
    assert driver.core.state.ledger.trajectories.dropped == {}


def test_a_replica_with_a_reward_to_come_waits_for_it() -> None:
    driver = two_replicas()
    drain(driver, "r0")
    here = driver.generating("r0")
    assert not of(driver.report("r0", {t: 2 for t in here}, finish=here), actions.StopWorker)
    assert of(driver.report("r0", reward={t: 1.0 for t in here}), actions.StopWorker)


def test_an_idle_replica_leaves_at_once_and_is_not_started_again() -> None:
    driver = two_replicas()
    driver.complete_all("r0")
    driver.complete_all("r1")
    driver.join("r2")
    assert of(drain(driver, "r2"), actions.StopWorker)
    driver.send(events.WorkerLost(worker=WorkerId("r2"), incarnation=1, reason="said goodbye"))
    assert driver.core.state.restarts == {}
    assert not driver.core.state.stopping


def test_a_drained_replica_pulls_no_newer_weights() -> None:
    driver = two_replicas()
    driver.complete_all("r1")
    drain(driver, "r0")
    driver.step_done()
    assert not [pull for pull in of(driver.ready(Version(1, 0)), actions.PullWeights) if pull.worker == "r0"]


def test_the_last_replica_is_not_drained() -> None:
    driver = Driver(settings())
    driver.start("r0")
    assert [a.name for a in of(drain(driver, "r0"), actions.RaiseAlarm)] == ["drain-refused"]
    assert not driver.core.state.replicas[R0].draining
    assert "no such replica" in of(drain(driver, "r9"), actions.RaiseAlarm)[0].text


def test_random_worlds_end_after_a_drain() -> None:
    for seed in range(20):
        world = World(settings(steps=4, repack_interval_s=0.5), seed, faults=0.05)
        world._take(world._begin())
        while not world.core.state.finished:
            assert world.seq < 20_000
            world.at += 0.05
            if world.seq == 30:
                world._take(drain(world, "r1"))
                continue
            world._take(world._next())
