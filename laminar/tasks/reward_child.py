"""One reward process as its pool sees it: what it has been asked, what runs, and when it is too late.

Invariant: a child that is gone (exit, crash, timeout) ends in `serve` returning; its `jobs` are then what it still owed.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from laminar import wire
from laminar.config import TaskConfig
from laminar.errors import ProtocolError, StartError
from laminar.tasks.reward_wire import Answer, Ask, Begun, NotReady, Ready, Setup, Unpacker, pack

START_TIMEOUT_S = 120.0  # importing a user's scorer may import torch
GRACE_S = 0.1  # a late event loop may find the answer already in the pipe
KILLED_S = 5.0  # for the end of a process that was killed
CHUNK_BYTES = 1 << 16
SECRETS = ("LAMINAR_TOKEN",)


class Job(msgspec.Struct, kw_only=True, eq=False):
    """One question and who waits for its answer."""

    number: int
    prompt: wire.Prompt
    response: str
    future: "asyncio.Future[Answer]"
    strike: str = ""
    """Why the child that ran it died, if one did: it then runs alone, and once more at most."""


class Child:
    """A running `laminar.tasks.reward_worker`. `on_answer` is called for every answer, on the loop."""

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        self.jobs: dict[int, Job] = {}
        """Asked and not answered, by number."""
        self.began: dict[int, float] = {}
        """Those in user code, and since when (monotonic seconds)."""
        self.expired: set[int] = set()
        """Those that were over their time when this child was killed for it."""
        self.killed_late = False
        self._process, self._timeout_s = process, timeout_s
        self._progress_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._unpacker = Unpacker()

    @classmethod
    async def start(cls, task: TaskConfig) -> "Child":
        """A child that has loaded the task's scorer. Raises StartError with the end of its traceback."""
        environment = {key: value for key, value in os.environ.items() if key not in SECRETS}
        environment.setdefault("OMP_NUM_THREADS", "1")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "laminar.tasks.reward_worker", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        child = cls(process, task.reward_timeout_s)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child._handshake(task)
        except TimeoutError:
            await child.kill()
            raise StartError(f"reward code was not loaded within {START_TIMEOUT_S:g} s; what does it import?") from None
        except BaseException:
            await child.kill()
            raise
        return child

    async def _handshake(self, task: TaskConfig) -> None:
        self._write(Setup(task))
        messages: list[Ready | NotReady | Begun | Answer] = []
        while not messages:
            chunk = await self._read()
            if not chunk:
                raise StartError(f"the reward process died while loading {task.reward or task.dataset!r}; see its log")
            messages += self._unpacker.feed(chunk)
        if isinstance(messages[0], NotReady):
            name = task.reward or f"the scorer of {task.dataset}"
            raise StartError(f"the reward code {name} cannot be loaded; fix task.reward:\n{messages[0].detail}")

    async def serve(self, on_answer: Callable[[Job, Answer], None]) -> None:
        """Take answers until the child is gone. Never raises for what a child does."""
        try:
            while chunk := await self._read():
                for message in self._unpacker.feed(chunk):
                    self._take(message, on_answer)
        except ProtocolError:
            return
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def ask(self, job: Job) -> None:
        """Queue a question; never blocks."""
        if not self.jobs:
            self._progress_at = time.monotonic()
        self.jobs[job.number] = job
        self._write(Ask(job.number, job.prompt, job.response))
        if self._timer is None:
            self._arm()

    async def kill(self) -> None:
        """SIGKILL to everything that the child started, and reap it."""
        self._signal()
        self._process._transport.close()  # type: ignore[attr-defined]
        with contextlib.suppress(TimeoutError):  # one that hangs in the kernel ends when that lets go of it
            await asyncio.wait_for(self._process.wait(), KILLED_S)

    def _take(self, message: Ready | NotReady | Begun | Answer, on_answer: Callable[[Job, Answer], None]) -> None:
        self._progress_at = time.monotonic()
        if isinstance(message, Begun):
            self.began[message.number] = self._progress_at
        elif isinstance(message, Answer):
            self.began.pop(message.number, None)
            job = self.jobs.pop(message.number, None)
            if job is not None:
                on_answer(job, message)

    def _write(self, message: Setup | Ask) -> None:
        """What a child that has just died does not take is owed, like all else; uvloop raises RuntimeError for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(pack(message))

    async def _read(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(CHUNK_BYTES)

    # ---- time limit ----------------------------------------------------------------------------------------

    def _deadline(self) -> float:
        return min(self.began.values(), default=self._progress_at) + self._timeout_s

    def _arm(self) -> None:
        delay_s = max(0.0, self._deadline() - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire, False)

    def _expire(self, sure: bool) -> None:
        self._timer = None
        if not self.jobs:
            return
        now = time.monotonic()
        if now < self._deadline():
            self._arm()
        elif not sure:
            self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._expire, True)
        else:
            self.killed_late = True
            self.expired = {number for number, began in self.began.items() if now >= began + self._timeout_s}
            self._signal()

    def _signal(self) -> None:
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
