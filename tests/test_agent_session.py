"""A session's bookkeeping, with a scripted engine: turns, seeds, room, abandoned calls, and what comes late."""

import asyncio
from typing import Any

import pytest

from laminar.workers.agents.calls import Call, CallError
from laminar.workers.agents.session import Counted, Failure, Session
from laminar.workers.agents.transcript import Delta
from laminar.workers.engines.base import Output


class Engine:
    """`Requests` and engine in one: what was asked, and outputs as the test says."""

    num_response_tokens_max = 40
    context_tokens_max = 60

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, int, bool]] = []
        self.aborted: list[int] = []
        self.error: Exception | None = None

    def answer(self, context_tokens: list[int], num_tokens_max: int, seed: int, *, greedy: bool) -> int:
        if self.error is not None:
            raise self.error
        self.asked.append((context_tokens, num_tokens_max, seed, greedy))
        return len(self.asked)


class Codec:
    """A token per character; 1 ends a turn."""

    stop_ids = (1,)

    def render(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"<{message['role']}>{message['content']}\x01" for message in messages) + "<assistant>"

    def encode_text(self, text: str, *, special: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return self.decode_all([token for token in tokens if token != 1])

    def decode_all(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Recorder:
    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.sources = b""

    def began(self, prompt_tokens: list[int]) -> None:
        assert not self.prompt
        self.prompt = prompt_tokens

    def grew(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.sources += delta.sources


class Bench:
    def __init__(self, on_rewrite: str = "split", recorded: bool = True) -> None:
        self.engine, self.recorder, self.counted = Engine(), Recorder(), list[Counted]()
        self.live: dict[int, Session] = {}
        self.session = Session(
            requests=self.engine,  # type: ignore[arg-type]
            codec=Codec(),  # type: ignore[arg-type]
            live=self.live,
            abort=self.engine.aborted.append,
            count=self.counted.append,
            recorder=self.recorder if recorded else None,
            seed=7,
            version="v3",
            on_rewrite=on_rewrite,
        )

    def output(self, text: str, finish_reason: str | None = None, key: int = 0) -> None:
        """Of the newest request, or another."""
        key = key or len(self.engine.asked)
        tokens = [ord(character) for character in text]
        output = Output(key=key, tokens=tokens, logprobs=[-1.0] * len(tokens), finish_reason=finish_reason)
        self.live[key].take(output)

    async def ask(self, call: Call, answer: str, finish_reason: str = "length") -> str:
        async with self.session.call(call) as running:
            self.output(answer, finish_reason)
            await running.done()
            return running.text


def plain(prompt: str, **more: Any) -> Call:
    return Call(prompt=prompt, **more)


async def test_calls_have_seeds_of_their_own_and_the_same_ones_in_a_retry() -> None:
    seeds = []
    for _ in range(2):
        bench = Bench()
        await bench.ask(plain("a"), "b")
        await bench.ask(plain("abc"), "d")
        seeds.append([seed for _, _, seed, _ in bench.engine.asked])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


async def test_the_engine_is_given_the_recorded_tokens_and_what_was_added() -> None:
    bench = Bench()
    await bench.ask(plain("a"), "b\x01", "stop")
    assert await bench.ask(plain("abc"), "d") == "d"
    assert [tokens for tokens, *_ in bench.engine.asked] == [[97], [97, 98, 1, 99]]
    assert (bench.recorder.tokens, bench.recorder.sources) == ([98, 1, 99, 100], bytes([0, 0, 1, 0]))


async def test_a_call_waits_until_the_one_before_is_over() -> None:
    bench = Bench()
    async with bench.session.call(plain("a")) as running:
        waiting = asyncio.create_task(bench.ask(plain("abc"), "d"))
        await asyncio.sleep(0)
        assert len(bench.engine.asked) == 1
        bench.output("b", "length")
        await running.done()
    assert await waiting == "d"
    assert bench.recorder.sources == bytes([0, 1, 0])


async def test_room_is_what_the_trajectory_and_the_context_leave() -> None:
    bench = Bench()
    await bench.ask(plain("a"), "b" * 30)
    await bench.ask(plain("a" + "b" * 30 + "c" * 4, max_tokens=99), "d" * 6)
    assert [num for _, num, _, _ in bench.engine.asked] == [40, 6]
    assert bench.session.is_cut
    with pytest.raises(CallError, match=r"rollout.max_tokens = 40 of the whole trajectory leaves no room") as raised:
        await bench.ask(plain("x"), "")
    assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")
    assert bench.counted.count(Counted.REFUSED) == 1
    bench = Bench()
    with pytest.raises(CallError, match="the context of 60 tokens leaves no room"):
        await bench.ask(plain("x" * 60), "")
    assert bench.recorder.prompt == [], "a refused call is no part of the trajectory"


async def test_an_answer_cut_by_the_calls_own_limit_is_not_cut_for_want_of_room() -> None:
    bench = Bench()
    await bench.ask(plain("a", max_tokens=2), "bb")
    assert not bench.session.is_cut


async def test_an_abandoned_call_is_aborted_its_late_tokens_are_ignored_and_the_next_begins_a_context() -> None:
    bench = Bench()
    async with bench.session.call(plain("a")):
        bench.output("b")
    assert (bench.engine.aborted, bench.counted.count(Counted.ABANDONED)) == ([1], 1)
    bench.output("late", "abort", key=1)
    assert bench.live == {}
    assert await bench.ask(plain("abc"), "d") == "d"
    assert bench.recorder.sources == bytes([0, 2, 1, 1, 0])


async def test_what_the_engine_samples_after_a_stop_string_is_aborted_and_not_recorded() -> None:
    bench = Bench()
    async with bench.session.call(plain("a", stops=("END",))) as running:
        bench.output("bEND and")
        await running.done()
        assert (running.text, bench.engine.aborted) == ("b", [1])
        bench.output(" on", "abort")
    assert bench.recorder.tokens == [ord(character) for character in "bEND"]
    assert bench.counted == [Counted.CALLS]


async def test_an_engine_error_fails_the_trajectory_and_every_call() -> None:
    bench = Bench()
    with pytest.raises(CallError, match="lost a GPU") as raised:
        await bench.ask(plain("a"), "b", "error: lost a GPU")
    assert raised.value.status == 500
    assert bench.session.failure == Failure(kind="infra", reason="engine_error", detail="lost a GPU")
    assert bench.session.ended.is_set()
    with pytest.raises(CallError, match="has failed"):
        await bench.ask(plain("a"), "b")


@pytest.mark.parametrize(
    ("error", "kind", "status"), [(ValueError("no such token"), "data", 400), (RuntimeError("dead"), "infra", 500)]
)
async def test_a_request_that_the_engine_does_not_take_fails_the_trajectory(
    error: Exception, kind: str, status: int
) -> None:
    bench = Bench()
    bench.engine.error = error
    with pytest.raises(CallError, match=str(error)) as raised:
        await bench.ask(plain("a"), "b")
    assert raised.value.status == status
    assert bench.session.failure is not None
    assert bench.session.failure.kind == kind


async def test_closing_ends_waiting_calls_and_nothing_is_recorded_after_it() -> None:
    bench = Bench()
    waiting = [asyncio.create_task(_done(bench, plain(text))) for text in ("a", "x")]
    await asyncio.sleep(0)
    bench.session.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [result.status for result in results if isinstance(result, CallError)] == [503, 503]
    bench.output("b", "abort", key=1)
    assert (bench.recorder.tokens, bench.live) == ([], {})


async def _done(bench: Bench, call: Call) -> None:
    async with bench.session.call(call) as running:
        await running.done()


async def test_a_rewritten_history_is_counted_and_can_be_refused() -> None:
    bench = Bench(on_rewrite="refuse")
    await bench.ask(plain("a"), "b")
    with pytest.raises(CallError) as raised:
        await bench.ask(plain("x"), "y")
    assert (raised.value.status, raised.value.code) == (409, "history_rewritten")
    assert bench.counted.count(Counted.REWRITES) == 1
    assert bench.session.failure is not None
    assert bench.recorder.sources == bytes([0])


async def test_an_evaluation_is_greedy() -> None:
    bench = Bench(recorded=False)
    await bench.ask(plain("a"), "b")
    assert bench.engine.asked[0][3]
    assert bench.recorder.tokens == []


async def test_a_chat_without_a_template_is_refused() -> None:
    from laminar.workers.rollout.text import PromptError

    bench = Bench()

    def refuse(messages: list[dict[str, Any]]) -> str:
        raise PromptError("no chat template")

    bench.session._codec.render = refuse  # type: ignore[method-assign]
    with pytest.raises(CallError, match="no chat template") as raised:
        await bench.ask(Call(messages=[{"role": "user", "content": "a"}]), "b")
    assert raised.value.status == 400
    assert bench.session.failure is None
