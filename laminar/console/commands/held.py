"""Step through decisions: hold a pass, look at what it decides next, edit, apply or skip it."""

from collections.abc import Iterable

from laminar.console.answers import Answer, Cell, Change, Table, table
from laminar.console.language import Command, UsageError
from laminar.console.subjects import listed, nearest
from laminar.console.view import View
from laminar.core import bounds, events, holds
from laminar.core.decisions import (
    AnyDecision,
    Repack,
    TakeBatch,
    Transfer,
    in_words,
)
from laminar.core.operator_records import HeldDecision, Mode
from laminar.core.passes import PASSES as CORE_PASSES
from laminar.core.records import State
from laminar.ids import format_id

PASSES = tuple(CORE_PASSES)


def lines(view: View) -> list[str]:
    """What is held and paused now, in sentences."""
    state = view.state
    found = [f"held: decision {h.id} of {h.pass_name}: {in_words(h.decision)}" for h in state.held.values()]
    waiting = {h.pass_name for h in state.held.values()}
    return found + [holds.why(state, name) for name in state.holds if name not in waiting]


def show_held(view: View, words: list[str]) -> Answer:
    """All held decisions, or one with everything in it."""
    if words:
        held = of_number(view, words[0])
        facts = _facts(view, held)
        return Answer(facts=facts, tables=[detail(view, held.decision)], lines=[then(held.id)])
    rows: list[list[Cell]] = [
        [h.id, h.pass_name, view.since_s(h.held_at), in_words(h.decision)] for h in view.state.held.values()
    ]
    if not rows:
        return Answer(lines=lines(view) or ["nothing is held; `hold repack` or `break repack` holds its next decision"])
    return Answer(tables=[table("", "decision pass held_s what", rows)], lines=[then(_first(view))])


def _first(view: View) -> int:
    """The held decision that has waited longest."""
    return next(iter(view.state.held))


def then(number: int) -> str:
    """What can be done with a held decision."""
    return f"`approve {number}` applies it, `edit {number} …` changes it, `skip {number}` does nothing until the next event"


def _facts(view: View, held: HeldDecision) -> dict[str, Cell]:
    return {
        "decision": held.id,
        "pass": held.pass_name,
        "held_s": view.since_s(held.held_at),
        "what": in_words(held.decision),
    }


def detail(view: View, decision: AnyDecision) -> Table:
    """All that is in a decision."""
    match decision:
        case Repack():
            rows: list[list[Cell]] = [
                [t.source, t.destination, len(t.trajectories), _tokens(view, t), t.reason] for t in decision.transfers
            ]
            return table("transfers", "source destination trajectories tokens reason", rows)
        case TakeBatch():
            return table("batch", "group version behind age_s", [_batch_row(view, group) for group in decision.groups])
        case _:
            return table("", "what", [[in_words(decision)]])


def _tokens(view: View, transfer: Transfer) -> int:
    """Response tokens that the destination will have to prefill."""
    known = view.state.trajectories
    return sum(known[t].num_tokens for t in transfer.trajectories if t in known)


def _batch_row(view: View, number: int) -> list[Cell]:
    group = view.state.groups.get(number)  # type: ignore[call-overload]
    if group is None:
        return [f"g{format_id(number)}", "gone", None, None]
    age_s = view.since_s(group.completed_at)
    return [f"g{format_id(number)}", str(group.version or "–"), bounds.staleness(view.turn, group), age_s]


# ---- which -------------------------------------------------------------------------------------------------


def of_number(view: View, word: str) -> HeldDecision:
    """The held decision of this number. Raises UsageError."""
    found = view.state.held.get(int(word)) if word.isdecimal() else None
    if found is None:
        there = _numbered(view.state.held.values()) or "none"
        raise UsageError(f"no decision {word} is held; there are: {there}")
    return found


def _chosen(view: View, words: list[str]) -> list[HeldDecision]:
    """Those that are named; without a name, the only one. Raises UsageError."""
    held = list(view.state.held.values())
    if not held:
        raise UsageError("nothing is held; `hold` or `break` holds a pass")
    if words and words != ["all"]:
        return [of_number(view, word) for word in words]
    if words or len(held) == 1:
        return held
    raise UsageError(f"which? held are {_numbered(held)}; or say `all`")


def _numbered(held: Iterable[HeldDecision]) -> str:
    return "; ".join(f"{h.id} ({h.pass_name})" for h in held)


def _pass(word: str) -> str:
    """The name of a pass. Raises UsageError."""
    if word not in PASSES:
        raise UsageError(f"there is no pass {word!r}{nearest(word, PASSES)}; there are: {listed(PASSES)}")
    return word


# ---- commands that change ----------------------------------------------------------------------------------


def hold(view: View, words: list[str]) -> Change:
    """Hold passes: what they decide next is shown, and waits for a word."""
    names = _passes(words)
    then = "the next decision is held instead of applied; `held` shows it, `continue` applies it and holds the next"
    return _held_so(names, "step", f"{', '.join(names)}: {then}, `resume` lets go")


def pause(view: View, words: list[str]) -> Change:
    """Pause passes: they decide nothing."""
    names = _passes(words)
    return _held_so(names, "pause", f"{', '.join(names)}: nothing is decided until `resume {' '.join(words)}`")


def _held_so(names: tuple[str, ...], mode: Mode, line: str) -> Change:
    return Change(events=[events.HoldChanged(pass_name=name, held=True, mode=mode) for name in names], lines=[line])


def _passes(words: list[str]) -> tuple[str, ...]:
    return PASSES if words == ["all"] else tuple(map(_pass, words))


def resume(view: View, words: list[str]) -> Change:
    """Let passes go."""
    held = list(view.state.holds)
    names = held if words in ([], ["all"]) else list(map(_pass, words))
    if not names:
        raise UsageError("nothing is held or paused")
    if free := [name for name in names if name not in held]:
        raise UsageError(f"{' and '.join(free)} is not held; held are: {listed(held)}")
    changes: list[events.AnyEvent] = [events.HoldChanged(pass_name=name, held=False) for name in names]
    then = "decisions are applied again; what hit a breakpoint is applied now, what else was held is decided anew"
    return Change(events=changes, lines=[f"{', '.join(names)}: {then}"])


def go_on(view: View, words: list[str]) -> Change:
    """Let go what a breakpoint holds; of what an operator holds, apply the decision that is shown."""
    if words:
        raise UsageError("a live run goes on by itself, not to a place: write `continue`")
    changes = continuing(view.state)
    if not changes:
        paused = [name for name, hold in view.state.holds.items() if hold.mode == "pause"]
        then = f"`resume` lets {listed(paused)} go" if paused else "it goes on"
        raise UsageError(f"nothing waits at a breakpoint or at `hold`: {then}")
    return Change(events=changes, lines=[f"let go: {in_words(h.decision)}" for h in view.state.held.values()])


def continuing(state: State) -> list[events.AnyEvent]:
    """The words that let a run go on from where it is held."""
    changes: list[events.AnyEvent] = []
    for name, hold in state.holds.items():
        shown = holds.shown(state, name)
        if hold.breakpoint:
            changes.append(events.HoldChanged(pass_name=name, held=False))
        elif shown is not None:
            changes.append(events.DecisionResolved(decision=shown.id, verdict="apply"))
    return changes


def approve(view: View, words: list[str]) -> Change:
    """Apply held decisions. What no longer fits is void, by the core's own checks."""
    return _resolve(view, words, "apply")


def skip(view: View, words: list[str]) -> Change:
    """Drop held decisions; their pass decides nothing until the next event."""
    return _resolve(view, words, "skip")


def _resolve(view: View, words: list[str], verdict: str) -> Change:
    chosen = _chosen(view, words)
    changes: list[events.AnyEvent] = [events.DecisionResolved(decision=held.id, verdict=verdict) for held in chosen]
    done = "approved" if verdict == "apply" else "skipped until the next event"
    return Change(events=changes, lines=[f"{done}: decision {h.id}, {in_words(h.decision)}" for h in chosen])


COMMANDS = (
    Command(
        name="hold",
        part="Step",
        usage="hold PASS … | all",
        summary="show each decision of dispatch, repack, sample or refresh before it is applied",
        function=hold,
        arguments=(1, 4),
        takes="PASS all",
        examples=(("hold repack", "no trajectory moves without your word"), ("hold dispatch sample", "two of them")),
        details="What is under way goes on: what generates is finished, rewarded and buffered, and time limits of workers run.",
    ),
    Command(
        name="pause",
        part="Step",
        usage="pause PASS … | all",
        summary="let dispatch, repack, sample or refresh decide nothing",
        function=pause,
        arguments=(1, 4),
        takes="PASS all",
        examples=(
            ("pause dispatch", "no group begins; those that generate are finished and trained"),
            ("pause all", ""),
        ),
    ),
    Command(
        name="resume",
        part="Step",
        usage="resume [PASS … | all]",
        summary="let passes go that are held or paused",
        function=resume,
        arguments=(0, 4),
        takes="PASS all",
        examples=(("resume", "all of them"), ("resume repack", "one of them")),
    ),
    Command(
        name="held",
        part="Step",
        usage="held [NUMBER]",
        summary="decisions that wait for your word; with a number, all that is in one",
        function=show_held,
        arguments=(0, 1),
        takes="HELD",
        examples=(("held", "all"), ("held 3", "decision 3: each transfer with its reason, or each group")),
    ),
    Command(
        name="approve",
        part="Step",
        usage="approve [NUMBER … | all]",
        summary="apply held decisions",
        function=approve,
        arguments=(0, 8),
        takes="HELD all",
        examples=(
            ("approve", "the only one that is held"),
            ("approve 3", "decision 3"),
            ("approve all", "all of them"),
        ),
        details="What no longer fits, because the world went on, is void: the pass decides anew.",
    ),
    Command(
        name="skip",
        part="Step",
        usage="skip [NUMBER … | all]",
        summary="drop held decisions; their pass decides nothing until the next event",
        function=skip,
        arguments=(0, 8),
        takes="HELD all",
        examples=(("skip 3", "decision 3"),),
        details="The facts are the same, so the same may be decided at the next event: hold the pass to keep it from that.",
    ),
)
