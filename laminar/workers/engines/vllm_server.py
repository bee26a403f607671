"""The vLLM server of one replica: a process of its own, or one that the user runs.

An own server listens on a Unix socket in a directory that only this user may enter, so no port can be taken and nobody
else can ask it. It and its children form one process group, in the session of the server.

Invariants:
* After `stop`, and after `until_ended` has returned, no process of the group is alive, and nothing of it is in /dev/shm.
* A worker that dies without `stop` takes its server with it (PR_SET_PDEATHSIG).
* Whatever fails, the message ends with what the server itself wrote last.
"""

import asyncio
import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil
import structlog

from laminar.errors import StartError
from laminar.workers.engines import vllm_shm

START_SHARE = 0.9  # of the time that the controller waits: the reason is to come from here, with the last lines
HEALTH_S = 0.25
STARTS_MAX = 3  # vLLM picks ports for its own use; two servers that start together may pick the same one
TERMINATED_S = 15.0
KILLED_S = 10.0
KILLED_LOOK_S = 0.05
LAST_WORDS_S = 3.0  # vLLM's processes end one after another, and the first to end is not the one that says why
LAST_LINES = 12
CAUSES_MAX = 4
OUTPUT_BYTES_MAX = (
    32 << 20
)  # an engine that dies under 128 requests writes 10 MB of tracebacks after the one that matters
SICK_MAX = 3  # answers in a row by which an attached server counts as gone
SICK_S = 5.0
ADDRESS_TAKEN = "address already in use"
PREFIX = "laminar-vllm-"
SHARED_NAME = "shared"
KEEPALIVE_S = 2.0  # the server closes a connection that was idle for 5 s, perhaps while a request is written to it

log = structlog.get_logger("laminar.vllm")

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_NOISE = re.compile(r"leaked (?:function|type|instance)|nanobind: |\.\.\. skipped remainder|resource_tracker|refleaks")
"""What libraries say of themselves while a process ends, after its own last words."""
_CAUSE = re.compile(
    r"^(?:\([\w ]+pid=\d+\) )?(?:ERROR [\d: -]+\[[\w.:]+\] )?(?P<cause>[\w.]*(?:Error|Exception|error): .+)$"
)


class OwnServer:
    """`command` and `environment` start it; its output goes to `log_path`, after what is there. start_timeout_s: to answer."""

    own = True
    base_url = "http://localhost"

    def __init__(self, command: list[str], environment: dict[str, str], log_path: Path, start_timeout_s: float) -> None:
        self._command, self._environment, self.log_path = command, environment, log_path
        self._start_s = START_SHARE * start_timeout_s
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._log_from, self._socket = 0, ""
        self._shared: set[str] = set()
        """What its processes have in /dev/shm, as far as it was seen."""

    def connector(self) -> aiohttp.BaseConnector:
        return aiohttp.UnixConnector(path=self._socket, limit=0, keepalive_timeout=KEEPALIVE_S)

    async def start(self) -> None:
        """Start it and wait until it answers. Raises StartError, with its last lines."""
        _sweep()
        self._directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        for number in range(STARTS_MAX):
            self._socket = str(self._directory / f"server-{number}")  # vLLM leaves its socket behind, and refuses one
            await self._launch()
            if await self._is_up():
                self._note_shared()
                return
            if ADDRESS_TAKEN not in self._output().lower():
                break
            log.warning("vllm_address_taken", log=str(self.log_path))
        raise StartError(await self.describe("vLLM did not start"))

    async def until_ended(self) -> str:
        assert self._process is not None
        await self._process.wait()
        await self._kill_group()
        return await self.describe("vLLM ended by itself")

    async def describe(self, what: str) -> str:
        """`what`, how it ended, and its last lines; waits for the end of one that is just ending."""
        ending = ""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._process.wait()
            code = self._process.returncode
            if code is not None:
                ending = f" (ended by signal {-code})" if code < 0 else f" (ended with exit code {code})"
        return f"{what}{ending}; its last lines ({self.log_path}):\n{last_lines(self._output())}"

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to all its processes. Safe to call twice."""
        if self._process is not None:
            if self._process.returncode is None:
                _signal_group(self._process.pid, signal.SIGCONT)  # one that stands still does not hear
                _signal_group(self._process.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TERMINATED_S):
                        await self._process.wait()
            await self._kill_group()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # ---- parts ---------------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as output:
                self._log_from = output.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--uds",
                    self._socket,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
        except OSError as error:
            raise StartError(f"cannot start vLLM: {error.strerror}: {error.filename or self._command[0]}") from error

    async def _is_up(self) -> bool:
        """Wait until it answers (True) or has ended. Raises StartError when it takes too long."""
        assert self._process is not None
        deadline = time.monotonic() + self._start_s
        ended = asyncio.create_task(self._process.wait(), name="vllm-start")
        async with aiohttp.ClientSession(connector=self.connector()) as session:
            while not ended.done():
                if await _answers(session, f"{self.base_url}/health"):
                    ended.cancel()
                    return True
                if time.monotonic() > deadline:
                    raise StartError(await self.describe(f"vLLM did not answer within {self._start_s:g} s"))
                await asyncio.wait([ended], timeout=HEALTH_S)
        await self._kill_group()
        return False

    async def _kill_group(self) -> None:
        assert self._process is not None
        self._note_shared()
        deadline = time.monotonic() + KILLED_S
        while _signal_group(self._process.pid, signal.SIGKILL) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(KILLED_LOOK_S)
        await self._process.wait()
        vllm_shm.remove(self._shared)

    def _note_shared(self) -> None:
        """Here, and where it is found after this worker was killed."""
        assert self._process is not None
        assert self._directory is not None
        self._shared |= vllm_shm.mapped_by(_group(self._process.pid))
        with contextlib.suppress(OSError):  # a full disk; what is left is small
            (self._directory / SHARED_NAME).write_text("\n".join(self._shared))

    def _output(self) -> str:
        """What it wrote since it was last started."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(self._log_from)
                return file.read(OUTPUT_BYTES_MAX).decode(errors="replace")
        except OSError:
            return ""


class AttachedServer:
    """A server that somebody else has started and will end."""

    own = False

    def __init__(self, url: str) -> None:
        self.base_url = url.rstrip("/")

    def connector(self) -> aiohttp.BaseConnector:
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)

    async def start(self) -> None:
        """It runs already; whether it fits is for the check to say."""

    async def until_ended(self) -> str:
        async with aiohttp.ClientSession(connector=self.connector()) as session:
            sick = 0
            while sick < SICK_MAX:
                await asyncio.sleep(SICK_S)
                sick = 0 if await _answers(session, f"{self.base_url}/health") else sick + 1
        return await self.describe(f"/health did not answer well {SICK_MAX} times, {SICK_S:g} s apart")

    async def describe(self, what: str) -> str:
        return f"{what} (the server at {self.base_url}, which was not started here: look into its own log)"

    async def stop(self) -> None:
        """It is not ours to end."""


def last_lines(text: str) -> str:
    """The end of vLLM's output, and before it the first errors that its processes reported: the end is seldom the cause."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
    tail = lines[-LAST_LINES:]
    found = (match["cause"] for match in map(_CAUSE.match, lines[: -len(tail)]) if match)
    causes = list(itertools.islice(dict.fromkeys(found), CAUSES_MAX))
    return "\n".join(f"  {line}" for line in [*causes, *(["…"] if causes else []), *tail]) or "  (it wrote nothing)"


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with asyncio.timeout(SICK_S), session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _signal_group(group: int, number: signal.Signals) -> bool:
    """Whether there was anybody to hear it. The dead that nobody has buried yet do not count."""
    heard = False
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                process.send_signal(number)
                heard = True
    return heard


def _group(group: int) -> list[int]:
    """Pids of its processes."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                found.append(pid)
    return found


def _end_with_parent() -> None:
    """In the new process: SIGTERM comes when the worker has died."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _sweep() -> None:
    """Remove the socket directories of workers that were killed, and what their servers left in /dev/shm."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):  # there is none, or it is somebody else's
                vllm_shm.remove(set((path / SHARED_NAME).read_text().split()))
            shutil.rmtree(path, ignore_errors=True)
