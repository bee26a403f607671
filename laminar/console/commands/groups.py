"""Look at groups and their trajectories: in flight, in the buffer, leased to a step."""

import math
from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from laminar.console import subjects
from laminar.console.answers import ROWS_MAX, Answer, Cell, table
from laminar.console.language import Command, num_rows
from laminar.console.view import View
from laminar.core import bounds, dispatch, groups
from laminar.core.records import Group, GroupState, Trajectory, TrajectoryState
from laminar.ids import format_id

ROWS = 50  # a screen; an operator who looks for more names a replica or a version
GROUPS = "group state step replica version behind siblings done queued tokens age_s reward_mean reward_std"


def show_groups(view: View, words: list[str]) -> Answer:
    """Groups that all of the words are true of, the first begun first; without words those in flight."""
    wanted = [subjects.written(view, word) for word in words if word != "all"]
    every = view.state.groups.values()
    found = [group for group in every if all(word in _labels(group) for word in wanted)] if words else _in_flight(view)
    rows_max = ROWS_MAX if "all" in words else ROWS
    note = "`groups all`: every one; `groups r3`, `groups v12`, `groups leased`: some"
    lines = [_summary(view)]
    if wanted and not found:
        lines.insert(0, f"no group is {' and '.join(wanted)}: name a state, a replica, a version or a step (s12)")
    rows = [_row(view, group) for group in found[:rows_max]]
    tables = [table("", GROUPS, rows, left_off=len(found) - len(rows), note=note)] if rows else []
    return Answer(tables=tables, lines=lines)


def _labels(group: Group) -> tuple[str, ...]:
    """What a group can be chosen by."""
    state = group.state.value
    return state, state.replace("_", "-"), str(group.worker), str(group.version), f"s{group.step}"


def _in_flight(view: View) -> list[Group]:
    return [group for group in view.state.groups.values() if group.state == GroupState.IN_FLIGHT]


def _members(view: View, group: Group) -> list[Trajectory]:
    return [view.state.trajectories[t] for t in group.trajectories]


def _row(view: View, group: Group) -> list[Cell]:
    members = _members(view, group)
    begun = [t.timings.queued for t in members if t.timings.queued]
    rewards = [t.reward for t in members if t.state == TrajectoryState.DONE]
    return [
        f"g{format_id(group.id)}",
        group.state.value,
        group.step or None,
        group.worker or "–",
        str(group.version or "–"),
        bounds.staleness(view.turn, group),
        len(members),
        len(members) - group.num_open,
        len(groups.queued(view.state, group)),
        sum(t.num_tokens for t in members),
        view.since_s(min(begun, default=0.0)),
        fmean(rewards) if rewards else None,
        _deviation(rewards) if len(rewards) > 1 else None,
    ]


def _deviation(rewards: list[float]) -> float:
    """Standard deviation. (`statistics.pstdev` calculates with fractions: fifty times as long, while a controller waits.)"""
    mean = fmean(rewards)
    return math.sqrt(fmean((reward - mean) ** 2 for reward in rewards))


def _summary(view: View) -> str:
    counts = Counter(group.state.value for group in view.state.groups.values())
    parts = ", ".join(f"{num} {name.replace('_', ' ')}" for name, num in counts.items())
    return f"{len(view.state.groups)} groups{': ' + parts if parts else ''}; at most {view.settings.buffer_groups_max} live"


def show_group(view: View, words: list[str]) -> Answer:
    """One group: its siblings."""
    group = subjects.group(view, words[0])
    facts: dict[str, Cell] = {
        "group": f"g{format_id(group.id)}",
        "state": group.state.value + (f" to step {group.step}" if group.step else ""),
        "prompt": group.prompt,
        "version": str(group.version) if group.version else None,
        "replica": group.worker,
        "behind_the_trainer": bounds.staleness(view.turn, group),
        "begun_again": group.num_regenerations,
        "completed_age_s": view.since_s(group.completed_at),
    }
    columns = "trajectory attempt state replica version tokens reward failures waits_to_go_to age_s"
    rows: list[list[Cell]] = [
        [
            f"t{format_id(t.id)}",
            t.attempt,
            t.failure or t.state.value,
            t.worker,
            str(t.behavior_version or "–"),
            t.num_tokens,
            t.reward if t.state == TrajectoryState.DONE else None,
            t.num_failures,
            t.moving_to,
            view.since_s(t.timings.queued),
        ]
        for t in _members(view, group)
    ]
    note = f"`why {words[0]}` says why it has not been sampled yet, `story {words[0]}` all that happened to it"
    return Answer(facts=facts, tables=[table("siblings", columns, rows)], lines=[note])


def show_trajectory(view: View, words: list[str]) -> Answer:
    """One trajectory, as far as the core knows it."""
    t = subjects.trajectory(view, words[0])
    facts: dict[str, Cell] = {
        "trajectory": f"t{format_id(t.id)}, sibling {t.sibling} of g{format_id(t.group)}",
        "prompt": t.prompt,
        "state": t.state.value,
        "attempt": t.attempt,
        "failures": t.num_failures,
        "replica": t.worker,
        "moves_to": t.moving_to,
        "behavior_version": str(t.behavior_version or "–"),
        "finish_version": str(t.finish_version) if t.finish_version else None,
        "sample_version": str(t.sample_version) if t.sample_version else None,
        "prompt_tokens": t.num_prompt_tokens or None,
        "response_tokens": t.num_tokens,
        "finish_reason": t.finish_reason or None,
        "reward": t.reward if t.state == TrajectoryState.DONE else None,
        **{f"reward_of_{part}": value for part, value in t.reward_parts.items()},
        "failure": t.failure or None,
        "step": t.step or None,
    }
    return Answer(facts=facts, lines=[f"`story {words[0]}` says what happened to it and when"])


# ---- the buffer --------------------------------------------------------------------------------------------


def show_buffer(view: View, words: list[str]) -> Answer:
    """Complete groups in order of completion, how old they are, and what limits them."""
    state, settings = view.state, view.settings
    waiting = [state.groups[group] for group in state.buffer]
    rows_max = num_rows(words, ROWS)
    rows = [_buffered_row(view, group) for group in waiting[:rows_max]]
    facts: dict[str, Cell] = {
        "complete_groups": f"{len(waiting)}, a batch takes {settings.batch_groups}",
        "live_groups": f"{dispatch.num_outstanding(state)} of at most {settings.buffer_groups_max} (buffer.max_groups)",
        "ready_groups": f"{len(waiting)} of at most {settings.ready_groups_max} (buffer.max_ready_groups)"
        if settings.ready_groups_max
        else None,
        "max_staleness": f"{settings.max_staleness} ({settings.on_stale})"
        if settings.max_staleness is not None
        else None,
        "sampler": _sampler(view),
        "behind_the_trainer": histogram(bounds.staleness(view.turn, group) for group in waiting),
        "age_s": _spread([view.since_s(group.completed_at) or 0.0 for group in waiting]),
    }
    columns = "group version behind age_s tokens reward_mean reward_std replica"
    left_off = len(waiting) - len(rows)
    found = table("in order of completion", columns, rows, left_off=left_off, note="`buffer all`")
    return Answer(facts=facts, tables=[found] if rows else [])


def _buffered_row(view: View, group: Group) -> list[Cell]:
    members = _members(view, group)
    rewards = [t.reward for t in members]
    return [
        f"g{format_id(group.id)}",
        str(group.version or "–"),
        bounds.staleness(view.turn, group),
        view.since_s(group.completed_at),
        sum(t.num_tokens for t in members),
        fmean(rewards),
        _deviation(rewards),
        group.worker,
    ]


def _sampler(view: View) -> str:
    if not view.settings.custom_sampler:
        return "fifo"
    name = view.state.sampler or "that of the configuration"
    if view.state.sampler_request:
        return f"{name}; it has been asked and has not answered"
    starved = "; it chose nothing, and is asked again when the buffer changes" if view.state.sampler_starved else ""
    return name + starved


def histogram(values: Iterable[int]) -> str | None:
    """`0: 12  1: 3`, None without values."""
    counts = Counter(values)
    return "  ".join(f"{value}: {counts[value]}" for value in sorted(counts)) or None


def _spread(ages_s: list[float]) -> str | None:
    if not ages_s:
        return None
    return f"newest {min(ages_s):.1f}, mean {fmean(ages_s):.1f}, oldest {max(ages_s):.1f}"


COMMANDS = (
    Command(
        name="buffer",
        part="Look",
        usage="buffer [ROWS | all]",
        summary="complete groups that wait for the trainer: age, staleness, rewards, and the limits",
        function=show_buffer,
        arguments=(0, 1),
        takes="all",
        examples=(("buffer", f"the first {ROWS} in order of completion"), ("buffer 3", "the first three")),
    ),
    Command(
        name="groups",
        part="Look",
        usage="groups [all | WORD …]",
        summary="groups in flight; with words, those of a replica, version, state or step",
        function=show_groups,
        arguments=(0, 6),
        takes="all in-flight buffered leased REPLICA VERSION",
        examples=(
            ("groups", "those in flight"),
            ("groups r3", "those of rollout-3, whatever their state"),
            ("groups leased v12", "those of v12 that a train step has"),
        ),
    ),
    Command(
        name="group",
        part="Look",
        usage="group NAME",
        summary="one group with its siblings",
        function=show_group,
        arguments=(1, 1),
        takes="GROUP",
        examples=(("group g7", "group 7 of the newest boot that has one"), ("group g2.7", "group 7 of boot 2")),
    ),
    Command(
        name="trajectory",
        part="Look",
        usage="trajectory NAME",
        summary="one trajectory: versions, lengths, reward",
        function=show_trajectory,
        arguments=(1, 1),
        takes="TRAJECTORY",
        examples=(("trajectory t42", "by its number"),),
    ),
)
