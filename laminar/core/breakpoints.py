"""Breakpoints: decisions of a pass, or events, at which an operator wants the run to be held. docs/console.md.

    set ──► a decision that meets all conditions ──► its pass is held and shows it      ──► let go: it is applied, the run goes on
        └─► an event that meets all conditions   ──► every pass is held from then on    ──► let go
        either is a *hit*: counted, kept in the state, and told (`BreakpointHit`)

A condition compares one of the fields below with a value; nothing is evaluated. A field that has several values (`replica` of a
repack) meets ``==`` if one of them is equal, ``!=`` if none is, and an order if one of them is so. A decision that is let go does
not hit again; one that an operator steps through by hand (its pass is held anyway) hits nothing.
"""

from collections.abc import Iterator, Sequence

from laminar.core import bounds, story, versions
from laminar.core.actions import AnyAction, BreakpointHit, RaiseAlarm, RecordTrajectories, StopWorker
from laminar.core.decisions import AnyDecision, DispatchNew, DispatchQueued, RefreshReplica, Repack, TakeBatch, in_words
from laminar.core.events import (
    AnyEvent,
    BreakpointCleared,
    BreakpointSet,
    CheckpointSaved,
    ReplicaJoined,
    StepFinished,
    VersionReady,
)
from laminar.core.operator_records import HITS_KEPT, Breakpoint, Condition, Hit, Hold
from laminar.core.records import State
from laminar.core.turn import Turn
from laminar.ids import WorkerId

BREAKPOINTS_MAX = 64  # every decision is compared with all of them
Facts = dict[str, Sequence[int | float | str]]

OF_DECISIONS: dict[str, dict[str, type]] = {
    "dispatch": {"kind": str, "replica": str, "group": str, "siblings": int, "load": int, "restart": int},
    "refresh": {"replica": str, "version": str, "step": int, "source": str, "behind": int},
    "repack": {"replica": str, "sources": int, "destinations": int, "moves": int, "tokens": int},
    "sample": {"step": int, "group": str, "groups": int, "tokens": int, "staleness": int},
}
"""Pass -> the fields of its decisions. `kind`: ``new`` or ``queued``; `load`: trajectories at the replica; `behind`: train steps;
`moves`: trajectories that move; `staleness`: of the oldest group, train steps."""

OF_EVENTS: dict[str, dict[str, type]] = {
    "replica-dead": {"replica": str},
    "replica-joined": {"replica": str},
    "relay-dead": {"relay": str},
    "trainer-dead": {},
    "step-finished": {"step": int},
    "version-ready": {"version": str, "step": int},
    "checkpoint-saved": {"step": int},
    "trajectory-dropped": {"reason": str, "group": str, "tokens": int},
    "alarm": {"name": str},
}
"""Kind of event -> its fields. `alarm`: whatever people are told of (``replica-suspect``, ``version-lost`` …), by its name."""

FIELDS = OF_DECISIONS | OF_EVENTS
ORDERS = {"<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b}

# ---- setting and clearing ----------------------------------------------------------------------------------


def in_text(where: str, conditions: list[Condition]) -> str:
    """As a console takes it: ``repack when moves > 2 and replica == rollout-1``."""
    parts = [f"{condition.field} {condition.op} {condition.value}" for condition in conditions]
    return where + (" when " if parts else "") + " and ".join(parts)


def why_not_set(state: State, where: str, conditions: list[Condition]) -> str:
    """Why this cannot be a breakpoint; empty = it can."""
    if where not in FIELDS:
        return f"there is no breakpoint at {where!r}: decisions of {', '.join(OF_DECISIONS)}; events {', '.join(OF_EVENTS)}"
    if len(state.breakpoints) >= BREAKPOINTS_MAX:
        return f"there are {BREAKPOINTS_MAX} breakpoints already; clear some"
    for condition in conditions:
        kind = FIELDS[where].get(condition.field)
        if kind is None:
            known = ", ".join(FIELDS[where]) or "none"
            return f"{where} has no field {condition.field!r}; there are: {known}"
        if (kind is str) != isinstance(condition.value, str):
            return f"{where}: {condition.field} is {'text' if kind is str else 'a number'}, {condition.value!r} is not"
        if kind is str and condition.op in ORDERS:
            return f"{where}: {condition.field} is text, which is == or != something"
    return ""


def on_set(turn: Turn, event: BreakpointSet) -> None:
    """From the next decision or event on."""
    state = turn.state
    if refusal := why_not_set(state, event.where, event.conditions):
        turn.refuse("breakpoint", refusal)
        return
    state.num_breakpoints += 1
    number = state.num_breakpoints
    state.breakpoints[number] = Breakpoint(id=number, where=event.where, conditions=event.conditions)


def why_not_cleared(state: State, breakpoint_id: int) -> str:
    """Why it cannot be cleared; empty = it can. 0 = all of them."""
    if not breakpoint_id or breakpoint_id in state.breakpoints:
        return ""
    return f"there is no breakpoint {breakpoint_id}; there are: {', '.join(map(str, state.breakpoints)) or 'none'}"


def on_cleared(turn: Turn, event: BreakpointCleared) -> None:
    """What it holds stays held until it is let go."""
    if refusal := why_not_cleared(turn.state, event.breakpoint):
        turn.refuse("breakpoint", refusal)
    elif event.breakpoint:
        del turn.state.breakpoints[event.breakpoint]
    else:
        turn.state.breakpoints = {}


# ---- decisions ---------------------------------------------------------------------------------------------


def matching(turn: Turn, name: str, decision: AnyDecision) -> Breakpoint | None:
    """The first breakpoint that the decision meets."""
    found = [each for each in turn.state.breakpoints.values() if each.where == name]
    return _first(found, of_decision(turn, decision)) if found else None


def hit(turn: Turn, found: Breakpoint, what: AnyDecision | str, decision: int = 0) -> None:
    """Count it, keep it, tell people."""
    state = turn.state
    text = what if isinstance(what, str) else in_words(what)
    found.num_hits += 1
    state.hits.append(Hit(breakpoint=found.id, seq=turn.cause, at=turn.at, text=text, decision=decision))
    del state.hits[:-HITS_KEPT]
    turn.emit(
        BreakpointHit(cause=turn.cause, breakpoint=found.id, where=in_text(found.where, found.conditions), text=text)
    )
    turn.tell(f"hit: {text}", story.break_at(found.id))


def _first(found: list[Breakpoint], facts: Facts) -> Breakpoint | None:
    return next((each for each in found if all(_holds(condition, facts) for condition in each.conditions)), None)


def _holds(condition: Condition, facts: Facts) -> bool:
    values = facts[condition.field]
    if condition.op == "!=":
        return condition.value not in values
    if condition.op == "==":
        return condition.value in values
    return any(ORDERS[condition.op](value, condition.value) for value in values)


def of_decision(turn: Turn, decision: AnyDecision) -> Facts:
    """The fields of `OF_DECISIONS` of a decision."""
    state = turn.state
    if isinstance(decision, DispatchNew | DispatchQueued):
        return _of_dispatch(turn, decision)
    if isinstance(decision, RefreshReplica):
        held = state.replicas[decision.worker].version
        behind = versions.staleness(state.branches, decision.version, held) if held else decision.version.step
        return {
            "replica": [decision.worker],
            "version": [str(decision.version)],
            "step": [decision.version.step],
            "source": [decision.source],
            "behind": [behind],
        }
    if isinstance(decision, Repack):
        return _of_repack(turn, decision)
    return _of_batch(turn, decision)


def _of_dispatch(turn: Turn, decision: DispatchNew | DispatchQueued) -> Facts:
    queued = decision if isinstance(decision, DispatchQueued) else None
    return {
        "kind": ["queued" if queued else "new"],
        "replica": [decision.worker],
        "group": [story.group(queued.group)] if queued else [],
        "siblings": [len(queued.trajectories) if queued else turn.settings.group_size],
        "load": [len(turn.state.replicas[decision.worker].attempts)],
        "restart": [int(queued.restart) if queued else 0],
    }


def _of_repack(turn: Turn, decision: Repack) -> Facts:
    moving = [t for transfer in decision.transfers for t in transfer.trajectories]
    sources = dict.fromkeys(transfer.source for transfer in decision.transfers)
    destinations = dict.fromkeys(transfer.destination for transfer in decision.transfers)
    return {
        "replica": [*sources, *destinations],
        "sources": [len(sources)],
        "destinations": [len(destinations)],
        "moves": [len(moving)],
        "tokens": [sum(turn.state.trajectories[t].num_tokens for t in moving if t in turn.state.trajectories)],
    }


def _of_batch(turn: Turn, decision: TakeBatch) -> Facts:
    groups = [turn.state.groups[group] for group in decision.groups]
    members = [turn.state.trajectories[t] for group in groups for t in group.trajectories]
    return {
        "step": [decision.step],
        "group": [story.group(group) for group in decision.groups],
        "groups": [len(groups)],
        "tokens": [sum(t.num_tokens for t in members)],
        "staleness": [max((bounds.staleness(turn, group) for group in groups), default=0)],
    }


# ---- events ------------------------------------------------------------------------------------------------


class Watch:
    """What one event leads to, seen from before its handler to after the passes."""

    def __init__(self, turn: Turn) -> None:
        state = turn.state
        self._found = [each for each in state.breakpoints.values() if each.where in OF_EVENTS]
        self._replicas = dict.fromkeys(state.replicas) if self._found else {}
        self._relays = dict.fromkeys(state.relays) if self._found else {}
        self._trainer_was_ready = state.trainer.ready
        self._num_seen = 0

    def look(self, turn: Turn, event: AnyEvent | None) -> None:
        """Hold every pass if something meets a breakpoint that has happened since the last look; `event` at the first."""
        if not self._found:
            return
        new, self._num_seen = turn.actions[self._num_seen :], len(turn.actions)
        facts = [*(_of_event(event) if event else []), *self._of_trainer(turn), *self._of_actions(new)]
        hits: dict[int, None] = {}  # once per look: a dropped group is eight dropped trajectories
        for kind, fields in facts:
            found = _first([each for each in self._found if each.where == kind and each.id not in hits], fields)
            if found is not None:
                hits[found.id] = None
                _hold_all(turn, found, kind, fields)

    def _of_trainer(self, turn: Turn) -> Iterator[tuple[str, Facts]]:
        if self._trainer_was_ready and not turn.state.trainer.ready:
            yield "trainer-dead", {}
        self._trainer_was_ready = turn.state.trainer.ready

    def _of_actions(self, actions: list[AnyAction]) -> Iterator[tuple[str, Facts]]:
        for action in actions:
            if isinstance(action, RaiseAlarm):
                yield "alarm", {"name": [action.name]}
            elif isinstance(action, StopWorker) and action.lost:
                yield from self._of_death(action.worker)
            elif isinstance(action, RecordTrajectories):
                for t in action.trajectories:
                    if t.dropped:
                        fields: Facts = {
                            "reason": [t.dropped],
                            "group": [story.group(t.group)],
                            "tokens": [t.num_tokens],
                        }
                        yield "trajectory-dropped", fields

    def _of_death(self, worker: WorkerId) -> Iterator[tuple[str, Facts]]:
        if worker in self._replicas:
            del self._replicas[worker]
            yield "replica-dead", {"replica": [worker]}
        elif worker in self._relays:
            del self._relays[worker]
            yield "relay-dead", {"relay": [worker]}


def _of_event(event: AnyEvent) -> Iterator[tuple[str, Facts]]:
    if isinstance(event, StepFinished):
        yield "step-finished", {"step": [event.step]}
    elif isinstance(event, VersionReady):
        yield "version-ready", {"version": [str(event.version)], "step": [event.version.step]}
    elif isinstance(event, CheckpointSaved):
        yield "checkpoint-saved", {"step": [event.step]}
    elif isinstance(event, ReplicaJoined):
        yield "replica-joined", {"replica": [event.worker]}


def _hold_all(turn: Turn, found: Breakpoint, kind: str, fields: Facts) -> None:
    state = turn.state
    for name in OF_DECISIONS:
        state.holds.setdefault(name, Hold(since=turn.at, breakpoint=found.id))
    told = ", ".join(f"{field} {value}" for field, values in fields.items() for value in values)
    hit(turn, found, f"{kind}: {told}" if told else kind)
