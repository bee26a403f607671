"""Real trainer ranks for tests: processes with a gloo group, a tiny model, batches with tokens in memory.

The processes are forked from a server that has imported torch once, so a rank starts in milliseconds.
"""

import multiprocessing
import os
import queue
import socket
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from laminar import wire
from laminar.config import AlgorithmConfig, Config, ModelConfig, RolloutConfig, TrainerConfig
from laminar.ids import GroupId, TrajectoryId, Version
from laminar.workers.trainer.__main__ import main
from laminar.workers.trainer.collective import process_group
from laminar.workers.trainer.trainer import Trainer

LIMIT_S = 60.0
CPU = torch.device("cpu")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["laminar.workers.trainer.__main__", "transformers.models.qwen3.modeling_qwen3"])


def make_model(directory: Path) -> str:
    """A Qwen3 with tied embeddings whose sizes (29 rows, head_dim 4) two and three ranks cannot share evenly."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=29,
        hidden_size=12,
        intermediate_size=18,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        attention_dropout=0.5,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return str(directory)


def make_config(model: str, *, loss_aggregation: str = "token-mean", old_logprobs: str = "recompute", **trainer: Any):
    """`trainer` keys override a fast learning rate and a small micro-batch."""
    options = {"batch_prompts": 5, "lr": 1e-2, "micro_batch_tokens": 60, "warmup_updates": 2} | trainer
    return Config(
        model=ModelConfig(path=model),
        rollout=RolloutConfig(group_size=3, temperature=0.9),
        algorithm=AlgorithmConfig(loss_aggregation=loss_aggregation, old_logprobs=old_logprobs),  # type: ignore[arg-type]
        trainer=TrainerConfig(**options),
    )


class Batch:
    """Rows, and the store that serves their tokens."""

    def __init__(self, seed: int = 0, num_groups: int = 5, group_size: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.rows: list[wire.BatchRow] = []
        self.store: dict[int, wire.TokenRow] = {}
        self.asked: list[int] = []
        for group in range(num_groups):
            prompt = rng.integers(1, 29, rng.integers(3, 9)).astype(np.int32)
            for sibling in range(group_size):
                self._add(rng, TrajectoryId(100 * group + sibling), GroupId(group), prompt)

    def _add(self, rng: np.random.Generator, trajectory: TrajectoryId, group: GroupId, prompt: np.ndarray) -> None:
        count = int(rng.integers(1, 8))
        response = rng.integers(1, 29, count).astype(np.int32)
        logprobs = (-3.4 + 0.1 * rng.standard_normal(count)).astype(np.float32)
        sources = (rng.random(count) < 0.2).astype(np.uint8)
        self.store[trajectory] = wire.TokenRow(
            trajectory, prompt.tobytes(), response.tobytes(), logprobs.tobytes(), sources.tobytes()
        )
        self.rows.append(
            wire.BatchRow(
                trajectory=trajectory,
                group=group,
                behavior_version=Version(0, 0),
                num_prompt_tokens=len(prompt),
                num_tokens=count,
                reward=float(rng.integers(0, 3)),
            )
        )

    def fetch(self, trajectories: list[TrajectoryId]) -> list[wire.TokenRow]:
        self.asked += trajectories
        return [self.store[trajectory] for trajectory in trajectories]


def run_ranks(function: Callable[..., Any], world_size: int, directory: Path, *arguments: Any) -> list[Any]:
    """`function(*arguments)` in `world_size` ranks of a new group; what each returned. Fails with a rank's traceback."""
    results = _context.Queue()
    store = str(directory / f"store-{uuid.uuid4().hex}")
    processes = [
        _context.Process(target=_rank, args=(function, rank, world_size, store, results, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(results, world_size)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


class MainRanks:
    """`python -m laminar.workers.trainer` of each rank, forked instead of started; standard error goes to files."""

    def __init__(self, world_size: int, directory: Path, arguments: list[str], token: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LAMINAR_TOKEN": token,
        }
        self._logs = [directory / f"stderr-{rank}" for rank in range(world_size)]
        self.processes = [
            _context.Process(target=_main_rank, args=(env | {"RANK": str(rank)}, str(log), arguments))
            for rank, log in enumerate(self._logs)
        ]
        for process in self.processes:
            process.start()

    def ended(self, timeout_s: float = LIMIT_S) -> list[tuple[int | None, str]]:
        """(exit code, None = still running; standard error) per rank."""
        for process in self.processes:
            process.join(timeout_s)
        return [(process.exitcode, log.read_text()) for process, log in zip(self.processes, self._logs, strict=True)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _main_rank(env: dict[str, str], log: str, arguments: list[str]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main(arguments))


def _collect(results: Any, world_size: int) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(found) < world_size:
        try:
            rank, failure, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"only ranks {sorted(found)} of {world_size} answered in {LIMIT_S} s") from None
        assert not failure, f"rank {rank} failed:\n{failure}"
        found[rank] = value
    return [found[rank] for rank in range(world_size)]


def _rank(function: Any, rank: int, world_size: int, store: str, results: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        with process_group(CPU, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size):
            value = function(*arguments)
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise
    results.put((rank, "", value))
    sys.stdout.flush()


def whole_weights(trainer: Trainer) -> dict[str, np.ndarray]:
    """All weights, gathered; every rank calls it."""
    weights = {}
    for part in trainer.parameters:
        data = part.parameter.detach()
        weights[part.name] = (data.full_tensor() if hasattr(data, "full_tensor") else data).numpy().copy()
    return weights


def assert_equal_weights(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], atol: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=atol, rtol=0, err_msg=name)
