"""A recorded world (`tests.replay_world`) whose `run.db` has all tables: its events and actions go through the real telemetry, too.

Workers are not there; what they would say beside an event (tokens, waits, times) is made up here, the same for the same seed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from laminar import wire
from laminar.controller.effects import Effects
from laminar.controller.telemetry import Telemetry, Tracer
from laminar.core import actions, events, invariants
from laminar.core.settings import Settings
from laminar.ids import WorkerId
from tests import replay_world
from tests.core_world import World, settings

START = 1_800_000_000.0  # run time of the first event, seconds since the epoch
EVENTFUL_HOW = {"faults": 0.05, "replicas": 4}
RECORDED = (actions.RecordTrajectories, actions.RecordLostSteps, actions.RaiseAlarm, actions.SaveCheckpoint)


class Nobody:
    """Channels on which nobody listens, and a token store that is never read."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


EVENTFUL = settings(
    steps=8, checkpoint_every=3, group_size=4, batch_groups=3, buffer_groups_max=24, local_batch_groups=6, evaluate=True,
    restarts_max=3, trainer_restarts_max=3, repack_interval_s=0.5,
)  # fmt: skip


class LongTailWorld(World):
    """Lengths of a long tail, so that there is something to repack."""

    def _progress(self, name: str) -> list[actions.AnyAction]:
        lengths, finish, reward, fail = {}, [], {}, {}
        for t in self.core.state.replicas[name].attempts:  # type: ignore[index]
            record = self.core.state.trajectories[t]
            if record.finish_reason:
                reward[t] = float(self.random.random() < 0.3 + 0.05 * self.core.state.trainer.step)
                continue
            lengths[t] = record.num_tokens + self.random.randint(2, 6)
            if lengths[t] >= (90 if t % 5 == 0 else 6 + t * 37 % 40):
                finish.append(t)
            elif self.random.random() < self.faults / 20:
                fail[t] = self.random.choice([("infra", "engine_error"), ("data", "reward_error")])
        for t in [*finish, *fail]:
            self.engine.get(name, {}).pop(t, None)  # type: ignore[call-overload]
        kv_tokens = sum(5 + n for t, n in lengths.items() if t not in finish and t not in fail)
        return self.report(name, lengths, finish, reward, fail, kv_tokens=kv_tokens, running=len(lengths) - len(finish))


@cache
def eventful_seed() -> int:
    """The first with which, under EVENTFUL and EVENTFUL_HOW, something is moved, dropped and restored, and all steps are done."""
    for seed in range(100):
        world = LongTailWorld(EVENTFUL, seed, **EVENTFUL_HOW)
        world.at = START
        world.run()
        state = world.core.state
        if (
            state.finished == "completed"
            and state.repack.num_moves > 1
            and state.branches
            and state.ledger.tokens.dropped
        ):
            return seed
    raise AssertionError("no seed makes an eventful run any more")


class RecordedWorld(LongTailWorld, replay_world.RecordedWorld):
    """Needs a running loop. `directory` gets `run.db` and `metrics.jsonl`."""

    BEGAN = START

    def boot(self, *, continues: bool) -> None:
        super().boot(continues=continues)
        self.log_file, self.runtime = self.logs[-1], self.runtimes[-1]
        self.runtime._set_timer = lambda: None  # type: ignore[method-assign]
        self.telemetry = Telemetry(self.runtime, self.log_file, self.directory / "metrics.jsonl")
        self.alarms: list[str] = []
        self.reported: dict[WorkerId, float] = {}
        self.ended: dict[str, float] = {}
        self.effects = Effects(
            runtime=self.runtime, channels=Nobody(), log=self.log_file, tokens=Nobody(), prompts=Nobody(),  # type: ignore[arg-type]
            checkpoints_at=self.directory / "checkpoints", keep_last=2, sampler=None,
            stop_process=lambda worker: None, start_process=lambda worker: None, alarm=self._alarm,
        )  # fmt: skip
        self.runtime.observe = self._observe
        self.runtime.perform = self._perform

    def send(self, event: events.AnyEvent, after: float = 0.0) -> list[actions.AnyAction]:
        """As `World.send`, by way of the runtime."""
        self._say(event)
        new = super().send(event, after)
        assert not self.runtime.crashed
        invariants.check(self.core.state)
        return new

    async def finish(self, outcome: str) -> None:
        """Everything is on disk. Without `outcome` the controller was killed."""
        await self.close(outcome)
        self.telemetry.close()
        assert self.log_file.failure is None

    def _alarm(self, name: str, text: str) -> None:
        self.alarms.append(name)
        self.telemetry.totals.on_alarm(name)

    def _observe(self, event: events.AnyEvent) -> None:
        self.telemetry.observe(event)
        if isinstance(event, events.CheckpointSaved):
            self.effects.on_checkpoint_saved(event.step)

    def _perform(self, action: actions.AnyAction) -> None:
        self.new.append(action)
        self.telemetry.on_action(action)
        if isinstance(action, RECORDED):
            self.effects.perform(action)

    # ---- what workers say beside events --------------------------------------------------------------------

    def _say(self, event: events.AnyEvent) -> None:
        match event:
            case events.ReplicaReported():
                self.telemetry.on_message(event.worker, self._report(event))
            case events.ReplicaRefreshed():
                refreshed = wire.Refreshed(
                    version=event.version, digest=event.digest, wait_s=self._lasted(event.worker, 0.1)
                )
                self.telemetry.on_message(event.worker, refreshed)
            case events.StepFinished():
                done = wire.StepDone(step=event.step, attempt=event.attempt, metrics=event.metrics)
                self.telemetry.on_message("trainer-0/0", done)  # type: ignore[arg-type]
            case events.ShardsWritten():
                written = wire.ShardsWritten(version=event.version, stall_s=self._lasted("publish", 0.1))
                self.telemetry.on_message("trainer-0/0", written)  # type: ignore[arg-type]
            case events.VersionReady():
                ready = wire.VersionReady(version=event.version, digest=event.digest, num_bytes=event.num_bytes)
                self.telemetry.on_message("relay-0", ready)  # type: ignore[arg-type]
            case events.CheckpointSaved():
                saved = wire.CheckpointSaved(step=event.step, path="", seconds=0.2, stall_s=0.05)
                self.telemetry.on_message("trainer-0/0", saved)  # type: ignore[arg-type]

    def _lasted(self, what: str, seconds: float) -> float:
        """So long, unless the last of its kind ended later."""
        seconds = min(seconds, self.at - self.ended.get(what, START))
        self.ended[what] = self.at
        return seconds

    def _report(self, event: events.ReplicaReported) -> wire.RolloutReport:
        replica = self.core.state.replicas.get(event.worker)
        num_new = 4 * (len(event.num_tokens) // 4)
        since = max(self.at - 0.25, self.reported.get(event.worker, START))
        self.reported[event.worker], interval_s = self.at, self.at - since
        return wire.RolloutReport(
            version=replica.version if replica else None,
            trajectories=event.trajectories, attempts=event.attempts, num_tokens=event.num_tokens, num_new=b"",
            tokens=bytes(num_new), logprobs=bytes(num_new), failed=[
                wire.Failed(trajectory=f.trajectory, attempt=f.attempt, kind=f.kind, reason=f.reason) for f in event.failed
            ],
            decode_busy_s=0.8 * interval_s if num_new else 0.0, interval_s=interval_s, since=since,
        )  # fmt: skip

    def _on_StartTrainStep(self, action: actions.StartTrainStep) -> None:
        super()._on_StartTrainStep(action)
        metrics = {
            "timing/step_s": 0.002 + 0.0005 * action.step,  # steps of this world are as short as that
            "reward/mean": 0.4 + 0.05 * action.step,
            "reward/std": 0.2,
            "num_tokens/trained": float(sum(row.num_tokens for row in action.rows)),
        }
        self.pending.pop()  # the same without metrics
        self._of_launch(events.StepFinished(step=action.step, attempt=action.attempt, metrics=metrics))


@asynccontextmanager
async def recorded(directory: Path, settings_: Settings, seed: int, **how: Any) -> AsyncIterator[RecordedWorld]:
    """A world whose log is written; at the end everything is on disk, as of a controller that was killed if it did not finish."""
    world = RecordedWorld(directory, settings_, seed, **how)
    try:
        yield world
    finally:
        await world.finish(outcome=world.core.state.finished)


@asynccontextmanager
async def eventful(directory: Path, tracer: Tracer | None = None) -> AsyncIterator[RecordedWorld]:
    """A run with some of everything, at its end."""
    async with recorded(directory, EVENTFUL, eventful_seed(), **EVENTFUL_HOW) as world:
        world.telemetry.tracer = tracer
        world.run()
        yield world
