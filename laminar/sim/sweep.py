"""Random small runs with random faults, one per seed: what `scripts/sweep_seeds.py` and the tests go through.

A run passes if no invariant broke, it came to its end, and it ended well, or badly for a reason that the faults in it explain.
"""

from random import Random

from laminar.ids import derive_seed
from laminar.sim.faults import PER_CASE, PER_HOUR, FaultPlan
from laminar.sim.relay_faults import RELAY_FAULTS
from laminar.sim.scenario import Scenario, simulate
from laminar.sim.workload import Workload
from laminar.sim.world import SimulationError

SWEEP_STREAM = 78
EVENTS_MAX = 100_000  # a hundred times what such a run takes
EXPLAINED = {
    "could not be published": ("version_lost", "publish_hang", *RELAY_FAULTS, "host_lost"),
    "the relay": (*RELAY_FAULTS, "host_lost"),
    "could not be written": ("checkpoint_failed",),
    "no rollout replica is left": (
        "engine_crash",
        "engine_hang",
        "engine_slow",  # several at once make a hundred of ten times: no token within any time limit
        "host_lost",
        "partition",
        "pull_hang",
        "pull_failed",
    ),
    "groups in a row were dropped": ("reward_data", "reward_infra"),
}
"""Part of the reason of a run that failed -> faults of which one must be in the plan."""


def scenario(seed: int) -> Scenario:
    """A run of a few minutes of virtual time on 2 to 6 replicas; most of its choices are drawn from the seed."""
    random = Random(derive_seed(seed, SWEEP_STREAM))
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
        policy=random.choice(["batch", "continuous"]),
        repack=random.random() < 0.8,
        straggler_factor=random.choice([0.0, 0.0, 2.0]),
        faults=FaultPlan(
            rates=tuple(rates), restart_s=5.0, replace_s=15.0, partition_s=random.choice([25.0, 40.0])
        ),
        seed=seed,
        iterations=random.randint(2, 5),
        warmup=1,
        batch_groups=random.randint(2, 8),
        group_size=random.randint(2, 4),
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
    except SimulationError as error:
        raise SimulationError(
            f"seed {seed}: {error}\nreplay: python scripts/sweep_seeds.py --first {seed} --count 1"
        ) from error
    faults = sum(count for name, count in found["faults"].items() if not name.startswith("alarm:"))
    return f"seed {seed}: {found['finished'][:60]}, {found['events']} events, {faults} faults, {found['trace'][:12]}"


def _judge(chosen: Scenario, finished: str, ok: bool) -> None:
    if ok and finished == "measured":
        return
    injected = {name for name, _ in chosen.faults.rates}
    for reason, faults in EXPLAINED.items():
        if reason in finished and injected.intersection(faults):
            return
    raise SimulationError(
        f"the run ended with {finished!r} (ok: {ok}), which none of its faults explains: {sorted(injected)}"
    )
