"""One answer of vLLM's `POST /inference/v1/generate`: what is asked, and the events that come back. Pure: no I/O.

A *leg* is one such request. A trajectory usually takes one. It takes two when its first tokens ignore stop tokens: vLLM's own
`min_tokens` would forbid those tokens instead of ignoring them, and so sample from another distribution than the trainer's.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from laminar.ids import derive_seed
from laminar.workers.engines.base import SamplingParams

END = b"\n\n"
PREFIX = b"data: "
DONE = b"[DONE]"
ID_PREFIX = "generate-tokens-"
"""vLLM puts this before the id of a request; aborts need the whole."""
LOGPROB_NOT_FINITE = -9000.0
"""vLLM writes -9999 for a log-prob that is no finite number."""
EVENT_BYTES_MAX = 16 << 20  # a thousand tokens of one event take 0.3 MB; more than this is not a stream of tokens


class StreamError(Exception):
    """The server ended this answer with an error, or sent what is no answer. The text is for people."""


class LogProb(msgspec.Struct, gc=False):
    """Of one sampled token."""

    logprob: float


class LogProbs(msgspec.Struct, gc=False):
    """Of the tokens of one event."""

    content: list[LogProb]


class Span(msgspec.Struct):
    """Response tokens `start` up to `end` of this leg were sampled under `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """New tokens; the last event of a leg has the finish reason and the spans."""

    token_ids: list[int]
    logprobs: LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Failure(msgspec.Struct):
    message: str


class Event(msgspec.Struct):
    """One `data:` line."""

    choices: list[Choice] = []
    error: _Failure | None = None


class _PromptAnswer(msgspec.Struct):
    prompt_logprobs: list[dict[str, LogProb] | None]
    """By position, then by token id; None for the first."""


class Leg(msgspec.Struct, frozen=True):
    """What one request to the server is to generate."""

    num_tokens_max: int
    stop_ids: tuple[int, ...]


def next_leg(sampling: SamplingParams, num_tokens: int, num_tokens_max: int) -> Leg:
    """What to ask for after `num_tokens` response tokens, prefix included; there is room for at least one more."""
    floor = min(sampling.ignore_stop_until, num_tokens_max)
    if num_tokens < floor and sampling.stop_ids:
        return Leg(floor - num_tokens, ())
    return Leg(num_tokens_max - num_tokens, sampling.stop_ids)


def body(request_id: str, tokens: list[int], num_tokens: int, leg: Leg, sampling: SamplingParams) -> bytes:
    """The request: `tokens` is all there is so far, prompt included, `num_tokens` of it response.

    vLLM draws a request's random numbers from its seed in order, so each leg has a seed of its own.
    """
    params: dict[str, Any] = {
        "max_tokens": leg.num_tokens_max,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": derive_seed(sampling.seed, num_tokens),
        "stop_token_ids": leg.stop_ids,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "skip_special_tokens": False,
    }
    return msgspec.json.encode(
        {"request_id": request_id, "token_ids": tokens, "stream": True, "sampling_params": params}
    )


def prompt_body(tokens: list[int]) -> bytes:
    """The request for the log-probs of `tokens`."""
    params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    return msgspec.json.encode({"token_ids": tokens, "sampling_params": params})


def prompt_logprobs(text: str, tokens: list[int]) -> list[float]:
    """Of `tokens[1:]`, from the answer to `prompt_body`. Raises RuntimeError."""
    try:
        found = msgspec.json.decode(text, type=_PromptAnswer).prompt_logprobs[1:]
        return [at[str(token)].logprob for at, token in zip(found, tokens[1:], strict=True)]  # type: ignore[index]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"vLLM's log-probs of a prompt cannot be read: {type(error).__name__}: {error}") from error


class Events:
    """Cuts a byte stream into events."""

    def __init__(self) -> None:
        self._rest = b""
        self._decode = msgspec.json.Decoder(Event).decode

    def feed(self, data: bytes) -> Iterator[Choice]:
        """The choices of all events that are complete with `data`. Raises StreamError."""
        *whole, self._rest = (self._rest + data).split(END)
        if len(self._rest) > EVENT_BYTES_MAX:
            raise StreamError(f"an event of more than {EVENT_BYTES_MAX} bytes")
        for line in whole:
            payload = line.removeprefix(PREFIX)
            if payload != DONE:
                yield from self._choices(payload)

    def _choices(self, payload: bytes) -> list[Choice]:
        try:
            event = self._decode(payload)
        except msgspec.MsgspecError as error:
            raise StreamError(f"an event that is no answer ({error}): {payload[:200]!r}") from error
        if event.error is not None:
            raise StreamError(event.error.message)
        return event.choices


def logprobs_of(choice: Choice) -> list[float]:
    """One per token. Raises StreamError when one is missing or no finite number."""
    logprobs = [each.logprob for each in choice.logprobs.content] if choice.logprobs else []
    if len(logprobs) != len(choice.token_ids):
        raise StreamError(f"{len(choice.token_ids)} tokens came with {len(logprobs)} log-probs")
    if logprobs and min(logprobs) < LOGPROB_NOT_FINITE:
        raise StreamError("a sampled token has a log-prob that is no finite number: the weights are broken")
    return logprobs


def check_spans(spans: list[Span] | None, num_tokens: int, version: str) -> None:
    """Raises StreamError unless all tokens of the leg were sampled under `version`, and all of them came."""
    if num_tokens and not spans:
        raise StreamError("the server does not say which weights generated these tokens")
    for span in spans or []:
        if span.version != version:
            raise StreamError(
                f"tokens {span.start} to {span.end} were generated by weights {span.version!r}, not {version!r}"
            )
    covered = sum(span.end - span.start for span in spans or [])
    if covered != num_tokens:
        raise StreamError(f"the server generated {covered} tokens and {num_tokens} came")
