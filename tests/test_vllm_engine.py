"""The vLLM engine against a stand-in for the server: what goes wrong there, and what is asked of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from vllm_fake import Behaviour, FakeVllm

from laminar.errors import StartError
from laminar.ids import derive_seed
from laminar.workers.engines import vllm, vllm_http, vllm_stream
from laminar.workers.engines.base import EngineError, Output, Request, SamplingParams
from laminar.workers.engines.vllm import VllmEngine, logprobs_mode
from laminar.workers.engines.vllm_http import PROCESSED, RAW
from laminar.workers.engines.vllm_server import AttachedServer
from laminar.workers.engines.vllm_stream import Events, Leg, StreamError, next_leg
from laminar.workers.engines.vllm_weights import WORKER_EXTENSION

pytestmark = pytest.mark.timeout(60)


class TrustedServer(AttachedServer):
    """One whose flags are not asked for."""

    own = True


class Bench:
    """An engine and all that it said."""

    def __init__(self, engine: VllmEngine, fake: FakeVllm) -> None:
        self.engine, self.fake = engine, fake
        self.finished: list[int] = []
        self.outputs: dict[int, list[Output]] = {}

    def submit(self, key: int, *, prompt: int = 4, prefix: int = 0, **sampling: object) -> None:
        params = SamplingParams(**{"max_tokens": 10, **sampling})
        self.engine.submit(Request(key=key, prompt_tokens=[1] * prompt, prefix_tokens=[2] * prefix, sampling=params))

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():
                for output in self.engine.drain():
                    self.outputs.setdefault(output.key, []).append(output)
                await asyncio.sleep(0.01)

    async def finish(self, key: int) -> tuple[list[int], str]:
        """All tokens of a request, and how it ended."""
        await self.until(lambda: key in self.outputs and self.outputs[key][-1].finish_reason is not None)
        tokens = [token for output in self.outputs[key] for token in output.tokens]
        assert len(tokens) == sum(len(output.logprobs) for output in self.outputs[key])
        return tokens, self.outputs[key][-1].finish_reason or ""


@contextlib.asynccontextmanager
async def running(behaviour: Behaviour | None = None, mode: str = RAW, stall_s: float = 0.0) -> AsyncIterator[Bench]:
    fake = FakeVllm(behaviour or Behaviour())
    server = TestServer(fake.app)
    await server.start_server(shutdown_timeout=0.1)
    engine = VllmEngine(
        TrustedServer(str(server.make_url(""))), logprobs_mode=mode, num_requests_max=8, stall_s=stall_s
    )
    bench = Bench(engine, fake)
    try:
        await engine.start(bench.finished.append)
        yield bench
    finally:
        await engine.stop()
        await server.close()


# ---- generation --------------------------------------------------------------------------------------------


async def test_tokens_and_their_logprobs_come_and_the_finish_is_told_once() -> None:
    async with running() as bench:
        bench.submit(1)
        assert await bench.finish(1) == (list(range(4, 14)), "length")
        assert bench.finished == [1]
        assert bench.engine.drain() == []
        asked = bench.fake.bodies[-1]
        assert asked["token_ids"] == [1] * 4
        assert asked["stream"] is True
        assert asked["sampling_params"] == {
            "max_tokens": 10, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": derive_seed(0, 0),
            "stop_token_ids": [], "ignore_eos": True, "logprobs": 0, "detokenize": False, "skip_special_tokens": False,
        }  # fmt: skip


async def test_a_prefix_is_sent_after_the_prompt_counts_for_the_limit_and_changes_the_seed() -> None:
    async with running() as bench:
        bench.submit(1, prefix=3, seed=7)
        assert await bench.finish(1) == (list(range(7, 14)), "length")
        asked = bench.fake.bodies[-1]
        assert asked["token_ids"] == [1] * 4 + [2] * 3
        assert asked["sampling_params"]["max_tokens"] == 7
        assert asked["sampling_params"]["seed"] == derive_seed(7, 3)


async def test_stop_tokens_that_are_to_be_ignored_at_first_take_a_leg_without_them() -> None:
    async with running() as bench:
        bench.submit(1, stop_ids=(9,), ignore_stop_until=6, prefix=2)
        assert await bench.finish(1) == (list(range(6, 14)), "length")
        first, second = bench.fake.bodies[-2:]
        assert (first["sampling_params"]["max_tokens"], first["sampling_params"]["stop_token_ids"]) == (4, [])
        assert (second["sampling_params"]["max_tokens"], second["sampling_params"]["stop_token_ids"]) == (4, [9])
        assert second["token_ids"] == [*first["token_ids"], 6, 7, 8, 9]
        assert first["sampling_params"]["seed"] != second["sampling_params"]["seed"]


def test_legs_cover_a_response_whatever_its_floor() -> None:
    sampling = SamplingParams(max_tokens=10, stop_ids=(9,), ignore_stop_until=99)
    assert next_leg(sampling, 4, 10) == Leg(6, ())
    assert next_leg(SamplingParams(max_tokens=10, stop_ids=(9,), ignore_stop_until=5), 5, 10) == Leg(5, (9,))
    assert next_leg(SamplingParams(max_tokens=10, ignore_stop_until=5), 2, 10) == Leg(8, ())


async def test_what_leaves_no_room_or_has_no_right_logprobs_is_refused_at_once() -> None:
    async with running() as bench:
        for refused, why in [
            ({"prompt": 64}, "leave no room"),
            ({"prefix": 10}, "leave no room"),
            ({"temperature": 0.5}, "logprobs-mode raw_logprobs"),
            ({"max_tokens": 0}, "max_tokens is 0"),
        ]:
            with pytest.raises(ValueError, match=why):
                bench.submit(1, **refused)
        bench.submit(1, temperature=0.0, top_k=3)
        with pytest.raises(ValueError, match="live already"):
            bench.submit(1)
        with pytest.raises(RuntimeError, match="1 requests are running or waiting"):
            await bench.engine.load_weights(None, None)  # type: ignore[arg-type]
        await bench.finish(1)
    async with running(mode=PROCESSED) as bench:
        bench.submit(1, temperature=0.5)
        bench.submit(2, temperature=0.0)
        with pytest.raises(ValueError, match="after truncation"):
            bench.submit(3, temperature=0.5, top_p=0.9)
        await bench.finish(1)
        await bench.finish(2)


def test_the_logprobs_mode_follows_the_temperature() -> None:
    assert [logprobs_mode(temperature) for temperature in (0.0, 1.0, 0.6)] == [RAW, RAW, PROCESSED]


async def test_an_abort_keeps_what_was_generated() -> None:
    async with running(Behaviour(pause_s=0.02)) as bench:
        for key in (1, 2):
            bench.submit(key, max_tokens=60)
        await bench.until(lambda: 1 in bench.outputs)
        bench.engine.abort(1)
        bench.engine.abort(1)
        bench.engine.abort(99)
        tokens, reason = await bench.finish(1)
        assert reason == "abort"
        assert tokens == list(range(4, 4 + len(tokens)))
        assert 0 < len(tokens) < 60
        assert bench.engine.usage().num_running == 1
        assert len(bench.fake.aborted) == 1
        bench.engine.abort(2)
        assert (await bench.finish(2))[1] == "abort"


async def test_an_abort_that_finds_no_request_is_repeated_and_in_the_end_the_connection_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "ABORT_AGAIN_S", 0.02)
    monkeypatch.setattr(vllm, "ABORTS_MAX", 3)
    async with running(Behaviour(pause_s=30.0)) as bench:
        bench.submit(1)
        bench.engine.abort(1)
        assert await bench.finish(1) == ([], "abort")


# ---- answers that are none ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(stamp="v3"), "error: tokens 0 to 10 were generated by weights 'v3', not 'default'"),
        (Behaviour(lost_tokens=2), "error: the server generated 12 tokens and 10 came"),
        (Behaviour(error_event="out of luck"), "error: out of luck"),
        (Behaviour(breaks_after=3), "error: Response payload is not completed"),
    ],
)
async def test_an_answer_that_is_none_ends_its_request_with_an_error(behaviour: Behaviour, reason: str) -> None:
    async with running(behaviour) as bench:
        bench.submit(1)
        found = (await bench.finish(1))[1]
        assert found.startswith(reason)


async def test_a_logprob_that_is_no_number_ends_the_request() -> None:
    async with running() as bench:
        bench.fake.behaviour.logprob = -9999.0
        bench.submit(1)
        assert (await bench.finish(1))[1].startswith("error: a sampled token has a log-prob that is no finite number")


async def test_a_server_that_does_not_work_any_more_ends_the_engine_and_not_its_requests() -> None:
    async with running(Behaviour(breaks_after=3, sick=True)) as bench:
        watch = asyncio.create_task(bench.engine.watch())
        bench.submit(1)
        async with asyncio.timeout(30):
            with pytest.raises(EngineError, match=r"does not work any more \(/health answers 503\)"):
                await watch
        (output,) = bench.engine.drain()
        assert output.tokens == [4, 5, 6]
        assert output.finish_reason is None
        with pytest.raises(RuntimeError, match="does not work any more"):
            bench.submit(2)


async def test_requests_that_run_without_a_token_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "POLL_S", 0.02)
    async with running(Behaviour(pause_s=30.0), stall_s=0.2) as bench:
        bench.submit(1)
        async with asyncio.timeout(30):
            with pytest.raises(EngineError, match="gave no token for 0 s with 1 requests"):
                await bench.engine.watch()


# ---- load --------------------------------------------------------------------------------------------------


async def test_the_load_is_the_servers_and_what_changed_since_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "POLL_S", 0.01)
    async with running(Behaviour(pause_s=0.02)) as bench:
        assert bench.engine.kv_tokens_max == 160
        assert bench.engine.context_tokens_max == 64
        assert bench.engine.usage().busy_s == 0
        bench.submit(1, max_tokens=60)
        assert (bench.engine.usage().num_running, bench.engine.usage().num_waiting) == (0, 1)
        await bench.until(lambda: 1 in bench.outputs and bench.engine.usage().kv_tokens >= 80)
        usage = bench.engine.usage()
        assert (usage.num_running, usage.num_waiting) == (1, 0)
        assert usage.busy_s > 0
        bench.engine.abort(1)
        await bench.finish(1)
        idle = bench.engine.usage()
        assert (idle.num_running, idle.num_waiting, idle.kv_tokens) == (0, 0, 0)
        assert bench.engine.usage().busy_s == idle.busy_s


# ---- servers that do not fit -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (Behaviour(version="0.31.9"), "vLLM 0.31.9 is not supported"),
        (Behaviour(lacks=["/version"]), r"what answers at http://\S+ is no vLLM server: /version answers 404"),
        (Behaviour(lacks=["/weight_info"]), "started without the environment variable VLLM_SERVER_DEV_MODE=1"),
        (Behaviour(generate_status=404), "started without --enable-scale-out: HTTP 404: no such thing"),
        (Behaviour(generate_status=500), "it cannot generate: HTTP 500"),
        (Behaviour(lacks=["/metrics/"]), "does not say how many KV blocks"),
        (Behaviour(lacks=["/v1/models"]), "it lacks a route: /v1/models answers 404"),
    ],
)
async def test_a_server_that_lacks_something_is_refused_by_name(behaviour: Behaviour, why: str) -> None:
    with pytest.raises(StartError, match=why):
        async with running(behaviour):
            pass


async def test_nobody_there_is_said_so() -> None:
    engine = VllmEngine(AttachedServer("http://127.0.0.1:9"), logprobs_mode=RAW, num_requests_max=8, stall_s=0)
    with pytest.raises(StartError, match=r"does not answer /version: .*127.0.0.1:9"):
        await engine.start(lambda key: None)
    await engine.stop()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, ""),
        ({"backend": "nccl"}, "--weight-transfer-config is nccl, and laminar is needed"),
        ({"extension": ""}, "--worker-extension-cls is , and laminar.*WeightReports is needed"),
        ({"mode": PROCESSED}, "--logprobs-mode is processed_logprobs, and raw_logprobs is needed"),
        ({"caching": False}, "--enable-prefix-caching is False, and True is needed"),
    ],
)
async def test_the_flags_of_an_attached_server_are_looked_at(config: dict, why: str) -> None:
    fake = FakeVllm(Behaviour())
    found = {
        "weight_transfer_config": {"backend": config.get("backend", "laminar")},
        "parallel_config": {"worker_extension_cls": config.get("extension", WORKER_EXTENSION)},
        "model_config": {"logprobs_mode": config.get("mode", RAW)},
        "cache_config": {"enable_prefix_caching": config.get("caching", True)},
    }

    async def info(_request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": found})

    fake.app.router.add_get("/server_info", info)
    async with TestServer(fake.app) as server:
        engine = VllmEngine(AttachedServer(str(server.make_url(""))), logprobs_mode=RAW, num_requests_max=8, stall_s=0)
        try:
            with pytest.raises(StartError, match=why) if why else contextlib.nullcontext():
                await engine.start(lambda key: None)
        finally:
            await engine.stop()


# ---- events ------------------------------------------------------------------------------------------------


def test_events_are_the_same_however_the_bytes_are_cut() -> None:
    stream = b'data: {"choices":[{"token_ids":[1]}]}\n\ndata: {"choices":[{"token_ids":[2,3]}]}\n\ndata: [DONE]\n\n'
    for size in (1, 7, 40, len(stream)):
        events = Events()
        pieces = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
        assert [choice.token_ids for piece in pieces for choice in events.feed(piece)] == [[1], [2, 3]]


@pytest.mark.parametrize("data", [b"data: <html>\n\n", b'data: {"choices": 3}\n\n', b'{"token_ids": [1]\n\n'])
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(StreamError, match="an event that is no answer"):
        list(Events().feed(data))


def test_an_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stream, "EVENT_BYTES_MAX", 100)
    with pytest.raises(StreamError, match="more than 100 bytes"):
        list(Events().feed(b"x" * 101))


def test_needed_routes_name_their_flags() -> None:
    assert vllm_http._lacking("/weight_info") == f"it was started without {vllm_http.NEEDED['/weight_info']}"
