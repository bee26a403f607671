"""Step through decisions: hold a pass, look at what it decides next, edit, apply or skip it."""

from collections.abc import Callable

import msgspec

from laminar.console import subjects
from laminar.console.answers import Answer, Cell, Change, Table, table
from laminar.console.language import Command, UsageError
from laminar.console.subjects import listed, nearest
from laminar.console.view import View
from laminar.core import bounds, events
from laminar.core.decisions import (
    AnyDecision,
    DispatchNew,
    DispatchQueued,
    RefreshReplica,
    Repack,
    TakeBatch,
    Transfer,
)
from laminar.core.operator_records import HeldDecision
from laminar.ids import format_id

PASSES = ("dispatch", "repack", "sample", "refresh")
GROUPS_NAMED = 6  # of a batch, in a sentence


# ---- in words ----------------------------------------------------------------------------------------------


def described(decision: AnyDecision) -> str:
    """A decision in a sentence."""
    match decision:
        case DispatchNew():
            return f"begin a new group on {decision.worker}"
        case DispatchQueued():
            how = "start again" if decision.restart else "go on"
            return f"{len(decision.trajectories)} queued siblings of g{format_id(decision.group)} {how} on {decision.worker}"
        case RefreshReplica():
            return f"{decision.worker} pulls {decision.version} from its {decision.source}"
        case Repack():
            moves = ", ".join(f"{t.source} → {t.destination} ({len(t.trajectories)})" for t in decision.transfers)
            return f"move {sum(len(t.trajectories) for t in decision.transfers)} trajectories: {moves}"
        case TakeBatch():
            names = [f"g{format_id(group)}" for group in decision.groups]
            more = f" and {len(names) - GROUPS_NAMED} more" if len(names) > GROUPS_NAMED else ""
            return f"step {decision.step} trains {len(names)} groups: {', '.join(names[:GROUPS_NAMED])}{more}"


def lines(view: View) -> list[str]:
    """What is held and paused now, in sentences."""
    held = view.state.held.values()
    waiting = {h.pass_name for h in held}
    found = [f"held: decision {h.id} of {h.pass_name}: {described(h.decision)}" for h in held]
    return found + [f"paused: {name}; nothing to decide yet" for name in view.state.holds if name not in waiting]


def show_held(view: View, words: list[str]) -> Answer:
    """All held decisions, or one with everything in it."""
    if words:
        held = _held(view, words[0])
        facts = _facts(view, held)
        return Answer(facts=facts, tables=[_detail(view, held.decision)], lines=[_then(held.id)])
    rows: list[list[Cell]] = [
        [h.id, h.pass_name, view.since_s(h.held_at), described(h.decision)] for h in view.state.held.values()
    ]
    if not rows:
        return Answer(
            lines=lines(view) or ["nothing is held; `pause repack` or `break repack` holds its next decision"]
        )
    return Answer(tables=[table("", "decision pass held_s what", rows)], lines=[_then(_first(view))])


def _first(view: View) -> int:
    """The held decision that has waited longest."""
    return next(iter(view.state.held))


def _then(number: int) -> str:
    return f"`approve {number}` applies it, `edit {number} …` changes it, `skip {number}` does nothing until the next event"


def _facts(view: View, held: HeldDecision) -> dict[str, Cell]:
    return {
        "decision": held.id,
        "pass": held.pass_name,
        "held_s": view.since_s(held.held_at),
        "what": described(held.decision),
    }


def _detail(view: View, decision: AnyDecision) -> Table:
    match decision:
        case Repack():
            rows: list[list[Cell]] = [
                [t.source, t.destination, len(t.trajectories), _tokens(view, t), t.reason] for t in decision.transfers
            ]
            return table("transfers", "source destination trajectories tokens reason", rows)
        case TakeBatch():
            return table("batch", "group version behind age_s", [_batch_row(view, group) for group in decision.groups])
        case _:
            return table("", "what", [[described(decision)]])


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


def _held(view: View, word: str) -> HeldDecision:
    """The held decision of this number. Raises UsageError."""
    found = view.state.held.get(int(word)) if word.isdigit() else None
    if found is None:
        there = "; ".join(f"{h.id} ({h.pass_name})" for h in view.state.held.values()) or "none"
        raise UsageError(f"no decision {word} is held; there are: {there}")
    return found


def _chosen(view: View, words: list[str]) -> list[HeldDecision]:
    """Those that are named; without a name, the only one. Raises UsageError."""
    held = list(view.state.held.values())
    if words == ["all"]:
        return held
    if words:
        return [_held(view, word) for word in words]
    if len(held) == 1:
        return held
    there = "; ".join(f"{h.id} ({h.pass_name})" for h in held)
    raise UsageError(
        f"which? held are {there}; or say `all`" if held else "nothing is held; `pause` or `break` holds a pass"
    )


def _pass(word: str) -> str:
    """The name of a pass. Raises UsageError."""
    if word not in PASSES:
        raise UsageError(f"there is no pass {word!r}{nearest(word, PASSES)}; there are: {listed(PASSES)}")
    return word


# ---- commands that change ----------------------------------------------------------------------------------


def pause(view: View, words: list[str]) -> Change:
    """Hold passes: what they decide next waits for a word."""
    names = PASSES if words == ["all"] else tuple(map(_pass, words))
    changes: list[events.AnyEvent] = [events.HoldChanged(pass_name=name, held=True) for name in names]
    what = f"{', '.join(names)}: the next decision is held instead of applied"
    return Change(events=changes, lines=[f"{what}; `held` shows it, `resume {names[0]}` lets it go"])


def resume(view: View, words: list[str]) -> Change:
    """Let passes go again; what they had decided is decided anew."""
    paused = list(view.state.holds)
    names = [_pass(word) for word in words if word != "all"] or paused
    if not names:
        raise UsageError("nothing is paused")
    if idle := [name for name in names if name not in paused]:
        raise UsageError(f"{' and '.join(idle)} is not paused; paused are: {listed(paused)}")
    changes: list[events.AnyEvent] = [events.HoldChanged(pass_name=name, held=False) for name in names]
    return Change(events=changes, lines=[f"{', '.join(names)}: decisions are applied again, those held are taken anew"])


def approve(view: View, words: list[str]) -> Change:
    """Apply held decisions. What no longer fits is void, by the core's own checks."""
    return _resolve(view, words, "apply")


def skip(view: View, words: list[str]) -> Change:
    """Drop held decisions; their pass decides nothing until the next event."""
    return _resolve(view, words, "skip")


def _resolve(view: View, words: list[str], verdict: str) -> Change:
    chosen = _chosen(view, words)
    changes: list[events.AnyEvent] = [events.DecisionResolved(decision=held.id, verdict=verdict) for held in chosen]
    done = "applied" if verdict == "apply" else "skipped until the next event"
    return Change(events=changes, lines=[f"decision {h.id} is {done}: {described(h.decision)}" for h in chosen])


# ---- editing -----------------------------------------------------------------------------------------------


def edit(view: View, words: list[str]) -> Change:
    """Put another decision in the place of a held one; it goes on being held."""
    held, verb, names = _held(view, words[0]), words[1], words[2:]
    verbs = _EDITS[type(held.decision)]
    if verb not in verbs:
        can = listed(list(verbs)) if verbs else "nothing: approve or skip it"
        raise UsageError(
            f"decision {held.id} is one of {held.pass_name}, which {verb!r} cannot edit; it can be edited by: {can}"
        )
    replacement = verbs[verb](view, held.decision, names)
    change = events.DecisionEdited(decision=held.id, replacement=replacement)
    return Change(events=[change], lines=[f"decision {held.id} is now: {described(replacement)}", _then(held.id)])


def _drop(view: View, decision: Repack, names: list[str]) -> Repack:
    """`drop SOURCE [DESTINATION]`: these transfers are not made."""
    _expect(names, 1, 2, "drop SOURCE [DESTINATION]")
    workers = [subjects.replica(view, name).id for name in names]
    left = [t for t in decision.transfers if [t.source, t.destination][: len(workers)] != workers]
    if len(left) == len(decision.transfers):
        raise UsageError(f"nothing moves from {' to '.join(workers)} in it; `held` shows what does")
    if not left:
        raise UsageError("nothing would be left to move: skip the decision instead")
    return Repack(transfers=left)


def _send(view: View, decision: Repack, names: list[str]) -> Repack:
    """`send SOURCE DESTINATION`: all that moves from the source goes there."""
    _expect(names, 2, 2, "send SOURCE DESTINATION")
    source, destination = (subjects.replica(view, name) for name in names)
    if all(t.source != source.id for t in decision.transfers):
        raise UsageError(f"nothing moves from {source.id} in it; `held` shows what does")
    if source.id == destination.id or source.version != destination.version:
        why = (
            "it is the source"
            if source.id == destination.id
            else f"it holds {destination.version}, not {source.version}"
        )
        raise UsageError(f"{source.id} cannot move to {destination.id}: {why}")
    by_operator = "chosen by an operator"
    moved = [
        msgspec.structs.replace(t, destination=destination.id, reason=by_operator) if t.source == source.id else t
        for t in decision.transfers
    ]
    return Repack(transfers=moved)


def _swap(view: View, decision: TakeBatch, names: list[str]) -> TakeBatch:
    """`swap GROUP OTHER`: another complete group is trained in its place."""
    _expect(names, 2, 2, "swap GROUP OTHER")
    old, new = (subjects.group(view, name).id for name in names)
    if old not in decision.groups:
        raise UsageError(f"{names[0]} is not in the batch; `held` shows what is")
    if new not in view.state.buffer or new in decision.groups:
        why = "is in the batch already" if new in decision.groups else "is not complete: `buffer` shows what is"
        raise UsageError(f"{names[1]} {why}")
    return TakeBatch(step=decision.step, groups=[new if group == old else group for group in decision.groups])


def _on_new(view: View, decision: DispatchNew, names: list[str]) -> DispatchNew:
    """`on REPLICA`."""
    _expect(names, 1, 1, "on REPLICA")
    return DispatchNew(worker=subjects.replica(view, names[0]).id)


def _on_queued(view: View, decision: DispatchQueued, names: list[str]) -> DispatchQueued:
    """`on REPLICA`."""
    _expect(names, 1, 1, "on REPLICA")
    return msgspec.structs.replace(decision, worker=subjects.replica(view, names[0]).id)


def _pull(view: View, decision: RefreshReplica, names: list[str]) -> RefreshReplica:
    """`pull VERSION`."""
    _expect(names, 1, 1, "pull VERSION")
    return RefreshReplica(worker=decision.worker, version=subjects.version(view, names[0]), source="relay")


def _expect(names: list[str], fewest: int, most: int, usage: str) -> None:
    if not fewest <= len(names) <= most:
        raise UsageError(f"usage: edit NUMBER {usage}")


Edit = Callable[..., AnyDecision]
_EDITS: dict[type[AnyDecision], dict[str, Edit]] = {
    Repack: {"drop": _drop, "send": _send},
    TakeBatch: {"swap": _swap},
    DispatchNew: {"on": _on_new},
    DispatchQueued: {"on": _on_queued},
    RefreshReplica: {"pull": _pull},
}

COMMANDS = (
    Command(
        name="pause",
        part="Step",
        usage="pause PASS … | all",
        summary="hold dispatch, repack, sample or refresh: its next decision waits for your word",
        function=pause,
        arguments=(1, 4),
        takes="pass",
        examples=(("pause repack", "no trajectory moves without your word"), ("pause dispatch sample", "two of them")),
        details="What is under way goes on: a paused dispatch begins no group, but those that generate are finished and trained.",
    ),
    Command(
        name="resume",
        part="Step",
        usage="resume [PASS …]",
        summary="let paused passes go again",
        function=resume,
        arguments=(0, 4),
        takes="pass",
        examples=(("resume", "all that are paused"), ("resume repack", "one of them")),
    ),
    Command(
        name="held",
        part="Step",
        usage="held [NUMBER]",
        summary="decisions that wait for your word; with a number, all that is in one",
        function=show_held,
        arguments=(0, 1),
        takes="held",
        examples=(("held", "all"), ("held 3", "decision 3: each transfer with its reason, or each group")),
    ),
    Command(
        name="approve",
        part="Step",
        usage="approve [NUMBER … | all]",
        summary="apply held decisions",
        function=approve,
        arguments=(0, 8),
        takes="held",
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
        takes="held",
        examples=(("skip 3", "decision 3"),),
        details="The facts are the same, so the same may be decided at the next event: hold the pass to keep it from that.",
    ),
    Command(
        name="edit",
        part="Step",
        usage="edit NUMBER VERB NAME …",
        summary="change a held decision; it goes on being held",
        function=edit,
        arguments=(2, 5),
        takes="held",
        examples=(
            ("edit 3 drop r1", "repack: what was to move from rollout-1 stays"),
            ("edit 3 drop r1 r2", "repack: only what was to move from there to rollout-2"),
            ("edit 3 send r1 r4", "repack: all that moves from rollout-1 goes to rollout-4"),
            ("edit 4 swap g7 g9", "sample: train g9 in the place of g7"),
            ("edit 5 on r2", "dispatch: on another replica"),
            ("edit 6 pull v11", "refresh: another version that its relay holds"),
        ),
        details="The core checks an edited decision like any other when it is applied: what does not fit is void.",
    ),
)
