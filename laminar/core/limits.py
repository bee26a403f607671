"""Settings that cannot work together, decided before anything runs; what only a replica's own size decides, when it joins."""

from laminar.core.settings import Settings


def problems(settings: Settings) -> list[str]:
    """Why a run with these settings could go no further, one line each; empty if nothing speaks against it."""
    s = settings
    rules = [
        (s.steps < 1, f"steps = {s.steps}: at least 1"),
        (s.num_prompts < 1, f"num_prompts = {s.num_prompts}: no prompt could be drawn"),
        (s.group_size < 1, f"group_size = {s.group_size}: at least 1"),
        (s.batch_groups < 1, f"batch_groups = {s.batch_groups}: at least 1"),
        (s.local_batch_groups < 1, f"local_batch_groups = {s.local_batch_groups}: no replica would admit a group"),
        (
            s.buffer_groups_max < s.batch_groups,
            f"buffer_groups_max = {s.buffer_groups_max}: a batch of batch_groups = {s.batch_groups} would never fill",
        ),
        (
            0 < s.ready_groups_max < s.batch_groups,
            f"ready_groups_max = {s.ready_groups_max}: a batch of batch_groups = {s.batch_groups} would never fill",
        ),
        (
            s.on_incomplete == "train" and not 1 <= s.min_group_size <= s.group_size,
            f"min_group_size = {s.min_group_size}: between 1 and group_size = {s.group_size}",
        ),
        (
            s.stragglers == "drop" and s.min_group_size < 1,
            f"min_group_size = {s.min_group_size}: at least 1, or a group could be complete with nobody",
        ),
        (s.stragglers == "drop" and s.straggler_factor <= 0, f"straggler_factor = {s.straggler_factor}: above 0"),
        (s.max_staleness is not None and s.max_staleness < 0, f"max_staleness = {s.max_staleness}: 0 or more, or none"),
        (not 0 < s.draining_share <= 1, f"draining_share = {s.draining_share}: between 0 (excluded) and 1"),
        (
            s.refresh_policy == "continuous" and s.draining_share < 1 and s.progress_timeout_s == 0,
            f"draining_share = {s.draining_share} with progress_timeout_s = 0: a replica that hangs while it drains would never be"
            " found and would keep the others from their turn; set a time limit, or draining_share = 1",
        ),
        (not 0 < s.repack_kv_share <= 1, f"repack_kv_share = {s.repack_kv_share}: between 0 (excluded) and 1"),
        (s.drops_without_progress_max < 1, "drops_without_progress_max: at least 1"),
    ]
    rules += [(value < 0, f"{name} = {value}: 0 or more") for name, value in _not_negative(s).items()]
    rules += [(value <= 0, f"{name} = {value}: above 0, or what it limits is given up at once") for name, value in
              _positive(s).items()]  # fmt: skip
    return [text for failed, text in rules if failed]


def _not_negative(s: Settings) -> dict[str, float]:
    return {
        "num_retries": s.num_retries,
        "checkpoint_every": s.checkpoint_every,
        "repack_interval_s": s.repack_interval_s,
        "repack_requests_max": s.repack_requests_max,
        "restarts_max": s.restarts_max,
        "trainer_restarts_max": s.trainer_restarts_max,
        "restart_backoff_s": s.restart_backoff_s,
        "await_publication_s": s.await_publication_s,
        "ready_groups_max": s.ready_groups_max,
        "relay_restarts_max": s.relay_restarts_max,
        "progress_timeout_s": s.progress_timeout_s,
        "staleness_budget": s.staleness_budget,
        "start_timeout_s": s.start_timeout_s,
        "step_timeout_s": s.step_timeout_s,
        "stall_after_s": s.stall_after_s,
    }


def _positive(s: Settings) -> dict[str, float]:
    return {
        "reconnect_grace_s": s.reconnect_grace_s,
        "refresh_timeout_s": s.refresh_timeout_s,
        "publish_timeout_s": s.publish_timeout_s,
        "stop_grace_s": s.stop_grace_s,
        "evaluation_timeout_s": s.evaluation_timeout_s,
        "sampler_budget_ms": s.sampler_budget_ms,
    }


def refusal(settings: Settings, num_requests_max: int, kv_tokens_max: int) -> str:
    """Why a replica of this size is of no use; empty if it is of some. A group beyond `num_requests_max` runs in waves."""
    if num_requests_max < 1:
        return f"it decodes {num_requests_max} requests at once; at least 1 is needed"
    if kv_tokens_max <= settings.trajectory_tokens_max:
        return (
            f"its KV cache holds {kv_tokens_max} tokens, but one trajectory may need more than "
            f"{settings.trajectory_tokens_max}: shorten responses or give it more memory"
        )
    return ""
