"""A process on another host, as the launcher sees it: ssh clients that run here, one after another, with a supervisor at their end.

    spawn ──► attached ──► ended: as the process did
    find ───►    │ ▲ └──► (connection broke) ──► attaching again ──► LOST: nobody there, or `patience_s` is over
                 └─┴───────────────────────────────────┘

A connection that breaks is no news: the supervisor keeps the process, its last output and its status for `patience_s`. The clients'
stdout, which carries the process's output, goes straight into the log. See `laminar.remote` for what is said.
"""

import asyncio
import contextlib
import os
import select
import time
from collections import deque
from pathlib import Path
from typing import Self

import msgspec
import structlog

from laminar.controller import ssh
from laminar.controller.plan import Process
from laminar.errors import StartError
from laminar.remote import GONE, HERE, KILL, LOST, OUTDATED, STARTED, TERMINATE, Attach, Order, returncode_of

logger = structlog.get_logger(__name__)

PIPE_BYTES = 65_536  # so much a fresh pipe takes at once
START_S = 60.0  # of a Python on a file system that is shared by many
LAST_WORDS_S = 5.0  # after the client's end: a master connection that it used may keep its stderr open for long
FOUND_S = 15.0  # workers of hosts that answer must not wait for one that does not
WORDS_MAX = 50  # last lines of a login's and ssh's before the supervisor answers
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.2, 5.0
HERE_S = 5.0  # a tenth of what supervisors wait by default
HERE_PER_PATIENCE = 5  # and at least so often in the time that they wait


class RemoteProcess:
    """Owns the present client and the pipe of its stdin. `attach`: what a later connection says first."""

    def __init__(self, process: Process, log: Path, attach: Attach, patience_s: float) -> None:
        self._process, self._log, self._attach, self._patience_s = process, log, attach, patience_s
        self._client: asyncio.subprocess.Process | None = None
        self._orders = -1
        self._words: deque[bytes] = deque(maxlen=WORDS_MAX)
        self._answered, self._let_go = asyncio.Event(), asyncio.Event()
        self._is_attached = self._is_ours = False
        self._told = b""
        self._touching: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[None] | None = None
        self._end: int | None = None

    @classmethod
    async def spawn(cls, process: Process, marks: dict[str, str], log: Path, attach: Attach, patience_s: float) -> Self:
        """Start a client and give the order to start the process. Raises OSError if there is no client."""
        environment = {**ssh.inherited(process.inherits), **process.environment, **marks}
        order = Order(
            command=process.command, environment=environment, survive_s=patience_s, url=attach.url, boot=attach.boot
        )
        spawned = cls(process, log, attach, patience_s)
        await spawned._connect(msgspec.json.encode(order))
        return spawned

    async def await_start(self) -> None:
        """Returns when the process runs. Raises StartError if it cannot."""
        try:
            status = await self._answer(START_S)
            self._is_ours = self._is_attached
        finally:
            self._answered.set()
        if not self._is_attached:
            raise StartError(f"cannot start {self._process.name} on {self._process.address}: {self._explain(status)}")

    async def find(self) -> bool:
        """Attach to the process that another controller started; False if nobody is there. A host that does not answer may have
        it: `wait` tries again.
        """
        status = await self._dial(FOUND_S)
        self._is_ours = self._is_attached or status not in (GONE, OUTDATED)
        if not self._is_attached:
            logger.warning("ssh.not_found", process=self._process.name, why=self._explain(status))
        self._answered.set()
        return self._is_ours

    async def wait(self) -> int:
        """How it ended, as a process here would have; LOST when nobody can tell. Not before it is known whether it started."""
        await self._answered.wait()
        status = await self._ending()
        while status == LOST and await self._attach_again():
            status = await self._ending()
        self._end = returncode_of(status)
        if self._touching is not None:
            self._touching.cancel()
        self._close()
        return self._end

    @property
    def pid(self) -> int:
        """Of the client; -1 = there is none at the moment."""
        return self._client.pid if self._client is not None and self._client.returncode is None else -1

    @property
    def returncode(self) -> int | None:
        """What `wait` gave; None before."""
        return self._end

    def terminate(self) -> None:
        """SIGTERM to it and its descendants."""
        self._tell(TERMINATE)

    def kill(self) -> None:
        """SIGKILL to them."""
        self._tell(KILL)

    def let_go(self) -> None:
        """End the client, whatever becomes of the other end."""
        self._let_go.set()
        self._drop()

    # ---- connections ---------------------------------------------------------------------------------------

    async def _connect(self, order: bytes) -> None:
        """Start a client. Raises OSError if there is none."""
        if len(order) >= PIPE_BYTES:
            raise StartError(f"cannot start {self._process.name}: its command and environment have {len(order)} bytes")
        reading, writing = os.pipe()
        try:
            with self._log.open("ab") as output:
                self._client = await asyncio.create_subprocess_exec(
                    *self._process.ssh,
                    stdin=reading,
                    stdout=output,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        os.set_blocking(writing, False)
        self._close()
        self._orders = writing
        self._write(order + b"\n" + self._told)
        if self._touching is None:
            self._touching = asyncio.create_task(self._keep_in_touch(), name=f"touch-{self._process.name}")

    async def _answer(self, limit_s: float) -> int:
        """Wait for the supervisor; if it does not take us, the status with which the client ended."""
        assert self._client is not None
        self._words.clear()
        self._is_attached = False
        try:
            async with asyncio.timeout(limit_s):
                if await self._is_answered():
                    self._is_attached = True
                    self._copying = asyncio.create_task(self._copy_words(), name=f"ssh-{self._process.name}")
                    return 0
                return await self._client.wait()
        except TimeoutError:
            self._words.append(f"no answer within {limit_s:g} s".encode())
            return LOST

    async def _is_answered(self) -> bool:
        assert self._client is not None
        assert self._client.stderr is not None
        async for word in self._client.stderr:
            if word == STARTED:
                return True
            self._words.append(word)
        return False

    async def _copy_words(self) -> None:
        """What ssh and the supervisor say later belongs to the process's last lines."""
        assert self._client is not None
        assert self._client.stderr is not None
        async for word in self._client.stderr:
            self._note(word)

    async def _dial(self, limit_s: float) -> int:
        """Attach, or end the client that could not; see `_answer`."""
        try:
            await self._connect(msgspec.json.encode(self._attach))
        except OSError as error:
            self._words.append(f"{self._process.ssh[0]}: {error.strerror}".encode())
            return LOST
        try:
            return await self._answer(limit_s)
        finally:
            if not self._is_attached:
                await self._drop_and_wait()

    async def _ending(self) -> int:
        """The status with which the present connection ends; LOST without one."""
        if self._client is None:
            return LOST
        status = await self._client.wait()
        if not self._is_attached or self._copying is None:
            return LOST
        await asyncio.wait([self._copying], timeout=LAST_WORDS_S)
        self._copying.cancel()
        return LOST if status < 0 else status

    async def _attach_again(self) -> bool:
        """Whether there is a connection again."""
        deadline, pause_s = time.monotonic() + self._patience_s, BACKOFF_FIRST_S
        if self._is_ours and not self._let_go.is_set():
            self._note(f"laminar: the ssh connection to {self._process.address} broke\n".encode())
        while self._is_ours and not self._let_go.is_set():
            status = await self._dial(START_S)
            if self._is_attached:
                logger.info("ssh.attached_again", process=self._process.name)
                return not self._let_go.is_set()
            logger.warning("ssh.broken", process=self._process.name, why=self._explain(status))
            if status in (GONE, OUTDATED) or time.monotonic() > deadline:
                self._note(f"laminar: nothing more is known of it: {self._explain(status)}\n".encode())
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._let_go.wait(), pause_s)
            pause_s = min(BACKOFF_MAX_S, 2 * pause_s)
        return False

    def _explain(self, status: int) -> str:
        words = b"".join(self._words).decode(errors="replace")
        return ssh.explain(status, words, self._process.address, self._process.command[0])

    def _note(self, words: bytes) -> None:
        with contextlib.suppress(OSError), self._log.open("ab") as file:
            file.write(words)

    # ---- words ---------------------------------------------------------------------------------------------

    async def _keep_in_touch(self) -> None:
        while True:
            await asyncio.sleep(min(HERE_S, self._patience_s / HERE_PER_PATIENCE))
            self._write(HERE)

    def _tell(self, words: bytes) -> None:
        """Now, and first of all on a later connection."""
        self._told = words
        self._write(words)

    def _write(self, words: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, or takes nothing: then it is let go in the end
            os.write(self._orders, words)

    def _drop(self) -> None:
        if self._client is not None:
            with contextlib.suppress(ProcessLookupError):
                self._client.kill()
        self._close()

    async def _drop_and_wait(self) -> None:
        self._drop()
        if self._client is not None:
            await self._client.wait()

    def _close(self) -> None:
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1


def let_go(children: list[RemoteProcess], told_s: float = 0.0) -> None:
    """End the clients of all, once they ended by themselves or `told_s` are over. Blocks for so long."""
    deadline = time.monotonic() + told_s
    for child in children:
        with contextlib.suppress(OSError):
            ending = os.pidfd_open(child.pid)
            select.select([ending], [], [], max(0.0, deadline - time.monotonic()))
            os.close(ending)
        child.let_go()
