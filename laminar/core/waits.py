"""Who waits for whom: the wait-for graph of a run, read from the core's state. For people; nothing is decided here.

    trainer ──► groups in flight ──► rollout-0 ──► (its engine)
                                └──► g1.7 ──► rollout-2 ──► (its channel, until …)

Nodes are workers (``trainer``, ``rollout-0``, ``relay-0``), and what the core itself keeps waiting: groups whose siblings are
queued, publications, evaluations, decisions that an operator holds. An edge is a `Wait`. A wait that names nobody in `on` is ended
from outside, as `ends` says. A cycle of edges can only be ended by a deadline on it, or by a person.
"""

from collections.abc import Iterator

import msgspec

from laminar.core import (
    bounds,
    dispatch,
    evaluation,
    failover,
    fleet,
    groups,
    health,
    holds,
    refresh,
    relays,
    story,
    training,
)
from laminar.core import versions as weights
from laminar.core.decisions import in_words
from laminar.core.records import Group, GroupState, Replica, ReplicaState, Restart
from laminar.core.turn import Turn
from laminar.ids import WorkerId

QUEUED_GROUPS_SHOWN = 20  # more of them wait for the same few replicas
TRAINER, IN_FLIGHT, NEW_GROUPS, DISK, OPERATOR = "trainer", "groups in flight", "new groups", "disk", "operator"


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One edge, or several to what would each end it."""

    who: str
    what: str
    """What it waits for, in words."""
    on: list[str] = []
    """The nodes that it waits for."""
    since: float = 0.0
    """Run time, seconds; 0 = not known."""
    deadline: float = 0.0
    """When it is given up; 0 = never."""
    ends: str = ""
    """What ends it, apart from the deadline."""


def waits(turn: Turn) -> list[Wait]:
    """All of them, in a fixed order."""
    if turn.state.finished:
        return []
    parts = (_of_run, of_trainer, _of_checkpoint, _of_publication, _of_evaluations, _of_replicas, _of_groups, _of_relays,
             _of_restarts, _of_silence)  # fmt: skip
    return [wait for part in parts for wait in part(turn)]


def cycles(found: list[Wait]) -> list[list[str]]:
    """Nodes that wait for one another in a ring, each ring once, from its first node on in the order of `found`."""
    edges: dict[str, list[str]] = {}
    for wait in found:
        edges.setdefault(wait.who, []).extend(wait.on)
    rings: dict[tuple[str, ...], None] = {}
    done: dict[str, None] = {}
    for start in edges:
        path = {} if start in done else {start: iter(edges[start])}
        while path:
            node, rest = next(reversed(path.items()))
            other = next(rest, None)
            if other is None:
                done[node] = None
                del path[node]
            elif other in path:
                nodes = list(path)
                rings[tuple(nodes[nodes.index(other) :])] = None
            elif other not in done:
                path[other] = iter(edges.get(other, []))
    return [list(ring) for ring in rings]


# ---- the run, its trainer and its weights ------------------------------------------------------------------


def _of_run(turn: Turn) -> Iterator[Wait]:
    state = turn.state
    if state.storage_failure:
        why = state.storage_failure
        yield Wait(who=DISK, what=why, since=state.storage_failed_at, ends="it takes what is written again")
    for held in state.held.values():
        what = f"an operator's word: {in_words(held.decision)}"
        yield Wait(
            who=f"decision {held.id}", what=what, on=[OPERATOR], since=held.held_at, ends="apply, edit or skip it"
        )
    for name, hold in state.holds.items():
        yield Wait(
            who=story.of_pass(name), what=holds.why(state, name), on=[OPERATOR], since=hold.since, ends="let it go"
        )
    if state.stopping:
        on = [TRAINER] if state.trainer.running or state.trainer.saving >= 0 else []
        text = f"the end of what is under way ({state.stopping})"
        yield Wait(who="the end of the run", what=text, on=on, deadline=state.stop_by, ends="the last checkpoint")


def of_trainer(turn: Turn) -> Iterator[Wait]:
    """What the trainer waits for: its ranks, or a batch; nothing at the end of the run."""
    state, trainer = turn.state, turn.state.trainer
    if not trainer.ready:
        num = f"{len(trainer.ranks)} of {trainer.world_size}" if trainer.world_size else "none"
        on = [str(trainer.launch)] if trainer.launch in state.restarts else []
        yield Wait(who=TRAINER, what=f"all its ranks: {num} are ready", on=on, ends="the last rank is ready")
    elif trainer.running:
        step = state.steps[trainer.running]
        yield Wait(
            who=TRAINER,
            what=f"its ranks, which work on step {step.step} (attempt {step.attempt})",
            on=_silent_ranks(turn),
            since=trainer.running_since,
            deadline=training.deadline(state, turn.settings.step_timeout_s),
            ends="rank 0 tells that the step is done or failed",
        )
    elif trainer.step < turn.settings.steps and not state.stopping:
        yield _for_a_batch(turn)


def _held_by(turn: Turn, name: str) -> list[str]:
    """The node that keeps this pass from deciding, if one does: the decision that it shows, or the pass itself."""
    held = holds.shown(turn.state, name)
    return [f"decision {held.id}"] if held else [story.of_pass(name)] * (name in turn.state.holds)


def _silent_ranks(turn: Turn) -> list[str]:
    return [str(worker) for worker in turn.state.trainer.ranks if worker in turn.state.silent]


def _for_a_batch(turn: Turn) -> Wait:
    state, num = turn.state, turn.settings.batch_groups
    since = state.pace.stepped_at
    if state.storage_failure:
        return Wait(who=TRAINER, what="the disk: no step begins", on=[DISK], since=state.storage_failed_at)
    if len(state.buffer) < num:
        what = f"complete groups: {len(state.buffer)} of {num} are buffered"
        on = [IN_FLIGHT] if _in_flight(turn) else [NEW_GROUPS]
        return Wait(who=TRAINER, what=what, on=on, since=since, ends="a group completes")
    if held := _held_by(turn, "sample"):
        return Wait(who=TRAINER, what="a batch whose choice is held", on=held, since=since)
    if state.sampler_request:
        return Wait(who=TRAINER, what="the custom sampler's choice", on=["sampler"], since=since, ends="it answers")
    if refusal := bounds.refusal(turn, bounds.oldest_first(turn)[:num]):
        return Wait(who=TRAINER, what=f"max_staleness: {refusal}", on=[IN_FLIGHT], since=since, ends="it completes")
    what = "the custom sampler, which chose nothing from the buffer" if state.sampler_starved else "its next batch"
    return Wait(
        who=TRAINER, what=what, on=[IN_FLIGHT] if _in_flight(turn) else [], since=since, ends="another group completes"
    )


def _of_checkpoint(turn: Turn) -> Iterator[Wait]:
    trainer = turn.state.trainer
    if trainer.saving >= 0:
        yield Wait(
            who=f"checkpoint of step {trainer.saving}",
            what="the ranks, which write it",
            on=[TRAINER] if trainer.running else [],
            since=trainer.saving_since,
            deadline=training.deadline(turn.state, turn.settings.step_timeout_s),
            ends="rank 0 tells that it is saved or failed",
        )


def _of_publication(turn: Turn) -> Iterator[Wait]:
    state = turn.state
    for record in state.versions[-1:]:
        if record.ready:
            continue
        who = _publication(turn)
        if record.deadline:
            began = record.deadline - turn.settings.publish_timeout_s
            what = "the relay, which has all shards" if record.written else "the ranks, which write their shards"
            on = [str(state.publishing_to)] if record.written else _silent_ranks(turn)
            yield Wait(who=who, what=what, on=on, since=began, deadline=record.deadline, ends="a relay holds it")
        elif record.retry_at:
            text = f"a pause after {record.num_tries} tries ({record.lost})"
            yield Wait(who=who, what=text, deadline=record.retry_at, ends="the trainer is asked again")
        elif state.trainer.running:
            text = "the trainer, which is at a step"
            yield Wait(who=who, what=text, on=[TRAINER], ends="the next version is published in its place")
        elif record.num_tries >= weights.PUBLISH_TRIES_MAX:
            text = f"nothing: given up after {record.num_tries} tries ({record.lost})"
            yield Wait(who=who, what=text, ends="the next version serves")
        elif state.trainer.ready:
            away = [w for w in state.relay_hosts.values() if w not in state.relays]
            yield Wait(who=who, what="the relay of each trainer host", on=[str(w) for w in away], ends="it joins")


def _publication(turn: Turn) -> str:
    return f"publication of {turn.state.versions[-1].version}"


def _of_evaluations(turn: Turn) -> Iterator[Wait]:
    for asked in turn.state.evaluations:
        if asked.done:
            continue
        who = f"evaluation {asked.name}"
        if asked.worker is not None:
            limit = evaluation.deadline(turn.state, turn.settings.evaluation_timeout_s)
            what = f"{asked.worker}, which answers the held-out prompts"
            yield Wait(who=who, what=what, since=asked.since, deadline=limit, ends="its answers")
        else:
            yield Wait(who=who, what=f"a healthy replica that holds {asked.version}", ends="one pulls it")


# ---- replicas ----------------------------------------------------------------------------------------------


def _of_replicas(turn: Turn) -> Iterator[Wait]:
    for replica in turn.state.replicas.values():
        yield of_replica(turn, replica)


def of_replica(turn: Turn, replica: Replica) -> Wait:
    """What one replica waits for: its pull, its engine, its rewards, or something to do."""
    state, who = turn.state, str(replica.id)
    if replica.id in state.silent:
        return Wait(
            who=who, what="its channel, which is broken", deadline=state.silent[replica.id], ends="it dials in again"
        )
    if replica.state == ReplicaState.SYNCING:
        began = state.pulls[replica.id] - turn.settings.refresh_timeout_s
        what = f"its pull of {replica.target}"
        return Wait(who=who, what=what, since=began, deadline=state.pulls[replica.id], ends="it holds the version")
    if replica.num_generating:
        limit_s = 2 * turn.settings.progress_timeout_s
        what = f"its engine: {replica.num_generating} trajectories to go, {health.stall(turn, replica)}"
        deadline = replica.stalled_since + limit_s if limit_s and health.owes(replica) else 0.0
        return Wait(who=who, what=what, since=replica.stalled_since, deadline=deadline, ends="tokens come")
    if replica.attempts:
        what = f"{len(replica.attempts)} rewards"
        return Wait(who=who, what=what, since=replica.progress_at, ends="task.reward_timeout_s for each, in the worker")
    if any(e.worker == replica.id and not e.done for e in state.evaluations):
        return Wait(who=who, what="its evaluation", since=replica.stalled_since, ends="its answers")
    return _idle(turn, replica)


def _idle(turn: Turn, replica: Replica) -> Wait:
    state, who = turn.state, str(replica.id)
    relay = relays.source(state, replica.host)
    if replica.draining:
        return Wait(who=who, what="nothing: it is taken out", ends="it leaves")
    if (held := _held_by(turn, "refresh")) and not fleet.why_no_pull(turn, replica):
        return Wait(who=who, what="its pull, which is held", on=held)
    if replica.version is None or replica.quarantined:
        what = "weights to pull" if replica.version is None else "the newest weights, to get out of quarantine"
        on = [str(relay.id)] if relay is not None else [str(w) for w in [state.relay_hosts.get(replica.host)] if w]
        if relay is not None and not relay.held:
            on = [_publication(turn)] if state.versions else [TRAINER]
        return Wait(who=who, what=what, on=on, ends="its relay holds a version")
    if replica.incoming or replica.id in state.failovers or groups.queued_for(turn, replica):
        return Wait(who=who, what=f"siblings of {replica.version} that are to come to it", ends="they start here")
    if weights.is_awaited(state, relay):
        until = state.versions[-1].awaited_until
        return Wait(who=who, what="weights under way", on=[_publication(turn)], deadline=until, ends="it pulls them")
    if not refresh.may_admit(turn, replica):
        return Wait(
            who=who, what="a newer version: its local batch is done", on=[_publication(turn)], ends="it pulls it"
        )
    if (held := _held_by(turn, "dispatch")) and not dispatch.why_no_new_group(turn, replica):
        return Wait(who=who, what="a new group, which is held", on=held)
    return Wait(who=who, what="a new group", on=[NEW_GROUPS], since=replica.progress_at, ends="one is dispatched to it")


# ---- groups ------------------------------------------------------------------------------------------------


def _in_flight(turn: Turn) -> list[Group]:
    return [group for group in turn.state.groups.values() if group.state == GroupState.IN_FLIGHT]


def _of_groups(turn: Turn) -> Iterator[Wait]:
    state, in_flight = turn.state, _in_flight(turn)
    running = dict.fromkeys(
        str(worker) for group in in_flight for t in group.trajectories if (worker := state.trajectories[t].worker)
    )
    queued = [story.group(group) for group in list(state.requeue)[:QUEUED_GROUPS_SHOWN]]
    if in_flight:
        oldest = min((state.trajectories[group.trajectories[0]].timings.queued, group.id) for group in in_flight)
        what = f"the last siblings of {len(in_flight)} groups, the oldest of them {story.group(oldest[1])}"
        yield Wait(who=IN_FLIGHT, what=what, on=[*running, *queued], since=oldest[0], ends="they end")
    for group_id in list(state.requeue)[:QUEUED_GROUPS_SHOWN]:
        yield _queued(turn, state.groups[group_id])
    if len(state.requeue) > QUEUED_GROUPS_SHOWN:
        yield Wait(who=f"{len(state.requeue) - QUEUED_GROUPS_SHOWN} more groups", what="the same")
    yield from _new_groups(turn)


def _queued(turn: Turn, group: Group) -> Wait:
    state, who = turn.state, story.group(group.id)
    num = len(groups.queued(state, group))
    holders = [r for r in state.replicas.values() if r.version == group.version and not health.takes_work(state, r)]
    if holders:
        on = [str(replica.id) for replica in holders]
        return Wait(who=who, what=f"a replica of {group.version} that takes work, for {num} siblings", on=on)
    serving = [str(w) for w, f in state.failovers.items() if f.version == group.version]
    if serving or fleet.may_come_back(state, group.version):
        on = serving or [str(r.id) for r in state.replicas.values() if r.target == group.version]
        return Wait(who=who, what=f"a replica that pulls {group.version} for its {num} siblings", on=on)
    if failover.is_possible(turn, group.version):
        return Wait(who=who, what=f"a replica that is almost idle and can pull {group.version}, for {num} siblings")
    return Wait(who=who, what=f"any replica that takes work, for {num} siblings", on=[str(w) for w in state.replicas])


def _new_groups(turn: Turn) -> Iterator[Wait]:
    state = turn.state
    if state.stopping:
        return
    if state.storage_failure:
        yield Wait(who=NEW_GROUPS, what="the disk: none begins", on=[DISK], since=state.storage_failed_at)
        return
    limit = dispatch.held_back_by(turn)
    if limit in ("buffer_groups_max", "ready_groups_max"):
        what = f"the trainer to take a batch: {limit} is reached ({dispatch.num_outstanding(state)} groups live)"
        yield Wait(who=NEW_GROUPS, what=what, on=[TRAINER], ends="a batch is taken or a group dropped")
    elif not limit and not any(health.takes_work(state, replica) for replica in state.replicas.values()):
        on = [str(worker) for worker in state.replicas]
        yield Wait(who=NEW_GROUPS, what="a replica that takes work", on=on, ends="one holds weights and is healthy")


# ---- relays, restarts, broken channels ---------------------------------------------------------------------


def _of_relays(turn: Turn) -> Iterator[Wait]:
    state = turn.state
    newest = weights.newest(state)
    if newest is None:
        return
    for upstream, worker in zip(state.chain.order, state.chain.order[1:], strict=False):
        if newest.version not in state.relays[worker].held:
            what = f"{newest.version} from its neighbour {upstream}"
            on = [] if newest.version in state.relays[upstream].held else [str(upstream)]
            yield Wait(
                who=str(worker), what=what, on=on, since=newest.published_at, ends="relay.link_timeout_s per link"
            )


def _of_restarts(turn: Turn) -> Iterator[Wait]:
    for worker, record in turn.state.restarts.items():
        if record.due_at:
            yield Wait(
                who=str(worker), what=f"its restart, after: {record.reason}", deadline=record.due_at, ends="the pause"
            )
        elif record.starting:
            yield _starting(worker, record)


def _starting(worker: WorkerId, record: Restart) -> Wait:
    what = f"its process, which was started again ({record.num}) after: {record.reason}"
    return Wait(who=str(worker), what=what, deadline=record.start_by, ends="it joins")


def _of_silence(turn: Turn) -> Iterator[Wait]:
    for worker, deadline in turn.state.silent.items():
        if worker not in turn.state.replicas:
            yield Wait(
                who=str(worker), what="its channel, which is broken", deadline=deadline, ends="it dials in again"
            )
