"""Why a replica, a group, a version or the trainer is as it is: sentences for people, from the predicates that decide.

`why(turn, subject)` takes a subject as `laminar.core.story` names it. Every answer is made of what the passes themselves ask
(`dispatch.why_no_new_group`, `fleet.why_no_pull`, `moves.plan`, `training.why_no_batch` …), so it cannot differ from what they do.
An answer is about now: nothing is changed or kept. It costs O(live groups) at most, and O(replicas log replicas) for repack.

This module answers for replicas and relays, `laminar.core.explain_work` for groups, trajectories, versions, the trainer and steps.
"""

from collections.abc import Callable

from laminar.core import dispatch, explain_work, fleet, health, moves, refresh, relays, versions, waits
from laminar.core.explanation import Explanation, Line, held, listed
from laminar.core.records import Replica, ReplicaState
from laminar.core.relay_records import Relay
from laminar.core.turn import Turn
from laminar.ids import BOOT_BITS, BOOT_SHIFT, GroupId, TrajectoryId, Version, WorkerId, make_id


def why(turn: Turn, subject: str) -> Explanation:
    """For `rollout-3`, `relay-0`, `g1.2`, `t1.17`, `v12`, `v12.b1`, `s12`, `trainer` or `new groups`.

    Raises LookupError, with what there is instead, for anything else and for what is not live any more.
    """
    if WorkerId(subject) in turn.state.relays:
        return why_relay(turn, WorkerId(subject))
    if subject == waits.TRAINER or WorkerId(subject) in turn.state.trainer.ranks:
        return explain_work.why_trainer(turn)
    if subject == waits.NEW_GROUPS:
        return why_new_groups(turn)
    kind, number = subject[:1], subject[1:]
    try:
        if kind == "g":
            return explain_work.why_group(turn, GroupId(parse_id(number)))
        if kind == "t":
            return explain_work.why_trajectory(turn, TrajectoryId(parse_id(number)))
        if kind == "v":
            return explain_work.why_version(turn, Version.parse(number))
        if kind == "s":
            return explain_work.why_step(turn, int(number))
    except ValueError:
        pass  # it only begins like one
    return why_replica(turn, WorkerId(subject))


def parse_id(text: str) -> int:
    """The inverse of `ids.format_id`. Raises ValueError for anything else."""
    boot, dot, number = text.partition(".")
    if not (dot and boot.isdecimal() and number.isdecimal()) or int(number) >> BOOT_SHIFT or int(boot) >> BOOT_BITS:
        raise ValueError(f"{text!r} is no id: boot.number, such as 1.17")
    return make_id(int(boot), int(number))


# ---- replicas ----------------------------------------------------------------------------------------------


def why_replica(turn: Turn, worker: WorkerId) -> Explanation:
    """What it holds and does, and whether it gets new groups, drains, pulls, and takes part in a repack. Raises LookupError."""
    replica, status = turn.state.replicas.get(worker), health.overview(turn).get(worker)
    if status is None:
        there = listed([str(other) for other in turn.state.replicas])
        raise LookupError(f"there is no replica {worker!r}; there are: {there}")
    text = f"{worker} is {status.health}: {status.reason}"
    if replica is None:
        return Explanation(subject=worker, text=text, lines=[])
    parts: tuple[Callable[[Turn, Replica], Line], ...] = (_holds, _load, _new_groups_on, _drains, _pulls)
    lines = [part(turn, replica) for part in parts] + _repacking(turn, replica)
    waits_for = waits.of_replica(turn, replica)
    lines.append(Line("waits for", waits_for.what + (f"; ends when {waits_for.ends}" if waits_for.ends else "")))
    return Explanation(subject=worker, text=text, lines=lines)


def _holds(turn: Turn, replica: Replica) -> Line:
    state = turn.state
    target = f"; pulls {replica.target}" if replica.target else ""
    if replica.version is None:
        return Line("holds", f"no weights yet{target}")
    age = versions.staleness(state.branches, turn.trainer_version, replica.version)
    newer = relays.newer(state, replica)
    beside = f"its relay has {newer}" if newer else "its relay has nothing newer"
    return Line(
        "holds", f"{replica.version}, {age} steps behind the trainer's {turn.trainer_version}; {beside}{target}"
    )


def _load(turn: Turn, replica: Replica) -> Line:
    rewards = len(replica.attempts) - replica.num_generating
    text = (
        f"{replica.num_generating} trajectories generate, of {replica.num_requests_max} at once; "
        f"in its engine, by its last report, {replica.num_running} run and {replica.num_waiting} wait; {rewards} rewards to come; "
        f"{replica.kv_tokens} of {replica.kv_tokens_max} KV tokens"
    )
    moving = f"; {len(replica.incoming)} are on their way to it" if replica.incoming else ""
    moving += f"; {len(replica.leaving)} are about to leave it" if replica.leaving else ""
    return Line("load", text + moving)


def _new_groups_on(turn: Turn, replica: Replica) -> Line:
    if reason := dispatch.why_none_begins(turn) or dispatch.why_no_new_group(turn, replica):
        return Line("new groups", f"none now: {reason}", False)
    return Line("new groups", f"it may be given one, the least loaded first{held(turn.state, 'dispatch')}", True)


def _drains(turn: Turn, replica: Replica) -> Line:
    if replica.draining:
        return Line("drains", "an operator takes it out: it leaves when nothing is left to do", True)
    if failover := turn.state.failovers.get(replica.id):
        return Line("drains", f"it serves {failover.version}, which no other replica holds", True)
    if replica.version is None:
        return Line("drains", "it holds no weights yet", False)
    if reason := refresh.why_not_admitting(turn, replica):
        return Line("drains", reason, replica.num_generating > 0)
    if reason := refresh.why_not_its_turn(turn, replica):
        return Line("drains", f"a newer version is there, but {reason}", False)
    policy = turn.settings.refresh_policy
    return Line("drains", f"the refresh policy {policy} lets it begin groups under {replica.version}", False)


def _pulls(turn: Turn, replica: Replica) -> Line:
    if replica.state == ReplicaState.SYNCING:
        return Line("refresh", f"it pulls {replica.target}", True)
    if reason := fleet.why_no_pull(turn, replica):
        return Line("refresh", f"it pulls nothing now: {reason}", False)
    return Line("refresh", f"it is to pull{held(turn.state, 'refresh')}", True)


def _repacking(turn: Turn, replica: Replica) -> list[Line]:
    """Whether a check now would make it a source or a destination, and what the last check made of it."""
    record = turn.state.repack
    if reason := moves.why_no_check(turn):
        return [Line("repack", f"there is none: {reason}", False)]
    found = moves.plan(turn)[1]
    takes_part = any(replica.id in (move.source, move.destination) for move in found.moves)
    now = Line("repack", f"in a check now: {found.reasons[replica.id]}{held(turn.state, 'repack')}", takes_part)
    if replica.id not in record.reasons:
        return [now]
    return [now, Line("last check", f"{turn.at - record.checked_at:.1f} s ago: {record.reasons[replica.id]}")]


# ---- new groups --------------------------------------------------------------------------------------------


def why_new_groups(turn: Turn) -> Explanation:
    """Whether any new group begins now, and what keeps each replica from being given one."""
    state, settings = turn.state, turn.settings
    reasons: dict[str, list[str]] = {}
    for replica in state.replicas.values():
        reasons.setdefault(dispatch.why_no_new_group(turn, replica), []).append(replica.id)
    able = reasons.pop("", [])
    none = dispatch.why_none_begins(turn) or ("" if able else "no replica may be given one")
    num = dispatch.num_outstanding(state)
    lines = [
        Line("live", f"{num} groups in flight or buffered, buffer_groups_max = {settings.buffer_groups_max}"),
        Line("complete", f"{len(state.buffer)} groups, ready_groups_max = {settings.ready_groups_max or 'no limit'}"),
        Line("may", listed(able), bool(able) and not none),
        *(Line("may not", f"{reason}: {listed(names)}", False) for reason, names in reasons.items()),
    ]
    text = f"no new group begins: {none}" if none else f"new groups begin on {listed(able)}{held(state, 'dispatch')}"
    return Explanation(subject=waits.NEW_GROUPS, text=text, lines=lines)


# ---- relays ------------------------------------------------------------------------------------------------


def why_relay(turn: Turn, worker: WorkerId) -> Explanation:
    """Its place in the chain, what it holds and is to keep, and whether it was put at the tail. Raises LookupError."""
    state, relay = turn.state, turn.state.relays.get(worker)
    if relay is None:
        raise LookupError(f"there is no relay {worker!r}; there are: {listed([str(other) for other in state.relays])}")
    order, at = state.chain.order, state.chain.order.index(worker)
    place = "the master" if at == 0 else f"number {at + 1}, after {order[at - 1]}"
    lines = [
        Line("chain", f"{place}, of {len(order)} in epoch {state.chain.epoch}"),
        Line("holds", listed([str(version) for version in reversed(relay.held)])),
        Line(
            "keeps", f"for trajectories that may still need it: {listed([str(version) for version in relay.retained])}"
        ),
        Line("at the tail", *_at_the_tail(relay)),
    ]
    for wait in waits.waits(turn):
        if wait.who == worker:
            lines.append(Line("waits for", wait.what))
    serves = [replica.id for replica in state.replicas.values() if relays.source(state, replica.host) is relay]
    return Explanation(
        subject=worker, text=f"{worker} is {place} of the chain and serves {listed(serves)}", lines=lines
    )


def _at_the_tail(relay: Relay) -> tuple[str, bool]:
    if relay.slow_since:
        return f"its link held the chain up, event {relay.slow_since}", True
    return f"no: {relay.num_broken} broken links in a row", False
