"""Staleness bounds: no group is trained more than `max_staleness` trainer steps behind. docs/policies/staleness.md.

* `drop`: a complete group that has become too old is dropped{stale} before the next batch is chosen.
* `wait`: groups are trained in order of age, no train step starts that would push a live group past the bound, and no group begins
  that could not be trained in time. Earliest deadline first with an admission test: the bound holds, nothing waits for ever.

A *live* group is in flight or buffered. `chances` is the number of train steps in which it can still be trained. A restore of the
trainer ages everything that was generated since its checkpoint, and a group that starts again may have to do so under an older
version than was admitted: then `wait` drops, too, what can no longer be trained in time.
"""

from collections import Counter
from collections.abc import Callable

from laminar.core import groups, versions
from laminar.core.records import Group, GroupState
from laminar.core.turn import Turn
from laminar.ids import GroupId, Version, format_id


def staleness(turn: Turn, group: Group) -> int:
    """Trainer steps from the group's oldest generating version to the trainer's present one; 0 before it starts."""
    if turn.settings.group_versions == "regenerate":
        behavior = [group.version] if group.version else []
    else:
        records = (turn.state.trajectories[t] for t in group.trajectories)
        behavior = [t.behavior_version for t in records if t.behavior_version]
    ages = [versions.staleness(turn.state.branches, turn.trainer_version, version) for version in behavior]
    return max(ages, default=0)


def chances(turn: Turn, version_staleness: int) -> int:
    """Train steps that may still take a group which is so many steps behind now; those not done have their batches already."""
    bound = turn.settings.max_staleness
    assert bound is not None
    return bound - (version_staleness + _num_leased(turn)) + 1


def _num_leased(turn: Turn) -> int:
    """Steps that have their batch and are not done: the one that runs, and those to be redone after a restore."""
    return sum(not step.done for step in turn.state.steps.values())


def admits(turn: Turn, version: Version) -> bool:
    """Whether one more group of `version` could be trained in time at all (`drop`), or would always be (`wait`)."""
    if turn.settings.max_staleness is None:
        return True
    age = versions.staleness(turn.state.branches, turn.trainer_version, version)
    if turn.settings.on_stale == "drop":
        return chances(turn, age) > 0
    live = _ages(turn, [group for group in turn.state.groups.values() if group.state != GroupState.LEASED])
    live[age] += 1
    num = 0
    for age in sorted(live, reverse=True):
        num += live[age]
        if num > turn.settings.batch_groups * chances(turn, age):
            return False
    return True


def _age_of(turn: Turn, among: list[Group]) -> Callable[[Group], int]:
    """`staleness` of these groups. Versions are few, groups are many: each version is looked at once."""
    if turn.settings.group_versions != "regenerate":
        return lambda group: staleness(turn, group)
    branches, newest = turn.state.branches, turn.trainer_version
    held = dict.fromkeys(group.version for group in among)
    ages = {version: versions.staleness(branches, newest, version) if version else 0 for version in held}
    return lambda group: ages[group.version]


def _ages(turn: Turn, live: list[Group]) -> Counter[int]:
    """Staleness -> how many of the groups have it."""
    return Counter(map(_age_of(turn, live), live))


def oldest_first(turn: Turn) -> list[GroupId]:
    """Complete groups, the nearest to the bound first, in order of completion within."""
    waiting = [turn.state.groups[group] for group in turn.state.buffer]
    if turn.settings.max_staleness is not None and turn.settings.on_stale == "wait":
        age_of = _age_of(turn, waiting)
        waiting.sort(key=lambda group: -age_of(group))
    return [group.id for group in waiting]


def refusal(turn: Turn, chosen: list[GroupId]) -> str:
    """`wait`: why no step may start with this batch, so that the groups left behind can all be trained in time; empty if it may."""
    bound = turn.settings.max_staleness
    if bound is None or turn.settings.on_stale != "wait":
        return ""
    inside = dict.fromkeys(chosen)
    left = [g for g in turn.state.groups.values() if g.state != GroupState.LEASED and g.id not in inside]
    ages, num = _ages(turn, left), 0
    for age in sorted(ages, reverse=True):
        num += ages[age]
        if num > turn.settings.batch_groups * (bound - age):
            late = next(group for group in left if staleness(turn, group) == age)
            return f"group {format_id(late.id)} would be left behind and pass max_staleness = {bound}"
    return ""


def _too_late(turn: Turn) -> list[Group]:
    """`wait`: groups for which no step is left, the complete ones being served first."""
    live = [group for group in turn.state.groups.values() if group.state != GroupState.LEASED]
    ages = {group.id: staleness(turn, group) for group in live}
    live.sort(key=lambda group: (-ages[group.id], group.state != GroupState.BUFFERED))
    in_time, late = 0, []
    for group in live:
        if in_time < turn.settings.batch_groups * chances(turn, ages[group.id]):
            in_time += 1
        else:
            late.append(group)
    return late


def _aged(turn: Turn) -> list[Group]:
    """`wait`: what is too late although it was admitted, because a group began again or the trainer was restored."""
    state = turn.state
    if not state.may_have_aged or not state.trainer.ready or _num_leased(turn):
        return []
    state.may_have_aged = False
    return _too_late(turn)


def sweep(turn: Turn) -> bool:
    """What can no longer be trained in time leaves. True if there was anything."""
    bound = turn.settings.max_staleness
    if bound is None:
        return False
    if turn.settings.on_stale == "drop":
        buffered = map(turn.state.groups.__getitem__, turn.state.buffer)
        old = [group for group in buffered if staleness(turn, group) > bound]
    else:
        old = _aged(turn)
    for group in old:
        groups.drop_group(turn, group, "stale")
    if old:
        turn.look_again()
    return bool(old)
