"""The run's configuration: frozen structs, every key documented where it is declared.

`laminar.configfile` reads TOML and command-line overrides into `Config`; workers get the resolved `Config` over the
wire. Unknown keys are errors. Units come last in names; a limit says why it is what it is.
"""

from typing import Any, Literal

import msgspec

from laminar.errors import ConfigError


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class RunConfig(Section, frozen=True, kw_only=True):
    """[run]"""

    name: str = ""
    """Directory name under `dir`; empty = `<task>-<date>-<time>`."""
    dir: str = "runs"
    seed: int = 0
    """Seeds prompt order, sampling and trainer initialisation."""
    steps: int = 100
    """Trainer steps (global batches) of the whole run, counted from 1."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """[model]"""

    path: str = ""
    """Directory of a Hugging Face causal LM with its tokenizer."""
    context_tokens_max: int = 0
    """Longest prompt + response in tokens; 0 = the model's own limit."""


class TaskConfig(Section, frozen=True, kw_only=True):
    """[task]: prompts and their reward."""

    dataset: str = "reasoning_gym:spell_backward"
    """`reasoning_gym:<name>` or the path of a .jsonl or .parquet file."""
    size: int = 2000
    """Number of training prompts that a procedural data set generates."""
    options: dict[str, Any] = {}
    """Passed to the procedural generator, for example `{min_word_len = 4}`."""
    seed: int = 17
    """Seed of the procedural generator; the held-out prompts use `seed + 1` and never repeat a training prompt."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer; verl's `reward_model.ground_truth` is understood too."""
    prompt_template: str = "{prompt}"
    """Wraps text prompts, for example `"{prompt}\\nAnswer: "`."""
    reward: str = ""
    """`pkg.mod:function` or `file.py:function`; empty = the data set's own scorer (reasoning-gym) or exact match."""
    reward_workers: int = 1
    """Processes per rollout worker that run reward code."""
    reward_timeout_s: float = 30.0
    """A reward that takes longer is killed with its process and tried again once, then recorded as failed."""
    reward_delay_median_s: float = 0.0
    """Adds a log-normal delay to every reward, as a slow judge or sandbox would; 0 = none. Awaited concurrently."""
    reward_delay_p99_s: float = 0.0
    """99th percentile of that delay."""
    shuffle: bool = True
    """Draw prompts in a new seeded order every epoch."""
    eval_prompts: int = 128
    """Held-out prompts for the greedy accuracy before and after; 0 = no evaluation."""
    eval_dataset: str = ""
    """File with held-out prompts, for data sets that are files; empty = no evaluation for files."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """[rollout]: generation."""

    group_size: int = 8
    """Responses per prompt (GRPO needs at least 2)."""
    max_tokens: int = 512
    """Longest response, tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    length_floor_median: int = 0
    """Stop tokens are ignored for the first tokens of a response, as many as a log-normal draw per trajectory with this median
    says: long-tailed lengths, for trying out scheduling. 0 = off."""
    length_floor_p99: int = 0
    """99th percentile of that draw."""
    max_concurrent: int = 128
    """Most requests decoding at once per replica."""
    local_batch_groups: int = 0
    """Groups per weight pull; 0 = as many as fit in `max_concurrent`."""
    refresh_policy: Literal["batch", "continuous", "rolling"] = "batch"
    """`batch`: a local batch of groups per weight pull; `continuous`: admit while the held version is the newest, then drain
    and pull; `rolling`: so that mean staleness keeps a budget; docs/policies/refresh.md."""
    draining_share: float = 1.0
    """`continuous`: at most this share of the replicas drains at once."""
    staleness_budget: float = 0.75
    """`rolling`: mean s_gen aimed at, in versions."""
    flush_interval_s: float = 0.25
    """A replica reports its new tokens this often (at once when its local batch drains)."""
    await_publication_s: float = 1.0
    """A replica with nothing running waits this long for weights that are just being published, rather than begin a local
    batch with older ones."""
    progress_timeout_s: float = 60.0
    """A replica whose engine has work and gives no token for this long gets nothing more, and after as long again it is lost and
    started again; 0 = it may take for ever. Longer than one prefill of the longest context takes; docs/policies/health.md."""
    restarts: int = 2
    """A replica that is lost is started again this often, with growing pauses, before it is given up."""
    num_retries: int = 3
    """A trajectory that failed for infrastructure reasons starts again this often."""


class RepackConfig(Section, frozen=True, kw_only=True):
    """[repack]: unfinished trajectories of one weight version are packed onto few replicas; docs/policies/repack.md."""

    enabled: bool = True
    interval_s: float = 5.0
    """Seconds between checks; one more follows every train step."""
    kv_share: float = 0.9
    """A destination is filled up to this share of its KV capacity (C_max)."""
    policy: Literal["whole", "parts"] = "whole"
    """What a replica generates is moved to one other, as in the paper, or in parts to several, which empties it sooner."""
    requests_max: int = 0
    """Largest decode batch that is still memory-bound (B); 0 = by the roofline of the replica's GPU (`laminar/roofline.py`), and
    never more than the replica decodes at once, which is also what is taken where the GPU is unknown."""


class BufferConfig(Section, frozen=True, kw_only=True):
    """[buffer]: what happens between generation and training."""

    sampler: str = "fifo"
    """`fifo`, `pkg.mod:Class` or `file.py:Class`; see docs/samplers.md."""
    on_sampler_error: Literal["fifo", "stop"] = "fifo"
    """A custom sampler that raises, returns unknown ids or is too slow: use FIFO for that batch, or stop the run."""
    sampler_budget_ms: float = 5.0
    """Longest time one `select` may take; the event loop waits for it."""
    max_groups: int = 0
    """New groups are held back while this many are in flight or buffered; 0 = three global batches."""
    max_ready_groups: int = 0
    """New groups are held back while this many complete groups wait for the trainer; 0 = only `max_groups` limits."""
    max_staleness: int = -1
    """Most trainer steps that a trained group may be behind the trainer; -1 = no bound, as in the paper."""
    on_stale: Literal["drop", "wait"] = "drop"
    """A group past the bound: drop it when it is complete, or never let it come to that (docs/policies/staleness.md)."""
    on_incomplete: Literal["drop", "train"] = "drop"
    """A group that cannot be completed: drop it, or train on it from `min_group_size` siblings up."""
    min_group_size: int = 2
    stragglers: Literal["wait", "drop"] = "wait"
    """Siblings that generate far longer than the others of their group: wait for them, or, once `min_group_size` are done, train
    without them. Faster, but biased: the longest answers are never trained on (docs/policies/groups.md)."""
    straggler_factor: float = 4.0
    """`drop`: far longer = more than this times the median generation time of the siblings that are done."""
    group_versions: Literal["regenerate", "mixed"] = "regenerate"
    """A sibling is to be retried but its version is gone: start the whole group again, or only that sibling."""


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """[algorithm]: GRPO and its loss."""

    clip_low: float = 0.2
    """Lower clip of the importance ratio, 1 - clip_low."""
    clip_high: float = 0.28
    """Upper clip, 1 + clip_high (Clip-Higher, DAPO)."""
    loss_aggregation: Literal["token-mean", "sequence-mean"] = "token-mean"
    advantage_std: bool = True
    """Divide group advantages by the group's reward standard deviation."""
    old_logprobs: Literal["recompute", "behavior"] = "recompute"
    """Denominator of the ratio: the trainer's own log-probs at the start of the step, or the rollout's."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """[trainer]"""

    batch_prompts: int = 64
    """Groups per global batch."""
    mini_batches: int = 1
    """Optimizer updates per global batch (the paper: 16)."""
    lr: float = 1e-6
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_updates: int = 0
    """Linear learning-rate warm-up, in optimizer updates."""
    grad_clip: float = 1.0
    """Global gradient norm limit; 0 = off."""
    micro_batch_tokens: int = 16384
    """Gradients are accumulated over micro-batches of at most this many tokens (padding included) per rank."""
    packing: Literal["group", "none"] = "none"
    """`group`: the siblings of a group share one copy of their prompt (attention mask by blocks); `none`: length-sorted rows."""
    activation_checkpointing: bool = False
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; `auto` = bf16 on a GPU, fp32 on a CPU. Master weights and reductions are fp32."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 = only at the end and on a stop."""
    restarts: int = 0
    """A trainer that is lost is started again from its newest checkpoint this often without a further checkpoint in between, while
    rollouts go on; the steps since are redone: all of them if there is no checkpoint yet (`checkpoint_every`). 0 = the run ends."""
    keep_last: int = 2
    """Older checkpoints are deleted."""


class RelayConfig(Section, frozen=True, kw_only=True):
    """[relay]"""

    slots: int = 3
    """Version slots in shared memory: newest, incoming, one more."""
    restarts: int = 2
    """How often a lost relay is started again. Replicas go on with the weights that they hold; the trainer's present ones are
    published to the new process. 0 = the loss of the relay ends the run."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of published weights; `auto` = bfloat16 where rollouts run on GPUs, float32 on CPUs."""


class ControllerConfig(Section, frozen=True, kw_only=True):
    """[controller]"""

    host: str = "127.0.0.1"
    """Bind address."""
    port: int = 0
    """0 = any free port."""
    heartbeat_s: float = 2.0
    """Workers and controller send a heartbeat this often."""
    heartbeat_timeout_s: float = 20.0
    """A worker not heard of for this long is lost."""
    orphan_timeout_s: float = 30.0
    """A worker without a controller for this long stops and unlinks its shared memory."""
    start_timeout_s: float = 180.0
    """A worker that was launched and did not join within this time failed to start."""
    log_commit_s: float = 0.05
    """Group commit: events reach the disk at most this much later."""
    console: Literal["auto", "live", "plain"] = "auto"
    """Progress display: live on a terminal, one plain line per step otherwise."""


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    repack: RepackConfig = RepackConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    relay: RelayConfig = RelayConfig()
    controller: ControllerConfig = ControllerConfig()

    @property
    def local_batch_groups(self) -> int:
        """Groups per weight pull of one replica."""
        return self.rollout.local_batch_groups or max(1, self.rollout.max_concurrent // self.rollout.group_size)

    @property
    def buffer_groups_max(self) -> int:
        """Groups in flight or buffered at which new ones are held back."""
        return self.buffer.max_groups or 3 * self.trainer.batch_prompts

    @property
    def num_trajectories_per_step(self) -> int:
        """Rows of one global batch."""
        return self.trainer.batch_prompts * self.rollout.group_size


def check(config: Config) -> Config:
    """`config` itself. Raises ConfigError for a combination that cannot work, naming the keys."""
    problems = (
        _out_of_range(config) + _without_effect(config) + [message for failed, message in _rules(config) if failed]
    )
    if problems:
        raise ConfigError("the configuration cannot work:\n  " + "\n  ".join(problems))
    return config


_PARTNERS: tuple[tuple[str, str, Any], ...] = (
    ("rollout.draining_share", "rollout.refresh_policy", "continuous"),
    ("rollout.staleness_budget", "rollout.refresh_policy", "rolling"),
    ("repack.policy", "repack.enabled", True),
    ("buffer.straggler_factor", "buffer.stragglers", "drop"),
)
"""(a key, the key and the value without which it has no effect)."""


def _without_effect(c: Config) -> list[str]:
    """Keys that were changed in vain."""
    return [
        f"{key} = {_shown(_value(c, key))} means nothing without {partner} = {_shown(needed)}"
        for key, partner, needed in _PARTNERS
        if _value(c, key) != _value(Config(), key) and _value(c, partner) != needed
    ]


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_LEAST: dict[str, int] = {
    "model.context_tokens_max": 0,
    "task.size": 1,
    "task.reward_workers": 1,
    "task.eval_prompts": 0,
    "rollout.max_concurrent": 1,
    "rollout.local_batch_groups": 0,
    "rollout.num_retries": 0,
    "rollout.await_publication_s": 0,
    "rollout.length_floor_median": 0,
    "rollout.length_floor_p99": 0,
    "buffer.max_groups": 0,
    "trainer.checkpoint_every": 0,
    "trainer.restarts": 0,
    "trainer.micro_batch_tokens": 1,
}
"""Smallest value that means something."""
_POSITIVE = (
    "task.reward_timeout_s", "buffer.sampler_budget_ms", "controller.heartbeat_s", "controller.orphan_timeout_s",
    "controller.start_timeout_s", "controller.log_commit_s",
)  # fmt: skip
"""Time limits: at 0 whatever they limit would be given up before it began."""


def _out_of_range(c: Config) -> list[str]:
    values = {key: _value(c, key) for key in (*_LEAST, *_POSITIVE)}
    low = [f"{key} = {values[key]}: {least} or more" for key, least in _LEAST.items() if values[key] < least]
    return low + [f"{key} = {values[key]}: above 0" for key in _POSITIVE if values[key] <= 0]


def _value(c: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(c, section), name)


def _rules(c: Config) -> list[tuple[bool, str]]:
    return [
        (not c.model.path, "model.path is empty: name a directory with a Hugging Face model"),
        (c.run.steps < 1, f"run.steps = {c.run.steps}: at least one step"),
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
        (c.trainer.batch_prompts < 1, f"trainer.batch_prompts = {c.trainer.batch_prompts}: at least 1"),
        (
            not 1 <= c.trainer.mini_batches <= c.trainer.batch_prompts,
            f"trainer.mini_batches = {c.trainer.mini_batches}: between 1 and trainer.batch_prompts = {c.trainer.batch_prompts}",
        ),
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
            c.repack.interval_s <= 0,
            f"repack.interval_s = {c.repack.interval_s}: above 0 (repack.enabled = false turns it off)",
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
            0 < c.model.context_tokens_max <= c.rollout.max_tokens,
            f"model.context_tokens_max = {c.model.context_tokens_max}: responses of rollout.max_tokens ="
            f" {c.rollout.max_tokens} leave no room for a prompt",
        ),
        (
            0 < c.rollout.length_floor_p99 < c.rollout.length_floor_median,
            f"rollout.length_floor_p99 = {c.rollout.length_floor_p99}: below rollout.length_floor_median ="
            f" {c.rollout.length_floor_median}",
        ),
        (not 0 < c.repack.kv_share <= 1, f"repack.kv_share = {c.repack.kv_share}: between 0 (excluded) and 1"),
        (c.repack.requests_max < 0, f"repack.requests_max = {c.repack.requests_max}: 0 or more"),
        (c.rollout.staleness_budget < 0, f"rollout.staleness_budget = {c.rollout.staleness_budget}: 0 or more"),
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
        (not 0 < c.rollout.draining_share <= 1, "rollout.draining_share must be between 0 (excluded) and 1"),
        (c.trainer.keep_last < 1, f"trainer.keep_last = {c.trainer.keep_last}: keep at least the newest checkpoint"),
        (c.rollout.restarts < 0, f"rollout.restarts = {c.rollout.restarts}: 0 or more"),
        (c.relay.restarts < 0, f"relay.restarts = {c.relay.restarts}: 0 or more"),
        (c.relay.slots < 2, f"relay.slots = {c.relay.slots}: at least 2 (newest and incoming)"),
        (
            c.controller.heartbeat_timeout_s <= 2 * c.controller.heartbeat_s,
            "controller.heartbeat_timeout_s must be more than twice controller.heartbeat_s",
        ),
    ]
