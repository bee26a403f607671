"""The run's processes: which are started first, taken over from a controller that died, and started again; how they ended.

    plan ──► start ──► ended ──► WorkerLost ──► core ──► StartWorker ──► start_again
               └ continues: adopt what lives, start the rest

A trainer is one thing on all its hosts: it is started again as a whole, from its newest checkpoint.
"""

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from laminar import wire
from laminar.config import Config
from laminar.controller.channels import Channels
from laminar.controller.intake import indent
from laminar.controller.launch import Launcher, root_cause
from laminar.controller.plan import RENDEZVOUS_PORT, Process, going_on_from, one_more, plan
from laminar.controller.rundir import RunDirectory
from laminar.controller.runtime import Runtime
from laminar.core import events, outage
from laminar.errors import StartError
from laminar.hosts import Host, is_local
from laminar.ids import WorkerId
from laminar.remote import LOST, Answer


class Crew:
    """Starts processes and tells the core how they fare. `resume`: checkpoint of a trainer without a newer one; `found`: what
    the check of other hosts found; `joined`: workers that were ever heard; `say` tells people.
    """

    def __init__(
        self,
        *,
        config: Config,
        hosts: list[Host],
        run: RunDirectory,
        resume: Path | None,
        found: Mapping[str, Answer] | None,
        token: str,
        runtime: Runtime,
        channels: Channels,
        joined: set[str],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._hosts, self._run, self._resume, self._found = config, hosts, run, resume, found
        self._runtime, self._channels, self._joined, self._say = runtime, channels, joined, say
        orphan_timeout_s = config.controller.orphan_timeout_s
        environment = {wire.RENDEZVOUS_VARIABLE: str(run.url), wire.ORPHAN_VARIABLE: f"{orphan_timeout_s:g}"}
        survive_s = config.controller.heartbeat_timeout_s + orphan_timeout_s
        self.launcher = Launcher(run.logs, token, self._on_exit, environment, survive_s, channels.boot)
        self.processes: dict[str, Process] = {}
        self._guests: dict[str, None] = {}
        """Those that an operator started: the run does not depend on their joining."""

    # ---- start ---------------------------------------------------------------------------------------------

    async def start(self, url: str, *, continues: bool) -> None:
        """All processes, or those that do not live yet. Raises StartError."""
        processes = plan(self._config, self._hosts, url, self._resume, self._found, self._rendezvous_port())
        self._say(f"run {self._run.path}: {len(processes)} processes, controller at {url}")
        self.processes = {process.name: process for process in processes}
        self.launcher.url = url
        await self.launcher.start_all(await self._adopt() if continues else processes)

    async def _adopt(self) -> list[Process]:
        """Take over the processes that live; those that have to be started, because they do not."""
        alive = await self.launcher.adopt(list(self.processes.values()))
        state, to_start = self._runtime.core.state, []
        for name, process in self.processes.items():
            self._joined.update(outage.workers_of(state, name))
            what = "nothing" if name in alive else outage.what_to_do(state, name)
            others_live = process.role == "trainer" and any(self.processes[n].role == "trainer" for n in alive)
            if what == "start" and not others_live:
                to_start.append(self._anew(process))
            elif what != "nothing":  # a node of a trainer whose others run cannot be started alone
                for worker, incarnation in (outage.workers_of(state, name) or {WorkerId(name): 0}).items():
                    self._lost(worker, incarnation, "its process ended while no controller watched it")
        return to_start

    def _rendezvous_port(self) -> int:
        """A free one, if the first trainer host is this machine: several runs may share it."""
        first = next(host.address for host in self._hosts if host.role == "trainer")
        if not is_local(first):
            return RENDEZVOUS_PORT
        with socket.create_server((first, 0)) as probe:
            return int(probe.getsockname()[1])

    def join(self, address: str) -> Process:
        """Begin to start one more replica, on the host at `address` or on the first with room. Raises ConfigError."""
        known = [
            p if self._keeps_its_gpus(p) else msgspec.structs.replace(p, environment={})
            for p in self.processes.values()
        ]
        process = one_more(self._config, self._hosts, self.launcher.url, known, address, self._found)
        self.processes[process.name] = process
        self._guests[process.name] = None
        self._runtime.own(self._start_guest(process), f"start-{process.name}")
        return process

    def _keeps_its_gpus(self, process: Process) -> bool:
        """Whether it lives, or is to be started again."""
        restart = self._runtime.core.state.restarts.get(WorkerId(process.name))
        return process.name in self.launcher.alive or (restart is not None and bool(restart.due_at or restart.starting))

    async def _start_guest(self, process: Process) -> None:
        try:
            await self.launcher.start(process)
        except StartError as error:
            self._say(f"alarm: join-failed: {error}")

    # ---- again ---------------------------------------------------------------------------------------------

    async def start_again(self, worker: WorkerId) -> None:
        """One that was lost; its loss is told once more if that fails."""
        process = self.processes.get(worker)
        try:
            if process is None:
                raise StartError("it was not started by this controller")
            if process.role == "trainer":
                await self._start_trainer_again()
            else:
                await self.launcher.start(self._anew(process))
            self._say(f"{worker} is started again")
        except (StartError, OSError) as error:  # the latter: no port, no file descriptor
            self._lost(worker, 0, str(error))

    async def _start_trainer_again(self) -> None:
        """On all its hosts, after what may be left of it there."""
        trainers = [process for process in self.processes.values() if process.role == "trainer"]
        for process in trainers:
            self.launcher.give_up(process.name)
        checkpoint = self._run.last_checkpoint() or self._resume
        port = self._rendezvous_port()
        for process in trainers:
            await self.launcher.start(self._anew(going_on_from(process, checkpoint, port)))

    def _anew(self, process: Process) -> Process:
        """The same, told that it is not the first of its name."""
        lowest = outage.next_incarnation(self._runtime.core.state, process.name)
        environment = {**process.environment, wire.INCARNATION_VARIABLE: str(lowest)}
        return msgspec.structs.replace(process, environment=environment)

    # ---- how they fare -------------------------------------------------------------------------------------

    def check_started(self) -> None:
        """The time to start is over: the run fails if a process has not joined with all its workers."""
        expected = {name: p for name, p in self.processes.items() if name not in self._guests}
        missing = [name for name, p in expected.items() if _count(self._joined, name) < p.num_workers]
        if missing:
            lines = self.launcher.last_lines(missing[0])
            within = f"within {self._config.controller.start_timeout_s:g} s"
            reason = f"{missing[0]} did not join {within}; its last lines:\n{indent(lines)}"
            self._runtime.post(events.FailureReported(reason=reason))

    def _on_exit(self, name: str, code: int | None, last_lines: str) -> None:
        workers = [c for c in self._channels.all() if c.worker == name or c.worker.startswith(f"{name}/")]
        process = self.processes.get(name)
        if code == LOST and process is not None and self._is_heard(process):
            self._say(
                f"ssh to {process.address} finds {name} no more; it goes on as long as it is heard by its own channel"
            )
            return
        ending = _ending(code, process)
        rank, last_lines = root_cause(last_lines)
        ending += f" because rank {rank}" if rank else ""
        reason = f"{ending}; its last lines:\n{indent(last_lines)}" if last_lines else f"{ending} without a word"
        if name in self._guests and name not in self._joined:
            self._say(f"alarm: join-failed: {name} {reason}")
            return
        for channel in workers:
            self._lost(channel.worker, channel.incarnation, reason)
        if not workers:
            self._lost(WorkerId(name), 0, reason)

    def _is_heard(self, process: Process) -> bool:
        connected = {str(channel.worker) for channel in self._channels.all() if channel.socket is not None}
        return bool(process.ssh) and _count(connected, process.name) >= process.num_workers

    def _lost(self, worker: WorkerId, incarnation: int, reason: str) -> None:
        self._runtime.post(events.WorkerLost(worker=worker, incarnation=incarnation, reason=reason))

    # ---- end -----------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End all: those that hear us by message, the others by force."""
        connected = {str(channel.worker) for channel in self._channels.all()}
        asked = {name for name, p in self.processes.items() if _count(connected, name) >= p.num_workers}
        await self.launcher.stop(asked)


def _count(workers: set[str], process: str) -> int:
    return sum(worker == process or worker.startswith(f"{process}/") for worker in workers)


def _ending(code: int | None, process: Process | None) -> str:
    if code is None:
        return "ended"
    if code == LOST and process is not None and process.ssh:
        return f"lost: ssh to {process.address} finds it no more"
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
