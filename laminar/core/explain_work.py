"""Answers of `laminar.core.explain` about what is made: groups, trajectories, weight versions, train steps."""

from laminar.core import (
    bounds,
    choice,
    dispatch,
    groups,
    retention,
    story,
    stragglers,
    training,
    versions,
    waits,
)
from laminar.core.explanation import Explanation, Line, held, listed, seconds
from laminar.core.records import Group, GroupState, Trajectory, TrajectoryState, VersionRecord
from laminar.core.turn import Turn
from laminar.ids import GroupId, TrajectoryId, Version

SIBLINGS_SHOWN = 16  # a line each; the usual group is smaller

# ---- groups ------------------------------------------------------------------------------------------------


def why_group(turn: Turn, group_id: GroupId) -> Explanation:
    """Why it is not sampled yet: whom it waits for, or its place in the buffer. Raises LookupError for one that is not live."""
    group, subject = turn.state.groups.get(group_id), story.group(group_id)
    if group is None:
        raise LookupError(f"{subject} is not live: committed, dropped or never drawn; `story {subject}` may know more")
    text, lines = _PLACES[group.state](turn, group)
    return Explanation(subject=subject, text=f"{subject} {text}", lines=[*lines, *_age(turn, group)])


def _in_flight(turn: Turn, group: Group) -> tuple[str, list[Line]]:
    siblings = [turn.state.trajectories[t] for t in group.trajectories]
    missing = [t for t in siblings if t.state in groups.OPEN_STATES]
    lines = [Line(story.trajectory(t.id), _where(turn, t)) for t in missing[:SIBLINGS_SHOWN]]
    if len(missing) > SIBLINGS_SHOWN:
        lines.append(Line("siblings", f"{len(missing) - SIBLINGS_SHOWN} more are missing"))
    if queued := groups.queued(turn.state, group):
        lines.append(_queued(turn, group, len(queued)))
    if turn.settings.stragglers == "drop" and (due := stragglers.due_at(turn, group)) != stragglers.NEVER:
        lines.append(
            Line("stragglers", f"it goes on without those that generate, unless they end, in {due - turn.at:.1f} s")
        )
    if group.num_regenerations:
        lines.append(Line("regenerated", f"{group.num_regenerations} times, because its version was gone"))
    names = listed([story.trajectory(t.id) for t in missing])
    return f"is not complete: {len(missing)} of {len(siblings)} siblings are missing ({names})", lines


def _queued(turn: Turn, group: Group, num: int) -> Line:
    """Where its queued siblings go."""
    if turn.state.stopping:
        return Line("queued", f"{num} siblings, which stay queued: the run is stopping", False)
    goes = dispatch.for_siblings(turn, group)
    if isinstance(goes, str):
        return Line("queued", f"{num} siblings: {goes}", False)
    again = ", from the beginning" if goes.restart else ""
    return Line("queued", f"{num} siblings: they go to {goes.worker}{again}{held(turn.state, 'dispatch')}", True)


def _buffered(turn: Turn, group: Group) -> tuple[str, list[Line]]:
    state, num = turn.state, turn.settings.batch_groups
    order = bounds.oldest_first(turn)
    before = order.index(group.id)
    by = "the custom sampler chooses" if turn.settings.custom_sampler else _order_of(turn)
    lines = [
        Line(
            "buffer",
            f"complete {seconds(turn.at, group.completed_at)}; {before} of {len(order)} groups are before it; {by}",
        )
    ]
    if turn.settings.custom_sampler:
        lines.append(_sampler(turn, group))
    if reason := training.why_no_batch(turn):
        return f"is complete and waits: the trainer takes no batch now, because {reason}", lines
    is_next = group.id in state.sampler_answer if turn.settings.custom_sampler else before < num
    when = "the batch that is taken next" if is_next else "a later batch"
    return f"is complete and waits for {when}{held(state, 'sample')}", lines


def _order_of(turn: Turn) -> str:
    by_age = turn.settings.max_staleness is not None and turn.settings.on_stale == "wait"
    return "the nearest to max_staleness first" if by_age else "first in, first out"


def _sampler(turn: Turn, group: Group) -> Line:
    """What the custom sampler said last."""
    state = turn.state
    if state.sampler_answer:
        chosen = group.id in state.sampler_answer
        return Line(
            "sampler",
            f"it has chosen {len(state.sampler_answer)} groups, {'this one too' if chosen else 'not this one'}",
            chosen,
        )
    if state.sampler_request:
        return Line("sampler", choice.why_not_asked(turn))
    if (word := state.sampler_word) and word.fault:
        return Line("sampler", f"its last choice was not used: it {word.fault}", False)
    if state.sampler_starved:
        return Line("sampler", "it chose nothing, and is asked again when another group completes", False)
    reason = choice.why_not_asked(turn)
    return Line("sampler", f"it is not asked now: {reason}" if reason else "it is asked for the next batch", not reason)


def _leased(turn: Turn, group: Group) -> tuple[str, list[Line]]:
    return f"is sampled: step {group.step} has it", [Line("step", _of_step(turn, group.step))]


_PLACES = {GroupState.IN_FLIGHT: _in_flight, GroupState.BUFFERED: _buffered, GroupState.LEASED: _leased}


def _age(turn: Turn, group: Group) -> list[Line]:
    if group.state == GroupState.LEASED:
        return []
    age, bound = bounds.staleness(turn, group), turn.settings.max_staleness
    text = f"{group.version or 'no version yet'}, {age} steps behind the trainer's {turn.trainer_version}"
    if bound is None:
        return [Line("staleness", f"{text}; max_staleness: none")]
    left = max(0, bounds.chances(turn, age))
    return [Line("staleness", f"{text}; {left} steps may still take it, max_staleness = {bound}", left > 0)]


# ---- trajectories ------------------------------------------------------------------------------------------


def why_trajectory(turn: Turn, trajectory_id: TrajectoryId) -> Explanation:
    """Where it is, and why its group is where it is. Raises LookupError for one that is not live."""
    t, subject = turn.state.trajectories.get(trajectory_id), story.trajectory(trajectory_id)
    if t is None:
        raise LookupError(f"{subject} is not live: committed, dropped or never drawn; `story {subject}` may know more")
    group = why_group(turn, t.group)
    lines = [
        Line("attempt", f"{t.attempt}, after {t.num_failures} failures of its own"),
        Line("tokens", f"{t.num_tokens} of its response received, under {t.behavior_version or 'no version yet'}"),
        Line("group", group.text),
    ]
    return Explanation(subject=subject, text=f"{subject} {_where(turn, t)}", lines=lines)


def _where(turn: Turn, t: Trajectory) -> str:
    if t.state == TrajectoryState.GENERATING:
        move = f", and is to move to {t.moving_to}" if t.moving_to else ""
        return f"generates on {t.worker}, {t.num_tokens} tokens so far, {seconds(turn.at, t.timings.queued)}{move}"
    if t.state == TrajectoryState.REWARDING:
        return f"has its {t.num_tokens} tokens; {t.worker} computes its reward, {seconds(turn.at, t.timings.finished)}"
    if t.state == TrajectoryState.QUEUED:
        goal = f" of its move to {t.moving_to}" if t.moving_to else ""
        return f"is queued for the next attempt{goal}, {t.num_tokens} tokens kept"
    if t.state == TrajectoryState.FAILED:
        return f"has failed: {t.failure}"
    return f"is done, with reward {t.reward:g} and {t.num_tokens} tokens"


# ---- weight versions ---------------------------------------------------------------------------------------


def why_version(turn: Turn, version: Version) -> Explanation:
    """Whether it can be pulled, who holds it, and why it is still kept. Raises LookupError for one that is forgotten."""
    state, record = turn.state, versions.find(turn.state, version)
    if record is None:
        known = listed([str(other.version) for other in reversed(state.versions)])
        raise LookupError(f"{version} is not known (any more); the last: {known}")
    relays_with = [relay.id for relay in state.relays.values() if version in relay.held]
    holders = [replica.id for replica in state.replicas.values() if replica.version == version]
    pulling = [replica.id for replica in state.replicas.values() if replica.target == version]
    live = [group for group in state.groups.values() if group.state != GroupState.LEASED]
    under_it = sum(group.version == version for group in live)
    lines = [
        Line("readable", f"from {listed(relays_with)}" if record.ready else _why_not_ready(turn, record), record.ready),
        Line("replicas", f"{listed(holders)} hold it; {listed(pulling)} pull it"),
        Line("groups", f"{under_it} of {len(live)} that are in flight or buffered are of it"),
        _retained(turn, version),
    ]
    if version == turn.trainer_version:
        lines.append(Line("trainer", "it is what the trainer holds"))
    text = f"{version} is readable, held by {len(relays_with)} relays and {len(holders)} replicas"
    return Explanation(subject=str(version), text=text if record.ready else f"{version} cannot be pulled", lines=lines)


def _why_not_ready(turn: Turn, record: VersionRecord) -> str:
    if record is not turn.state.versions[-1]:
        return record.lost or "a newer version was made before it was published"
    reason = versions.why_not_published(turn) or "it is about to be published"
    under_way = f", at most {record.deadline - turn.at:.1f} s more" if record.deadline else ""
    written = "; all shards are handed over" if record.written else ""
    return f"{reason}{under_way}{written}" + (f"; the last try: {record.lost}" if record.lost else "")


def _retained(turn: Turn, version: Version) -> Line:
    """Why relays keep it, or would not."""
    state = turn.state
    keepers = [relay.id for relay in state.relays.values() if version in relay.retained]
    queued = [story.group(group) for group in state.requeue if state.groups[group].version == version]
    if version not in retention.needed(state):
        newest = versions.newest(state)
        kept = "as the newest" if newest and newest.version == version else "only until its slots are needed"
        return Line("retained", f"no replica holds it and no sibling waits for it: it is there {kept}", False)
    served = [str(worker) for worker, failover in state.failovers.items() if failover.version == version]
    why = [f"queued siblings of {listed(queued)} need it"] * bool(queued) + [f"{listed(served)} serve it"] * bool(
        served
    )
    why = why or ["replicas hold it, and what they generate may have to go on elsewhere"]
    return Line("retained", f"{' and '.join(why)}; told to keep it: {listed(keepers)}", True)


# ---- the trainer -------------------------------------------------------------------------------------------


def why_trainer(turn: Turn) -> Explanation:
    """Why no step begins now, or which one runs; the batch, and the checkpoint."""
    state, trainer = turn.state, turn.state.trainer
    reason = training.why_no_batch(turn)
    doing = f"no step begins, because {reason}" if reason else f"it is to take a batch{held(state, 'sample')}"
    if trainer.running:
        doing = f"step {trainer.running} {_of_step(turn, trainer.running)}"
    num = sum(group.state == GroupState.IN_FLIGHT for group in state.groups.values())
    lines = [
        Line("batch", reason or f"it can be taken{held(state, 'sample')}", not reason),
        Line(
            "buffer",
            f"{len(state.buffer)} complete groups, a batch takes {turn.settings.batch_groups}; {num} in flight",
        ),
        Line("checkpoint", _checkpoint(turn)),
    ]
    undone = [str(step.step) for step in state.steps.values() if not step.done and step.step != trainer.running]
    if undone:
        lines.append(Line("to redo", f"steps {listed(undone)} have their batches and are to be done"))
    return Explanation(subject=waits.TRAINER, text=f"the trainer is at step {trainer.step}: {doing}", lines=lines)


def _checkpoint(turn: Turn) -> str:
    trainer, every = turn.state.trainer, turn.settings.checkpoint_every
    last = f"the last is of step {trainer.checkpoint}" if trainer.checkpoint > 0 else "there is none yet"
    now = f"; that of step {trainer.saving} is being written" if trainer.saving >= 0 else ""
    now += "; an operator wants one more" if trainer.save_wanted else ""
    return f"{last}{now}; " + (f"one is due every {every} steps" if every else "the next comes at the end")


def why_step(turn: Turn, step: int) -> Explanation:
    """What has become of it, or what it waits for. Raises LookupError for what is no step."""
    state, trainer = turn.state, turn.state.trainer
    if not 1 <= step <= turn.settings.steps:
        raise LookupError(f"there is no step {step}: the run has steps 1 to {turn.settings.steps}")
    text = _of_step(turn, step)
    lines = []
    if found := state.steps.get(step):
        names = listed([story.group(group) for group in found.groups])
        lines.append(Line("groups", f"{len(found.groups)} leased: {names}"))
        lines.append(Line("attempt", str(found.attempt)))
    elif step == trainer.step + 1:
        lines = why_trainer(turn).lines
    return Explanation(subject=story.step(step), text=f"step {step} {text}", lines=lines)


def _of_step(turn: Turn, number: int) -> str:
    state, trainer = turn.state, turn.state.trainer
    step = state.steps.get(number)
    if number <= trainer.checkpoint:
        return "is committed: a checkpoint holds it"
    if step is None:
        before = number - trainer.step - 1
        return (
            f"has no batch yet; {before} steps come before it"
            if before > 0
            else f"has no batch yet: {training.why_no_batch(turn)}"
        )
    if trainer.running == number:
        return f"is at work in the trainer {seconds(turn.at, trainer.running_since)}, attempt {step.attempt}"
    return "is done, and committed by the next checkpoint" if step.done else "has its batch and waits for the trainer"
