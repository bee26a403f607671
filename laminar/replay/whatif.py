"""A recorded run simulated again as it was, and with something changed: the same core, lengths, costs and faults, in virtual time.

    recorded life ──► rates ──► as it was ──► how far the simulation is from the run (calibration)
                           └──► changed   ──► what the change does, as far as the simulation can tell

As it was, each trajectory has its recorded length: groups are numbered and drawn in the same order. What the run had not generated
has lengths drawn from those that it had.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from laminar import samplers
from laminar.core import actions, events
from laminar.core.amend import FIFO
from laminar.core.groups import SAMPLING_STREAM
from laminar.core.sampling import Sampler
from laminar.core.settings import Settings
from laminar.errors import LaminarError
from laminar.ids import WorkerId, derive_seeds, make_id
from laminar.replay.changes import Changes
from laminar.replay.meter import STEPS_MIN, Figures, Meter
from laminar.replay.playback import Playback
from laminar.replay.rates import Fault, Rates
from laminar.replay.recording import Life, Recording
from laminar.sim.decode import DecodeModel
from laminar.sim.measure import Measures
from laminar.sim.measured import Costs, MeasuredCluster, measured
from laminar.sim.workload import Draw, Workload
from laminar.sim.world import SimulationError, World

FLUSHES_MAX = 100_000  # reports of a whole simulated run; more often than recorded they never come
TIMES_LONGER_MAX = 20.0  # than the recorded run; one that takes longer is told as far as it came
FLUSHES_PER_TIMEOUT = 3  # tokens are heard of once a flush, which must not be taken for a hang
BACK_S = 60.0  # of what the recorded run had not back when it ended


class WhatIfError(LaminarError):
    """The recorded run cannot be simulated."""


class Comparison(NamedTuple):
    """Three runs in the same numbers."""

    real: Figures
    again: Figures
    """Simulated as it was."""
    changed: Figures
    notes: list[str]
    """What the simulation leaves out of this very run, for people."""


class Recorded(NamedTuple):
    """What a re-simulation is made of."""

    settings: Settings
    """As they were at the end."""
    num_steps: int
    """Train steps that ended."""
    rates: Rates
    costs: Costs
    real: Figures
    ended: bool
    """By itself: all of its steps are done."""
    seconds: float
    """From the first group on."""
    left_out: list[str]
    """What of the recording could not be read, for people."""


def whatif(recording: Recording, changes: Changes, life: Life | None = None) -> Comparison:
    """Of one life, the last by default. Raises ConfigError for changes that cannot work, WhatIfError, TooShort, RecordingError or
    ReplayError for a run that cannot be simulated."""
    recorded = record(recording, life)
    again = simulated(recorded, Changes())
    changed = simulated(recorded, changes)
    return Comparison(recorded.real, again, changed, _notes(recorded, changes))


def record(recording: Recording, life: Life | None = None) -> Recorded:
    """Replay a life and measure it."""
    playback, rates, meter = Playback(recording, life), Rates(), Meter()
    for step in playback.steps():
        rates.observe(playback.core, step.event, step.actions)
        meter.observe(playback.core, step.event, step.actions)
    core, costs, real = playback.core, rates.costs(), meter.figures()
    if costs is None or not rates.replicas:
        raise WhatIfError(
            f"{recording.path}: no replica reported tokens while it generated, or no train step was seen whole: the speed of its "
            "machines is not known"
        )
    seconds = core.state.at - rates.began
    ended = core.state.trainer.step >= core.settings.steps
    left_out = [text for text in (recording.left_out, *playback.not_replayed()) if text]
    return Recorded(core.settings, meter.num_steps, rates, costs, real, ended, seconds, left_out)


def simulated(recorded: Recorded, changes: Changes) -> Figures:
    """What the run comes to with these changes. Raises ConfigError, WhatIfError, TooShort."""
    world = _world(recorded, changes)
    limit_s = TIMES_LONGER_MAX * recorded.seconds
    try:
        world.run(until=lambda: world.now > limit_s or world.meter.num_steps >= recorded.num_steps)
    except SimulationError as error:
        raise WhatIfError(f"the simulated run broke: {error}") from error
    if world.meter.num_steps < STEPS_MIN:
        raise WhatIfError(
            f"the simulated run came to train step {world.core.state.trainer.step} only"
            + (
                f": {world.core.state.finished}"
                if world.core.state.finished
                else f" within {limit_s:.0f} s of its time"
            )
        )
    return world.meter.figures(recorded.num_steps)


class _MeteredWorld(World):
    """A world whose events are measured as those of the recorded run were."""

    meter: Meter

    def _handle(self, event: events.AnyEvent) -> list[actions.AnyAction]:
        done = super()._handle(event)
        self.meter.observe(self.core, event, done)
        return done


def _world(recorded: Recorded, changes: Changes) -> _MeteredWorld:
    rates, sampler = recorded.rates, _sampler(changes)
    num_replicas = changes.replicas or len(rates.replicas)
    flush_s = max(rates.flush_s, recorded.seconds * num_replicas / FLUSHES_MAX)
    settings = _settings(recorded, changes, flush_s, sampler)
    world = _MeteredWorld(
        settings=settings,
        cluster=_cluster(recorded, changes, num_replicas),
        workload=_workload(recorded, settings),
        measures=Measures(warmup=1),
        flush_s=flush_s,
        sample_s=TIMES_LONGER_MAX * recorded.seconds + 1.0,
        sampler=sampler,
        stop_after=0 if recorded.ended else recorded.num_steps,
    )
    world.meter = Meter()
    world.training.checkpoint_s = rates.checkpoint_s
    _arm(world, rates.faults if changes.faults else [], list(rates.replicas))
    return world


def _settings(recorded: Recorded, changes: Changes, flush_s: float, sampler: Sampler | None) -> Settings:
    settings = msgspec.structs.replace(
        recorded.settings,
        num_prompts=max(1, recorded.settings.num_prompts),
        evaluate=False,
        custom_sampler=sampler is not None,
        stall_after_s=0.0,
        pinned=False,
    )
    settings = changes.applied(settings)
    patience_s = settings.progress_timeout_s and max(settings.progress_timeout_s, FLUSHES_PER_TIMEOUT * flush_s)
    return msgspec.structs.replace(settings, progress_timeout_s=patience_s)


def _sampler(changes: Changes) -> Sampler | None:
    return samplers.load(changes.sampler, "buffer.sampler") if changes.sampler not in ("", FIFO) else None


def _cluster(recorded: Recorded, changes: Changes, num_replicas: int) -> MeasuredCluster:
    costs, joined = recorded.costs, list(recorded.rates.replicas.values())
    decode, slower = costs.decode, 1.0 / changes.rollout_speed
    trains = 1.0 / changes.trainer_speed
    costs = replace(
        costs,
        decode=DecodeModel(
            weights_s=decode.weights_s * slower,
            kv_s=decode.kv_s * slower,
            flops_s=decode.flops_s * slower,
            overhead_s=decode.overhead_s * slower,
        ),
        step_s=costs.step_s * trains,
        token_s=costs.token_s * trains,
    )
    hosts = max(1, len({event.host for event in joined}))
    return measured(
        costs,
        replicas=num_replicas,
        hosts=max(1, round(hosts * num_replicas / len(joined))),
        num_requests_max=joined[0].num_requests_max,
        kv_tokens_max=joined[0].kv_tokens_max,
        memory_bound=joined[0].num_requests_memory_bound,
    )


# ---- lengths -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecordedWorkload(Workload):
    """Each trajectory's own recorded length; others are drawn."""

    by_seed: dict[int, int] = field(default_factory=dict, repr=False)
    """Sampling seed of the simulated trajectory -> response tokens of the recorded one."""

    def draw(self, seed: int, step: int) -> Draw:
        """As in the recorded run, if that had it."""
        length = self.by_seed.get(seed)
        return Draw(length) if length is not None else super().draw(seed, step)


def _workload(recorded: Recorded, settings: Settings) -> RecordedWorkload:
    rates = recorded.rates
    lengths = sorted(length for length in rates.lengths.values() if length > 0)
    by_seed: dict[int, int] = {}
    for (number, sibling), length in rates.lengths.items():
        if sibling < settings.group_size and length > 0:
            seeds = derive_seeds(settings.seed, SAMPLING_STREAM, make_id(1, number), num=sibling + 1)
            by_seed[seeds[sibling]] = length
    prompts = rates.prompt_tokens or [1]
    return RecordedWorkload(
        name="recorded",
        lengths=tuple(lengths),
        median=float(lengths[len(lengths) // 2]),
        tokens_max=lengths[-1],
        prompt_tokens=max(1, round(sum(prompts) / len(prompts))),
        by_seed=by_seed,
    )


# ---- faults ------------------------------------------------------------------------------------------------


def _arm(world: World, faults: list[Fault], replicas: list[WorkerId]) -> None:
    """What came and went does so again, as long after the beginning."""
    strikes: dict[str, Callable[[Fault, WorkerId], None]] = {
        "lost": lambda fault, worker: _lose(world, fault, worker),
        "trainer": lambda fault, worker: _lose_trainer(world, fault),
        "drained": lambda fault, worker: world.send(events.DrainRequested(worker=worker)),
        "joined": lambda fault, worker: world.rollouts.join(_next_name(world), 1),
    }
    for fault in faults:
        index = replicas.index(fault.worker) if fault.worker in replicas else len(replicas) - 1
        worker = WorkerId(f"rollout-{index}")
        world.at(fault.after_s, lambda fault=fault, worker=worker: strikes[fault.kind](fault, worker))  # type: ignore[misc]


def _lose(world: World, fault: Fault, worker: WorkerId) -> None:
    if world.core.state.finished or worker not in world.rollouts.engines:
        return
    engine = world.rollouts.kill(worker)
    assert engine is not None
    world.rollouts.rejoin(worker, engine.incarnation, fault.seconds or BACK_S)
    world.send(events.WorkerLost(worker=worker, incarnation=engine.incarnation, reason="as recorded"))


def _lose_trainer(world: World, fault: Fault) -> None:
    if world.core.state.trainer.ready and not world.core.state.finished:
        world.training.restart_s = fault.seconds or BACK_S
        world.training.crash()


def _next_name(world: World) -> WorkerId:
    used = sorted(int(worker.rpartition("-")[2]) for worker in world.rollouts.engines)
    free = next((n for n in range(len(used)) if bisect_left(used, n) == len(used) or used[n] != n), len(used))
    return WorkerId(f"rollout-{free}")


# ---- what is left out --------------------------------------------------------------------------------------


def _notes(recorded: Recorded, changes: Changes) -> list[str]:
    rates, settings = recorded.rates, recorded.settings
    rewards_s = sum(rates.rewards_s) / len(rates.rewards_s) if rates.rewards_s else 0.0
    notes = [
        (settings.custom_sampler and not changes.sampler, "batches were chosen by a custom sampler; simulated is FIFO, or "
         "what buffer.sampler=REF names (every reward is 1 there)"),
        (rewards_s > 0.05 * recorded.real.step_s, f"rewards took {rewards_s:.2f} s on average; simulated they take none"),
        (settings.pinned, "trajectories were agent programs; simulated is their generation alone, without tools"),
        (rates.away_s > 0.0, f"no controller listened for {rates.away_s:.0f} s; simulated it always does"),
        (rates.num_relays_lost > 0, f"{rates.num_relays_lost} relays were lost; simulated none is"),
        (rates.num_amended > 0, "an operator changed settings while it ran; simulated it has the last ones from the beginning"),
        (bool(changes.replicas) and changes.faults and bool(rates.faults), "the recorded faults strike the same replicas"),
    ]  # fmt: skip
    return [*recorded.left_out, *(text for applies, text in notes if applies)]
