"""Breakpoints: `break repack when moves > 2` holds the run where that happens (`laminar.core.breakpoints`)."""

import re

import msgspec

from laminar.console import subjects
from laminar.console.answers import Answer, Cell, Change, table
from laminar.console.language import Command, UsageError
from laminar.console.subjects import nearest
from laminar.console.view import View
from laminar.core import breakpoints, events
from laminar.core.operator_records import Condition

_FIELDS = dict.fromkeys(field for fields in breakpoints.FIELDS.values() for field in fields)
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(==|!=|<=|>=|<|>|=)\s*(\S+)\s*")


def break_at(view: View, words: list[str]) -> Answer | Change:
    """Set a breakpoint; without words, show them."""
    if not words:
        return _shown(view)
    where, conditions = words[0], _conditions(view, words)
    if where not in breakpoints.FIELDS:
        near = nearest(where, breakpoints.FIELDS)
        raise UsageError(f"nothing breaks at {where!r}{near}; `break` lists where one can")
    if refusal := breakpoints.why_not_set(view.state, where, conditions):
        raise UsageError(refusal)
    text = breakpoints.in_text(where, conditions)
    what = "its decision is held" if where in breakpoints.OF_DECISIONS else "every pass is held from then on"
    lines = [f"breakpoint {view.state.num_breakpoints + 1} at {text}: {what}; `held` shows it, `continue` goes on"]
    return Change(events=[events.BreakpointSet(where=where, conditions=conditions)], lines=lines)


def _conditions(view: View, words: list[str]) -> list[Condition]:
    """`when FIELD OP VALUE and …`. Raises UsageError."""
    if len(words) == 1:
        return []
    if words[1] != "when" or len(words) == 2:
        raise UsageError(f"{words[1]!r}: write `break {words[0]} when FIELD == VALUE and …`; `break` lists the fields")
    return [_condition(view, part) for part in re.split(r"\band\b", " ".join(words[2:]))]


def _condition(view: View, text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError(f"{text.strip()!r} is no condition: write, for example, `moves > 2` or `replica == r1`")
    field, op, value = found.groups()
    return msgspec.convert([field, "==" if op == "=" else op, _value(view, field, value)], Condition)


def _value(view: View, field: str, text: str) -> int | float | str:
    """Numbers as numbers; short names written out."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if field in ("replica", "relay", "group", "version"):
        return subjects.told_of(view, text)[0]
    return text


def _shown(view: View) -> Answer:
    """The breakpoints, what they hit last, and where there could be some."""
    state = view.state
    hits = {hit.breakpoint: hit for hit in state.hits}
    rows: list[list[Cell]] = [
        [
            each.id,
            breakpoints.in_text(each.where, each.conditions),
            each.num_hits,
            hits[each.id].seq if each.id in hits else None,
            hits[each.id].text if each.id in hits else None,
        ]
        for each in state.breakpoints.values()
    ]
    places: list[list[Cell]] = [
        [where, "decision" if where in breakpoints.OF_DECISIONS else "event", " ".join(fields)]
        for where, fields in breakpoints.FIELDS.items()
    ]
    tables = [table("breakpoints", "breakpoint at hits last_event what", rows)] if rows else []
    return Answer(tables=[*tables, table("where one can break", "at what fields", places)])


def clear(view: View, words: list[str]) -> Change:
    """Take breakpoints away; what they hold stays held."""
    numbers = [0] if words == ["all"] else [_number(word) for word in words]
    for number in numbers:
        if refusal := breakpoints.why_not_cleared(view.state, number):
            raise UsageError(refusal)
    names = ", ".join(map(str, numbers)) if numbers != [0] else "all breakpoints"
    changes: list[events.AnyEvent] = [events.BreakpointCleared(breakpoint=number) for number in numbers]
    return Change(events=changes, lines=[f"{names}: cleared; what is held because of it stays held: `continue`"])


def _number(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise UsageError(f"{word!r} is no breakpoint: write its number, or `all`")
    return int(word)


COMMANDS = (
    Command(
        name="break",
        part="Step",
        usage="break [WHERE [when FIELD OP VALUE and …]]",
        summary="hold the run at decisions of a pass, or at events; without words, the breakpoints there are",
        function=break_at,
        arguments=(0, 24),
        takes=f"{' '.join(breakpoints.FIELDS)}, when, {' '.join(_FIELDS)} and REPLICA GROUP VERSION",
        examples=(
            ("break repack when moves > 2", "hold a repack that moves more than two trajectories"),
            ("break repack when replica == r3", "one in which rollout-3 is a source or a destination"),
            ("break sample", "hold each batch before it is trained"),
            ("break replica-dead", "hold every pass when a replica is lost"),
            ("break", "the breakpoints, what they hit, and where one can break by what"),
        ),
        details="OP is ==, !=, <, <=, > or >=. What generates goes on while a decision is held; time limits of workers run.",
    ),
    Command(
        name="clear",
        part="Step",
        usage="clear NUMBER … | all",
        summary="take breakpoints away",
        function=clear,
        arguments=(1, 8),
        takes="BREAKPOINT",
        examples=(("clear 2", "breakpoint 2"), ("clear all", "all of them")),
    ),
)
