"""The life of a rollout worker: dial in, start the parts, work, end.

Invariants:
* The first of Stop, a signal, an orphaned link or a broken part ends the worker, also while it starts.
* Whatever ends it, everything it started ends with it, and the controller is told unless it is gone.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from laminar import descriptors, wire
from laminar.errors import LaminarError, ProtocolError
from laminar.tasks.rewards import RewardPool
from laminar.workers.engines.base import Engine
from laminar.workers.link import Link, LinkClosed
from laminar.workers.relay import paths
from laminar.workers.relay.client import RelayClient
from laminar.workers.rollout.agents import AgentHost
from laminar.workers.rollout.engines import EngineChoice, make_engine
from laminar.workers.rollout.replica import Replica
from laminar.workers.rollout.text import TextCodec

OPEN_FILES, OPEN_PER_REQUEST = (
    128,
    4,
)  # an agent has three pipes and a call to the proxy; vLLM one connection per request

log = structlog.get_logger("laminar.rollout")


class RolloutWorker:
    """`relay_directory` None: where this host's relay of the run serves."""

    def __init__(
        self,
        link: Link,
        *,
        name: str = "rollout",
        engine: EngineChoice | None = None,
        relay_directory: Path | None = None,
    ) -> None:
        self._link, self._name, self._choice = link, name, engine or EngineChoice()
        self._relay_directory = relay_directory
        self._engine: Engine | None = None
        self._rewards: RewardPool | None = None
        self._agents: AgentHost | None = None
        self._replica: Replica | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> str:
        """Work until told to stop; the reason. Raises what ended the worker otherwise: Orphaned, StartError …"""
        self._spawn(self._begin(), "start")
        try:
            return await self._ended
        finally:
            await self._end()

    def stop(self, reason: str) -> None:
        """End `run` cleanly. Safe to call twice."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def _begin(self) -> None:
        welcome = await self._link.connect()
        self._spawn(self._receive(), "orders")
        config = self._link.config
        assert config is not None
        if config.task.agent or self._choice.name == "vllm":
            num = self._choice.max_concurrent or config.rollout.max_concurrent
            descriptors.require(OPEN_FILES + OPEN_PER_REQUEST * num, f"{num} requests at once (rollout.max_concurrent)")
        codec = await asyncio.to_thread(TextCodec, config.model.path)
        self._rewards = RewardPool(config.task, config.run.seed)
        await self._rewards.start()
        self._engine = engine = make_engine(self._choice, config, self._name)
        await engine.start(self._on_finish)
        self._spawn(engine.watch(), "engine")
        if config.task.agent:
            self._agents = AgentHost(config.task)
            await self._agents.proxy.start()
        relay = RelayClient(self._relay_directory or paths.shm_directory(welcome.run_id))
        self._replica = Replica(config, self._link, engine, self._rewards, codec, relay, self._spawn, self._agents)
        ready = wire.RolloutReady(
            num_requests_max=engine.num_requests_max,
            kv_tokens_max=engine.kv_tokens_max,
            context_tokens_max=engine.context_tokens_max,
            num_requests_memory_bound=engine.num_requests_memory_bound,
        )
        self._link.send(ready)
        self._spawn(self._replica.report_for_ever(), "reports")

    async def _receive(self) -> None:
        while True:
            message = await self._link.receive()
            if isinstance(message, wire.Stop):
                self.stop(message.reason)
            elif self._replica is None:
                raise ProtocolError(f"the controller sent {type(message).__name__} before RolloutReady")
            else:
                self._replica.order(message)

    def _on_finish(self, key: int) -> None:
        if self._replica is not None:
            self._replica.on_finish(key)

    async def _end(self) -> None:
        failure = self._ended.exception() if self._ended.done() and not self._ended.cancelled() else None
        if self._replica is not None:
            self._replica.report()
        if failure is not None:
            self._link.send(wire.WorkerFailed(reason=_one_line(failure), detail=_detail(failure)))
        await self._link.close(goodbye=failure is None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._agents is not None:
            await self._agents.proxy.stop()
        if self._rewards is not None:
            await self._rewards.stop()
        if self._engine is not None:
            with contextlib.suppress(RuntimeError):  # a forward that does not end; the process ends without it
                await self._engine.stop()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, LinkClosed):
            return
        if self._ended.done():
            log.warning("task_failed_at_the_end", task=task.get_name(), error=_one_line(error))
        else:
            self._ended.set_exception(error)


def _one_line(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, LaminarError) and text else f"{type(error).__name__}: {text}"


def _detail(error: BaseException) -> str:
    if isinstance(error, LaminarError):
        return ""
    return "".join(traceback.format_exception(error))
