"""The named policies: every one runs to its end in a small world, and does what its name says."""

from dataclasses import replace

import pytest
from test_sim_world import SHORT, scenario

from laminar.sim.policies import POLICIES, RECOMMENDED
from laminar.sim.scenario import simulate


@pytest.mark.parametrize("name", POLICIES)
def test_every_named_policy_trains_whole_batches_to_the_end(name: str) -> None:
    chosen = scenario(workload=replace(SHORT, median=200.0), iterations=4).under(POLICIES[name])
    world, found = simulate(chosen)
    assert found["ok"]
    assert found["finished"] == "measured"
    assert world.core.settings.refresh_policy == POLICIES[name].refresh
    for key, value in POLICIES[name].core.items():
        assert getattr(world.core.settings, key) == value
    if "2" in name.split():
        assert found["s_train_max"] <= 2


def test_the_ready_limit_is_in_batches() -> None:
    chosen = scenario(batch_groups=8).under(POLICIES[RECOMMENDED])
    assert chosen.settings(chosen.cluster()).ready_groups_max == 8
