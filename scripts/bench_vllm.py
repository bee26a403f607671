"""What replicas on vLLM cost, measured on a real server.

    python scripts/bench_vllm.py pull [--mib 256] [--rounds 7] [--vllm-python .venv-vllm/bin/python]

`pull`: for how long decoding stands still while a new weight version goes from a relay's slot into the server, by what
the time is spent on, in multiples of one memcpy of the same bytes taken in the same round. The model is a random Qwen3 in
float32. `memory` is the anonymous memory of all of the server's processes, above what it was before the load: a copy of
the model in host memory would show there.
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
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import psutil
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from laminar.ids import Version
from laminar.workers.engines.vllm_command import environment
from laminar.workers.engines.vllm_server import OwnServer
from laminar.workers.engines.vllm_weights import SERVER_FLAGS, LoadTimes, VllmWeights
from laminar.workers.relay import paths
from laminar.workers.relay.client import RelayClient
from laminar.workers.relay.manifest import Manifest

ROOT = Path(__file__).parent.parent
START_S, RELAY_S = 600.0, 120.0
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
    arguments = parser.parse_args()
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


PHASES = {
    "pause_s": "pausing",
    "check_s": "digest and layout (no copy)",
    "load_s": "vLLM's own loading",
    "finish_s": "stamp, caches, resuming",
    "total_s": "in all",
}


if __name__ == "__main__":
    main()
