"""What goes with every answer: where the run is, for the prompt, and what there is now, to complete arguments with."""

from collections.abc import Iterable
from itertools import islice

import msgspec

from laminar.console.answers import Answer
from laminar.console.view import Target, View
from laminar.ids import format_id

NAMES_MAX = 300  # that complete an argument, of a kind: more than a menu is scrolled through


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is, for the prompt."""

    target: Target
    step: int = 0
    steps: int = 0
    event: int = 0
    time_s: float = 0.0
    """Since the run began."""
    held: list[int] = []
    """Numbers of the decisions that wait for an operator."""
    paused: list[str] = []
    finished: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a line."""

    answer: Answer
    place: Place
    names: dict[str, list[str]] = {}
    """What there is now, by kind (replica, group, …), to complete arguments with."""


def reply(view: View, answer: Answer) -> Reply:
    """The answer, with the place and the names of after it."""
    return Reply(answer=answer, place=_place(view), names=names(view))


def _place(view: View) -> Place:
    state = view.state
    return Place(
        target=view.target,
        step=state.trainer.step,
        steps=view.settings.steps,
        event=state.seq,
        time_s=view.run_s(view.now),
        held=list(state.held),
        paused=list(state.holds),
        finished=state.finished,
    )


def names(view: View) -> dict[str, list[str]]:
    """What could be an argument now, by kind; not too many of each."""
    state = view.state
    replicas, relays = _first(map(str, state.replicas)), _first(map(str, state.relays))
    groups = _first(f"g{format_id(group)}" for group in state.groups)
    trajectories = _first(f"t{format_id(trajectory)}" for trajectory in state.trajectories)
    versions = [str(record.version) for record in state.versions]
    steps = [f"s{step}" for step in state.steps]
    return {
        "replica": replicas,
        "group": groups,
        "trajectory": trajectories,
        "version": versions,
        "breakpoint": [*map(str, state.breakpoints), "all"],
        "held": [str(number) for number in state.held],
        "subject": [*replicas, *relays, *versions, *steps, *groups],
    }


def _first(found: Iterable[str]) -> list[str]:
    return list(islice(found, NAMES_MAX))
