"""Every combination of values that cannot work is refused at start, with the keys that have to change."""

from typing import Any

import msgspec
import pytest

from laminar.config import Config, ModelConfig
from laminar.configrules import check
from laminar.errors import ConfigError


def with_values(values: dict[str, Any]) -> Config:
    config = Config(model=ModelConfig(path="model"))
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed = msgspec.structs.replace(getattr(config, section), **{name: value})
        config = msgspec.structs.replace(config, **{section: changed})
    return config


RULES = [
    ({"model.path": ""}, "model.path is empty"),
    ({"model.context_tokens_max": -1}, "model.context_tokens_max = -1: 0 or more"),
    ({"model.context_tokens_max": 512}, "responses of rollout.max_tokens = 512 leave no room for a prompt"),
    ({"run.steps": 0}, "run.steps = 0: at least one step"),
    ({"controller.advertise": "http://me"}, 'controller.advertise = "http://me": a host name or an address alone'),
    ({"controller.advertise": "me:80"}, 'controller.advertise = "me:80": a host name or an address alone'),
    ({"controller.ssh": " "}, 'controller.ssh = " ": a command line is expected'),
    ({"controller.ssh": "ssh 'x"}, 'controller.ssh = "ssh \'x": a command line is expected'),
    ({"controller.port": 99999}, "controller.port = 99999: at most 65535, or 0 for any free one"),
    ({"controller.port": -1}, "controller.port = -1: at most 65535, or 0 for any free one"),
    ({"trainer.lr": -1e-5}, "trainer.lr = -1e-05: 0 or more"),
    ({"trainer.weight_decay": -0.1}, "trainer.weight_decay = -0.1: 0 or more"),
    ({"trainer.warmup_updates": -1}, "trainer.warmup_updates = -1: 0 or more"),
    ({"trainer.grad_clip": -1.0}, "trainer.grad_clip = -1.0: 0 or more"),
    ({"trainer.betas": (0.9, 1.0)}, "trainer.betas = [0.9,1.0]: both from 0 to below 1"),
    ({"algorithm.clip_low": 1.5}, "algorithm.clip_low = 1.5: between 0 and 1"),
    ({"algorithm.clip_high": -0.1}, "algorithm.clip_high = -0.1: 0 or more"),
    ({"rollout.canary_tolerance": -0.5}, "rollout.canary_tolerance = -0.5: above 0, 0 for no check, or -1"),
    ({"task.reward_delay_median_s": -1.0}, "task.reward_delay_median_s = -1.0: 0 or more"),
    (
        {"task.reward_delay_p99_s": 5.0},
        "task.reward_delay_p99_s = 5.0 means nothing without task.reward_delay_median_s",
    ),
    ({"task.reward_delay_median_s": 2.0, "task.reward_delay_p99_s": 1.0}, "not below task.reward_delay_median_s = 2.0"),
    ({"task.size": 0}, "task.size = 0: 1 or more"),
    ({"task.reward_workers": 0}, "task.reward_workers = 0: 1 or more"),
    ({"task.eval_prompts": -1}, "task.eval_prompts = -1: 0 or more"),
    ({"task.reward_timeout_s": 0.0}, "task.reward_timeout_s = 0.0: above 0"),
    ({"task.agent": "a", "task.agent_timeout_s": 0.0}, "task.agent_timeout_s = 0.0: above 0"),
    ({"task.agent": "a", "task.agent_memory_mb": -1}, "task.agent_memory_mb = -1: 0 or more"),
    ({"task.agent": "a 'b"}, 'task.agent = "a \'b" is no command line: No closing quotation'),
    ({"task.agent": " "}, 'task.agent = " ": there is no command in it'),
    ({"task.on_rewrite": "refuse"}, 'task.on_rewrite = "refuse" means nothing without task.agent'),
    ({"task.agent_env": ["X"]}, 'task.agent_env = ["X"] means nothing without task.agent'),
    ({"task.agent": ["a"], "trainer.packing": "group"}, 'trainer.packing = "group" is not for a task.agent: siblings'),
    (
        {"task.agent": ["a"], "repack.policy": "parts"},
        'repack.policy = "parts" is not for a task.agent: agents are not',
    ),
    ({"rollout.group_size": 1}, "rollout.group_size = 1: GRPO compares siblings"),
    ({"rollout.max_tokens": 0}, "rollout.max_tokens = 0: at least 1"),
    ({"rollout.max_concurrent": 0}, "rollout.max_concurrent = 0: 1 or more"),
    ({"rollout.local_batch_groups": -1}, "rollout.local_batch_groups = -1: 0 or more"),
    ({"rollout.num_retries": -1}, "rollout.num_retries = -1: 0 or more"),
    ({"rollout.restarts": -1}, "rollout.restarts = -1: 0 or more"),
    ({"rollout.await_publication_s": -1.0}, "rollout.await_publication_s = -1.0: 0 or more"),
    ({"rollout.draining_share": 0.0}, "rollout.draining_share must be between 0 (excluded) and 1"),
    ({"rollout.draining_share": 1.1}, "rollout.draining_share must be between 0 (excluded) and 1"),
    ({"rollout.temperature": 0.0}, "rollout.temperature = 0.0"),
    ({"rollout.flush_interval_s": 0.0}, "rollout.flush_interval_s must be above 0"),
    ({"rollout.length_floor_median": 50, "rollout.length_floor_p99": 10}, "below rollout.length_floor_median = 50"),
    ({"repack.interval_s": 0.0}, "repack.enabled = false turns it off"),
    ({"repack.kv_share": 0.0}, "repack.kv_share = 0.0: between 0 (excluded) and 1"),
    ({"repack.requests_max": -1}, "repack.requests_max = -1: 0 or more"),
    ({"buffer.max_groups": 63}, "a batch of trainer.batch_prompts = 64 would never fill"),
    ({"buffer.max_groups": -1}, "buffer.max_groups = -1: 0 or more"),
    ({"buffer.max_staleness": -2}, "buffer.max_staleness = -2: 0 or more, or -1 for no bound"),
    ({"buffer.on_stale": "wait"}, 'buffer.on_stale = "wait" means nothing without a bound: set buffer.max_staleness'),
    ({"buffer.min_group_size": 9}, "buffer.min_group_size = 9: between 2 and rollout.group_size = 8"),
    ({"buffer.min_group_size": 1}, "buffer.min_group_size = 1: between 2 and rollout.group_size = 8"),
    ({"buffer.on_incomplete": "train", "buffer.min_group_size": 8}, "buffer.min_group_size = 8 is the whole group"),
    ({"buffer.sampler_budget_ms": 0.0}, "buffer.sampler_budget_ms = 0.0: above 0"),
    ({"buffer.stragglers": "drop", "buffer.min_group_size": 8}, 'buffer.stragglers = "drop" means nothing'),
    ({"buffer.straggler_factor": 2.0}, 'straggler_factor = 2.0 means nothing without buffer.stragglers = "drop"'),
    ({"buffer.max_ready_groups": 63}, "a batch of trainer.batch_prompts = 64 would never fill"),
    ({"buffer.max_ready_groups": 192}, "never reached, new groups are held back at 192 in flight or buffered"),
    ({"rollout.staleness_budget": 1.0}, 'means nothing without rollout.refresh_policy = "rolling"'),
    ({"rollout.draining_share": 0.5}, 'means nothing without rollout.refresh_policy = "continuous"'),
    ({"repack.policy": "parts", "repack.enabled": False}, "means nothing without repack.enabled = true"),
    ({"trainer.batch_prompts": 0, "trainer.mini_batches": 0}, "trainer.batch_prompts = 0: at least 1"),
    ({"trainer.mini_batches": 65}, "trainer.mini_batches = 65: between 1 and trainer.batch_prompts = 64"),
    ({"trainer.micro_batch_tokens": 0}, "trainer.micro_batch_tokens = 0: 1 or more"),
    ({"trainer.checkpoint_every": -1}, "trainer.checkpoint_every = -1: 0 or more"),
    ({"trainer.restarts": -1}, "trainer.restarts = -1: 0 or more"),
    ({"trainer.keep_last": 0}, "trainer.keep_last = 0: keep at least the newest checkpoint"),
    ({"relay.slots": 1}, "relay.slots = 1: at least 2"),
    ({"relay.chunk_mib": 65}, "relay.chunk_mib = 65: from 1 to 64, or 0 to have it chosen"),
    ({"relay.rate_limit_mbit": -1.0}, "relay.rate_limit_mbit = -1.0: 0 or more"),
    ({"relay.streams": 0}, "relay.streams = 0: between 1 and 16"),
    ({"relay.streams": 4, "relay.transport": "ucx"}, 'relay.streams = 4 means nothing without relay.transport = "tcp"'),
    ({"relay.require_rdma": True}, 'cannot be had with relay.transport = "tcp"'),
    ({"controller.heartbeat_s": 0.0}, "controller.heartbeat_s = 0.0: above 0"),
    ({"controller.heartbeat_timeout_s": 4.0}, "must be more than twice controller.heartbeat_s"),
    ({"controller.start_timeout_s": 0.0}, "controller.start_timeout_s = 0.0: above 0"),
]


@pytest.mark.parametrize(("values", "message"), RULES)
def test_what_cannot_work_is_refused_with_the_keys_that_have_to_change(values, message):
    with pytest.raises(ConfigError, match=r"the configuration cannot work:\n  ") as caught:
        check(with_values(values))
    assert message in str(caught.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        check(with_values({"run.steps": 0, "relay.slots": 1}))
    assert "run.steps" in str(caught.value)
    assert "relay.slots" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"buffer.max_groups": 64},
        {"buffer.max_staleness": 0, "buffer.on_stale": "wait"},
        {"buffer.max_staleness": 0, "buffer.on_stale": "drop", "rollout.refresh_policy": "continuous"},
        {"rollout.max_concurrent": 1},
        {"rollout.local_batch_groups": 1000, "buffer.max_groups": 64},
        {"rollout.draining_share": 0.001, "rollout.refresh_policy": "continuous"},
        {"buffer.on_incomplete": "train", "buffer.min_group_size": 2},
        {"rollout.num_retries": 0, "rollout.restarts": 0, "trainer.checkpoint_every": 0},
    ],
)
def test_what_is_only_unusual_is_accepted(values):
    """That such runs come to their end is shown by the seed sweep (`laminar.sim.sweep`)."""
    config = with_values(values)
    assert check(config) is config
