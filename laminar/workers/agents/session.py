"""The calls of one trajectory's agent, one after another, through one replica.

Invariants:
* One call at a time: what comes while another is answered waits, in order of arrival.
* What the engine samples for a call is recorded as it comes, up to where the answer ends, also if nobody waits for it any more.
* After `close` nothing is recorded, and no call is left waiting.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Protocol

import msgspec

from laminar.ids import derive_seed
from laminar.workers.agents.calls import Call, CallError
from laminar.workers.agents.running import Running
from laminar.workers.agents.transcript import Delta, Opened, Rendering, Transcript
from laminar.workers.engines.base import Output
from laminar.workers.rollout.requests import Requests
from laminar.workers.rollout.text import PromptError, TextCodec

CALL_STREAM = 4  # keeps the seeds of a trajectory's calls apart from one another


class Recorder(Protocol):
    """Where the tokens of a trajectory go."""

    def began(self, prompt_tokens: list[int]) -> None:
        """The first call: the trajectory has a prompt."""

    def grew(self, delta: Delta) -> None:
        """Its response grew."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no trajectory: as in `wire.Failed`."""

    kind: str
    reason: str
    detail: str


class Counted(StrEnum):
    """What is counted of agents' calls; docs/metrics.md has them as `agent/…`."""

    CALLS = "num_calls"
    REWRITES = "num_rewrites"
    """Calls that did not contain what came before."""
    OVERRULED = "num_overruled"
    """Calls that asked for another sampling than the run's."""
    REFUSED = "num_refused"
    """Calls for which there was no room."""
    ABANDONED = "num_abandoned"
    """Calls that the agent did not wait for."""


class Session:
    """One trajectory, or, without a recorder, a greedy run of an evaluation."""

    def __init__(
        self,
        *,
        requests: Requests,
        codec: TextCodec,
        live: "dict[int, Session]",
        abort: Callable[[int], None],
        count: Callable[[Counted], None],
        recorder: Recorder | None,
        seed: int,
        version: str,
        on_rewrite: str,
    ) -> None:
        self.version = version
        """Of the weights that answer."""
        self.transcript = Transcript()
        self.failure: Failure | None = None
        self.is_cut = False
        """Its last call ended, or was refused, for want of room."""
        self.ended = asyncio.Event()
        """Set when the agent is to be stopped."""
        self._live, self._abort = live, abort
        self._running: dict[int, Running | None] = {}
        """Requests that the engine has, which are in `live` too; None = the answer is not wanted any more."""
        self._requests, self._codec, self._count, self._recorder = requests, codec, count, recorder
        self._seed, self._on_rewrite = seed, on_rewrite
        self._num_calls = 0
        self._turn = asyncio.Lock()
        self._closed = False

    @contextlib.asynccontextmanager
    async def call(self, call: Call) -> AsyncIterator[Running]:
        """Begin a call, in turn. Raises CallError. A call that is left before its end is aborted."""
        async with self._turn:
            if self._closed or self.failure is not None:
                raise self._over()
            running = self._begin(call)
            try:
                yield running
            finally:
                self._leave(running)

    def take(self, output: Output) -> None:
        """What the engine says of one of the session's requests in `live`."""
        running = self._running[output.key]
        if output.finish_reason is not None:
            del self._running[output.key], self._live[output.key]
        if running is None or running.finish_reason or self._closed:
            return
        num = running.take(output)
        if num:
            self._record(self.transcript.said(running.tokens[-num:], running.logprobs[-num:]))
        if running.finish_reason:
            self._finish(running)
        elif output.finish_reason is not None:
            detail = output.finish_reason.removeprefix("error: ")
            self.fail(Failure(kind="infra", reason="engine_error", detail=detail))
            running.fail(self._over())

    def fail(self, failure: Failure) -> None:
        """There will be no trajectory; the first reason counts."""
        self.failure = self.failure or failure
        self.ended.set()

    def close(self) -> None:
        """The agent is gone, or is to go."""
        self._closed = True
        for running in self._running.values():
            if running is not None:
                running.fail(self._over())
        self._drop_requests()

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the last call's answer follows."""
        return len(self.transcript.segments[-1].tokens)

    # ---- a call --------------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> Running:
        self._count(Counted.CALLS)
        if call.overruled:
            self._count(Counted.OVERRULED)
        opened = self.transcript.open(self._render(call), self._encode)
        if not opened.num_context_tokens:
            raise CallError(400, "invalid_request", "the messages have no tokens at all")
        if self.transcript.segments and opened.segment is None:
            self._rewritten()
        room, what = self._room(opened)
        if room < 1:
            self._refuse_for_room(opened, what)
        self._begin_in_transcript(opened)
        self.is_cut = False
        running = Running(call, self._codec, room)
        self._submit(running)
        return running

    def _submit(self, running: Running) -> None:
        self._num_calls += 1
        seed = derive_seed(self._seed, CALL_STREAM, self._num_calls)
        tokens = list(self.transcript.segments[-1].tokens)
        num_max = min(running.room, running.call.max_tokens or running.room)
        try:
            key = self._requests.answer(tokens, num_max, seed, greedy=self._recorder is None)
        except ValueError as error:
            self.fail(Failure(kind="data", reason="prompt_rejected", detail=str(error)))
            raise CallError(400, "invalid_request", str(error)) from error
        except RuntimeError as error:  # the engine has ended, which its `watch` tells too
            self.fail(Failure(kind="infra", reason="engine_error", detail=str(error)))
            raise self._over() from error
        self._running[key], self._live[key] = running, self

    def _begin_in_transcript(self, opened: Opened) -> None:
        is_first = not self.transcript.segments
        delta = self.transcript.begin(opened)
        if is_first and self._recorder is not None:
            self._recorder.began(self.transcript.prompt)
        self._record(delta)

    def _render(self, call: Call) -> Rendering:
        if call.messages is None:
            return Rendering(text=call.prompt)
        try:
            return Rendering(text=self._codec.render(call.messages), messages=call.messages)
        except PromptError as error:
            raise CallError(400, "invalid_messages", str(error)) from error

    def _encode(self, text: str, special: bool) -> list[int]:
        return self._codec.encode_text(text, special=special)

    def _rewritten(self) -> None:
        self._count(Counted.REWRITES)
        if self._on_rewrite != "refuse":
            return
        detail = (
            'the call does not contain the calls before it and their answers unchanged (task.on_rewrite = "refuse")'
        )
        self.fail(Failure(kind="data", reason="history_rewritten", detail=detail))
        raise CallError(409, "history_rewritten", detail)

    def _room(self, opened: Opened) -> tuple[int, str]:
        """Tokens that the answer may have, and what limits them."""
        added = len(opened.tokens) if self.transcript.segments else 0
        of_trajectory = self._requests.num_response_tokens_max - self.transcript.num_tokens - added
        of_context = self._requests.context_tokens_max - opened.num_context_tokens
        if of_context < of_trajectory:
            return of_context, f"the context of {self._requests.context_tokens_max} tokens"
        return of_trajectory, f"rollout.max_tokens = {self._requests.num_response_tokens_max} of the whole trajectory"

    def _refuse_for_room(self, opened: Opened, what: str) -> None:
        self._count(Counted.REFUSED)
        self.is_cut = True
        num = opened.num_context_tokens
        text = f"the messages have {num} tokens in all, and {what} leaves no room for an answer"
        raise CallError(400, "context_length_exceeded", text)

    def _finish(self, running: Running) -> None:
        self.transcript.answered(running.text, running.hidden)
        self.is_cut = running.finish_reason == "length" and len(running.tokens) >= running.room
        self._drop_requests()

    def _leave(self, running: Running) -> None:
        if running.finish_reason or running.error is not None:
            return
        self._count(Counted.ABANDONED)
        self._drop_requests()

    def _drop_requests(self) -> None:
        """What the engine still generates is of no use."""
        for key in self._running:
            self._running[key] = None
            self._abort(key)

    def _over(self) -> CallError:
        if self.failure is None:
            return CallError(503, "trajectory_over", "the trajectory of this key is over")
        return CallError(500, self.failure.reason, f"the trajectory has failed: {self.failure.detail}")

    def _record(self, delta: Delta) -> None:
        if self._recorder is not None and delta.tokens:
            self._recorder.grew(delta)
