"""One replica at work: orders in, engine and rewards between, reports out.

Invariants:
* The engine generates under `version` only; an order for another version is answered with a failure, never obeyed.
* What a report says is decided in `Progress` alone.
* While more than `PENDING_BYTES_MAX` wait for the controller, new groups wait too.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from laminar import wire
from laminar.channel import PENDING_BYTES_MAX
from laminar.config import Config
from laminar.errors import LaminarError
from laminar.ids import TrajectoryId, Version
from laminar.tasks.rewards import Reward, RewardPool
from laminar.workers.canary import TOLERANCES, CanaryError, Sighting, judge
from laminar.workers.engines.base import Engine, WeightsBroken
from laminar.workers.link import Link
from laminar.workers.relay.client import Lease, RelayClient, RelayError
from laminar.workers.relay.manifest import Snapshot
from laminar.workers.rollout.agents import AgentHost, Agents
from laminar.workers.rollout.evaluation import EvaluationError, Evaluator
from laminar.workers.rollout.progress import Attempt, Interval, Progress
from laminar.workers.rollout.requests import Requests
from laminar.workers.rollout.text import PromptError, TextCodec

log = structlog.get_logger("laminar.rollout")

FULL_REWARD = 1 - 1e-6
REPORT_GAP_S = 0.02  # rewards that come one by one to an idle replica share a report
QUIET_TIMEOUT_S = 60.0  # for aborted and evaluation requests to leave the engine before a refresh
LEASE_WAIT_S = 5.0  # a refresh is ordered once the relay has the version; this covers a relay that was restarted

Spawn = Callable[[Coroutine[Any, Any, None], str], None]


def canary_tolerance(config: Config, snapshot: Snapshot) -> float:
    """Mean |Δ log-prob| at which the canary fails; by the dtype of the weights unless it is configured."""
    if config.rollout.canary_tolerance >= 0:
        return config.rollout.canary_tolerance
    return max((TOLERANCES.get(spec.dtype, 0.0) for spec in snapshot.manifest.tensors), default=0.0)


class RefreshError(LaminarError):
    """The order to refresh cannot be followed now."""


class Replica:
    """All parts are started. `spawn` owns the replica's tasks and ends the worker when one breaks."""

    def __init__(
        self,
        config: Config,
        link: Link,
        engine: Engine,
        rewards: RewardPool,
        codec: TextCodec,
        relay: RelayClient,
        spawn: Spawn,
        agents: AgentHost | None = None,
    ) -> None:
        self.version: Version | None = None
        self._link, self._engine, self._rewards, self._codec, self._relay = link, engine, rewards, codec, relay
        self._spawn = spawn
        self._config = config
        self._flush_interval_s = config.rollout.flush_interval_s
        self._requests = Requests(engine, config.rollout, codec.stop_ids)
        self._progress = Progress()
        self._agents = Agents(agents, config, self._requests, codec, engine, self._progress) if agents else None
        self._evaluator = Evaluator(self._requests, codec, rewards, self._agents)
        self._held: deque[wire.AssignGroup] = deque()
        self._refreshing = False
        self._sighting: Sighting | None = None
        """Of the canary, at the last pull."""
        self._drain_planned = False
        self._report_now, self._quiet = asyncio.Event(), asyncio.Event()
        self._reported_load = (0, 0)
        """Requests that run and wait in the engine, as last reported."""
        self._begin_interval(engine.usage().busy_s)

    def order(self, message: wire.Message) -> None:
        """Follow an order of the controller; long ones go on in a task."""
        if isinstance(message, wire.AssignGroup):
            self._held.append(message)
            self._assign_held()
        elif isinstance(message, wire.Abort):
            self._abort(set(zip(message.trajectories, message.attempts, strict=True)))
        elif isinstance(message, wire.Refresh):
            self._spawn(self._refresh(message), f"refresh to {message.version}")
        elif isinstance(message, wire.Evaluate):
            self._spawn(self._evaluate(message), f"evaluation {message.evaluation}")
        elif isinstance(message, wire.Reconfigure):
            self._flush_interval_s = message.flush_interval_s or self._config.rollout.flush_interval_s
            self._report_now.set()  # what an interval that was longer would have kept is due now
        else:
            log.warning("order_not_for_a_rollout", order=type(message).__name__)

    def on_finish(self, key: int) -> None:
        """The engine's call when a request ended: take its tokens soon, once for all that end together."""
        if not self._drain_planned:
            self._drain_planned = True
            asyncio.get_running_loop().call_soon(self._drain)

    # ---- assignments ---------------------------------------------------------------------------------------

    def _assign_held(self) -> None:
        while self._held and self._link.pending_bytes <= PENDING_BYTES_MAX:
            self._assign(self._held.popleft())
        self._report_if_idle()

    def _assign(self, order: wire.AssignGroup) -> None:
        if self._agents is not None:
            self._assign_agents(self._agents, order)
            return
        try:
            prompt_tokens = self._codec.encode_group(order.group, order.prompt)
        except PromptError as error:
            self._fail(order.starts, "data", "prompt_error", str(error))
            return
        self._progress.assigned(order.group, prompt_tokens)
        for start in order.starts:
            if start.score_only:
                self._complete(_attempt(start, order.prompt, prompt_tokens), None)
        starts = [start for start in order.starts if not start.score_only]
        if order.version != self.version or self._refreshing:
            self._fail(starts, "infra", "wrong_version", self._wrong_version(order.version))
        elif self._requests.num_tokens_max(len(prompt_tokens)) < 1:
            detail = f"{len(prompt_tokens)} tokens; the context has {self._engine.context_tokens_max}"
            self._fail(starts, "data", "prompt_too_long", detail)
        else:
            for start in starts:
                self._generate(start, _attempt(start, order.prompt, prompt_tokens), prompt_tokens)

    def _assign_agents(self, agents: Agents, order: wire.AssignGroup) -> None:
        """Prompts are what the agents make of theirs, so nothing is encoded yet."""
        if order.version != self.version or self._refreshing:
            self._fail(order.starts, "infra", "wrong_version", self._wrong_version(order.version))
            return
        for start in order.starts:
            key, attempt = self._requests.new_key(), _attempt(start, order.prompt, [])
            self._progress.submitted(key, attempt)
            work = agents.attempt(key, attempt, order.group, start.seed, str(order.version))
            self._spawn(self._await_agent(work), f"agent of {start.trajectory}")

    async def _await_agent(self, work: Coroutine[Any, Any, Attempt | None]) -> None:
        due = await work
        if due is not None:
            self._spawn(self._score(due), f"reward of {due.trajectory}")
        self._note_quiet()
        self._report_if_idle()

    def _generate(self, start: wire.TrajectoryStart, attempt: Attempt, prompt_tokens: list[int]) -> None:
        ended = self._requests.ends(attempt.tokens, len(prompt_tokens), start.seed)
        if ended is not None:
            self._complete(attempt, ended)
            return
        try:
            key = self._requests.sample(prompt_tokens, list(attempt.tokens), start.seed)
        except ValueError as error:
            self._fail([start], "data", "prompt_rejected", str(error))
        else:
            self._progress.submitted(key, attempt)

    def _fail(self, starts: list[wire.TrajectoryStart], kind: str, reason: str, detail: str) -> None:
        for start in starts:
            self._progress.failed(start.trajectory, start.attempt, kind, reason, detail)

    def _wrong_version(self, version: Version) -> str:
        doing = ", and is being refreshed" if self._refreshing else ""
        return f"asked for {version}, the replica holds {self.version or 'no version yet'}{doing}"

    def _abort(self, identities: set[tuple[TrajectoryId, int]]) -> None:
        waiting = {(start.trajectory, start.attempt) for order in self._held for start in order.starts}
        for trajectory, attempt in sorted(waiting & identities):
            self._progress.withdrawn(trajectory, attempt)
        held = [_without(order, identities) for order in self._held]
        self._held = deque(order for order in held if order.starts)
        for trajectory, attempt in identities:
            key = self._progress.abort(trajectory, attempt)
            if key is not None and not (self._agents and self._agents.abort(key)):
                self._engine.abort(key)

    # ---- generation and rewards ----------------------------------------------------------------------------

    def _drain(self) -> None:
        self._drain_planned = False
        for output in self._engine.drain():
            self._evaluator.generated(output)
            if self._agents is not None:
                self._agents.generated(output)
            due = self._progress.generated(output)
            if due is not None:
                self._spawn(self._score(due), f"reward of {due.trajectory}")
        self._note_quiet()
        self._report_if_idle()

    def _note_quiet(self) -> None:
        if not self._is_busy:
            self._quiet.set()

    @property
    def _is_busy(self) -> bool:
        busy = self._progress.num_generating or self._evaluator.num_generating
        return bool(busy or (self._agents and self._agents.num_busy))

    def _complete(self, attempt: Attempt, finish_reason: str | None) -> None:
        self._progress.completed(attempt, finish_reason)
        self._spawn(self._score(attempt), f"reward of {attempt.trajectory}")

    async def _score(self, attempt: Attempt) -> None:
        text = self._codec.decode(attempt.tokens) if attempt.answer is None else attempt.answer
        result = await self._rewards.score(attempt.prompt, text, attempt.trajectory)
        if isinstance(result, Reward):
            self._progress.rewarded(attempt, result.reward, result.parts, result.reward_s)
        else:
            self._progress.unrewarded(attempt, result.kind, result.reason, result.detail)
        self._report_if_idle()

    # ---- reports -------------------------------------------------------------------------------------------

    async def report_for_ever(self) -> None:
        """Every `flush_interval_s`, and at once when nothing generates any more or a reward comes then."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._flush_interval_s - REPORT_GAP_S)):
                    await self._report_now.wait()
            self._assign_held()
            self.report()
            await asyncio.sleep(REPORT_GAP_S)

    def report(self) -> None:
        """Send what there is to say; nothing while idle. What the engine holds is said at every flush, also of an evaluation."""
        self._drain()
        usage = self._engine.usage()
        load, now = (usage.num_running, usage.num_waiting), time.monotonic()
        if self._progress.has_report or usage.busy_s > self._busy_s or any(load) or load != self._reported_load:
            self._reported_load = load
            interval = Interval(
                decode_busy_s=usage.busy_s - self._busy_s, interval_s=now - self._began, since=self._since
            )
            counts = self._agents.take_counts() if self._agents else None
            self._link.send(self._progress.report(self.version, usage, interval, counts))
        self._begin_interval(usage.busy_s)
        self._report_now.clear()

    def _report_if_idle(self) -> None:
        if not self._progress.num_generating and self._progress.has_news:
            self._report_now.set()

    def _begin_interval(self, busy_s: float) -> None:
        self._since, self._began, self._busy_s = time.time(), time.monotonic(), busy_s

    # ---- weights and evaluations ---------------------------------------------------------------------------

    async def _refresh(self, order: wire.Refresh) -> None:
        if self._refreshing:
            self._link.send(wire.RefreshFailed(version=order.version, reason="another refresh is under way"))
            return
        self._refreshing = True
        try:
            refreshed = await self._load(order)
        except (WeightsBroken, CanaryError):
            raise  # nothing can be generated with this engine any more
        except (LaminarError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            reason = f"{order.version} was not loaded: {str(error) or type(error).__name__}"
            log.warning("refresh_failed", reason=reason)
            self._link.send(wire.RefreshFailed(version=order.version, reason=reason))
        else:
            self.version = order.version
            self._link.send(refreshed)
        finally:
            self._refreshing = False

    async def _load(self, order: wire.Refresh) -> wire.Refreshed:
        """Pull and look. Decoding stops from the end of the last request to the canary's answer."""
        async with asyncio.timeout(QUIET_TIMEOUT_S):
            await self._until_quiet()
        self.report()
        began = time.monotonic()
        verify = self._config.relay.verify_pulls
        lease = await asyncio.to_thread(self._relay.lease, order.version, verify=verify, wait_s=LEASE_WAIT_S)
        try:
            if lease.digest != order.digest:
                raise RefreshError(f"the relay has digest {lease.digest}, the order says {order.digest}")
            await self._engine.load_weights(order.version, lease.snapshot)
            difference = await self._look(lease)
        except CanaryError:
            with contextlib.suppress(RelayError):  # if the relay's bytes are to blame, nobody else is to meet them
                await asyncio.to_thread(lease.verify)
            raise
        finally:
            await asyncio.to_thread(lease.release)
        wait_s = time.monotonic() - began
        return wire.Refreshed(version=order.version, digest=order.digest, wait_s=wait_s, canary_difference=difference)

    async def _look(self, lease: Lease) -> float | None:
        """Difference of the version's canary; None if it has none. Raises CanaryError."""
        if lease.canary is None:
            return None
        before, self._sighting = self._sighting, None
        now = Sighting(lease.canary, await self._engine.logprobs(lease.canary.tokens))
        judge(now, before, canary_tolerance(self._config, lease.snapshot))
        self._sighting = now
        return now.difference

    async def _until_quiet(self) -> None:
        """Wait for aborted and evaluation requests, which end by themselves; raises when others run."""
        if self._progress.num_unaborted:
            raise RefreshError(f"{self._progress.num_unaborted} trajectories still generate under {self.version}")
        while self._is_busy:
            self._quiet.clear()
            await self._quiet.wait()

    async def _evaluate(self, order: wire.Evaluate) -> None:
        try:
            if order.version != self.version or self._refreshing:
                raise EvaluationError(self._wrong_version(order.version))
            scores = await self._evaluator.scores(order.prompts, str(order.version))
        except (EvaluationError, PromptError, ValueError) as error:
            self._link.send(wire.EvaluationFailed(evaluation=order.evaluation, reason=str(error)))
            return
        self._link.send(
            wire.EvaluationDone(
                evaluation=order.evaluation,
                version=order.version,
                accuracy=sum(score >= FULL_REWARD for score in scores) / max(1, len(scores)),
                score=sum(scores) / max(1, len(scores)),
                num_prompts=len(scores),
            )
        )


def _attempt(start: wire.TrajectoryStart, prompt: wire.Prompt, prompt_tokens: list[int]) -> Attempt:
    prefix = wire.unpack_i32(start.prefix_tokens)
    return Attempt(
        trajectory=start.trajectory,
        attempt=start.attempt,
        prompt=prompt,
        num_prompt_tokens=len(prompt_tokens),
        tokens=prefix,
        num_reported=len(prefix),
    )


def _without(order: wire.AssignGroup, identities: set[tuple[TrajectoryId, int]]) -> wire.AssignGroup:
    starts = [start for start in order.starts if (start.trajectory, start.attempt) not in identities]
    return msgspec.structs.replace(order, starts=starts)
