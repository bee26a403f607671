"""A process on another host, as the launcher sees it: the ssh client that runs here, with a supervisor at its other end.

The client's stdout, which carries the process's output, goes straight into the log. See `laminar.remote` for what is said.
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

from laminar.controller import ssh
from laminar.controller.plan import Process
from laminar.errors import StartError
from laminar.remote import KILL, LOST, STARTED, TERMINATE, Order, returncode_of

PIPE_BYTES = 65_536  # so much a fresh pipe takes at once
START_S = 60.0  # of a Python on a file system that is shared by many
WORDS_MAX = 50  # last lines of a login's and ssh's before the supervisor answers


class RemoteProcess:
    """Owns the client and the pipe of its stdin."""

    def __init__(self, process: Process, client: asyncio.subprocess.Process, orders: int, log: Path) -> None:
        self._process, self._client, self._orders, self._log = process, client, orders, log
        self._answered = asyncio.Event()
        self._copying: asyncio.Task[None] | None = None
        self._end: int | None = None

    @classmethod
    async def spawn(cls, process: Process, marks: dict[str, str], log: Path, survive_s: float) -> Self:
        """Start the client and give the order. Raises OSError if there is no client."""
        environment = {**ssh.inherited(process.inherits), **process.environment, **marks}
        order = msgspec.json.encode(Order(command=process.command, environment=environment, survive_s=survive_s))
        if len(order) >= PIPE_BYTES:
            raise StartError(f"cannot start {process.name}: its command and environment have {len(order)} bytes")
        reading, writing = os.pipe()
        try:
            with log.open("ab") as output:
                client = await asyncio.create_subprocess_exec(
                    *process.ssh, stdin=reading, stdout=output, stderr=asyncio.subprocess.PIPE, start_new_session=True
                )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        os.set_blocking(writing, False)
        spawned = cls(process, client, writing, log)
        spawned._tell(order + b"\n")
        return spawned

    async def await_start(self) -> None:
        """Returns when the process runs. Raises StartError if it cannot."""
        words: deque[bytes] = deque(maxlen=WORDS_MAX)
        try:
            async with asyncio.timeout(START_S):
                if await self._has_started(words):
                    self._copying = asyncio.create_task(self._copy_words(), name=f"ssh-{self._process.name}")
                    return
                status = await self._client.wait()
        except TimeoutError:
            words.append(f"no answer within {START_S:g} s".encode())
            status = LOST
        finally:
            self._answered.set()
        address, python = self._process.address, self._process.command[0]
        why = ssh.explain(status, b"".join(words).decode(errors="replace"), address, python)
        raise StartError(f"cannot start {self._process.name} on {address}: {why}")

    async def _has_started(self, words: deque[bytes]) -> bool:
        assert self._client.stderr is not None
        async for word in self._client.stderr:
            if word == STARTED:
                return True
            words.append(word)
        return False

    async def _copy_words(self) -> None:
        """What ssh and the supervisor say later belongs to the process's last lines."""
        assert self._client.stderr is not None
        async for word in self._client.stderr:
            with self._log.open("ab") as file:
                file.write(word)

    @property
    def pid(self) -> int:
        """Of the client."""
        return self._client.pid

    @property
    def returncode(self) -> int | None:
        """As a process here would have it; LOST when the connection broke. None while it runs."""
        return self._end

    async def wait(self) -> int:
        """The same, once it has ended; not before it is known whether it started."""
        await self._answered.wait()
        status = await self._client.wait()
        if self._copying is not None:
            await self._copying
        self._end = LOST if status < 0 else returncode_of(status)
        self._close()
        return self._end

    def terminate(self) -> None:
        """SIGTERM to it and its descendants."""
        self._tell(TERMINATE)

    def kill(self) -> None:
        """SIGKILL to them."""
        self._tell(KILL)

    def let_go(self) -> None:
        """End the client, whatever becomes of the other end."""
        with contextlib.suppress(ProcessLookupError):
            self._client.kill()
        self._close()

    def _tell(self, words: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, or takes nothing: then it is let go in the end
            os.write(self._orders, words)

    def _close(self) -> None:
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1


def let_go(children: list[RemoteProcess], told_s: float = 0.0) -> None:
    """End the clients of all, once they ended by themselves or `told_s` are over. Blocks for so long."""
    deadline = time.monotonic() + told_s
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            ending = os.pidfd_open(child.pid)
            select.select([ending], [], [], max(0.0, deadline - time.monotonic()))
            os.close(ending)
        child.let_go()
