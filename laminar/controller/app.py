"""The life of one run: opened, started, waited for, closed.

    Application.run:  open ──► launch ──► wait for FinishRun or a signal ──► stop workers ──► close ──► summary

What it is made of, and what tells what to what: `parts.py`. Whatever ends the run, no child process and no shared memory is left.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
import time
from dataclasses import replace

from laminar import checkpoints
from laminar.controller import answers, recovery
from laminar.controller.beginning import begin
from laminar.controller.coresettings import settings_of
from laminar.controller.eventlog import EventLog, Superseded
from laminar.controller.parts import Given, Parts
from laminar.controller.plan import addresses_of
from laminar.controller.reach import Reach
from laminar.controller.rundir import last_port, write_url
from laminar.controller.segments import OTHERWISE
from laminar.controller.snapshots import Snapshots
from laminar.controller.summary import summarize
from laminar.controller.upkeep import MIB
from laminar.core import actions, events
from laminar.errors import StartError
from laminar.hosts import is_local
from laminar.workers.relay import paths

REFRESH_S = 0.25  # of the live panel
LAST_ACTIONS_S = 5.0  # for the disk to take the last events; what it does not take is found by the next --resume
AT_ONCE_S = 2.0  # for the disk to take that word
TWICE_S = 0.2  # `timeout`, service managers and terminals may deliver one signal both to a process and to its group
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


class Application:
    """A run of this process."""

    def __init__(self, given: Given) -> None:
        self._given, self._config, self._run = given, given.config, given.run
        self._reach = given.reach or Reach(given.config.controller.host, given.config.controller.host)
        self._history: recovery.History | None = None
        self._began = time.monotonic()
        self._interrupt: tuple[str, float] | None = None
        """The first signal, and when it came."""

    async def run(self) -> int:
        """The exit code. Raises StartError for what is wrong before the first worker runs."""
        for left in paths.sweep():
            print(f"removed {left}, left behind by a run that was killed", flush=True)
        try:
            self._open()
            self._set_damaged_aside()
        except OSError as error:
            raise StartError(f"cannot write the run's directory {self._run.path}: {error}") from error
        except sqlite3.Error as error:
            raise StartError(f"{self._run.database} cannot be read: {error}; {OTHERWISE}") from error
        self._outcome = actions.FinishRun(cause=0, reason="the controller failed", ok=False)
        try:
            await self._start()
            self._outcome = await self._wait()
        finally:
            await self._close()
        outcome, say = self._outcome, self._parts.display.say
        say(summarize(self._run.path, self._parts.runtime.core.state, time.monotonic() - self._began))
        if outcome.ok and self._log.failure is not None:
            outcome = self._unwritable()
        if not outcome.ok:
            say(f"\nthe run failed: {outcome.reason}\nlogs: {self._run.logs}")
        return EXIT_OK if outcome.ok else EXIT_FAILED

    # ---- open ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        given, run = self._given, self._run
        self._log = self._open_log()
        if given.continues:
            self._history = recovery.read(run.database)
        settings = settings_of(self._config, given.prompts)
        self._beginning = begin(
            settings, given.sampler, history=self._history, checkpoint=given.resume, named=given.named
        )
        self._given = replace(given, resume=self._beginning.checkpoint, sampler=self._beginning.sampler)
        resumed = self._beginning.core.state.trainer.step
        self._boot = self._log.begin_boot(
            time.time(), os.getpid(), socket.gethostname(), resumed, run_id=run.id_of, continues=given.continues
        )
        self._parts = Parts(self._given, self._log, self._beginning.core, self._boot, self._history)
        self._parts.runtime.settled = Snapshots(self._parts.runtime, self._log, self._snapshot).settled
        self._go_on()

    def _open_log(self) -> EventLog:
        config = self._config.log
        log = EventLog(
            self._run.database,
            config.commit_s,
            before_commit=lambda: self._parts.tokens.sync(),
            after_commit=lambda: self._parts.tokens.committed(),
            bytes_max=config.max_mib * MIB,
        )
        log.run_lock.take(os.getpid(), socket.gethostname())
        return log

    def _go_on(self) -> None:
        """Bring the core to where the log ends, if it is taken over, and say what of an earlier process was kept or cut."""
        parts, history, core = self._parts, self._history, self._beginning.core
        if history is not None:
            parts.past.check(history.segments)
            recovery.replay(history, core, parts.channels, parts.effects, parts.past)
            self._log.durable = core.state.seq
        archived = parts.archive.adopt(parts.past, core.state)
        told = [self._log.set_aside, archived, *recovery.what_was_cut(history, parts.past), self._beginning.told()]
        if lines := [line for line in told if line]:
            parts.display.say("\n".join(lines))

    def _set_damaged_aside(self) -> None:
        for path, what in self._beginning.damaged.items():
            checkpoints.set_aside(path)
            text = f"{path.name}: {what}; the run goes on from {self._given.resume}"
            self._parts.display.say(f"alarm: checkpoint-damaged: {text}")

    # ---- start ---------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        parts = self._parts
        self._log.start(parts.channels.acknowledge)
        parts.runtime.start()
        parts.watches.start(check_database=self._history is not None)
        parts.runtime.own(parts.dashboard.run(), "dashboard")
        url = await self._listen()
        self._log.write(*answers.beginning(self._boot, parts.runtime.core.configured, self._beginning.data_state))
        parts.runtime.post(self._first_event())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        await parts.crew.start(url, continues=self._given.continues)

    async def _listen(self) -> str:
        """The URL: where the controller before this one listened, if that can be had, so that its workers find it."""
        server, host, port = self._parts.server, self._reach.bind, self._config.controller.port
        known = last_port(self._run) if self._given.continues and not port else port
        try:
            await server.start(host, known)
        except StartError:
            if known == port:
                raise
            await server.start(host, port)
        url = self._reach.url(server.port)
        write_url(self._run, url)
        self._parts.display.say(f"dashboard: {url}/ (token: {self._run.token})")
        return url

    def _first_event(self) -> events.AnyEvent:
        if self._history is None:
            return events.RunStarted(boot=self._boot, branch_floor=self._boot - 1 if self._given.resume else 0)
        runtime = self._parts.runtime
        away_s = max(0.0, runtime.now() - self._history.died_at)
        self._parts.display.say(
            f"{recovery.GOES_ON} that died {away_s:.0f} s ago, at step {runtime.core.state.trainer.step}; "
            f"{len(self._history.events)} events replayed; its workers have "
            f"{self._config.controller.heartbeat_timeout_s:g} s to come back"
        )
        return events.ControllerRestarted(boot=self._boot, away_s=away_s)

    # ---- while it runs -------------------------------------------------------------------------------------

    async def _wait(self) -> actions.FinishRun:
        runtime = self._parts.runtime
        deadline = time.monotonic() + self._config.controller.start_timeout_s
        while not runtime.finished.done():
            await asyncio.wait([runtime.finished], timeout=REFRESH_S)
            self._parts.display.refresh()
            if self._log.failure is not None:
                return self._unwritable()
            if deadline and time.monotonic() > deadline:
                deadline = 0.0
                self._parts.crew.check_started()
        if self._log.failure is not None:
            return self._unwritable()
        if error := runtime.finished.exception():
            reason = f"the controller failed: {type(error).__name__}: {error}; its state is dumped beside the logs"
            return actions.FinishRun(cause=runtime.seq, reason=reason, ok=False)
        return runtime.finished.result()

    def _unwritable(self) -> actions.FinishRun:
        return actions.FinishRun(cause=self._parts.runtime.seq, reason=self._log.why_unwritable, ok=False)

    def _snapshot(self) -> bytes:
        parts = self._parts
        return recovery.snapshot(parts.runtime.core, parts.channels, parts.effects)

    def _on_signal(self, name: str) -> None:
        if self._interrupt is None:
            self._interrupt = name, time.monotonic()
            self._parts.display.say(f"{name}: finishing the step and saving a checkpoint; once more to stop at once")
            self._parts.runtime.post(events.StopRequested(reason=f"stopped by {name}"))
            return
        first, at = self._interrupt
        if name == first and time.monotonic() < at + TWICE_S:
            return
        self._parts.crew.launcher.kill()
        self._leave_nothing()
        self._log.close(AT_ONCE_S, outcome="stopped at once")  # so that nobody takes over what is to stop
        saved = self._run.last_checkpoint()
        then = f"--resume {self._run.path} goes on from {saved.name}" if saved else "no checkpoint was made"
        self._parts.display.say(f"stopped at once; {then}")
        os._exit(EXIT_INTERRUPTED)

    # ---- close ---------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        parts, is_ours = self._parts, not isinstance(self._log.failure, Superseded)
        if is_ours:
            await self._stop_workers()
            await parts.runtime.let_through(LAST_ACTIONS_S)
            if text := await parts.archive.finish():
                parts.display.say(text)
        else:
            parts.crew.launcher.leave()
        await parts.dashboard.close()
        await parts.runtime.close()
        await parts.server.close()
        await parts.telemetry.finish()
        parts.watches.close()
        if is_ours:
            self._leave_nothing()
        parts.tokens.finish()
        self._log.close(outcome=self._outcome.reason)
        for part in (parts.tokens, parts.telemetry, parts.effects):
            with contextlib.suppress(OSError):  # a full disk; the log has the error already
                part.close()
        parts.display.close()

    async def _stop_workers(self) -> None:
        channels = self._parts.channels
        for role in ("rollout", "trainer", "relay"):
            for worker in channels.workers(role):
                channels.stop(worker, "the run is over")
        await self._parts.crew.stop()

    def _leave_nothing(self) -> None:
        addresses = addresses_of(self._given.hosts)
        for host in addresses if len(addresses) > 1 else [""]:
            if is_local(host) or not host:
                paths.remove(paths.shm_directory(self._log.run_id, host=host))
        self._run.token.unlink(missing_ok=True)
