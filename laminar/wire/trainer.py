"""Messages between the controller and the trainer's ranks, and the tokens that ranks fetch over HTTP."""

import msgspec

from laminar.ids import GroupId, TrajectoryId, Version
from laminar.wire.relay import Neighbour
from laminar.wire.session import Message

# ---- trainer -> controller ---------------------------------------------------------------------------------


class TrainerReady(Message, frozen=True, kw_only=True):
    """This rank has model and optimizer in place (restored if asked). Rank 0 speaks for all in what follows."""

    rank: int
    world_size: int
    step: int
    """Step of the restored checkpoint, 0 for a fresh start."""
    num_parameters: int
    data_state: bytes = b""
    """What `SaveCheckpoint.data_state` held when the restored checkpoint was made."""
    damaged: list[str] = []
    """Newer checkpoints that could not be restored, each with what is wrong with it: ``step-8: meta.json is missing``."""


class StepDone(Message, frozen=True, kw_only=True):
    """All mini-batch updates of the step are applied on all ranks."""

    step: int
    attempt: int
    metrics: dict[str, float]
    """Field-standard names, see docs/metrics.md; times in seconds."""


class StepFailed(Message, frozen=True, kw_only=True):
    """The step was not applied (or not everywhere); the trainer must be restarted."""

    step: int
    attempt: int
    reason: str


class ShardsWritten(Message, frozen=True, kw_only=True):
    """Every rank has copied its shards to the relay of its host; the trainer goes on. A relay then reports `VersionReady`."""

    version: Version
    stall_s: float
    """Seconds the trainer waited for the publication, on rank 0; what follows is part of it."""
    publication: int = 0
    """As in `Publish`."""
    cast_s: float = 0.0
    """To the rollouts' dtype, where that is a pass of its own."""
    device_copy_s: float = 0.0
    """From the device to host memory."""
    host_copy_s: float = 0.0
    """From host memory into the relay's slot."""


class PublishFailed(Message, frozen=True, kw_only=True):
    """The version was not published; the next one serves."""

    version: Version
    reason: str
    publication: int = 0
    """As in `Publish`."""


class CheckpointSaved(Message, frozen=True, kw_only=True):
    """The checkpoint is complete on disk (atomic rename done)."""

    step: int
    path: str
    seconds: float
    """From the order until it was on disk; training went on after `stall_s`."""
    stall_s: float = 0.0
    """Seconds that the trainer waited for it, on rank 0."""


class CheckpointFailed(Message, frozen=True, kw_only=True):
    """Nothing usable was written."""

    step: int
    reason: str


# ---- controller -> trainer ---------------------------------------------------------------------------------


class BatchRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One trajectory of a batch, without its tokens (each rank fetches those of its share)."""

    trajectory: TrajectoryId
    group: GroupId
    behavior_version: Version
    num_prompt_tokens: int
    num_tokens: int
    reward: float


class StartStep(Message, frozen=True, kw_only=True):
    """Train step `step` (1-based) on `rows`, siblings adjacent, in buffer order. Sent to every rank."""

    step: int
    attempt: int
    rows: list[BatchRow]


class Publish(Message, frozen=True, kw_only=True):
    """Copy this rank's shards of the current weights to the relay of its host as `version`. Sent to every rank."""

    version: Version
    publication: int = 0
    """Number of this order; 0 = it has none."""
    collector: Neighbour | None = None
    """The relay that collects the shards of several hosts; None = all ranks are on one."""


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Save model, optimizer, RNG and `data_state` to `path`. Sent to every rank."""

    step: int
    path: str
    data_state: bytes


FromTrainer = TrainerReady | StepDone | StepFailed | ShardsWritten | PublishFailed | CheckpointSaved | CheckpointFailed
ToTrainer = StartStep | Publish | SaveCheckpoint


# ---- tokens, over HTTP -------------------------------------------------------------------------------------


class TokenRow(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one trajectory, as `POST /v1/tokens` serves them."""

    trajectory: TrajectoryId
    prompt_tokens: bytes
    """i32"""
    tokens: bytes
    """i32, the response"""
    logprobs: bytes
    """f32, behaviour log-probs, one per response token (0 for environment tokens)"""
    sources: bytes
    """u8, one per response token, as in `RolloutReport`; empty = all model"""


class TokenRequest(msgspec.Struct, frozen=True, array_like=True):
    """Body of `POST /v1/tokens`: msgpack; the answer is msgpack of list[TokenRow] in the same order."""

    trajectories: list[TrajectoryId]
