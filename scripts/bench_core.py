"""How fast the core decides: `python scripts/bench_core.py [--quick]`. Prints the tables of docs/benchmarks.md.

The workload is a fleet in steady state: every replica reports four times per simulated second, each report carries the
lengths of all that it generates, and trajectories finish, are rewarded and replaced at the rate that their length implies.
CPU time (`time.process_time`) is measured, around `Core.handle` and the `next_deadline` that every driver asks for after it: making
the events is not the core's work.
"""

import argparse
import platform
import statistics
import time

from laminar import wire
from laminar.core import actions, choice, events
from laminar.core.engine import Core
from laminar.core.settings import Settings
from laminar.core.story import Story
from laminar.core.turn import Turn
from laminar.ids import Version, WorkerId

REPORTS_PER_S = 4
TOKENS_PER_REPORT = 10  # 40 tokens/s per trajectory
REPORTS_PER_TRAJECTORY = 200  # 2000 tokens, 50 s
GROUP_SIZE = 8


class Fleet:
    """A core with `num_replicas` replicas, each with `per_replica` trajectories in flight, and their staggered progress."""

    def __init__(self, num_replicas: int, per_replica: int, batch_groups: int = 512, slack: int = 512) -> None:
        """`slack`: groups that may be buffered before new ones are held back."""
        groups = num_replicas * per_replica // GROUP_SIZE
        self.core = Core(
            Settings(
                num_prompts=1_000_000,
                shuffle=False,
                steps=1_000_000,
                group_size=GROUP_SIZE,
                batch_groups=batch_groups,
                local_batch_groups=10**9,  # replicas admit for ever: the number in flight stays constant
                buffer_groups_max=groups + slack,
                evaluate=False,
            )
        )
        self.num_replicas, self.per_replica = num_replicas, per_replica
        self.at, self.seq, self.cpu_s = 0.0, 0, 0.0
        self.due: dict[int, int] = {}
        """Trajectory -> reports until it finishes."""
        self.rewards: dict[WorkerId, list[tuple[int, int]]] = {}
        """Finished attempts whose reward comes with the next report."""
        self.num_started = 0
        self._start()

    def send(self, event: events.AnyEvent) -> tuple[list[actions.AnyAction], float]:
        """Actions and CPU seconds of one event; steps are answered at once (their cost is counted too)."""
        self.seq += 1
        stamped = type(event)(
            **{f: getattr(event, f) for f in event.__struct_fields__} | {"seq": self.seq, "at": self.at}
        )
        began = time.process_time()
        new = self.core.handle(stamped)
        self.core.next_deadline()
        elapsed = time.process_time() - began
        self.cpu_s += elapsed
        self._note(new)
        return new, elapsed

    def report(self, worker: WorkerId) -> float:
        """One report of all that this replica has in flight; CPU seconds in the core."""
        replica = self.core.state.replicas[worker]
        records, due = self.core.state.trajectories, self.due
        ids, attempts, lengths, finished = [], [], [], []
        rewards = self.rewards.pop(worker, [])
        for trajectory, attempt in replica.attempts.items():
            if trajectory not in due:
                continue
            ids.append(trajectory)
            attempts.append(attempt)
            lengths.append(records[trajectory].num_tokens + TOKENS_PER_REPORT)
            due[trajectory] -= 1
            if due[trajectory] <= 0:
                del due[trajectory]
                finished.append(events.FinishedAttempt(trajectory=trajectory, attempt=attempt, finish_reason="stop",
                    num_prompt_tokens=100, num_tokens=lengths[-1], queued_s=0.1, decode_s=1.0))  # fmt: skip
                self.rewards.setdefault(worker, []).append((trajectory, attempt))
        event = events.ReplicaReported(
            worker=worker,
            incarnation=1,
            trajectories=wire.pack_i64(ids),
            attempts=wire.pack_i32(attempts),
            num_tokens=wire.pack_i32(lengths),
            finished=finished,
            rewarded=[events.RewardedAttempt(trajectory=t, attempt=a, reward=1.0, parts={}) for t, a in rewards],
        )
        return self.send(event)[1]

    def second(self) -> list[float]:
        """One simulated second: every replica reports, evenly spread. CPU seconds of each report."""
        costs = []
        for _ in range(REPORTS_PER_S):
            for worker in list(self.core.state.replicas):
                self.at += 1.0 / REPORTS_PER_S / self.num_replicas
                costs.append(self.report(worker))
        return costs

    def _start(self) -> None:
        self.send(events.RunStarted(boot=1))
        self.send(events.RelayJoined(worker=WorkerId("relay"), incarnation=1))
        self.send(events.TrainerRankReady(worker=WorkerId("t"), incarnation=1, rank=0, world_size=1, step=0))
        self.send(events.VersionReady(version=Version(0, 0), digest="d", num_bytes=1))
        for index in range(self.num_replicas):
            name = WorkerId(f"r{index}")
            self.send(
                events.ReplicaJoined(
                    worker=name, incarnation=1, host="h", num_requests_max=self.per_replica, kv_tokens_max=1 << 30
                )
            )
            self.send(
                events.ReplicaRefreshed(worker=name, incarnation=1, version=Version(0, 0), digest="d", wait_s=0.0)
            )

    def _note(self, new: list[actions.AnyAction]) -> None:
        for action in new:
            if isinstance(action, actions.StartGroup):
                for start in action.starts:
                    self.num_started += 1
                    # A fixed spread of lengths, siblings at different places: no two seconds are alike, no randomness.
                    self.due[start.trajectory] = 1 + (self.num_started * 7919) % (2 * REPORTS_PER_TRAJECTORY)
            elif isinstance(action, actions.StartTrainStep):
                self.send(events.StepFinished(step=action.step, attempt=action.attempt))
            elif isinstance(action, actions.PublishVersion) and action.version.step > 0:
                self.send(
                    events.VersionLost(version=action.version, reason="the replicas of this benchmark stay at v0")
                )
            elif isinstance(action, actions.SaveCheckpoint):
                self.send(events.CheckpointSaved(step=action.step))


def steady(num_replicas: int, per_replica: int, seconds: int) -> tuple[list[float], float]:
    """CPU seconds of each report, and CPU seconds of the core per simulated second (everything counted)."""
    fleet = Fleet(num_replicas, per_replica)
    fleet.second()
    fleet.cpu_s = 0.0
    costs = [cost for _ in range(seconds) for cost in fleet.second()]
    generating = sum(replica.num_generating for replica in fleet.core.state.replicas.values())
    assert generating > 0.85 * num_replicas * per_replica, (
        f"only {generating} generate: not the workload it claims to be"
    )
    return costs, fleet.cpu_s / seconds


def lease(num_replicas: int, per_replica: int, batch_groups: int) -> float:
    """CPU milliseconds of the event that completes a batch: leasing it and starting as many new groups."""
    fleet = Fleet(num_replicas, per_replica, batch_groups, slack=0)
    names = list(fleet.core.state.replicas)
    for _ in range(1 + batch_groups * GROUP_SIZE // (num_replicas * per_replica)):
        for name in names:
            replica = fleet.core.state.replicas[name]
            ids, attempts = list(replica.attempts), list(replica.attempts.values())
            finished = [
                events.FinishedAttempt(trajectory=t, attempt=a, finish_reason="stop", num_prompt_tokens=9, num_tokens=9,
                                       queued_s=0.1, decode_s=1.0)
                for t, a in zip(ids, attempts, strict=True)
            ]  # fmt: skip
            rewarded = [
                events.RewardedAttempt(trajectory=t, attempt=a, reward=1.0, parts={})
                for t, a in zip(ids, attempts, strict=True)
            ]
            report = events.ReplicaReported(worker=name, incarnation=1, trajectories=b"", attempts=b"", num_tokens=b"",
                                            finished=finished, rewarded=rewarded)  # fmt: skip
            new, elapsed = fleet.send(report)
            if any(isinstance(action, actions.StartTrainStep) for action in new):
                assert sum(isinstance(action, actions.StartGroup) for action in new) == batch_groups
                return elapsed * 1e3
    raise AssertionError("no batch was leased")


def view_cost(num_groups: int) -> float:
    """CPU milliseconds to show `num_groups` complete groups to a custom sampler."""
    fleet = Fleet(64, num_groups * GROUP_SIZE // 64, batch_groups=num_groups + 64)
    for name in list(fleet.core.state.replicas):
        replica = fleet.core.state.replicas[name]
        pairs = list(replica.attempts.items())
        finished = [events.FinishedAttempt(trajectory=t, attempt=a, finish_reason="stop", num_prompt_tokens=9,
                                           num_tokens=9, queued_s=0.1, decode_s=1.0) for t, a in pairs]  # fmt: skip
        rewarded = [events.RewardedAttempt(trajectory=t, attempt=a, reward=1.0, parts={}) for t, a in pairs]
        fleet.send(events.ReplicaReported(worker=name, incarnation=1, trajectories=b"", attempts=b"", num_tokens=b"",
                                          finished=finished, rewarded=rewarded))  # fmt: skip
    turn = Turn(fleet.core.state, fleet.core.settings, Story())
    began = time.process_time()
    shown = choice.view(turn)
    elapsed = time.process_time() - began
    assert len(shown.groups) == num_groups
    return elapsed * 1e3


def main() -> None:
    """Run all measurements and print them as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer simulated seconds (noisier)")
    seconds = 2 if parser.parse_args().quick else 8
    print(f"{platform.machine()}, Python {platform.python_version()}, one core; {REPORTS_PER_S} reports/s per replica,")
    print(f"{GROUP_SIZE} siblings, {REPORTS_PER_TRAJECTORY} reports per trajectory on average\n")
    print(
        "| replicas × trajectories | in flight | median µs/report | mean µs/report | reports/s | cores used at 4 Hz |"
    )
    print("|---|---|---|---|---|---|")
    for num_replicas, per_replica in ((4, 256), (32, 256), (256, 256), (8, 128), (64, 128), (512, 128), (1024, 64)):
        costs, cores = steady(num_replicas, per_replica, seconds if num_replicas < 100 else max(2, seconds // 4))
        mean = cores / (num_replicas * REPORTS_PER_S)
        print(
            f"| {num_replicas} × {per_replica} | {num_replicas * per_replica} | {statistics.median(costs) * 1e6:.0f}"
            f" | {mean * 1e6:.0f} | {1 / mean:.0f} | {cores:.3f} |"
        )
    print(f"\nbatch of 512 groups leased, 64 replicas × 128: {lease(64, 128, 512):.1f} ms for that event")
    print(f"batch of 512 groups leased, 256 replicas × 256: {lease(256, 256, 512):.1f} ms for that event")
    print(f"view of 1536 / 4096 groups for a custom sampler: {view_cost(1536):.1f} / {view_cost(4096):.1f} ms")


if __name__ == "__main__":
    main()
