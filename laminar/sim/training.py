"""The trainer's side of the simulated world: steps, publications, checkpoints, the sampler, and the records kept.

Invariant: no trajectory is trained twice, except in a later attempt of the same step.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from laminar.core import actions, events, versions
from laminar.ids import TrajectoryId
from laminar.sim.measure import Iteration

if TYPE_CHECKING:
    from laminar.sim.world import World


class Training:
    """Commands are executed in the order sent; a publication stalls the trainer until its shards are with the master relay."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self._trained: dict[TrajectoryId, tuple[int, int]] = {}
        self._trainer_free_at = 0.0
        self._batch_tokens: dict[int, int] = {}
        self.answers: dict[type, Callable[..., None]] = {
            actions.PublishVersion: self._on_publish_version,
            actions.StartTrainStep: self._on_start_train_step,
            actions.SaveCheckpoint: self._on_save_checkpoint,
            actions.AskSampler: self._on_ask_sampler,
            actions.RecordTrajectories: self._on_record_trajectories,
        }

    def _on_publish_version(self, action: actions.PublishVersion) -> None:
        stall_s = self.world.cluster.publish_stall_s()
        self._trainer_free_at = max(self._trainer_free_at, self.world.now) + stall_s
        written = self._trainer_free_at
        self.world.at(written, lambda: self.world.send(events.ShardsWritten(version=action.version, stall_s=stall_s)))
        if self.world.intercept("publish_hang", action):
            return
        if self.world.intercept("version_lost", action):
            event = events.VersionLost(version=action.version, reason="injected")
            self.world.at(written, lambda: self.world.send(event))
        else:
            self.world.relays.publish(action.version, written)

    def _on_start_train_step(self, action: actions.StartTrainStep) -> None:
        for row in action.rows:
            trained = self._trained.get(row.trajectory)
            assert trained is None or (trained[0] == action.step and trained[1] < action.attempt), (
                f"{row.trajectory} is trained in step {action.step}, and was in step {trained}"
            )
            self._trained[row.trajectory] = (action.step, action.attempt)
        num_tokens = sum(row.num_prompt_tokens + row.num_tokens for row in action.rows)
        self._batch_tokens[action.step] = num_tokens
        self._trainer_free_at = max(self._trainer_free_at, self.world.now) + self.world.cluster.train_s(num_tokens)
        self.world.at(self._trainer_free_at, lambda: self._finish_step(action))

    def _finish_step(self, action: actions.StartTrainStep) -> None:
        self.world.rollouts.report_kv()
        generated = self.world.rollouts.num_generated()
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
        event: events.AnyEvent = events.CheckpointSaved(step=action.step)
        if self.world.intercept("checkpoint_failed", action):
            event = events.CheckpointFailed(step=action.step, reason="injected")
        self.world.after(0.0, lambda: self.world.send(event))

    def _on_ask_sampler(self, action: actions.AskSampler) -> None:
        assert self.world.sampler is not None, "the settings name a custom sampler, the world has none"
        chosen = self.world.sampler.select(action.view, action.num_groups)
        self.world.after(0.0, lambda: self.world.send(events.SamplerAnswered(request=action.request, groups=chosen)))

    def _on_record_trajectories(self, action: actions.RecordTrajectories) -> None:
        branches, measures = self.world.core.state.branches, self.world.measures
        for t in action.trajectories:
            if t.dropped or not (t.timings.trained and t.behavior_version and t.finish_version and t.sample_version):
                continue
            s_gen = versions.staleness(branches, t.finish_version, t.behavior_version)
            s_train = versions.staleness(branches, t.sample_version, t.behavior_version)
            measures.latencies.append((t.timings.finished, t.timings.finished - t.timings.queued))
            if t.step > measures.warmup:
                measures.s_gen[s_gen] += 1
                measures.s_train[s_train] += 1
                measures.residence[s_train - s_gen] += 1
