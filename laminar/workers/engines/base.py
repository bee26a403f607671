"""What a rollout worker asks of an inference engine.

One engine = one replica = one set of weights. The worker submits requests, drains their new tokens at every flush, and
replaces the weights only while no request runs. Log-probs are those of the distribution **after temperature and before
truncation** (top-p, top-k); at temperature 0 those of temperature 1.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from laminar.errors import LaminarError
from laminar.ids import Version
from laminar.workers.relay.manifest import Snapshot


class WeightsBroken(LaminarError):
    """A load failed half-way: the engine holds no version whole and must be ended."""


class EngineError(LaminarError):
    """The engine cannot work any more; only a new one can."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled."""

    max_tokens: int
    """Most response tokens, the prefix included."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    stop_ids: tuple[int, ...] = ()
    """Generation ends after one of these tokens, which belongs to the response."""
    ignore_stop_until: int = 0
    """Stop tokens among the first so many response tokens (prefix included) do not end generation."""
    seed: int = 0
    """Same seed, prompt, prefix and weights on the same machine: same tokens, whatever else runs in the batch (up to
    floating-point ties)."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory to generate or to continue."""

    key: int
    """Unique among the engine's live requests."""
    prompt_tokens: list[int]
    prefix_tokens: list[int] = []
    """Response tokens that exist already; generation goes on after them."""
    sampling: SamplingParams


class Output(msgspec.Struct, kw_only=True):
    """New tokens of one request since the last drain."""

    key: int
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error: …``; None = still running. Nothing follows a finish."""
    queued_s: float = 0.0
    decode_s: float = 0.0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's load right now."""

    num_running: int
    num_waiting: int
    kv_tokens: int
    busy_s: float
    """Seconds spent prefilling or decoding since the engine started."""


class Engine(Protocol):
    """All methods are called from the worker's event loop and return at once, except the coroutines."""

    num_requests_max: int
    kv_tokens_max: int
    context_tokens_max: int
    num_requests_memory_bound: int
    """The largest decode batch that is still memory-bound, by the roofline of the device; 0 = unknown."""

    async def start(self, on_finish: Callable[[int], None]) -> None:
        """Load the model. `on_finish(key)` is later called on the loop soon after a request ended. Raises StartError."""

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError when prompt + prefix leave no room for one token in the context."""

    def abort(self, key: int) -> None:
        """End a request; its tokens so far and finish reason ``abort`` come with a later `drain`. Unknown keys are ignored."""

    def drain(self) -> list[Output]:
        """New tokens of all requests since the last call, in submission order."""

    def usage(self) -> Usage: ...

    async def load_weights(self, version: Version, snapshot: Snapshot) -> None:
        """Replace all weights from a leased relay slot. RuntimeError if a request runs. On any error but WeightsBroken the old
        weights stay whole."""

    async def logprobs(self, tokens: list[int]) -> list[float]:
        """Of `tokens[1:]`, each given those before it, at temperature 1. RuntimeError if a request runs."""

    async def watch(self) -> None:
        """Runs while the engine can work. Raises EngineError, saying why, once it cannot; requests may be left unfinished then."""

    async def stop(self) -> None:
        """Free everything. Safe to call twice."""
