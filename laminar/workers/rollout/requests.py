"""Engine requests as the run's configuration wants them."""

import itertools
import math
import random

from laminar.config import RolloutConfig
from laminar.ids import derive_seed
from laminar.workers.engines.base import Engine, Request, SamplingParams

FLOOR_STREAM = 3  # keeps the draw of a length floor apart from the engine's own use of the seed
Z_99 = 2.3263478740408408  # the standard normal's 99th percentile


class Requests:
    """Makes and submits requests of one engine; their keys are never used twice."""

    def __init__(self, engine: Engine, rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> None:
        self._engine, self._rollout, self._stop_ids = engine, rollout, stop_ids
        self._keys = itertools.count(1)

    @property
    def num_response_tokens_max(self) -> int:
        """Most response tokens of a trajectory."""
        return self._rollout.max_tokens

    @property
    def context_tokens_max(self) -> int:
        """Most tokens that the model takes."""
        return self._engine.context_tokens_max

    def num_tokens_max(self, num_prompt_tokens: int) -> int:
        """Most response tokens after such a prompt: `max_tokens`, or what the context leaves; below 1 = no room."""
        return min(self._rollout.max_tokens, self._engine.context_tokens_max - num_prompt_tokens)

    def length_floor(self, seed: int) -> int:
        """Tokens for which stop tokens are ignored: log-normal with the configured median and 99th percentile, by `seed`."""
        median, p99 = self._rollout.length_floor_median, self._rollout.length_floor_p99
        if not median:
            return 0
        sigma = math.log(max(1.0, p99 / median)) / Z_99
        return int(median * math.exp(sigma * random.Random(derive_seed(seed, FLOOR_STREAM)).gauss(0.0, 1.0)))

    def ends(self, response: list[int], num_prompt_tokens: int, seed: int) -> str | None:
        """The finish reason of a response that needs no more tokens."""
        if response and response[-1] in self._stop_ids and len(response) > self.length_floor(seed):
            return "stop"
        return "length" if len(response) >= self.num_tokens_max(num_prompt_tokens) else None

    def sample(self, prompt_tokens: list[int], prefix_tokens: list[int], seed: int) -> int:
        """Submit a training request; its key. Raises ValueError when the engine can never run it."""
        return self._submit(prompt_tokens, prefix_tokens, self._rollout.temperature, seed)

    def greedy(self, prompt_tokens: list[int]) -> int:
        """Submit an evaluation request; its key. Raises ValueError when the engine can never run it."""
        return self._submit(prompt_tokens, [], 0.0, 0)

    def new_key(self) -> int:
        """A key that no request has, for an attempt that makes requests of its own."""
        return next(self._keys)

    def answer(self, context_tokens: list[int], num_tokens_max: int, seed: int, *, greedy: bool) -> int:
        """Submit a call of an agent; its key. Raises ValueError when the engine can never run it."""
        return self._submit(context_tokens, [], 0.0 if greedy else self._rollout.temperature, seed, num_tokens_max)

    def _submit(
        self, prompt_tokens: list[int], prefix_tokens: list[int], temperature: float, seed: int, num_tokens_max: int = 0
    ) -> int:
        sampling = SamplingParams(
            max_tokens=num_tokens_max or self.num_tokens_max(len(prompt_tokens)),
            temperature=temperature,
            top_p=self._rollout.top_p if temperature else 1.0,
            top_k=self._rollout.top_k if temperature else 0,
            stop_ids=self._stop_ids,
            ignore_stop_until=self.length_floor(seed) if temperature else 0,
            seed=seed,
        )
        key = next(self._keys)
        self._engine.submit(
            Request(key=key, prompt_tokens=prompt_tokens, prefix_tokens=prefix_tokens, sampling=sampling)
        )
        return key
