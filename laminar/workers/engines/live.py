"""One request inside an engine, from `submit` to the drain that delivers its finish."""

import time
from typing import Self

import msgspec

from laminar.workers.engines.base import Output, Request
from laminar.workers.engines.sampling import check_sampling


class Live(msgspec.Struct, kw_only=True, eq=False):
    """A request, its limits, and its tokens since the last drain."""

    request: Request
    num_tokens_max: int
    """Most response tokens, by max_tokens and by the context."""
    kv_tokens_max: int
    """Prompt plus most response tokens: what admission sets aside."""
    stop_ids: frozenset[int]
    num_tokens: int
    """Response tokens so far, prefix included."""
    last_token: int = -1
    tokens: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    aborted: bool = False
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None

    @classmethod
    def accept(cls, request: Request, *, vocab_size: int, context_tokens_max: int, kv_tokens_max: int) -> Self:
        """Raises ValueError, saying why, for a request that an engine with these limits can never run."""
        check_sampling(request.sampling)
        _check_tokens(request, vocab_size)
        num_prompt, num_prefix = len(request.prompt_tokens), len(request.prefix_tokens)
        num_tokens_max = min(request.sampling.max_tokens, context_tokens_max - num_prompt)
        if num_prefix >= num_tokens_max:
            raise ValueError(
                f"request {request.key}: {num_prompt} prompt and {num_prefix} prefix tokens leave no room for one more "
                f"(context {context_tokens_max}, max_tokens {request.sampling.max_tokens})"
            )
        if num_prompt + num_tokens_max > kv_tokens_max:
            raise ValueError(
                f"request {request.key} may need {num_prompt + num_tokens_max} KV tokens and the engine has "
                f"{kv_tokens_max}: lower max_tokens or raise kv_tokens_max"
            )
        return cls(
            request=request,
            num_tokens_max=num_tokens_max,
            kv_tokens_max=num_prompt + num_tokens_max,
            stop_ids=frozenset(request.sampling.stop_ids),
            num_tokens=num_prefix,
            submitted_at=time.monotonic(),
        )

    @property
    def sequence(self) -> tuple[int, ...]:
        """What has to be prefilled: prompt and prefix."""
        return (*self.request.prompt_tokens, *self.request.prefix_tokens)

    @property
    def kv_tokens(self) -> int:
        """Prompt and response tokens so far."""
        return len(self.request.prompt_tokens) + self.num_tokens

    def append(self, token: int, logprob: float) -> str | None:
        """Take a new token. Returns the finish reason if the response ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.last_token = token
        self.num_tokens += 1
        if token in self.stop_ids and self.num_tokens > self.request.sampling.ignore_stop_until:
            return "stop"
        return "length" if self.num_tokens >= self.num_tokens_max else None

    def take_output(self) -> Output:
        """The tokens since the last call; they are gone from here."""
        now = self.ended_at if self.ended_at is not None else time.monotonic()
        started = self.started_at if self.started_at is not None else now
        output = Output(
            key=self.request.key,
            tokens=self.tokens,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            queued_s=started - self.submitted_at,
            decode_s=now - started,
        )
        self.tokens, self.logprobs = [], []
        return output


def _check_tokens(request: Request, vocab_size: int) -> None:
    """Raises ValueError: one wrong id would fail the forward of the whole batch."""
    if not request.prompt_tokens:
        raise ValueError(f"request {request.key} has an empty prompt: give at least one token")
    for name, tokens in (("prompt", request.prompt_tokens), ("prefix", request.prefix_tokens)):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            raise ValueError(f"request {request.key}: a {name} token lies outside the vocabulary of {vocab_size}")
