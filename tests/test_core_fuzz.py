"""Whole runs of a seeded world with faults: they end, the ledger closes, nothing is trained twice, one version each."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from laminar.core import actions, ledger
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
}


def check_end(world: World) -> None:
    """What holds at the end of every run, however it went."""
    state = world.core.state
    assert ledger.is_closed(state.ledger.trajectories)
    assert ledger.is_closed(state.ledger.tokens)
    assert world.all(actions.FinishRun)[-1].reason == state.finished
    assert len(world.all(actions.FinishRun)) == 1
    trained = [t for _, rows in world.trained for t in rows]
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
    world = World(settings(**(SETTINGS[name] | shape)), seed, faults, replicas)
    world.stop_after = stop_after
    world.run()
    check_end(world)
