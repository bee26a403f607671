"""What agents may ask of the proxy, and what is refused how."""

import json
from typing import Any

import pytest

from laminar.workers.agents.answers import Answer, Head, Said, last_pieces, piece, whole
from laminar.workers.agents.calls import Call, CallError, parse
from laminar.workers.agents.running import Running
from laminar.workers.engines.base import Output

MESSAGES = [{"role": "user", "content": "hi"}]
HEAD = Head(number=7, created=1, model="policy", fingerprint="v3")


def chat(**values: Any) -> Call:
    return parse(json.dumps({"model": "policy", "messages": MESSAGES, **values}).encode(), chat=True, model="policy")


def plain(**values: Any) -> Call:
    return parse(json.dumps({"model": "policy", "prompt": "hi", **values}).encode(), chat=False, model="policy")


def test_what_is_asked_for_is_read() -> None:
    call = chat(max_completion_tokens=5, stop="x", stream=True, stream_options={"include_usage": True}, logprobs=True)
    assert call == Call(
        messages=MESSAGES, max_tokens=5, stops=("x",), stream=True, include_usage=True, logprobs=True, overruled=False
    )
    assert plain(max_tokens=3, stop=["a", "b"]) == Call(prompt="hi", max_tokens=3, stops=("a", "b"))
    assert plain(prompt=["hi"]).prompt == "hi"
    assert plain(logprobs=0).logprobs
    assert not plain().logprobs


def test_null_and_neutral_values_ask_for_nothing() -> None:
    call = chat(n=1, tools=[], tool_choice="auto", logit_bias={}, response_format={"type": "text"}, stop=None, user="u")
    assert call == chat()


def test_content_parts_are_joined_and_null_is_empty() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "system", "content": None}, {"role": "user", "content": parts, "name": "n"}])
    assert call.messages == [{"role": "system", "content": ""}, {"role": "user", "content": "ab", "name": "n"}]


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "presence_penalty"])
def test_another_sampling_is_noted_as_overruled(name: str) -> None:
    assert chat(**{name: 0}).overruled


@pytest.mark.parametrize(
    "values",
    [
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"guided_json": "{}"},
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"stop": 5},
        {"stream": "yes"},
        {"stream_options": 1},
        {"top_logprobs": 2},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
    ],
)
def test_what_cannot_be_done_is_refused_with_400(values: dict[str, Any]) -> None:
    with pytest.raises(CallError) as raised:
        chat(**values)
    assert raised.value.status == 400
    assert raised.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["", 5, [1, 2], ["a", "b"], None])
def test_prompts_other_than_one_text_are_refused(prompt: Any) -> None:
    with pytest.raises(CallError, match="prompt"):
        plain(prompt=prompt)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(CallError, match="body"):
        parse(body, chat=True, model="policy")


def test_an_unknown_model_is_404_and_names_the_known_one() -> None:
    with pytest.raises(CallError, match="there is 'policy'") as raised:
        chat(model="gpt-5")
    assert raised.value.status == 404


# ---- answers -----------------------------------------------------------------------------------------------


def answer(**more: Any) -> Answer:
    values = {"text": "ho", "finish_reason": "stop", "said": [], "num_prompt_tokens": 3, "num_tokens": 2}
    return Answer(**{**values, **more})


def events(data: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_whole_answer_has_openais_form() -> None:
    got = whole(HEAD, chat(logprobs=True), answer(said=[Said(text="h", logprob=-1.0)]))
    (choice,) = got.pop("choices")
    assert got.pop("usage") == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert got == {
        "id": "chatcmpl-7", "object": "chat.completion", "created": 1, "model": "policy", "system_fingerprint": "v3"
    }  # fmt: skip
    assert choice["message"] == {"role": "assistant", "content": "ho", "refusal": None}
    assert choice["logprobs"]["content"][0] | {"bytes": None} == {
        "token": "h", "logprob": -1.0, "bytes": None, "top_logprobs": []
    }  # fmt: skip
    (choice,) = whole(HEAD, plain(), answer())["choices"]
    assert choice == {"index": 0, "finish_reason": "stop", "logprobs": None, "text": "ho"}


def test_a_streamed_answer_is_pieces_an_end_and_its_usage_if_asked() -> None:
    call = chat(stream=True, stream_options={"include_usage": True})
    data = piece(HEAD, call, "h", first=True, said=[]) + piece(HEAD, call, "o", first=False, said=[])
    first, second, end, usage, done = events(data + last_pieces(HEAD, call, answer()))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "h"}
    assert second["choices"][0]["delta"] == {"content": "o"}
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")
    assert (usage["choices"], usage["usage"]["total_tokens"], done) == ([], 5, "[DONE]")


# ---- where an answer ends ----------------------------------------------------------------------------------


class Letters:
    """A token per character; 1 ends a turn; 2 and 3 are the halves of an é."""

    stop_ids = (1,)

    def decode(self, tokens: list[int]) -> str:
        return self.decode_all([token for token in tokens if token != 1])

    def decode_all(self, tokens: list[int]) -> str:
        text = "".join("<end>" if token == 1 else chr(token) for token in tokens)
        return text.replace("\x02\x03", "é").replace("\x02", "\ufffd").replace("\x03", "\ufffd")


def running(call: Call) -> Running:
    return Running(call, Letters(), room=100)  # type: ignore[arg-type]


def output(text: str, finish_reason: str | None = None) -> Output:
    return Output(key=1, tokens=[ord(c) for c in text], logprobs=[-1.0] * len(text), finish_reason=finish_reason)


def test_an_end_of_turn_token_is_sampled_and_not_shown() -> None:
    answer = running(chat())
    assert answer.take(output("hi\x01", "stop")) == 3
    assert (answer.text, answer.hidden, answer.finish_reason) == ("hi", "<end>", "stop")


def test_what_the_engine_sampled_after_a_stop_string_is_forgotten() -> None:
    answer = running(chat(stop=["END", "D!"]))
    assert answer.take(output("abEN")) == 4
    assert answer.take(output("D! and on")) == 1
    assert (answer.text, answer.hidden, answer.finish_reason) == ("ab", "END", "stop")
    assert len(answer.tokens) == len(answer.logprobs) == 5


def test_a_stop_string_before_the_end_of_turn_wins() -> None:
    answer = running(chat(stop="\n"))
    assert answer.take(output("a\nb\x01", "stop")) == 2
    assert (answer.text, answer.hidden) == ("a", "\n")


def test_streamed_text_is_never_taken_back() -> None:
    answer = running(chat(stream=True, stop="END"))
    shown = []
    for part in ("abE", "Nc\x02", "\x03xx", "xEND yy"):
        answer.take(output(part))
        shown.append(answer.fresh())
    assert "".join(shown) == answer.text == "abENcéxxx"
    assert not any("\ufffd" in text for text in shown)


def test_an_answer_cut_by_length_shows_all_of_it() -> None:
    answer = running(chat(stream=True, stop="END"))
    answer.take(output("abE", "length"))
    assert (answer.fresh(), answer.finish_reason) == ("abE", "length")
