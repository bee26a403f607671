"""How attempts at trajectories ended: the rows of `events.ReplicaReported`."""

import msgspec

from laminar.ids import TrajectoryId


class FinishedAttempt(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Generation of one attempt ended."""

    trajectory: TrajectoryId
    attempt: int
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    queued_s: float
    decode_s: float


class RewardedAttempt(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One attempt has its reward."""

    trajectory: TrajectoryId
    attempt: int
    reward: float
    parts: dict[str, float]


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One attempt ended without a usable trajectory. `kind` is ``data`` or ``infra``."""

    trajectory: TrajectoryId
    attempt: int
    kind: str
    reason: str


class AbortedAttempt(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One attempt was stopped as asked; all its tokens have been reported."""

    trajectory: TrajectoryId
    attempt: int
