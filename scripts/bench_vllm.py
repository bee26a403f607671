"""What replicas on vLLM cost, measured on a real server.

    python scripts/bench_vllm.py pull [--mib 256] [--rounds 7] [--vllm-python .venv-vllm/bin/python]
    python scripts/bench_vllm.py generate [--requests 512] [--concurrent 64] [--tokens 100] [--rounds 7] [--vllm-python …]

`pull`: for how long decoding stands still while a new weight version goes from a relay's slot into the server, by what
the time is spent on, in multiples of one memcpy of the same bytes taken in the same round. The model is a random Qwen3 in
float32. `memory` is the anonymous memory of all of the server's processes, above what it was before the load: a copy of
the model in host memory would show there.

`generate`: the engine adapter of a rollout worker, drained and packed for the controller every 0.25 s, beside a bare client
that posts the same requests to the same server and keeps the token ids. They take turns; each ratio is of two neighbouring runs.
A turn has several times as many requests as decode at once, so that its beginning and its last flush count for little.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from laminar import wire
from laminar.config import Config, ModelConfig
from laminar.ids import Version
from laminar.workers.engines import vllm_stream
from laminar.workers.engines.base import Request, SamplingParams
from laminar.workers.engines.vllm import VllmEngine
from laminar.workers.engines.vllm_command import command, environment
from laminar.workers.engines.vllm_http import RAW, Http
from laminar.workers.engines.vllm_server import OwnServer
from laminar.workers.engines.vllm_weights import SERVER_FLAGS, LoadTimes, VllmWeights
from laminar.workers.relay import paths
from laminar.workers.relay.client import RelayClient
from laminar.workers.relay.manifest import Manifest

ROOT = Path(__file__).parent.parent
START_S, RELAY_S = 600.0, 120.0
FLUSH_S = 0.25
SAMPLE_S = 0.002
HIDDEN, INTERMEDIATE, VOCABULARY = 512, 2048, 8192
LAYER_MIB = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE) / (1 << 20)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One pull."""

    memcpy_s: float
    times: LoadTimes
    memory_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of a replica on vLLM.")
    commands = parser.add_subparsers(dest="command", required=True)
    pull = commands.add_parser("pull", help="time for which a weight pull stops decoding")
    pull.add_argument("--mib", type=int, default=256, help="size of the model")
    pull.add_argument("--rounds", type=int, default=7)
    pull.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm/bin/python"))
    generate = commands.add_parser("generate", help="CPU time per token and tokens/s beside a bare client")
    generate.add_argument("--requests", type=int, default=512, help="of each turn")
    generate.add_argument("--concurrent", type=int, default=64, help="that decode at once")
    generate.add_argument("--tokens", type=int, default=100, help="of each response")
    generate.add_argument("--rounds", type=int, default=7)
    generate.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm/bin/python"))
    arguments = parser.parse_args()
    if arguments.command == "generate":
        report_generation(asyncio.run(measure_generation(arguments)))
        return
    run_id = f"bench-{os.getpid()}"
    relay = subprocess.Popen([sys.executable, "-m", "laminar.workers.relay", "--run-id", run_id])
    try:
        with tempfile.TemporaryDirectory() as directory, RelayClient(paths.shm_directory(run_id), RELAY_S) as client:
            model = make_model(Path(directory), arguments.mib)
            rounds = asyncio.run(measure_pulls(Path(directory), model, client, arguments.rounds, arguments.vllm_python))
            report(model, rounds)
    finally:
        relay.terminate()
        relay.wait(RELAY_S)


async def measure_pulls(
    directory: Path, model: Qwen3ForCausalLM, client: RelayClient, num_rounds: int, python: str
) -> list[Round]:
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--dtype", "float32"),
        *("--max-model-len", "512", "--enforce-eager", *SERVER_FLAGS),
    ]
    server = OwnServer(command, environment(0), directory / "vllm.log", START_S)
    try:
        await server.start()
        async with aiohttp.ClientSession(connector=server.connector()) as http:
            weights = VllmWeights(http, server.base_url)
            return [await one_round(client, weights, model, step) for step in range(num_rounds + 1)]
    finally:
        await server.stop()


def make_model(directory: Path, mib: int) -> Qwen3ForCausalLM:
    """About `mib` MiB of random float32 weights, tied, saved for vLLM."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, head_dim=64, num_attention_heads=8,
        num_key_value_heads=8, num_hidden_layers=max(1, round((mib - 16) / LAYER_MIB)), max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(ROOT / "configs/quickstart/model").save_pretrained(directory)
    return model


async def one_round(client: RelayClient, weights: VllmWeights, model: Qwen3ForCausalLM, step: int) -> Round:
    """Publish, lease, load. The lease is awaited first: a replica pulls what its relay holds."""
    version = Version(step, 0)
    publish(client, model, version)
    with client.lease(version, wait_s=RELAY_S) as lease:
        source = np.frombuffer(lease.buffer, np.uint8).copy()
        target = np.empty_like(source)
        target.fill(0)
        began = time.perf_counter()
        np.copyto(target, source)
        memcpy_s = time.perf_counter() - began
        del source, target
        with Memory() as memory:
            times = await weights.load(version, lease.snapshot)
    return Round(memcpy_s=memcpy_s, times=times, memory_bytes=memory.growth_bytes)


def publish(client: RelayClient, model: Qwen3ForCausalLM, version: Version) -> None:
    parameters = dict(model.named_parameters())
    manifest = Manifest.plan([(name, "float32", tuple(each.shape), 4) for name, each in parameters.items()])
    buffer = client.begin(version, manifest, 0, 1)
    assert buffer is not None
    for spec in manifest.tensors:
        part = np.frombuffer(buffer[spec.offset : spec.offset + spec.num_bytes], np.float32)
        np.copyto(part, parameters[spec.name].detach().numpy().ravel())
        del part
    client.commit(version)


class Memory:
    """The most anonymous memory of this process's children, above what it was at the beginning."""

    def __enter__(self) -> "Memory":
        self._processes = psutil.Process().children(recursive=True)
        self._before = self._most = self._anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def growth_bytes(self) -> int:
        return self._most - self._before

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._most = max(self._most, self._anonymous_bytes())

    def _anonymous_bytes(self) -> int:
        total = 0
        for process in self._processes:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) << 10
        return total


def report(model: Qwen3ForCausalLM, rounds: list[Round]) -> None:
    """Print one line per phase. Round 0 is told apart: it rehearses the layout."""
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    first, later = rounds[0], rounds[1:]
    print(f"{num_bytes / (1 << 20):.0f} MiB, float32, {len(later)} rounds; one memcpy of it: "
          f"{1e3 * statistics.median(each.memcpy_s for each in later):.1f} ms")  # fmt: skip
    print(f"{'decoding stopped for':28}{'median ms':>10}{'x memcpy':>10}{'least':>8}{'most':>8}{'first ms':>10}")
    for phase, name in PHASES.items():
        ratios = [getattr(each.times, phase) / each.memcpy_s for each in later]
        median_ms = 1e3 * statistics.median(getattr(each.times, phase) for each in later)
        print(f"{name:28}{median_ms:10.1f}{statistics.median(ratios):10.2f}{min(ratios):8.2f}{max(ratios):8.2f}"
              f"{1e3 * getattr(first.times, phase):10.1f}")  # fmt: skip
    growth = [each.memory_bytes / num_bytes for each in later]
    print(f"memory: {statistics.median(growth):.3f} x the model (most {max(growth):.3f}); one of "
          f"{model.config.num_hidden_layers} layers is {LAYER_MIB * (1 << 20) / num_bytes:.3f} x")  # fmt: skip


# ---- generate ----------------------------------------------------------------------------------------------


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """All requests once, by one of the two."""

    num_tokens: int
    wall_s: float
    cpu_s: float
    """Of this process; the server is another."""


async def measure_generation(arguments: argparse.Namespace) -> list[tuple[Turn, Turn]]:
    """(bare client, adapter) per round, in turns, after one round for warming up."""
    config = Config(model=ModelConfig(path=str(ROOT / "configs/quickstart/model")))
    start = command(
        config, arguments.vllm_python, gpus=0, max_concurrent=arguments.concurrent, logprobs_mode=RAW, extra=[]
    )
    with tempfile.TemporaryDirectory() as directory:
        one_core = {**environment(0), "OMP_NUM_THREADS": "1"}  # the other one is this process's
        server = OwnServer(start, one_core, Path(directory) / "vllm.log", START_S)
        engine = VllmEngine(server, logprobs_mode=RAW, num_requests_max=arguments.concurrent, stall_s=0.0)
        bare = None
        try:
            await engine.start(lambda key: None)
            bare = Http(server, RAW)
            rounds = []
            for number in range(arguments.rounds + 1):
                requests = [request_of(number, key, arguments) for key in range(arguments.requests)]
                pair = [await turn(by_bare_client(bare, requests)), await turn(by_engine(engine, requests))]
                rounds.append((pair[0], pair[1]))
            return rounds[1:]
        finally:
            if bare is not None:
                await bare.close()
            await engine.stop()


def request_of(number: int, key: int, arguments: argparse.Namespace) -> Request:
    prompt = [3 + (number * arguments.requests + key + at) % 20 for at in range(12)]
    return Request(key=key, prompt_tokens=prompt, sampling=SamplingParams(max_tokens=arguments.tokens, seed=key))


async def turn(work: Coroutine[Any, Any, int]) -> Turn:
    wall, cpu = time.perf_counter(), time.process_time()
    num_tokens = await work
    return Turn(num_tokens=num_tokens, wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


async def by_bare_client(http: Http, requests: list[Request]) -> int:
    async def one(request: Request) -> int:
        leg = vllm_stream.Leg(request.sampling.max_tokens, ())
        body = vllm_stream.body(f"bare-{id(request)}", request.prompt_tokens, 0, leg, request.sampling)
        tokens: list[int] = []
        async for choice in http.generate(body):
            tokens += choice.token_ids
        return len(tokens)

    return sum(await asyncio.gather(*(one(request) for request in requests)))


async def by_engine(engine: VllmEngine, requests: list[Request]) -> int:
    """As the worker does: submit, drain at every flush, pack what came."""
    for request in requests:
        engine.submit(request)
    num_tokens, num_left = 0, len(requests)
    while num_left:
        await asyncio.sleep(FLUSH_S if num_tokens else 0.01)
        for output in engine.drain():
            wire.pack_i32(output.tokens)
            wire.pack_f32(output.logprobs)
            num_tokens += len(output.tokens)
            num_left -= output.finish_reason is not None
    return num_tokens


def report_generation(rounds: list[tuple[Turn, Turn]]) -> None:
    print(f"{rounds[0][0].num_tokens} tokens a round, {len(rounds)} rounds")
    for name, turns in (("bare client", [bare for bare, _ in rounds]), ("adapter", [ours for _, ours in rounds])):
        cpu_us = statistics.median(1e6 * each.cpu_s / each.num_tokens for each in turns)
        rate = statistics.median(each.num_tokens / each.wall_s for each in turns)
        print(f"{name:12} {cpu_us:6.1f} µs of CPU a token, {rate:7.0f} tokens/s")
    rates = [bare.wall_s / ours.wall_s for bare, ours in rounds]
    cpus = [ours.cpu_s / bare.cpu_s for bare, ours in rounds]
    for name, ratios in (("tokens/s", rates), ("CPU time", cpus)):
        print(
            f"{name}, adapter : bare client: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


PHASES = {
    "pause_s": "pausing",
    "check_s": "digest and layout (no copy)",
    "load_s": "vLLM's own loading",
    "finish_s": "stamp, caches, resuming",
    "total_s": "in all",
}


if __name__ == "__main__":
    main()
