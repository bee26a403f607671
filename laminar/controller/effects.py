"""From core actions to the outside: messages to workers, rows to the database, the custom sampler's turn.

Every long action becomes one message on the worker's ordered channel, which is resent after a reconnect; its terminal event is
the worker's answer, or `WorkerLost` when there is none to be had. So nothing here waits. A controller that goes on from the log has
the actions of the one before performed again by `replay`: the same messages in the same order, of which a worker gets those that it
has not received.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import structlog

from laminar import checkpoints, wire
from laminar.controller import trajectoryrows
from laminar.controller.channels import Channels
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.core import actions, events
from laminar.core.sampling import Sampler
from laminar.ids import GroupId, TrajectoryId, WorkerId
from laminar.samplers import Samplers

logger = structlog.get_logger(__name__)


class Prompts(Protocol):
    """What the effects need of a data set (`laminar.tasks.datasets.PromptSet`)."""

    def prompt(self, index: int) -> wire.Prompt:
        """The prompt at a position, 0-based."""

    @property
    def held_out(self) -> list[wire.Prompt]:
        """Prompts for evaluations."""


class Prefixes(Protocol):
    """What the effects need of a token store (`laminar.controller.tokens.TokenStore`)."""

    def start(self, trajectory: TrajectoryId, attempt: int, group: GroupId, resume: bool) -> None:
        """An attempt begins."""

    def prefix(self, trajectory: TrajectoryId) -> tuple[bytes, bytes]:
        """(tokens, log-probs) that it has."""

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Their tokens are not needed again."""


NOT_REPLAYED = (
    actions.ForgetTokens,  # what the core does not know any more is not read back
    actions.AskSampler,  # asked anew
    actions.StartWorker,  # processes are looked for, see `laminar.controller.recovery`
    actions.RaiseAlarm,  # told already
    actions.BreakpointHit,
    actions.Stalled,
    actions.FinishRun,
)


class Effects:
    """`perform(action)` for `Runtime`."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        channels: Channels,
        log: EventLog,
        tokens: Prefixes,
        prompts: Prompts,
        checkpoints_at: Path,
        keep_last: int,
        keep_every: int = 0,
        sampler: Sampler | None,
        stop_process: Callable[[WorkerId], None],
        start_process: Callable[[WorkerId], None],
        alarm: Callable[[str, str], None],
        stalled: Callable[[], None] = lambda: None,
        committed: Callable[[int, list[TrajectoryId]], None] | None = None,
    ) -> None:
        """`committed(step, trajectories)` takes over the tokens of those; None = they are forgotten as well."""
        self._runtime, self._channels, self._log, self._prompts = runtime, channels, log, prompts
        self.tokens = tokens
        self._checkpoints, self._keep_last, self._keep_every = checkpoints_at, keep_last, keep_every
        self.samplers = Samplers(sampler)
        self._stop_process, self._alarm, self._stalled = stop_process, alarm, stalled
        self._start_process, self._committed = start_process, committed
        self.relay_addresses: dict[WorkerId, wire.Neighbour] = {}
        """Where relays listen for their neighbours."""
        self._table: dict[type, Callable[[Any], None]] = {
            actions.StartGroup: self._start_group,
            actions.AbortAttempts: self._abort,
            actions.PullWeights: self._pull,
            actions.RunEvaluation: self._evaluate,
            actions.StartTrainStep: self._train,
            actions.PublishVersion: self._publish,
            actions.ArrangeChain: self._arrange_chain,
            actions.RetainVersions: self._retain,
            actions.SaveCheckpoint: self._save,
            actions.AskSampler: self._ask_sampler,
            actions.RecordTrajectories: self._record,
            actions.RecordLostSteps: self._record_lost,
            actions.ForgetTokens: self._forget,
            actions.StopWorker: self._stop_worker,
            actions.StartWorker: lambda a: self._start_process(a.worker),
            actions.RaiseAlarm: self._raise_alarm,
            actions.BreakpointHit: self._on_breakpoint,
            actions.UseSampler: lambda a: self.samplers.use(a.reference),
            actions.ReconfigureReplica: self._reconfigure,
            actions.Stalled: lambda a: self._stalled(),
        }

    def perform(self, action: actions.AnyAction) -> None:
        """Do it, or hand it over."""
        self._table[type(action)](action)

    def replay(self, action: actions.AnyAction) -> None:
        """What of an earlier controller's action is not known to have been done, and may be done twice."""
        if isinstance(action, actions.StopWorker):
            self._channels.fence(action.worker, action.incarnation, action.reason)
        elif not isinstance(action, NOT_REPLAYED):
            self.perform(action)

    def close(self) -> None:
        """The run is over: no sampler is asked any more."""
        self.samplers.close()

    def on_relay_joined(self, event: events.RelayJoined) -> None:
        """Note where its neighbours reach it, before it is chained."""
        if event.chain_port:
            self.relay_addresses[event.worker] = wire.Neighbour(
                name=event.worker, host=event.chain_host or event.host, port=event.chain_port
            )

    # ---- rollouts ------------------------------------------------------------------------------------------

    def _start_group(self, action: actions.StartGroup) -> None:
        starts = []
        for start in action.starts:
            self.tokens.start(start.trajectory, start.attempt, action.group, start.resume)
            tokens, logprobs = self.tokens.prefix(start.trajectory) if start.resume else (b"", b"")
            starts.append(
                wire.TrajectoryStart(
                    trajectory=start.trajectory,
                    attempt=start.attempt,
                    seed=start.seed,
                    prefix_tokens=tokens,
                    prefix_logprobs=logprobs,
                    score_only=start.score_only,
                )
            )
        prompt = self._prompts.prompt(action.prompt)
        message = wire.AssignGroup(group=action.group, version=action.version, prompt=prompt, starts=starts)
        self._channels.send(action.worker, message, action.cause)

    def _abort(self, action: actions.AbortAttempts) -> None:
        message = wire.Abort(trajectories=action.trajectories, attempts=action.attempts)
        self._channels.send(action.worker, message, action.cause)

    def _pull(self, action: actions.PullWeights) -> None:
        assert action.source == "relay", "settings_of leaves checkpoint_pulls off"
        message = wire.Refresh(version=action.version, digest=action.digest)
        self._channels.send(action.worker, message, action.cause)

    def _evaluate(self, action: actions.RunEvaluation) -> None:
        message = wire.Evaluate(
            evaluation=action.evaluation, version=action.version, prompts=list(self._prompts.held_out)
        )
        self._channels.send(action.worker, message, action.cause)

    def _reconfigure(self, action: actions.ReconfigureReplica) -> None:
        message = wire.Reconfigure(flush_interval_s=action.flush_interval_s)
        self._channels.send(action.worker, message, action.cause)

    def _stop_worker(self, action: actions.StopWorker) -> None:
        if action.lost:
            text = f"{action.worker} was lost: {action.reason}"
            self._raise_alarm(actions.RaiseAlarm(cause=action.cause, name="worker-lost", text=text))
        self._channels.fence(action.worker, action.incarnation, action.reason)
        if action.lost:
            self._stop_process(action.worker)

    # ---- trainer -------------------------------------------------------------------------------------------

    def _to_trainer(self, message: wire.Message, cause: int) -> None:
        for worker in self._runtime.core.state.trainer.ranks:
            self._channels.send(worker, message, cause)

    def _publish(self, action: actions.PublishVersion) -> None:
        collector = self.relay_addresses.get(action.relay) if action.relay else None
        order = wire.Publish(version=action.version, publication=action.publication, collector=collector)
        self._to_trainer(order, action.cause)

    def _arrange_chain(self, action: actions.ArrangeChain) -> None:
        """A relay that is alone on one host listens to no other: there is no link to make."""
        logger.info("relays.arranged", epoch=action.epoch, order=action.order, master=action.master)
        for at, worker in enumerate(action.order):
            if worker in self.relay_addresses:
                upstream = action.order[at - 1] if at else None
                downstream = self.relay_addresses.get(action.order[at + 1]) if at + 1 < len(action.order) else None
                place = wire.ArrangeChain(
                    epoch=action.epoch, upstream=upstream, downstream=downstream, num_relays=len(action.order)
                )
                self._channels.send(worker, place, action.cause)

    def _retain(self, action: actions.RetainVersions) -> None:
        self._channels.send(action.worker, wire.RetainVersions(versions=action.versions), action.cause)

    def _train(self, action: actions.StartTrainStep) -> None:
        rows = [
            wire.BatchRow(
                trajectory=row.trajectory,
                group=row.group,
                behavior_version=row.behavior_version,
                num_prompt_tokens=row.num_prompt_tokens,
                num_tokens=row.num_tokens,
                reward=row.reward,
            )
            for row in action.rows
        ]
        self._to_trainer(wire.StartStep(step=action.step, attempt=action.attempt, rows=rows), action.cause)

    def _save(self, action: actions.SaveCheckpoint) -> None:
        path = self._checkpoints / f"step-{action.step}"
        self._log.write(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)",
            (action.step, str(path), action.data_state, None),
        )
        message = wire.SaveCheckpoint(step=action.step, path=str(path), data_state=action.data_state)
        self._to_trainer(message, action.cause)

    def on_checkpoint_saved(self, step: int) -> None:
        """Note it, and delete the checkpoints that are not wanted any more."""
        self._log.write("UPDATE checkpoints SET saved_at = ? WHERE step = ?", (time.time(), step))
        found = {checkpoints.step_of(path): path for path in checkpoints.complete(self._checkpoints)}
        for old in checkpoints.superseded(found, self._keep_last, self._keep_every):
            self._log.write("UPDATE checkpoints SET data_state = NULL WHERE step = ?", (old,))
            asyncio.get_running_loop().run_in_executor(None, checkpoints.delete, found[old])  # large files take seconds

    # ---- sampler -------------------------------------------------------------------------------------------

    def _ask_sampler(self, action: actions.AskSampler) -> None:
        self._runtime.post(self.samplers.ask(action))

    # ---- records -------------------------------------------------------------------------------------------

    def _record(self, action: actions.RecordTrajectories) -> None:
        for statement, row in trajectoryrows.statements(action.trajectories, self._runtime.core.state.branches):
            self._log.write(statement, row)

    def _record_lost(self, action: actions.RecordLostSteps) -> None:
        self._log.write(
            "UPDATE trajectories SET dropped = ? WHERE step BETWEEN ? AND ? AND trained_at IS NOT NULL",
            (action.reason, action.first, action.last),
        )

    def _forget(self, action: actions.ForgetTokens) -> None:
        if action.step and self._committed is not None:
            self._committed(action.step, action.trajectories)
        else:
            self.tokens.forget(action.trajectories)

    def _raise_alarm(self, action: actions.RaiseAlarm) -> None:
        self._log.write("INSERT INTO alarms VALUES (?, ?, ?)", (self._runtime.now(), action.name, action.text))
        self._alarm(action.name, action.text)

    def _on_breakpoint(self, action: actions.BreakpointHit) -> None:
        text = f"{action.breakpoint} ({action.where}): {action.text}; the run is held until an operator lets it go"
        self._raise_alarm(actions.RaiseAlarm(cause=action.cause, name="breakpoint", text=text))
