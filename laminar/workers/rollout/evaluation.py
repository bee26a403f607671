"""Greedy answers to held-out prompts, beside the training requests of the same engine, and their scores."""

import asyncio

import msgspec

from laminar import wire
from laminar.errors import LaminarError
from laminar.tasks.rewards import Reward, RewardFailure, RewardPool
from laminar.workers.engines.base import Output
from laminar.workers.rollout.agents import Agents, Ending
from laminar.workers.rollout.requests import Requests
from laminar.workers.rollout.text import TextCodec


class EvaluationError(LaminarError):
    """The evaluation gives no result."""


class _Live(msgspec.Struct, eq=False):
    tokens: list[int]
    future: "asyncio.Future[list[int]]"


class Evaluator:
    """Runs evaluations; give it the engine's outputs."""

    def __init__(self, requests: Requests, codec: TextCodec, rewards: RewardPool, agents: Agents | None = None) -> None:
        self._requests, self._codec, self._rewards, self._agents = requests, codec, rewards, agents
        self._live: dict[int, _Live] = {}

    @property
    def num_generating(self) -> int:
        return len(self._live)

    def generated(self, output: Output) -> None:
        """New tokens or the end of a request. Unknown keys are ignored."""
        live = self._live.get(output.key)
        if live is None:
            return
        live.tokens += output.tokens
        if output.finish_reason is None:
            return
        del self._live[output.key]
        if live.future.done():
            return
        if output.finish_reason in ("stop", "length"):
            live.future.set_result(live.tokens)
        else:
            live.future.set_exception(EvaluationError(f"the engine ended a request with {output.finish_reason!r}"))

    async def scores(self, prompts: list[wire.Prompt], version: str) -> list[float]:
        """The scores of those prompts that can be scored: one that leaves no room for an answer, or whose reward fails, has none.

        Raises EvaluationError when the engine or every score fails, PromptError for a prompt that cannot be encoded.
        """
        if self._agents is not None:
            results = await asyncio.gather(*(self._score_agent(self._agents, prompt, version) for prompt in prompts))
        else:
            encoded = [self._codec.encode(prompt) for prompt in prompts]
            results = await asyncio.gather(*map(self._score, prompts, [self._ask(tokens) for tokens in encoded]))
        scores = [result.reward for result in results if isinstance(result, Reward)]
        if prompts and not scores:
            reasons = [f"{result.reason}: {result.detail}" for result in results if isinstance(result, RewardFailure)]
            raise EvaluationError(
                f"none of {len(prompts)} held-out prompts has a score; {reasons[:1] or 'all are too long'}"
            )
        return scores

    async def _score_agent(self, agents: Agents, prompt: wire.Prompt, version: str) -> Reward | RewardFailure:
        ending = await agents.answer(prompt, version)
        if isinstance(ending, Ending):
            return await self._rewards.score(prompt, ending.answer, prompt.prompt)
        if ending.kind == "infra":
            raise EvaluationError(f"{ending.reason}: {ending.detail}")
        return RewardFailure(kind=ending.kind, reason=ending.reason, detail=ending.detail)

    def _ask(self, prompt_tokens: list[int]) -> "asyncio.Future[list[int]] | None":
        if self._requests.num_tokens_max(len(prompt_tokens)) < 1:
            return None
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._live[self._requests.greedy(prompt_tokens)] = _Live([], future)
        return future

    async def _score(
        self, prompt: wire.Prompt, answer: "asyncio.Future[list[int]] | None"
    ) -> Reward | RewardFailure | None:
        if answer is None:
            return None
        return await self._rewards.score(prompt, self._codec.decode(await answer), prompt.prompt)
