"""Lost replicas are started again, a bounded number of times."""

import pytest
from core_world import Driver, World, of, settings

from laminar.core import actions, events
from laminar.core.recovery import RESET_S
from laminar.ids import WorkerId

R0 = WorkerId("r0")


def driver(restarts: int = 2) -> Driver:
    result = Driver(settings(restarts_max=restarts, restart_backoff_s=1.0))
    result.start("r0", "r1")
    return result


def ended_before_it_joined(d: Driver, incarnation: int = 0) -> list[actions.AnyAction]:
    return d.send(events.WorkerLost(worker=R0, incarnation=incarnation, reason="bad weights"))


def test_a_lost_replica_is_started_again_after_a_pause_that_doubles() -> None:
    d = driver()
    assert not of(d.lost("r0"), actions.StartWorker), "not at once"
    assert [a.worker for a in of(d.send(events.TimerFired(), after=1.0), actions.StartWorker)] == [R0]
    ended_before_it_joined(d)
    assert not of(d.send(events.TimerFired(), after=1.0), actions.StartWorker)
    assert of(d.send(events.TimerFired(), after=1.0), actions.StartWorker)


def test_one_that_keeps_dying_is_given_up_and_named() -> None:
    d = driver(restarts=1)
    d.lost("r0")
    d.send(events.TimerFired(), after=1.0)
    new = ended_before_it_joined(d)
    assert [a.name for a in of(new, actions.RaiseAlarm)] == ["worker-evicted"]
    assert d.core.next_deadline() is None
    assert not d.core.state.stopping, "the other replica goes on"


@pytest.mark.parametrize("incarnation", [0, 7])
def test_a_restart_that_fails_is_counted_once_however_often_it_is_reported(incarnation: int) -> None:
    d = driver(restarts=3)
    d.lost("r0")
    d.send(events.TimerFired(), after=1.0)
    ended_before_it_joined(d, incarnation)
    ended_before_it_joined(d, incarnation)
    assert d.core.state.restarts[R0].num == 2
    assert not d.core.state.stopping


def test_the_run_waits_for_its_only_replica_to_come_back_and_fails_when_it_does_not() -> None:
    d = Driver(settings(restarts_max=1))
    d.start("r0")
    d.lost("r0")
    assert not d.core.state.stopping
    d.send(events.TimerFired(), after=1.0)
    ended_before_it_joined(d)
    assert "no rollout replica is left" in d.core.state.stopping


def test_a_replica_that_is_back_goes_on_with_what_was_interrupted() -> None:
    d = Driver(settings(restarts_max=1, group_versions="regenerate"))
    d.start("r0")
    interrupted = d.generating("r0")
    d.lost("r0")
    d.send(events.TimerFired(), after=1.0)
    d.join("r0", incarnation=2)
    d.refreshed("r0")
    assert set(interrupted) <= set(d.generating("r0"))


def test_crashes_far_apart_are_not_added_up() -> None:
    d = driver(restarts=1)
    d.lost("r0")
    d.send(events.TimerFired(), after=1.0)
    d.join("r0", incarnation=2)
    d.refreshed("r0")
    d.at += RESET_S + 1
    d.complete_all("r0")
    d.lost("r0")
    assert of(d.send(events.TimerFired(), after=1.0), actions.StartWorker)


def test_to_have_lived_without_work_forgives_nothing() -> None:
    d = driver(restarts=1)
    d.lost("r0")
    d.send(events.TimerFired(), after=1.0)
    d.join("r0", incarnation=2)
    d.refreshed("r0")
    d.at += RESET_S + 1
    new = d.lost("r0")
    assert [a.name for a in of(new, actions.RaiseAlarm)] == ["worker-evicted"]


def test_nothing_is_started_again_while_the_run_ends() -> None:
    d = driver()
    d.send(events.StopRequested(reason="asked"))
    d.lost("r0")
    assert d.core.state.restarts == {}


def test_random_worlds_with_restarts_end_with_closed_books() -> None:
    restarted = 0
    for seed in range(25):
        world = World(settings(restarts_max=2, steps=5, repack_interval_s=0.5), seed, faults=0.1)
        world.run()
        restarted += len(world.all(actions.StartWorker))
    assert restarted
