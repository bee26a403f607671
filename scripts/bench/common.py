"""What the three contestants share: the problem, the reward with its delay, and the record of a run.

Standard library and Laminar's own light modules only, because TRL's environment imports it too.

Definition, the same for all: a run has *reached* the target when the mean of its last `WINDOW_STEPS` batch rewards is at
least `target`; the time is that of the end of that step, counted from the start of the first step's generation.
"""

import asyncio
import inspect
import json
import math
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laminar.ids import PromptId, derive_seed
from laminar.plugins import load_object
from laminar.wire import Prompt

WINDOW_STEPS = 5
Z_99 = 2.3263478740408408  # 99th percentile of the standard normal distribution


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Model, prompts and hyperparameters of a run, resolved from the quickstart's configuration."""

    model: str
    reward: str
    prompts: list[tuple[str, str]]
    """(text, answer)"""
    batch_prompts: int
    group_size: int
    max_tokens: int
    temperature: float
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    clip_low: float
    clip_high: float
    delay_median_s: float
    delay_p99_s: float
    seed: int
    target: float
    steps_max: int
    seconds_max: float

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Problem":
        return cls(**json.loads(path.read_text()))


@dataclass
class Curve:
    """Rewards by step, and when each step ended, seconds from the start of the first generation."""

    target: float
    times_s: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def add(self, time_s: float, reward: float) -> None:
        self.times_s.append(time_s)
        self.rewards.append(reward)

    @property
    def reached_step(self) -> int | None:
        """The first step, from 1, with which the running mean is at the target."""
        for end in range(WINDOW_STEPS, len(self.rewards) + 1):
            if math.fsum(self.rewards[end - WINDOW_STEPS : end]) / WINDOW_STEPS >= self.target:
                return end
        return None


class Scorer:
    """The user's reward function on a whole batch, and the wait for its slowest answer.

    Awaiting every answer's delay concurrently takes as long as the longest of them, so that is what `score` sleeps.
    """

    def __init__(self, problem: Problem) -> None:
        self._function = load_object(problem.reward, "task.reward")
        self._problem = problem
        self._random = random.Random(derive_seed(problem.seed, 1))

    def score(self, texts: list[str], answers: list[str], responses: list[str]) -> list[float]:
        """Rewards in order; sleeps for the longest of the batch's delays."""
        rewards = [self._one(*row) for row in zip(texts, answers, responses, strict=True)]
        if self._problem.delay_median_s > 0:
            time.sleep(max(self._delay_s() for _ in rewards))
        return rewards

    def _one(self, text: str, answer: str, response: str) -> float:
        result = self._function(Prompt(prompt=PromptId(0), text=text, answer=answer), response)
        if inspect.isawaitable(result):
            result = asyncio.run(_await(result))
        return float(result["reward"] if isinstance(result, dict) else result)

    def _delay_s(self) -> float:
        """Log-normal by median and 99th percentile, as `task.reward_delay_*` of Laminar."""
        median, p99 = self._problem.delay_median_s, self._problem.delay_p99_s
        return median * math.exp(math.log(p99 / median) / Z_99 * self._random.gauss(0.0, 1.0))


async def _await(awaitable: Any) -> Any:
    return await awaitable


class Recorder:
    """Writes one JSON line per step of a synchronous loop and says when to stop."""

    def __init__(self, problem: Problem, path: Path) -> None:
        self.curve = Curve(problem.target)
        self._problem = problem
        self._path = path
        path.write_text("")
        self._started_s: float | None = None
        self._cpu_s = 0.0
        self._parts: dict[str, float] = {}

    def begin(self) -> None:
        """The first step's generation starts now; later calls do nothing."""
        if self._started_s is None:
            self._started_s, self._cpu_s = time.perf_counter(), time.process_time()

    def spent(self, part: str, seconds: float) -> None:
        """Account wall time of the current step to a part: ``generate_s``, ``reward_s`` …"""
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def step(self, reward: float) -> None:
        """A step with this mean batch reward has ended."""
        assert self._started_s is not None
        self.curve.add(time.perf_counter() - self._started_s, reward)
        line = {"t": self.curve.times_s[-1], "reward": reward, "cpu_s": time.process_time() - self._cpu_s}
        with self._path.open("a") as file:
            file.write(json.dumps(line | self._parts) + "\n")
        self._parts = {}

    @property
    def finished(self) -> bool:
        """Target reached, or out of steps or time."""
        times = self.curve.times_s
        out_of_time = bool(times) and times[-1] >= self._problem.seconds_max
        return self.curve.reached_step is not None or len(times) >= self._problem.steps_max or out_of_time
