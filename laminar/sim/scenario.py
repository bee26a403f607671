"""One simulated run by its choices, and everything that follows from them."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from laminar.core.sampling import Sampler
from laminar.core.settings import RefreshPolicy, Settings
from laminar.errors import ConfigError
from laminar.roofline import HARDWARE
from laminar.sim import placement
from laminar.sim.cluster import MODELS, Cluster, Software
from laminar.sim.faults import NO_FAULTS, FaultPlan, inject
from laminar.sim.measure import Measures, tokens_per_s
from laminar.sim.policies import Policy
from laminar.sim.workload import Workload
from laminar.sim.world import CHECK_ALL_EVERY, EVENTS_MAX, STALL_S, World

SPLIT_TOLERANCE = 0.1
SEARCHED_PARTS = (6, 8, 10, 12)  # sixteenths that a search tries as rollout GPUs
SEARCH_WARMUP = 2  # iterations before those that a search measures
SEARCH_ITERATIONS = 4  # in all: enough to rank placements that differ by an eighth of the GPUs
SPLIT_PARTS = 16  # placements are whole sixteenths of the GPUs, rounded to replicas
OUTSTANDING_BATCHES = 4
"""Limit of groups in flight and buffered, in global batches. By Little's law a group is then trained at most so many iterations
after it began, on average. Four versions are the largest staleness that the paper observed."""
FLUSHES_PER_TIMEOUT = 3  # tokens are heard of once a flush, which must not be taken for a hang
RELAY_RESTARTS_MAX = 3  # as replicas by default
SOFTWARE = Software()
TRAINER_RESTARTS_MAX = 3  # without a checkpoint in between
REPLICAS_MAX = 8192  # up to which the core has been measured
STEPS_BEYOND = 1000  # the run is stopped when it has been measured; generation does not taper off before


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is run. Defaults are the paper's protocol: batches of 512 x 16, 10 warm-up iterations, 5 measured."""

    model: str = "32B"
    hardware: str = "H800"
    gpus: int = 128
    gpus_per_host: int = 8
    split: tuple[int, int] | None = None
    """(train, rollout) GPUs; None = the balanced one."""
    workload: Workload
    policy: RefreshPolicy = "batch"
    repack: bool = True
    straggler_factor: float = 0.0
    """Groups go without siblings that take more than this times the median of those done; 0 = they wait for all."""
    faults: FaultPlan = NO_FAULTS
    sampler: Sampler | None = None
    seed: int = 0
    iterations: int = 15
    warmup: int = 10
    batch_groups: int = 512
    group_size: int = 16
    flush_s: float = 60.0
    progress_timeout_s: float = 60.0
    """A replica without progress for this long is suspect, or for three flushes if that is longer."""
    checkpoint_every: int = 1
    checkpoint_s: float = 0.0
    """How long a checkpoint is being written, while training goes on."""
    answer_s: float = 0.0
    """How long the source of a move goes on before it hears of it."""
    core: tuple[tuple[str, Any], ...] = ()
    """Settings of the core that are not as below."""
    software: Software = SOFTWARE
    num_requests_max: int = 256
    """Concurrent requests of one replica (the paper's setting)."""
    stops: bool = True
    """The operator stops the run when it has been measured; else it has no further steps, and generation tapers off."""
    stall_s: float = STALL_S
    traced: bool = False
    check_every: int = CHECK_ALL_EVERY

    def under(self, policy: Policy) -> "Scenario":
        """The same under another scheduling policy."""
        return replace(self, policy=policy.refresh, core=(*self.core, *policy.settings(self.batch_groups)))

    def cluster(self) -> Cluster:
        """The placement. Raises ConfigError if a side has no GPU, or the rollouts not one replica."""
        model = MODELS[self.model]
        train, rollout = self.split or self.balanced_split()
        if train < 1 or rollout < model.tensor_parallel:
            raise ConfigError(
                f"--split {train}/{rollout}: the trainer needs at least 1 GPU and a {self.model} replica "
                f"{model.tensor_parallel}; give train/rollout counts that leave both enough"
            )
        if (num_replicas := rollout // model.tensor_parallel) > REPLICAS_MAX:
            raise ConfigError(
                f"{rollout} GPUs make {num_replicas} replicas of {self.model}; at most {REPLICAS_MAX}: use fewer"
            )
        return Cluster(
            hardware=HARDWARE[self.hardware], model=model, train_gpus=train, rollout_gpus=rollout,
            gpus_per_host=self.gpus_per_host, software=self.software, num_requests_max=self.num_requests_max,
        )  # fmt: skip

    def balanced_split(self) -> tuple[int, int]:
        """By the formulas alone: of the placements whose slower side (steady decoding, or the trainer) is within a tolerance of
        the fastest, the one with the fewest rollout GPUs. Decoding a given number of requests hardly gains by spreading them."""
        model = MODELS[self.model]
        found = []
        for part in range(1, SPLIT_PARTS):
            rollout = self.gpus * part // SPLIT_PARTS // model.tensor_parallel * model.tensor_parallel
            if 0 < rollout < self.gpus:
                split = (self.gpus - rollout, rollout)
                found.append((self._slower_side_s(split), split))
        if not found:
            raise ConfigError(f"--gpus {self.gpus}: no split leaves a trainer and one replica of {self.model}")
        good = min(found)[0] * (1.0 + SPLIT_TOLERANCE)
        return next(split for seconds, split in found if seconds <= good)

    def _slower_side_s(self, split: tuple[int, int]) -> float:
        cluster = Cluster(
            hardware=HARDWARE[self.hardware], model=MODELS[self.model], train_gpus=split[0], rollout_gpus=split[1]
        )
        response = self.workload.mean_tokens(num=1000)
        num = self.batch_groups * self.group_size
        running = min(cluster.num_requests_max, max(1, num // cluster.num_replicas))
        kv_tokens = min(cluster.kv_tokens_max, int(running * (self.workload.prompt_tokens + response)))
        rate = cluster.num_replicas * running / cluster.decode_model.step_s(running, kv_tokens)
        return max(cluster.train_s(int(num * (self.workload.prompt_tokens + response))), num * response / rate)

    def settings(self, cluster: Cluster) -> Settings:
        """The core's settings: a local batch is the replicas' equal share of a global batch."""
        local = max(1, -(-self.batch_groups // cluster.num_replicas))
        settings = Settings(
            seed=self.seed,
            num_prompts=17_000,
            steps=self.iterations + (STEPS_BEYOND if self.stops else 0),
            group_size=self.group_size,
            batch_groups=self.batch_groups,
            local_batch_groups=local,
            buffer_groups_max=OUTSTANDING_BATCHES * self.batch_groups,
            custom_sampler=self.sampler is not None,
            checkpoint_every=self.checkpoint_every,
            trainer_restarts_max=TRAINER_RESTARTS_MAX,
            evaluate=False,
            progress_timeout_s=max(self.progress_timeout_s, FLUSHES_PER_TIMEOUT * self.flush_s),
            refresh_policy=self.policy,
            repack_interval_s=5.0 if self.repack else 0.0,
            relay_restarts_max=RELAY_RESTARTS_MAX,
        )
        stragglers: dict[str, Any] = {"stragglers": "drop", "straggler_factor": self.straggler_factor}
        return msgspec.structs.replace(settings, **((stragglers if self.straggler_factor else {}) | dict(self.core)))

    def world(self) -> World:
        """Everything in place, nothing begun."""
        cluster = self.cluster()
        world = World(
            settings=self.settings(cluster),
            cluster=cluster,
            workload=self.workload,
            measures=Measures(warmup=self.warmup),
            flush_s=self.flush_s,
            sampler=self.sampler,
            traced=self.traced,
            stop_after=self.iterations if self.stops else 0,
            check_every=self.check_every,
        )
        world.stall_s = self.stall_s
        world.rollouts.answer_s, world.training.checkpoint_s = self.answer_s, self.checkpoint_s
        inject(world, self.faults, self.seed)
        return world


def simulate(scenario: Scenario, events_max: int = EVENTS_MAX) -> tuple[World, dict[str, Any]]:
    """Run it. The world as it ended, and a summary for JSON."""
    world = scenario.world()
    world.run(events_max)
    return world, summary(scenario, world)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run as far as a search went."""

    scenario: Scenario
    world: World
    tokens_per_s: float
    """Throughput in the iterations that the search measures."""

    def finish(self) -> tuple[World, dict[str, Any]]:
        """Go on with it to its end: as `simulate`."""
        self.world.run()
        return self.world, summary(self.scenario, self.world)


def optimized(scenario: Scenario) -> Scenario:
    """The scenario at the best of a few placements, by short runs. Raises ConfigError if none is possible."""
    return replace(scenario, split=searched(scenario).scenario.split)


def searched(scenario: Scenario) -> Begun:
    """The run at the best placement of a few, begun as far as the search went. Raises ConfigError if none is possible."""
    parallel = MODELS[scenario.model].tensor_parallel
    rollouts = [scenario.gpus * part // SPLIT_PARTS // parallel * parallel for part in SEARCHED_PARTS]
    splits = [(scenario.gpus - rollout, rollout) for rollout in rollouts if 0 < rollout < scenario.gpus]
    if not splits:
        raise ConfigError(f"--gpus {scenario.gpus}: no split leaves a trainer and one replica of {scenario.model}")
    asked = placement.demand(scenario.workload, scenario.seed)
    bounds = {
        split: placement.bound_tokens_per_s(replace(scenario, split=split).cluster(), asked, scenario.num_requests_max)
        for split in splits
    }
    measured = placement.best(
        bounds, lambda split: _begun(replace(scenario, split=split)), lambda begun: begun.tokens_per_s
    )
    return measured[1]


def _begun(scenario: Scenario) -> Begun:
    """Until the last iteration that a search measures has its batch: from then on its end is known."""
    scenario = replace(scenario, iterations=max(scenario.iterations, SEARCH_ITERATIONS))
    world = scenario.world()
    world.run(until=lambda: world.core.state.trainer.running >= SEARCH_ITERATIONS)
    updates = world.training.updates()
    rate = tokens_per_s(updates, SEARCH_WARMUP) if len(updates) > SEARCH_WARMUP else 0.0  # the run has failed
    return Begun(scenario=scenario, world=world, tokens_per_s=rate)


def summary(scenario: Scenario, world: World) -> dict[str, Any]:
    """The run in plain numbers. Only a run that completed has throughputs."""
    state, cluster = world.core.state, world.cluster
    engines = [engine.replica for engine in world.rollouts.engines.values()]
    found: dict[str, Any] = {
        "model": scenario.model,
        "hardware": scenario.hardware,
        "gpus": scenario.gpus,
        "split": f"{cluster.train_gpus}/{cluster.rollout_gpus}",
        "replicas": cluster.num_replicas,
        "workload": scenario.workload.name,
        "median_tokens": scenario.workload.median,
        "policy": scenario.policy,
        "repack": scenario.repack,
        "seed": scenario.seed,
        "finished": state.finished,
        "ok": state.ok,
        "events": state.seq,
        "repack_checks": state.repack.num_checks,
        "replicas_released": state.repack.num_released,
        "trajectories_moved": state.repack.num_moves,
        "tokens_prefilled_by_moves": state.repack.num_moved_tokens,
        "preemptions": sum(replica.num_preemptions for replica in engines),
        "failovers": msgspec.to_builtins(state.num_failovers),
        "chain_epochs": state.chain.epoch,
        "tokens_lost": world.measures.num_tokens_lost,
        "tokens_dropped": dict(state.ledger.tokens.dropped),
        "trajectories_dropped": dict(state.ledger.trajectories.dropped),
        "faults": dict(world.measures.faults),
        "alarms": dict(world.measures.alarms),
        "trace": world.trace.hexdigest() if world.trace is not None else "",
        "elapsed_s": round(world.elapsed_s, 2),
    }
    if len(world.measures.iterations) > scenario.warmup > 0:
        found |= world.measures.summary()
        found["queue"] = world.measures.queue_account(found["trajectories_dropped"])
    return found
