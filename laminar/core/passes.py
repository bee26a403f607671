"""The four passes that decide, and how an operator holds, steps and edits what they decide (`laminar.core.holds`).

A pass *proposes* its next decision and *applies* it, until it has nothing more to decide. Between the two a decision may be held:
because an operator holds the pass, or because it meets a breakpoint (`laminar.core.breakpoints`).
"""

from collections.abc import Callable
from typing import Any

from laminar.core import breakpoints, dispatch, events, fleet, holds, moves, story, training
from laminar.core.actions import RaiseAlarm
from laminar.core.decisions import AnyDecision, DispatchNew, DispatchQueued, RefreshReplica, Repack, TakeBatch, in_words
from laminar.core.operator_records import HeldDecision, Hold, Resolution
from laminar.core.turn import Turn

DECISIONS_MAX = 1_000_000  # per event; a pass that never stops proposing is a bug, not a busy run
ALL = "all"

PASSES: dict[str, tuple[Callable[[Turn], AnyDecision | None], Callable[[Turn, Any], str]]] = {
    "refresh": (fleet.propose_refresh, fleet.apply_refresh),
    "repack": (moves.propose, moves.apply),
    "dispatch": (dispatch.propose, dispatch.apply),
    "sample": (training.propose_batch, training.apply_batch),
}

KINDS: dict[str, tuple[type[AnyDecision], ...]] = {
    "refresh": (RefreshReplica,),
    "repack": (Repack,),
    "dispatch": (DispatchNew, DispatchQueued),
    "sample": (TakeBatch,),
}


def run(turn: Turn, name: str) -> bool:
    """Decide until there is nothing more to decide. True if anything was."""
    propose, apply = PASSES[name]
    state, progressed = turn.state, False
    if name in state.skipped or holds.is_paused(state, name) or holds.shown(state, name):
        return False
    turn.begin_pass()
    for _ in range(DECISIONS_MAX):
        decision = propose(turn)
        if decision is None:
            return progressed
        hit = breakpoints.matching(turn, name, decision) if state.breakpoints and name not in state.holds else None
        if hit or name in state.holds:
            _show(turn, name, decision, hit.id if hit else 0)
            return progressed
        if turn.witness is not None:
            turn.witness(turn, decision)
        apply(turn, decision)
        progressed = True
    raise AssertionError(f"pass {name} proposed {DECISIONS_MAX} decisions for event {turn.cause}")


def _show(turn: Turn, name: str, decision: AnyDecision, breakpoint_id: int) -> None:
    """The decision waits for a word."""
    state = turn.state
    state.num_decisions += 1
    number = state.num_decisions
    held = HeldDecision(id=number, pass_name=name, decision=decision, held_at=turn.at, breakpoint=breakpoint_id)
    state.held[number] = held
    if breakpoint_id:
        state.holds[name] = Hold(since=turn.at, breakpoint=breakpoint_id)
        breakpoints.hit(turn, state.breakpoints[breakpoint_id], held.decision, number)


# ---- the operator's word -----------------------------------------------------------------------------------


def why_not_held(pass_name: str) -> str:
    """Why this cannot be held or let go; empty = it can."""
    known = ", ".join([*PASSES, ALL])
    return "" if pass_name in PASSES or pass_name == ALL else f"there is no pass {pass_name!r}; there are: {known}"


def on_hold(turn: Turn, event: events.HoldChanged) -> None:
    """Hold the pass, or let it go."""
    if refusal := why_not_held(event.pass_name):
        turn.refuse("hold", refusal)
        return
    for name in PASSES if event.pass_name == ALL else [event.pass_name]:
        if event.held:
            _hold(turn, name, Hold(mode=event.mode, since=turn.at))
        else:
            _let_go(turn, name)
    turn.look_again()


def _hold(turn: Turn, name: str, hold: Hold) -> None:
    state = turn.state
    state.holds[name] = hold
    held = holds.shown(state, name)
    if held is not None and hold.mode == "pause":
        del state.held[held.id]  # decided anew, of what is then
    turn.tell(holds.why(state, name), story.of_pass(name))


def _let_go(turn: Turn, name: str) -> None:
    """A decision that hit a breakpoint is applied, any other is decided anew."""
    state = turn.state
    held = holds.shown(state, name)
    if state.holds.pop(name, None):
        turn.tell("is let go", story.of_pass(name))
    if held is None:
        return
    del state.held[held.id]
    if held.breakpoint and not state.finished:
        _apply(turn, held, held.decision)


def _why_not_there(turn: Turn, decision: int) -> str:
    """Why there is nothing to say about a decision; empty = it is held."""
    known = ", ".join(map(str, turn.state.held)) or "none"
    return "" if decision in turn.state.held else f"decision {decision} is not held (any more); held are: {known}"


def _why_no_replacement(held: HeldDecision, replacement: AnyDecision | None) -> str:
    if replacement is None or isinstance(replacement, KINDS[held.pass_name]):
        return ""
    return f"a {type(replacement).__name__} is no decision of the pass {held.pass_name}"


def on_resolved(turn: Turn, event: events.DecisionResolved) -> None:
    """Apply, edit or skip a held decision; what has become void says so, and the pass decides anew."""
    state = turn.state
    if refusal := _why_not_there(turn, event.decision):
        turn.refuse("decision", refusal)
        return
    held = state.held.pop(event.decision)
    turn.look_again()
    if event.verdict != "apply":
        state.skipped[held.pass_name] = None
        state.repack.planned = [] if held.pass_name == "repack" else state.repack.planned
        state.resolution = Resolution(decision=held.id, verdict="skip")
        turn.tell(f"decision {held.id} is skipped", story.of_pass(held.pass_name))
    elif not state.finished:
        _apply(turn, held, event.replacement or held.decision)


def on_edited(turn: Turn, event: events.DecisionEdited) -> None:
    """Put another decision of the same pass in its place; it goes on being held."""
    number, new = event.decision, event.replacement
    if refusal := _why_not_there(turn, number) or _why_no_replacement(turn.state.held[number], new):
        turn.refuse("decision", refusal)
        return
    held = turn.state.held[number]
    held.decision = new
    turn.tell(f"decision {number} is edited: {in_words(new)}", story.of_pass(held.pass_name))


def _apply(turn: Turn, held: HeldDecision, decision: AnyDecision) -> None:
    if turn.witness is not None:
        turn.witness(turn, decision)
    void = _why_no_replacement(held, decision) or PASSES[held.pass_name][1](turn, decision)
    turn.state.resolution = Resolution(decision=held.id, verdict="apply", void=void)
    turn.tell(f"decision {held.id} is " + (f"void: {void}" if void else "applied"), story.of_pass(held.pass_name))
    if void:
        text = f"decision {held.id} of the pass {held.pass_name} is void: {void}"
        turn.emit(RaiseAlarm(cause=turn.cause, name="decision-void", text=text))
