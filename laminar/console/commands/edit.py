"""Edit a decision that is held: where a transfer goes, what is in a batch, who begins a group. It goes on being held."""

from collections.abc import Callable

import msgspec

from laminar.console import subjects
from laminar.console.answers import Change
from laminar.console.commands import held
from laminar.console.language import Command, UsageError
from laminar.console.subjects import listed
from laminar.console.view import View
from laminar.core import events
from laminar.core.decisions import (
    AnyDecision,
    DispatchNew,
    DispatchQueued,
    RefreshReplica,
    Repack,
    TakeBatch,
    in_words,
)


def edit(view: View, words: list[str]) -> Change:
    """Put another decision in the place of a held one; it goes on being held."""
    waiting, verb, names = held.of_number(view, words[0]), words[1], words[2:]
    verbs = _EDITS[type(waiting.decision)]
    if verb not in verbs:
        can = listed(list(verbs)) if verbs else "nothing: approve or skip it"
        raise UsageError(
            f"decision {waiting.id} is one of {waiting.pass_name}, which {verb!r} cannot edit; it can be edited by: {can}"
        )
    replacement = verbs[verb](view, waiting.decision, names)
    change = events.DecisionEdited(decision=waiting.id, replacement=replacement)
    return Change(
        events=[change], lines=[f"decision {waiting.id} is now: {in_words(replacement)}", held.then(waiting.id)]
    )


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
        name="edit",
        part="Step",
        usage="edit NUMBER VERB NAME …",
        summary="change a held decision; it goes on being held",
        function=edit,
        arguments=(2, 5),
        takes="HELD, drop send swap on pull, REPLICA GROUP VERSION",
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
