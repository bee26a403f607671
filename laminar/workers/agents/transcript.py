"""One trajectory out of the calls of an agent: which tokens, from whom, in which context. Pure.

The first call's prompt is the trajectory's prompt; everything after it is the response, in the order in which the model saw
or said it:

    prompt │ answer 1 │ added │ answer 2 │ prompt of a new segment │ answer 3 │ …
             MODEL      ENV     MODEL      NEW_CONTEXT ENV ENV …     MODEL

A call *continues* a segment when its rendered text is the text of the segment's last call, its answer, and more; the tokens of
what is more are appended and the sampled ids stay as they are. A call that continues no segment has rewritten the history.

Invariants:
* A segment's tokens are its context from its start on: what the engine was given for its last call, and that call's answer.
* The response is append-only: what was reported once never changes.
* No token that the model sampled is encoded again where its segment goes on.
"""

from collections.abc import Callable
from typing import Any

import msgspec

MODEL, ENVIRONMENT, NEW_CONTEXT = 0, 1, 2
"""Sources of response tokens, as in `wire.RolloutReport`."""

Encode = Callable[[str, bool], list[int]]
"""(text, with the tokenizer's own first token?) -> tokens. A chat template writes that token itself."""


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What a call asks the model to go on from."""

    text: str
    messages: list[dict[str, Any]] | None = None
    """Of a chat; None = a plain completion. A chat's text is its messages by the template, the opening of an answer included."""


class Segment(msgspec.Struct, kw_only=True, eq=False):
    """One context that grew, and its last call."""

    tokens: list[int]
    asked: Rendering
    answer: str = ""
    """What the agent was given."""
    hidden: str = ""
    """Text that was sampled after `answer` and not given: the end-of-turn token, or a stop string."""
    answered: bool = False
    """Its last call is over; one that the agent did not wait for never is."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that the response grows by."""

    tokens: list[int]
    logprobs: list[float]
    sources: bytes


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """How a call would begin; nothing has changed yet."""

    segment: Segment | None
    """The one that goes on; None = a new one begins."""
    rendering: Rendering
    tokens: list[int]
    """New tokens of the call's context: all of it for a new segment."""

    @property
    def num_context_tokens(self) -> int:
        return len(self.tokens) + (len(self.segment.tokens) if self.segment else 0)


class Transcript:
    """The calls of one agent so far."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        """Empty before the first call."""
        self.num_tokens = 0
        """Response tokens: model and environment."""
        self.num_model_tokens = 0
        self.segments: list[Segment] = []

    @property
    def last_answer(self) -> str:
        """Of the newest call that was answered; empty = none was."""
        return next((segment.answer for segment in reversed(self.segments) if segment.answered), "")

    def open(self, rendering: Rendering, encode: Encode) -> Opened:
        """How a call of this rendering begins: after the last segment, or as a new one.

        A call that continues an older segment begins a new one, whose context is that one's very tokens and what is added.
        """
        for segment in reversed(self.segments):
            added = added_text(segment, rendering)
            if added is None:
                continue
            tokens = encode(added, False) if added else []
            if segment is self.segments[-1]:
                return Opened(segment=segment, rendering=rendering, tokens=tokens)
            return Opened(segment=None, rendering=rendering, tokens=segment.tokens + tokens)
        return Opened(segment=None, rendering=rendering, tokens=encode(rendering.text, rendering.messages is None))

    def begin(self, opened: Opened) -> Delta:
        """The call begins; what the response grows by before its answer (nothing for the first call: that is the prompt)."""
        if opened.segment is not None:
            opened.segment.tokens += opened.tokens
            opened.segment.asked, opened.segment.answered = opened.rendering, False
            return self._grow(opened.tokens, bytes([ENVIRONMENT]) * len(opened.tokens))
        self.segments.append(Segment(tokens=list(opened.tokens), asked=opened.rendering))
        if len(self.segments) == 1:
            self.prompt = list(opened.tokens)
            return self._grow([], b"")
        sources = bytes([NEW_CONTEXT]) + bytes([ENVIRONMENT]) * (len(opened.tokens) - 1)
        return self._grow(opened.tokens, sources)

    def said(self, tokens: list[int], logprobs: list[float]) -> Delta:
        """The model said these in the last segment."""
        self.segments[-1].tokens += tokens
        self.num_model_tokens += len(tokens)
        self.num_tokens += len(tokens)
        return Delta(tokens=list(tokens), logprobs=list(logprobs), sources=bytes([MODEL]) * len(tokens))

    def answered(self, answer: str, hidden: str) -> None:
        """The call is over: the agent was given `answer`; `hidden` was sampled after it."""
        segment = self.segments[-1]
        segment.answer, segment.hidden, segment.answered = answer, hidden, True

    def _grow(self, tokens: list[int], sources: bytes) -> Delta:
        self.num_tokens += len(tokens)
        return Delta(tokens=list(tokens), logprobs=[0.0] * len(tokens), sources=sources)


def added_text(segment: Segment, now: Rendering) -> str | None:
    """What `now` adds after the segment's answer; None = it does not contain call and answer unchanged.

    White space around the answer may differ: agents and templates strip it, and the tokens stay as they were sampled. What was
    sampled after the answer and not given to the agent is not added twice where the template, or the agent, writes it too.
    """
    asked = segment.asked
    if not segment.answered or (asked.messages is None) != (now.messages is None):
        return None
    if not now.text.startswith(asked.text) or now.text == asked.text:
        return None  # the same once more asks for another answer
    if asked.messages is not None and not _quotes(asked.messages, segment.answer, now.messages or []):
        return None
    rest = _after(segment.answer, now.text[len(asked.text) :])
    return None if rest is None else rest.removeprefix(segment.hidden)


def _quotes(asked: list[dict[str, Any]], answer: str, now: list[dict[str, Any]]) -> bool:
    """Whether the message after those of the call is its answer."""
    if len(now) <= len(asked):
        return False
    message = now[len(asked)]
    return message["role"] == "assistant" and message["content"].strip() == answer.strip()


def _after(answer: str, text: str) -> str | None:
    for shown, found in ((answer, text), (answer.strip(), text.lstrip())):
        if found.startswith(shown):
            return found[len(shown) :]
    return None
