"""The run's configuration: frozen structs, every key documented where it is declared.

`laminar.configfile` reads TOML and command-line overrides into `Config`, `laminar.configrules` refuses what cannot work; workers
get the resolved `Config` over the wire. Unknown keys are errors. Units come last in names; a limit says why it is what it is.
"""

import shlex
from typing import Any, Literal

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class RunConfig(Section, frozen=True, kw_only=True):
    """[run]"""

    name: str = ""
    """Directory name under `dir`; empty = `<task>-<date>-<time>`."""
    dir: str = "runs"
    """Where the run's directory is made; relative to the working directory."""
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
    agent: str | list[str] = ""
    """Command line of an agent program, run once per trajectory, that calls the policy over OpenAI's API; docs/agents.md.
    `{prompt}` in it becomes the prompt's text. Empty = the policy answers each prompt itself, once."""
    agent_timeout_s: float = 600.0
    """An agent that runs longer is killed, and its trajectory recorded as failed."""
    agent_model: str = "policy"
    """The model name that agents must use: the one that existing code has built in, or OPENAI_MODEL of their environment."""
    agent_env: list[str] = []
    """Names of environment variables of the rollout worker that agents see too, such as the key of a search service."""
    agent_metadata: list[str] = []
    """Keys of a prompt's metadata that agents are given; no others are, because they may hold the answer."""
    agent_memory_mb: int = 0
    """Address space of each process of an agent, MiB; 0 = no limit."""
    on_rewrite: Literal["split", "refuse"] = "split"
    """A call that does not contain the calls before it unchanged: it begins another context, trained as a part of the same
    trajectory; or it is answered with status 409 and the trajectory fails as `history_rewritten`."""
    shuffle: bool = True
    """Draw prompts in a new seeded order every epoch."""
    eval_prompts: int = 128
    """Held-out prompts for the greedy accuracy before and after; 0 = no evaluation."""
    eval_timeout_s: float = 1800.0
    """An evaluation that takes longer is tried on another replica, at most three times."""
    eval_dataset: str = ""
    """File with held-out prompts, for data sets that are files; empty = no evaluation for files."""

    @property
    def agent_command(self) -> list[str]:
        """The parts of `agent`. Raises ValueError for a quote that does not end."""
        return shlex.split(self.agent) if isinstance(self.agent, str) else self.agent


class RolloutConfig(Section, frozen=True, kw_only=True):
    """[rollout]: generation."""

    group_size: int = 8
    """Responses per prompt (GRPO needs at least 2)."""
    max_tokens: int = 512
    """Longest response, tokens."""
    temperature: float = 1.0
    """Of training; evaluations are greedy."""
    top_p: float = 1.0
    """Nucleus sampling; 1 = off."""
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
    canary_tolerance: float = -1.0
    """After each pull a replica computes log-probs of a fixed sequence and is lost when they differ from the trainer's by more than
    this, in nats a token on average; -1 = 0.01 for float32 weights and 0.3 for 16-bit ones; 0 = no such check."""
    restarts: int = 2
    """A replica that is lost is started again this often, with growing pauses, before it is given up."""
    num_retries: int = 3
    """A trajectory that failed for infrastructure reasons starts again this often."""


class RepackConfig(Section, frozen=True, kw_only=True):
    """[repack]: unfinished trajectories of one weight version are packed onto few replicas; docs/policies/repack.md."""

    enabled: bool = True
    """false: trajectories stay where they began, unless their replica is lost."""
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
    """Longest time one `select` may take, at most 1000; the event loop waits for it. One that does not return is left alone."""
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
    """Fewest siblings that are trained as a group, where `on_incomplete` or `stragglers` let one be incomplete."""
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
    """Mean over all response tokens of a mini-batch (DAPO), or over each response first, then over responses (GRPO)."""
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
    """Of AdamW; constant after the warm-up."""
    weight_decay: float = 0.1
    """Of AdamW; not of biases and norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    warmup_updates: int = 0
    """Linear learning-rate warm-up, in optimizer updates."""
    grad_clip: float = 1.0
    """Global gradient norm limit; 0 = off."""
    micro_batch_tokens: int = 16384
    """Gradients are accumulated over micro-batches of at most this many tokens (padding included) per rank."""
    packing: Literal["group", "none"] = "none"
    """`group`: the siblings of a group share one copy of their prompt (attention mask by blocks); `none`: length-sorted rows."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass, layer by layer: less memory, about a third more time."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; `auto` = bf16 on a GPU, fp32 on a CPU. Master weights and reductions are fp32."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 = only at the end and on a stop. Training goes on while one is written; if the next becomes due
    meanwhile, it is made after the step in which the first is complete."""
    restarts: int = 0
    """A trainer that is lost is started again from its newest checkpoint this often without a further checkpoint in between, while
    rollouts go on; the steps since are redone: all of them if there is no checkpoint yet (`checkpoint_every`). 0 = the run ends."""
    step_timeout_s: float = 3600.0
    """A train step, or a checkpoint, that takes longer means that the trainer hangs: it is lost, see `restarts`; 0 = it may take
    for ever. Longer than the first step, which may compile."""
    keep_last: int = 2
    """Checkpoints before the last few are deleted. 1 leaves none to fall back to, should the newest turn out damaged."""
    keep_every: int = 0
    """Of every so many steps, the first checkpoint is kept for good, for evaluation, say; 0 = none."""


class RelayConfig(Section, frozen=True, kw_only=True):
    """[relay]"""

    slots: int = 3
    """Version slots in shared memory: newest, incoming, one more."""
    old_versions_share: float = 0.2
    """Memory for old versions that still have trajectories, as deltas to newer ones, at most this share of one version's bytes;
    0 = what has no slot any more is gone (docs/relays.md)."""
    restarts: int = 2
    """How often a lost relay is started again before it is given up. Replicas go on with the weights that they hold; the trainer's
    present ones are published to the new process. Giving up the relay of a trainer's host, or the last one, ends the run."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of published weights; `auto` = bfloat16 where rollouts run on GPUs, float32 on CPUs."""
    link_timeout_s: float = 0.5
    """A link between two relays over which no byte comes for so long while bytes are due is broken; docs/relays.md."""
    deltas: Literal["auto", "always", "never"] = "auto"
    """Chunks go from relay to relay as lossless differences to the version before: where that is faster, always, or never."""
    chunk_mib: int = 1
    """Versions are forwarded by so many MiB; 0 = by what suits the measured link and the length of the chain (docs/relays.md)."""
    rate_limit_mbit: float = 0.0
    """What a relay may send to its neighbour, Mbit/s; 0 = no limit."""
    transport: Literal["tcp", "ucx", "nixl"] = "tcp"
    """What links between relays are made of: plain sockets, UCX, or NIXL, which brings RDMA; docs/relays.md."""
    verify_pulls: bool = False
    """A replica computes the digest of what it pulls again, before it loads it: for memory that is not to be trusted, and for
    `laminar.chaos`. Costs about one more reading of the weights per pull."""
    streams: int = 1
    """`tcp`: sockets per link, which share its bytes; one is worth 2 to 4 GB/s."""
    require_rdma: bool = False
    """A relay whose transport finds no RDMA device does not start. Else it uses TCP instead, and says so in its log and status."""


class ControllerConfig(Section, frozen=True, kw_only=True):
    """[controller]"""

    host: str = "127.0.0.1"
    """Bind address. A loopback address, if the hosts file names other machines: the one that they reach."""
    port: int = 0
    """0 = any free port."""
    advertise: str = ""
    """Host name or address under which workers reach the controller; empty = the bind address, or, for other hosts, that of this
    machine towards the first of them."""
    ssh: str = "ssh"
    """The OpenSSH client that starts processes on other hosts, with options, for example `ssh -F my_config`; docs/cluster.md."""
    heartbeat_s: float = 2.0
    """Workers and controller send a heartbeat this often."""
    heartbeat_timeout_s: float = 20.0
    """A worker not heard of for this long is lost."""
    orphan_timeout_s: float = 30.0
    """A worker without a controller for this long stops and unlinks its shared memory."""
    start_timeout_s: float = 180.0
    """A worker that was launched and did not join within this time failed to start."""
    stall_after_s: float = 300.0
    """A run in which for so long no token comes, no step ends and no version is published, although there is something to do,
    raises an alarm and writes down who waits for what; 0 = never. Longer than the first step, which may compile; docs/stalls.md."""
    console: Literal["auto", "live", "plain"] = "auto"
    """Progress display: live on a terminal, one plain line per step otherwise."""


class LogConfig(Section, frozen=True, kw_only=True):
    """[log]: what is kept of a run beside its checkpoints; docs/storage.md."""

    commit_s: float = 0.05
    """Group commit: events wait at most this long for others before they are written (`log/commit_lag_s/max` says how long they
    really took); not while somebody waits for them."""
    max_mib: int = 4096
    """What `run.db` may hold. Above it the oldest events leave, in whole train steps; then the records of the oldest trajectories;
    never what a take-over needs. 0 = everything stays. 256 replicas that report four times a second write some 4 MiB/s, a small run
    0.1."""
    trace_share: float = 0.01
    """Share of the trajectories that become OpenTelemetry traces, 0 to 1, where the environment asks for these at all; of steps,
    publications, pulls and moves all do (docs/observability.md)."""
    archive: Literal["none", "parquet"] = "none"
    """What becomes of the tokens and log-probs of trajectories that a checkpoint has committed: forgotten, or a row each in
    `archive/*.parquet`, some 4 to 9 bytes a token; nothing bounds or prunes that."""


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
    log: LogConfig = LogConfig()

    @property
    def local_batch_groups(self) -> int:
        """Groups per weight pull of one replica."""
        return self.rollout.local_batch_groups or max(1, self.rollout.max_concurrent // self.rollout.group_size)

    @property
    def buffer_groups_max(self) -> int:
        """Groups in flight or buffered at which new ones are held back."""
        return self.buffer.max_groups or 3 * self.trainer.batch_prompts
