"""Whole runs of a seeded world with faults: they end, the ledger closes, nothing is trained twice, one version each."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from laminar.core import actions, ledger, limits
from tests.core_relay_world import RelayWorld
from tests.core_world import World, settings

SETTINGS = {
    "plain": {},
    "evaluate": {"evaluate": True},
    "checkpoints": {"checkpoint_every": 1, "steps": 5},
    "train_incomplete": {"on_incomplete": "train", "group_size": 3},
    "mixed": {"group_versions": "mixed", "group_size": 3},
    "small_local_batch": {"local_batch_groups": 1, "buffer_groups_max": 2},
    "large": {"batch_groups": 4, "buffer_groups_max": 12, "local_batch_groups": 3},
    "sampler": {"custom_sampler": True},
    "sampler_evaluate": {"custom_sampler": True, "evaluate": True, "checkpoint_every": 2},
    "awaits_publications": {"await_publication_s": 1.0, "evaluate": True},
    "few_prompts": {"num_prompts": 3},
    "hangs": {"progress_timeout_s": 1.0, "repack_interval_s": 0.5},
    "hangs_evaluate": {"progress_timeout_s": 1.0, "evaluate": True, "restarts_max": 3},
    "continuous": {"refresh_policy": "continuous", "draining_share": 0.34, "steps": 5, "progress_timeout_s": 1.0},
    "rolling": {"refresh_policy": "rolling", "staleness_budget": 0.5, "steps": 5, "repack_interval_s": 0.5},
    "parts": {"repack_policy": "parts", "repack_interval_s": 0.3, "group_size": 4, "refresh_policy": "continuous"},
    "pinned": {"pinned": True, "repack_interval_s": 0.3, "group_size": 3, "progress_timeout_s": 1.0},
    "ready_limit": {"ready_groups_max": 2, "refresh_policy": "rolling", "on_stale": "wait", "max_staleness": 2},
}


def check_end(world: World) -> None:
    """What holds at the end of every run, however it went."""
    state = world.core.state
    assert ledger.is_closed(state.ledger.trajectories)
    assert ledger.is_closed(state.ledger.tokens)
    assert world.all(actions.FinishRun)[-1].reason == state.finished
    assert len(world.all(actions.FinishRun)) == 1
    trained = [t for rows in [*(rows for _, rows in world.trained), *world.lost_rows] for t in rows]
    assert len(set(trained)) == len(trained), "a trajectory was trained twice"
    for start in world.all(actions.StartTrainStep):
        for group in {row.group for row in start.rows}:
            versions = {row.behavior_version for row in start.rows if row.group == group}
            assert len(versions) == 1 or world.core.settings.group_versions == "mixed"
    assert not state.ledger.trajectories.in_flight
    assert not state.ledger.trajectories.buffered


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_without_faults_trains_all_steps_and_wastes_nothing(name):
    for seed in range(12):
        world = World(settings(**SETTINGS[name]), seed)
        world.run()
        check_end(world)
        state = world.core.state
        assert (state.finished, state.ok) == ("completed", True)
        assert [step for step, _ in world.trained] == list(range(1, world.core.settings.steps + 1))
        account = state.ledger.trajectories
        assert account.total == account.committed, f"seed {seed}: {account}"
        if world.core.settings.evaluate:
            assert [e.name for e in state.evaluations if e.done] == ["before", "after"]
            assert state.evaluations[1].version.step == world.core.settings.steps


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("faults", [0.02, 0.15])
def test_a_run_with_faults_ends_with_a_closed_ledger(name, faults):
    for seed in range(12):
        world = World(settings(**SETTINGS[name]), seed, faults)
        world.run()
        check_end(world)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_operator_who_holds_and_skips_does_not_break_a_run(name):
    for seed in range(12):
        world = World(settings(**SETTINGS[name]), seed, faults=0.1)
        world.operator = True
        world.run()
        check_end(world)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    faults=st.sampled_from([0.0, 0.05, 0.3]),
    stop_after=st.integers(0, 150),
    replicas=st.integers(1, 5),
    group_size=st.integers(1, 4),
    batch_groups=st.integers(1, 4),
    extra_groups=st.integers(0, 4),
    local_batch_groups=st.integers(1, 4),
    name=st.sampled_from(sorted(SETTINGS)),
)
def test_any_run_stopped_at_any_time_ends_with_a_closed_ledger(
    seed, faults, stop_after, replicas, group_size, batch_groups, extra_groups, local_batch_groups, name
):
    shape = {
        "group_size": group_size,
        "min_group_size": 1,
        "batch_groups": batch_groups,
        "buffer_groups_max": batch_groups + extra_groups,
        "local_batch_groups": local_batch_groups,
    }
    if "ready_groups_max" in SETTINGS[name]:
        shape["ready_groups_max"] = batch_groups
    world = World(settings(**(SETTINGS[name] | shape)), seed, faults, replicas)
    world.stop_after = stop_after
    world.run()
    check_end(world)


# ---- everything at once ------------------------------------------------------------------------------------

ANY_SETTINGS = {
    "steps": st.integers(1, 6),
    "group_size": st.integers(1, 4),
    "batch_groups": st.integers(1, 3),
    "local_batch_groups": st.integers(1, 3),
    "refresh_policy": st.sampled_from(["batch", "continuous", "rolling"]),
    "draining_share": st.sampled_from([0.2, 0.5, 1.0]),
    "staleness_budget": st.sampled_from([0.0, 0.5, 2.0]),
    "repack_interval_s": st.sampled_from([0.0, 0.3]),
    "repack_policy": st.sampled_from(["whole", "parts"]),
    "pinned": st.booleans(),
    "stragglers": st.sampled_from(["wait", "drop"]),
    "straggler_factor": st.sampled_from([0.5, 2.0]),
    "min_group_size": st.just(1),
    "on_incomplete": st.sampled_from(["drop", "train"]),
    "group_versions": st.sampled_from(["regenerate", "mixed"]),
    "max_staleness": st.sampled_from([None, 0, 1, 3]),
    "on_stale": st.sampled_from(["drop", "wait"]),
    "custom_sampler": st.booleans(),
    "evaluate": st.booleans(),
    "checkpoint_every": st.integers(0, 2),
    "checkpoint_pulls": st.booleans(),
    "await_publication_s": st.sampled_from([0.0, 0.5]),
    "progress_timeout_s": st.sampled_from([0.0, 1.0]),
    "restart_backoff_s": st.just(0.01),
    "restarts_max": st.sampled_from([0, 2, 50]),
    "relay_restarts_max": st.sampled_from([0, 2, 50]),
    "trainer_restarts_max": st.sampled_from([0, 2, 50]),
}


THAT_MAY_WORK = st.fixed_dictionaries(ANY_SETTINGS).filter(lambda chosen: not limits.problems(settings(**chosen)))


@hypothesis_settings(max_examples=250, deadline=None)
@given(
    chosen=THAT_MAY_WORK,
    extra_groups=st.integers(0, 4),
    ready_batches=st.sampled_from([0, 1, 2]),
    world=st.sampled_from([World, RelayWorld]),
    seed=st.integers(0, 2**32),
    faults=st.sampled_from([0.0, 0.05, 0.2]),
    replicas=st.integers(1, 5),
    stop_after=st.sampled_from([0, 0, 60]),
    disk_fills=st.booleans(),
    operator=st.booleans(),
    checkpoints_break=st.booleans(),
)
def test_no_combination_of_settings_faults_and_operators_stands_still_or_breaks_the_books(
    chosen: dict[str, Any],
    extra_groups: int,
    ready_batches: int,
    world: type[World],
    seed: int,
    faults: float,
    replicas: int,
    stop_after: int,
    disk_fills: bool,
    operator: bool,
    checkpoints_break: bool,
) -> None:
    batch = chosen["batch_groups"]
    buffer = {"buffer_groups_max": batch + extra_groups, "ready_groups_max": batch * ready_batches}
    run = world(settings(**(chosen | buffer)), seed, faults, replicas)
    run.stop_after, run.disk_fills, run.operator = stop_after, disk_fills, operator
    run.checkpoints_break = checkpoints_break
    run.run()
    check_end(run)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    chosen=THAT_MAY_WORK,
    world=st.sampled_from([World, RelayWorld]),
    seed=st.integers(0, 2**32),
    restore_each=st.integers(1, 20),
)
def test_a_core_restored_from_its_snapshot_goes_on_the_same(
    chosen: dict[str, Any], world: type[World], seed: int, restore_each: int
) -> None:
    logs = []
    for each in (0, restore_each):
        run = world(settings(**chosen), seed, 0.1)
        run.restore_each, run.disk_fills, run.operator = each, True, True
        run.run()
        logs.append(run.log)
    assert logs[0] == logs[1]
