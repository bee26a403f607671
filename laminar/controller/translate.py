"""From wire messages to core events. No decision is made here."""

from collections.abc import Callable
from typing import Any

from laminar import wire
from laminar.core import events
from laminar.ids import WorkerId


class Origin:
    """Who a message came from."""

    __slots__ = ("host", "incarnation", "worker")

    def __init__(self, worker: WorkerId, incarnation: int, host: str) -> None:
        self.worker, self.incarnation, self.host = worker, incarnation, host

    def to_event(self, message: wire.Message) -> events.AnyEvent | None:
        """The event that a message stands for; None for messages that the core does not need to hear of."""
        translate = _TABLE.get(type(message))
        return translate(message, self) if translate else None


def _report(m: wire.RolloutReport, o: Origin) -> events.AnyEvent:
    return events.ReplicaReported(
        worker=o.worker,
        incarnation=o.incarnation,
        trajectories=m.trajectories,
        attempts=m.attempts,
        num_tokens=m.num_tokens,
        finished=[
            events.FinishedAttempt(
                trajectory=f.trajectory,
                attempt=f.attempt,
                finish_reason=f.finish_reason,
                num_prompt_tokens=f.num_prompt_tokens,
                num_tokens=f.num_tokens,
                queued_s=f.queued_s,
                decode_s=f.decode_s,
            )
            for f in m.finished
        ],
        rewarded=[
            events.RewardedAttempt(trajectory=r.trajectory, attempt=r.attempt, reward=r.reward, parts=r.parts)
            for r in m.rewarded
        ],
        failed=[
            events.FailedAttempt(trajectory=f.trajectory, attempt=f.attempt, kind=f.kind, reason=f.reason)
            for f in m.failed
        ],
        aborted=[events.AbortedAttempt(trajectory=a.trajectory, attempt=a.attempt) for a in m.aborted],
        num_running=m.num_running,
        num_waiting=m.num_waiting,
        kv_tokens=m.kv_tokens,
        busy_s=m.decode_busy_s,
    )


_TABLE: dict[type, Callable[[Any, Origin], events.AnyEvent]] = {
    wire.RolloutReport: _report,
    wire.RolloutReady: lambda m, o: events.ReplicaJoined(
        worker=o.worker,
        incarnation=o.incarnation,
        host=o.host,
        num_requests_max=m.num_requests_max,
        kv_tokens_max=m.kv_tokens_max,
        num_requests_memory_bound=m.num_requests_memory_bound,
    ),
    wire.Refreshed: lambda m, o: events.ReplicaRefreshed(
        worker=o.worker, incarnation=o.incarnation, version=m.version, digest=m.digest, wait_s=m.wait_s
    ),
    wire.RefreshFailed: lambda m, o: events.ReplicaRefreshFailed(
        worker=o.worker, incarnation=o.incarnation, version=m.version, reason=m.reason
    ),
    wire.EvaluationDone: lambda m, o: events.EvaluationFinished(
        evaluation=m.evaluation, accuracy=m.accuracy, score=m.score, num_prompts=m.num_prompts
    ),
    wire.EvaluationFailed: lambda m, o: events.EvaluationFailed(evaluation=m.evaluation, reason=m.reason),
    wire.TrainerReady: lambda m, o: events.TrainerRankReady(
        worker=o.worker,
        incarnation=o.incarnation,
        rank=m.rank,
        world_size=m.world_size,
        step=m.step,
        host=o.host,
        damaged=m.damaged,
        data_state=m.data_state if m.damaged else b"",
    ),
    wire.StepDone: lambda m, o: events.StepFinished(step=m.step, attempt=m.attempt, metrics=m.metrics),
    wire.StepFailed: lambda m, o: events.StepFailed(step=m.step, attempt=m.attempt, reason=m.reason),
    wire.ShardsWritten: lambda m, o: events.ShardsWritten(
        version=m.version, stall_s=m.stall_s, publication=m.publication
    ),
    wire.PublishFailed: lambda m, o: events.VersionLost(version=m.version, reason=m.reason, publication=m.publication),
    wire.CheckpointSaved: lambda m, o: events.CheckpointSaved(step=m.step),
    wire.CheckpointFailed: lambda m, o: events.CheckpointFailed(step=m.step, reason=m.reason),
    wire.RelayReady: lambda m, o: events.RelayJoined(
        worker=o.worker, incarnation=o.incarnation, host=o.host, chain_port=m.chain_port, chain_host=m.chain_host
    ),
    wire.VersionReady: lambda m, o: events.VersionReady(
        worker=o.worker, version=m.version, digest=m.digest, num_bytes=m.num_bytes
    ),
    wire.VersionLost: lambda m, o: events.VersionLost(version=m.version, reason=m.reason, publication=m.publication),
    wire.VersionHeld: lambda m, o: events.VersionHeld(worker=o.worker, version=m.version, digest=m.digest),
    wire.LinkBroken: lambda m, o: events.LinkBroken(worker=o.worker, peer=WorkerId(m.peer), epoch=m.epoch),
    wire.LinkSlow: lambda m, o: events.LinkSlow(worker=o.worker, peer=WorkerId(m.peer), epoch=m.epoch),
    wire.VersionDropped: lambda m, o: events.VersionDropped(worker=o.worker, version=m.version),
    wire.WorkerFailed: lambda m, o: events.WorkerLost(worker=o.worker, incarnation=o.incarnation, reason=m.reason),
    wire.Goodbye: lambda m, o: events.WorkerLost(worker=o.worker, incarnation=o.incarnation, reason="said goodbye"),
}
