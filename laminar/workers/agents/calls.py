"""What an agent may ask of the proxy: the bodies of OpenAI's chat completions and completions, checked. Pure.

Every parameter is honoured, overruled, without meaning here, or refused with a 400 that names it; none is dropped in silence.
"""

import json
from typing import Any

import msgspec

from laminar.errors import LaminarError

STOPS_MAX = 16  # OpenAI takes 4, vLLM any number; each costs a search per flush
STOP_CHARS_MAX = 256  # a streamed answer is held back by as much

HONOURED = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"}
HONOURED |= {"logprobs", "top_logprobs"}
OVERRULED = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
OVERRULED += ("repetition_penalty",)
"""How tokens are drawn is the run's business: the trainer recomputes log-probs under the run's sampling."""
WITHOUT_MEANING = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"}
WITHOUT_MEANING |= {"skip_special_tokens", "spaces_between_special_tokens"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Refused unless null or one of these values, which ask for nothing."""


class CallError(LaminarError):
    """An answer that is an error, as OpenAI's clients understand it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request of an agent."""

    messages: list[dict[str, Any]] | None = None
    """Of a chat completion; role and content are text."""
    prompt: str = ""
    """Of a completion."""
    max_tokens: int = 0
    """0 = as many as there is room for."""
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    overruled: bool = False
    """It asks for another sampling than the run's."""

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


def parse(body: bytes, *, chat: bool, model: str) -> Call:
    """The call in a request body. Raises CallError."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _refused(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise _refused(f"the body is {type(values).__name__}, expected a JSON object")
    values = {key: value for key, value in values.items() if value is not None}
    _check_parameters(values)
    if values.get("model") != model:
        raise CallError(404, "model_not_found", f"no model {values.get('model')!r} here; there is {model!r}")
    return Call(
        messages=_messages(values.get("messages")) if chat else None,
        prompt="" if chat else _prompt(values.get("prompt")),
        max_tokens=_max_tokens(values),
        stops=_stops(values.get("stop", [])),
        stream=_flag(values, "stream"),
        include_usage=_include_usage(values),
        logprobs=_logprobs(values, chat),
        overruled=any(name in values for name in OVERRULED),
    )


def _refused(message: str, code: str = "invalid_request") -> CallError:
    return CallError(400, code, message)


def _check_parameters(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name in HONOURED or name in OVERRULED or name in WITHOUT_MEANING:
            continue
        if name not in NEUTRAL:
            raise _refused(f"parameter {name!r} is unknown here", "unknown_parameter")
        if value not in NEUTRAL[name]:
            raise _refused(f"{name} = {value!r:.200} is not supported; leave it out", "unsupported_value")


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _refused("messages must be a list of at least one message")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    """Role, content as one text, and name if there is one."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _refused(f"{where} must be an object with a role")
    if value.get("tool_calls") or value.get("function_call"):
        raise _refused(f"{where} has tool calls, which are not supported: write them as text")
    message = {"role": value["role"], "content": _content(value.get("content"), where)}
    return message | ({"name": value["name"]} if isinstance(value.get("name"), str) else {})


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return _as_unicode(value, where)
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return _as_unicode("".join(part["text"] for part in value), where)
    raise _refused(f"{where}.content must be text, or a list of parts with text")


def _as_unicode(text: str, where: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _refused(f"{where} has half of a surrogate pair: no Unicode text")
    return text


def _prompt(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if not isinstance(value, str) or not value:
        raise _refused("prompt must be one text that is not empty (token ids and several prompts are not supported)")
    return _as_unicode(value, "prompt")


def _max_tokens(values: dict[str, Any]) -> int:
    value = values.get("max_completion_tokens", values.get("max_tokens", 0))
    given = "max_completion_tokens" in values or "max_tokens" in values
    if not isinstance(value, int) or isinstance(value, bool) or (given and value < 1):
        raise _refused(f"max_tokens = {value!r:.80} must be a whole number, at least 1")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refused("stop must be a text or a list of texts, none of them empty")
    if len(stops) > STOPS_MAX or any(len(stop) > STOP_CHARS_MAX for stop in stops):
        raise _refused(f"stop takes at most {STOPS_MAX} texts of at most {STOP_CHARS_MAX} characters")
    return tuple(stops)


def _flag(values: dict[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise _refused(f"{name} = {value!r:.80} must be true or false")
    return value


def _include_usage(values: dict[str, Any]) -> bool:
    options = values.get("stream_options", {})
    if not isinstance(options, dict):
        raise _refused("stream_options must be an object")
    return _flag(options, "include_usage")


def _logprobs(values: dict[str, Any], chat: bool) -> bool:
    """Those of the sampled tokens; others are not known."""
    others = values.get("top_logprobs", 0) if chat else values.get("logprobs", 0)
    if others is not False and others != 0:
        raise _refused("log-probs are known of the sampled tokens only: top_logprobs (completions: logprobs) can be 0")
    return _flag(values, "logprobs") if chat else "logprobs" in values and values["logprobs"] is not False
