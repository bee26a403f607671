"""Generation by a real vLLM server: what the engine promises of tokens, log-probs, aborts and continuations.

One server for all, started and stopped as a rollout worker does it.
"""

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM
from vllm_engine_world import PROMPT, Bench, expected, not_the_same, own_engine
from vllm_world import MODEL, needs_vllm

from laminar.workers.engines import vllm_metrics, vllm_server
from laminar.workers.engines.base import EngineError
from laminar.workers.engines.vllm_server import OwnServer

pytestmark = [needs_vllm, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    engine = own_engine(tmp_path_factory.mktemp("vllm") / "rollout-0.vllm.log")
    try:
        await engine.start(lambda key: None)
        yield Bench(engine)
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def own_logprobs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    rows = expected(model, prompt + response, len(prompt))
    return rows[torch.arange(len(response)), torch.tensor(response)]


async def test_the_server_says_what_it_is(bench: Bench) -> None:
    assert bench.engine.context_tokens_max == 128
    assert bench.engine.kv_tokens_max > 10_000


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0}])
async def test_logprobs_are_the_trainers_before_truncation(
    bench: Bench, model: torch.nn.Module, sampling: dict
) -> None:
    keys = [bench.submit(seed=seed, **sampling) for seed in range(6)]
    for key in keys:
        tokens, logprobs, reason = await bench.finish(key)
        assert reason == "length"
        assert len(tokens) == 60
        difference = (torch.tensor(logprobs) - own_logprobs(model, PROMPT, tokens)).abs()
        assert difference.mean() < 1e-4
        assert difference.max() < 1e-3


async def test_the_logprobs_of_given_tokens_are_the_trainers(bench: Bench, model: torch.nn.Module) -> None:
    tokens = [*PROMPT, *range(30, 60)]
    found = torch.tensor(await bench.engine.logprobs(tokens))
    assert (found - own_logprobs(model, tokens[:1], tokens[1:])).abs().max() < 1e-3


async def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(bench: Bench) -> None:
    alone, _, _ = await bench.finish(bench.submit(seed=5))
    keys = [bench.submit(seed=seed) for seed in (5, 6, 7, 8, 5)]
    answers = [(await bench.finish(key))[0] for key in keys]
    assert answers[0] == answers[4] == alone
    assert len({tuple(answer) for answer in answers}) == 4


async def test_a_stop_token_ends_a_response_and_belongs_to_it_but_not_while_it_is_ignored(bench: Bench) -> None:
    free, _, _ = await bench.finish(bench.submit(seed=3))
    stop = free[10]
    first = free.index(stop)
    tokens, _, reason = await bench.finish(bench.submit(seed=3, stop_ids=(stop,)))
    assert (tokens, reason) == (free[: first + 1], "stop")
    tokens, _, _ = await bench.finish(bench.submit(seed=3, stop_ids=(stop,), ignore_stop_until=first + 1))
    assert tokens[: first + 1] == free[: first + 1]
    assert len(tokens) > first + 1
    tokens, _, reason = await bench.finish(bench.submit(seed=3, stop_ids=tuple(range(98)), ignore_stop_until=20))
    assert (len(tokens), reason) == (21, "stop")
    assert tokens[:20] == free[:20]


async def test_an_aborted_greedy_response_goes_on_as_if_it_had_never_stopped(
    bench: Bench, model: torch.nn.Module
) -> None:
    """The move of a trajectory: stop, take the tokens so far, go on elsewhere from prompt and prefix."""
    prompts = [[20 + number, *PROMPT] for number in range(8)]
    whole = [
        (await bench.finish(bench.submit(prompt=prompt, temperature=0.0, max_tokens=100)))[0] for prompt in prompts
    ]
    ties = 0
    for prompt, unmoved in zip(prompts, whole, strict=True):
        key = bench.submit(prompt=prompt, temperature=0.0, max_tokens=100)
        await bench.until(lambda key=key: key in bench.outputs)
        bench.engine.abort(key)
        prefix, logprobs, reason = await bench.finish(key)
        assert reason in ("abort", "length")
        assert len(prefix) == len(logprobs)
        moved = prefix
        if len(prefix) < 100:
            rest, _, _ = await bench.finish(bench.submit(prefix, prompt=prompt, temperature=0.0, max_tokens=100))
            moved = prefix + rest
        assert len(moved) == 100
        ties += not_the_same(model, prompt, unmoved, moved)
    assert ties <= 1


async def test_the_siblings_of_a_group_share_the_cache_of_their_prompt(bench: Bench) -> None:
    prompt = [30 + number % 60 for number in range(80)]
    assert bench.engine._http is not None

    async def hits() -> float:
        _, text = await bench.engine._http._ask("GET", "/metrics/?name[]=vllm:prefix_cache_hits_total")
        return sum(float(value) for _, value in vllm_metrics._LINE.findall(text))

    before = await hits()
    await bench.finish(bench.submit(prompt=prompt, max_tokens=4))
    await bench.finish(bench.submit(prompt=prompt, max_tokens=4, seed=2))
    assert await hits() - before == 64  # two blocks of 32; the third is not full


async def test_a_request_that_the_server_refuses_ends_with_its_reason_and_the_engine_goes_on(bench: Bench) -> None:
    refused = bench.submit(prompt=[5, 6000])
    assert (await bench.finish(refused))[2] == "error: Token id 6000 is out of vocabulary"
    assert (await bench.finish(bench.submit(max_tokens=3)))[2] == "length"


async def test_the_load_is_seen_while_requests_run(bench: Bench) -> None:
    keys = [bench.submit(seed=seed, max_tokens=100) for seed in range(40)]
    await bench.until(lambda: bench.engine.usage().num_running > 0)
    usage = bench.engine.usage()
    assert usage.num_running <= 32
    assert usage.num_running + usage.num_waiting <= 40
    assert usage.kv_tokens > 0
    for key in keys:
        await bench.finish(key)
    assert bench.engine.usage().num_running == bench.engine.usage().kv_tokens == 0


async def test_the_server_says_its_routes_in_a_log_of_its_own(bench: Bench) -> None:
    server = bench.engine._server
    assert isinstance(server, OwnServer)
    assert "Route: /inference/v1/generate" in server.log_path.read_text()


async def test_an_engine_that_stands_still_is_found_and_its_server_stopped_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: the server answers to /health, and never generates again."""
    server = bench.engine._server
    assert isinstance(server, OwnServer)
    assert server._process is not None
    children = psutil.Process(server._process.pid).children(recursive=True)
    (core,) = [child for child in children if child.cmdline()[:1] == ["VLLM::EngineCore"]]
    assert core.environ()["SPT_NOENV"] == "1", "vLLM wrote its name over the environment that the launcher reads"
    monkeypatch.setattr(vllm_server, "LAST_WORDS_S", 0.1)
    core.suspend()
    bench.engine._stall_s = 2.0
    bench.submit(max_tokens=100)
    async with asyncio.timeout(60):
        with pytest.raises(
            EngineError, match=r"vLLM runs, and gave no token for \d+ s with 1 requests; its last lines"
        ):
            await bench.engine.watch()
    await bench.engine.stop()
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
