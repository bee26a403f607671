"""Starting, watching and stopping the run's processes on this machine.

Every process has its own session and a log file `logs/<name>.log`. `on_exit(name, code, last lines)` is called once for
each that ends before it was told to. `stop` leaves no process behind: asked by message, then SIGTERM, then SIGKILL,
descendants included. They are known by the run's token in their environment, also when their parent is dead and they are
in sessions of their own (torchrun's ranks); and by the session of such a process, since some wipe their environment (vLLM's).
What a controller that died has started is known in the same way, and can be adopted.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import structlog

from laminar.controller.plan import Process
from laminar.errors import StartError

logger = structlog.get_logger(__name__)

TOKEN, NAME, LOG = "LAMINAR_TOKEN", "LAMINAR_PROCESS", "LAMINAR_LOG"  # environment of every process of a run
ASKED_S = 20.0  # a trainer rank needs a few seconds to leave its process group cleanly
TERMINATED_S = 5.0
LAST_LINES = 15
FOLDED = "torchrun: rank "
TORCHRUN_TRACEBACK = 'Traceback (most recent call last):\n  File "<frozen runpy>"'
TORCHRUN_REPORT = re.compile(
    r"^=+\n.* FAILED\n.*^Root Cause.*?^  rank +: (?P<rank>\d+).*?^  exitcode +: (?P<code>-?\d+) +\(pid: (?P<pid>\d+)\)",
    re.DOTALL | re.MULTILINE,
)
KILL_ROUNDS = 2  # the second meets what the first saw being born


class Adopted:
    """A process that another controller started. Its end is noticed; how it ended is told to its parent only."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if it has ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    async def wait(self) -> None:
        """Until it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._descriptor, ended.set)
        try:
            await ended.wait()
            self.returncode = 0
        finally:
            loop.remove_reader(self._descriptor)
            os.close(self._descriptor)


class Launcher:
    """Owns the child processes. `environment`: of all of them."""

    def __init__(
        self,
        logs: Path,
        token: str,
        on_exit: Callable[[str, int | None, str], None],
        environment: dict[str, str] | None = None,
    ) -> None:
        self._logs = logs
        self._token = token
        self._on_exit = on_exit
        self._environment = environment or {}
        self._children: dict[str, asyncio.subprocess.Process | Adopted] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        self._given_up: set[asyncio.subprocess.Process | Adopted] = set()

    @property
    def alive(self) -> list[str]:
        """Names of processes that have not ended."""
        return [name for name, child in self._children.items() if child.returncode is None]

    async def start(self, process: Process) -> None:
        """Start one process. Raises StartError if that is impossible."""
        log = self.log_path(process.name)
        environment = {
            **os.environ,
            **self._environment,
            **process.environment,
            TOKEN: self._token,
            NAME: process.name,
            LOG: str(log.absolute()),
        }
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                child = await asyncio.create_subprocess_exec(
                    *process.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise StartError(
                f"cannot start {process.name}: {error.strerror}: {error.filename or process.command[0]} (its log: {log})"
            ) from error
        self._own(process.name, child)

    def adopt(self) -> list[str]:
        """Take over what lives of this run; the names of these processes."""
        found = {p.pid: p for p in psutil.process_iter() if self._is_descendant(p, None)}
        for process in _living(list(found.values())):
            with contextlib.suppress(psutil.Error, OSError):
                if process.ppid() not in found:
                    self._own(process.environ()[NAME], Adopted(process.pid))
        return self.alive

    def _own(self, name: str, child: "asyncio.subprocess.Process | Adopted") -> None:
        self._children[name] = child
        self._watchers[name] = asyncio.create_task(self._watch(name, child), name=f"watch-{name}")

    async def _watch(self, name: str, child: "asyncio.subprocess.Process | Adopted") -> None:
        code = await child.wait()
        if not self._stopping and child not in self._given_up:
            self._on_exit(name, code, self.last_lines(name))

    def log_path(self, name: str) -> Path:
        """Where the process writes."""
        return self._logs / f"{name}.log"

    def last_lines(self, name: str) -> str:
        """The end of the process's log, for messages."""
        try:
            with self.log_path(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(_fold_report(text).rstrip().splitlines()[-LAST_LINES:])

    def give_up(self, name: str) -> None:
        """Kill the process of a worker (``trainer-0/1`` is one of ``trainer-0``'s) and what it started; its end is no news."""
        name, _, _ = name.partition("/")
        if name in self._children:
            self._given_up.add(self._children[name])
            _kill(self._processes(name))

    async def stop(self, asked: set[str]) -> None:
        """Wait for the processes that were asked to stop, then insist; the others (still importing) get SIGTERM at once."""
        self._stopping = True
        for name in self.alive:
            for process in [] if name in asked else self._processes(name):
                _signal(process, signal.SIGTERM)
        await self._wait(ASKED_S)
        left = self._processes()
        for process in left:
            _signal(process, signal.SIGTERM)
        await self._wait(TERMINATED_S)
        await asyncio.to_thread(psutil.wait_procs, self._strangers(left), TERMINATED_S)
        self.kill()
        await self._wait(TERMINATED_S)

    def kill(self) -> None:
        """End everything at once."""
        self._stopping = True
        for _ in range(KILL_ROUNDS):
            _kill(self._processes())

    async def _wait(self, timeout_s: float) -> None:
        running = [task for task in self._watchers.values() if not task.done()]
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    def _strangers(self, processes: list[psutil.Process]) -> list[psutil.Process]:
        """Those that are not our own children: the event loop alone may wait for these."""
        own = {child.pid for child in self._children.values() if not isinstance(child, Adopted)}
        return [process for process in processes if process.pid not in own]

    def _processes(self, name: str | None = None) -> list[psutil.Process]:
        """Everything that runs now of one process or of all: what we started and whatever that started."""
        roots = [child.pid for key, child in self._children.items() if name in (None, key) and child.returncode is None]
        running = list(psutil.process_iter())
        known = [p for p in running if p.pid in roots or self._is_descendant(p, name)]
        sessions = {_session(p) for p in known} - {0, os.getsid(0)}
        return _living([p for p in running if p in known or _session(p) in sessions])

    def _is_descendant(self, process: psutil.Process, name: str | None) -> bool:
        try:
            environment = process.environ()
        except (psutil.Error, OSError):  # ended, or somebody else's
            return False
        return environment.get(TOKEN) == self._token and name in (None, environment.get(NAME))


def root_cause(last_lines: str) -> tuple[str, str]:
    """(which rank failed first and how, by torchrun's report; the other lines) of what `Launcher.last_lines` gave."""
    rest, _, cause = last_lines.rpartition(FOLDED)
    return (cause, rest.rstrip()) if cause != last_lines else ("", last_lines)


def _fold_report(text: str) -> str:
    """torchrun's report, a screen that names no cause, as one line."""
    found = TORCHRUN_REPORT.search(text)
    if found is None:
        return text
    code = int(found["code"])
    ending = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    before = text[: found.start()]
    own = before.rfind(TORCHRUN_TRACEBACK)
    rest = before[:own] if own >= 0 and "ChildFailedError" in before[own:] else before
    lines = [line for line in rest.splitlines() if "torch/distributed/elastic" not in line]
    return "\n".join([*lines, f"{FOLDED}{found['rank']} {ending} (pid {found['pid']})"])


def _session(process: psutil.Process) -> int:
    """Of this process; 0 if it has ended."""
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    living = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.NoSuchProcess:
            continue
    return living


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGKILL)
