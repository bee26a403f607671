"""Siblings that generate far longer than the others of their group. docs/policies/groups.md has the bias of dropping them.

* `wait` (default): the group is complete when all are done.
* `drop`: when `min_group_size` siblings are done and every other one has generated for more than `straggler_factor` times the
  median generation time of those, the group is completed without them: aborted, dropped{straggler}, never a zero-reward row.

Looked at when something of a group ends, and by a timer at the first moment at which a group may be due.
"""

from laminar.core import groups
from laminar.core.events import ReplicaReported
from laminar.core.records import Group, GroupState, Trajectory, TrajectoryState
from laminar.core.turn import Turn

NEVER = float("inf")


def on_report(turn: Turn, event: ReplicaReported) -> None:
    """Something of these groups ended: see whether the rest is late, or when it will be."""
    if turn.settings.stragglers == "wait":
        return
    ended = [row.trajectory for row in event.rewarded] + [row.trajectory for row in event.failed]
    records = [turn.state.trajectories[t] for t in ended if t in turn.state.trajectories]
    for group_id in dict.fromkeys(record.group for record in records):
        _look(turn, turn.state.groups[group_id])


def check(turn: Turn) -> None:
    """If due, look at all groups in flight: O(groups)."""
    state = turn.state
    if state.stragglers_at and state.stragglers_at <= turn.at:
        state.stragglers_at = 0.0
        for group in list(state.groups.values()):
            _look(turn, group)


def rules_changed(turn: Turn) -> None:
    """Look at all groups as the rules are now: O(groups)."""
    turn.state.stragglers_at = 0.0
    if turn.settings.stragglers == "drop":
        for group in list(turn.state.groups.values()):
            _look(turn, group)


def due_at(turn: Turn, group: Group) -> float:
    """From when on the group need not wait for the rest; infinite while it must."""
    siblings = [turn.state.trajectories[t] for t in group.trajectories]
    times = [t.timings.finished - t.timings.queued for t in siblings if t.state == TrajectoryState.DONE]
    rest = _open(siblings)
    if group.state != GroupState.IN_FLIGHT or len(times) < turn.settings.min_group_size or not rest:
        return NEVER
    if any(t.finish_reason for t in rest):
        return NEVER  # its tokens are complete, only its reward is missing
    return max(t.timings.queued for t in rest) + turn.settings.straggler_factor * median(times)


def median(times: list[float]) -> float:
    """The upper one of an even number."""
    return sorted(times)[len(times) // 2]


def _open(siblings: list[Trajectory]) -> list[Trajectory]:
    return [t for t in siblings if t.state in groups.OPEN_STATES]


def _look(turn: Turn, group: Group) -> None:
    due = due_at(turn, group)
    if due > turn.at:
        if due < (turn.state.stragglers_at or NEVER):
            turn.state.stragglers_at = due
        return
    groups.complete_without(turn, group, _open([turn.state.trajectories[t] for t in group.trajectories]), "straggler")
