"""A seeded world around the core for tests: it answers every action, in random order, with random losses."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from laminar import wire
from laminar.core import actions, events, health, invariants
from laminar.core.engine import Core
from laminar.core.settings import Settings
from laminar.core.versions import PUBLISH_TRIES_MAX
from laminar.ids import TrajectoryId, Version, WorkerId
from tests import core_operator


def settings(**changes: Any) -> Settings:
    """Small defaults: 2 groups of 2 per batch, 3 steps."""
    base = dict(
        num_prompts=50, steps=3, group_size=2, batch_groups=2, local_batch_groups=2, buffer_groups_max=6, evaluate=False
    )
    return Settings(**(base | changes))


class Driver:
    """Stamps events, checks the invariants after each, keeps all actions."""

    def __init__(self, settings_: Settings, core: Core | None = None) -> None:
        self.core = core or Core(settings_)
        self.actions: list[actions.AnyAction] = []
        self.at = self.core.state.at
        self.seq = self.core.state.seq
        self.log: list[bytes] = []

    def send(self, event: events.AnyEvent, after: float = 0.0) -> list[actions.AnyAction]:
        self.at += after
        self.seq += 1
        stamped = msgspec.structs.replace(event, seq=self.seq, at=self.at)
        self.log.append(msgspec.msgpack.encode(stamped))
        new = self.core.handle(stamped)
        invariants.check(self.core.state)
        self.actions += new
        return new

    def all(self, kind: type) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]

    def join(self, name: str, incarnation: int = 1, requests: int = 64, host: str = "h") -> list[actions.AnyAction]:
        return self.send(
            events.ReplicaJoined(
                worker=WorkerId(name),
                incarnation=incarnation,
                host=host,
                num_requests_max=requests,
                kv_tokens_max=10_000,
            )
        )

    def start(self, *replicas: str, step: int = 0, boot: int = 1, branch_floor: int = 0) -> None:
        """Everything up to the first publication: v0 is ready, the replicas hold it."""
        self.send(events.RunStarted(boot=boot, branch_floor=branch_floor))
        self.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
        self.send(
            events.TrainerRankReady(worker=WorkerId("trainer-0/0"), incarnation=1, rank=0, world_size=1, step=step)
        )
        self.ready(self.all(actions.PublishVersion)[-1].version)
        for replica in replicas:
            self.join(replica)
            self.refreshed(replica)

    def relay(self, name: str, incarnation: int = 1, host: str = "", rack: str = "") -> list[actions.AnyAction]:
        return self.send(events.RelayJoined(worker=WorkerId(name), incarnation=incarnation, host=host, rack=rack))

    def held(self, relay: str, version: Version) -> list[actions.AnyAction]:
        """Another relay has received the version."""
        return self.send(events.VersionHeld(worker=WorkerId(relay), version=version, digest=f"d{version}"))

    def rank(
        self, rank: int = 0, incarnation: int = 1, world_size: int = 1, step: int = 0, **restored: Any
    ) -> list[actions.AnyAction]:
        return self.send(
            events.TrainerRankReady(
                worker=WorkerId(f"trainer-0/{rank}"),
                incarnation=incarnation,
                rank=rank,
                world_size=world_size,
                step=step,
                **restored,
            )
        )

    def lost(self, name: str, incarnation: int | None = None) -> list[actions.AnyAction]:
        """Default: the present incarnation."""
        state = self.core.state
        if incarnation is None:
            replica = state.replicas.get(WorkerId(name)) or state.relays.get(WorkerId(name))
            incarnation = replica.incarnation if replica else state.trainer.ranks.get(WorkerId(name), 1)
        return self.send(events.WorkerLost(worker=WorkerId(name), incarnation=incarnation, reason="killed"))

    def restore_trainer(self, step: int, incarnation: int = 2) -> list[actions.AnyAction]:
        """The trainer dies and a new launch restores `step`.

        These settings restart no trainer: the loss ends the run, so the reason to stop is taken back here.
        """
        self.lost("trainer-0/0")
        self.core.state.stopping, self.core.state.finished, self.core.state.ok = "", "", True
        return self.rank(incarnation=incarnation, step=step)

    def saved(self) -> list[actions.AnyAction]:
        """The checkpoint that was asked for last is complete."""
        return self.send(events.CheckpointSaved(step=self.all(actions.SaveCheckpoint)[-1].step))

    def fill(self, *names: str) -> list[actions.AnyAction]:
        """Everything that the replicas generate now is completed."""
        return [action for name in names for action in self.complete_all(name)]

    def ready(self, version: Version) -> list[actions.AnyAction]:
        return self.send(events.VersionReady(version=version, digest=f"d{version}", num_bytes=1))

    def unpublishable(self, version: Version, reason: str) -> list[actions.AnyAction]:
        """Each try to publish it fails, until it is given up."""
        new = []
        for _ in range(PUBLISH_TRIES_MAX):
            new += self.send(events.VersionLost(version=version, reason=reason))
            if at := self.core.state.versions[-1].retry_at:
                new += self.send(events.TimerFired(), after=at - self.at)
        return new

    def dropped(self, version: Version, relay: str = "relay-0") -> list[actions.AnyAction]:
        """The relay has recycled the slot of the version."""
        return self.send(events.VersionDropped(worker=WorkerId(relay), version=version))

    def refreshed(self, name: str) -> list[actions.AnyAction]:
        target = self.core.state.replicas[WorkerId(name)].target
        assert target is not None
        return self.send(
            events.ReplicaRefreshed(
                worker=WorkerId(name),
                incarnation=self.core.state.replicas[WorkerId(name)].incarnation,
                version=target,
                digest=f"d{target}",
                wait_s=0.1,
            )
        )

    def report(
        self,
        name: str,
        lengths: dict[int, int] | None = None,
        finish: list[int] = (),  # type: ignore[assignment]
        reward: dict[int, float] | None = None,
        fail: dict[int, tuple[str, str]] | None = None,
        attempts: dict[int, int] | None = None,
        aborted: list[int] = (),  # type: ignore[assignment]
        kv_tokens: int = 0,
        running: int = 0,
        waiting: int = 0,
        busy_s: float = 0.0,
    ) -> list[actions.AnyAction]:
        """One report; attempts default to the current ones."""
        replica = self.core.state.replicas[WorkerId(name)]
        lengths = lengths or {}

        def attempt(t: int) -> int:
            return (attempts or {}).get(t) or replica.attempts.get(TrajectoryId(t), 1)

        records = self.core.state.trajectories
        finished = [
            events.FinishedAttempt(
                trajectory=TrajectoryId(t),
                attempt=attempt(t),
                finish_reason="stop",
                num_prompt_tokens=5,
                num_tokens=lengths.get(t, records[TrajectoryId(t)].num_tokens),
                queued_s=0.1,
                decode_s=0.2,
            )
            for t in finish
        ]
        rewarded = [
            events.RewardedAttempt(trajectory=TrajectoryId(t), attempt=attempt(t), reward=r, parts={})
            for t, r in (reward or {}).items()
        ]
        failed = [
            events.FailedAttempt(trajectory=TrajectoryId(t), attempt=attempt(t), kind=kind, reason=reason)
            for t, (kind, reason) in (fail or {}).items()
        ]
        return self.send(
            events.ReplicaReported(
                worker=WorkerId(name),
                incarnation=replica.incarnation,
                trajectories=wire.pack_i64(list(lengths)),
                attempts=wire.pack_i32([attempt(t) for t in lengths]),
                num_tokens=wire.pack_i32(list(lengths.values())),
                finished=finished,
                rewarded=rewarded,
                failed=failed,
                aborted=[events.AbortedAttempt(trajectory=TrajectoryId(t), attempt=attempt(t)) for t in aborted],
                kv_tokens=kv_tokens,
                num_running=running,
                num_waiting=waiting,
                busy_s=busy_s,
            )
        )

    def generating(self, name: str) -> list[int]:
        """Trajectories at which the replica is, in order."""
        return list(self.core.state.replicas[WorkerId(name)].attempts)

    def complete_all(self, name: str, reward: float = 1.0) -> list[actions.AnyAction]:
        """Everything on the replica finishes with 3 tokens and is rewarded."""
        here = self.generating(name)
        return self.report(name, {t: 3 for t in here}, finish=here, reward={t: reward for t in here})

    def step_done(self) -> list[actions.AnyAction]:
        running = self.all(actions.StartTrainStep)[-1]
        return self.send(events.StepFinished(step=running.step, attempt=running.attempt))


class World(Driver):
    """Lives until the run ends: every action gets its terminal event, in an order and with faults drawn from the seed."""

    def __init__(self, settings_: Settings, seed: int, faults: float = 0.0, replicas: int = 3) -> None:
        super().__init__(settings_)
        self.random = random.Random(seed)
        self.faults = faults
        self.pending: list[Callable[[], Any]] = []
        self.incarnation = 1
        self.num_replicas = replicas
        self.trained: list[tuple[int, tuple[int, ...]]] = []
        self.started: dict[int, int] = {}
        self.engine: dict[WorkerId, dict[int, int]] = {}
        """What each engine really generates, by the actions it was given: trajectory -> attempt."""
        self.stop_after = 0
        """Number of events after which the operator stops the run; 0 = never."""
        self.restore_each = 0
        """After so many events the core is replaced by one restored from its snapshot; 0 = never."""
        self.controller_crashes = False
        """Now and then the controller dies, and another goes on with its state."""
        self.disk_fills = False
        """Nothing can be written now and then."""
        self.launch = 1
        """Incarnation of the trainer's present launch; what an older one had to say is never said."""
        self.checkpoint = 0
        """Newest complete checkpoint on disk."""
        self.saves: dict[int, bytes] = {}
        """What the controller put into each checkpoint on disk."""
        self.checkpoints_break = False
        """Now and then the newest checkpoint cannot be restored, and an older one is, if there is one."""
        self.attempted: dict[tuple[int, int], None] = {}
        self.lost_rows: list[tuple[int, ...]] = []
        """What steps had trained that were lost with their checkpoints."""
        self.hung: dict[WorkerId, int] = {}
        """Incarnations whose engine answers and does not generate any more."""
        self.operator = False
        """Somebody wishes for all that an operator can (`core_operator`), and applies or skips held decisions."""

    def run(self, events_max: int = 20_000) -> None:
        self._take(self._begin())
        while not self.core.state.finished:
            assert self.seq < events_max, "the run does not end"
            self.at += self.random.random() * 0.1
            if self.seq == self.stop_after:
                self._take(self.send(events.StopRequested(reason="asked")))
                continue
            if self.restore_each and self.seq % self.restore_each == 0:
                self.core = Core.restore(self.core.configured, self.core.snapshot())
            self._take(self._next())

    def _begin(self) -> list[actions.AnyAction]:
        out = list(self.send(events.RunStarted(boot=1)))
        out += self.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
        out += self.send(
            events.TrainerRankReady(worker=WorkerId("trainer-0/0"), incarnation=1, rank=0, world_size=1, step=0)
        )
        for index in range(self.num_replicas):
            out += self.join(f"r{index}")
        return out

    def _next(self) -> list[actions.AnyAction]:
        deadline = self.core.next_deadline()
        busy = [name for name, replica in self.core.state.replicas.items() if replica.attempts]
        check_at = self.core.state.health_check_at
        if check_at and check_at <= self.at:
            return self.send(events.TimerFired())
        if self.core.state.replicas and self.random.random() < self.faults:
            return self._operate() if self.operator and self.random.random() < 0.5 else self._fault()
        if self.core.state.held and self.random.random() < 0.5:
            return self._resolve()
        if self.core.state.holds and self.random.random() < 0.1:
            return self._release()
        choices: list[Callable[[], Any]] = []
        if self.pending:
            choices.append(lambda: self.pending.pop(self.random.randrange(len(self.pending)))())
        choices += [lambda name=name: self._progress(name) for name in busy]
        if not choices and self.core.state.held:
            return self._resolve()
        if not choices and self.core.state.holds:
            return self._release()
        if not choices and self.core.state.skipped:
            return self.report(next(iter(self.core.state.replicas)))
        if not choices and self.core.state.storage_failure and not (deadline and self.random.random() < 0.5):
            return self.send(events.StorageRecovered())
        if not choices:
            assert deadline is not None, f"nothing can happen any more: {self.core.state}"
            return self.send(events.TimerFired(), after=max(0.0, deadline - self.at))
        return self.random.choice(choices)() or []

    def _progress(self, name: str) -> list[actions.AnyAction]:
        replica = self.core.state.replicas[WorkerId(name)]
        hangs = self.hung.get(WorkerId(name)) == replica.incarnation
        lengths, finish, reward, fail = {}, [], {}, {}
        for t in replica.attempts:
            record = self.core.state.trajectories[t]
            draw = self.random.random()
            if record.finish_reason:
                if draw < 0.5:
                    reward[t] = self.random.random()
                elif draw < 0.5 + self.faults:
                    fail[t] = ("infra", "reward_timeout")
                continue
            if hangs:
                continue
            lengths[t] = record.num_tokens + self.random.randint(0, 3)
            if draw < 0.3:
                finish.append(t)
            elif draw < 0.3 + self.faults:
                fail[t] = self.random.choice([("infra", "engine_error"), ("data", "reward_error")])
        engine = self.engine.get(WorkerId(name), {})
        for t in [*finish, *fail]:
            engine.pop(t, None)
        kv_tokens = sum(5 + n for t, n in lengths.items() if t not in finish and t not in fail)
        running = len(engine)
        return self.report(name, lengths, finish, reward, fail, kv_tokens=kv_tokens, running=running)

    def _fault(self) -> list[actions.AnyAction]:
        state = self.core.state
        name = self.random.choice(list(state.replicas))
        if self.core.settings.trainer_restarts_max and state.trainer.ready and self.random.random() < 0.1:
            return self._lose_trainer()
        if self.controller_crashes and self.random.random() < 0.1:
            return self._crash_controller()
        if self.disk_fills and self.random.random() < 0.2:
            return self.send(
                events.StorageRecovered() if state.storage_failure else events.StorageFailed(reason="full")
            )
        kind = self.random.randrange(4 if self.core.settings.progress_timeout_s else 3)
        replica = state.replicas[name]
        if kind == 3 and len(state.replicas) > 1:
            self.hung[name] = replica.incarnation
            self.pending.append(partial(self._wake_up, name, replica.incarnation))
            return self.report(name)
        if kind == 0 and len(state.replicas) > 1:
            return self._kill(name, replica.incarnation)
        if kind == 1 and name not in state.silent:
            out = self.send(events.WorkerDisconnected(worker=name, incarnation=replica.incarnation))
            self.pending.append(lambda: self.send(events.WorkerReturned(worker=name, incarnation=replica.incarnation)))
            return out
        return self.send(events.TimerFired())

    def _kill(self, name: WorkerId, incarnation: int) -> list[actions.AnyAction]:
        """A replica; another process takes its place, if the core does not see to it."""
        if name not in self.core.state.replicas or self.core.state.replicas[name].incarnation != incarnation:
            return []
        out = self.send(events.WorkerLost(worker=name, incarnation=incarnation, reason="killed"))
        if not self.core.settings.restarts_max:
            self.incarnation += 1
            self.pending.append(partial(self.join, name, self.incarnation))
        return out

    def _crash_controller(self) -> list[actions.AnyAction]:
        """All workers have to come back to the next one; some died meanwhile."""
        away_s = self.random.random() * 100.0
        self.core = Core.restore(self.core.configured, self.core.snapshot())
        state = self.core.state
        out = self.send(events.ControllerRestarted(boot=state.boot + 1, away_s=away_s), after=away_s)
        incarnations = {
            w: r.incarnation for w, r in [*state.replicas.items(), *state.relays.items()]
        } | state.trainer.ranks
        for number, (worker, incarnation) in enumerate(incarnations.items()):
            if worker in state.replicas and number and self.random.random() < 0.2:
                self.pending.append(partial(self._kill, worker, incarnation))
            else:
                self.pending.append(partial(self.send, events.WorkerReturned(worker=worker, incarnation=incarnation)))
        return out

    def _lose_trainer(self) -> list[actions.AnyAction]:
        trainer, launch = self.core.state.trainer, self.launch
        self.launch += 1
        if trainer.saving >= 0 and self.random.random() < 0.5:
            self._save(trainer.saving)  # complete, but nobody heard of it
        return self.send(events.WorkerLost(worker=WorkerId("trainer-0/0"), incarnation=launch, reason="killed"))

    def _of_launch(self, event: events.AnyEvent) -> None:
        """The present launch will say so, if it lives."""
        launch = self.launch

        def say() -> list[actions.AnyAction]:
            if launch != self.launch:
                return []
            if isinstance(event, events.CheckpointSaved):
                self._save(event.step)
            return self.send(event)

        self.pending.append(say)

    def _start_trainer(self, launch: WorkerId) -> None:
        if self.random.random() < 0.3:
            event = events.WorkerLost(worker=launch, incarnation=0, reason="did not start")
            self.pending.append(lambda: self.send(event))
        else:
            self.pending.append(self._restore_trainer)

    def _save(self, step: int) -> None:
        self.checkpoint = step
        self.saves[step] = next(a.data_state for a in reversed(self.all(actions.SaveCheckpoint)) if a.step == step)

    def _restore_trainer(self) -> list[actions.AnyAction]:
        damaged = []
        while self.checkpoints_break and len(self.saves) > 1 and self.random.random() < 0.5:
            del self.saves[self.checkpoint]
            damaged.append(f"step-{self.checkpoint}: damaged")
            self.checkpoint = max(self.saves)
        if self.core.state.trainer.ranks:
            return []
        self._lose_steps()
        return self.rank(
            incarnation=self.launch,
            step=self.checkpoint,
            damaged=damaged,
            data_state=self.saves.get(self.checkpoint, b""),
        )

    def _lose_steps(self) -> None:
        """What the core has to make of it: committed steps are lost, leased ones take their numbers."""
        last = self.core.state.trainer.checkpoint
        by = max(0, last - self.checkpoint)
        self.lost_rows += [rows for step, rows in self.trained if last - by < step <= last]
        self.trained = [
            (step - by if step > last else step, rows) for step, rows in self.trained if not last - by < step <= last
        ]

    def _wake_up(self, name: WorkerId, incarnation: int) -> list[actions.AnyAction]:
        """Half of those that hang go on some time, if they are still there."""
        if self.hung.get(name) == incarnation and self.random.random() < 0.5:
            del self.hung[name]
        return []

    def _operate(self) -> list[actions.AnyAction]:
        return self.send(core_operator.wish(self.core, self.random))

    def _resolve(self) -> list[actions.AnyAction]:
        verdict = self.random.choice(["apply", "apply", "skip"])
        number = self.random.choice(list(self.core.state.held))
        return self.send(events.DecisionResolved(decision=number, verdict=verdict))

    def _release(self) -> list[actions.AnyAction]:
        name = self.random.choice(["all", *self.core.state.holds])
        return self.send(events.HoldChanged(pass_name=name, held=False))

    def _take(self, new: list[actions.AnyAction]) -> None:
        for action in new:
            answer = getattr(self, f"_on_{type(action).__name__}", None)
            if answer:
                answer(action)

    def _on_PublishVersion(self, action: actions.PublishVersion) -> None:
        if self.core.settings.trainer_restarts_max:
            self._of_launch(events.ShardsWritten(version=action.version, stall_s=0.1))
        lost = self.random.random() < self.faults
        event = (
            events.VersionLost(version=action.version, reason="test")
            if lost
            else events.VersionReady(version=action.version, digest=f"d{action.version}", num_bytes=1)
        )
        self.pending.append(lambda: self.send(event))

    def _on_StartGroup(self, action: actions.StartGroup) -> None:
        replica = self.core.state.replicas[action.worker]
        assert health.is_healthy(self.core.state, replica), f"{action.worker} is given work although it is not healthy"
        for start in action.starts:
            assert start.attempt > self.started.get(start.trajectory, 0), "an attempt was handed out twice"
            pinned = self.core.settings.pinned
            assert not (pinned and (start.resume or start.score_only)), "a pinned trajectory goes on where it never was"
            self.started[start.trajectory] = start.attempt
            if not start.score_only:
                self.engine.setdefault(action.worker, {})[start.trajectory] = start.attempt

    def _on_AbortAttempts(self, action: actions.AbortAttempts) -> None:
        """Attempts that the core has voided end at once; those that move end with a word, if nothing else ends them first."""
        for trajectory, attempt in zip(action.trajectories, action.attempts, strict=True):
            record = self.core.state.trajectories.get(trajectory)
            assert not (record and record.moving_to and self.core.settings.pinned), "a pinned trajectory moves"
            if record and record.moving_to and record.attempt == attempt:
                self.pending.append(partial(self._let_go, action.worker, trajectory, attempt))
            else:
                self.engine.get(action.worker, {}).pop(trajectory, None)

    def _let_go(self, worker: WorkerId, trajectory: TrajectoryId, attempt: int) -> list[actions.AnyAction]:
        if self.engine.get(worker, {}).get(trajectory) != attempt:
            return []
        if self.hung.get(worker) == self.core.state.replicas[worker].incarnation:
            self.pending.append(partial(self._let_go, worker, trajectory, attempt))
            return []
        del self.engine[worker][trajectory]
        more = self.core.state.trajectories[trajectory].num_tokens + self.random.randint(0, 2)
        return self.report(worker, {trajectory: more}, aborted=[trajectory])

    def _on_StartWorker(self, action: actions.StartWorker) -> None:
        if action.worker == "trainer-0":
            self._start_trainer(action.worker)
            return
        self.incarnation += 1
        incarnation = self.incarnation
        if self.random.random() < 0.3:
            event = events.WorkerLost(worker=action.worker, incarnation=0, reason="did not start")
            self.pending.append(lambda: self.send(event))
        else:
            self.pending.append(lambda: self.join(action.worker, incarnation))

    def _on_StopWorker(self, action: actions.StopWorker) -> None:
        self.engine.pop(action.worker, None)
        if not action.lost and action.worker.startswith("r") and not action.worker.startswith("relay"):
            self.incarnation += 1
            self.pending.append(partial(self.join, action.worker, self.incarnation))
        if self.hung.pop(action.worker, None) == action.incarnation and not self.core.settings.restarts_max:
            self.incarnation += 1
            self.pending.append(partial(self.join, action.worker, self.incarnation))

    def _on_PullWeights(self, action: actions.PullWeights) -> None:
        assert not self.engine.get(action.worker), "weights are pulled under running requests"
        incarnation = self.core.state.replicas[action.worker].incarnation
        kind = events.ReplicaRefreshed
        extra: dict[str, Any] = {"digest": action.digest, "wait_s": 0.1}
        if self.random.random() < self.faults / 4:
            kind, extra = events.ReplicaRefreshFailed, {"reason": "test"}
        self.pending.append(
            lambda: self.send(kind(worker=action.worker, incarnation=incarnation, version=action.version, **extra))
        )

    def _on_StartTrainStep(self, action: actions.StartTrainStep) -> None:
        rows = tuple(row.trajectory for row in action.rows)
        assert (action.step, action.attempt) not in self.attempted, "an attempt of a step was handed out twice"
        self.attempted[action.step, action.attempt] = None
        undone = [trained for trained in self.trained if trained[0] == action.step]
        assert undone in ([], [(action.step, rows)]), "a step is redone from other groups"
        if not undone:
            self.trained.append((action.step, rows))
        self._of_launch(events.StepFinished(step=action.step, attempt=action.attempt))

    def _on_SaveCheckpoint(self, action: actions.SaveCheckpoint) -> None:
        event = events.CheckpointSaved(step=action.step)
        if self.random.random() < self.faults / 2:
            event = events.CheckpointFailed(step=action.step, reason="test")
        self._of_launch(event)

    def _on_RunEvaluation(self, action: actions.RunEvaluation) -> None:
        if self.random.random() < self.faults:
            self.pending.append(lambda: self.send(events.EvaluationFailed(evaluation=action.evaluation, reason="test")))
            return
        self.pending.append(
            lambda: self.send(events.EvaluationFinished(evaluation=action.evaluation, accuracy=0.5, num_prompts=10))
        )

    def _on_AskSampler(self, action: actions.AskSampler) -> None:
        newest = [group.id for group in reversed(action.view.groups)][: action.num_groups]
        if self.random.random() < self.faults:
            newest = self.random.choice([newest[:-1], []])
        self.pending.append(lambda: self.send(events.SamplerAnswered(request=action.request, groups=newest)))


def of(new: list[actions.AnyAction], kind: type) -> list[Any]:
    """The actions of one kind."""
    return [action for action in new if isinstance(action, kind)]


def trace(world: Driver) -> bytes:
    """All actions as bytes."""
    return msgspec.msgpack.encode(world.actions)
