"""The parts of a running controller: made, and each told of those that it needs.

    Server ──frames──► Intake ──events──► Runtime (Core, EventLog) ──actions──► Effects ──► Channels, TokenStore, Crew
                                             └──both──► Telemetry, Dashboard, Display

What happens with them from the start of a run to its end: `app.py`.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from laminar import wire
from laminar.config import Config
from laminar.controller import metricsfile, otel
from laminar.controller.archive import Archive
from laminar.controller.channels import Channels
from laminar.controller.console import functions
from laminar.controller.crew import Crew
from laminar.controller.display import display_of
from laminar.controller.effects import Effects
from laminar.controller.eventlog import EventLog
from laminar.controller.intake import Intake
from laminar.controller.operator import Operator
from laminar.controller.prometheus import Prometheus
from laminar.controller.reach import Reach
from laminar.controller.recovery import History
from laminar.controller.rundir import RunDirectory, last_token, write_token
from laminar.controller.runtime import Runtime
from laminar.controller.segments import Past
from laminar.controller.server import Server
from laminar.controller.status import status_of
from laminar.controller.telemetry import Telemetry
from laminar.controller.tokens import TokenStore
from laminar.controller.watches import LearningSignal, Watches
from laminar.controller.web.dashboard import Dashboard
from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.core.sampling import Sampler
from laminar.hosts import Host
from laminar.remote import Answer
from laminar.tasks.datasets import PromptSet


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line says of a run, read and checked."""

    config: Config
    hosts: list[Host]
    run: RunDirectory
    prompts: PromptSet
    sampler: Sampler | None
    """None = FIFO."""
    resume: Path | None
    """Checkpoint from which a trainer without a newer one goes on."""
    named: Collection[str] = ()
    """Keys of the configuration that were given for this start: what an operator has changed of them before counts no more."""
    continues: bool = False
    """The run's last controller died, and this one takes its place."""
    reach: Reach | None = None
    """Where the controller listens and is reached; None = as configured."""
    found: Mapping[str, Answer] | None = None
    """What the check of other hosts found."""


class Parts:
    """Of one process. `history`: what the log says, for a controller that takes the place of another."""

    def __init__(self, given: Given, log: EventLog, core: Core, boot: int, history: History | None) -> None:
        """OSError or StartError if the run's directory cannot be written."""
        config, run = given.config, given.run
        self._given, self.log = given, log
        self.past = Past(run.tokens)
        self.tokens = TokenStore(run.tokens, boot)
        began, died_at = (history.began, history.died_at) if history else (0.0, 0.0)
        self.runtime = Runtime(core, log, run.logs, began=began, not_before=died_at)
        token = last_token(run) if given.continues else write_token(run)
        self.channels = Channels(boot, log.continues if given.continues else 0)
        self.server = Server(
            self.channels,
            token=token,
            run_id=log.run_id,
            config=wire.encode(config),
            heartbeat_s=config.controller.heartbeat_s,
            timeout_s=config.controller.heartbeat_timeout_s,
        )
        metricsfile.agree(run.metrics, run.database, core.state.trainer.step)
        self.telemetry = Telemetry(self.runtime, log, run.metrics)
        self.display = display_of(config, core.state, self.telemetry)
        which = {"run": run.name, "run_id": log.run_id, "boot": boot}
        self.telemetry.tracer = otel.start(os.environ, config.log.trace_share, self.display.say, **which)
        seen = self.runtime, self.telemetry, given.prompts, self.tokens.rows
        self.dashboard = Dashboard.of_run(run, config, *seen)
        self.watches = Watches(run, self.runtime, self.channels, log, self.alarm, self.display.say)
        self.signal = LearningSignal(self.alarm)
        on_stalled, wanted = self.watches.writer("archive"), config.log.archive == "parquet"
        self.archive = Archive(run.archive, run.database, self.tokens, on_stalled, wanted=wanted)
        log.upkeep.first_step_needed = self.archive.first_step_needed
        self.effects = Effects(
            runtime=self.runtime,
            channels=self.channels,
            log=log,
            tokens=self.tokens,
            prompts=given.prompts,
            checkpoints_at=run.checkpoints,
            keep_last=config.trainer.keep_last,
            keep_every=config.trainer.keep_every,
            sampler=given.sampler,
            stop_process=lambda worker: self.crew.launcher.give_up(worker),
            start_process=lambda worker: self.runtime.own(self.crew.start_again(worker), f"start-{worker}"),
            alarm=self._tell,
            stalled=self.watches.on_stalled,
            committed=self.archive.add,
        )
        self.intake = Intake(self.runtime, log, self.tokens, self.telemetry, self.effects.perform)
        self.crew = Crew(
            config=config,
            hosts=given.hosts,
            run=run,
            resume=given.resume,
            found=given.found,
            token=token,
            runtime=self.runtime,
            channels=self.channels,
            joined=self.intake.joined,
            say=self.display.say,
        )
        self._connect()

    def _connect(self) -> None:
        self.runtime.perform = self._perform
        self.runtime.observe = self._observe
        self.channels.hurry = self.log.hurry
        self.log.on_stalled = self.watches.writer("log")
        self.log.on_alarm = lambda alarm: self.alarm(alarm.name, alarm.text)
        self.server.on_message = self.intake.on_message
        lost, back = events.WorkerDisconnected, events.WorkerReturned
        self.server.on_broken = lambda c: self.runtime.post(lost(worker=c.worker, incarnation=c.incarnation))
        self.server.on_returned = lambda c: self.runtime.post(back(worker=c.worker, incarnation=c.incarnation))
        self.server.token_rows = self.tokens.rows
        self.intake.on_stacks = self.watches.why_stalled.on_stacks
        self._open_routes()

    def _open_routes(self) -> None:
        samplers, reports = self.effects.samplers, self.telemetry.relays
        commands = functions(self.runtime, samplers, self.crew, self.alarm, reports)
        stalled = self.watches.why_stalled.report
        operator = Operator(self.runtime, self.channels, status=self._status, why_stalled=stalled, commands=commands)
        prometheus = Prometheus(self._given.run.name, self.runtime, self.telemetry, self.log)
        self.server.routes = [*operator.routes(), *prometheus.routes(), *self.dashboard.routes()]
        self.server.open_routes = self.dashboard.open_routes(self.server.access)

    def alarm(self, name: str, text: str) -> None:
        """Of the shell: recorded and told like those that the core raises."""
        self.effects.perform(actions.RaiseAlarm(cause=self.runtime.seq, name=name, text=text))

    def _tell(self, name: str, text: str) -> None:
        self.telemetry.totals.on_alarm(name)
        self.dashboard.alarm(name, text)
        self.display.say(f"alarm: {name}: {text}")

    def _perform(self, action: actions.AnyAction) -> None:
        self.telemetry.on_action(action)
        self.dashboard.on_action(action)
        self.effects.perform(action)

    def _observe(self, event: events.AnyEvent) -> None:
        metrics = self.telemetry.observe(event)
        self.dashboard.observe(event)
        if metrics is not None:
            self.display.on_step()
            self.signal.on_step(metrics)
        elif isinstance(event, events.CheckpointSaved):
            self.effects.on_checkpoint_saved(event.step)
        elif isinstance(event, events.RelayJoined):
            self.effects.on_relay_joined(event)
        elif isinstance(event, events.EvaluationFinished):
            text = f"greedy accuracy {event.accuracy:.3f}, mean reward {event.score:.3f}"
            self.display.say(f"{text} on {event.num_prompts} held-out prompts")

    def _status(self) -> dict[str, object]:
        metrics = self.telemetry.history[-1] if self.telemetry.history else {}
        status = status_of(self.runtime.core, self.telemetry.relays)
        files = self.log.upkeep.sizes.in_mib()
        return {"run": str(self._given.run.path), **status, "files": files, "metrics": metrics}
