"""The answer to one call while the engine generates it: tokens in, text out, and where it ends."""

import asyncio

from laminar.workers.agents.answers import Said
from laminar.workers.agents.calls import Call, CallError
from laminar.workers.engines.base import Output
from laminar.workers.rollout.text import TextCodec

PARTIAL = "\ufffd"  # what a decoder shows for a character whose bytes have not all come


class Running:
    """Give it the engine's outputs. `room`: the most tokens that it could have, whatever the call asks for."""

    def __init__(self, call: Call, codec: TextCodec, room: int) -> None:
        self.call, self.room = call, room
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        """What the agent is to be given so far."""
        self.hidden = ""
        """What was sampled after it, once it has ended."""
        self.finish_reason = ""
        """``stop`` or ``length``; empty = it goes on."""
        self.error: CallError | None = None
        self._codec = codec
        self._num_shown, self._num_said = 0, 0
        self._changed = asyncio.Event()

    def take(self, output: Output) -> int:
        """New tokens, perhaps the end; how many of them belong to the answer: none after a stop string."""
        before = len(self.tokens)
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        if output.finish_reason or self.call.stops or self.call.stream:
            self._read(before, output.finish_reason or "")
        self._changed.set()
        return len(self.tokens) - before

    def fail(self, error: CallError) -> None:
        """There is no answer."""
        self.error = error
        self._changed.set()

    async def more(self) -> None:
        """Wait until something has changed since the last call. Raises the CallError that ended it."""
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error

    async def done(self) -> None:
        """Wait for the end. Raises CallError."""
        while not self.finish_reason:
            await self.more()

    def fresh(self) -> str:
        """Text that was not returned before and cannot be taken back: no part of a stop string, no half of a character."""
        end = len(self.text)
        if not self.finish_reason:
            end -= max((len(stop) - 1 for stop in self.call.stops), default=0)
            end = min(end, len(self.text.rstrip(PARTIAL)))
        text = self.text[self._num_shown : max(end, self._num_shown)]
        self._num_shown += len(text)
        return text

    def said(self) -> list[Said]:
        """Tokens that were not returned before, if the call asks for log-probs."""
        if not self.call.logprobs:
            return []
        rows = list(zip(self.tokens, self.logprobs, strict=True))[self._num_said :]
        self._num_said = len(self.tokens)
        return [Said(text=self._codec.decode_all([token]), logprob=logprob) for token, logprob in rows]

    def _read(self, before: int, reason: str) -> None:
        self.text = self._codec.decode(self.tokens)
        if self._first_stop() >= 0:
            self._cut(before)
        elif reason == "stop" and self.tokens and self.tokens[-1] in self._codec.stop_ids:
            self.text = self._codec.decode(self.tokens[:-1])
            self.hidden = self._codec.decode_all(self.tokens[-1:])
            self.finish_reason = reason
        elif reason in ("stop", "length"):
            self.finish_reason = reason

    def _cut(self, before: int) -> None:
        """End with the token that completed the first stop string; what was sampled after it is forgotten."""
        num = before + 1
        while self._first_stop(text := self._codec.decode(self.tokens[:num])) < 0:
            num += 1
        del self.tokens[num:], self.logprobs[num:]
        at = self._first_stop(text)
        self.text, self.hidden, self.finish_reason = text[:at], text[at:], "stop"

    def _first_stop(self, text: str | None = None) -> int:
        found = [(self.text if text is None else text).find(stop) for stop in self.call.stops]
        return min((at for at in found if at >= 0), default=-1)
