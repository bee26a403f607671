"""Passes that an operator or a breakpoint keeps from deciding, as `laminar.core.passes` finds them in the state.

    free ──hold(step)──► shows its next decision ──apply, skip, edit──► shows the one after ──let go──► free
      └───hold(pause)──► decides nothing ──────────────────────────────────────────────────let go──► free
      └───breakpoint hit──► shows the decision that hit ──let go──► applies it ──► free

Nothing is lost while a pass is held: what generates goes on, is rewarded and buffered; time limits of workers and weights go on;
the buffer limits and the staleness bound hold, for they are facts of the state that every pass asks about. A hold costs time only.
"""

from laminar.core.operator_records import HeldDecision
from laminar.core.records import State

STANDING_STILL = ("dispatch", "refresh", "sample")  # without these a run gets nowhere; without repack it is only slower


def is_paused(state: State, name: str) -> bool:
    """Whether the pass decides nothing at all."""
    return name in state.holds and state.holds[name].mode == "pause"


def shown(state: State, name: str) -> HeldDecision | None:
    """The decision of the pass that waits for a word, if one does."""
    return next((held for held in state.held.values() if held.pass_name == name), None) if state.held else None


def keeps_still(state: State) -> bool:
    """Whether a hold may be why nothing happens."""
    return any(name in state.holds for name in STANDING_STILL)


def why(state: State, name: str) -> str:
    """Who keeps the pass from deciding; empty = nobody."""
    hold = state.holds.get(name)
    if hold is None:
        return ""
    who = f"breakpoint {hold.breakpoint}" if hold.breakpoint else "an operator"
    if hold.mode == "pause":
        return f"the pass {name} is paused by {who}"
    held = shown(state, name)
    waiting = f", decision {held.id} waits for a word" if held else ""
    return f"the pass {name} is held by {who}{waiting}"
