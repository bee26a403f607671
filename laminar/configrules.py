"""Which configurations cannot work, or would silently do nothing: `check` names the keys and what to write.

What depends on more than the configuration is checked where it is known: `laminar.core.limits` (settings of the core, a replica's
KV capacity), `laminar.controller.plan` (hosts).
"""

import re
import shlex
from typing import Any

import msgspec

from laminar.config import Config, TaskConfig
from laminar.errors import ConfigError


def check(config: Config) -> Config:
    """`config` itself. Raises ConfigError for a combination that cannot work, naming the keys."""
    problems = (
        _out_of_range(config)
        + _without_effect(config)
        + _agent_problems(config)
        + [message for failed, message in _rules(config) if failed]
    )
    if problems:
        raise ConfigError("the configuration cannot work:\n  " + "\n  ".join(problems))
    return config


PARTNERS: tuple[tuple[str, str, Any], ...] = (
    ("rollout.draining_share", "rollout.refresh_policy", "continuous"),
    ("rollout.staleness_budget", "rollout.refresh_policy", "rolling"),
    ("repack.policy", "repack.enabled", True),
    ("buffer.straggler_factor", "buffer.stragglers", "drop"),
    ("relay.streams", "relay.transport", "tcp"),
)
"""(a key, the key and the value without which it has no effect)."""


def _without_effect(c: Config) -> list[str]:
    """Keys that were changed in vain."""
    return [
        f"{key} = {_shown(_value(c, key))} means nothing without {partner} = {_shown(needed)}"
        for key, partner, needed in PARTNERS
        if _value(c, key) != _value(Config(), key) and _value(c, partner) != needed
    ]


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_LEAST: dict[str, int] = {
    "model.context_tokens_max": 0,
    "task.size": 1,
    "task.reward_workers": 1,
    "task.agent_memory_mb": 0,
    "task.reward_delay_median_s": 0,
    "task.eval_prompts": 0,
    "rollout.max_concurrent": 1,
    "rollout.local_batch_groups": 0,
    "rollout.num_retries": 0,
    "rollout.await_publication_s": 0,
    "rollout.length_floor_median": 0,
    "rollout.length_floor_p99": 0,
    "buffer.max_groups": 0,
    "trainer.lr": 0,
    "trainer.weight_decay": 0,
    "trainer.warmup_updates": 0,
    "trainer.grad_clip": 0,
    "trainer.checkpoint_every": 0,
    "trainer.keep_every": 0,
    "trainer.restarts": 0,
    "trainer.step_timeout_s": 0,
    "controller.stall_after_s": 0,
    "trainer.micro_batch_tokens": 1,
    "algorithm.clip_high": 0,
    "relay.rate_limit_mbit": 0,
    "log.max_mib": 0,
}
"""Smallest value that means something."""
_POSITIVE = (
    "task.reward_timeout_s", "task.agent_timeout_s", "task.eval_timeout_s", "buffer.sampler_budget_ms", "controller.heartbeat_s",
    "controller.orphan_timeout_s", "controller.start_timeout_s", "log.commit_s",
)  # fmt: skip
"""Time limits: at 0 whatever they limit would be given up before it began."""


def _out_of_range(c: Config) -> list[str]:
    values = {key: _value(c, key) for key in (*_LEAST, *_POSITIVE)}
    low = [f"{key} = {values[key]}: {least} or more" for key, least in _LEAST.items() if values[key] < least]
    return low + [f"{key} = {values[key]}: above 0" for key in _POSITIVE if values[key] <= 0]


def _value(c: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(c, section), name)


SAMPLER_BUDGET_MS_MAX = 1000  # less than it takes to call a sampler hung (`laminar.samplers.HANG_S`)
_OF_AGENTS = ("agent_timeout_s", "agent_model", "agent_env", "agent_metadata", "agent_memory_mb", "on_rewrite")
_NOT_WITH_AGENTS = {
    "trainer.packing": "siblings need not have the same prompt",
    "rollout.length_floor_median": "an answer ends where the agent's call says",
    "repack.interval_s": "agents are not moved",
    "repack.policy": "agents are not moved",
    "repack.kv_share": "agents are not moved",
    "repack.requests_max": "agents are not moved",
}
"""Keys that would have no effect, or a wrong one, and why."""


def _agent_problems(c: Config) -> list[str]:
    if not c.task.agent:
        changed = [f"task.{name}" for name in _OF_AGENTS if getattr(c.task, name) != getattr(TaskConfig(), name)]
        return [f"{key} = {_shown(_value(c, key))} means nothing without task.agent" for key in changed]
    vain = [key for key in _NOT_WITH_AGENTS if _value(c, key) != _value(Config(), key)]
    problems = [
        f"{key} = {_shown(_value(c, key))} is not for a task.agent: {_NOT_WITH_AGENTS[key]}; leave it out"
        for key in vain
    ]
    try:
        if not c.task.agent_command:
            problems.append(f"task.agent = {_shown(c.task.agent)}: there is no command in it")
    except ValueError as error:
        problems.append(f"task.agent = {_shown(c.task.agent)} is no command line: {error}")
    return problems


_Rules = list[tuple[bool, str]]


def _rules(c: Config) -> _Rules:
    """(whether it is broken, what to say) of each."""
    return [
        *_run_rules(c),
        *_rollout_rules(c),
        *_repack_rules(c),
        *_trainer_rules(c),
        *_buffer_rules(c),
        *_relay_rules(c),
        *_controller_rules(c),
    ]


def _run_rules(c: Config) -> _Rules:
    return [
        (
            not c.model.path,
            "model.path is empty: name a directory with a Hugging Face model, in the file of --config or as model.path=DIR",
        ),
        (c.run.steps < 1, f"run.steps = {c.run.steps}: at least one step"),
        (
            0 < c.task.reward_delay_p99_s < c.task.reward_delay_median_s or c.task.reward_delay_p99_s < 0,
            f"task.reward_delay_p99_s = {c.task.reward_delay_p99_s}: not below task.reward_delay_median_s ="
            f" {c.task.reward_delay_median_s}",
        ),
        (
            c.task.reward_delay_p99_s > 0 and not c.task.reward_delay_median_s,
            f"task.reward_delay_p99_s = {c.task.reward_delay_p99_s} means nothing without task.reward_delay_median_s",
        ),
        (
            0 < c.model.context_tokens_max <= c.rollout.max_tokens,
            f"model.context_tokens_max = {c.model.context_tokens_max}: responses of rollout.max_tokens ="
            f" {c.rollout.max_tokens} leave no room for a prompt",
        ),
    ]


def _rollout_rules(c: Config) -> _Rules:
    return [
        (
            c.rollout.group_size < 2,
            f"rollout.group_size = {c.rollout.group_size}: GRPO compares siblings, a group of one has no advantage;"
            " use 2 or more",
        ),
        (c.rollout.max_tokens < 1, f"rollout.max_tokens = {c.rollout.max_tokens}: at least 1"),
        (
            c.rollout.temperature <= 0,
            f"rollout.temperature = {c.rollout.temperature}: training samples, use more than 0",
        ),
        (not 0 < c.rollout.top_p <= 1, f"rollout.top_p = {c.rollout.top_p}: between 0 (excluded) and 1"),
        (c.rollout.top_k < 0, f"rollout.top_k = {c.rollout.top_k}: 0 (off) or more"),
        (c.rollout.flush_interval_s <= 0, "rollout.flush_interval_s must be above 0"),
        (
            0 < c.rollout.progress_timeout_s < 4 * c.rollout.flush_interval_s or c.rollout.progress_timeout_s < 0,
            f"rollout.progress_timeout_s = {c.rollout.progress_timeout_s}: at least 4 x rollout.flush_interval_s, at which tokens"
            " are reported; or 0 for no limit",
        ),
        (
            0 < c.rollout.length_floor_p99 < c.rollout.length_floor_median,
            f"rollout.length_floor_p99 = {c.rollout.length_floor_p99}: below rollout.length_floor_median ="
            f" {c.rollout.length_floor_median}",
        ),
        (
            c.rollout.canary_tolerance < 0 and c.rollout.canary_tolerance != -1,
            f"rollout.canary_tolerance = {c.rollout.canary_tolerance}: above 0, 0 for no check, or -1 for the default",
        ),
        (c.rollout.staleness_budget < 0, f"rollout.staleness_budget = {c.rollout.staleness_budget}: 0 or more"),
        (not 0 < c.rollout.draining_share <= 1, "rollout.draining_share must be between 0 (excluded) and 1"),
        (c.rollout.restarts < 0, f"rollout.restarts = {c.rollout.restarts}: 0 or more"),
    ]


def _repack_rules(c: Config) -> _Rules:
    return [
        (
            c.repack.interval_s <= 0,
            f"repack.interval_s = {c.repack.interval_s}: above 0 (repack.enabled = false turns it off)",
        ),
        (not 0 < c.repack.kv_share <= 1, f"repack.kv_share = {c.repack.kv_share}: between 0 (excluded) and 1"),
        (c.repack.requests_max < 0, f"repack.requests_max = {c.repack.requests_max}: 0 or more"),
    ]


def _trainer_rules(c: Config) -> _Rules:
    return [
        (c.trainer.batch_prompts < 1, f"trainer.batch_prompts = {c.trainer.batch_prompts}: at least 1"),
        (
            not 1 <= c.trainer.mini_batches <= c.trainer.batch_prompts,
            f"trainer.mini_batches = {c.trainer.mini_batches}: between 1 and trainer.batch_prompts = {c.trainer.batch_prompts}",
        ),
        (
            not all(0 <= beta < 1 for beta in c.trainer.betas),
            f"trainer.betas = {_shown(c.trainer.betas)}: both from 0 to below 1",
        ),
        (not 0 <= c.algorithm.clip_low <= 1, f"algorithm.clip_low = {c.algorithm.clip_low}: between 0 and 1"),
        (c.trainer.keep_last < 1, f"trainer.keep_last = {c.trainer.keep_last}: keep at least the newest checkpoint"),
        (
            c.trainer.keep_every > 0 and not c.trainer.checkpoint_every,
            f"trainer.keep_every = {c.trainer.keep_every} means nothing without checkpoints on the way:"
            " set trainer.checkpoint_every",
        ),
    ]


def _buffer_rules(c: Config) -> _Rules:
    return [
        (
            c.buffer_groups_max < c.trainer.batch_prompts,
            f"buffer.max_groups = {c.buffer.max_groups}: a batch of trainer.batch_prompts = {c.trainer.batch_prompts}"
            " would never fill; use at least that",
        ),
        (
            not 2 <= c.buffer.min_group_size <= c.rollout.group_size,
            f"buffer.min_group_size = {c.buffer.min_group_size}: between 2 and rollout.group_size = {c.rollout.group_size}",
        ),
        (
            c.buffer.straggler_factor < 1,
            f"buffer.straggler_factor = {c.buffer.straggler_factor}: at least 1, or half of all answers would be late",
        ),
        (
            c.buffer.sampler_budget_ms > SAMPLER_BUDGET_MS_MAX,
            f"buffer.sampler_budget_ms = {c.buffer.sampler_budget_ms:g}: at most {SAMPLER_BUDGET_MS_MAX}, since everything"
            " else waits for it",
        ),
        (
            c.buffer.max_staleness < -1,
            f"buffer.max_staleness = {c.buffer.max_staleness}: 0 or more, or -1 for no bound",
        ),
        (
            c.buffer.on_stale == "wait" and c.buffer.max_staleness < 0,
            'buffer.on_stale = "wait" means nothing without a bound: set buffer.max_staleness',
        ),
        (
            c.buffer.on_incomplete == "train" and c.buffer.min_group_size == c.rollout.group_size,
            f'buffer.on_incomplete = "train" means nothing: buffer.min_group_size = {c.buffer.min_group_size} is the'
            " whole group; lower it",
        ),
        (
            c.buffer.stragglers == "drop" and c.buffer.min_group_size == c.rollout.group_size,
            f'buffer.stragglers = "drop" means nothing: buffer.min_group_size = {c.buffer.min_group_size} is the'
            " whole group; lower it",
        ),
        (
            c.buffer.max_ready_groups != 0 and c.buffer.max_ready_groups < c.trainer.batch_prompts,
            f"buffer.max_ready_groups = {c.buffer.max_ready_groups}: a batch of trainer.batch_prompts ="
            f" {c.trainer.batch_prompts} would never fill; use at least that, or 0",
        ),
        (
            c.buffer.max_ready_groups >= c.buffer_groups_max > 0,
            f"buffer.max_ready_groups = {c.buffer.max_ready_groups}: never reached, new groups are held back at"
            f" {c.buffer_groups_max} in flight or buffered (buffer.max_groups); use less than that, or 0",
        ),
    ]


def _relay_rules(c: Config) -> _Rules:
    return [
        (c.relay.restarts < 0, f"relay.restarts = {c.relay.restarts}: 0 or more"),
        (
            c.relay.link_timeout_s < 0.2,
            f"relay.link_timeout_s = {c.relay.link_timeout_s}: at least 0.2 (signs of life come every 0.1 s)",
        ),
        (
            not 0 <= c.relay.old_versions_share <= 1,
            f"relay.old_versions_share = {c.relay.old_versions_share}: between 0 and 1",
        ),
        (c.relay.slots < 2, f"relay.slots = {c.relay.slots}: at least 2 (newest and incoming)"),
        (
            not 0 <= c.relay.chunk_mib <= 64,
            f"relay.chunk_mib = {c.relay.chunk_mib}: from 1 to 64, or 0 to have it chosen",
        ),
        (not 1 <= c.relay.streams <= 16, f"relay.streams = {c.relay.streams}: between 1 and 16"),
        (
            c.relay.require_rdma and c.relay.transport == "tcp",
            'relay.require_rdma = true cannot be had with relay.transport = "tcp": choose "nixl" or "ucx"',
        ),
    ]


def _is_address(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9._-]*|[0-9A-Fa-f:.]+", text) is not None and text.count(":") != 1


def _is_command(text: str) -> bool:
    try:
        return shlex.split(text) != []
    except ValueError:  # a quote that does not end
        return False


def _controller_rules(c: Config) -> _Rules:
    return [
        (
            c.controller.heartbeat_timeout_s <= 2 * c.controller.heartbeat_s,
            "controller.heartbeat_timeout_s must be more than twice controller.heartbeat_s",
        ),
        (
            not 0 <= c.controller.port <= 65535,
            f"controller.port = {c.controller.port}: at most 65535, or 0 for any free one",
        ),
        (
            not _is_address(c.controller.advertise),
            f"controller.advertise = {_shown(c.controller.advertise)}: a host name or an address alone, without http:// or a port"
            " (that is controller.port)",
        ),
        (
            not _is_command(c.controller.ssh),
            f"controller.ssh = {_shown(c.controller.ssh)}: a command line is expected, such as ssh or ssh -F my_config",
        ),
        (not 0 <= c.log.trace_share <= 1, f"log.trace_share = {c.log.trace_share}: between 0 and 1"),
    ]
