"""Random small runs with random settings and faults, one per seed: what `scripts/sweep_seeds.py` and the tests go through.

A run passes if no invariant broke, it came to its end, no working replica was taken for a hung one, and it ended well, or badly for
a reason that the faults in it explain. One in which nothing moves any more has failed: no combination of settings that the core
accepts may come to a standstill.
"""

from random import Random
from typing import Any

from laminar.core.sampling import BufferView, Sampler
from laminar.ids import GroupId, derive_seed
from laminar.sim.cluster import Software
from laminar.sim.faults import PER_CASE, PER_HOUR, FaultPlan
from laminar.sim.relay_faults import RELAY_FAULTS
from laminar.sim.scenario import Scenario, simulate
from laminar.sim.workload import Workload
from laminar.sim.world import SimulationError

SWEEP_STREAM = 78
EVENTS_MAX = 400_000  # a hundred times what such a run takes
FAULTS_S = 600.0  # then nothing breaks any more, and whatever is broken has to be overcome
STALL_S = FAULTS_S + 900.0  # repairs and deadlines take a minute or two here, one after another on six replicas
TIGHT = Software(activation_bytes=56.57e9)
"""Leaves a 7B replica on an H800 room for little more than one long trajectory."""
EXPLAINED = {
    "could not be published": ("version_lost", "publish_hang", *RELAY_FAULTS, "host_lost"),
    "the relay": (*RELAY_FAULTS, "host_lost"),
    "could not be written": ("checkpoint_failed",),
    "no rollout replica is left": (
        "engine_crash",
        "engine_hang",
        "host_lost",
        "partition",
        "pull_hang",
        "pull_failed",
    ),
    "groups in a row were dropped": ("reward_data", "reward_infra", "reward_hang"),
    "rewards in a row timed out": ("reward_hang",),
    "the trainer was lost": ("trainer_crash",),
    "is beyond max_staleness": ("version_lost", "publish_hang"),
    "measured": ("trainer_crash", "storage_full"),
}
"""Part of the reason of a run that failed -> faults of which one must be in the plan."""


class Choosy:
    """A custom sampler as users write them: the newest groups, or none until more are there, or now and then nonsense."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.random = kind, Random(derive_seed(seed, SWEEP_STREAM, 1))

    def select(self, view: BufferView, num_groups: int) -> list[GroupId]:
        """The newest groups first."""
        newest = [group.id for group in reversed(view.groups)][:num_groups]
        if self.kind == "patient" and len(view.groups) < 2 * num_groups:
            return []
        if self.kind == "broken" and self.random.random() < 0.3:
            return self.random.choice([newest[:-1], newest[:1] * num_groups, []])
        return newest

    def state(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def settings(random: Random, batch_groups: int, group_size: int) -> dict[str, Any]:
    """Any settings of the core that it accepts."""
    limits = [batch_groups, batch_groups + 1, 2 * batch_groups, 4 * batch_groups]
    return {
        "max_staleness": random.choice([None, None, 0, 1, 2, 5]),
        "on_stale": random.choice(["drop", "wait"]),
        "buffer_groups_max": random.choice(limits),
        "local_batch_groups": random.choice([1, 2, batch_groups, 50]),
        "on_incomplete": random.choice(["drop", "train"]),
        "min_group_size": random.randint(1, group_size),
        "group_versions": random.choice(["regenerate", "mixed"]),
        "num_retries": random.choice([0, 1, 3]),
        "draining_share": random.choice([0.01, 0.3, 0.5, 1.0]),
        "repack_interval_s": random.choice([0.0, 0.5, 5.0]),
        "repack_kv_share": random.choice([0.01, 0.5, 0.9, 1.0]),
        "repack_requests_max": random.choice([0, 1, 4, 64]),
        "await_publication_s": random.choice([0.0, 0.0, 1.0, 60.0]),
        "checkpoint_every": random.choice([0, 1, 2, 3]),
        "publish_timeout_s": random.choice([5.0, 120.0]),
        "num_prompts": random.choice([1, 17_000]),
        "repack_policy": random.choice(["whole", "parts"]),
        "staleness_budget": random.choice([0.0, 0.5, 2.0]),
        "ready_groups_max": random.choice([0, 0, batch_groups]),
    }


def _sampler(random: Random, seed: int) -> Sampler | None:
    kind = random.choice(["", "", "newest", "patient", "broken"])
    return Choosy(kind, seed) if kind else None


def scenario(seed: int) -> Scenario:
    """A run of a few minutes of virtual time on 2 to 6 replicas; most of its choices are drawn from the seed."""
    random = Random(derive_seed(seed, SWEEP_STREAM))
    batch_groups, group_size = random.randint(1, 8), random.choice([1, 2, 3, 4, 8])
    replicas, median = random.randint(2, 6), random.choice([40.0, 150.0, 400.0])
    names = random.sample(PER_HOUR, random.randint(0, 3)), random.sample(PER_CASE, random.randint(0, 3))
    rates = [(name, random.choice([30.0, 120.0, 400.0])) for name in names[0]]
    rates += [(name, random.choice([0.01, 0.05, 0.1])) for name in names[1]]
    return Scenario(
        model="7B",
        gpus=replicas + 2,
        split=(2, replicas),
        workload=Workload(
            name="sweep", median=median, tokens_max=2048, prompt_tokens=30, calls_max=random.choice([0, 0, 3]),
            call_tokens=8,
        ),
        policy=random.choice(["batch", "continuous", "rolling"]),
        straggler_factor=random.choice([0.0, 0.0, 2.0]),
        faults=FaultPlan(
            rates=tuple(rates), restart_s=5.0, replace_s=15.0, partition_s=random.choice([25.0, 40.0]), full_s=20.0,
            until_s=FAULTS_S,
            reward_timeout_s=5.0,
        ),
        seed=seed,
        iterations=random.randint(2, 5),
        warmup=1,
        batch_groups=batch_groups,
        group_size=group_size,
        core=tuple(settings(random, batch_groups, group_size).items()),
        sampler=_sampler(random, seed),
        num_requests_max=random.choice([2, 6, 256]),
        software=random.choice([Software(), TIGHT]),
        stops=random.random() < 0.5,
        stall_s=STALL_S,
        checkpoint_s=random.choice([0.0, 0.0, 4.0]),
        flush_s=random.choice([0.25, 2.0, 20.0]),
        progress_timeout_s=10.0,
        answer_s=random.choice([0.0, 0.25, 2.0]),
        check_every=20,
        gpus_per_host=random.choice([1, 1, 2, 8]),
        traced=True,
    )  # fmt: skip


def check(seed: int) -> str:
    """One line about the run. Raises SimulationError, which names the command that replays it."""
    chosen = scenario(seed)
    try:
        _, found = simulate(chosen, EVENTS_MAX)
        _judge(chosen, found["finished"], found["ok"])
        if found["faults"].get("alarm:replica-suspect") and not found["faults"].get("engine_hang"):
            raise SimulationError("a replica was suspect although no engine hung")
    except SimulationError as error:
        raise SimulationError(
            f"seed {seed}: {error}\nreplay: python scripts/sweep_seeds.py --first {seed} --count 1"
        ) from error
    faults = sum(count for name, count in found["faults"].items() if not name.startswith("alarm:"))
    return f"seed {seed}: {found['finished'][:60]}, {found['events']} events, {faults} faults, {found['trace'][:12]}"


def _judge(chosen: Scenario, finished: str, ok: bool) -> None:
    if ok and finished in ("measured", "completed"):
        return
    injected = {name for name, _ in chosen.faults.rates}
    for reason, faults in EXPLAINED.items():
        if reason in finished and injected.intersection(faults):
            return
    raise SimulationError(
        f"the run ended with {finished!r} (ok: {ok}), which none of its faults explains: {sorted(injected)}"
    )
