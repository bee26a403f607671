"""What becomes of a run from one of its moments on: a world in its state, with the rates of its log.

    log ──► fit: rates, costs, responses ──┐
    core at a moment ──────────────────────┴──► World that begins midway ──► as it is, or changed

A response that the log has to its end has that length, also one that had only begun at that moment; others have drawn ones. What
breaks after that moment is not foreseen.
"""

from statistics import fmean
from typing import NamedTuple

from laminar.core import snapshot
from laminar.core.engine import Core
from laminar.core.records import Stall, State
from laminar.replay import model
from laminar.replay.changes import Changes
from laminar.replay.model import NotSimulated
from laminar.replay.playback import Playback
from laminar.replay.rates import Rates
from laminar.sim.measure import Measures
from laminar.sim.measured import Costs
from laminar.sim.world import SimulationError, World


class Fit(NamedTuple):
    """What the machines of a run do and cost."""

    rates: Rates
    costs: Costs


def fit(playback: Playback) -> Fit:
    """Of all events that are still to come; the playback's core is that of the last one then. Raises NotSimulated, RecordingError,
    ReplayError."""
    rates = Rates()
    for step in playback.steps():
        rates.observe(playback.core, step.event, step.actions)
    return Fit(rates, model.costs_of(rates, playback.recording.path))


def world(core: Core, fitted: Fit) -> World:
    """A world in the state of `core`, which is not touched, and at its moment. Raises NotSimulated."""
    rates, state = fitted.rates, snapshot.decode(core.snapshot())
    if reason := _why_not(state):
        raise NotSimulated(f"at event {state.seq} {reason}; go to another one")
    _leave_out(state)
    settings = model.settings_of(core.configured, rates.flush_s, custom_sampler=False)
    hosts = tuple(dict.fromkeys(replica.host for replica in state.replicas.values()))
    made = World(
        settings=settings,
        cluster=model.cluster_of(rates, fitted.costs, Changes(), len(state.replicas), hosts),
        workload=model.workload_of(rates, {each.seed: each for each in rates.responses.values()}),
        measures=Measures(warmup=0),
        flush_s=rates.flush_s,
        sample_s=rates.flush_s,
        core=Core(settings, state),
    )
    made.training.checkpoint_s = rates.checkpoint_s
    away_s = [fault.seconds for fault in rates.faults if fault.seconds]
    if away_s:
        made.rollouts.restart_s = made.training.restart_s = fmean(away_s)
    try:
        made.begin()
    except SimulationError as error:
        raise NotSimulated(f"at event {state.seq} the state cannot be simulated: {error}") from error
    return made


def _why_not(state: State) -> str:
    if state.finished:
        return f"the run is over ({state.finished})"
    if not state.replicas or state.trainer.branch < 0:
        return "the run has not begun: a trainer and a replica have to have joined"
    return ""


def _leave_out(state: State) -> None:
    """Nobody is told of a stall. Batches are FIFO: what the run's own sampler would say is not known."""
    state.stall = Stall()
    state.sampler_request, state.sampler_answer, state.sampler_starved = None, [], False
    state.sampler, state.sampler_state = "", b""
    state.amended.pop("custom_sampler", None)
