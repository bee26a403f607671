"""One run from start to end: puts the parts together, waits for the core to say that it is over, cleans up.

    Application.run:  open ──► launch ──► wait for FinishRun or a signal ──► stop workers ──► close ──► summary

Whatever ends the run, no child process and no shared memory is left.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path

import msgspec
import structlog

from laminar import wire
from laminar.config import Config
from laminar.controller.display import Display, LiveDisplay, PlainDisplay
from laminar.controller.effects import Effects
from laminar.controller.eventlog import EventLog
from laminar.controller.launch import Launcher, root_cause
from laminar.controller.plan import Process, addresses_of, going_on_from, plan, url_of
from laminar.controller.rundir import RunDirectory, complete_checkpoints, write_token, write_url
from laminar.controller.runtime import Runtime
from laminar.controller.server import Channel, Server
from laminar.controller.status import status_of
from laminar.controller.summary import summarize
from laminar.controller.telemetry import Telemetry
from laminar.controller.tokens import TokenStore
from laminar.core import actions, events, fleet
from laminar.core.engine import Core
from laminar.core.sampling import Sampler
from laminar.core.settings import Settings
from laminar.errors import ProtocolError, StartError
from laminar.hosts import Host, is_local
from laminar.ids import WorkerId
from laminar.tasks.datasets import PromptSet
from laminar.workers.relay import paths

logger = structlog.get_logger(__name__)

REFRESH_S = 0.25  # of the live panel
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
DROPS_MIN = 64  # groups in a row: chance alone does not drop so many; an outage may drop all that are under way at once


def settings_of(config: Config, prompts: PromptSet) -> Settings:
    """What the core needs of the configuration."""
    return Settings(
        seed=config.run.seed,
        num_prompts=len(prompts),
        shuffle=config.task.shuffle,
        steps=config.run.steps,
        group_size=config.rollout.group_size,
        trajectory_tokens_max=config.rollout.max_tokens,
        batch_groups=config.trainer.batch_prompts,
        local_batch_groups=config.local_batch_groups,
        buffer_groups_max=config.buffer_groups_max,
        refresh_policy=config.rollout.refresh_policy,
        draining_share=config.rollout.draining_share,
        staleness_budget=config.rollout.staleness_budget,
        ready_groups_max=config.buffer.max_ready_groups,
        pinned=bool(config.task.agent),
        repack_interval_s=config.repack.interval_s if config.repack.enabled else 0.0,
        repack_kv_share=config.repack.kv_share,
        repack_policy=config.repack.policy,
        repack_requests_max=config.repack.requests_max,
        await_publication_s=config.rollout.await_publication_s,
        progress_timeout_s=config.rollout.progress_timeout_s,
        restarts_max=config.rollout.restarts,
        trainer_restarts_max=config.trainer.restarts,
        relay_restarts_max=config.relay.restarts,
        max_staleness=config.buffer.max_staleness if config.buffer.max_staleness >= 0 else None,
        on_stale=config.buffer.on_stale,
        num_retries=config.rollout.num_retries,
        on_incomplete=config.buffer.on_incomplete,
        min_group_size=config.buffer.min_group_size,
        stragglers=config.buffer.stragglers,
        straggler_factor=config.buffer.straggler_factor,
        group_versions=config.buffer.group_versions,
        custom_sampler=config.buffer.sampler != "fifo",
        on_sampler_error=config.buffer.on_sampler_error,
        sampler_budget_ms=config.buffer.sampler_budget_ms,
        checkpoint_every=config.trainer.checkpoint_every,
        evaluate=bool(prompts.held_out),
        drops_without_progress_max=max(DROPS_MIN, config.buffer_groups_max),
        reconnect_grace_s=config.controller.heartbeat_timeout_s,
    )


class Application:
    """A run of this process."""

    def __init__(
        self,
        *,
        config: Config,
        hosts: list[Host],
        run: RunDirectory,
        prompts: PromptSet,
        sampler: Sampler | None,
        resume: Path | None,
    ) -> None:
        self._config, self._hosts, self._run, self._prompts = config, hosts, run, prompts
        self._sampler, self._resume = sampler, resume
        self._began = time.monotonic()
        self._interrupts = 0
        self._joined: set[str] = set()
        self._processes: dict[str, Process] = {}
        self._failures_told: set[str] = set()

    async def run(self) -> int:
        """The exit code. Raises StartError for what is wrong before the first worker runs."""
        for left in paths.sweep():
            print(f"removed {left}, left behind by a run that was killed", flush=True)
        core = self._core()
        try:
            self._open(core)
        except OSError as error:
            raise StartError(f"cannot write the run's directory {self._run.path}: {error}") from error
        outcome = actions.FinishRun(cause=0, reason="the controller failed", ok=False)
        try:
            await self._start()
            outcome = await self._wait()
        finally:
            await self._close()
        self._display.say(summarize(self._run.path, core.state, time.monotonic() - self._began))
        if outcome.ok and self._log.failure is not None:
            outcome = self._unwritable()
        if not outcome.ok:
            self._display.say(f"\nthe run failed: {outcome.reason}\nlogs: {self._run.logs}")
        return EXIT_OK if outcome.ok else EXIT_FAILED

    # ---- start ---------------------------------------------------------------------------------------------

    def _core(self) -> Core:
        settings = settings_of(self._config, self._prompts)
        if self._resume is None:
            return Core(settings)
        file = self._resume / "data_state.bin"
        try:
            return Core.resumed(settings, file.read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise StartError(f"cannot resume from {self._resume}: {file.name}: {error}") from error

    def _open(self, core: Core) -> None:
        config, run = self._config, self._run
        self._log = EventLog(run.database, config.controller.log_commit_s, lambda: self._tokens.sync())
        resumed = core.state.trainer.step
        self._boot = self._log.begin_boot(time.time(), os.getpid(), socket.gethostname(), resumed)
        self._run_id = f"{re.sub('[^A-Za-z0-9_]', '_', run.name[:40])}-{os.getpid()}-{self._boot}"
        self._tokens = TokenStore(run.tokens, self._boot)
        self._runtime = Runtime(core, self._log, run.logs)
        token = write_token(run)
        self._server = Server(
            token=token,
            boot=self._boot,
            run_id=self._run_id,
            config=wire.encode(config),
            heartbeat_s=config.controller.heartbeat_s,
            timeout_s=config.controller.heartbeat_timeout_s,
        )
        self._launcher = Launcher(run.logs, token, self._on_exit)
        self._telemetry = Telemetry(self._runtime, self._log, run.metrics)
        self._display: Display = self._make_display()
        self._effects = Effects(
            runtime=self._runtime,
            server=self._server,
            log=self._log,
            tokens=self._tokens,
            prompts=self._prompts,
            checkpoints=run.checkpoints,
            keep_last=config.trainer.keep_last,
            sampler=self._sampler,
            stop_process=self._launcher.give_up,
            start_process=lambda worker: self._runtime.own(self._start_again(worker), f"start-{worker}"),
            alarm=lambda name, text: self._display.say(f"alarm: {name}: {text}"),
        )
        self._connect()

    def _make_display(self) -> Display:
        wanted, steps = self._config.controller.console, self._config.run.steps
        live = wanted == "live" or (wanted == "auto" and os.isatty(1))
        return (LiveDisplay if live else PlainDisplay)(self._runtime.core.state, self._telemetry, steps)

    def _connect(self) -> None:
        self._runtime.perform = self._effects.perform
        self._runtime.observe = self._observe
        self._server.on_message = self._on_message
        self._server.on_broken = lambda c: self._post(
            events.WorkerDisconnected(worker=c.worker, incarnation=c.incarnation)
        )
        self._server.on_returned = lambda c: self._post(
            events.WorkerReturned(worker=c.worker, incarnation=c.incarnation)
        )
        self._server.token_rows = self._tokens.rows
        self._server.on_drain = self._on_drain
        self._server.status = self._status

    async def _start(self) -> None:
        config = self._config
        self._log.start(self._server.acknowledge)
        self._runtime.start()
        await self._server.start(config.controller.host, config.controller.port)
        url = url_of(config.controller.host, self._server.port)
        write_url(self._run, url)
        self._runtime.post(events.RunStarted(boot=self._boot, branch_floor=self._boot - 1 if self._resume else 0))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        processes = plan(config, self._hosts, url, self._resume)
        self._display.say(f"run {self._run.path}: {len(processes)} processes, controller at {url}")
        self._processes = {process.name: process for process in processes}
        for process in processes:
            await self._launcher.start(process)

    async def _start_again(self, worker: WorkerId) -> None:
        process = self._processes.get(worker)
        try:
            if process is None:
                raise StartError("it was not started by this controller")
            if process.role == "trainer":
                complete = complete_checkpoints(self._run.checkpoints)
                process = going_on_from(process, complete[-1] if complete else self._resume)
            await self._launcher.start(process)
            self._display.say(f"{worker} is started again")
        except StartError as error:
            self._post(events.WorkerLost(worker=worker, incarnation=0, reason=str(error)))

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
                self._check_started()
        if self._log.failure is not None:
            return self._unwritable()
        if error := finished.exception():
            reason = f"the controller failed: {type(error).__name__}: {error}; its state is dumped beside the logs"
            return actions.FinishRun(cause=self._runtime.seq, reason=reason, ok=False)
        return finished.result()

    def _unwritable(self) -> actions.FinishRun:
        reason = (
            f"the event log {self._run.database} cannot be written: {self._log.failure}; "
            "make room on its disk, then resume from the last checkpoint"
        )
        return actions.FinishRun(cause=self._runtime.seq, reason=reason, ok=False)

    def _check_started(self) -> None:
        missing = [name for name, p in self._processes.items() if not self._has_joined(name, p.num_workers)]
        if missing:
            lines = self._launcher.last_lines(missing[0])
            timeout_s = self._config.controller.start_timeout_s
            self._post(
                events.FailureReported(
                    reason=f"{missing[0]} did not join within {timeout_s:g} s; its last lines:\n{_indent(lines)}"
                )
            )

    def _has_joined(self, name: str, count: int) -> bool:
        return _count(self._joined, name) >= count

    def _post(self, event: events.AnyEvent) -> int:
        return self._runtime.post(event)

    def _on_message(self, channel: Channel, message: wire.Message) -> int:
        try:
            return self._take(channel, message)
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug of the controller must end the run, not one channel
            self._runtime.crash(error)
            return self._runtime.seq

    def _take(self, channel: Channel, message: wire.Message) -> int:
        self._joined.add(channel.worker)
        self._telemetry.on_message(channel.worker, message)
        if isinstance(message, wire.RolloutReport):
            self._take_tokens(message)
            self._tell_failures(message)
        elif isinstance(message, wire.RelayReady) and message.chain_port:
            self._effects.relay_addresses[channel.worker] = wire.Neighbour(
                name=channel.worker, host=channel.origin.host, port=message.chain_port
            )
        elif isinstance(message, wire.WorkerFailed) and message.detail:
            logger.error("worker.failed", worker=channel.worker, reason=message.reason, detail=message.detail)
        event = channel.origin.to_event(message)
        return self._runtime.seq if event is None else self._post(event)

    def _take_tokens(self, report: wire.RolloutReport) -> None:
        for prompt in report.prompts:
            if prompt.trajectory:
                self._tokens.put_own_prompt(prompt.trajectory, prompt.attempt, prompt.tokens)
            else:
                self._tokens.put_prompt(prompt.group, prompt.tokens)
        self._tokens.take(report)

    def _tell_failures(self, report: wire.RolloutReport) -> None:
        """The first failure of each kind, with what the user's code said; the ledger counts the others."""
        for failed in report.failed:
            if failed.reason not in self._failures_told:
                self._failures_told.add(failed.reason)
                cause, traceback = (failed.detail.strip().splitlines() or ["no details"])[-1], ""
                if cause != failed.detail.strip():
                    traceback = "\n" + _indent(failed.detail)
                follows = "will be tried again" if failed.kind == "infra" else "will not be trained on"
                text = f"a trajectory {follows} (told once of each kind): {cause}{traceback}"
                self._effects.perform(actions.RaiseAlarm(cause=self._runtime.seq, name=failed.reason, text=text))

    def _observe(self, event: events.AnyEvent) -> None:
        self._telemetry.observe(event)
        if isinstance(event, events.StepFinished):
            self._display.on_step()
        elif isinstance(event, events.CheckpointSaved):
            self._effects.on_checkpoint_saved(event.step)
        elif isinstance(event, events.EvaluationFinished):
            text = f"greedy accuracy {event.accuracy:.3f}, mean reward {event.score:.3f}"
            self._display.say(f"{text} on {event.num_prompts} held-out prompts")

    def _on_exit(self, name: str, code: int, last_lines: str) -> None:
        workers = [c for c in self._server.channels() if c.worker == name or c.worker.startswith(f"{name}/")]
        ending = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        rank, last_lines = root_cause(last_lines)
        ending += f" because rank {rank}" if rank else ""
        reason = f"{ending}; its last lines:\n{_indent(last_lines)}" if last_lines else f"{ending} without a word"
        for channel in workers:
            self._post(events.WorkerLost(worker=channel.worker, incarnation=channel.incarnation, reason=reason))
        if not workers:
            self._post(events.WorkerLost(worker=WorkerId(name), incarnation=0, reason=reason))

    def _on_drain(self, worker: WorkerId) -> str:
        refusal = fleet.why_not_drained(self._runtime.core.state, worker)
        self._post(events.DrainRequested(worker=worker))
        return refusal

    def _on_signal(self, name: str) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._display.say(f"{name}: finishing the step and saving a checkpoint; once more to stop at once")
            self._post(events.StopRequested(reason=f"stopped by {name}"))
            return
        self._launcher.kill()
        self._leave_nothing()
        os._exit(EXIT_INTERRUPTED)

    def _status(self) -> dict[str, object]:
        metrics = self._telemetry.history[-1] if self._telemetry.history else {}
        return {"run": str(self._run.path), **status_of(self._runtime.core), "metrics": metrics}

    # ---- end -----------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        for role in ("rollout", "trainer", "relay"):
            for worker in self._server.workers(role):
                self._server.send(worker, wire.Stop(reason="the run is over"))
        connected = {channel.worker for channel in self._server.channels()}
        await self._launcher.stop(
            {name for name, p in self._processes.items() if _count(connected, name) >= p.num_workers}
        )
        await self._runtime.close()
        await self._server.close()
        self._leave_nothing()
        self._log.close()
        for part in (self._tokens, self._telemetry):
            with contextlib.suppress(OSError):  # a full disk; the log has the error already
                part.close()
        self._display.close()

    def _leave_nothing(self) -> None:
        addresses = addresses_of(self._hosts)
        for host in addresses if len(addresses) > 1 else [""]:
            if is_local(host) or not host:
                paths.remove(paths.shm_directory(self._run_id, host=host))
        self._run.token.unlink(missing_ok=True)


def _count(workers: set[WorkerId] | set[str], process: str) -> int:
    return sum(worker == process or worker.startswith(f"{process}/") for worker in workers)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
