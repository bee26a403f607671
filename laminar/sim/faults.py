"""Faults by name and rate, drawn from the seed: what breaks, how it is noticed, and when it comes back.

`an hour` faults strike on their own at exponential intervals; `a case` faults spoil one answer in so many.

| name | unit | what happens |
|---|---|---|
| engine_crash | an hour | a worker process dies, which its socket tells at once; the same name starts again |
| engine_hang | an hour | an engine computes nothing more, while its worker answers; killed when the core gives it up |
| engine_slow | an hour | an engine decodes ten times as slowly for a while |
| host_lost | an hour | all replicas of a host and its relay stop; only silence tells; a new host takes the names |
| partition | an hour | a replica is cut off for longer than the grace; it goes on, returns, is fenced off and starts again |
| short_partition | an hour | a channel breaks and comes back within the grace |
| replica_drained | an hour | no fault: an operator takes a replica out; later another joins under a new name |
| trainer_crash | an hour | a trainer rank dies; a new launch goes on from the newest checkpoint |
| storage_full | an hour | nothing can be written for some minutes |
| controller_crash | an hour | the core is replaced by one restored from its snapshot |
| pull_failed, pull_hang | a case | a pull of weights fails, or never answers |
| relay_crash | an hour | a relay that is not the master dies; the core starts it again and its neighbour fills it |
| master_crash | an hour | the master relay dies |
| link_slow | an hour | the link into a relay is ten times as slow for a while |
| relay_partition | an hour | a relay is cut off from its neighbours and the controller, returns, is fenced off and starts again |
| version_lost, publish_hang | a case | a publication is lost with the relay's copy, or never reported |
| reward_infra, reward_data | a case | a reward cannot be computed for reasons of infrastructure, or of data |
| reward_hang | a case | a reward function does not answer; its worker gives up after a time limit |
| checkpoint_failed | a case | a checkpoint cannot be written |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

from laminar.core import events
from laminar.core.engine import Core
from laminar.errors import ConfigError
from laminar.ids import WorkerId, derive_seed
from laminar.sim.engine import Engine
from laminar.sim.relay_faults import RELAY_FAULTS, RelayFaults
from laminar.sim.world import SimulationError, World

FAULT_STREAM = 77  # keeps the faults' chance apart from the core's and the workload's
PER_HOUR = (
    "engine_crash", "engine_hang", "engine_slow", "host_lost", "partition", "short_partition", "controller_crash",
    "replica_drained", "trainer_crash", "storage_full", *RELAY_FAULTS,
)  # fmt: skip
SLOW_FACTOR = 10.0
PER_CASE = (
    "pull_failed", "pull_hang", "version_lost", "publish_hang", "reward_infra", "reward_data", "checkpoint_failed",
    "reward_hang",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Which faults, how often, and how long repairs take."""

    rates: tuple[tuple[str, float], ...] = ()
    """(name, strikes per hour of the run, or probability per case)."""
    until_s: float = math.inf
    """Nothing breaks any more after so long."""
    restart_s: float = 60.0
    """A worker process starts again on its GPUs: weights are pulled after it has joined."""
    replace_s: float = 240.0
    """Another host takes a lost one's place."""
    slow_s: float = 120.0
    """How long a slow engine is slow."""
    partition_s: float = 90.0
    short_partition_s: float = 5.0
    full_s: float = 180.0
    """How long the disk is full."""
    reward_timeout_s: float = 30.0
    """After so long a reward that hangs is given up."""


NO_FAULTS = FaultPlan()


def parse(text: str) -> FaultPlan:
    """``engine_crash=0.5,version_lost=0.01``; a bare name means once an hour, or one case in a hundred. Raises ConfigError."""
    rates = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        if name not in PER_HOUR + PER_CASE:
            raise ConfigError(f"--faults {part}: no fault {name!r}; there are {', '.join(PER_HOUR + PER_CASE)}")
        try:
            rate = float(value) if value else (1.0 if name in PER_HOUR else 0.01)
        except ValueError:
            raise ConfigError(f"--faults {part}: {value!r} is not a number; write {name}=0.5") from None
        highest = 1.0 if name in PER_CASE else 1e5
        if not 0.0 <= rate <= highest:
            raise ConfigError(f"--faults {part}: {rate:g} is not between 0 and {highest:g}")
        rates.append((name, rate))
    return FaultPlan(rates=tuple(rates))


def inject(world: World, plan: FaultPlan, seed: int) -> None:
    """Let the plan's faults happen in `world`, each kind from its own stream."""
    if plan.rates:
        Injector(world, plan, seed)


class Injector:
    """Strikes, and repairs. A strike that finds nothing to break does nothing."""

    def __init__(self, world: World, plan: FaultPlan, seed: int) -> None:
        self.world, self.plan = world, plan
        self.random = {
            name: Random(derive_seed(seed, FAULT_STREAM, crc32(name.encode()))) for name in PER_HOUR + PER_CASE
        }
        self._case_rates = {name: rate for name, rate in plan.rates if name in PER_CASE}
        world.intercept = self.spoils
        world.rollouts.restart_s = world.relays.restart_s = world.training.restart_s = plan.restart_s
        world.rollouts.reward_timeout_s = plan.reward_timeout_s
        for name, rate in plan.rates:
            if name in PER_HOUR and rate > 0:
                self._arm(name, rate)

    def spoils(self, kind: str, subject: Any) -> bool:
        """Whether this case goes wrong."""
        rate = self._case_rates.get(kind, 0.0)
        struck = rate > 0.0 and self.world.now < self.plan.until_s and self.random[kind].random() < rate
        self.world.measures.faults[kind] += struck
        return struck

    def _arm(self, name: str, rate: float) -> None:
        def strike() -> None:
            if self.world.now < self.plan.until_s:
                self.strike(name)
                self._arm(name, rate)

        self.world.after(self.random[name].expovariate(rate / 3600.0), strike)

    def strike(self, name: str, worker: WorkerId | None = None) -> None:
        """Break something now; `worker` = which replica or relay, else chance chooses among those that work."""
        if name in ("trainer_crash", "storage_full"):
            struck = self._trainer_crash() if name == "trainer_crash" else self._storage_full()
            self.world.measures.faults[name] += struck
            return
        if name in RELAY_FAULTS:
            heals_s = self.plan.slow_s if name == "link_slow" else self.plan.partition_s
            struck = RelayFaults(self.world, self.random[name], heals_s).strike(name, worker)
            self.world.measures.faults[name] += struck
            return
        actions: dict[str, Callable[[WorkerId], None]] = {
            "engine_crash": self._engine_crash,
            "engine_hang": self._engine_hang,
            "engine_slow": self._engine_slow,
            "host_lost": self._host_lost,
            "partition": lambda w: self._cut(w, self.plan.partition_s),
            "short_partition": lambda w: self._cut(w, self.plan.short_partition_s),
            "controller_crash": lambda w: self._controller_crash(),
            "replica_drained": self._drain,
        }
        engines = self.world.rollouts.engines.items()
        candidates = [w for w, engine in engines if engine.connected and not engine.replica.hung]
        if worker is None and len(candidates) > 1:
            worker = self.random[name].choice(candidates)
        if worker in self.world.rollouts.engines and (
            len(candidates) > 1 or name in ("short_partition", "controller_crash")
        ):
            self.world.measures.faults[name] += 1
            actions[name](worker)

    # ---- the kinds ---------------------------------------------------------------------------------------------

    def _drain(self, worker: WorkerId) -> None:
        """It leaves when it has finished what it has; a new one joins whether or not it has left by then."""
        rollouts = self.world.rollouts
        self.world.send(events.DrainRequested(worker=worker))

        def join() -> None:
            if not self.world.core.state.finished:
                known = [*rollouts.engines, *(w for w in self.world.core.state.fenced if w.startswith("rollout-"))]
                number = 1 + max(int(name.rpartition("-")[2]) for name in known)
                rollouts.join(WorkerId(f"rollout-{number}"), 1)

        self.world.after(self.plan.replace_s, join)

    def _engine_crash(self, worker: WorkerId) -> None:
        engine = self.world.rollouts.kill(worker)
        assert engine is not None
        self.world.rollouts.rejoin(worker, engine.incarnation, self.plan.restart_s)
        self.world.send(
            events.WorkerLost(worker=worker, incarnation=engine.incarnation, reason="its process ended with signal 9")
        )

    def _engine_hang(self, worker: WorkerId) -> None:
        self.world.rollouts.hang(worker)

    def _engine_slow(self, worker: WorkerId) -> None:
        engine = self.world.rollouts.engines[worker]
        self._set_pace(worker, engine, SLOW_FACTOR)
        self.world.after(self.plan.slow_s, lambda: self._set_pace(worker, engine, 1.0))

    def _set_pace(self, worker: WorkerId, engine: Engine, factor: float) -> None:
        if self.world.rollouts.engines.get(worker) is engine:
            engine.replica.set_pace(self.world.now, factor)
            self.world.rollouts.schedule(worker, engine)

    def _host_lost(self, worker: WorkerId) -> None:
        """At least one replica elsewhere survives; a run without any is over, which is another test."""
        state = self.world.core.state
        host = state.replicas[worker].host if worker in state.replicas else ""
        there = [w for w in self.world.rollouts.engines if w in state.replicas and state.replicas[w].host == host]
        if len(there) >= len([w for w, engine in self.world.rollouts.engines.items() if engine.connected]):
            there = there[:-1]
        else:
            self.world.relays.lose_host(host, self.plan.replace_s)
        for name in there:
            engine = self.world.rollouts.kill(name)
            assert engine is not None
            self.world.rollouts.rejoin(name, engine.incarnation, self.plan.replace_s)
            self.world.send(events.WorkerDisconnected(worker=name, incarnation=engine.incarnation))

    def _cut(self, worker: WorkerId, seconds: float) -> None:
        engine = self.world.rollouts.engines[worker]
        engine.connected = False
        self.world.send(events.WorkerDisconnected(worker=worker, incarnation=engine.incarnation))
        self.world.after(seconds, lambda: self._heal(worker, engine))

    def _heal(self, worker: WorkerId, engine: Engine) -> None:
        """Back in time: what it had to say is said. Too late: it is refused, and a new process starts."""
        world = self.world
        if world.core.state.finished:
            return
        if engine.given_up:
            world.send(
                events.ReplicaJoined(
                    worker=worker,
                    incarnation=engine.incarnation,
                    host="returned",
                    num_requests_max=world.cluster.num_requests_max,
                    kv_tokens_max=world.cluster.kv_tokens_max,
                    num_requests_memory_bound=world.cluster.requests_memory_bound,
                )
            )
            if worker in world.core.state.replicas and worker not in world.rollouts.engines:
                raise SimulationError(f"{worker} was given up, returned with its old incarnation, and was taken back")
            self.world.rollouts.rejoin(worker, engine.incarnation, self.plan.restart_s)
            return
        if world.rollouts.engines.get(worker) is not engine:
            return  # it died behind the broken channel
        engine.connected = True
        world.send(events.WorkerReturned(worker=worker, incarnation=engine.incarnation))
        backlog, engine.backlog, engine.unsent = engine.backlog, [], []
        for say in backlog:
            say()

    def _trainer_crash(self) -> bool:
        trains = self.world.core.state.trainer.ready
        if trains:
            self.world.training.crash()
        return trains

    def _storage_full(self) -> bool:
        training = self.world.training
        if training.full:
            return False
        training.full = True
        self.world.send(events.StorageFailed(reason="no space left on device"))
        self.world.after(self.plan.full_s, self._storage_cleared)
        return True

    def _storage_cleared(self) -> None:
        self.world.training.full = False
        self.world.send(events.StorageRecovered())

    def _controller_crash(self) -> None:
        core = self.world.core
        self.world.core = Core.restore(core.configured, core.snapshot())
