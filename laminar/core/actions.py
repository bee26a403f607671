"""What the core asks the shell to do, imperative. Actions are self-contained; each long one ends in exactly one event.

| action | ended by |
|---|---|
| StartGroup | per attempt: finished then rewarded or failed, in `ReplicaReported`; or `WorkerLost` |
| PullWeights | ReplicaRefreshed, ReplicaRefreshFailed or WorkerLost |
| RunEvaluation | EvaluationFinished, EvaluationFailed or WorkerLost |
| StartTrainStep | StepFinished, StepFailed or WorkerLost of a rank |
| PublishVersion | VersionReady, VersionLost or WorkerLost |
| SaveCheckpoint | CheckpointSaved, CheckpointFailed or WorkerLost |
| AskSampler | SamplerAnswered |
| StartWorker | ReplicaJoined, TrainerRankReady of all ranks, or WorkerLost of what did not come up |

The others are done when handed over. Of these, `ArrangeChain` tells the relays their neighbours and the trainer its master; what
becomes of it is told by `VersionHeld`, `LinkBroken` and `LinkSlow`, of any later epoch. A chain of one relay has no links, and its
trainer finds it on its own host: nobody needs a message. What a relay does not keep, `RetainVersions`
notwithstanding, is told by `VersionDropped`. `cause` is the seq of the event that led to the action.
"""

from typing import ClassVar, Literal

import msgspec

from laminar.core.records import Trajectory
from laminar.core.sampling import BufferView
from laminar.ids import GroupId, PromptId, TrajectoryId, Version, WorkerId


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all actions; the class name is the tag."""

    durable_first: ClassVar[bool] = False
    """Irreversible inside the shell, which performs it only when its cause is on disk; what goes to workers always waits."""
    cause: int


class Start(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of a group. Without `resume` the tokens of earlier attempts are void."""

    trajectory: TrajectoryId
    attempt: int
    seed: int
    resume: bool
    score_only: bool


class StartGroup(Action, frozen=True, kw_only=True):
    """Generate these siblings on `worker` under `version`, which it holds."""

    worker: WorkerId
    group: GroupId
    version: Version
    prompt: PromptId
    starts: list[Start]


class AbortAttempts(Action, frozen=True, kw_only=True):
    """Nothing more is wanted from these attempts."""

    worker: WorkerId
    trajectories: list[TrajectoryId]
    attempts: list[int]


class PullWeights(Action, frozen=True, kw_only=True):
    """Replace the replica's weights; nothing runs on it."""

    worker: WorkerId
    version: Version
    digest: str
    source: Literal["relay", "checkpoint"] = "relay"
    """The relay of the replica's host, which holds the version; or the trainer's checkpoint of exactly this version."""


class RunEvaluation(Action, frozen=True, kw_only=True):
    """Answer the held-out prompts greedily on `worker` under `version`, which it holds."""

    worker: WorkerId
    evaluation: int
    version: Version


class BatchRow(msgspec.Struct, frozen=True, array_like=True):
    """One leased trajectory."""

    trajectory: TrajectoryId
    group: GroupId
    behavior_version: Version
    num_prompt_tokens: int
    num_tokens: int
    reward: float


class StartTrainStep(Action, frozen=True, kw_only=True):
    """Train on these rows, siblings adjacent."""

    step: int
    attempt: int
    rows: list[BatchRow]


class PublishVersion(Action, frozen=True, kw_only=True):
    """Every rank hands its shards of the trainer's present weights to the relay of its host."""

    version: Version
    publication: int = 0
    """Number of this order; what is said about an older one of the same version is void."""
    relay: WorkerId | None = None
    """The one to which the relays of several trainer hosts send their shards; None = the trainer is on one host."""


class ArrangeChain(Action, frozen=True, kw_only=True):
    """Weights flow through the relays in this order from now on; what an older epoch says is void."""

    epoch: int
    order: list[WorkerId]
    master: WorkerId
    """First of the order: versions are published to it."""


class RetainVersions(Action, frozen=True, kw_only=True):
    """The relay keeps these versions as long as it can, and no other old ones."""

    worker: WorkerId
    versions: list[Version]


class SaveCheckpoint(Action, frozen=True, kw_only=True):
    """Save the trainer as of `step`, with what a resumed run needs to know."""

    step: int
    data_state: bytes


class AskSampler(Action, frozen=True, kw_only=True):
    """Let the custom sampler choose `num_groups` groups."""

    request: int
    num_groups: int
    view: BufferView
    state: bytes


class RecordTrajectories(Action, frozen=True, kw_only=True):
    """Write these records to the run's database (insert or replace)."""

    trajectories: list[Trajectory]


class RecordLostSteps(Action, frozen=True, kw_only=True):
    """What these steps trained, both ends included, was committed and is dropped{reason} after all: note it with their records."""

    first: int
    last: int
    reason: str


class ForgetTokens(Action, frozen=True, kw_only=True):
    """These trajectories are committed or dropped; their tokens are not needed again."""

    durable_first: ClassVar[bool] = True
    trajectories: list[TrajectoryId]
    step: int = 0
    """The train step that trained them, if they are committed."""


class StopWorker(Action, frozen=True, kw_only=True):
    """The worker is given up: stop its process, or refuse it if it returns."""

    worker: WorkerId
    incarnation: int
    reason: str
    lost: bool = True
    """False: it leaves because an operator wanted it to."""


class StartWorker(Action, frozen=True, kw_only=True):
    """Start the process of a lost worker again; a trainer's launch (``trainer-0``) from its newest complete checkpoint."""

    worker: WorkerId


class RaiseAlarm(Action, frozen=True, kw_only=True):
    """Tell people."""

    name: str
    text: str


class BreakpointHit(Action, frozen=True, kw_only=True):
    """Tell people that the run is held, and why."""

    breakpoint: int
    where: str
    """The breakpoint as a console takes it."""
    text: str
    """What met it."""


class UseSampler(Action, frozen=True, kw_only=True):
    """From now on this sampler is asked, from a fresh start; ``fifo`` = none is."""

    reference: str


class ReconfigureReplica(Action, frozen=True, kw_only=True):
    """The replica flushes its tokens this often from now on; 0 = as configured."""

    worker: WorkerId
    flush_interval_s: float


class Stalled(Action, frozen=True, kw_only=True):
    """Nothing useful has happened since then although there is something to do: write down who waits for what."""

    since: float
    """Run time, seconds."""


class FinishRun(Action, frozen=True, kw_only=True):
    """The run is over."""

    reason: str
    ok: bool


AnyAction = (
    StartGroup | AbortAttempts | PullWeights | RunEvaluation | StartTrainStep | PublishVersion | ArrangeChain | RetainVersions
    | SaveCheckpoint | AskSampler | RecordTrajectories | RecordLostSteps | ForgetTokens | StopWorker | StartWorker | RaiseAlarm
    | BreakpointHit | UseSampler | ReconfigureReplica | Stalled | FinishRun
)  # fmt: skip
