"""One run from start to end: puts the parts together, waits for the core to say that it is over, cleans up.

    Application.run:  open ──► launch ──► wait for FinishRun or a signal ──► stop workers ──► close ──► summary

Whatever ends the run, no child process and no shared memory is left.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from laminar import checkpoints, wire
from laminar.config import Config
from laminar.controller import answers, metricsfile, otel, recovery
from laminar.controller.archive import Archive
from laminar.controller.channels import Channels
from laminar.controller.console import functions
from laminar.controller.coresettings import settings_of
from laminar.controller.crew import Crew
from laminar.controller.display import display_of
from laminar.controller.effects import Effects
from laminar.controller.eventlog import EventLog, Superseded
from laminar.controller.intake import Intake
from laminar.controller.operator import Operator
from laminar.controller.plan import addresses_of
from laminar.controller.prometheus import Prometheus
from laminar.controller.reach import Reach
from laminar.controller.rundir import RunDirectory, last_port, last_token, write_token, write_url
from laminar.controller.runtime import Runtime
from laminar.controller.segments import Past
from laminar.controller.server import Server
from laminar.controller.status import status_of
from laminar.controller.summary import summarize
from laminar.controller.telemetry import Telemetry
from laminar.controller.tokens import TokenStore
from laminar.controller.upkeep import MIB
from laminar.controller.watches import Watches
from laminar.controller.web.dashboard import Dashboard
from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.core.sampling import Sampler
from laminar.errors import StartError
from laminar.hosts import Host, is_local
from laminar.remote import Answer
from laminar.tasks.datasets import PromptSet
from laminar.workers.relay import paths

REFRESH_S = 0.25  # of the live panel
LAST_ACTIONS_S = 5.0  # for the disk to take the last events; what it does not take is found by the next --resume
SNAPSHOT_EVENTS = 16_384  # in a long step: a take-over replays no more than about so many, some 60 µs each
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


class Application:
    """A run of this process. `resume`: checkpoint from which a trainer without a newer one goes on. `continues`: the run's last
    controller died, and this one takes its place.
    """

    def __init__(
        self,
        *,
        config: Config,
        hosts: list[Host],
        run: RunDirectory,
        prompts: PromptSet,
        sampler: Sampler | None,
        resume: Path | None,
        continues: bool = False,
        reach: Reach | None = None,
        found: Mapping[str, Answer] | None = None,
    ) -> None:
        """`reach`: of the controller, by default as configured; `found`: what the check of other hosts found."""
        self._config, self._hosts, self._run, self._prompts = config, hosts, run, prompts
        self._reach, self._found = reach or Reach(config.controller.host, config.controller.host), found
        self._sampler, self._resume, self._continues = sampler, resume, continues
        self._history: recovery.History | None = None
        self._damaged: dict[Path, str] = {}
        self._data_state = b""
        self._began, self._interrupts = time.monotonic(), 0
        self._kept = 0  # the last event of which there is a snapshot

    async def run(self) -> int:
        """The exit code. Raises StartError for what is wrong before the first worker runs."""
        for left in paths.sweep():
            print(f"removed {left}, left behind by a run that was killed", flush=True)
        try:
            core = self._open()
            self._set_damaged_aside()
        except OSError as error:
            raise StartError(f"cannot write the run's directory {self._run.path}: {error}") from error
        self._outcome = actions.FinishRun(cause=0, reason="the controller failed", ok=False)
        try:
            await self._start()
            self._outcome = await self._wait()
        finally:
            await self._close()
        outcome = self._outcome
        self._display.say(summarize(self._run.path, core.state, time.monotonic() - self._began))
        if outcome.ok and self._log.failure is not None:
            outcome = self._unwritable()
        if not outcome.ok:
            self._display.say(f"\nthe run failed: {outcome.reason}\nlogs: {self._run.logs}")
        return EXIT_OK if outcome.ok else EXIT_FAILED

    # ---- start ---------------------------------------------------------------------------------------------

    def _core(self) -> Core:
        settings = settings_of(self._config, self._prompts)
        if self._history is not None:
            return Core.restore(settings, self._history.snapshot.core)
        if self._resume is None:
            return Core(settings)
        found = checkpoints.newest_data_state(self._resume)
        self._resume, self._damaged, self._data_state = found.path, found.damaged, found.data_state
        try:
            return Core.resumed(settings, found.data_state)
        except msgspec.MsgspecError as error:
            raise StartError(f"cannot resume from {self._resume}: {checkpoints.DATA_STATE}: {error}") from error

    def _set_damaged_aside(self) -> None:
        for path, what in self._damaged.items():
            checkpoints.set_aside(path)
            self._display.say(f"alarm: checkpoint-damaged: {path.name}: {what}; the run goes on from {self._resume}")

    def _open_log(self) -> EventLog:
        config = self._config.log
        log = EventLog(
            self._run.database,
            config.commit_s,
            before_commit=lambda: self._tokens.sync(),
            after_commit=lambda: self._tokens.committed(),
            bytes_max=config.max_mib * MIB,
        )
        log.run_lock.take(os.getpid(), socket.gethostname())
        return log

    def _open(self) -> Core:
        config, run, continues = self._config, self._run, self._continues
        self._log = self._open_log()
        if continues:
            self._history = recovery.read(run.database)
        core = self._core()
        resumed = core.state.trainer.step
        self._boot = self._log.begin_boot(
            time.time(), os.getpid(), socket.gethostname(), resumed, run_id=run.id_of, continues=continues
        )
        past = Past(run.tokens)
        self._tokens = TokenStore(run.tokens, self._boot)
        self._runtime = Runtime(core, self._log, run.logs, self._history.died_at if self._history else 0.0)
        token = last_token(run) if continues else write_token(run)
        self._channels = Channels(self._boot, self._log.continues if continues else 0)
        self._server = Server(
            self._channels,
            token=token,
            run_id=self._log.run_id,
            config=wire.encode(config),
            heartbeat_s=config.controller.heartbeat_s,
            timeout_s=config.controller.heartbeat_timeout_s,
        )
        metricsfile.agree(run.metrics, run.database, resumed)
        self._telemetry = Telemetry(self._runtime, self._log, run.metrics)
        self._display = display_of(self._config, core.state, self._telemetry)
        which = {"run": run.name, "run_id": self._log.run_id, "boot": self._boot}
        self._telemetry.tracer = otel.start(os.environ, config.log.trace_share, self._display.say, **which)
        parts = self._runtime, self._telemetry, self._prompts, self._tokens.rows
        self._dashboard = Dashboard.of_run(run, config.model.path, *parts)
        self._watches = Watches(run, self._runtime, self._channels, self._log, self._alarm, self._display.say)
        on_stalled, wanted = self._watches.writer("archive"), config.log.archive == "parquet"
        self._archive = Archive(run.archive, run.database, self._tokens, on_stalled, wanted=wanted)
        self._effects = Effects(
            runtime=self._runtime,
            channels=self._channels,
            log=self._log,
            tokens=self._tokens,
            prompts=self._prompts,
            checkpoints_at=run.checkpoints,
            keep_last=config.trainer.keep_last,
            keep_every=config.trainer.keep_every,
            sampler=self._sampler,
            stop_process=lambda worker: self._crew.launcher.give_up(worker),
            start_process=lambda worker: self._runtime.own(self._crew.start_again(worker), f"start-{worker}"),
            alarm=self._tell,
            stalled=self._watches.on_stalled,
            committed=self._archive.add,
        )
        self._intake = Intake(self._runtime, self._log, self._tokens, self._telemetry, self._effects.perform)
        self._crew = Crew(
            config=config,
            hosts=self._hosts,
            run=run,
            resume=self._resume,
            found=self._found,
            token=token,
            runtime=self._runtime,
            channels=self._channels,
            joined=self._intake.joined,
            say=self._display.say,
        )
        self._connect()
        self._go_on_from(past, core)
        return core

    def _go_on_from(self, past: Past, core: Core) -> None:
        """Bring the core to where the log ends, if it is taken over, and say what of an earlier process was kept or cut."""
        if self._history is not None:
            past.check(self._history.segments)
            recovery.replay(self._history, core, self._channels, self._effects, past)
            self._log.durable = core.state.seq
        told = [self._log.set_aside, self._archive.adopt(past, core.state), *recovery.what_was_cut(self._history, past)]
        if lines := [line for line in told if line]:
            self._display.say("\n".join(lines))

    def _connect(self) -> None:
        self._runtime.perform = self._perform
        self._runtime.observe = self._observe
        self._runtime.settled = self._keep
        self._channels.hurry = self._log.hurry
        self._log.on_stalled = self._watches.writer("log")
        self._log.on_alarm = lambda alarm: self._alarm(alarm.name, alarm.text)
        self._server.on_message = self._intake.on_message
        lost, back = events.WorkerDisconnected, events.WorkerReturned
        self._server.on_broken = lambda c: self._runtime.post(lost(worker=c.worker, incarnation=c.incarnation))
        self._server.on_returned = lambda c: self._runtime.post(back(worker=c.worker, incarnation=c.incarnation))
        self._server.token_rows = self._tokens.rows
        commands = functions(self._runtime, self._effects.samplers, self._crew, self._alarm)
        stalled = self._watches.why_stalled.report
        operator = Operator(self._runtime, self._channels, status=self._status, why_stalled=stalled, commands=commands)
        prometheus = Prometheus(self._run.name, self._runtime, self._telemetry, self._log)
        self._server.routes = [*operator.routes(), *prometheus.routes(), *self._dashboard.routes()]
        self._server.open_routes = self._dashboard.open_routes(self._server.access)
        self._intake.on_stacks = self._watches.why_stalled.on_stacks

    async def _start(self) -> None:
        self._log.start(self._channels.acknowledge)
        self._runtime.start()
        self._watches.start()
        self._runtime.own(self._dashboard.run(), "dashboard")
        url = await self._listen()
        self._log.write(*answers.beginning(self._boot, self._runtime.core.configured, self._data_state))
        self._runtime.post(self._first_event())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        await self._crew.start(url, continues=self._continues)

    async def _listen(self) -> str:
        """The URL: where the controller before this one listened, if that can be had, so that its workers find it."""
        host, port = self._reach.bind, self._config.controller.port
        known = last_port(self._run) if self._continues and not port else port
        try:
            await self._server.start(host, known)
        except StartError:
            if known == port:
                raise
            await self._server.start(host, port)
        url = self._reach.url(self._server.port)
        write_url(self._run, url)
        self._display.say(f"dashboard: {url}/ (token: {self._run.token})")
        return url

    def _first_event(self) -> events.AnyEvent:
        if self._history is None:
            return events.RunStarted(boot=self._boot, branch_floor=self._boot - 1 if self._resume else 0)
        away_s = max(0.0, self._runtime.now() - self._history.died_at)
        self._display.say(
            f"goes on after a controller that died {away_s:.0f} s ago, at step {self._runtime.core.state.trainer.step}; "
            f"{len(self._history.events)} events replayed; its workers have "
            f"{self._config.controller.heartbeat_timeout_s:g} s to come back"
        )
        return events.ControllerRestarted(boot=self._boot, away_s=away_s)

    # ---- while it runs -------------------------------------------------------------------------------------

    async def _wait(self) -> actions.FinishRun:
        finished = self._runtime.finished
        deadline = time.monotonic() + self._config.controller.start_timeout_s
        while not finished.done():
            await asyncio.wait([finished], timeout=REFRESH_S)
            self._display.refresh()
            if self._log.failure is not None:
                return self._unwritable()
            if deadline and time.monotonic() > deadline:
                deadline = 0.0
                self._crew.check_started()
        if self._log.failure is not None:
            return self._unwritable()
        if error := finished.exception():
            reason = f"the controller failed: {type(error).__name__}: {error}; its state is dumped beside the logs"
            return actions.FinishRun(cause=self._runtime.seq, reason=reason, ok=False)
        return finished.result()

    def _unwritable(self) -> actions.FinishRun:
        reason = (
            f"the event log {self._run.database} cannot be written: {self._log.failure}; "
            "mend its disk or make room, then resume"
        )
        if isinstance(self._log.failure, Superseded):
            reason = f"{self._log.failure}; this one has stopped, and leaves the run and its workers to that one"
        return actions.FinishRun(cause=self._runtime.seq, reason=reason, ok=False)

    def _perform(self, action: actions.AnyAction) -> None:
        self._telemetry.on_action(action)
        self._dashboard.on_action(action)
        self._effects.perform(action)

    def _observe(self, event: events.AnyEvent) -> None:
        self._telemetry.observe(event)
        self._dashboard.observe(event)
        if isinstance(event, events.StepFinished):
            self._display.on_step()
        elif isinstance(event, events.CheckpointSaved):
            self._effects.on_checkpoint_saved(event.step)
        elif isinstance(event, events.RelayJoined):
            self._effects.on_relay_joined(event)
        elif isinstance(event, events.EvaluationFinished):
            text = f"greedy accuracy {event.accuracy:.3f}, mean reward {event.score:.3f}"
            self._display.say(f"{text} on {event.num_prompts} held-out prompts")

    def _keep(self, event: events.AnyEvent) -> None:
        """See to a snapshot where one is due: at the first event, without delay; later not on top of a step's rows."""
        if isinstance(event, events.RunStarted | events.ControllerRestarted):
            self._snapshot()
        elif isinstance(event, events.StepFinished) or event.seq - self._kept >= SNAPSHOT_EVENTS:
            self._kept = event.seq
            asyncio.get_running_loop().call_soon(self._snapshot)

    def _snapshot(self) -> None:
        """A controller that takes over replays what came after this."""
        if not self._runtime.crashed:
            self._kept = self._runtime.seq
            body = recovery.snapshot(self._runtime.core, self._channels, self._effects)
            self._log.snapshot(self._kept, body)

    def _alarm(self, name: str, text: str) -> None:
        self._effects.perform(actions.RaiseAlarm(cause=self._runtime.seq, name=name, text=text))

    def _tell(self, name: str, text: str) -> None:
        self._telemetry.totals.on_alarm(name)
        self._dashboard.alarm(name, text)
        self._display.say(f"alarm: {name}: {text}")

    def _on_signal(self, name: str) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._display.say(f"{name}: finishing the step and saving a checkpoint; once more to stop at once")
            self._runtime.post(events.StopRequested(reason=f"stopped by {name}"))
            return
        self._crew.launcher.kill()
        self._leave_nothing()
        os._exit(EXIT_INTERRUPTED)

    def _status(self) -> dict[str, object]:
        metrics = self._telemetry.history[-1] if self._telemetry.history else {}
        status = status_of(self._runtime.core, self._telemetry.relays)
        return {"run": str(self._run.path), **status, "files": self._log.upkeep.sizes.in_mib(), "metrics": metrics}

    # ---- end -----------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        is_ours = not isinstance(self._log.failure, Superseded)
        if is_ours:
            await self._stop_workers()
            await self._runtime.let_through(LAST_ACTIONS_S)
            if text := await self._archive.finish():
                self._display.say(text)
        else:
            self._crew.launcher.leave()
        await self._dashboard.close()
        await self._runtime.close()
        await self._server.close()
        await self._telemetry.finish()
        self._watches.close()
        if is_ours:
            self._leave_nothing()
        self._tokens.finish()
        self._log.close(outcome=self._outcome.reason)
        for part in (self._tokens, self._telemetry):
            with contextlib.suppress(OSError):  # a full disk; the log has the error already
                part.close()
        self._display.close()

    async def _stop_workers(self) -> None:
        for role in ("rollout", "trainer", "relay"):
            for worker in self._channels.workers(role):
                self._channels.stop(worker, "the run is over")
        await self._crew.stop()

    def _leave_nothing(self) -> None:
        addresses = addresses_of(self._hosts)
        for host in addresses if len(addresses) > 1 else [""]:
            if is_local(host) or not host:
                paths.remove(paths.shm_directory(self._log.run_id, host=host))
        self._run.token.unlink(missing_ok=True)
