"""Versions: publication, retries, timeouts, branches, staleness."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core import actions, events, versions
from laminar.core.trainer_records import Branch
from laminar.ids import Version, WorkerId
from tests.core_world import Driver, of, settings


def started(*replicas: str, **changes) -> Driver:
    driver = Driver(settings(**changes))
    driver.start(*replicas)
    return driver


def unpublished(**changes) -> Driver:
    """The trainer and the relay are there, v0 is being published."""
    driver = Driver(settings(**changes))
    driver.send(events.RunStarted(boot=1))
    driver.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
    driver.rank()
    return driver


def lost(driver: Driver, version: Version) -> list[actions.AnyAction]:
    return driver.send(events.VersionLost(version=version, reason="digest"))


def test_the_first_weights_are_published_when_trainer_and_relay_are_there_in_either_order():
    for relay_first in (True, False):
        driver = Driver(settings())
        driver.send(events.RunStarted(boot=1))
        steps = [lambda d=driver: d.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1)), driver.rank]
        for step in steps if relay_first else reversed(steps):
            assert not driver.all(actions.PublishVersion)
            step()
        assert [action.version for action in driver.all(actions.PublishVersion)] == [Version(0, 0)]


def test_every_step_makes_a_version_and_its_publication_comes_before_the_next_step():
    driver = started("r0", batch_groups=1, buffer_groups_max=4)
    driver.complete_all("r0")
    new = driver.step_done()
    kinds = [type(a).__name__ for a in new if isinstance(a, actions.PublishVersion | actions.StartTrainStep)]
    assert kinds == ["PublishVersion", "StartTrainStep"]


def test_the_newest_version_wins_although_an_older_one_becomes_ready_later():
    driver = started("r0", batch_groups=1, buffer_groups_max=4, local_batch_groups=1)
    driver.complete_all("r0")
    driver.step_done()
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(Version(2, 0))
    driver.ready(Version(1, 0))
    assert versions.newest(driver.core.state).version == Version(2, 0)
    driver.complete_all("r0")
    assert [a.version for a in driver.all(actions.PullWeights)][-1] == Version(2, 0)


def test_a_lost_publication_is_tried_again_while_the_trainer_holds_the_version():
    driver = unpublished()
    assert [a.version for a in of(lost(driver, Version(0, 0)), actions.PublishVersion)] == [Version(0, 0)]


def tried_again(driver: Driver) -> list[actions.AnyAction]:
    """What the core does when the pause before the next try is over."""
    at = driver.core.state.versions[-1].retry_at
    assert at == driver.core.next_deadline()
    return driver.send(events.TimerFired(), after=at - driver.at)


def test_a_publication_that_fails_is_tried_again_at_once_and_then_after_longer_and_longer_pauses():
    driver = unpublished()
    assert len(of(lost(driver, Version(0, 0)), actions.PublishVersion)) == 1
    for pause_s in (1.0, 5.0):
        new = lost(driver, Version(0, 0))
        assert not of(new, actions.PublishVersion | actions.FinishRun)
        assert f"until it is tried again in {pause_s:g} s" in of(new, actions.RaiseAlarm)[0].text
        assert driver.core.state.versions[-1].retry_at == driver.at + pause_s
        assert not of(driver.send(events.TimerFired(), after=pause_s / 2), actions.PublishVersion)
        assert len(of(tried_again(driver), actions.PublishVersion)) == 1
        assert driver.core.state.versions[-1].retry_at == 0.0
    (end,) = of(lost(driver, Version(0, 0)), actions.FinishRun)
    assert not end.ok
    assert "could not be published after 4 tries: digest" in end.reason


def test_the_fourth_try_may_succeed():
    driver = unpublished()
    lost(driver, Version(0, 0))
    for _ in range(2):
        lost(driver, Version(0, 0))
        tried_again(driver)
    driver.ready(Version(0, 0))
    assert versions.newest(driver.core.state).version == Version(0, 0)
    assert not driver.core.state.stopping


def test_a_relay_that_joins_ends_the_pause():
    driver = unpublished()
    lost(driver, Version(0, 0))
    lost(driver, Version(0, 0))
    assert of(driver.relay("relay-1", host="b"), actions.PublishVersion)
    assert driver.core.state.versions[-1].retry_at == 0.0


def test_a_step_that_begins_in_the_pause_leaves_the_version_to_the_next_one():
    driver = started("r0")
    driver.complete_all("r0")
    driver.step_done()
    assert not driver.core.state.trainer.running
    lost(driver, Version(1, 0))
    lost(driver, Version(1, 0))
    driver.complete_all("r0")
    assert driver.core.state.trainer.running == 2
    assert not of(tried_again(driver), actions.PublishVersion)
    assert [a.version for a in of(driver.step_done(), actions.PublishVersion)] == [Version(2, 0)]


def test_a_trainer_that_is_lost_in_the_pause_is_not_asked_again():
    driver = unpublished(trainer_restarts_max=1)
    lost(driver, Version(0, 0))
    lost(driver, Version(0, 0))
    driver.lost("trainer-0/0")
    assert driver.core.state.versions[-1].retry_at == 0.0


def test_a_version_that_is_lost_while_the_next_step_runs_is_skipped_with_an_alarm():
    driver = started("r0", batch_groups=1, buffer_groups_max=4)
    driver.complete_all("r0")
    driver.step_done()
    new = lost(driver, Version(1, 0))
    assert not of(new, actions.PublishVersion)
    assert ["v1 was not published" in a.text for a in of(new, actions.RaiseAlarm)] == [True]
    assert versions.newest(driver.core.state).version == Version(0, 0)
    assert [a.version for a in of(driver.step_done(), actions.PublishVersion)] == [Version(2, 0)]


def test_a_publication_without_an_answer_is_given_up_in_time_and_tried_again():
    driver = unpublished(publish_timeout_s=60.0)
    assert driver.core.next_deadline() == 60.0
    new = driver.send(events.TimerFired(), after=60.0)
    assert [a.version for a in of(new, actions.PublishVersion)] == [Version(0, 0)]
    assert driver.core.next_deadline() == 120.0


def test_an_answer_that_comes_after_its_time_still_counts():
    driver = unpublished(publish_timeout_s=60.0)
    driver.send(events.TimerFired(), after=60.0)
    driver.ready(Version(0, 0))
    assert driver.core.next_deadline() is None
    assert lost(driver, Version(0, 0)) == [], "the loss of the second try does not unpublish it"
    assert versions.newest(driver.core.state).version == Version(0, 0)


def test_words_about_an_unknown_version_are_ignored():
    driver = started()
    assert driver.ready(Version(7, 3)) == []
    assert lost(driver, Version(7, 3)) == []
    assert driver.send(events.ShardsWritten(version=Version(7, 3), stall_s=0.1)) == []


def test_the_shards_are_no_promise_that_the_version_is_readable():
    driver = unpublished()
    driver.send(events.ShardsWritten(version=Version(0, 0), stall_s=0.1))
    assert versions.newest(driver.core.state) is None


def test_the_readable_version_is_kept_however_many_are_lost_after_it():
    driver = started("r0", batch_groups=1, buffer_groups_max=1, steps=200, local_batch_groups=1, publish_timeout_s=1e-6)
    for _ in range(80):
        driver.complete_all("r0")
        driver.step_done()
    assert len(driver.core.state.versions) == versions.RECORDS_MAX
    assert versions.newest(driver.core.state).version == Version(0, 0)
    assert driver.generating("r0")


def test_what_a_replica_begins_under_old_weights_has_their_digest_however_long_no_relay_is_there():
    driver = started("r0", batch_groups=1, buffer_groups_max=1, steps=200, local_batch_groups=1, relay_restarts_max=3)
    driver.lost("relay-0")
    for _ in range(2 * versions.RECORDS_MAX):
        driver.complete_all("r0")
        driver.step_done()
    began = [driver.core.state.trajectories[trajectory] for trajectory in driver.generating("r0")]
    assert began
    assert all((each.behavior_version, each.digest) == (Version(0, 0), "dv0") for each in began)
    assert len(driver.core.state.versions) == versions.RECORDS_MAX


def drained_during_publication() -> Driver:
    """v1 is being published while the only replica has nothing left to generate."""
    driver = started("r0", batch_groups=1, buffer_groups_max=4, local_batch_groups=1, steps=9, await_publication_s=2.0)
    driver.ready(Version(0, 0))
    driver.complete_all("r0")
    driver.step_done()
    driver.complete_all("r0")
    assert driver.generating("r0") == []
    return driver


def test_a_drained_replica_waits_a_moment_for_the_version_under_way():
    driver = drained_during_publication()
    assert [a.version for a in of(driver.ready(Version(1, 0)), actions.PullWeights)] == [Version(1, 0)]


def test_a_drained_replica_does_not_wait_longer_than_configured():
    driver = drained_during_publication()
    assert driver.core.next_deadline() == driver.at + 2.0
    new = driver.send(events.TimerFired(), after=2.0)
    assert [a.version for a in of(new, actions.StartGroup)] == [Version(0, 0)]


def test_a_drained_replica_does_not_wait_for_a_version_that_was_lost():
    driver = drained_during_publication()
    new = lost(driver, Version(1, 0)) + lost(driver, Version(1, 0)) + lost(driver, Version(1, 0))
    assert [a.version for a in of(new, actions.StartGroup)] == [Version(0, 0)]


# ---- branches ----------------------------------------------------------------------------------------------


def test_the_first_launch_is_branch_zero():
    assert started().core.state.trainer.branch == 0


def test_a_process_that_follows_a_dead_one_begins_at_its_branch_floor():
    driver = Driver(settings())
    driver.start(branch_floor=4)
    assert driver.all(actions.PublishVersion)[0].version == Version(0, 4)


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (Version(5, 0), Version(3, 0), 2),
        (Version(5, 1), Version(3, 0), 2),  # the fork at 4 has 3 in common
        (Version(6, 1), Version(5, 0), 2),  # 5 was redone: the last common step is 4
        (Version(4, 1), Version(6, 0), 0),  # never below zero
        (Version(9, 2), Version(6, 1), 7),  # the second fork at 2 is the last common step
        (Version(9, 2), Version(8, 2), 1),
    ],
)
def test_staleness_across_restores_counts_from_the_last_common_step(new, old, expected):
    branches = [Branch(branch=1, fork_step=4), Branch(branch=2, fork_step=2)]
    assert versions.staleness(branches, new, old) == expected


@given(st.integers(0, 50), st.integers(0, 50), st.lists(st.integers(0, 50), max_size=5))
def test_staleness_is_never_negative_and_zero_only_for_what_is_contained(new_step, old_step, forks):
    branches = [Branch(branch=i + 1, fork_step=fork) for i, fork in enumerate(forks)]
    new, old = Version(new_step, len(forks)), Version(old_step, 0)
    common = min([old_step, *forks])
    assert versions.staleness(branches, new, old) == max(0, new_step - common)
