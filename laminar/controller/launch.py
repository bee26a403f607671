"""Starting, watching and stopping the run's processes, here and on other hosts.

Every process has its own session and a log file `logs/<name>.log` here. `on_exit(name, code, last lines)` is called once for
each that ends before it was told to. `stop` leaves no process behind: asked by message, then SIGTERM, then SIGKILL,
descendants included (`laminar.processes`; on other hosts their supervisors do it). A host that does not answer cannot hold it up.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from laminar import processes
from laminar.controller.plan import SUPERVISOR, Process
from laminar.controller.remote import RemoteProcess, let_go
from laminar.errors import StartError
from laminar.processes import LOG, NAME, SUPERVISED, TOKEN
from laminar.remote import Attach

ASKED_S = 20.0  # a trainer rank needs a few seconds to leave its process group cleanly
TERMINATED_S = 5.0
TOLD_S = 3.0  # for the order to kill to reach other hosts when this process is about to end
LAST_LINES = 15
FOLDED = "torchrun: rank "
TORCHRUN_TRACEBACK = 'Traceback (most recent call last):\n  File "<frozen runpy>"'
TORCHRUN_REPORT = re.compile(
    r"^=+\n.* FAILED\n.*^Root Cause.*?^  rank +: (?P<rank>\d+).*?^  exitcode +: (?P<code>-?\d+) +\(pid: (?P<pid>\d+)\)",
    re.DOTALL | re.MULTILINE,
)


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


Child = asyncio.subprocess.Process | Adopted | RemoteProcess


class Launcher:
    """Owns the child processes. `environment`: of all of them. `survive_s`: how long one on another host may go on without a word
    of a controller; `boot`: this one's number.
    """

    def __init__(
        self,
        logs: Path,
        token: str,
        on_exit: Callable[[str, int | None, str], None],
        environment: dict[str, str] | None = None,
        survive_s: float = 60.0,
        boot: int = 1,
    ) -> None:
        self.url = ""
        """Where the controller is, for processes on other hosts."""
        self._logs = logs
        self._token = token
        self._on_exit = on_exit
        self._environment = environment or {}
        self._survive_s = survive_s
        self._boot = boot
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        self._given_up: set[Child] = set()

    @property
    def alive(self) -> list[str]:
        """Names of processes that have not ended."""
        return [name for name, child in self._children.items() if child.returncode is None]

    async def start_all(self, wanted: list[Process]) -> None:
        """Start processes, on all hosts at once. Raises the first StartError when all others are started or failed."""
        addresses = dict.fromkeys(process.address for process in wanted)
        each = [self._start_in_turn([p for p in wanted if p.address == address]) for address in addresses]
        for error in await asyncio.gather(*each, return_exceptions=True):
            if error is not None:
                raise error

    async def _start_in_turn(self, wanted: list[Process]) -> None:
        """Those of one host: sshd drops connections when many begin at once (MaxStartups)."""
        for process in wanted:
            await self.start(process)

    async def start(self, process: Process) -> None:
        """Start one process. Raises StartError if that is impossible."""
        log = self.log_path(process.name)
        marks = {**self._environment, TOKEN: self._token, NAME: process.name, LOG: str(log.absolute())}
        spawn = self._spawn_there if process.ssh else self._spawn_here
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            child = await spawn(process, marks, log)
        except OSError as error:
            raise StartError(
                f"cannot start {process.name}: {error.strerror}: {error.filename or process.command[0]} (its log: {log})"
            ) from error
        self._own(process.name, child)
        if isinstance(child, RemoteProcess):
            await self._await_start(child)

    async def _spawn_here(self, process: Process, marks: dict[str, str], log: Path) -> Child:
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *process.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **process.environment, **marks},
                start_new_session=True,
            )

    async def _spawn_there(self, process: Process, marks: dict[str, str], log: Path) -> Child:
        for earlier in self._there(process.name):
            await asyncio.wait([self._watchers[process.name]], timeout=TERMINATED_S)
            earlier.let_go()
            await asyncio.wait([self._watchers[process.name]], timeout=TERMINATED_S)
        return await RemoteProcess.spawn(process, marks, log, self._attach_to(process.name), self._survive_s)

    def _attach_to(self, name: str) -> Attach:
        return Attach(token=self._token, name=name, url=self.url, boot=self._boot)

    async def _await_start(self, child: RemoteProcess) -> None:
        try:
            await child.await_start()
        except BaseException:
            self._given_up.add(child)
            child.kill()
            child.let_go()
            raise

    async def adopt(self, planned: list[Process]) -> list[str]:
        """Take over what lives of these processes; those whose host does not answer count as alive. Their names."""
        supervised = self._adopt_here()
        there = [
            process if process.ssh else _beside(process)
            for process in planned
            if process.ssh or process.name in supervised
        ]
        await asyncio.gather(*(self._adopt_there(process) for process in there))
        return self.alive

    def _adopt_here(self) -> set[str]:
        """The names of those on this machine that have a supervisor: another host started them by ssh."""
        found, supervised = {process.pid: process for process in processes.marked({TOKEN: self._token})}, set()
        for process in found.values():
            with contextlib.suppress(psutil.Error, OSError, KeyError):
                environment = process.environ()
                if SUPERVISED in environment:
                    supervised.add(environment[NAME])
                elif process.ppid() not in found:
                    self._own(environment[NAME], Adopted(process.pid))
        return supervised

    async def _adopt_there(self, process: Process) -> None:
        log = self.log_path(process.name)
        child = RemoteProcess(process, log, self._attach_to(process.name), self._survive_s)
        if not await child.find():
            return
        if self._stopping or process.name in self._children:  # it was started anew meanwhile
            child.let_go()
        else:
            self._own(process.name, child)

    def _own(self, name: str, child: Child) -> None:
        self._children[name] = child
        self._watchers[name] = asyncio.create_task(self._watch(name, child), name=f"watch-{name}")

    async def _watch(self, name: str, child: Child) -> None:
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
            self._kill(name)

    async def stop(self, asked: set[str]) -> None:
        """Wait for the processes that were asked to stop, then insist; the others (still importing) get SIGTERM at once."""
        self._stopping = True
        for name in self.alive:
            if name not in asked:
                self._terminate(name)
        await self._wait(ASKED_S)
        left = self._processes()
        self._terminate()
        await self._wait(TERMINATED_S)
        await asyncio.to_thread(psutil.wait_procs, self._strangers(left), TERMINATED_S)
        self._kill()
        await self._wait(TERMINATED_S)
        let_go(self._there())
        await self._wait(TERMINATED_S)

    def leave(self) -> None:
        """All of it is somebody else's now."""
        self._stopping = True
        let_go(self._there())

    def kill(self) -> None:
        """End everything at once."""
        self._stopping = True
        self._kill()
        let_go(self._there(), TOLD_S)

    def _terminate(self, name: str | None = None) -> None:
        for child in self._there(name):
            child.terminate()
        processes.send(self._processes(name), signal.SIGTERM)

    def _kill(self, name: str | None = None) -> None:
        for child in self._there(name):
            child.kill()
        processes.kill(lambda: self._processes(name))

    async def _wait(self, timeout_s: float) -> None:
        running = [task for task in self._watchers.values() if not task.done()]
        if running:
            await asyncio.wait(running, timeout=timeout_s)

    def _strangers(self, found: list[psutil.Process]) -> list[psutil.Process]:
        """Those that are not our own children: the event loop alone may wait for these."""
        own = {child.pid for child in self._children.values() if not isinstance(child, Adopted)}
        return [process for process in found if process.pid not in own]

    def _processes(self, name: str | None = None) -> list[psutil.Process]:
        """What runs here of one process or of all: what we started and whatever that started."""
        here = {key: child for key, child in self._children.items() if not isinstance(child, RemoteProcess)}
        roots = [child.pid for key, child in here.items() if name in (None, key) and child.returncode is None]
        return processes.marked({TOKEN: self._token} | ({NAME: name} if name else {}), roots)

    def _there(self, name: str | None = None) -> list[RemoteProcess]:
        """What runs on other hosts, of one process or of all."""
        children = [child for key, child in self._children.items() if name in (None, key)]
        return [child for child in children if isinstance(child, RemoteProcess) and child.returncode is None]


def _beside(process: Process) -> Process:
    """One whose supervisor is on this machine."""
    return msgspec.structs.replace(process, ssh=[sys.executable, "-m", SUPERVISOR])


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
