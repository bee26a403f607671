"""Messages between the controller and its workers, and their encoding (msgpack through msgspec).

One WebSocket per worker carries binary frames. Each frame is one `Envelope`: a frame number (0 = unreliable,
not resent), the highest frame number received from the other side, and one message. `laminar.channel` keeps
the numbers; this module only names and encodes.

Arrays travel as little-endian bytes (`pack_i64` …), so a frame of a replica costs one decode, not one per token.
Nothing here is pickled.
"""

from typing import Any, TypeVar

import msgspec

from laminar.errors import ProtocolError
from laminar.ids import GroupId, PromptId, TrajectoryId, Version, WorkerId
from laminar.packed import pack_f32 as pack_f32
from laminar.packed import pack_i32 as pack_i32
from laminar.packed import pack_i64 as pack_i64
from laminar.packed import unpack_f32 as unpack_f32
from laminar.packed import unpack_i32 as unpack_i32
from laminar.packed import unpack_i64 as unpack_i64

PROTOCOL = 1
FRAME_BYTES_MAX = 64 << 20  # one flush of 256 trajectories x 2k tokens is ~5 MB; 64 MiB is clearly wrong


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


# ---- every worker -> controller ----------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First frame of a worker, on every (re)connect."""

    protocol: int
    worker: WorkerId
    role: str
    """``rollout``, ``trainer`` or ``relay``."""
    incarnation: int
    """Start time of the worker process in ms since the epoch: a restarted worker's is higher."""
    boot: int = 0
    """Boot number of the controller last spoken to, 0 if none."""
    received: int = 0
    """Highest frame number received from the controller in this session."""
    pid: int = 0
    host: str = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Unreliable, both ways, every `heartbeat_s`. Also carries acknowledgements (in the envelope)."""

    lag_s: float = 0.0


class WorkerFailed(Message, frozen=True, kw_only=True):
    """The worker cannot go on and exits after this frame."""

    reason: str
    """One line for people."""
    detail: str = ""
    """Traceback or the last log lines."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The worker stops because it was told to; the loss of its channel is no fault."""


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
    """The prompt of a group as this replica's tokenizer encoded it; sent once after each `AssignGroup`."""

    group: GroupId
    tokens: bytes
    """i32"""


class RolloutReport(Message, frozen=True, kw_only=True):
    """What happened on one replica since its last report, and the lengths of all it has in flight.

    Per in-flight trajectory i: `trajectories[i]` (i64), `attempts[i]` (i32), `num_tokens[i]` (i32, response tokens
    including this delta), `num_new[i]` (i32). The new tokens of all trajectories follow one another in `tokens`
    (i32), `logprobs` (f32, behaviour log-prob) and `sources` (u8: 0 = model, 1 = environment; empty = all model).
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


class Refreshed(Message, frozen=True, kw_only=True):
    """The replica now holds `version`; decoding had stopped for `wait_s` because of it."""

    version: Version
    digest: str
    wait_s: float


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
    """Every rank has copied its shards to the relay; the trainer goes on. The relay then reports `VersionReady`."""

    version: Version
    stall_s: float
    """Seconds the trainer waited for the publication, on rank 0."""


class PublishFailed(Message, frozen=True, kw_only=True):
    """The version was not published; the next one serves."""

    version: Version
    reason: str


class CheckpointSaved(Message, frozen=True, kw_only=True):
    """The checkpoint is complete on disk (atomic rename done)."""

    step: int
    path: str
    seconds: float


class CheckpointFailed(Message, frozen=True, kw_only=True):
    """Nothing usable was written."""

    step: int
    reason: str


# ---- relay -> controller -----------------------------------------------------------------------------------


class RelayReady(Message, frozen=True, kw_only=True):
    """The daemon listens for local trainers and rollouts."""

    directory: str
    """The relay's directory under /dev/shm; `relay.sock` and the slots lie there."""


class VersionReady(Message, frozen=True, kw_only=True):
    """A version is complete in this relay and its digest is known."""

    version: Version
    digest: str
    num_bytes: int


class VersionLost(Message, frozen=True, kw_only=True):
    """A version will never become readable (its writer died, or its digest was wrong)."""

    version: Version
    reason: str


class VersionDropped(Message, frozen=True, kw_only=True):
    """A version that was readable no longer is: its slot is filled with another."""

    version: Version


# ---- controller -> every worker ----------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello. A worker refuses a boot number lower than one it has seen."""

    protocol: int
    boot: int
    run_id: str
    received: int
    """Highest frame number received from this worker's session."""
    config: bytes
    """msgpack of `laminar.config.Config`, resolved."""


class Refused(Message, frozen=True, kw_only=True):
    """Answer to Hello; the worker exits and shows the reason."""

    reason: str


class Stop(Message, frozen=True, kw_only=True):
    """Say Goodbye, clean up, exit 0."""

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
    """Copy the current weights to the relay as `version`. Sent to every rank."""

    version: Version


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Save model, optimizer, RNG and `data_state` to `path`. Sent to every rank."""

    step: int
    path: str
    data_state: bytes


FromWorker = (
    Hello | Heartbeat | WorkerFailed | Goodbye
    | RolloutReady | RolloutReport | Refreshed | RefreshFailed | EvaluationDone | EvaluationFailed
    | TrainerReady | StepDone | StepFailed | ShardsWritten | PublishFailed | CheckpointSaved | CheckpointFailed
    | RelayReady | VersionReady | VersionLost | VersionDropped
)  # fmt: skip
FromController = (
    Welcome
    | Refused
    | Stop
    | Heartbeat
    | AssignGroup
    | Abort
    | Refresh
    | Evaluate
    | StartStep
    | Publish
    | SaveCheckpoint
)


class WorkerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """A frame from a worker."""

    number: int
    received: int
    message: FromWorker


class ControllerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """A frame from the controller."""

    number: int
    received: int
    message: FromController


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
    """u8, one per response token: 0 = model, 1 = environment; empty = all model"""


class TokenRequest(msgspec.Struct, frozen=True, array_like=True):
    """Body of `POST /v1/tokens`: msgpack; the answer is msgpack of list[TokenRow] in the same order."""

    trajectories: list[TrajectoryId]


Decoded = TypeVar("Decoded")

_encoder = msgspec.msgpack.Encoder()
_from_worker = msgspec.msgpack.Decoder(WorkerEnvelope)
_token_request = msgspec.msgpack.Decoder(TokenRequest)
_token_rows = msgspec.msgpack.Decoder(list[TokenRow])
_from_controller = msgspec.msgpack.Decoder(ControllerEnvelope)


def encode(value: Any) -> bytes:
    """msgpack of any message, envelope or struct of this module."""
    return _encoder.encode(value)


def decode_from_worker(frame: bytes) -> WorkerEnvelope:
    """Raises ProtocolError for a frame that is too large, malformed or of an unknown kind."""
    return _decode(_from_worker, frame)


def decode_from_controller(frame: bytes) -> ControllerEnvelope:
    """Raises ProtocolError for a frame that is too large, malformed or of an unknown kind."""
    return _decode(_from_controller, frame)


def decode_token_request(body: bytes) -> TokenRequest:
    """Raises ProtocolError for anything else."""
    return _decode(_token_request, body)


def decode_token_rows(body: bytes) -> list[TokenRow]:
    """The answer of `POST /v1/tokens`. Raises ProtocolError for anything else; any size."""
    try:
        return _token_rows.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed token rows: {error}") from error


def _decode(decoder: msgspec.msgpack.Decoder[Decoded], frame: bytes) -> Decoded:
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds the limit of {FRAME_BYTES_MAX}")
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from error
