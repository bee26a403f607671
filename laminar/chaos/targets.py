"""The processes of a run on this machine, found by what the launcher puts in their environment."""

import os
from collections.abc import Callable
from pathlib import Path

import psutil

from laminar import processes
from laminar.chaos.harm import Impossible
from laminar.controller.rundir import RunDirectory, last_port
from laminar.processes import NAME, TOKEN
from laminar.wire import HOST_VARIABLE

RANK_MODULE, AGENT_MODULE = "laminar.workers.trainer", "torch.distributed.run"
REWARD_MODULE = "laminar.tasks.reward_worker"


class Targets:
    """`controller()` gives the pid of the one that runs now."""

    def __init__(self, run: RunDirectory, controller: Callable[[], int]) -> None:
        self._run, self._controller = run, controller

    def controller(self) -> psutil.Process:
        """Raises Impossible if none runs."""
        try:
            return psutil.Process(self._controller())
        except psutil.NoSuchProcess as error:
            raise Impossible("no controller runs") from error

    def port(self) -> int:
        """Where the controller listens. Raises Impossible if that is not known."""
        port = last_port(self._run)
        if not port:
            raise Impossible(f"{self._run.url} does not say where the controller listens")
        return port

    def worker(self, name: str) -> psutil.Process:
        """The process that dials in under a name. Raises Impossible if it is not there."""
        process, _, rank = name.partition("/")
        found = self._marked({NAME: process})
        if rank:
            found = [each for each in found if _variable(each, "RANK") == rank and RANK_MODULE in _command(each)]
            found = [each for each in found if AGENT_MODULE not in _command(each)]
        pids = {each.pid for each in found}
        roots = [each for each in found if _parent(each) not in pids]
        if not roots:
            raise Impossible(f"{name} is not there")
        return roots[0]

    def rewards(self, name: str) -> list[psutil.Process]:
        """The processes of a rollout worker that run user code, without their supervisors."""
        found = [each for each in self.worker(name).children(recursive=True) if REWARD_MODULE in _command(each)]
        pids = {each.pid for each in found}
        inner = [each for each in found if _parent(each) in pids]
        if not inner:
            raise Impossible(f"{name} has no reward process now")
        return inner

    def on_host(self, address: str) -> list[psutil.Process]:
        """What runs of a host that is a network namespace of this machine. Raises Impossible if nothing is seen of it."""
        own = os.readlink("/proc/self/ns/net")
        found = [each for each in self._marked({HOST_VARIABLE: address}) if _network(each) not in ("", own)]
        if not found:
            raise Impossible(f"{address} is no network namespace of this machine, or nothing runs there")
        return found

    def names(self, found: list[psutil.Process]) -> list[str]:
        """Of the workers among them."""
        names = []
        for each in found:
            name, rank = _variable(each, NAME), _variable(each, "RANK")
            names.append(f"{name}/{rank}" if rank else name)
        return [name for name in dict.fromkeys(names) if name and not (name.startswith("trainer-") and "/" not in name)]

    def _marked(self, marks: dict[str, str]) -> list[psutil.Process]:
        try:
            token = self._run.token.read_text()
        except OSError as error:
            raise Impossible("the run has no token: it is over, or has not begun") from error
        return processes.marked({TOKEN: token, **marks})


def _variable(process: psutil.Process, name: str) -> str:
    try:
        return process.environ().get(name, "")
    except (psutil.Error, OSError):
        return ""


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.Error, OSError):
        return []


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _network(process: psutil.Process) -> str:
    try:
        return os.readlink(Path(f"/proc/{process.pid}/ns/net"))
    except OSError:
        return ""
