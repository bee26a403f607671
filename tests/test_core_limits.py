"""Settings that cannot work are refused before anything runs; a replica that cannot work, when it joins."""

import pytest
from core_world import Driver, of, settings

from laminar.core import actions, limits
from laminar.core.engine import Core
from laminar.errors import ConfigError

RULES = [
    ({"steps": 0}, "steps = 0"),
    ({"num_prompts": 0}, "no prompt could be drawn"),
    ({"group_size": 0}, "group_size = 0"),
    ({"batch_groups": 0}, "batch_groups = 0"),
    ({"local_batch_groups": 0}, "no replica would admit a group"),
    ({"batch_groups": 4, "buffer_groups_max": 3}, "a batch of batch_groups = 4 would never fill"),
    ({"on_incomplete": "train", "min_group_size": 3}, "min_group_size = 3: between 1 and group_size = 2"),
    ({"on_incomplete": "train", "min_group_size": 0}, "min_group_size = 0: between 1 and group_size = 2"),
    ({"max_staleness": -1}, "max_staleness = -1"),
    ({"draining_share": 0.0}, "draining_share = 0.0"),
    ({"refresh_policy": "continuous", "draining_share": 0.5}, "draining_share = 0.5 with progress_timeout_s = 0"),
    ({"repack_kv_share": 1.5}, "repack_kv_share = 1.5"),
    ({"drops_without_progress_max": 0}, "drops_without_progress_max"),
    ({"num_retries": -1}, "num_retries = -1"),
    ({"trainer_restarts_max": -1}, "trainer_restarts_max = -1"),
    ({"publish_timeout_s": 0.0}, "publish_timeout_s = 0.0: above 0"),
    ({"refresh_timeout_s": 0.0}, "refresh_timeout_s = 0.0: above 0"),
]


@pytest.mark.parametrize(("changes", "message"), RULES)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match="these settings cannot work") as caught:
        Core(settings(**changes))
    assert message in str(caught.value)


def test_the_smallest_legal_settings_are_accepted():
    least = settings(
        steps=1, group_size=1, batch_groups=1, local_batch_groups=1, buffer_groups_max=1, num_prompts=1, max_staleness=0,
        num_retries=0, drops_without_progress_max=1, min_group_size=1, on_incomplete="train",
    )  # fmt: skip
    assert limits.problems(least) == []


def test_a_replica_whose_kv_cache_cannot_hold_one_trajectory_is_refused_and_the_run_goes_on_without_it():
    driver = Driver(settings(trajectory_tokens_max=9_000))
    driver.start("r0")
    driver.core.settings = settings(trajectory_tokens_max=10_000)
    (stop,) = of(driver.join("r1"), actions.StopWorker)
    assert "its KV cache holds 10000 tokens, but one trajectory may need more than 10000" in stop.reason
    assert list(driver.core.state.replicas) == ["r0"]
    assert not driver.core.state.stopping


def test_a_run_whose_only_replica_is_refused_fails_with_the_reason():
    driver = Driver(settings(trajectory_tokens_max=10_000))
    driver.start()
    driver.join("r0")
    assert "its KV cache holds 10000 tokens" in driver.core.state.stopping


def test_a_group_larger_than_a_replica_decodes_at_once_runs_there_alone():
    driver = Driver(settings(group_size=4, local_batch_groups=4, buffer_groups_max=8))
    driver.start()
    driver.join("r0", requests=2)
    driver.refreshed("r0")
    assert len(driver.generating("r0")) == 4
