"""A world that begins in the midst of a run: its machines hold and do what the core's state says, and go on from there.

    snapshot ──► Core ──► World(core=…) ──► begin: slots of relays, requests in engines, pulls, publication, step, checkpoint

Nothing is known here that the core does not know: what an engine has generated since its last report, or how far a pull is. An
evaluation under way is over at once, a broken channel is back, and what was lost comes back as in any simulated run.
"""

from functools import partial
from typing import TYPE_CHECKING

from laminar.core import actions, events, versions
from laminar.core.records import Replica as ReplicaRecord
from laminar.core.records import State, Trajectory, TrajectoryState
from laminar.ids import WorkerId
from laminar.sim.engine import Engine
from laminar.sim.replica import Replica
from laminar.sim.request import Request
from laminar.sim.workload import Draw

if TYPE_CHECKING:
    from laminar.sim.world import World


def begin(world: "World") -> None:
    """In place of the first events of a run."""
    state = world.core.state
    world.relays.begin_midway()
    _begin_rollouts(world, state)
    world.training.begin_midway()
    for worker in list(state.silent):
        world.send(events.WorkerReturned(worker=worker, incarnation=_incarnation(state, worker)))
    for evaluation in [evaluation for evaluation in state.evaluations if not evaluation.done]:
        world.send(events.EvaluationFinished(evaluation=evaluation.id, accuracy=0.0, num_prompts=0))
    world.set_timer()


def _incarnation(state: State, worker: WorkerId) -> int:
    if worker in state.replicas:
        return state.replicas[worker].incarnation
    return state.relays[worker].incarnation if worker in state.relays else state.trainer.ranks.get(worker, 0)


# ---- rollouts ----------------------------------------------------------------------------------------------


def _begin_rollouts(world: "World", state: State) -> None:
    rollouts = world.rollouts
    for record in state.trajectories.values():
        rollouts.stored[record.id] = record.num_tokens
        rollouts.attempts[record.id] = record.attempt - (record.state == TrajectoryState.QUEUED)
        if record.behavior_version is not None:
            rollouts.versions[record.id] = record.behavior_version
    for replica in state.replicas.values():
        _take_up(world, replica)
    for worker, restart in state.restarts.items():
        if restart.role == "rollout" and (restart.due_at or restart.starting):
            rollouts.rejoin(worker, state.fenced.get(worker, 0), rollouts.restart_s)
    world.after(world.flush_s, rollouts.flush)


def _take_up(world: "World", replica: ReplicaRecord) -> None:
    """Its engine, with what the core knows to be in it. A pull under way takes as long as if it began now."""
    engine = Engine(replica=Replica(world.cluster, world.now), incarnation=replica.incarnation)
    world.rollouts.engines[replica.id] = engine
    say = partial(world.rollouts.say, replica.id, engine)
    for record in [world.core.state.trajectories[trajectory] for trajectory in replica.attempts]:
        if record.state == TrajectoryState.REWARDING:
            rewarded = events.RewardedAttempt(trajectory=record.id, attempt=record.attempt, reward=1.0, parts={})
            world.after(_draw(world, record).reward_s, partial(say, rewarded=[rewarded]))
        elif record.id in replica.leaving:
            aborted = events.AbortedAttempt(trajectory=record.id, attempt=record.attempt)
            world.after(0.0, partial(say, aborted=[aborted]))
        else:
            engine.replica.submit(world.now, _under_way(world, record))
    if replica.target is not None:
        known = versions.find(world.core.state, replica.target)
        digest = known.digest if known else ""
        pull = actions.PullWeights(cause=0, worker=replica.id, version=replica.target, digest=digest)
        world.rollouts.answers[actions.PullWeights](pull)
    world.rollouts.schedule(replica.id, engine)


def _draw(world: "World", record: Trajectory) -> Draw:
    assert record.behavior_version is not None
    return world.workload.rest(record.seed, record.behavior_version.step, record.num_tokens)


def _under_way(world: "World", record: Trajectory) -> Request:
    """It goes on from its last report; its KV is there."""
    draw = _draw(world, record)
    assert record.behavior_version is not None
    return Request(
        trajectory=record.id,
        attempt=record.attempt,
        group=record.group,
        version=record.behavior_version,
        draw=draw,
        num_prompt_tokens=record.num_prompt_tokens or world.workload.prompt_tokens,
        num_tokens=record.num_tokens,
        submitted_at=world.now,
        prefill_tokens=0,
        next_pause=sum(pause.at < record.num_tokens for pause in draw.pauses),
    )
