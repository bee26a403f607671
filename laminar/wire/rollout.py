"""Messages between the controller and a rollout worker."""

from typing import Any

import msgspec

from laminar.ids import GroupId, PromptId, TrajectoryId, Version
from laminar.wire.session import Message

# ---- rollout -> controller ---------------------------------------------------------------------------------


class RolloutReady(Message, frozen=True, kw_only=True):
    """The engine runs and holds no weights from a relay yet."""

    num_requests_max: int
    """Most requests decoding at once."""
    kv_tokens_max: int
    """KV-cache capacity in tokens."""
    context_tokens_max: int
    """Longest prompt + response that the model takes."""
    num_requests_memory_bound: int = 0
    """B by the roofline of its GPU; 0 = unknown."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Generation of one attempt ended; its KV is free. The reward follows as `Rewarded`."""

    trajectory: TrajectoryId
    attempt: int
    finish_reason: str
    """``stop``, ``length`` or ``env``."""
    num_prompt_tokens: int
    num_tokens: int
    """Response tokens, all attempts together (prefix included)."""
    queued_s: float
    """From assignment to first scheduled step, seconds."""
    decode_s: float
    """From the first scheduled step to the last token, seconds."""


class Rewarded(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The reward of one finished attempt."""

    trajectory: TrajectoryId
    attempt: int
    reward: float
    parts: dict[str, float]
    reward_s: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One attempt ended without a usable trajectory."""

    trajectory: TrajectoryId
    attempt: int
    kind: str
    """``data``: recorded as that, never retried (``reward_error``, ``reward_nan``, ``reward_timeout``, …). ``infra``: retried."""
    reason: str
    """A short snake_case name, counted under it."""
    detail: str = ""


class Aborted(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One attempt was stopped by `Abort`; its last tokens are in this report. Attempts that ended before are not named."""

    trajectory: TrajectoryId
    attempt: int


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The prompt of a group as this replica's tokenizer encoded it; sent once after each `AssignGroup`.

    Or that of one attempt, whose agent has made its first call: siblings may ask in their own words.
    """

    group: GroupId
    tokens: bytes
    """i32"""
    trajectory: TrajectoryId = TrajectoryId(0)
    """0 = the prompt is the group's."""
    attempt: int = 0


class RolloutReport(Message, frozen=True, kw_only=True):
    """What happened on one replica since its last report, and the lengths of all it has in flight.

    Per in-flight trajectory i: `trajectories[i]` (i64), `attempts[i]` (i32), `num_tokens[i]` (i32, response tokens
    including this delta), `num_new[i]` (i32). The new tokens of all trajectories follow one another in `tokens`
    (i32), `logprobs` (f32, behaviour log-prob) and `sources` (u8: 0 = model, 1 = environment, 2 = environment, and the first
    token of a new context, to which nothing before belongs, the prompt included; empty = all model).
    A finished or failed trajectory appears here in the same report as its last tokens and never again.
    """

    version: Version | None
    trajectories: bytes
    attempts: bytes
    num_tokens: bytes
    num_new: bytes
    tokens: bytes
    logprobs: bytes
    sources: bytes = b""
    prompts: list[PromptTokens] = []
    finished: list[Finished] = []
    rewarded: list[Rewarded] = []
    failed: list[Failed] = []
    aborted: list[Aborted] = []
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens: int = 0
    decode_busy_s: float = 0.0
    """Seconds of this interval in which the engine was decoding or prefilling."""
    interval_s: float = 0.0
    """Length of the interval, seconds."""
    since: float = 0.0
    """Wall clock (seconds since the epoch) at the interval's start, for the overlap query in `scripts/`."""
    agents: dict[str, int] = {}
    """What agents did since the last report, for `agent/…` of docs/metrics.md; what is 0 is left out."""


class Refreshed(Message, frozen=True, kw_only=True):
    """The replica now holds `version`; decoding had stopped for `wait_s` because of it."""

    version: Version
    digest: str
    wait_s: float
    canary_difference: float | None = None
    """Mean |Δ log-prob| of the canary between this engine and the trainer, nats per token; None = the version has no canary."""


class RefreshFailed(Message, frozen=True, kw_only=True):
    """The replica still holds what it held before."""

    version: Version
    reason: str


class EvaluationDone(Message, frozen=True, kw_only=True):
    """Greedy accuracy on the held-out prompts under one version."""

    evaluation: int
    version: Version
    accuracy: float
    """Share of the prompts whose reward is full (at least 1), 0..1."""
    score: float
    """Mean reward."""
    num_prompts: int


class EvaluationFailed(Message, frozen=True, kw_only=True):
    """The evaluation gave no result."""

    evaluation: int
    reason: str


# ---- controller -> rollout ---------------------------------------------------------------------------------


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a data set: plain text or chat messages, and what its reward needs."""

    prompt: PromptId
    text: str = ""
    messages: list[dict[str, str]] = []
    """If not empty: rendered with the tokenizer's chat template; otherwise `text` is encoded as it is."""
    answer: str = ""
    metadata: dict[str, Any] = {}


class TrajectoryStart(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to (re)start. Prefix arrays hold the response tokens that earlier attempts delivered."""

    trajectory: TrajectoryId
    attempt: int
    seed: int
    prefix_tokens: bytes = b""
    prefix_logprobs: bytes = b""
    score_only: bool = False
    """The response is complete; only its reward is missing."""


class AssignGroup(Message, frozen=True, kw_only=True):
    """Generate (or go on with) these siblings under `version`, which the replica holds."""

    group: GroupId
    version: Version
    prompt: Prompt
    starts: list[TrajectoryStart]


class Abort(Message, frozen=True, kw_only=True):
    """Stop these attempts. The next report has what they produced and names those that generated as `aborted`."""

    trajectories: list[TrajectoryId]
    attempts: list[int]


class Refresh(Message, frozen=True, kw_only=True):
    """Pull `version` from the local relay. Sent only while no request of another version runs."""

    version: Version
    digest: str


class Evaluate(Message, frozen=True, kw_only=True):
    """Answer these prompts greedily under `version`, which the replica holds, and score them."""

    evaluation: int
    version: Version
    prompts: list[Prompt]


class Reconfigure(Message, frozen=True, kw_only=True):
    """An operator wants another flush interval, from the next flush on."""

    flush_interval_s: float
    """0 = as configured."""


FromRollout = RolloutReady | RolloutReport | Refreshed | RefreshFailed | EvaluationDone | EvaluationFailed
ToRollout = AssignGroup | Abort | Refresh | Evaluate | Reconfigure
