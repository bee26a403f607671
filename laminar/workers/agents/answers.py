"""The JSON of chat completions and completions, whole and streamed, in OpenAI's form. Pure."""

import json
from typing import Any

import msgspec

from laminar.workers.agents.calls import Call

STREAM_END = b"data: [DONE]\n\n"


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A token of an answer, as people read it."""

    text: str
    logprob: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call gives the agent."""

    text: str
    finish_reason: str
    """``stop`` or ``length``."""
    said: list[Said]
    """Its tokens, if the call asks for log-probs."""
    num_prompt_tokens: int
    num_tokens: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer to one call begins with."""

    number: int
    created: int
    """Seconds since the epoch."""
    model: str
    fingerprint: str
    """The weight version."""

    def fields(self, call: Call, stream: bool) -> dict[str, Any]:
        """Without choices."""
        prefix, kind = ("chatcmpl", "chat.completion") if call.is_chat else ("cmpl", "text_completion")
        return {
            "id": f"{prefix}-{self.number}",
            "object": f"{kind}.chunk" if stream and call.is_chat else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def whole(head: Head, call: Call, answer: Answer) -> dict[str, Any]:
    """The answer in one piece."""
    logprobs = _logprobs(call, answer.said) if call.logprobs else None
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": logprobs}
    if call.is_chat:
        choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
    else:
        choice["text"] = answer.text
    return head.fields(call, stream=False) | {"choices": [choice], "usage": _usage(answer)}


def piece(head: Head, call: Call, text: str, *, first: bool, said: list[Said]) -> bytes:
    """A part of a streamed answer."""
    return _event(head, call, text, first=first, said=said, finish_reason=None)


def last_pieces(head: Head, call: Call, answer: Answer) -> bytes:
    """The end of a streamed answer."""
    end = _event(head, call, "", first=False, said=[], finish_reason=answer.finish_reason)
    if call.include_usage:
        end += event(head.fields(call, stream=True) | {"choices": [], "usage": _usage(answer)})
    return end + STREAM_END


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _event(head: Head, call: Call, text: str, *, first: bool, said: list[Said], finish_reason: str | None) -> bytes:
    logprobs = _logprobs(call, said) if call.logprobs and said else None
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": logprobs}
    if call.is_chat:
        choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
    else:
        choice["text"] = text
    return event(head.fields(call, stream=True) | {"choices": [choice]})


def _logprobs(call: Call, said: list[Said]) -> dict[str, Any]:
    if call.is_chat:
        entries = [{"token": t.text, "logprob": t.logprob, "bytes": None, "top_logprobs": []} for t in said]
        return {"content": entries, "refusal": None}
    return {
        "tokens": [token.text for token in said],
        "token_logprobs": [token.logprob for token in said],
        "top_logprobs": None,
        "text_offset": None,
    }


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.num_prompt_tokens, answer.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
