"""How the calls of an agent become one trajectory: what continues, what is a new context, and that no sampled token changes."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.workers.agents.transcript import ENVIRONMENT, MODEL, NEW_CONTEXT, Delta, Rendering, Transcript

END = "\x01"  # the end-of-turn token of the toy template


def encode(text: str, special: bool) -> list[int]:
    return [ord(character) for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def chat(*turns: str) -> Rendering:
    """Turns of user and assistant, the user first, as a template with END after each turn renders them."""
    messages = [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]
    text = "".join(f"<{message['role']}>{message['content'].strip()}{END}\n" for message in messages)
    return Rendering(text=f"{text}<assistant>", messages=messages)


class Recorded:
    """The trajectory as the controller would hold it."""

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.tokens: list[int] = []
        self.sources = b""

    def call(self, rendering: Rendering, answer: str, hidden: str = END) -> bool:
        """One call and its answer; whether it began a new context."""
        opened = self.transcript.open(rendering, encode)
        self._take(self.transcript.begin(opened))
        self._take(self.transcript.said(encode(answer + hidden, False), [-0.5] * len(answer + hidden)))
        self.transcript.answered(answer, hidden)
        return opened.segment is None

    def _take(self, delta: Delta) -> None:
        assert len(delta.tokens) == len(delta.logprobs) == len(delta.sources)
        assert all(
            (logprob != 0.0) == (source == MODEL) for logprob, source in zip(delta.logprobs, delta.sources, strict=True)
        )
        self.tokens += delta.tokens
        self.sources += delta.sources

    def contexts(self) -> list[str]:
        """What the trainer makes of it: the contexts, each from its beginning."""
        found = [list(self.transcript.prompt)]
        for token, source in zip(self.tokens, self.sources, strict=True):
            if source == NEW_CONTEXT:
                found.append([])
            found[-1].append(token)
        return [decode(tokens) for tokens in found]

    def of(self, source: int) -> str:
        return decode([token for token, by in zip(self.tokens, self.sources, strict=True) if by == source])


def test_the_first_calls_prompt_is_the_trajectorys_and_its_answer_the_response() -> None:
    recorded = Recorded()
    recorded.call(chat("hello"), "hi")
    assert decode(recorded.transcript.prompt) == f"<user>hello{END}\n<assistant>"
    assert (decode(recorded.tokens), recorded.sources) == (f"hi{END}", bytes([MODEL]) * 3)


def test_a_call_that_goes_on_adds_only_what_comes_after_the_sampled_tokens() -> None:
    recorded = Recorded()
    recorded.call(chat("a"), "b")
    assert not recorded.call(chat("a", "b", "c"), "d")
    assert recorded.contexts() == [f"<user>a{END}\n<assistant>b{END}\n<user>c{END}\n<assistant>d{END}"]
    assert recorded.of(MODEL) == f"b{END}d{END}"
    assert recorded.of(ENVIRONMENT) == f"\n<user>c{END}\n<assistant>"


def test_white_space_around_an_answer_is_no_change_and_stays_as_it_was_sampled() -> None:
    recorded = Recorded()
    recorded.call(chat("a"), " b \n")
    assert not recorded.call(chat("a", "b", "c"), "d")
    assert recorded.of(MODEL) == f" b \n{END}d{END}"


def test_an_answer_cut_by_its_limit_is_ended_by_the_template() -> None:
    recorded = Recorded()
    recorded.call(chat("a"), "b", hidden="")
    assert not recorded.call(chat("a", "b", "c"), "d")
    assert recorded.of(ENVIRONMENT) == f"{END}\n<user>c{END}\n<assistant>"


def test_a_stop_string_is_not_added_twice() -> None:
    recorded = Recorded()
    recorded.call(Rendering(text="Q: 1+1\n"), "Action: add", hidden="\nObservation:")
    assert not recorded.call(Rendering(text="Q: 1+1\nAction: add\nObservation: 2\n"), "2", hidden="")
    assert recorded.contexts() == ["Q: 1+1\nAction: add\nObservation: 2\n2"]
    assert recorded.of(ENVIRONMENT) == " 2\n"


def test_a_changed_answer_question_or_order_begins_a_new_context() -> None:
    for turns in (("a", "B", "c"), ("x", "b", "c"), ("a", "b and more", "c"), ("c",), ("a",)):
        recorded = Recorded()
        recorded.call(chat("a"), "b")
        assert recorded.call(chat(*turns), "d"), turns
        assert recorded.contexts() == [f"<user>a{END}\n<assistant>b{END}", f"{chat(*turns).text}d{END}"]
        assert recorded.sources[2] == NEW_CONTEXT
        assert recorded.of(MODEL) == f"b{END}d{END}"


def test_the_same_call_once_more_asks_for_another_answer() -> None:
    for rendering in (chat("a"), Rendering(text="a")):
        recorded = Recorded()
        recorded.call(rendering, "")
        assert recorded.call(rendering, "b")


def test_a_call_that_nobody_waited_for_is_not_continued() -> None:
    transcript = Transcript()
    transcript.begin(transcript.open(Rendering(text="a"), encode))
    transcript.said(encode("b", False), [-1.0])
    assert transcript.open(Rendering(text="abc"), encode).segment is None


def test_a_chat_does_not_continue_a_completion() -> None:
    recorded = Recorded()
    recorded.call(Rendering(text=chat("a").text), "b")
    assert recorded.call(chat("a", "b", "c"), "d")


def test_a_return_to_an_older_conversation_repeats_its_very_tokens_as_context() -> None:
    recorded = Recorded()
    recorded.call(chat("a"), " b")
    recorded.call(chat("plan"), "p")
    assert recorded.call(chat("a", "b", "c"), "d")
    assert recorded.contexts()[2] == f"<user>a{END}\n<assistant> b{END}\n<user>c{END}\n<assistant>d{END}"
    assert recorded.of(MODEL) == f" b{END}p{END}d{END}", (
        "what was trained in the first context is only context in the third"
    )


# ---- any agent ---------------------------------------------------------------------------------------------

words = st.text(alphabet="ab \n", max_size=4)
steps = st.lists(
    st.tuples(st.sampled_from(["go on", "go on", "edit", "again", "older", "fresh"]), words, words), max_size=8
)


@settings(max_examples=300, deadline=None)
@given(first=words, steps=steps)
def test_any_sequence_of_calls_gives_contexts_in_which_every_answer_is_as_it_was_sampled(
    first: str, steps: list[tuple[str, str, str]]
) -> None:
    recorded, seen = Recorded(), []
    history: list[str] = [first]
    histories: list[list[str]] = []
    for what, said, asked in [("go on", "x", ""), *steps]:
        turns = _next(what, history, histories, asked)
        recorded.call(chat(*turns), said)
        segment = recorded.transcript.segments[-1]
        seen.append((decode(segment.tokens), said))
        history = [*turns, said]
        histories.append(history)
    contexts = recorded.contexts()
    assert recorded.of(MODEL) == "".join(said + END for _, said in seen), "every sampled token once, in order"
    assert [decode(segment.tokens) for segment in recorded.transcript.segments] == contexts
    assert recorded.transcript.num_tokens == len(recorded.tokens) == len(recorded.sources)
    assert recorded.transcript.num_model_tokens == recorded.sources.count(MODEL)
    for context, said in seen:
        assert any(grown.startswith(context) for grown in contexts)
        assert context.endswith(said + END)


def _next(what: str, history: list[str], histories: list[list[str]], asked: str) -> list[str]:
    if not histories:
        return history
    if what == "edit":
        return [*history[:-1], history[-1] + "!", asked]
    if what == "again":
        return history[:-1]
    if what == "older":
        return [*histories[0], asked]
    return [asked] if what == "fresh" else [*history, asked]


def test_the_toy_template_is_one_that_strips() -> None:
    messages: list[dict[str, Any]] = chat(" a ").messages or []
    assert messages[0]["content"] == " a "
    assert chat(" a ").text == f"<user>a{END}\n<assistant>"
