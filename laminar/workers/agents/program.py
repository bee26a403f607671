"""One run of an agent program: started, fed its prompt, waited for, and gone with everything it started.

Invariant: when `run` ends, in whatever way, no process of the agent is left.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from laminar.config import TaskConfig
from laminar.errors import StartError

LAUNCHER = Path(__file__).with_name("launcher.py")
KILL_S = 10.0  # for the launcher to clear up, before it is killed itself
STDOUT_BYTES_MAX = 1 << 20  # of an answer; the rest is thrown away
STDERR_BYTES_KEPT = 4096
PROMPT_PLACE = "{prompt}"
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
PASSED_ON += ("PYTHONPATH", "SSL_CERT_FILE")
"""What an agent sees of the worker's environment, beside `task.agent_env`: no secret that nobody gave it."""


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    status: int
    """Exit status; 128 + n for signal n."""
    stdout: str
    stderr: str
    """Its end."""
    timed_out: bool


class Program:
    """The command of `task`. Raises StartError if it is not there."""

    def __init__(self, task: TaskConfig) -> None:
        self._command = task.agent_command
        self._environment = _environment(task.agent_env)
        self._timeout_s = task.agent_timeout_s
        self._memory_bytes = task.agent_memory_mb << 20
        if shutil.which(self._command[0], path=self._environment["PATH"]) is None:
            raise StartError(f"task.agent: no program {self._command[0]!r} in PATH of this host")

    async def run(self, *, environment: dict[str, str], stdin: bytes, prompt: str, until: asyncio.Event) -> Exit:
        """Run it once; it is stopped when `until` is set, or this is cancelled. Raises OSError when no process can be started."""
        directory = Path(tempfile.gettempdir()) / f"laminar-agent-{secrets.token_hex(8)}"
        command = [part.replace(PROMPT_PLACE, prompt) for part in self._command]
        launcher = (sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), str(self._memory_bytes))
        process = await _start([*launcher, str(directory), *command], self._environment | environment)
        try:
            return await self._attend(process, stdin, until)
        finally:
            await _end(process)

    async def _attend(self, process: asyncio.subprocess.Process, stdin: bytes, until: asyncio.Event) -> Exit:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        feeding = asyncio.create_task(_feed(process.stdin, stdin))
        reading = asyncio.gather(_head(process.stdout), _tail(process.stderr))
        waiting = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(until.wait())
        try:
            done, _ = await asyncio.wait(
                [waiting, stopping], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            await _end(process)
            async with asyncio.timeout(KILL_S):
                stdout, stderr = await reading
        finally:
            for task in (feeding, waiting, stopping, reading):
                task.cancel()
            await asyncio.gather(feeding, waiting, stopping, reading, return_exceptions=True)
        assert process.returncode is not None
        return Exit(
            status=process.returncode if process.returncode >= 0 else 128 - process.returncode,
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            timed_out=not done,
        )


def _environment(names: list[str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in (*PASSED_ON, *names) if name in os.environ}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    return kept


async def _start(command: list[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
    """Not cut short by a cancellation, which would kill the launcher before it can clear up."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _end(await starting)
        raise


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    """An agent need not read its prompt."""
    try:
        pipe.write(data)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()
    except (BrokenPipeError, ConnectionResetError, RuntimeError):  # the last is uvloop's, of one that has ended already
        return


async def _head(pipe: asyncio.StreamReader) -> bytes:
    kept = bytearray()
    while chunk := await pipe.read(1 << 16):
        kept += chunk[: STDOUT_BYTES_MAX - len(kept)]
    return bytes(kept)


async def _tail(pipe: asyncio.StreamReader) -> bytes:
    kept = b""
    while chunk := await pipe.read(1 << 16):
        kept = (kept + chunk)[-STDERR_BYTES_KEPT:]
    return kept


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask the launcher to clear up; kill it if it does not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)  # send_signal would reap it behind the back of whoever waits
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                await process.wait()
