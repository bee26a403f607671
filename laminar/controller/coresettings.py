"""What the core needs of a run's configuration."""

from laminar.config import Config
from laminar.core.settings import Settings
from laminar.tasks.datasets import PromptSet

DROPS_MIN = 64  # groups in a row: chance alone does not drop so many; an outage may drop all that are under way at once


def settings_of(config: Config, prompts: PromptSet) -> Settings:
    """What the core needs of the configuration."""
    return Settings(
        seed=config.run.seed,
        num_prompts=len(prompts),
        shuffle=config.task.shuffle,
        steps=config.run.steps,
        group_size=config.rollout.group_size,
        trajectory_tokens_max=config.rollout.max_tokens,
        batch_groups=config.trainer.batch_prompts,
        local_batch_groups=config.local_batch_groups,
        buffer_groups_max=config.buffer_groups_max,
        refresh_policy=config.rollout.refresh_policy,
        draining_share=config.rollout.draining_share,
        staleness_budget=config.rollout.staleness_budget,
        ready_groups_max=config.buffer.max_ready_groups,
        pinned=bool(config.task.agent),
        repack_interval_s=config.repack.interval_s if config.repack.enabled else 0.0,
        repack_kv_share=config.repack.kv_share,
        repack_policy=config.repack.policy,
        repack_requests_max=config.repack.requests_max,
        await_publication_s=config.rollout.await_publication_s,
        progress_timeout_s=config.rollout.progress_timeout_s,
        restarts_max=config.rollout.restarts,
        trainer_restarts_max=config.trainer.restarts,
        relay_restarts_max=config.relay.restarts,
        max_staleness=config.buffer.max_staleness if config.buffer.max_staleness >= 0 else None,
        on_stale=config.buffer.on_stale,
        num_retries=config.rollout.num_retries,
        on_incomplete=config.buffer.on_incomplete,
        min_group_size=config.buffer.min_group_size,
        stragglers=config.buffer.stragglers,
        straggler_factor=config.buffer.straggler_factor,
        group_versions=config.buffer.group_versions,
        custom_sampler=config.buffer.sampler != "fifo",
        on_sampler_error=config.buffer.on_sampler_error,
        sampler_budget_ms=config.buffer.sampler_budget_ms,
        checkpoint_every=config.trainer.checkpoint_every,
        evaluate=bool(prompts.held_out),
        drops_without_progress_max=max(DROPS_MIN, config.buffer_groups_max),
        reconnect_grace_s=config.controller.heartbeat_timeout_s,
        start_timeout_s=config.controller.start_timeout_s,
        step_timeout_s=config.trainer.step_timeout_s,
        evaluation_timeout_s=config.task.eval_timeout_s,
        stall_after_s=config.controller.stall_after_s,
    )
