"""The core's state: plain data, no behaviour, no payloads. A snapshot is the msgpack of `State`.

Trajectory states (`core/groups.py` has the transitions):

    queued ──► generating ──► rewarding ──► done ──► (with its group) buffered ──► leased ──► committed
       ▲____________│______________│  infrastructure failure: attempt + 1             (record leaves the state)
       └ any of them can also end as dropped{reason}
"""

from enum import StrEnum
from typing import Literal

import msgspec

from laminar.core.decisions import Transfer
from laminar.core.operator_records import (
    Breakpoint,
    HeldDecision,
    Hit,
    Hold,
    ReplicaSettings,
    Resolution,
    Value,
)
from laminar.core.pace import Pace
from laminar.core.relay_records import Chain, Failover, Failovers, Relay
from laminar.core.sampling import SamplerRequest, SamplerWord
from laminar.core.trainer_records import Branch, Step, Trainer
from laminar.ids import GroupId, PromptId, TrajectoryId, Version, WorkerId


class TrajectoryState(StrEnum):
    """Where one trajectory is."""

    QUEUED = "queued"
    """Waits for a replica: new, or to be continued after a failure."""
    GENERATING = "generating"
    REWARDING = "rewarding"
    """Generation is over, the reward is computed; no KV is held."""
    DONE = "done"
    """Rewarded; its group is not complete yet, or it is in the buffer or leased with it."""
    FAILED = "failed"
    """Ended without a reward for reasons of data; its group decides what follows."""


class GroupState(StrEnum):
    """Where the siblings of one prompt are."""

    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    LEASED = "leased"


class ReplicaState(StrEnum):
    """What one engine replica does."""

    JOINED = "joined"
    """Holds no weights yet."""
    SYNCING = "syncing"
    """Pulls a version; nothing runs."""
    GENERATING = "generating"


class Timings(msgspec.Struct, kw_only=True, array_like=True):
    """Run time in seconds (`Event.at`) of what happened to a trajectory; 0 = not yet."""

    queued: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    rewarded: float = 0.0
    sampled: float = 0.0
    trained: float = 0.0


class Trajectory(msgspec.Struct, kw_only=True, array_like=True):
    """One response to one prompt, without its tokens."""

    id: TrajectoryId
    group: GroupId
    prompt: PromptId
    sibling: int
    seed: int
    attempt: int = 1
    num_failures: int = 0
    state: TrajectoryState = TrajectoryState.QUEUED
    worker: WorkerId | None = None
    moving_to: WorkerId | None = None
    """Destination of a move that is under way."""
    displaced: bool = False
    """Its replica was lost while it generated (or, if pinned, was rewarded); how it goes on is counted in `Failovers`."""
    behavior_version: Version | None = None
    finish_version: Version | None = None
    sample_version: Version | None = None
    digest: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Response tokens received."""
    finish_reason: str = ""
    """``stop``, ``length``, ``env``, ``failed``; empty while generating."""
    reward: float = 0.0
    reward_parts: dict[str, float] = {}
    failure: str = ""
    step: int = 0
    """Trainer step that it was leased to."""
    dropped: str = ""
    timings: Timings = msgspec.field(default_factory=Timings)


class Group(msgspec.Struct, kw_only=True, array_like=True):
    """The siblings of one prompt: one replica, one version."""

    id: GroupId
    prompt: PromptId
    trajectories: list[TrajectoryId]
    state: GroupState = GroupState.IN_FLIGHT
    version: Version | None = None
    worker: WorkerId | None = None
    num_open: int = 0
    """Siblings that are neither done nor failed."""
    num_regenerations: int = 0
    completed_at: float = 0.0
    step: int = 0


class Replica(msgspec.Struct, kw_only=True):
    """One rollout worker with its engine."""

    id: WorkerId
    incarnation: int
    host: str
    num_requests_max: int
    """Requests that it is given at once."""
    kv_tokens_max: int
    num_requests_able: int = 0
    """Requests that it can have at once; an operator may give it fewer."""
    num_requests_memory_bound: int = 0  # B by the roofline of its GPU; 0 = unknown
    state: ReplicaState = ReplicaState.JOINED
    version: Version | None = None
    target: Version | None = None
    """Version being pulled while syncing."""
    draining: bool = False
    """An operator wants it out: it finishes what it has and leaves. (Those that drain to refresh: `draining_to_refresh`.)"""
    num_failed_pulls: int = 0
    admit_left: int = 0
    """Groups that this local batch may still admit."""
    attempts: dict[TrajectoryId, int] = {}
    """What it generates or rewards now: trajectory -> attempt."""
    num_generating: int = 0
    incoming: dict[TrajectoryId, int] = {}
    """Trajectories on their way here -> KV tokens reserved for them; they pin the version."""
    leaving: dict[TrajectoryId, None] = {}
    """Trajectories that were told to stop here, to be continued elsewhere."""
    stalled_since: float = 0.0
    """When it last made progress, or owed none; the clock of `laminar.core.health`."""
    progress_at: float = 0.0
    """When its last tokens came, or something of it ended."""
    suspect: bool = False
    """It owes tokens and gives none: nothing more is given to it."""
    quarantined: bool = False
    """It is given nothing more until it has pulled the newest version."""
    num_suspicions: int = 0
    suspected_at: float = 0.0
    kv_previous: int = 0
    """C_prev: KV tokens in use at the last repack check."""
    kv_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0


class VersionRecord(msgspec.Struct, kw_only=True):
    """A weight version that the trainer made, in publication order."""

    version: Version
    digest: str = ""
    ready: bool = False
    """Some relay holds it."""
    lost: str = ""
    """Why it will never be readable; empty = it may."""
    num_tries: int = 0
    """How often the trainer was asked to publish it."""
    publication: int = 0
    """Number of the last such order; 0 = none."""
    written: bool = False
    """The trainer has handed over all of it."""
    void: bool = False
    """The trainer died while it handed it over: it will never be complete."""
    deadline: float = 0.0
    """When the publication has lasted too long; 0 = none is under way."""
    retry_at: float = 0.0
    """When the trainer is asked again after one that failed; 0 = it is not."""
    awaited_until: float = 0.0
    """Idle replicas wait for this publication until then; 0 = they do not."""
    published_at: float = 0.0


class Restart(msgspec.Struct, kw_only=True):
    """What was done to bring a lost worker back."""

    role: Literal["rollout", "trainer", "relay"] = "rollout"
    num: int = 0
    """How often it was started again."""
    due_at: float = 0.0
    """When it is to be started; 0 = not waiting."""
    starting: bool = False
    """It was started and has not joined."""
    start_by: float = 0.0
    """When that has lasted too long; 0 = it may last for ever, or it is not starting."""
    joined_at: float = 0.0
    reason: str = ""
    """Why it was lost the last time."""
    evicted: bool = False
    """It is not started again."""


class RepackRecord(msgspec.Struct, kw_only=True):
    """Repacking so far, and the last check's explanation."""

    due: bool = False
    next_at: float = 0.0
    """When the next periodic check is due; 0 = no periodic checks."""
    planned: list[Transfer] = []
    """Transfers of the last check that are not decided yet."""
    checked_at: float = 0.0
    reasons: dict[WorkerId, str] = {}
    """Why each replica is a source, a destination, or neither."""
    moved_at: float = 0.0
    """When a check last proposed moves; 0 = never."""
    moved_reasons: dict[WorkerId, str] = {}
    """`reasons` of that check, which others have followed."""
    num_checks: int = 0
    num_released: int = 0
    """Replicas emptied."""
    num_moves: int = 0
    """Trajectories moved."""
    num_moved_tokens: int = 0
    """Response tokens that destinations had to prefill again."""


class Evaluation(msgspec.Struct, kw_only=True):
    """Greedy accuracy on the held-out prompts, by one replica."""

    id: int
    name: str
    """``before`` or ``after``; ``superseded`` = of weights that a restore of the trainer has undone, or
    that an operator let the run go on after."""
    version: Version | None = None
    worker: WorkerId | None = None
    since: float = 0.0
    """When `worker` was asked."""
    done: bool = False
    accuracy: float = 0.0
    """Share of the prompts with full reward."""
    score: float = 0.0
    """Mean reward."""
    num_prompts: int = 0
    num_failures: int = 0


class PromptPool(msgspec.Struct, kw_only=True):
    """Where the run is in its data."""

    epoch: int = 0
    position: int = 0
    returned: list[PromptId] = []
    """Prompts of groups that a stop interrupted: drawn again first."""


class Stall(msgspec.Struct, kw_only=True):
    """Whether the run gets anywhere (`laminar.core.stall`)."""

    progress: tuple[float, ...] = ()
    """Counts of what is useful, as last seen."""
    since: float = 0.0
    """When they last changed, or nothing was expected; 0 = not looked at yet."""
    check_at: float = 0.0
    """When they are looked at next; 0 = never."""
    told: bool = False
    """People know that it does not."""


class Account(msgspec.Struct, kw_only=True):
    """One row of the closed ledger: total = in_flight + buffered + leased + committed + sum(dropped)."""

    total: int = 0
    in_flight: int = 0
    buffered: int = 0
    leased: int = 0
    committed: int = 0
    dropped: dict[str, int] = {}


class Ledger(msgspec.Struct, kw_only=True):
    """Trajectories drawn and tokens received, by where they are now."""

    trajectories: Account = msgspec.field(default_factory=Account)
    tokens: Account = msgspec.field(default_factory=Account)


class State(msgspec.Struct, kw_only=True):
    """Everything that the core knows."""

    boot: int = 0
    branch_floor: int = 0
    at: float = 0.0
    seq: int = 0
    """Sequence number of the last event."""
    started: bool = False
    stopping: str = ""
    """Reason of a requested stop."""
    finished: str = ""
    """Reason why the run is over."""
    ok: bool = True
    num_groups: int = 0
    num_trajectories: int = 0
    prompts: PromptPool = msgspec.field(default_factory=PromptPool)
    trajectories: dict[TrajectoryId, Trajectory] = {}
    groups: dict[GroupId, Group] = {}
    requeue: dict[GroupId, None] = {}
    """Groups with queued siblings, oldest first."""
    buffer: dict[GroupId, None] = {}
    """Complete groups in order of completion."""
    replicas: dict[WorkerId, Replica] = {}
    fenced: dict[WorkerId, int] = {}
    """Highest incarnation that was declared lost."""
    restarts: dict[WorkerId, Restart] = {}
    dirty: dict[WorkerId, None] = {}
    """Replicas that the passes look at."""
    pulls: dict[WorkerId, float] = {}  # replicas that pull -> when that has lasted too long
    silent: dict[WorkerId, float] = {}
    """Workers whose channel broke -> when they count as lost."""
    stragglers_at: float = 0.0
    """When some group may have waited long enough for its last siblings; 0 = none is known."""
    health_check_at: float = 0.0
    """When the replicas' progress is looked at next; 0 = nothing is expected of any."""
    relays: dict[WorkerId, Relay] = {}
    relay_hosts: dict[str, WorkerId] = {}
    """Host -> its relay, also while that is lost and may come back."""
    chain: Chain = msgspec.field(default_factory=Chain)
    failovers: dict[WorkerId, Failover] = {}
    """Replicas that serve an old version, or will as soon as nothing generates on them."""
    num_failovers: Failovers = msgspec.field(default_factory=Failovers)
    versions: list[VersionRecord] = []
    num_publications: int = 0
    """Orders to publish so far."""
    publishing_to: WorkerId | None = None
    """Relay that collects the version whose publication was ordered last."""
    branches: list[Branch] = []
    trainer: Trainer = msgspec.field(default_factory=Trainer)
    steps: dict[int, Step] = {}
    evaluations: list[Evaluation] = []
    repack: RepackRecord = msgspec.field(default_factory=RepackRecord)
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    pace: Pace = msgspec.field(default_factory=Pace)
    draining_to_refresh: dict[WorkerId, None] = {}
    """Replicas that admit nothing because a newer version exists (refresh policies `continuous` and `rolling`)."""
    may_have_aged: bool = False
    """A group began again, or the trainer was restored: live groups may be older than when they were admitted."""
    review_due: bool = False
    """The fleet or the versions held have changed since it was chosen who drains to refresh and which relays keep what."""
    storage_failure: str = ""
    """Why nothing can be written; empty = the disk works."""
    storage_failed_at: float = 0.0
    stall: Stall = msgspec.field(default_factory=Stall)
    stop_by: float = 0.0
    """A stopped run waits for the disk until then; 0 = it has not had to."""
    num_drops_in_row: int = 0
    num_rewards_lost_in_row: int = 0
    """Trajectories given up because their reward timed out or ended its process, since the last reward that came."""
    sampler_state: bytes = b""
    sampler_request: SamplerRequest | None = None
    sampler_answer: list[GroupId] = []
    num_sampler_requests: int = 0
    sampler_word: SamplerWord | None = None
    """What it said last."""
    sampler_starved: bool = False
    """The sampler chose nothing; it is asked again when the buffer changes."""
    holds: dict[str, Hold] = {}
    """Passes that an operator or a breakpoint keeps from deciding."""
    skipped: dict[str, None] = {}
    """Passes that an operator told to do nothing until the next event."""
    held: dict[int, HeldDecision] = {}
    num_decisions: int = 0
    resolution: Resolution | None = None
    """What became of the last held decision."""
    breakpoints: dict[int, Breakpoint] = {}
    num_breakpoints: int = 0
    hits: list[Hit] = []
    """Of breakpoints, the last `HITS_KEPT`."""
    amended: dict[str, Value] = {}
    """Settings that an operator has changed (`laminar.core.amend`)."""
    sampler: str = ""
    """Reference of the sampler that an operator has chosen; empty = the configured one."""
    stop_after: int = 0
    """The run stops after this step; 0 = it goes on."""
    replica_settings: dict[WorkerId, ReplicaSettings] = {}
    """What an operator has changed of replicas (`laminar.core.tuning`)."""
