"""Other systems in the same world with the same costs: docs/sim/baselines.md.

They run the same simulated engines on the same draws; what differs is when a batch begins, what an update waits for, and what a
weight update costs generation. Each returns tokens per second as the paper counts them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from laminar.errors import ConfigError
from laminar.ids import GroupId, TrajectoryId, Version, derive_seed
from laminar.sim.cluster import HARDWARE, MODELS, Cluster
from laminar.sim.replica import Replica, Request
from laminar.sim.workload import Workload

BASELINE_STREAM = 79
MINI_BATCHES = 16  # updates of one iteration, as in the paper
SPLIT_PARTS = range(4, 13, 2)  # sixteenths of the GPUs given to rollouts: each system gets its best
SPEEDUP_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every system is given."""

    cluster: Cluster
    workload: Workload
    seed: int = 0
    batch_groups: int = 512
    group_size: int = 16
    num_batches: int = SPEEDUP_BATCHES
    """Averaged over so many batches (partial rollout: after as many for warming up)."""

    @property
    def batch(self) -> int:
        """Trajectories of a global batch."""
        return self.batch_groups * self.group_size

    def request(self, number: int, at: float) -> Request:
        """The `number`-th trajectory of the job; the first sibling of a group computes the prompt."""
        prompt = self.workload.prompt_tokens
        return Request(
            trajectory=TrajectoryId(number),
            attempt=1,
            group=GroupId(number // self.group_size),
            version=Version(0, 0),
            draw=self.workload.draw(derive_seed(self.seed, BASELINE_STREAM, number), 0),
            num_prompt_tokens=prompt,
            num_tokens=0,
            submitted_at=at,
            prefill_tokens=0 if number % self.group_size else prompt,
        )

    def tokens(self, request: Request) -> int:
        """Prompt + response tokens."""
        return request.num_prompt_tokens + request.draw.num_tokens


def _generate(job: Job, batch: int) -> list[tuple[float, int]]:
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
    return sorted(groups.values())


def _drain(replica: Replica) -> Iterator[tuple[float, Request]]:
    while replica.requests:
        now = replica.wake_at
        for request in replica.turn(now).finished:
            yield now, request


def synchronous(job: Job) -> float:
    """All GPUs generate a batch, then all train on it."""
    gpus = job.cluster.train_gpus + job.cluster.rollout_gpus
    seconds = tokens = 0.0
    for batch in range(job.num_batches):
        ended = _generate(job, batch)
        num = sum(row[1] for row in ended)
        seconds += ended[-1][0] + job.cluster.train_s(num, gpus) + job.cluster.global_sync_s()
        tokens += num
    return tokens / seconds


def one_step(job: Job) -> float:
    """A batch is generated while the trainer works on the one before; both wait for each other."""
    seconds = tokens = 0.0
    for batch in range(job.num_batches):
        ended = _generate(job, batch)
        num = sum(row[1] for row in ended)
        seconds += max(ended[-1][0], job.cluster.train_s(num)) + job.cluster.global_sync_s()
        tokens += num
    return tokens / seconds


def stream(job: Job) -> float:
    """Mini-batches train as soon as they are complete; the next batch begins with the weights of all of them."""
    seconds = tokens = 0.0
    for batch in range(job.num_batches):
        ended, end = _generate(job, batch), 0.0
        for part in range(MINI_BATCHES):
            rows = ended[part * len(ended) // MINI_BATCHES : (part + 1) * len(ended) // MINI_BATCHES]
            end = max(end, rows[-1][0]) + job.cluster.train_s(sum(row[1] for row in rows))
        seconds += end + job.cluster.global_sync_s()
        tokens += sum(row[1] for row in ended)
    return tokens / seconds


def partial_rollout(job: Job) -> float:
    """Generation never ends; every update interrupts all replicas, which then compute their KV caches again."""
    share = max(job.group_size, min(job.cluster.num_requests_max, -(-job.batch // job.cluster.num_replicas)))
    pool = _Pool(job, share)
    updates: list[tuple[float, int]] = []
    trainer_free_at = 0.0
    for _ in range(2 * job.num_batches):
        complete_at, num = pool.take_batch(updates_at=trainer_free_at)
        trainer_free_at = max(complete_at, trainer_free_at) + job.cluster.train_s(num)
        updates.append((trainer_free_at, num))
    first = updates[job.num_batches - 1][0]
    return sum(num for _, num in updates[job.num_batches :]) / (updates[-1][0] - first)


class _Pool:
    """Replicas that are refilled as trajectories complete, at most a batch ahead of the trainer."""

    def __init__(self, job: Job, share: int) -> None:
        self.job, self.number = job, 0
        self.replicas = [Replica(job.cluster) for _ in range(job.cluster.num_replicas)]
        self.ready: list[tuple[float, int]] = []
        """(complete at, tokens) of whole groups: a group trains when its last sibling has ended."""
        self.open: dict[int, tuple[int, int]] = {}
        """Group -> (siblings that have ended, their tokens)."""
        self.held: list[int] = []
        """Replicas, once per request that they may not start yet."""
        for index in range(share * len(self.replicas)):
            self._start(index // job.group_size % len(self.replicas), 0.0)
        self.heap = [(replica.wake_at, index) for index, replica in enumerate(self.replicas)]
        heapify(self.heap)

    def take_batch(self, updates_at: float) -> tuple[float, int]:
        """When the next batch is complete, and its tokens. An update at `updates_at` interrupts everyone on the way."""
        interrupted = updates_at <= 0.0
        while len(self.ready) < self.job.batch_groups or not interrupted:
            now, index = heappop(self.heap)
            if not interrupted and now >= updates_at:
                heappush(self.heap, (now, index))
                self._interrupt(updates_at)
                interrupted = True
                continue
            if now == self.replicas[index].wake_at:
                self._turn(index, now)
        batch, self.ready = self.ready[: self.job.batch_groups], self.ready[self.job.batch_groups :]
        now = max(batch[-1][0], updates_at)
        held, self.held = self.held, []
        for index in held:
            self._start(index, now)
            heappush(self.heap, (self.replicas[index].wake_at, index))
        return batch[-1][0], sum(row[1] for row in batch)

    def _turn(self, index: int, now: float) -> None:
        replica = self.replicas[index]
        for request in replica.turn(now).finished:
            self._end(request, now)
            if len(self.ready) < 2 * self.job.batch_groups:
                self._start(index, now)
            else:
                self.held.append(index)
        heappush(self.heap, (replica.wake_at, index))

    def _end(self, request: Request, now: float) -> None:
        num, tokens = self.open.pop(request.group, (0, 0))
        ended = (num + 1, tokens + self.job.tokens(request))
        if ended[0] == self.job.group_size:
            self.ready.append((now, ended[1]))
        else:
            self.open[request.group] = ended

    def _start(self, index: int, now: float) -> None:
        self.replicas[index].submit(now, self.job.request(self.number, now))
        self.number += 1

    def _interrupt(self, now: float) -> None:
        for replica in self.replicas:
            replica.rebuild(now, self.job.cluster.global_sync_s())
        self.heap = [(replica.wake_at, index) for index, replica in enumerate(self.replicas)]
        heapify(self.heap)


BASELINES: dict[str, Callable[[Job], float]] = {
    "sync": synchronous,
    "one-step": one_step,
    "stream": stream,
    "partial": partial_rollout,
}


def best(name: str, model: str, hardware: str, gpus: int, workload: Workload, seed: int) -> tuple[float, str]:
    """Tokens per second of a baseline at its best split, and that split. Raises ConfigError if none is possible."""
    found: list[tuple[float, str]] = []
    parallel = MODELS[model].tensor_parallel
    for part in SPLIT_PARTS:
        rollout = gpus if name == "sync" else gpus * part // 16 // parallel * parallel
        if not 0 < rollout <= gpus - (name != "sync"):
            continue
        cluster = Cluster(
            hardware=HARDWARE[hardware], model=MODELS[model], train_gpus=gpus - rollout, rollout_gpus=rollout
        )
        rate = BASELINES[name](Job(cluster=cluster, workload=workload, seed=seed))
        found.append((rate, "colocated" if name == "sync" else f"{gpus - rollout}/{rollout}"))
        if name == "sync":
            break
    if not found:
        raise ConfigError(f"--gpus {gpus}: no split leaves a trainer and one replica of {model}")
    return max(found)
