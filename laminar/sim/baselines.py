"""Other systems in the same world with the same costs: docs/sim/baselines.md.

They run the same simulated engines on the same draws; what differs is when a batch begins, what an update waits for, and what a
weight update costs generation. Each returns tokens per second as the paper counts them, and the staleness of what it trained.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

from laminar.errors import ConfigError
from laminar.ids import GroupId, TrajectoryId, Version, derive_seed
from laminar.roofline import HARDWARE
from laminar.sim import placement
from laminar.sim.cluster import MODELS, Cluster
from laminar.sim.freshness import Pace
from laminar.sim.replica import Replica
from laminar.sim.request import Request
from laminar.sim.workload import Workload

BASELINE_STREAM = 79
SEEDS_KEPT = 2**18  # partial rollout begins 150,000 trajectories at every placement, the same ones
BATCHES_KEPT = 10  # two at each of five placements: `one_step` and `stream` generate the same ones
MINI_BATCHES = 16  # updates of one iteration, as in the paper
SPLIT_PARTS, SPLIT_SIXTEENTHS = range(4, 13, 2), 16  # parts of the GPUs given to rollouts: each system gets its best


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every system is given."""

    cluster: Cluster
    workload: Workload
    seed: int = 0
    batch_groups: int = 512
    group_size: int = 16
    num_batches: int = 2
    """Systems that work batch by batch: averaged over so many. They have nothing to warm up, and the longest response decides."""
    warmup: int = 10
    num_measured: int = 5
    """Updates of partial rollout, which begins with an empty pipeline: the paper's protocol, as for Laminar."""

    @property
    def batch(self) -> int:
        """Trajectories of a global batch."""
        return self.batch_groups * self.group_size

    @property
    def num_running_max(self) -> int:
        """Requests that a replica decodes at once: its equal share of a global batch, at least a group, at most what it can."""
        share = -(-self.batch // self.cluster.num_replicas)
        return max(self.group_size, min(self.cluster.num_requests_max, share))

    def request(self, number: int, at: float) -> Request:
        """The `number`-th trajectory of the job; the first sibling of a group computes the prompt."""
        prompt = self.workload.prompt_tokens
        return Request(
            trajectory=TrajectoryId(number),
            attempt=1,
            group=GroupId(number // self.group_size),
            version=Version(0, 0),
            draw=self.workload.draw(_seed(self.seed, number), 0),
            num_prompt_tokens=prompt,
            num_tokens=0,
            submitted_at=at,
            prefill_tokens=0 if number % self.group_size else prompt,
        )

    def tokens(self, request: Request) -> int:
        """Prompt + response tokens."""
        return request.num_prompt_tokens + request.draw.num_tokens


@lru_cache(maxsize=SEEDS_KEPT)
def _seed(seed: int, number: int) -> int:
    return derive_seed(seed, BASELINE_STREAM, number)


@lru_cache(maxsize=BATCHES_KEPT)
def _generate(job: Job, batch: int) -> Sequence[tuple[float, int]]:
    """One global batch on idle replicas: (complete at, tokens) of each group, in order of completion."""
    replicas = [Replica(job.cluster) for _ in range(job.cluster.num_replicas)]
    for index in range(job.batch):
        replica = replicas[index // job.group_size % len(replicas)]
        replica.submit(0.0, job.request(batch * job.batch + index, 0.0))
    groups: dict[int, tuple[float, int]] = {}
    for replica in replicas:
        for at, request in _drain(replica):
            before = groups.get(request.group, (0.0, 0))
            groups[request.group] = (max(before[0], at), before[1] + job.tokens(request))
    return tuple(sorted(groups.values()))


def _drain(replica: Replica) -> Iterator[tuple[float, Request]]:
    while replica.requests:
        now = replica.wake_at
        for request in replica.turn(now).finished:
            yield now, request


def _batchwise(job: Job, rate: float, staleness: int) -> Pace:
    """A system whose every trajectory is equally stale."""
    return Pace(tokens_per_s=rate, staleness={staleness: job.num_batches * job.batch})


def synchronous(job: Job) -> Pace:
    """All GPUs generate a batch, then all train on it."""
    gpus = job.cluster.train_gpus + job.cluster.rollout_gpus
    seconds = tokens = 0.0
    for batch in range(job.num_batches):
        ended = _generate(job, batch)
        num = sum(row[1] for row in ended)
        seconds += ended[-1][0] + job.cluster.train_s(num, gpus) + job.cluster.global_sync_s()
        tokens += num
    return _batchwise(job, tokens / seconds, staleness=0)


def one_step(job: Job) -> Pace:
    """A batch is generated while the trainer works on the one before; both wait for each other."""
    seconds = tokens = 0.0
    for batch in range(job.num_batches):
        ended = _generate(job, batch)
        num = sum(row[1] for row in ended)
        seconds += max(ended[-1][0], job.cluster.train_s(num)) + job.cluster.global_sync_s()
        tokens += num
    return _batchwise(job, tokens / seconds, staleness=1)


def stream(job: Job) -> Pace:
    """Mini-batches train as soon as they are complete; the next batch begins with the weights of all of them."""
    seconds = tokens = 0.0
    for batch in range(job.num_batches):
        ended, end = _generate(job, batch), 0.0
        for part in range(MINI_BATCHES):
            rows = ended[part * len(ended) // MINI_BATCHES : (part + 1) * len(ended) // MINI_BATCHES]
            end = max(end, rows[-1][0]) + job.cluster.train_s(sum(row[1] for row in rows))
        seconds += end + job.cluster.global_sync_s()
        tokens += sum(row[1] for row in ended)
    return _batchwise(job, tokens / seconds, staleness=0)


def partial_rollout(job: Job) -> Pace:
    """Generation never ends; every update interrupts all replicas, which then compute their KV caches again. The trainer takes part
    in the synchronisation before it goes on."""
    pool = _Pool(job)
    updated_at, free_at = 0.0, 0.0
    begun_at, num_tokens = 0.0, 0
    staleness: dict[int, float] = {}
    for step in range(job.warmup + job.num_measured):
        if step == job.warmup:
            begun_at = updated_at
        batch = pool.take_batch(updated_at)
        tokens = sum(group.num_tokens for group in batch)
        updated_at = max(batch[-1].ended_at, free_at) + job.cluster.train_s(tokens)
        free_at = updated_at + job.cluster.global_sync_s()
        if step >= job.warmup:
            num_tokens += tokens
            for version, share in (pair for group in batch for pair in group.versions.items()):
                staleness[step - version] = staleness.get(step - version, 0.0) + share
    return Pace(tokens_per_s=num_tokens / (updated_at - begun_at), staleness=staleness)


@dataclass(kw_only=True)
class _Group:
    """Siblings that have ended."""

    num_ended: int = 0
    ended_at: float = 0.0
    """The last of them."""
    num_tokens: int = 0
    versions: dict[int, float] = field(default_factory=dict)
    """Trajectories by the version of their tokens; one of several versions counts to each by its share of tokens."""


class _Pool:
    """Replicas that are refilled as trajectories complete, at most a batch ahead of the trainer."""

    def __init__(self, job: Job) -> None:
        self.job, self.number, self.version = job, 0, 0
        self.replicas = [Replica(job.cluster) for _ in range(job.cluster.num_replicas)]
        self.ready: list[_Group] = []
        """Whole groups, as they ended: a group trains when its last sibling has ended."""
        self.open: dict[int, _Group] = {}
        self.cuts: dict[TrajectoryId, list[tuple[int, int]]] = {}
        """(version, response tokens when it was replaced) of what was interrupted."""
        self.held: list[int] = []
        """Replicas, once per request that they may not start yet."""
        for index in range(job.num_running_max * len(self.replicas)):
            self._start(index // job.group_size % len(self.replicas), 0.0)
        self.wakes = [0.0] * len(self.replicas)
        """When each replica is to be looked at next; what else is in the heap of it is void."""
        self._schedule_all()

    def take_batch(self, updated_at: float) -> list[_Group]:
        """The next batch, as soon as it is complete. An update at `updated_at` interrupts everyone on the way."""
        interrupted = updated_at <= 0.0
        while len(self.ready) < self.job.batch_groups or not interrupted:
            now, index = heappop(self.heap)
            if not interrupted and now >= updated_at:
                heappush(self.heap, (now, index))
                self._interrupt(updated_at)
                interrupted = True
                continue
            if now == self.wakes[index]:
                self._turn(index, now)
        batch, self.ready = self.ready[: self.job.batch_groups], self.ready[self.job.batch_groups :]
        now = max(batch[-1].ended_at, updated_at)
        held, self.held = self.held, []
        for index in held:
            self._start(index, now)
            self._schedule(index)
        return batch

    def _schedule(self, index: int) -> None:
        self.wakes[index] = self.replicas[index].quiet_until()
        heappush(self.heap, (self.wakes[index], index))

    def _schedule_all(self) -> None:
        self.heap: list[tuple[float, int]] = []
        for index in range(len(self.replicas)):
            self._schedule(index)

    def _turn(self, index: int, now: float) -> None:
        replica = self.replicas[index]
        for request in replica.turn(now).finished:
            self._end(request, now)
            if len(self.ready) < 2 * self.job.batch_groups:
                self._start(index, now)
            else:
                self.held.append(index)
        self._schedule(index)

    def _end(self, request: Request, now: float) -> None:
        group = self.open.setdefault(request.group, _Group())
        group.num_ended, group.ended_at = group.num_ended + 1, now
        group.num_tokens += self.job.tokens(request)
        done, total = 0, request.draw.num_tokens
        for version, length in [*self.cuts.pop(request.trajectory, ()), (self.version, total)]:
            group.versions[version] = group.versions.get(version, 0.0) + (length - done) / total
            done = length
        if group.num_ended == self.job.group_size:
            self.ready.append(self.open.pop(request.group))

    def _start(self, index: int, now: float) -> None:
        self.replicas[index].submit(now, self.job.request(self.number, now))
        self.number += 1

    def _interrupt(self, now: float) -> None:
        for replica in self.replicas:
            replica.rebuild(now, self.job.cluster.global_sync_s())
            for request in replica.requests.values():
                self.cuts.setdefault(request.trajectory, []).append((self.version, replica.length(request)))
        self.version += 1
        self._schedule_all()


BASELINES: dict[str, Callable[[Job], Pace]] = {
    "sync": synchronous,
    "one-step": one_step,
    "stream": stream,
    "partial": partial_rollout,
}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A baseline at a split."""

    pace: Pace
    split: str


def place(
    name: str, model: str, hardware: str, gpus: int, workload: Workload, seed: int, split: tuple[int, int] | None = None
) -> Placed:
    """A baseline at `split`, train/rollout GPUs, or at its best one. Raises ConfigError if none is possible."""
    splits = [split] if split else _splits(name, gpus, MODELS[model].tensor_parallel)
    if not splits:
        raise ConfigError(f"--gpus {gpus}: no split leaves a trainer and one replica of {model}")
    jobs = {
        (train, rollout): Job(
            cluster=Cluster(hardware=HARDWARE[hardware], model=MODELS[model], train_gpus=train, rollout_gpus=rollout),
            workload=workload,
            seed=seed,
        )
        for train, rollout in splits
    }
    chosen, pace = placement.best(
        _bounds(jobs), lambda chosen: BASELINES[name](jobs[chosen]), lambda pace: pace.tokens_per_s
    )
    return Placed(pace=pace, split="colocated" if name == "sync" else f"{chosen[0]}/{chosen[1]}")


def _bounds(jobs: dict[placement.Split, Job]) -> dict[placement.Split, float]:
    if len(jobs) == 1:
        return dict.fromkeys(jobs, math.inf)
    asked = placement.demand(next(iter(jobs.values())).workload, next(iter(jobs.values())).seed)
    return {split: placement.bound_tokens_per_s(job.cluster, asked, job.num_running_max) for split, job in jobs.items()}


def _splits(name: str, gpus: int, parallel: int) -> list[tuple[int, int]]:
    if name == "sync":
        return [(0, gpus)] if gpus >= parallel else []
    found = [gpus * part // SPLIT_SIXTEENTHS // parallel * parallel for part in SPLIT_PARTS]
    return [(gpus - rollout, rollout) for rollout in found if 0 < rollout < gpus]
