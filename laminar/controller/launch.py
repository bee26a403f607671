"""Starting, watching and stopping the run's processes on this machine.

Every process has its own session and a log file `logs/<name>.log`. `on_exit(name, code, last lines)` is called once for
each that ends before it was told to. `stop` leaves no process behind: asked by message, then SIGTERM, then SIGKILL,
descendants included.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import structlog

from laminar.controller.plan import Process
from laminar.errors import StartError

logger = structlog.get_logger(__name__)

ASKED_S = 20.0  # a trainer rank needs a few seconds to leave its process group cleanly
TERMINATED_S = 5.0
LAST_LINES = 15


class Launcher:
    """Owns the child processes."""

    def __init__(self, logs: Path, token: str, on_exit: Callable[[str, int, str], None]) -> None:
        self._logs = logs
        self._token = token
        self._on_exit = on_exit
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._descendants: dict[str, list[psutil.Process]] = {}
        self._stopping = False
        self._given_up: set[str] = set()

    @property
    def alive(self) -> list[str]:
        """Names of processes that have not ended."""
        return [name for name, child in self._children.items() if child.returncode is None]

    async def start(self, process: Process) -> None:
        """Start one process. Raises StartError if that is impossible."""
        log = self.log_path(process.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **process.environment, "LAMINAR_TOKEN": self._token}
        try:
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
            raise StartError(f"cannot start {process.name}: {error.strerror}: {process.command[0]}") from error
        self._children[process.name] = child
        self._watchers[process.name] = asyncio.create_task(
            self._watch(process.name, child), name=f"watch-{process.name}"
        )

    async def _watch(self, name: str, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        if not self._stopping and name not in self._given_up:
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
        return "\n".join(text.rstrip().splitlines()[-LAST_LINES:])

    def give_up(self, name: str) -> None:
        """Kill one process and what it started; its end is no news."""
        child = self._children.get(name)
        if child is not None and child.returncode is None:
            self._given_up.add(name)
            _kill(self._tree(name))

    async def stop(self) -> None:
        """Wait for processes that were asked to stop, then insist."""
        self._stopping = True
        trees = [process for name in self.alive for process in self._tree(name)]
        await self._wait(ASKED_S)
        for process in _living(trees):
            _signal(process, signal.SIGTERM)
        await self._wait(TERMINATED_S if _living(trees) else 0.0)
        self.kill(trees)
        await self._wait(TERMINATED_S)

    def kill(self, known: list[psutil.Process] = ()) -> None:  # type: ignore[assignment]
        """End everything at once."""
        self._stopping = True
        _kill([*known, *(process for name in self.alive for process in self._tree(name))])

    async def _wait(self, timeout_s: float) -> None:
        running = [task for task in self._watchers.values() if not task.done()]
        if running and timeout_s:
            await asyncio.wait(running, timeout=timeout_s)

    def _tree(self, name: str) -> list[psutil.Process]:
        """The process and its descendants now: torchrun puts its ranks into sessions of their own."""
        try:
            root = psutil.Process(self._children[name].pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGKILL)
