"""Simulated workers that speak the real protocol: replicas that report tokens, a trainer that fetches batches, a relay.

Each has the `Link` of a real worker, so its frames are numbered, kept until the controller vouches for them, and sent again after a
reconnect. What is simulated is the engine: tokens are cut out of one block of random numbers, at a steady rate, and trajectories
are as long as a draw per group says, siblings nearly alike. The trainer fetches every row of a batch and then says that the step is
done. So the loop closes: groups complete, batches are leased and committed, their tokens are forgotten.
"""

import asyncio
import itertools
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from laminar import wire
from laminar.ids import TrajectoryId, Version
from laminar.workers.link import Link, LinkClosed

PROMPT_TOKENS = 128
PENDING_FRAMES_MAX = (
    40  # ten seconds at 4 reports/s: beyond it a replica waits, so that a slow controller shows as a lower rate
)
SLOTS = 3
PATIENCE_S = 120.0  # of workers without a controller: the machine that measures may be busy
BLOCK = 1 << 20
_numbers = np.random.default_rng(0)
TOKENS = _numbers.integers(0, 150_000, 2 * BLOCK, dtype=np.int32).tobytes()
LOGPROBS = (-_numbers.exponential(0.5, 2 * BLOCK)).astype(np.float32).tobytes()


@dataclass(frozen=True)
class Load:
    """What a fleet does."""

    replicas: int
    trajectories: int
    """In flight per replica."""
    tokens_per_report: int = 10
    """Of each trajectory."""
    reports_per_s: float = 4.0
    mean_tokens: int = 2000

    @property
    def tokens_per_s(self) -> float:
        """As long as every replica is full."""
        return self.replicas * self.trajectories * self.tokens_per_report * self.reports_per_s


@dataclass
class Count:
    """What all workers did."""

    tokens_sent: int = 0
    tokens_acknowledged: int = 0
    tokens_fetched: int = 0
    rows_fetched: int = 0
    reports: int = 0
    report_bytes: int = 0
    held_back: int = 0
    """Reports left out because too many were not acknowledged."""
    finished: int = 0
    steps: int = 0
    late_s: list[float] = field(default_factory=list)
    """How late each report was sent: the load's own speed."""


class Replica:
    """One rollout worker."""

    def __init__(self, name: str, url: str, token: str, load: Load, count: Count) -> None:
        self.link = Link(url, worker=name, role="rollout", token=token, orphan_timeout_s=PATIENCE_S)
        self.version: Version | None = None
        self.started_at = 0.0
        """When it was last given something, by the monotonic clock."""
        self.began: dict[int, float] = {}
        """Trajectory -> when it last began here."""
        self.failed = False
        """It says nothing more, and listens to nothing."""
        self._load, self._count = load, count
        self._ids = np.empty(0, np.int64)
        self._attempts, self._totals, self._targets = (np.empty(0, np.int32) for _ in range(3))
        self._prompts: list[wire.PromptTokens] = []
        self._rewarded: list[wire.Rewarded] = []
        self._finished: list[wire.Finished] = []
        self._aborted: list[wire.Aborted] = []
        self._unacknowledged: deque[tuple[int, int]] = deque()
        """(frame number, tokens) of reports."""
        self._at = 0

    async def run(self) -> None:
        """Join, and do as told until the link ends."""
        await self.link.connect()
        room = self._load.trajectories
        kv_tokens_max = 4 * room * self._load.mean_tokens
        self.link.send(
            wire.RolloutReady(num_requests_max=room, kv_tokens_max=kv_tokens_max, context_tokens_max=1 << 20)
        )
        while True:
            message = await self.link.receive()
            if self.failed:
                return
            self._take(message)

    @property
    def num_generating(self) -> int:
        return len(self._ids)

    @property
    def generating(self) -> list[int]:
        return self._ids.tolist()

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.AssignGroup):
            self.started_at = time.monotonic()
            self._begin(message)
        elif isinstance(message, wire.Refresh):
            self.version = message.version
            self.link.send(wire.Refreshed(version=message.version, digest=message.digest, wait_s=0.01))
        elif isinstance(message, wire.Abort):
            self._abort(message)
        elif isinstance(message, wire.Stop):
            raise LinkClosed(message.reason)

    def complete_oldest(self, num: int) -> None:
        """Its `num` oldest trajectories end with the next report."""
        self._targets[:num] = self._totals[:num] + 1

    def _begin(self, message: wire.AssignGroup) -> None:
        at = PROMPT_TOKENS * (message.group % 1024)
        self._prompts.append(wire.PromptTokens(group=message.group, tokens=TOKENS[4 * at : 4 * (at + PROMPT_TOKENS)]))
        generated = []
        for start in message.starts:
            self.began[start.trajectory] = self.started_at
            if start.score_only:
                self._reward(start.trajectory, start.attempt)
            else:
                generated.append(start)
        self._ids = np.append(self._ids, [start.trajectory for start in generated])
        self._attempts = np.append(self._attempts, np.int32([start.attempt for start in generated]))
        self._totals = np.append(self._totals, np.int32([len(start.prefix_tokens) // 4 for start in generated]))
        targets = [self._length(message.group, start.trajectory) for start in generated]
        self._targets = np.append(self._targets, np.int32(targets))

    def _length(self, group: int, trajectory: int) -> int:
        """Of the response, tokens: uniform from 0.1 to 1.9 of the mean for groups, siblings within 10 %. The same every time."""
        spread = 0.1 + 1.8 * (group * 7919 % 10007) / 10007
        own = 0.9 + 0.2 * (trajectory * 104729 % 10007) / 10007
        return max(1, int(self._load.mean_tokens * spread * own))

    def _reward(self, trajectory: TrajectoryId, attempt: int) -> None:
        reward = float(trajectory % 2)
        parts = {"correct": reward}
        self._rewarded.append(
            wire.Rewarded(trajectory=trajectory, attempt=attempt, reward=reward, parts=parts, reward_s=0.01)
        )

    def _abort(self, message: wire.Abort) -> None:
        stopped = np.isin(self._ids, message.trajectories)
        for trajectory, attempt in zip(self._ids[stopped].tolist(), self._attempts[stopped].tolist(), strict=True):
            self._aborted.append(wire.Aborted(trajectory=trajectory, attempt=attempt))
        self._keep(~stopped)

    def _keep(self, kept: np.ndarray) -> None:
        self._ids, self._attempts = self._ids[kept], self._attempts[kept]
        self._totals, self._targets = self._totals[kept], self._targets[kept]

    def report(self) -> None:
        """Say what one interval brought. Nothing while the controller is too far behind."""
        if self.failed:
            return
        self._count_acknowledged()
        if len(self._unacknowledged) >= PENDING_FRAMES_MAX:
            self._count.held_back += 1
            return
        if not (len(self._ids) or self._rewarded or self._aborted or self._prompts):
            return
        report = self._make_report()
        self.link.send(report)
        num_new = len(report.tokens) // 4
        self._unacknowledged.append((self.link._session.sent, num_new))
        self._count.tokens_sent += num_new
        self._count.reports += 1
        self._count.report_bytes += len(report.tokens) + len(report.logprobs) + 20 * (len(report.num_new) // 4)

    def _count_acknowledged(self) -> None:
        forgotten = self.link._session.forgotten
        while self._unacknowledged and self._unacknowledged[0][0] <= forgotten:
            self._count.tokens_acknowledged += self._unacknowledged.popleft()[1]

    def _make_report(self) -> wire.RolloutReport:
        before = self._totals
        self._totals = np.minimum(before + np.int32(self._load.tokens_per_report), self._targets)
        new = self._totals - before
        num_new, at = int(new.sum()), self._at
        self._at = (at + num_new) % BLOCK
        interval_s = 1.0 / self._load.reports_per_s
        arrays = [array.tobytes() for array in (self._ids, self._attempts, self._totals, new)]
        rewarded, self._rewarded = self._rewarded, []
        self._finish(self._totals >= self._targets)
        report = wire.RolloutReport(
            version=self.version,
            trajectories=arrays[0],
            attempts=arrays[1],
            num_tokens=arrays[2],
            num_new=arrays[3],
            tokens=TOKENS[4 * at : 4 * (at + num_new)],
            logprobs=LOGPROBS[4 * at : 4 * (at + num_new)],
            prompts=self._prompts,
            finished=self._finished,
            rewarded=rewarded,
            aborted=self._aborted,
            num_running=len(self._ids),
            kv_tokens=int(self._totals.sum()) + PROMPT_TOKENS * len(self._ids),
            decode_busy_s=0.9 * interval_s,
            interval_s=interval_s,
            since=time.time() - interval_s,
        )
        self._prompts, self._finished, self._aborted = [], [], []
        return report

    def _finish(self, done: np.ndarray) -> None:
        if not done.any():
            return
        columns = (self._ids[done], self._attempts[done], self._totals[done])
        for trajectory, attempt, total in zip(*(column.tolist() for column in columns), strict=True):
            self._finished.append(
                wire.Finished(
                    trajectory=trajectory,
                    attempt=attempt,
                    finish_reason="stop",
                    num_prompt_tokens=PROMPT_TOKENS,
                    num_tokens=total,
                    queued_s=0.01,
                    decode_s=total / (self._load.tokens_per_report * self._load.reports_per_s),
                )
            )
            self._count.finished += 1
            self._reward(trajectory, attempt)
        self._keep(~done)


class Relay:
    """The relay of the only host."""

    def __init__(self, url: str, token: str) -> None:
        self.link = Link(url, worker="relay-0", role="relay", token=token, orphan_timeout_s=PATIENCE_S)
        self._held: deque[Version] = deque()

    async def run(self) -> None:
        """Join; then what the trainer publishes is ready at once."""
        await self.link.connect()
        self.link.send(wire.RelayReady(directory="/dev/shm"))
        while not isinstance(message := await self.link.receive(), wire.Stop):
            pass
        raise LinkClosed(message.reason)

    def publish(self, version: Version) -> None:
        """The shards have come; the oldest version's slot is filled with it."""
        if len(self._held) == SLOTS:
            self.link.send(wire.VersionDropped(version=self._held.popleft()))
        self._held.append(version)
        self.link.send(wire.VersionReady(version=version, digest=f"digest-{version}", num_bytes=1 << 30))


class Trainer:
    """The only rank."""

    def __init__(self, url: str, token: str, relay: Relay, count: Count) -> None:
        self.link = Link(url, worker="trainer-0/0", role="trainer", token=token, orphan_timeout_s=PATIENCE_S)
        self._relay, self._count = relay, count

    async def run(self) -> None:
        """Join, and do as told until the link ends."""
        await self.link.connect()
        self.link.send(wire.TrainerReady(rank=0, world_size=1, step=0, num_parameters=1))
        while True:
            message = await self.link.receive()
            if isinstance(message, wire.StartStep):
                await self._train(message)
            elif isinstance(message, wire.Publish):
                self.link.send(
                    wire.ShardsWritten(version=message.version, stall_s=0.01, publication=message.publication)
                )
                self._relay.publish(message.version)
            elif isinstance(message, wire.SaveCheckpoint):
                self.link.send(wire.CheckpointSaved(step=message.step, path=message.path, seconds=0.1))
            elif isinstance(message, wire.Stop):
                raise LinkClosed(message.reason)

    async def _train(self, message: wire.StartStep) -> None:
        began = time.monotonic()
        rows = await self.link.fetch_tokens([row.trajectory for row in message.rows])
        for wanted, row in zip(message.rows, rows, strict=True):
            assert len(row.tokens) == len(row.logprobs) == 4 * wanted.num_tokens, f"{wanted} came with other tokens"
        num_tokens = sum(row.num_tokens for row in message.rows)
        self._count.tokens_fetched += num_tokens
        self._count.rows_fetched += len(rows)
        self._count.steps += 1
        metrics = {
            "timing/step_s": time.monotonic() - began,
            "num_tokens/trained": float(num_tokens),
            "reward/mean": sum(row.reward for row in message.rows) / len(message.rows),
        }
        self.link.send(wire.StepDone(step=message.step, attempt=message.attempt, metrics=metrics))


class Fleet:
    """All simulated workers, in this process's event loop."""

    def __init__(self, url: str, token: str, load: Load) -> None:
        self.load, self.count = load, Count()
        self.relay = Relay(url, token)
        self.trainer = Trainer(url, token, self.relay, self.count)
        self.replicas = [Replica(f"rollout-{number}", url, token, load, self.count) for number in range(load.replicas)]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Dial in and begin to report. A worker whose link ends is an error that `check` raises."""
        for worker in (self.relay, self.trainer, *self.replicas):
            self._tasks.append(asyncio.create_task(worker.run()))
            await asyncio.sleep(0)
        self._tasks.append(asyncio.create_task(self._report()))

    def check(self) -> None:
        """Raise what a worker ended with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Hang up without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in (self.relay, self.trainer, *self.replicas):
            await worker.link.close(goodbye=False, timeout_s=0.1)

    async def _report(self) -> None:
        """All replicas in turn, evenly over the interval."""
        pause_s = 1.0 / self.load.reports_per_s / self.load.replicas
        began = time.monotonic()
        for number in itertools.count():
            late_s = time.monotonic() - (began + number * pause_s)
            await asyncio.sleep(max(0.0, -late_s))
            self.count.late_s.append(max(0.0, late_s))
            self.replicas[number % self.load.replicas].report()
