"""Everything that can happen, past tense. The driver stamps `seq` (1, 2, 3 … per run) and `at` (run time in seconds)."""

import msgspec

from laminar.core.attempts import AbortedAttempt as AbortedAttempt
from laminar.core.attempts import FailedAttempt as FailedAttempt
from laminar.core.attempts import FinishedAttempt as FinishedAttempt
from laminar.core.attempts import RewardedAttempt as RewardedAttempt
from laminar.core.decisions import AnyDecision
from laminar.core.operator_records import Condition, Mode, Value
from laminar.ids import GroupId, Version, WorkerId


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all events; the class name is the tag."""

    seq: int = 0
    at: float = 0.0


class RunStarted(Event, frozen=True, kw_only=True):
    """First event of a controller process."""

    boot: int
    branch_floor: int = 0
    """The first trainer restore of this process makes a branch of at least this number."""


class ControllerRestarted(Event, frozen=True, kw_only=True):
    """First event of a controller process that goes on with the state of one that died; its workers may be alive."""

    boot: int
    away_s: float
    """Since the last event of the one before."""


class ControllerPaused(Event, frozen=True, kw_only=True):
    """The controller stood still (it was stopped, or starved, or its event loop was blocked) and now hears what others said."""

    away_s: float


class TimerFired(Event, frozen=True, kw_only=True):
    """`next_deadline()` has come."""


class StopRequested(Event, frozen=True, kw_only=True):
    """Finish the step, save, end."""

    reason: str


class FailureReported(Event, frozen=True, kw_only=True):
    """The shell met something that the run cannot survive (a worker that dies at start, a full disk)."""

    reason: str


class StorageFailed(Event, frozen=True, kw_only=True):
    """Nothing can be written any more, or no file opened: the disk is full, its directory unwritable. What goes on anyway is kept
    in memory."""

    reason: str


class StorageRecovered(Event, frozen=True, kw_only=True):
    """Everything that was to be written has been."""


# ---- workers -----------------------------------------------------------------------------------------------


class ReplicaJoined(Event, frozen=True, kw_only=True):
    """A rollout worker's engine runs."""

    worker: WorkerId
    incarnation: int
    host: str
    num_requests_max: int
    kv_tokens_max: int
    num_requests_memory_bound: int = 0
    """B by the roofline of its GPU; 0 = unknown."""


class WorkerDisconnected(Event, frozen=True, kw_only=True):
    """A channel broke; the process may still live."""

    worker: WorkerId
    incarnation: int


class WorkerReturned(Event, frozen=True, kw_only=True):
    """The same process is back on a new channel; nothing it said is lost."""

    worker: WorkerId
    incarnation: int


class WorkerLost(Event, frozen=True, kw_only=True):
    """The process is dead or given up."""

    worker: WorkerId
    incarnation: int
    reason: str


class ReplicaReported(Event, frozen=True, kw_only=True):
    """One progress frame of a replica; arrays as in `wire.RolloutReport`, response lengths only."""

    worker: WorkerId
    incarnation: int
    trajectories: bytes
    """i64"""
    attempts: bytes
    """i32"""
    num_tokens: bytes
    """i32, response tokens so far"""
    finished: list[FinishedAttempt] = []
    rewarded: list[RewardedAttempt] = []
    failed: list[FailedAttempt] = []
    aborted: list[AbortedAttempt] = []
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens: int = 0
    busy_s: float = 0.0
    """Seconds since the last report in which the engine computed, for evaluations too."""


class ReplicaRefreshed(Event, frozen=True, kw_only=True):
    """The replica holds `version`."""

    worker: WorkerId
    incarnation: int
    version: Version
    digest: str
    wait_s: float


class ReplicaRefreshFailed(Event, frozen=True, kw_only=True):
    """The replica still holds its old version."""

    worker: WorkerId
    incarnation: int
    version: Version
    reason: str


class EvaluationFinished(Event, frozen=True, kw_only=True):
    """Accuracy of the held-out prompts."""

    evaluation: int
    accuracy: float
    score: float = 0.0
    num_prompts: int


class EvaluationFailed(Event, frozen=True, kw_only=True):
    """No result."""

    evaluation: int
    reason: str


# ---- trainer and relay -------------------------------------------------------------------------------------


class TrainerRankReady(Event, frozen=True, kw_only=True):
    """One rank of a launch has the model in place."""

    worker: WorkerId
    incarnation: int
    rank: int
    world_size: int
    step: int
    host: str = ""
    damaged: list[str] = []
    """Newer checkpoints that it could not restore, each with what is wrong with it."""
    data_state: bytes = b""
    """Of the restored checkpoint, if newer ones were damaged."""


class StepFinished(Event, frozen=True, kw_only=True):
    """All updates of a step are applied."""

    step: int
    attempt: int
    metrics: dict[str, float] = {}


class StepFailed(Event, frozen=True, kw_only=True):
    """A step was not applied; the trainer is not to be trusted until restarted."""

    step: int
    attempt: int
    reason: str


class ShardsWritten(Event, frozen=True, kw_only=True):
    """Every rank has handed its shards to the relay of its host; the one that collects them will report the version ready."""

    version: Version
    stall_s: float
    publication: int = 0
    """As in `PublishVersion`; 0 = the last one."""


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """A complete checkpoint lies on disk."""

    step: int


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """Nothing usable was written."""

    step: int
    reason: str


class RelayJoined(Event, frozen=True, kw_only=True):
    """A host's relay serves; it holds no version."""

    worker: WorkerId
    incarnation: int
    host: str = ""
    rack: str = ""
    """Weights flow through the relays of a rack one after the other."""
    chain_port: int = 0
    """Where it listens for its neighbours, for the shell; 0 = it is the only one."""
    chain_host: str = ""
    """Address of that; empty = `host`."""


class VersionReady(Event, frozen=True, kw_only=True):
    """A version is complete and verified in the relay that it was published to."""

    version: Version
    digest: str
    num_bytes: int
    worker: WorkerId | None = None
    """That relay; None = the one that the last publication was ordered to."""


class VersionLost(Event, frozen=True, kw_only=True):
    """A version was not published; the next one serves. Ranks and several relays may say so of one publication."""

    version: Version
    reason: str
    publication: int = 0
    """As in `PublishVersion`; 0 = the last one."""


class VersionHeld(Event, frozen=True, kw_only=True):
    """Another relay than the master has received a version completely; its digest is the master's."""

    worker: WorkerId
    version: Version
    digest: str


class VersionDropped(Event, frozen=True, kw_only=True):
    """A relay has recycled the slot of a version."""

    worker: WorkerId
    version: Version


class LinkBroken(Event, frozen=True, kw_only=True):
    """`worker` cannot reach its neighbour `peer` in the chain of `epoch`, or `peer` makes no progress."""

    worker: WorkerId
    peer: WorkerId
    epoch: int


class LinkSlow(Event, frozen=True, kw_only=True):
    """The link of `worker` to its neighbour `peer` in the chain of `epoch` works, but holds the chain up."""

    worker: WorkerId
    peer: WorkerId
    epoch: int


# ---- sampling and operators --------------------------------------------------------------------------------


class SamplerAnswered(Event, frozen=True, kw_only=True):
    """A custom sampler's choice, or how it failed."""

    request: int
    groups: list[GroupId] = []
    error: str = ""
    elapsed_ms: float = 0.0
    state: bytes = b""
    """The sampler's own state after the call, saved with the run."""


class DrainRequested(Event, frozen=True, kw_only=True):
    """An operator wants a replica out: it admits nothing more, finishes what it has, and leaves."""

    worker: WorkerId


class HoldChanged(Event, frozen=True, kw_only=True):
    """An operator holds a pass (``dispatch``, ``refresh``, ``repack``, ``sample``, or ``all``) or lets it go."""

    pass_name: str
    held: bool
    mode: Mode = "step"


class DecisionResolved(Event, frozen=True, kw_only=True):
    """An operator applied or skipped a held decision; `replacement` is the edited one."""

    decision: int
    verdict: str
    """``apply`` or ``skip``."""
    replacement: AnyDecision | None = None


class DecisionEdited(Event, frozen=True, kw_only=True):
    """An operator put another decision of the same pass in the place of a held one; it goes on being held."""

    decision: int
    replacement: AnyDecision


class BreakpointSet(Event, frozen=True, kw_only=True):
    """An operator wants the run held at decisions of a pass, or at events of a kind (`laminar.core.breakpoints`)."""

    where: str
    conditions: list[Condition] = []


class BreakpointCleared(Event, frozen=True, kw_only=True):
    """An operator wants a breakpoint no more."""

    breakpoint: int
    """0 = all of them."""


class SettingsChanged(Event, frozen=True, kw_only=True):
    """An operator changes settings of the core (`laminar.core.amend`): all of these, or none."""

    changes: dict[str, Value]


class SamplerChanged(Event, frozen=True, kw_only=True):
    """An operator wants another sampler, which has been loaded: ``fifo``, ``pkg.mod:Class`` or ``file.py:Class``."""

    reference: str


class ReplicaSettingsChanged(Event, frozen=True, kw_only=True):
    """An operator changes what one replica, or every one, may do; None = as it is, 0 = as it was started."""

    worker: WorkerId = WorkerId("")
    """Empty = every replica, also those that join later."""
    flush_interval_s: float | None = None
    num_requests_max: int | None = None


class CheckpointRequested(Event, frozen=True, kw_only=True):
    """An operator wants a checkpoint: after the running step, or at once."""


class StopAfterStep(Event, frozen=True, kw_only=True):
    """An operator wants the run to stop when this step ends."""

    step: int
    """0 = it is to go on after all."""


AnyEvent = (
    RunStarted | ControllerRestarted | ControllerPaused | TimerFired
    | StopRequested | FailureReported | StorageFailed | StorageRecovered
    | ReplicaJoined | WorkerDisconnected | WorkerReturned | WorkerLost
    | ReplicaReported | ReplicaRefreshed | ReplicaRefreshFailed | EvaluationFinished | EvaluationFailed
    | TrainerRankReady | StepFinished | StepFailed | ShardsWritten | CheckpointSaved | CheckpointFailed
    | RelayJoined | VersionReady | VersionLost | VersionHeld | VersionDropped | LinkBroken | LinkSlow
    | SamplerAnswered | DrainRequested | HoldChanged | DecisionResolved | DecisionEdited | BreakpointSet | BreakpointCleared
    | SettingsChanged | SamplerChanged | ReplicaSettingsChanged | CheckpointRequested | StopAfterStep
)  # fmt: skip
