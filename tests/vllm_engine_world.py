"""An engine over a real vLLM server of the quickstart's model, and what it should have said by the trainer's own computation."""

import asyncio
from pathlib import Path

import torch
from vllm_world import MODEL, PYTHON

from laminar.config import Config, ModelConfig
from laminar.workers.engines import vllm_command
from laminar.workers.engines.base import Output, Request, SamplingParams
from laminar.workers.engines.vllm import VllmEngine, logprobs_mode
from laminar.workers.engines.vllm_server import OwnServer

BOOT_S = 360.0
NUM_REQUESTS_MAX = 32
PROMPT = [20, 21, 22, 23, 24, 25]
TIE = 1e-4
"""Two tokens whose log-probs are nearer than this may change places between two runs: sums of another order."""


class Bench:
    """The engine, and what it said of each request."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.outputs: dict[int, list[Output]] = {}
        self._keys = iter(range(1, 100_000))

    def submit(self, prefix: list[int] | None = None, prompt: list[int] = PROMPT, **sampling: object) -> int:
        key = next(self._keys)
        params = SamplingParams(**{"max_tokens": 60, **sampling})
        self.engine.submit(Request(key=key, prompt_tokens=prompt, prefix_tokens=prefix or [], sampling=params))
        return key

    async def until(self, condition) -> None:
        async with asyncio.timeout(120):
            while not condition():
                for output in self.engine.drain():
                    self.outputs.setdefault(output.key, []).append(output)
                await asyncio.sleep(0.01)

    def has_ended(self, key: int) -> bool:
        return key in self.outputs and self.outputs[key][-1].finish_reason is not None

    async def finish(self, key: int) -> tuple[list[int], list[float], str]:
        """Tokens, log-probs, and how it ended."""
        await self.until(lambda: self.has_ended(key))
        outputs = self.outputs[key]
        tokens = [token for output in outputs for token in output.tokens]
        return tokens, [each for output in outputs for each in output.logprobs], outputs[-1].finish_reason or ""


def own_engine(log: Path) -> VllmEngine:
    """An engine at temperature 1, started and stopped as a rollout worker does it; the caller starts it."""
    config = Config(model=ModelConfig(path=str(MODEL)))
    mode = logprobs_mode(1.0)
    command = vllm_command.command(
        config, str(PYTHON), gpus=0, max_concurrent=NUM_REQUESTS_MAX, logprobs_mode=mode, extra=["--block-size", "32"]
    )
    environment = {**vllm_command.environment(0), "OMP_NUM_THREADS": "1"}
    server = OwnServer(command, environment, log, BOOT_S)
    return VllmEngine(server, logprobs_mode=mode, num_requests_max=NUM_REQUESTS_MAX, stall_s=0)


@torch.no_grad()
def expected(model: torch.nn.Module, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Log-probs over the vocabulary at each response position: [response, V], as the trainer computes them."""
    logits = model(torch.tensor([tokens])).logits[0, num_prompt - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


def not_the_same(model: torch.nn.Module, prompt: list[int], unmoved: list[int], moved: list[int]) -> bool:
    """Whether they differ; AssertionError unless the best two tokens of the first difference are as good as equal."""
    if unmoved == moved:
        return False
    first = next(index for index, (a, b) in enumerate(zip(unmoved, moved, strict=True)) if a != b)
    best = expected(model, prompt + unmoved, len(prompt))[first].topk(2).values
    assert best[0] - best[1] < TIE
    return True
