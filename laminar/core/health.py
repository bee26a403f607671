"""Whether a replica works: progress deadlines, suspicion, quarantine. docs/policies/health.md has the diagram and the bound.

    generating ──► suspect ──► dead (fleet.lose)
        ▲             │ progress
        │             ▼
        └── pull ── quarantined

A replica *owes* tokens while, by its last report, its engine runs requests, or some wait in it and nothing is paused for a tool;
until its next report, what it has just been given waits there. One that owes and gives nothing for `progress_timeout_s` is suspect,
for twice as long lost. Invariants:
* A replica that is suspect, quarantined or silent is given nothing: no group, no queued sibling, no move, no evaluation.
* Quarantine ends with a pull of what was newest when the pull began; a process that takes a lost one's place begins in it.
* Replicas are looked at by one timer, `CHECKS_PER_TIMEOUT` times per time limit, while anything is expected of any of them.
"""

from enum import StrEnum

import msgspec

from laminar.core import groups, refresh, story
from laminar.core.actions import RaiseAlarm
from laminar.core.events import ReplicaReported
from laminar.core.records import Replica, ReplicaState, Restart, State
from laminar.core.recovery import RESET_S
from laminar.core.turn import Turn
from laminar.ids import WorkerId

CHECKS_PER_TIMEOUT = 4  # a look at all replicas costs O(R); finding out a quarter later than at once costs little
SUSPICIONS_MAX = (
    3  # stopping and going on again once is a hiccup; a fourth time within RESET_S of the last is a broken engine
)


class Health(StrEnum):
    """What people are told of a replica."""

    STARTING = "starting"
    """It has joined and holds no weights yet."""
    SYNCING = "syncing"
    GENERATING = "generating"
    DRAINING = "draining"
    """It finishes what it has and begins nothing new: to refresh, to serve an old version, or to leave."""
    SUSPECT = "suspect"
    DEAD = "dead"
    QUARANTINED = "quarantined"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's health in a word, and a sentence why."""

    health: Health
    reason: str


def is_healthy(state: State, replica: Replica) -> bool:
    """Whether nothing speaks against it."""
    return not why_unhealthy(state, replica)


def why_unhealthy(state: State, replica: Replica) -> str:
    """What speaks against it; empty = nothing."""
    if replica.id in state.silent:
        return "its channel is broken"
    if replica.suspect:
        return "it is suspect: it owes tokens and gives none"
    return "it is quarantined until it has pulled the newest version" if replica.quarantined else ""


def takes_work(state: State, replica: Replica) -> bool:
    """Whether something of the version that it holds may be given to it."""
    return not why_no_work(state, replica)


def why_no_work(state: State, replica: Replica) -> str:
    """Why nothing of its version may be given to it; empty = it may."""
    if replica.state != ReplicaState.GENERATING:
        return "it pulls weights" if replica.state == ReplicaState.SYNCING else "it has no weights yet"
    return why_unhealthy(state, replica)


# ---- facts -------------------------------------------------------------------------------------------------


def given(turn: Turn, replica: Replica, num: int) -> None:
    """`num` requests, or an evaluation, are about to be sent to it. Must come before the books say so."""
    if not num:
        return
    if not _is_expected(turn.state, replica):
        replica.stalled_since = turn.at
    replica.num_waiting += num
    if not turn.state.health_check_at and turn.settings.progress_timeout_s:
        turn.state.health_check_at = turn.at + _period_s(turn)


def on_report(turn: Turn, event: ReplicaReported) -> None:
    """What `groups.on_report` does, and whether there was progress in it."""
    state = turn.state
    replica = state.replicas.get(event.worker)
    if replica is None or replica.incarnation != event.incarnation:
        return
    num_tokens, num_generating, owed = state.ledger.tokens.total, replica.num_generating, owes(replica)
    groups.on_report(turn, event)
    progressed = state.ledger.tokens.total > num_tokens or replica.num_generating < num_generating
    progressed |= event.busy_s > 0 and _evaluates(state, replica)
    if progressed:
        replica.progress_at = turn.at
    if progressed or not (owed and owes(replica)):
        replica.stalled_since = turn.at
        if replica.suspect:
            _quarantine(turn, replica)


def returned(turn: Turn, replica: Replica) -> None:
    """Its channel is back with all it had to say: the clock starts anew."""
    replica.stalled_since = turn.at
    turn.state.dirty[replica.id] = None


def owes(replica: Replica) -> bool:
    """Whether tokens are to be expected of it, by its last report and what it was given since."""
    num_paused = replica.num_generating - replica.num_running - replica.num_waiting
    return replica.num_running > 0 or (replica.num_waiting > 0 and num_paused <= 0)


def _evaluates(state: State, replica: Replica) -> bool:
    return any(evaluation.worker == replica.id and not evaluation.done for evaluation in state.evaluations)


def _is_expected(state: State, replica: Replica) -> bool:
    return replica.num_generating > 0 or _evaluates(state, replica)


def _period_s(turn: Turn) -> float:
    return turn.settings.progress_timeout_s / CHECKS_PER_TIMEOUT


# ---- the check ---------------------------------------------------------------------------------------------


def check(turn: Turn) -> list[tuple[Replica, str]]:
    """If due, look at every replica: O(R). Those that are to be given up, and why."""
    state = turn.state
    if not state.health_check_at or state.health_check_at > turn.at:
        return []
    late_s = turn.at - state.health_check_at
    expected = []
    for replica in state.replicas.values():
        if _is_expected(state, replica):
            expected.append(replica)
        elif replica.suspect:
            _quarantine(turn, replica)  # what it was at has been withdrawn: the pull will tell
    state.health_check_at = turn.at + _period_s(turn) if expected else 0.0
    if late_s > _period_s(turn):
        for replica in expected:  # the controller itself was not listening, which is nobody else's fault
            replica.stalled_since = min(turn.at, replica.stalled_since + late_s)
    reasons = [(replica, _judged(turn, replica)) for replica in expected]
    return [(replica, reason) for replica, reason in reasons if reason]


def timeout_changed(turn: Turn) -> None:
    """Look that often from now on. Without a limit nobody is suspect any more: a pull tells what a replica is good for."""
    state = turn.state
    is_watched = turn.settings.progress_timeout_s > 0 and any(_is_expected(state, r) for r in state.replicas.values())
    state.health_check_at = turn.at + _period_s(turn) if is_watched else 0.0
    if not turn.settings.progress_timeout_s:
        for replica in [replica for replica in state.replicas.values() if replica.suspect]:
            _quarantine(turn, replica)


def _judged(turn: Turn, replica: Replica) -> str:
    """Why it is to be given up; empty = it is not."""
    if replica.id in turn.state.silent:
        replica.stalled_since = turn.at  # silence has a deadline of its own
    stalled_s = turn.at - replica.stalled_since
    timeout_s = turn.settings.progress_timeout_s
    if stalled_s < timeout_s or not owes(replica):
        return ""
    if stalled_s >= 2 * timeout_s:
        return f"it answers but makes no progress: {stall(turn, replica)}"
    if not replica.suspect:
        _suspect(turn, replica)
    if replica.num_suspicions > SUSPICIONS_MAX:
        return f"it stopped making progress {replica.num_suspicions} times, each within {RESET_S:g} s of the last"
    return ""


def stall(turn: Turn, replica: Replica) -> str:
    """What it has and since when nothing came of it."""
    load = f"{replica.num_running} requests run and {replica.num_waiting} wait in it"
    return f"{load}, and no token came for {turn.at - replica.stalled_since:.0f} s"


def _suspect(turn: Turn, replica: Replica) -> None:
    if turn.at - replica.suspected_at > RESET_S:
        replica.num_suspicions = 0
    replica.suspect, replica.suspected_at = True, turn.at
    replica.num_suspicions += 1
    turn.state.review_due = True
    for trajectory_id in list(replica.incoming):  # nothing moves here any more
        groups.unpin(turn, turn.state.trajectories[trajectory_id])
    text = f"{replica.id} is suspect: {stall(turn, replica)}; it is given nothing more"
    turn.emit(RaiseAlarm(cause=turn.cause, name="replica-suspect", text=text))
    turn.tell("is suspect", story.worker(replica.id))


def _quarantine(turn: Turn, replica: Replica) -> None:
    replica.suspect, replica.quarantined = False, True
    turn.state.dirty[replica.id] = None
    turn.tell("makes progress again; quarantined until it has pulled the newest version", story.worker(replica.id))


# ---- for people --------------------------------------------------------------------------------------------


def overview(turn: Turn) -> dict[WorkerId, Status]:
    """Every replica that is there, and those that were lost and are not back."""
    state = turn.state
    found = {replica.id: status(turn, replica) for replica in state.replicas.values()}
    lost = [(w, record) for w, record in state.restarts.items() if record.role == "rollout" and w not in found]
    return found | {worker: _lost_status(turn, record) for worker, record in lost}


def status(turn: Turn, replica: Replica) -> Status:
    """The health of a replica that is there."""
    suspicion = _suspicion(turn, replica)
    if suspicion:
        return Status(health=Health.SUSPECT, reason=suspicion)
    left = f"{replica.num_generating} trajectories to go"
    pulls = f"pulls {replica.target}" if replica.target else "waits for weights to pull"
    if replica.quarantined:
        until = f"{left}, then it pulls the newest version" if replica.num_generating else pulls
        return Status(
            health=Health.QUARANTINED, reason=f"it was lost or suspect and is given nothing more yet: {until}"
        )
    if replica.state == ReplicaState.JOINED:
        return Status(health=Health.STARTING, reason=f"it has joined, {pulls}")
    if replica.state == ReplicaState.SYNCING:
        return Status(health=Health.SYNCING, reason=pulls)
    if replica.draining:
        return Status(health=Health.DRAINING, reason=f"an operator takes it out: {left}")
    if replica.id in turn.state.failovers:
        old = turn.state.failovers[replica.id].version
        return Status(health=Health.DRAINING, reason=f"it serves {old}, which no other replica holds: {left}")
    if replica.num_generating and not refresh.may_admit(turn, replica):
        return Status(health=Health.DRAINING, reason=f"it begins no more groups under {replica.version}: {left}")
    return Status(health=Health.GENERATING, reason=f"{replica.num_generating} trajectories under {replica.version}")


def _suspicion(turn: Turn, replica: Replica) -> str:
    if replica.id in turn.state.silent:
        left_s = turn.state.silent[replica.id] - turn.at
        return f"its channel broke; it is lost unless it returns within {max(0.0, left_s):.0f} s"
    return stall(turn, replica) if replica.suspect else ""


def _lost_status(turn: Turn, record: Restart) -> Status:
    limit = turn.settings.restarts_max
    if record.evicted:
        then = f"evicted after {record.num} restarts"
    elif record.due_at:
        then = f"restart {record.num} of {limit} in {max(0.0, record.due_at - turn.at):.0f} s"
    else:
        then = f"restart {record.num} of {limit} is under way"
    return Status(health=Health.DEAD, reason=f"{record.reason}; {then}")
