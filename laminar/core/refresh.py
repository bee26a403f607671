"""Refresh policies: when a replica admits new groups, and so when it drains and pulls newer weights. docs/policies/refresh.md.

* `batch` (the paper): a local batch of groups per pull; the next local batch begins when the last has drained.
* `continuous`: a replica admits while its version is the newest. When a newer one exists it stops admitting and drains, but at
  most a share of the fleet does so at once, oldest version first; the others go on admitting under the version they hold.
* `rolling`: as `continuous`, but as many go on admitting as a budget of mean staleness has room for.

A replica whose version is not the newest is *superseded*. Which of them drain (`State.draining_to_refresh`) is chosen anew when
that can have changed, not when a trajectory ends; one that has begun to drain goes on until it has pulled. One that admits
nothing anyway (suspect, quarantined, taken out by an operator, serving an old version) is not among them: it takes nobody's turn.
"""

from laminar.core import pace, relays
from laminar.core.records import Replica
from laminar.core.turn import Turn


def may_admit(turn: Turn, replica: Replica) -> bool:
    """Whether the policy lets the replica begin a new group under the version it holds."""
    return not why_not_admitting(turn, replica)


def why_not_admitting(turn: Turn, replica: Replica) -> str:
    """Why the policy does not let the replica begin a new group under the version it holds; empty = it does."""
    if turn.settings.refresh_policy == "batch":
        if replica.admit_left > 0 or _begins_local_batch(turn, replica):
            return ""
        return "its local batch has begun whole: it drains, then pulls or begins the next"
    if _holds_newest(turn, replica) or replica.id not in turn.state.draining_to_refresh:
        return ""
    return "a newer version is there and it is its turn to drain and pull it"


def why_not_its_turn(turn: Turn, replica: Replica) -> str:
    """Why a superseded replica goes on admitting; empty = it does not, or nothing newer is there."""
    state, policy = turn.state, turn.settings.refresh_policy
    if policy == "batch" or _holds_newest(turn, replica) or replica.id in state.draining_to_refresh:
        return ""
    draining = ", ".join(state.draining_to_refresh) or "none"
    if policy == "rolling":
        budget = f"the staleness budget ({turn.settings.staleness_budget:g} versions) has room for it"
        return f"{budget}: it goes on under {replica.version}; draining are: {draining}"
    num, fleet = _num_draining(turn, []), len(state.replicas)
    limit = f"at most {num} of {fleet} replicas drain at once (draining_share = {turn.settings.draining_share:g})"
    return f"{limit}, the furthest behind first, and it is not its turn: {draining}"


def gains_when_empty(turn: Turn, replica: Replica) -> bool:
    """Whether the replica could pull something newer, or begin a local batch, were it not for what it generates."""
    if turn.settings.refresh_policy == "batch":
        return replica.admit_left <= 0
    return replica.id in turn.state.draining_to_refresh


def admit(turn: Turn, replica: Replica) -> None:
    """Take note of a group that is about to begin."""
    if _begins_local_batch(turn, replica):
        replica.admit_left = turn.settings.local_batch_groups
    replica.admit_left -= 1


def _holds_newest(turn: Turn, replica: Replica) -> bool:
    """Whether the relay of its host has nothing newer for it."""
    return relays.newer(turn.state, replica) is None


def _begins_local_batch(turn: Turn, replica: Replica) -> bool:
    """Its local batch is done and there is nothing newer to pull: the next one is of the same version."""
    return replica.num_generating == 0 and not replica.incoming and _holds_newest(turn, replica)


def review(turn: Turn) -> None:
    """Choose the superseded replicas that drain: when the fleet or the newest version has changed since the last time."""
    state = turn.state
    if turn.settings.refresh_policy == "batch":
        return
    behind = _behind(turn)
    num = _num_draining(turn, behind)
    state.draining_to_refresh = dict.fromkeys(replica.id for replica, _ in behind[:num])
    state.dirty.update(dict.fromkeys(replica.id for replica, _ in behind[num:]))


def policy_changed(turn: Turn) -> None:
    """Who drains to refresh is chosen anew; the policy `batch` chooses nobody."""
    turn.state.review_due = True
    if turn.settings.refresh_policy == "batch":
        turn.state.draining_to_refresh = {}


def _behind(turn: Turn) -> list[tuple[Replica, int]]:
    """Superseded replicas that could admit, and how many readable versions they are behind: those that drain already, then the
    furthest behind, then those with the least to do."""
    ready = [record.version for record in reversed(turn.state.versions) if record.ready]
    ages = {version: age for age, version in enumerate(ready)}
    held = [r for r in turn.state.replicas.values() if _could_admit(turn, r) and not _holds_newest(turn, r)]
    behind = [(r, max(1, ages.get(r.version, len(ready)))) for r in held]  # type: ignore[arg-type]
    behind.sort(key=lambda row: (row[0].id not in turn.state.draining_to_refresh, -row[1], row[0].num_generating))
    return behind


def _could_admit(turn: Turn, replica: Replica) -> bool:
    """Whether only the refresh policy could hold it back: what admits nothing anyway takes no other's turn to drain."""
    elsewhere = replica.draining or replica.suspect or replica.quarantined or replica.id in turn.state.failovers
    return replica.version is not None and not elsewhere


def _num_draining(turn: Turn, behind: list[tuple[Replica, int]]) -> int:
    fleet = len(turn.state.replicas)
    if turn.settings.refresh_policy == "continuous":
        return max(1, int(turn.settings.draining_share * fleet))
    left = fleet * (turn.settings.staleness_budget - pace.steps_per_trajectory(turn.state.pace))
    num = len(behind)
    while num and behind[num - 1][1] <= left:
        num -= 1
        left -= behind[num][1]
    return num
