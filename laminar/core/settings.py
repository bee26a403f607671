"""What the core's decisions depend on, besides events. Derived from the run's configuration by the controller."""

from typing import Literal

import msgspec

RefreshPolicy = Literal["batch", "continuous", "rolling"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Constant during a run."""

    seed: int = 0
    num_prompts: int
    shuffle: bool = True
    steps: int
    """Trainer steps of the whole run."""
    group_size: int
    trajectory_tokens_max: int = 0
    """Most response tokens of one trajectory; with its prompt it has to fit a replica's KV cache. 0 = not known."""
    pinned: bool = False
    """A trajectory has state where it is generated (an agent program): it is not moved, and a lost one starts again."""
    batch_groups: int
    """Groups per global batch."""
    local_batch_groups: int
    """Groups that one replica admits per weight pull."""
    buffer_groups_max: int
    """New groups are held back while this many are in flight or buffered."""
    ready_groups_max: int = 0
    """New groups are held back while this many complete groups wait in the buffer; 0 = not looked at."""
    max_staleness: int | None = None
    """Most trainer steps that a trained group may be behind; None = no bound, as in the paper."""
    on_stale: Literal["drop", "wait"] = "drop"
    num_retries: int = 3
    on_incomplete: Literal["drop", "train"] = "drop"
    min_group_size: int = 2
    stragglers: Literal["wait", "drop"] = "wait"
    """Siblings that generate far longer than the others: wait, or complete the group without them (`laminar.core.stragglers`)."""
    straggler_factor: float = 4.0
    """`drop`: far longer = more than this times the median of those that are done."""
    group_versions: Literal["regenerate", "mixed"] = "regenerate"
    custom_sampler: bool = False
    on_sampler_error: Literal["fifo", "stop"] = "fifo"
    sampler_budget_ms: float = 5.0
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 = at the end and on a stop only."""
    evaluate: bool = True
    """Greedy accuracy on held-out prompts before and after."""
    refresh_policy: RefreshPolicy = "batch"
    """When a replica stops admitting: after a local batch, or only when newer weights exist (`laminar.core.refresh`)."""
    draining_share: float = 1.0
    """`continuous`: at most this share of the fleet drains at once."""
    staleness_budget: float = 0.75
    """`rolling`: mean s_gen aimed at, versions."""
    repack_interval_s: float = 0.0
    """Seconds between repack checks; one more follows every train step. 0 = no repacking."""
    repack_kv_share: float = 0.9
    """C_max as a share of a replica's KV capacity."""
    repack_policy: Literal["whole", "parts"] = "whole"
    """All of a source to one destination, as in the paper, or divided among several (`laminar.core.spread`)."""
    repack_requests_max: int = 0
    """B; 0 = by the roofline of the replica's GPU, or as many as it decodes at once where that is unknown."""
    restarts_max: int = 0
    """How often a lost replica is started again before it is given up; 0 = never started again."""
    restart_backoff_s: float = 1.0
    """Pause before the first restart; doubled with each."""
    trainer_restarts_max: int = 0
    """How often a lost trainer is started again without a checkpoint in between before the run fails; 0 = never."""
    progress_timeout_s: float = 0.0
    """A replica that owes tokens and gives none for this long is suspect, for twice as long lost (`laminar.core.health`);
    0 = never."""
    relay_restarts_max: int = 0
    """How often a lost relay is started again before it is given up; the run goes on meanwhile, without any relay too."""
    checkpoint_pulls: bool = False
    """Replicas can load weights from the trainer's last checkpoint, for siblings whose version no relay holds any more."""
    reconnect_grace_s: float = 20.0
    """A worker whose channel broke is lost after this long."""
    start_timeout_s: float = 0.0
    """A worker that was started again and has not joined for so long is lost; 0 = it may take for ever."""
    step_timeout_s: float = 0.0
    """A train step, or a checkpoint, that takes longer means that the trainer hangs; 0 = it may take for ever."""
    evaluation_timeout_s: float = 1800.0
    """An evaluation that takes longer has failed on this replica."""
    stall_after_s: float = 0.0
    """A run in which nothing useful happens for so long is stalled, and people are told (`laminar.core.stall`); 0 = never."""
    refresh_timeout_s: float = 120.0
    """A pull that takes longer means that the replica hangs."""
    await_publication_s: float = 0.0
    """A replica with nothing running waits this long for a publication under way, rather than begin with older weights."""
    stop_grace_s: float = 60.0
    """A stopped run waits so long for a disk that takes nothing, then ends without the checkpoint."""
    publish_timeout_s: float = 120.0
    """A publication that takes longer is given up; the next version serves."""
    drops_without_progress_max: int = 1024
    """So many dropped groups without one completed mean that the task cannot work (a broken reward): stop and say so."""
