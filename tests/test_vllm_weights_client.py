"""The client half of a weight update, against a server that answers as told: what each failing step means."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from laminar.ids import Version
from laminar.workers.engines import vllm_weights
from laminar.workers.engines.vllm_weights import VllmWeights, WeightLoadError
from laminar.workers.relay.manifest import Manifest, Snapshot

MANIFEST = Manifest.plan([("head", "float32", (4,), 4)])
VERSION = Version(3, 1)
SEQUENCE = ["pause", "start", "check", "load", "finish", "reset", "resume"]
UNTOUCHED, TOUCHED = SEQUENCE[:3], SEQUENCE[3:]


class FakeServer:
    """Notes the steps and fails in those that it is told to fail in."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.bodies: dict[str, dict] = {}
        self.failing: dict[str, int | str] = {}
        """By step: an HTTP status, ``refuse``, ``hang`` or ``die``."""
        self.is_open = self.without_plugin = False
        self.hanging, self.let_go = asyncio.Event(), asyncio.Event()
        self.base_url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        if request.path == "/collective_rpc":
            return self.report(body)
        step = self.step_of(request.path, body)
        self.steps.append(step)
        self.bodies[step] = body
        failure = self.failing.get(step)
        if failure == "hang":
            self.hanging.set()
            await self.let_go.wait()
        if failure == "die":
            request.transport.close()
        if failure == 500:
            return web.json_response({"error": {"message": f"{step} went wrong here"}}, status=500)
        return web.json_response({"success": failure != "unsuccessful"})

    def report(self, body: dict) -> web.Response:
        """Of two workers, the second of which has the problem."""
        assert body == {"method": "laminar_weights"}
        if self.without_plugin:
            return web.json_response({"error": {"message": "no attribute laminar_weights"}}, status=500)
        refused = self.failing.get(self.steps[-1]) == "refuse"
        problem = f"{self.steps[-1]} went wrong here" if refused else ""
        return web.json_response(
            {"results": [{"problem": "", "open": self.is_open}, {"problem": problem, "open": self.is_open}]}
        )

    @staticmethod
    def step_of(path: str, body: dict) -> str:
        if path == "/update_weights":
            return next(iter(body["update_info"]))
        names = {"/start_weight_update": "start", "/finish_weight_update": "finish", "/reset_prefix_cache": "reset"}
        return names.get(path) or path.removeprefix("/")


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    application = web.Application()
    application.router.add_post("/{route}", fake.answer)
    runner = web.AppRunner(application, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.base_url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield fake
    fake.let_go.set()
    await runner.cleanup()


@pytest.fixture
async def weights(server) -> AsyncIterator[VllmWeights]:
    async with aiohttp.ClientSession() as http:
        yield VllmWeights(http, server.base_url)


@pytest.fixture
def snapshot(tmp_path) -> Snapshot:
    return Snapshot(MANIFEST, memoryview(bytes(256)), path=tmp_path / "slot0", digest="ab" * 16)


async def test_a_load_is_seven_steps_in_order_and_stamps_its_version(server, weights, snapshot):
    await weights.load(VERSION, snapshot)
    assert server.steps == SEQUENCE
    assert server.bodies["check"]["update_info"]["check"] == {
        "version": "v3.b1",
        "path": str(snapshot.path),
        "digest": snapshot.digest,
        "manifest": {"tensors": [["head", "float32", [4], 0, 16]], "num_bytes": 256},
    }
    assert server.bodies["load"] == {"update_info": {"load": "v3.b1"}}
    assert server.bodies["finish"] == {"weight_version": "v3.b1"}
    assert not weights.broken


@pytest.mark.parametrize(("step", "failure"), [*((step, 500) for step in UNTOUCHED), ("check", "refuse")])
async def test_a_refusal_before_anything_was_touched_lets_the_server_go_on(server, weights, snapshot, step, failure):
    server.failing = {step: failure}
    with pytest.raises(WeightLoadError, match=f"failed in {step}.*{step} went wrong here") as caught:
        await weights.load(VERSION, snapshot)
    assert server.steps == [*SEQUENCE[: SEQUENCE.index(step) + 1], "resume"]
    assert not caught.value.weights_broken
    assert not weights.broken


@pytest.mark.parametrize(("step", "failure"), [*((step, 500) for step in TOUCHED), ("load", "refuse")])
async def test_a_failure_from_the_load_on_leaves_the_server_paused_and_out_of_use(
    server, weights, snapshot, step, failure
):
    server.failing = {step: failure}
    with pytest.raises(WeightLoadError, match=f"failed in {step}.*{step} went wrong here") as caught:
        await weights.load(VERSION, snapshot)
    assert server.steps == SEQUENCE[: SEQUENCE.index(step) + 1]
    assert caught.value.weights_broken
    assert weights.broken


@pytest.mark.parametrize(
    ("step", "failure"), [*((step, "die") for step in SEQUENCE), ("check", "hang"), ("load", "hang")]
)
async def test_no_answer_at_any_step_puts_the_server_out_of_use(server, weights, snapshot, step, failure, monkeypatch):
    monkeypatch.setattr(vllm_weights, "STEP_S", 3.0)
    server.failing = {step: failure}
    with pytest.raises(WeightLoadError, match=f"failed in {step}") as caught:
        await weights.load(VERSION, snapshot)
    assert caught.value.weights_broken
    assert weights.broken


async def test_a_server_that_refuses_and_does_not_resume_is_out_of_use(server, weights, snapshot):
    server.failing = {"check": 500, "resume": 500}
    with pytest.raises(WeightLoadError, match="failed in check") as caught:
        await weights.load(VERSION, snapshot)
    assert caught.value.weights_broken


async def test_a_prefix_cache_that_was_not_emptied_is_a_failure(server, weights, snapshot):
    server.failing = {"reset": "unsuccessful"}
    with pytest.raises(WeightLoadError, match="prefix cache was not emptied") as caught:
        await weights.load(VERSION, snapshot)
    assert caught.value.weights_broken


async def test_a_complete_load_heals_and_a_refused_one_does_not(server, weights, snapshot):
    server.failing = {"load": 500}
    with pytest.raises(WeightLoadError):
        await weights.load(VERSION, snapshot)
    server.failing = {"check": 500}
    with pytest.raises(WeightLoadError) as caught:
        await weights.load(VERSION, snapshot)
    assert caught.value.weights_broken
    assert server.steps[-1] == "check"
    server.failing = {}
    await weights.load(VERSION, snapshot)
    assert not weights.broken


async def test_an_update_left_open_by_a_dead_client_is_taken_over(server, weights, snapshot):
    server.is_open = True
    await weights.load(VERSION, snapshot)
    assert server.steps == ["pause", *SEQUENCE[2:]]


async def test_a_server_without_the_plugin_goes_on_and_the_flags_are_named(server, weights, snapshot):
    server.without_plugin = True
    with pytest.raises(WeightLoadError, match=r"no attribute laminar_weights.*--worker-extension-cls") as caught:
        await weights.load(VERSION, snapshot)
    assert server.steps == ["pause", "resume"]
    assert not caught.value.weights_broken


async def test_a_cancelled_load_puts_the_server_out_of_use(server, weights, snapshot):
    server.failing = {"load": "hang"}
    task = asyncio.create_task(weights.load(VERSION, snapshot))
    await server.hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert weights.broken


async def test_a_snapshot_that_is_in_no_file_is_an_error_of_the_caller(server, weights):
    with pytest.raises(ValueError, match="not in a relay's slot"):
        await weights.load(VERSION, Snapshot(MANIFEST, memoryview(bytes(256))))
    assert server.steps == []
    assert not weights.broken


def test_what_vllm_imports_of_laminar_at_its_start_is_light():
    code = "import sys, laminar.workers.engines.vllm_plugin; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "vllm", "aiohttp", "msgspec", "structlog", "asyncio"}.isdisjoint(imported)


def test_what_the_weight_path_imports_of_laminar_needs_only_what_vllm_has_and_xxhash():
    code = "import sys, laminar.workers.engines.vllm_plugin.slot; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"aiohttp", "structlog", "uvloop", "psutil", "rich"}.isdisjoint(imported)
    assert {name for name in imported if name.startswith("laminar.")} == {
        "laminar.workers",
        "laminar.workers.engines",
        "laminar.workers.engines.vllm_plugin",
        "laminar.workers.engines.vllm_plugin.slot",
        "laminar.workers.relay",
        "laminar.workers.relay.digest",
        "laminar.workers.relay.manifest",
    }
