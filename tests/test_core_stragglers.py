"""Siblings that generate far longer than the others: waited for, or dropped by name; never a zero-reward row."""

import pytest
from core_world import Driver, World, of, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from laminar.core import actions, events, ledger
from laminar.core.engine import Core
from laminar.core.stragglers import median
from laminar.ids import WorkerId

FACTOR = 3.0


def driver(**changes) -> Driver:
    """One group of four at once on one replica."""
    base = dict(
        stragglers="drop", straggler_factor=FACTOR, group_size=4, min_group_size=2, batch_groups=1, local_batch_groups=1,
        buffer_groups_max=1, steps=5,
    )  # fmt: skip
    result = Driver(settings(**(base | changes)))
    result.start("r0")
    return result


def finish(d: Driver, trajectory: int, after: float = 0.0, name: str = "r0") -> list[actions.AnyAction]:
    d.at += after
    return d.report(name, {trajectory: 3}, finish=[trajectory], reward={trajectory: 1.0})


def test_the_group_goes_without_a_sibling_that_takes_too_long() -> None:
    d = driver()
    a, b, c, late = d.generating("r0")
    d.report("r0", {late: 50})
    for trajectory, after in ((a, 10.0), (b, 1.0), (c, 1.0)):
        finish(d, trajectory, after)
    began = d.core.state.trajectories[late].timings.queued
    assert d.core.next_deadline() == began + FACTOR * 11.0
    new = d.send(events.TimerFired(), after=began + FACTOR * 11.0 - d.at)
    assert (of(new, actions.AbortAttempts)[0].trajectories, of(new, actions.AbortAttempts)[0].attempts) == ([late], [1])
    assert d.core.state.ledger.trajectories.dropped == {"straggler": 1}
    assert d.core.state.ledger.tokens.dropped == {"straggler": 50}
    (record,) = of(new, actions.RecordTrajectories)
    assert [(t.id, t.dropped, t.reward) for t in record.trajectories] == [(late, "straggler", 0.0)]
    assert of(new, actions.ForgetTokens)[0].trajectories == [late]
    (step,) = of(new, actions.StartTrainStep)
    assert [row.trajectory for row in step.rows] == [a, b, c]


def test_a_report_that_ends_something_is_enough() -> None:
    d = driver(min_group_size=3)
    a, b, c, late = d.generating("r0")
    finish(d, a, 1.0)
    finish(d, b, 1.0)
    assert d.core.next_deadline() is None, "too few are done to say what is long"
    new = finish(d, c, 100.0)
    assert of(new, actions.AbortAttempts)[0].trajectories == [late]
    assert [row.trajectory for row in of(new, actions.StartTrainStep)[0].rows] == [a, b, c]


def test_by_default_it_is_waited_for() -> None:
    d = driver(stragglers="wait")
    a, b, c, late = d.generating("r0")
    for trajectory in (a, b, c):
        finish(d, trajectory, 1.0)
    assert d.core.next_deadline() is None
    assert of(finish(d, late, 1e6), actions.StartTrainStep)
    assert d.core.state.ledger.trajectories.dropped == {}


def test_a_sibling_whose_reward_is_missing_is_no_straggler() -> None:
    d = driver()
    a, b, c, late = d.generating("r0")
    d.report("r0", {late: 3}, finish=[late])
    for trajectory in (a, b, c):
        finish(d, trajectory, 1.0)
    assert d.core.next_deadline() is None
    d.report("r0", fail={late: ("infra", "reward_timeout")})
    assert d.core.next_deadline() is None, "its tokens are complete"
    assert of(d.report("r0", reward={late: 0.5}), actions.StartTrainStep)


def test_the_late_ones_are_dropped_together() -> None:
    d = driver()
    a, b, _late, _later = d.generating("r0")
    finish(d, a, 1.0)
    finish(d, b, 1.0)
    new = d.send(events.TimerFired(), after=10.0)
    assert [row.trajectory for row in of(new, actions.StartTrainStep)[0].rows] == [a, b]
    assert d.core.state.ledger.trajectories.dropped == {"straggler": 2}


def test_a_late_answer_of_a_dropped_sibling_changes_nothing() -> None:
    d = driver()
    a, b, late, later = d.generating("r0")
    finish(d, a, 1.0)
    finish(d, b, 1.0)
    d.send(events.TimerFired(), after=10.0)
    before = d.core.state.ledger.tokens.total
    d.report("r0", {late: 60}, finish=[], aborted=[late], attempts={late: 1})
    d.report("r0", {later: 60}, attempts={later: 1})
    assert d.core.state.ledger.tokens.total == before


def test_with_a_failed_sibling_the_rule_for_incomplete_groups_decides() -> None:
    for rule, started in (("drop", 0), ("train", 1)):
        d = driver(on_incomplete=rule)
        a, b, bad, _late = d.generating("r0")
        finish(d, a, 1.0)
        finish(d, b, 1.0)
        d.report("r0", fail={bad: ("data", "nan")})
        new = d.send(events.TimerFired(), after=10.0)
        assert len(of(new, actions.StartTrainStep)) == started
        assert d.core.state.ledger.trajectories.dropped["straggler"] == 1
        assert d.core.state.ledger.trajectories.dropped["nan"] == 1


def test_a_straggler_that_waits_for_a_replica_is_dropped_too() -> None:
    d = driver(restarts_max=1, restart_backoff_s=1000.0)
    a, b, _late, _later = d.generating("r0")
    finish(d, a, 1.0)
    finish(d, b, 1.0)
    d.lost("r0")
    new = d.send(events.TimerFired(), after=10.0)
    assert of(new, actions.AbortAttempts) == []
    assert [row.trajectory for row in of(new, actions.StartTrainStep)[0].rows] == [a, b]
    assert d.core.state.requeue == {}


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    times=st.lists(st.floats(0.1, 1000.0), min_size=8, max_size=8),
    factor=st.floats(1.0, 8.0),
    least=st.integers(2, 8),
)
def test_who_is_dropped_took_longer_than_the_factor_times_the_median_and_enough_are_left(times, factor, least) -> None:
    d = driver(group_size=8, min_group_size=least, straggler_factor=factor)
    start = d.core.state.at
    for took, trajectory in sorted(zip(times, d.generating("r0"), strict=True)):
        while (due := d.core.next_deadline()) is not None and due <= start + took:
            d.send(events.TimerFired(), after=max(0.0, due - d.at))
        if not of(d.actions, actions.StartTrainStep):
            finish(d, trajectory, after=max(0.0, start + took - d.at))
    (step,) = of(d.actions, actions.StartTrainStep)[:1]
    dropped = d.core.state.ledger.trajectories.dropped.get("straggler", 0)
    assert len(step.rows) + dropped == 8
    assert len(step.rows) >= least
    kept, late = sorted(times)[: len(step.rows)], sorted(times)[len(step.rows) :]
    assert all(took >= factor * median(kept) - 1e-3 for took in late)


@pytest.mark.parametrize("seed", range(25))
def test_random_worlds_that_drop_stragglers_end_with_closed_books_also_from_snapshots(seed) -> None:
    shape = dict(group_size=4, straggler_factor=1.0 + seed % 3, repack_interval_s=0.5, steps=5)
    world = World(settings(stragglers="drop", **shape), seed, faults=0.05 * (seed % 3))
    world.restore_each = seed % 4
    world.run()
    assert ledger.is_closed(world.core.state.ledger.trajectories)
    assert ledger.is_closed(world.core.state.ledger.tokens)
    trained = [t for _, rows in world.trained for t in rows]
    assert len(set(trained)) == len(trained)
    for started in world.all(actions.StartTrainStep):
        sizes = [sum(row.group == group for row in started.rows) for group in {row.group for row in started.rows}]
        assert all(2 <= size <= 4 for size in sizes)


def test_random_worlds_do_drop_stragglers() -> None:
    dropped = 0
    for seed in range(10):
        world = World(settings(stragglers="drop", straggler_factor=1.0, group_size=4, steps=5), seed)
        world.run()
        assert (world.core.state.finished, world.core.state.ok) == ("completed", True)
        dropped += world.core.state.ledger.trajectories.dropped.get("straggler", 0)
    assert dropped


def test_the_timer_survives_a_snapshot() -> None:
    d = driver()
    a, b, *_ = d.generating("r0")
    finish(d, a, 1.0)
    finish(d, b, 1.0)
    again = Core.restore(d.core.settings, d.core.snapshot())
    assert again.next_deadline() == d.core.next_deadline() is not None
    assert WorkerId("r0") in again.state.replicas
