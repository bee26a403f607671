"""Groups and their trajectories from the draw of a prompt to a complete group in the buffer.

Invariants:
* A group's siblings start together on one replica under one version; a trajectory's tokens are all of that version.
* An attempt ends once: as rewarded or failed, or with its replica. Answers to old attempts change nothing.
* A sibling that fails for infrastructure reasons is queued again (bounded); one that fails for reasons of data never
  becomes a zero-reward row: the group is dropped, or trained without it if the settings allow.
"""

from array import array

from laminar.core import ledger, pace, story, versions
from laminar.core.actions import AbortAttempts, ForgetTokens, RecordTrajectories, Start, StartGroup
from laminar.core.events import AbortedAttempt, FailedAttempt, FinishedAttempt, ReplicaReported, RewardedAttempt
from laminar.core.prompts import draw
from laminar.core.records import Group, GroupState, Replica, State, Timings, Trajectory, TrajectoryState
from laminar.core.turn import Turn
from laminar.ids import GroupId, TrajectoryId, derive_seeds, make_id

SAMPLING_STREAM = 2  # keeps the seeds of trajectories apart from the prompt order's

REWARDS_LOST_MAX = {"reward_timeout": 8, "reward_crash": 16}
"""Trajectories given up in a row. Each reward was tried twice in a process of its own, one that ended it in every retry: that is no
accident. Half as many of those that cost `task.reward_timeout_s`."""

OPEN_STATES = (TrajectoryState.QUEUED, TrajectoryState.GENERATING, TrajectoryState.REWARDING)


def open_group(turn: Turn) -> Group:
    """Draw a prompt; its siblings are queued."""
    state, settings = turn.state, turn.settings
    state.num_groups += 1
    group_id = GroupId(make_id(state.boot, state.num_groups))
    group = Group(id=group_id, prompt=draw(state.prompts, settings), trajectories=[], num_open=settings.group_size)
    seeds = derive_seeds(settings.seed, SAMPLING_STREAM, group_id, num=settings.group_size)
    for sibling, seed in enumerate(seeds):
        state.num_trajectories += 1
        trajectory = Trajectory(
            id=TrajectoryId(make_id(state.boot, state.num_trajectories)),
            group=group_id,
            prompt=group.prompt,
            sibling=sibling,
            seed=seed,
        )
        state.trajectories[trajectory.id] = trajectory
        group.trajectories.append(trajectory.id)
    state.groups[group_id] = group
    ledger.draw(state, settings.group_size)
    return group


def start(turn: Turn, replica: Replica, group: Group, trajectories: list[TrajectoryId]) -> None:
    """Send queued siblings to a replica that holds the group's version (or any version, if the group has none yet)."""
    assert replica.version is not None
    state = turn.state
    record = versions.find(state, replica.version)
    starts = []
    for trajectory_id in trajectories:
        trajectory = state.trajectories[trajectory_id]
        if trajectory.moving_to:
            _count_move(turn, trajectory, replica)
        score_only = bool(trajectory.finish_reason)
        trajectory.worker = replica.id
        trajectory.state = TrajectoryState.REWARDING if score_only else TrajectoryState.GENERATING
        if trajectory.behavior_version is None:
            trajectory.behavior_version = replica.version
            trajectory.digest = record.digest if record else ""
        trajectory.timings.queued = trajectory.timings.queued or turn.at
        replica.attempts[trajectory_id] = trajectory.attempt
        replica.num_generating += not score_only
        resume = score_only or trajectory.num_tokens > 0
        starts.append(Start(trajectory_id, trajectory.attempt, trajectory.seed, resume, score_only))
    group.version = group.version or replica.version
    state.may_have_aged |= group.num_regenerations > 0
    group.worker = replica.id
    turn.emit(
        StartGroup(
            cause=turn.cause,
            worker=replica.id,
            group=group.id,
            version=replica.version,
            prompt=group.prompt,
            starts=starts,
        )
    )
    turn.tell(
        f"{len(starts)} siblings started under {replica.version}",
        story.group(group.id),
        story.worker(replica.id),
        *(story.trajectory(start.trajectory) for start in starts),
    )


def _count_move(turn: Turn, trajectory: Trajectory, replica: Replica) -> None:
    repack = turn.state.repack
    repack.num_moves += trajectory.moving_to == replica.id
    repack.num_moved_tokens += trajectory.num_tokens
    unpin(turn, trajectory)


# ---- reports -----------------------------------------------------------------------------------------------


def on_report(turn: Turn, event: ReplicaReported) -> None:
    """Lengths of what is generating, then what finished, was rewarded or failed, in this order."""
    replica = turn.state.replicas.get(event.worker)
    if replica is None or replica.incarnation != event.incarnation:
        return
    if event.trajectories:
        _take_lengths(turn, replica, event)
    replica.num_running, replica.num_waiting, replica.kv_tokens = event.num_running, event.num_waiting, event.kv_tokens
    for finished in event.finished:
        _finish(turn, replica, finished)
    for rewarded in event.rewarded:
        _reward(turn, replica, rewarded)
    for failed in event.failed:
        _fail(turn, replica, failed)
    for aborted in event.aborted:
        _abort(turn, replica, aborted)
    if event.finished or event.rewarded or event.failed or event.aborted:
        turn.state.dirty[replica.id] = None


def _take_lengths(turn: Turn, replica: Replica, event: ReplicaReported) -> None:
    ids, attempts, lengths = array("q", event.trajectories), array("i", event.attempts), array("i", event.num_tokens)
    records, current = turn.state.trajectories, replica.attempts
    received = 0
    for trajectory_id, attempt, length in zip(ids, attempts, lengths, strict=True):
        if current.get(trajectory_id) == attempt:  # type: ignore[call-overload]
            record = records[trajectory_id]  # type: ignore[index]
            received += length - record.num_tokens
            record.num_tokens = length
    ledger.receive(turn.state, received)


def _current(turn: Turn, replica: Replica, trajectory_id: TrajectoryId, attempt: int) -> Trajectory | None:
    if replica.attempts.get(trajectory_id) != attempt:
        turn.tell(f"answer of old attempt {attempt} ignored", story.trajectory(trajectory_id))
        return None
    return turn.state.trajectories[trajectory_id]


def _finish(turn: Turn, replica: Replica, finished: FinishedAttempt) -> None:
    trajectory = _current(turn, replica, finished.trajectory, finished.attempt)
    if trajectory is None or trajectory.state != TrajectoryState.GENERATING:
        return
    unpin(turn, trajectory)  # a finish beats a move
    trajectory.state = TrajectoryState.REWARDING
    trajectory.finish_reason = finished.finish_reason
    trajectory.finish_version = turn.trainer_version
    trajectory.num_prompt_tokens = finished.num_prompt_tokens
    ledger.receive(turn.state, finished.num_tokens - trajectory.num_tokens)
    trajectory.num_tokens = finished.num_tokens
    trajectory.timings.first_token = trajectory.timings.queued + finished.queued_s
    trajectory.timings.finished = turn.at
    pace.generated(turn.state.pace, turn.at - trajectory.timings.queued)
    replica.num_generating -= 1


def _reward(turn: Turn, replica: Replica, rewarded: RewardedAttempt) -> None:
    trajectory = _current(turn, replica, rewarded.trajectory, rewarded.attempt)
    if trajectory is None or trajectory.state != TrajectoryState.REWARDING:
        return
    del replica.attempts[trajectory.id]
    turn.state.num_rewards_lost_in_row = 0
    trajectory.state = TrajectoryState.DONE
    trajectory.worker = None
    trajectory.reward, trajectory.reward_parts = rewarded.reward, rewarded.parts
    trajectory.timings.rewarded = turn.at
    _close_one(turn, turn.state.groups[trajectory.group])


def _fail(turn: Turn, replica: Replica, failed: FailedAttempt) -> None:
    trajectory = _current(turn, replica, failed.trajectory, failed.attempt)
    if trajectory is None:
        return
    _leave(turn, replica, trajectory)
    trajectory.num_failures += 1
    if failed.kind == "infra" and trajectory.num_failures <= turn.settings.num_retries:
        queue_again(turn, trajectory, failed.reason)
        return
    if failed.reason in REWARDS_LOST_MAX:
        _count_lost_reward(turn, failed.reason)
    trajectory.state = TrajectoryState.FAILED
    trajectory.worker = None
    trajectory.failure = failed.reason
    trajectory.finish_reason = "failed"
    turn.tell(
        f"failed ({failed.kind}): {failed.reason}", story.trajectory(trajectory.id), story.group(trajectory.group)
    )
    _close_one(turn, turn.state.groups[trajectory.group])


def _abort(turn: Turn, replica: Replica, aborted: AbortedAttempt) -> None:
    """The source of a move has let go; the destination goes on from the tokens received."""
    trajectory = _current(turn, replica, aborted.trajectory, aborted.attempt)
    if trajectory is None or trajectory.state != TrajectoryState.GENERATING:
        return
    destination = trajectory.moving_to
    _leave(turn, replica, trajectory)
    queue_again(turn, trajectory, "move")
    if destination in turn.state.replicas:
        pin(trajectory, turn.state.replicas[destination], trajectory.num_tokens)


def pin(trajectory: Trajectory, destination: Replica, kv_tokens: int) -> None:
    """`destination` expects the trajectory: it keeps its version and reserves KV."""
    trajectory.moving_to = destination.id
    destination.incoming[trajectory.id] = kv_tokens


def unpin(turn: Turn, trajectory: Trajectory) -> None:
    """The move, if there is one, is over or off."""
    if trajectory.moving_to is None:
        return
    destination = turn.state.replicas.get(trajectory.moving_to)
    if destination is not None:
        destination.incoming.pop(trajectory.id, None)
        turn.state.dirty[destination.id] = None
    source = turn.state.replicas.get(trajectory.worker) if trajectory.worker else None
    if source is not None:
        source.leaving.pop(trajectory.id, None)
    trajectory.moving_to = None


def _leave(turn: Turn, replica: Replica, trajectory: Trajectory) -> None:
    unpin(turn, trajectory)
    del replica.attempts[trajectory.id]
    replica.num_generating -= trajectory.state == TrajectoryState.GENERATING


# ---- starting again ----------------------------------------------------------------------------------------


def queue_again(turn: Turn, trajectory: Trajectory, reason: str) -> None:
    """The attempt is over without a result; the next one goes on from the tokens received, or, if pinned, from the beginning."""
    trajectory.attempt += 1
    trajectory.state = TrajectoryState.QUEUED
    trajectory.worker = None
    if turn.settings.pinned:
        _clear(turn, trajectory, reason)
    turn.state.requeue[trajectory.group] = None
    turn.tell(f"queued again after {reason}", story.trajectory(trajectory.id), story.group(trajectory.group))


def queued(state: State, group: Group) -> list[TrajectoryId]:
    """Its siblings that wait for a replica."""
    return [t for t in group.trajectories if state.trajectories[t].state == TrajectoryState.QUEUED]


def members(state: State, groups: list[GroupId]) -> list[Trajectory]:
    """The siblings of these groups, group by group."""
    return [state.trajectories[t] for group in groups for t in state.groups[group].trajectories]


def queued_for(turn: Turn, replica: Replica) -> bool:
    """Whether some group waits for the version that the replica holds."""
    return any(turn.state.groups[group].version == replica.version for group in turn.state.requeue)


def lose_attempts(turn: Turn, replica: Replica, reason: str) -> None:
    """The replica is gone: everything it was at is queued again. Not the trajectories' fault, so not counted as theirs."""
    for trajectory_id in list(replica.attempts):
        trajectory = turn.state.trajectories[trajectory_id]
        trajectory.displaced |= trajectory.state == TrajectoryState.GENERATING or turn.settings.pinned
        _leave(turn, replica, trajectory)
        queue_again(turn, trajectory, reason)


def restart(turn: Turn, group: Group, reason: str) -> list[TrajectoryId]:
    """The group's version is gone. Void what must be generated anew and return it: all siblings, or the queued ones."""
    siblings = [turn.state.trajectories[trajectory_id] for trajectory_id in group.trajectories]
    if turn.settings.group_versions == "mixed":
        again = [t for t in siblings if t.state == TrajectoryState.QUEUED and not t.finish_reason]
    else:
        again = siblings
    for trajectory in again:
        _void(turn, trajectory, reason)
    group.version = None
    group.num_open = sum(t.state in OPEN_STATES for t in siblings)
    group.num_regenerations += 1
    turn.look_again()  # it has another age now: `bounds.admits` may have been waiting for that
    turn.tell(f"{len(again)} siblings start again: {reason}", story.group(group.id))
    return [t.id for t in siblings if t.state == TrajectoryState.QUEUED]


def _void(turn: Turn, trajectory: Trajectory, reason: str) -> None:
    _withdraw(turn, trajectory)
    unpin(turn, trajectory)
    if trajectory.state != TrajectoryState.QUEUED:
        trajectory.attempt += 1
    trajectory.state, trajectory.worker = TrajectoryState.QUEUED, None
    _clear(turn, trajectory, reason)


def _clear(turn: Turn, trajectory: Trajectory, reason: str) -> None:
    """Nothing is left of what was generated."""
    ledger.drop_tokens(turn.state, trajectory.num_tokens, reason)
    trajectory.num_tokens = 0
    trajectory.behavior_version = trajectory.finish_version = None
    trajectory.finish_reason = trajectory.failure = ""
    trajectory.reward, trajectory.reward_parts = 0.0, {}
    trajectory.timings = Timings(queued=trajectory.timings.queued)


def _withdraw(turn: Turn, trajectory: Trajectory) -> None:
    """Stop the attempt if one runs: its replica has room again."""
    if trajectory.worker is None:
        return
    replica = turn.state.replicas[trajectory.worker]
    turn.emit(
        AbortAttempts(cause=turn.cause, worker=replica.id, trajectories=[trajectory.id], attempts=[trajectory.attempt])
    )
    _leave(turn, replica, trajectory)
    turn.state.dirty[replica.id] = None


# ---- the end of a group ------------------------------------------------------------------------------------


def _close_one(turn: Turn, group: Group) -> None:
    group.num_open -= 1
    if group.num_open == 0:
        _complete(turn, group)


def complete_without(turn: Turn, group: Group, siblings: list[Trajectory], reason: str) -> None:
    """These, all that are open, are stopped and dropped{reason}; the others are the group."""
    for trajectory in siblings:
        _withdraw(turn, trajectory)
        unpin(turn, trajectory)
        drop_trajectory(turn, group, trajectory, "in_flight", reason)
    turn.state.requeue.pop(group.id, None)
    group.num_open = 0
    turn.tell(f"goes without {len(siblings)} siblings: {reason}", story.group(group.id))
    _complete(turn, group)


def _complete(turn: Turn, group: Group) -> None:
    siblings = [turn.state.trajectories[trajectory_id] for trajectory_id in group.trajectories]
    failed = [t for t in siblings if t.state == TrajectoryState.FAILED]
    usable = len(siblings) - len(failed)
    if failed and (turn.settings.on_incomplete == "drop" or usable < turn.settings.min_group_size):
        drop_group(turn, group, "incomplete_group")
        _count_drop(turn, failed[0].failure)
        return
    for trajectory in failed:
        drop_trajectory(turn, group, trajectory, "in_flight", trajectory.failure)
    remaining = [turn.state.trajectories[trajectory_id] for trajectory_id in group.trajectories]
    ledger.move(turn.state, remaining, "in_flight", "buffered")
    group.state, group.completed_at = GroupState.BUFFERED, turn.at
    turn.state.buffer[group.id] = None
    turn.state.num_drops_in_row = 0
    turn.state.sampler_starved = False
    turn.tell(f"complete with {len(remaining)} siblings", story.group(group.id))


def _count_lost_reward(turn: Turn, reason: str) -> None:
    """A reward function that always hangs or ends its process would be tried for very long: say so early."""
    turn.state.num_rewards_lost_in_row += 1
    if turn.state.num_rewards_lost_in_row >= REWARDS_LOST_MAX[reason]:
        what = "timed out" if reason == "reward_timeout" else "ended their process"
        why = "hangs" if reason == "reward_timeout" else "crashes"
        turn.fail(
            f"{turn.state.num_rewards_lost_in_row} rewards in a row {what} and none came: the reward function {why}"
        )


def _count_drop(turn: Turn, reason: str) -> None:
    state = turn.state
    state.num_drops_in_row += 1
    turn.look_again()
    if state.num_drops_in_row >= turn.settings.drops_without_progress_max:
        turn.fail(
            f"{state.num_drops_in_row} groups in a row were dropped, the last because of {reason}: check the task"
        )


def drop_group(turn: Turn, group: Group, reason: str) -> None:
    """The whole group leaves the state; siblings that failed by themselves are counted under their own reason."""
    source = group.state.value
    for trajectory_id in list(group.trajectories):
        trajectory = turn.state.trajectories[trajectory_id]
        _withdraw(turn, trajectory)
        unpin(turn, trajectory)
        drop_trajectory(turn, group, trajectory, source, trajectory.failure or reason)
    turn.state.requeue.pop(group.id, None)
    turn.state.buffer.pop(group.id, None)
    del turn.state.groups[group.id]
    turn.tell(f"dropped: {reason}", story.group(group.id))


def drop_trajectory(turn: Turn, group: Group, trajectory: Trajectory, source: str, reason: str) -> None:
    """One trajectory leaves the state as dropped{reason}."""
    ledger.drop(turn.state, trajectory, source, reason)
    group.trajectories.remove(trajectory.id)
    del turn.state.trajectories[trajectory.id]
    turn.emit(RecordTrajectories(cause=turn.cause, trajectories=[trajectory]))
    turn.emit(ForgetTokens(cause=turn.cause, trajectories=[trajectory.id]))
