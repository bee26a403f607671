"""The trainer's side of the simulated world: steps, publications, checkpoints, the sampler, and the records kept.

Invariants: no trajectory is trained twice, except in a later attempt of the same step; that has the rows of the first.
"""

import math
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from laminar.core import actions, events, groups, training, versions
from laminar.ids import GroupId, TrajectoryId, WorkerId
from laminar.sim import queues
from laminar.sim.measure import Iteration

if TYPE_CHECKING:
    from laminar.sim.world import World

LAUNCH, RANK = WorkerId("trainer-0"), WorkerId("trainer-0/0")


class Training:
    """Commands are executed in the order sent; a publication stalls the trainer until its shards are with the master relay."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.incarnation = 1
        """Of the present launch; what an older one was about to say is never said."""
        self.restart_s = 60.0
        """From the order to start a trainer again until it has loaded its checkpoint."""
        self.checkpoint_s = 0.0
        """How long one is being written, while training goes on."""
        self.checkpoint = 0
        """Step of the newest complete one."""
        self.full = False
        """The disk takes nothing."""
        self._measured = 0
        self._rows: dict[int, list[TrajectoryId]] = {}
        self._trained: dict[TrajectoryId, tuple[int, int]] = {}
        self.free_at = 0.0
        """When the trainer has done what it was told so far."""
        self._batch_tokens: dict[int, int] = {}
        self.answers: dict[type, Callable[..., None]] = {
            actions.PublishVersion: self._on_publish_version,
            actions.StartTrainStep: self._on_start_train_step,
            actions.SaveCheckpoint: self._on_save_checkpoint,
            actions.AskSampler: self._on_ask_sampler,
            actions.RecordTrajectories: self._on_record_trajectories,
        }

    def begin_midway(self) -> None:
        """What the core's state says is under way goes on from when it began, which is before 0."""
        state, trainer, base = self.world.core.state, self.world.core.state.trainer, self.world.base
        self.free_at = -math.inf
        known = [*trainer.ranks.items(), *state.fenced.items()]
        self.incarnation = 1 + max([number for worker, number in known if worker.startswith("trainer-")], default=0)
        self.checkpoint, self._measured = max(0, trainer.checkpoint), trainer.step
        for step in state.steps.values():
            members = groups.members(state, step.groups)
            self._rows[step.step] = [trajectory.id for trajectory in members]
            if step.done:
                self._trained |= {trajectory.id: (step.step, step.attempt) for trajectory in members}
        if not trainer.ready:
            self.start()
            return
        for record in [record for record in state.versions[-1:] if record.deadline]:
            began = record.deadline - self.world.core.settings.publish_timeout_s - base
            if record.written:
                self._at(self.world.now, self.world.relays.publication(record.version))
            else:
                self._publish(actions.PublishVersion(cause=0, version=record.version), began)
        if trainer.running:
            step = state.steps[trainer.running]
            rows = [training.row(trajectory) for trajectory in groups.members(state, step.groups)]
            self._begin_step(
                actions.StartTrainStep(cause=0, step=step.step, attempt=step.attempt, rows=rows),
                max(self.free_at, trainer.running_since - base),
            )
        if trainer.saving >= 0:
            order = actions.SaveCheckpoint(cause=0, step=trainer.saving, data_state=b"")
            self._save(order, trainer.saving_since - base)

    def updates(self) -> list[Iteration]:
        """Those made, and the one that is being made, as it will have ended if the trainer lives (`num_generated` is 0)."""
        coming = [
            Iteration(step=step, at=self.free_at, num_tokens=num_tokens, num_generated=0)
            for step, num_tokens in self._batch_tokens.items()
        ]
        return [*self.world.measures.iterations, *coming]

    def crash(self) -> None:
        """A rank dies, and with it the launch and all that it did since its checkpoint."""
        died, self.incarnation = self.incarnation, self.incarnation + 1
        self.free_at = 0.0
        self.world.measures.trainer_outages.append((self.world.now, self.world.rollouts.num_generated()))
        self.world.send(events.WorkerLost(worker=RANK, incarnation=died, reason="its process ended with signal 9"))

    def start(self) -> None:
        """The launcher starts it again; its ranks load the newest checkpoint."""
        self._at(self.world.now + self.restart_s, self._join)

    def _join(self) -> None:
        self.world.measures.trainer_outages.append((self.world.now, self.world.rollouts.num_generated()))
        self.world.send(
            events.TrainerRankReady(
                worker=RANK, incarnation=self.incarnation, rank=0, world_size=1, step=self.checkpoint
            )
        )

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        """Unless the trainer dies before."""
        incarnation = self.incarnation
        self.world.at(moment, lambda: happen() if incarnation == self.incarnation else None)

    def _on_publish_version(self, action: actions.PublishVersion) -> None:
        self._publish(action, max(self.free_at, self.world.now))

    def _publish(self, action: actions.PublishVersion, begin: float) -> None:
        stall_s = self.world.cluster.publish_stall_s()
        self.free_at = begin + stall_s
        self.world.measures.queue.busy.append((begin, self.free_at))
        hangs, lost = self.world.intercept("publish_hang", action), self.world.intercept("version_lost", action)
        received = self.world.relays.publication(action.version)

        def written() -> None:
            self.world.send(events.ShardsWritten(version=action.version, stall_s=stall_s))
            if lost and not hangs:
                self.world.send(events.VersionLost(version=action.version, reason="injected"))
            elif not hangs:
                received()

        self._at(self.free_at, written)

    def _on_start_train_step(self, action: actions.StartTrainStep) -> None:
        for row in action.rows:
            trained = self._trained.get(row.trajectory)
            assert trained is None or (trained[0] == action.step and trained[1] < action.attempt), (
                f"{row.trajectory} is trained in step {action.step}, and was in step {trained}"
            )
            self._trained[row.trajectory] = (action.step, action.attempt)
        assert not self.full, f"step {action.step} begins on a full disk"
        rows = [row.trajectory for row in action.rows]
        assert rows == self._rows.setdefault(action.step, rows), f"step {action.step} is redone from other rows"
        self._begin_step(action, max(self.free_at, self.world.now))

    def _begin_step(self, action: actions.StartTrainStep, begin: float) -> None:
        num_tokens = sum(row.num_prompt_tokens + row.num_tokens for row in action.rows)
        self._batch_tokens[action.step] = num_tokens
        self.free_at = begin + self.world.cluster.train_s(num_tokens)
        self.world.measures.queue.busy.append((begin, self.free_at))
        self._at(self.free_at, lambda: self._finish_step(action))

    def _finish_step(self, action: actions.StartTrainStep) -> None:
        self.world.rollouts.report_kv()
        generated = self.world.rollouts.num_generated()
        done = self.world.measures.iterations
        while done and done[-1].step >= action.step:
            done.pop()  # redone after a restore
        self.world.measures.iterations.append(
            Iteration(
                step=action.step,
                at=self.world.now,
                num_tokens=self._batch_tokens.pop(action.step),
                num_generated=generated,
            )
        )
        if action.step == self.world.stop_after:
            self.world.send(events.StopRequested(reason="measured"))  # first, so that no further step begins
        self.world.send(events.StepFinished(step=action.step, attempt=action.attempt))

    def _on_save_checkpoint(self, action: actions.SaveCheckpoint) -> None:
        assert not self.full, f"a checkpoint of step {action.step} begins on a full disk"
        self._save(action, max(self.free_at, self.world.now) if self.checkpoint_s else self.world.now)

    def _save(self, action: actions.SaveCheckpoint, began: float) -> None:
        fails = self.world.intercept("checkpoint_failed", action)
        self._at(began + self.checkpoint_s, lambda: self._finish_checkpoint(action.step, fails or self.full))

    def _finish_checkpoint(self, step: int, failed: bool) -> None:
        if failed:
            self.world.send(events.CheckpointFailed(step=step, reason="injected"))
            return
        self.checkpoint = step
        self._rows = {number: rows for number, rows in self._rows.items() if number > step}
        self.world.send(events.CheckpointSaved(step=step))

    def _on_ask_sampler(self, action: actions.AskSampler) -> None:
        measured = self.world.samplers.ask(action)
        answer = msgspec.structs.replace(measured, elapsed_ms=0.0)  # a measured time is no part of a simulated run
        self.world.after(0.0, lambda: self.world.send(answer))

    def _on_record_trajectories(self, action: actions.RecordTrajectories) -> None:
        branches, measures = self.world.core.state.branches, self.world.measures
        trained: dict[GroupId, list[tuple[float, float, int, int]]] = {}
        for t in action.trajectories:
            if t.dropped or t.step <= self._measured:
                continue  # never trained, or trained again
            if not (t.timings.trained and t.behavior_version and t.finish_version and t.sample_version):
                continue
            s_gen = versions.staleness(branches, t.finish_version, t.behavior_version)
            s_train = versions.staleness(branches, t.sample_version, t.behavior_version)
            trained.setdefault(t.group, []).append((t.timings.rewarded, t.timings.sampled, t.step, s_train))
            measures.latencies.append((t.timings.finished, t.timings.finished - t.timings.queued))
            if t.step > measures.warmup:
                measures.s_gen[s_gen] += 1
                measures.s_train[s_train] += 1
                measures.residence[s_train - s_gen] += 1
        measures.queue.groups += map(_waited, trained.values())
        self._measured = max([self._measured, *(t.step for t in action.trajectories if t.timings.trained)])


def _waited(siblings: list[tuple[float, float, int, int]]) -> queues.Group:
    rewarded, sampled, steps, staleness = zip(*siblings, strict=True)
    return queues.Group(complete_at=max(rewarded), sampled_at=max(sampled), step=steps[0], s_train=fmean(staleness))
