"""The reward pool: user code scores responses in child processes that may hang, crash or print as they like.

Invariants:
* Every `score` ends: with a reward, or with a failure that says whose fault it was.
* A response whose score killed its child (too slow, crash) is tried once more, alone in a child; the others that
  child owed are asked again as if nothing had happened. So nobody fails for a neighbour.
* A child is killed with everything it started, and dies with this process.
"""

import asyncio
import itertools
import math
import random
import time
from collections import deque

import msgspec
import structlog

from laminar import wire
from laminar.config import TaskConfig
from laminar.errors import StartError
from laminar.ids import derive_seed
from laminar.tasks.reward_child import Child, Job
from laminar.tasks.reward_wire import Answer

log = structlog.get_logger("laminar.rewards")

IN_FLIGHT_MAX = 64  # per child: enough that a pipe round trip costs nothing, few enough to keep children even
RESTART_DELAY_S = 0.5
RESTARTS_FAILED_MAX = 3  # in a row; from then on scores fail at once until a child starts again
_INFRA = ("reward_crash", "reward_not_started")
Z_99 = 2.3263478740408408  # 99th percentile of the standard normal distribution


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """A finite score, its named parts, and the seconds from `score` to it."""

    reward: float
    parts: dict[str, float]
    reward_s: float


class RewardFailure(msgspec.Struct, frozen=True, kw_only=True):
    """No score. `kind` and `reason` as in `wire.Failed`."""

    kind: str
    reason: str
    """``reward_error``, ``reward_nan``, ``reward_timeout`` (data); ``reward_crash``, ``reward_not_started`` (infra)."""
    detail: str = ""


class RewardPool:
    """`task.reward_workers` processes with the task's scorer. `seed` seeds the artificial delays."""

    def __init__(self, task: TaskConfig, seed: int) -> None:
        self._task, self._seed = task, seed
        self._numbers = itertools.count(1)
        self._queue: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._children: dict[int, Child] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._num_restarts_failed = 0

    async def start(self) -> None:
        """Start the children. Raises StartError when the scorer cannot be imported."""
        starts = [asyncio.create_task(Child.start(self._task)) for _ in range(max(1, self._task.reward_workers))]
        results = await asyncio.gather(*starts, return_exceptions=True)
        children = [result for result in results if isinstance(result, Child)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await asyncio.gather(*(child.kill() for child in children))
            raise errors[0]
        self._slots = [
            asyncio.create_task(self._keep(index, child), name=f"reward process {index}")
            for index, child in enumerate(children)
        ]

    async def score(self, prompt: wire.Prompt, response: str, key: int) -> Reward | RewardFailure:
        """Score one response. `key` (with the pool's seed) determines the artificial delay."""
        began = time.monotonic()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        job = Job(number=next(self._numbers), prompt=prompt, response=response, future=future)
        self._queue.append(job)
        self._dispatch()
        delay_s = self.delay_s(key)
        if delay_s:
            await asyncio.sleep(delay_s)
        answer = await future
        if answer.reason:
            kind = "infra" if answer.reason in _INFRA else "data"  # a timeout has had its second try here
            return RewardFailure(kind=kind, reason=answer.reason, detail=answer.detail)
        return Reward(reward=answer.reward, parts=answer.parts, reward_s=time.monotonic() - began)

    async def stop(self) -> None:
        """Kill the children; scores that still wait end as `reward_not_started`. Safe to call twice."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots = []
        self._fail_queued("the reward pool was stopped")

    def delay_s(self, key: int) -> float:
        """Log-normal with the configured median and 99th percentile: median · (p99 / median)^(z / z₀.₉₉), z normal."""
        median, p99 = self._task.reward_delay_median_s, self._task.reward_delay_p99_s
        if median <= 0:
            return 0.0
        sigma = math.log(max(1.0, p99 / median)) / Z_99
        return median * math.exp(sigma * random.Random(derive_seed(self._seed, key)).gauss(0.0, 1.0))

    # ---- children ------------------------------------------------------------------------------------------

    async def _keep(self, index: int, child: Child | None) -> None:
        while True:
            if child is not None:
                await self._serve(index, child)
            child = await self._restart()

    async def _serve(self, index: int, child: Child) -> None:
        self._children[index] = child
        self._num_restarts_failed = 0
        try:
            self._dispatch()
            await child.serve(self._answered)
        finally:
            del self._children[index]
            await child.kill()
            self._blame(child)

    async def _restart(self) -> Child | None:
        try:
            return await Child.start(self._task)
        except (StartError, OSError) as error:
            self._num_restarts_failed += 1
            log.error("reward_process_failed_to_start", error=str(error), failures=self._num_restarts_failed)
            if self._broken:
                self._fail_queued(f"no reward process starts: {error}")
            await asyncio.sleep(RESTART_DELAY_S * 2 ** min(self._num_restarts_failed, 5))
            return None

    @property
    def _broken(self) -> bool:
        return not self._children and self._num_restarts_failed >= RESTARTS_FAILED_MAX

    def _blame(self, child: Child) -> None:
        """Sort what a dead child owed into suspects, failures and innocents (which go first again)."""
        culprits = (child.expired if child.killed_late else set(child.began)) or set(list(child.jobs)[:1])
        reason = "reward_timeout" if child.killed_late else "reward_crash"
        innocent = []
        for job in child.jobs.values():
            if job.number not in culprits:
                innocent.append(job)
            elif job.strike:
                detail = f"the reward function {self._says(job.strike)} and, tried once more, {self._says(reason)}"
                self._resolve(job, Answer(job.number, 0.0, {}, reason, detail))
            else:
                job.strike = reason
                self._suspects.append(job)
        if child.jobs:
            log.warning("reward_process_died", reason=reason, culprits=len(culprits), asked_again=len(innocent))
        self._queue.extendleft(reversed(innocent))
        self._dispatch()

    def _says(self, reason: str) -> str:
        late = f"took longer than task.reward_timeout_s = {self._task.reward_timeout_s:g} s"
        return late if reason == "reward_timeout" else "ended its process (what it printed is in the worker's log)"

    # ---- jobs ----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand out what waits: suspects to an empty child that takes nothing else, the rest to the least busy ones."""
        if self._broken:
            self._fail_queued("no reward process starts")
        open_children = [child for child in self._children.values() if not any(j.strike for j in child.jobs.values())]
        open_children.sort(key=lambda child: len(child.jobs))
        while self._suspects and open_children:
            child = open_children.pop(0)  # kept free of new work until it has run empty
            if child.jobs:
                break
            child.ask(self._suspects.popleft())
        while self._queue and open_children:
            child = min(open_children, key=lambda child: len(child.jobs))
            if len(child.jobs) >= IN_FLIGHT_MAX:
                break
            job = self._queue.popleft()
            if not job.future.done():
                child.ask(job)

    def _answered(self, job: Job, answer: Answer) -> None:
        self._resolve(job, answer)
        if self._queue or self._suspects:
            self._dispatch()

    def _resolve(self, job: Job, answer: Answer) -> None:
        if not job.future.done():
            job.future.set_result(answer)

    def _fail_queued(self, detail: str) -> None:
        for job in [*self._suspects, *self._queue]:
            self._resolve(job, Answer(job.number, 0.0, {}, "reward_not_started", detail))
        self._suspects.clear()
        self._queue.clear()
