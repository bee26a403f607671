"""A recorded run simulated again as it was, and with something changed: the same core, lengths, costs and faults, in virtual time.

    recorded life ──► rates ──► as it was ──► how far the simulation is from the run (calibration)
                           └──► changed   ──► what the change does, as far as the simulation can tell

What the simulated machines cost and generate: `laminar.replay.model`.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from laminar import samplers
from laminar.core import events
from laminar.core.amend import FIFO
from laminar.core.groups import SAMPLING_STREAM
from laminar.core.sampling import Sampler
from laminar.core.settings import Settings
from laminar.ids import WorkerId, derive_seeds, make_id
from laminar.replay import model
from laminar.replay.changes import Changes
from laminar.replay.meter import STEPS_MIN, Figures, Meter
from laminar.replay.model import NotSimulated
from laminar.replay.playback import Playback
from laminar.replay.rates import Fault, Rates, Response
from laminar.replay.recording import Life, Recording
from laminar.sim.measure import Measures
from laminar.sim.measured import Costs
from laminar.sim.world import SimulationError, World

FLUSHES_MAX = 100_000  # reports of a whole simulated run; more often than recorded they never come
TIMES_LONGER_MAX = 20.0  # than the recorded run; one that takes longer is told as far as it came
BACK_S = 60.0  # of what the recorded run had not back when it ended


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
    """Of one life, the last by default. Raises ConfigError for changes that cannot work, NotSimulated, TooShort, RecordingError or
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
    core, real = playback.core, meter.figures()
    costs = model.costs_of(rates, recording.path)
    seconds = core.state.at - rates.began
    ended = core.state.trainer.step >= core.settings.steps
    left_out = [text for text in (recording.left_out, *playback.not_replayed()) if text]
    return Recorded(core.settings, meter.num_steps, rates, costs, real, ended, seconds, left_out)


def simulated(recorded: Recorded, changes: Changes) -> Figures:
    """What the run comes to with these changes. Raises ConfigError, NotSimulated, TooShort."""
    world, meter = _world(recorded, changes), Meter()
    world.observe = meter.observe
    limit_s = TIMES_LONGER_MAX * recorded.seconds
    try:
        world.run(until=lambda: world.now > limit_s or meter.num_steps >= recorded.num_steps)
    except SimulationError as error:
        raise NotSimulated(f"the simulated run broke: {error}") from error
    finally:
        world.close()
    if meter.num_steps < STEPS_MIN:
        raise NotSimulated(
            f"the simulated run came to train step {world.core.state.trainer.step} only"
            + (
                f": {world.core.state.finished}"
                if world.core.state.finished
                else f" within {limit_s:.0f} s of its time"
            )
        )
    return meter.figures(recorded.num_steps)


def _world(recorded: Recorded, changes: Changes) -> World:
    rates, sampler = recorded.rates, _sampler(changes)
    num_replicas = changes.replicas or len(rates.replicas)
    flush_s = max(rates.flush_s, recorded.seconds * num_replicas / FLUSHES_MAX)
    settings = model.settings_of(changes.applied(recorded.settings), flush_s, custom_sampler=sampler is not None)
    world = World(
        settings=settings,
        cluster=model.cluster_of(rates, recorded.costs, changes, num_replicas),
        workload=model.workload_of(rates, _seeds(recorded, settings.group_size)),
        measures=Measures(warmup=1),
        flush_s=flush_s,
        sample_s=TIMES_LONGER_MAX * recorded.seconds + 1.0,
        sampler=sampler,
        stop_after=0 if recorded.ended else recorded.num_steps,
    )
    world.training.checkpoint_s = rates.checkpoint_s
    _arm(world, rates.faults if changes.faults else [], list(rates.replicas))
    return world


def _sampler(changes: Changes) -> Sampler | None:
    return samplers.load(changes.sampler, "buffer.sampler") if changes.sampler not in ("", FIFO) else None


def _seeds(recorded: Recorded, group_size: int) -> dict[int, Response]:
    """Sampling seeds of a run of the same seed from its beginning -> the recorded responses of the same groups and siblings."""
    found = {}
    for (number, sibling), response in recorded.rates.responses.items():
        if sibling < group_size:
            seeds = derive_seeds(recorded.settings.seed, SAMPLING_STREAM, make_id(1, number), num=sibling + 1)
            found[seeds[sibling]] = response
    return found


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
    notes = [
        (settings.custom_sampler and not changes.sampler, "batches were chosen by a custom sampler; simulated is FIFO, or "
         "what buffer.sampler=REF names (every reward is 1 there)"),
        (settings.pinned, "trajectories were agent programs; simulated is their generation alone, without tools"),
        (rates.away_s > 0.0, f"no controller listened for {rates.away_s:.0f} s; simulated it always does"),
        (rates.num_relays_lost > 0, f"{rates.num_relays_lost} relays were lost; simulated none is"),
        (rates.num_amended > 0, "an operator changed settings while it ran; simulated it has the last ones from the beginning"),
        (rates.num_held > 0, "passes were held, by an operator or a breakpoint; simulated nothing is"),
        (bool(changes.replicas) and changes.faults and bool(rates.faults), "the recorded faults strike the same replicas"),
    ]  # fmt: skip
    return [*recorded.left_out, *(text for applies, text in notes if applies)]
