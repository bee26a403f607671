"""Agent programs of one replica: for each trajectory, and each held-out prompt, a process, a key, and what came of it.

Invariants:
* Every attempt ends once: finished with an answer to score, failed with a reason, or aborted.
* No key works before its agent starts or after it has ended; the same holds for the agent's processes.
"""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from laminar import wire
from laminar.config import Config, TaskConfig
from laminar.ids import GroupId
from laminar.workers.agents.program import Exit, Program
from laminar.workers.agents.proxy import Proxy
from laminar.workers.agents.session import Counted, Failure, Session
from laminar.workers.agents.transcript import Delta
from laminar.workers.engines.base import Engine, Output
from laminar.workers.rollout.progress import Attempt, Progress
from laminar.workers.rollout.requests import Requests
from laminar.workers.rollout.text import TextCodec

SIGNALED = 128  # exit statuses from here on are those of signals


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's answer."""

    finish_reason: str
    """``env``: the agent ended by itself; ``length``: its last call had no room left."""
    answer: str


class AgentHost:
    """What the agents of a worker share: the program and the proxy."""

    def __init__(self, task: TaskConfig) -> None:
        """Raises StartError when the program is not there."""
        self.program, self.proxy, self.task = Program(task), Proxy(task.agent_model), task


class Agents:
    """All agents of one replica. `engine` is the one that `requests` go to."""

    def __init__(
        self, host: AgentHost, config: Config, requests: Requests, codec: TextCodec, engine: Engine, progress: Progress
    ) -> None:
        self._host, self._requests, self._codec, self._progress = host, requests, codec, progress
        self._engine = engine
        self._on_rewrite = config.task.on_rewrite
        self._counts: Counter[str] = Counter()
        self._sessions: dict[int, Session] = {}
        """Of attempts, by their key in `Progress`."""
        self._aborted: set[int] = set()
        self._live: dict[int, Session] = {}
        """By the engine's keys of their requests."""
        self._places = asyncio.Semaphore(engine.num_requests_max)
        """For evaluations: all prompts of one come at once."""
        self._num_evaluating = 0

    @property
    def num_busy(self) -> int:
        """What keeps the engine from being replaced its weights, beside the attempts."""
        return len(self._live) + self._num_evaluating

    def take_counts(self) -> dict[str, int]:
        """Since the last time."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def generated(self, output: Output) -> None:
        """What the engine says. Unknown keys are ignored."""
        session = self._live.get(output.key)
        if session is not None:
            session.take(output)

    def abort(self, key: int) -> bool:
        """Stop the agent of an attempt, which is then told as aborted; False if it is none of an agent."""
        session = self._sessions.get(key)
        if session is not None:
            self._aborted.add(key)
            session.close()
            session.ended.set()
        return session is not None

    def attempt(
        self, key: int, attempt: Attempt, group: GroupId, seed: int, version: str
    ) -> Coroutine[Any, Any, Attempt | None]:
        """Runs the agent of an attempt, which `Progress` knows by `key`, to its end; the attempt if its reward is due."""
        session = self._session(seed, version, recorder=_Reporter(self._progress, key, group))
        self._sessions[key] = session
        return self._attend(key, attempt, session)

    async def _attend(self, key: int, attempt: Attempt, session: Session) -> Attempt | None:
        began = time.monotonic()
        try:
            ending = await self._run(session, attempt.prompt)
        finally:
            del self._sessions[key]
        if key in self._aborted:
            self._aborted.discard(key)
            ending = Ending(finish_reason="abort", answer="")
        if isinstance(ending, Failure):
            self._progress.gave_up(key, ending.kind, ending.reason, ending.detail)
            return None
        attempt.answer = ending.answer
        seconds = time.monotonic() - began
        return self._progress.generated(
            Output(key=key, tokens=[], logprobs=[], finish_reason=ending.finish_reason, decode_s=seconds)
        )

    async def answer(self, prompt: wire.Prompt, version: str) -> Ending | Failure:
        """Run an agent greedily and record nothing of it."""
        self._num_evaluating += 1
        try:
            async with self._places:
                return await self._run(self._session(0, version, recorder=None), prompt)
        finally:
            self._num_evaluating -= 1

    def _session(self, seed: int, version: str, recorder: "_Reporter | None") -> Session:
        return Session(
            requests=self._requests,
            codec=self._codec,
            live=self._live,
            abort=self._engine.abort,
            count=self._count if recorder else lambda name: None,
            recorder=recorder,
            seed=seed,
            version=version,
            on_rewrite=self._on_rewrite,
        )

    def _count(self, what: Counted) -> None:
        self._counts[what.value] += 1

    async def _run(self, session: Session, prompt: wire.Prompt) -> Ending | Failure:
        key = secrets.token_urlsafe(32)
        proxy = self._host.proxy
        environment = {
            "OPENAI_BASE_URL": proxy.url,
            "OPENAI_API_BASE": proxy.url,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": self._host.task.agent_model,
        }
        proxy.sessions[key] = session
        try:
            done = await self._host.program.run(
                environment=environment,
                stdin=json.dumps(_as_told(prompt, self._host.task)).encode(),
                prompt=_text(prompt),
                until=session.ended,
            )
        except OSError as error:
            return Failure(kind="infra", reason="agent_not_started", detail=f"the agent cannot be started: {error}")
        except ValueError as error:
            return Failure(kind="data", reason="prompt_error", detail=f"the agent cannot be given its prompt: {error}")
        finally:
            del proxy.sessions[key]
            session.close()
        return ending_of(session, done, self._host.task)


class _Reporter:
    """A session's recorder: its tokens are those of an attempt."""

    def __init__(self, progress: Progress, key: int, group: GroupId) -> None:
        self._progress, self._key, self._group = progress, key, group

    def began(self, prompt_tokens: list[int]) -> None:
        self._progress.began(self._key, self._group, prompt_tokens)

    def grew(self, delta: Delta) -> None:
        self._progress.grew(self._key, delta.tokens, delta.logprobs, delta.sources)


def ending_of(session: Session, done: Exit, task: TaskConfig) -> Ending | Failure:
    """What a run of the agent comes to."""
    if session.failure is not None:
        return session.failure
    said = f":\n{done.stderr.strip()}" if done.stderr.strip() else ""
    if done.timed_out:
        text = f"the agent ran for task.agent_timeout_s = {task.agent_timeout_s:g} s and was killed{said}"
        return Failure(kind="data", reason="agent_timeout", detail=text)
    if done.status > SIGNALED:
        text = f"the agent was ended by signal {done.status - SIGNALED}{said}"
        return Failure(kind="infra", reason="agent_killed", detail=text)
    if done.status and not session.is_cut:
        text = f"the agent ended with exit status {done.status}{said}"
        return Failure(kind="data", reason="agent_failed", detail=text)
    if not session.transcript.num_model_tokens:
        return _nothing_said(session, said)
    answer = done.stdout.strip() or session.transcript.last_answer
    return Ending(finish_reason="length" if session.is_cut else "env", answer=answer)


def _nothing_said(session: Session, said: str) -> Failure:
    if session.is_cut:
        return Failure(
            kind="data", reason="prompt_too_long", detail=f"the first call leaves no room for an answer{said}"
        )
    return Failure(kind="data", reason="agent_made_no_call", detail=f"the agent ended without a call{said}")


def _text(prompt: wire.Prompt) -> str:
    return prompt.text or (prompt.messages[-1]["content"] if prompt.messages else "")


def _as_told(prompt: wire.Prompt, task: TaskConfig) -> dict[str, object]:
    """What an agent reads on stdin; never the reference answer."""
    return {
        "id": prompt.prompt,
        "prompt": _text(prompt),
        "messages": prompt.messages or [{"role": "user", "content": prompt.text}],
        "metadata": {key: prompt.metadata[key] for key in task.agent_metadata if key in prompt.metadata},
    }
