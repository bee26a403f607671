"""Look at the run as a whole: where it is, and where everything is."""

from collections import Counter

from laminar.console.answers import Answer, Cell, table
from laminar.console.commands import held
from laminar.console.commands.groups import histogram
from laminar.console.language import Command
from laminar.console.view import View
from laminar.core import amend, bounds, ledger, versions, waits
from laminar.core.records import Account, GroupState
from laminar.core.waits import Wait


def show_status(view: View, words: list[str]) -> Answer:
    """Where the run is, who waits for whom at the top, and what an operator has changed."""
    state, found = view.state, waits.waits(view.turn)
    facts: dict[str, Cell] = {
        "run": _phase(view),
        "time_s": view.run_s(view.now),
        "step": f"{state.trainer.step} of {view.settings.steps}",
        "trainer": None if state.finished else _waits_of(view, found, waits.TRAINER) or "at work",
        "new_groups": None
        if state.finished
        else _waits_of(view, found, waits.NEW_GROUPS) or "begin wherever a replica may admit them",
        "groups": _groups(view),
        "replicas": _replicas(view),
        "weights": _weights(view),
        "repack": _repack(view),
        "ledger": "closed" if _is_closed(view) else "OPEN: this is a bug",
        "events": state.seq,
    }
    changed = amend.in_words(state)
    lines = [f"changed by an operator: {', '.join(changed)}"] if changed else []
    return Answer(facts=facts, lines=[*_alarms(view), *lines, *held.lines(view)])


def _phase(view: View) -> str:
    state = view.state
    if state.finished:
        return f"over: {state.finished}"
    if state.stopping:
        return f"stopping: {state.stopping}"
    until = f", and stops after step {state.stop_after}" if state.stop_after else ""
    return "under way" + until if state.started else "not begun"


def _waits_of(view: View, found: list[Wait], who: str) -> str:
    """What one node of the wait-for graph waits for, in a sentence."""
    for wait in found:
        if wait.who == who:
            since_s = view.since_s(wait.since)
            lasts = f", for {since_s:.1f} s" if since_s is not None else ""
            return f"waits for {wait.what}{lasts}"
    return ""


def _groups(view: View) -> str:
    counts = Counter(group.state for group in view.state.groups.values())
    buffered = len(view.state.buffer)
    places = [
        f"{counts[place]} {place.value.replace('_', ' ')}" for place in GroupState if place != GroupState.BUFFERED
    ]
    return f"{buffered} complete (a batch takes {view.settings.batch_groups}), {', '.join(places)}"


def _replicas(view: View) -> str:
    replicas = view.state.replicas.values()
    by_version = Counter(str(replica.version) for replica in replicas if replica.version)
    busy = sum(replica.num_generating > 0 for replica in replicas)
    at = ", ".join(f"{num} at {name}" for name, num in by_version.items())
    return f"{len(view.state.replicas)}: {busy} generating{'; ' + at if at else ''}"


def _weights(view: View) -> str:
    newest, made = versions.newest(view.state), view.state.versions[-1:]
    readable = f"{newest.version} is the newest that can be pulled" if newest else "nothing can be pulled yet"
    return readable + "".join(f"; {record.version} is not readable yet" for record in made if not record.ready)


def _repack(view: View) -> str:
    record = view.state.repack
    if not view.settings.repack_interval_s:
        return "off"
    return f"{record.num_checks} checks emptied {record.num_released} replicas by {record.num_moves} moves"


def _alarms(view: View) -> list[str]:
    """What nobody should overlook."""
    state = view.state
    stalled_s = view.now - state.stall.since
    return [
        *([f"nothing useful has happened for {stalled_s:.0f} s: `why-stalled`"] if state.stall.told else []),
        *([f"nothing can be written: {state.storage_failure}"] if state.storage_failure else []),
        *([f"channels are broken: {', '.join(state.silent)}"] if state.silent else []),
    ]


# ---- the ledger --------------------------------------------------------------------------------------------

PLACES = ("in_flight", "buffered", "leased", "committed")


def show_ledger(view: View, words: list[str]) -> Answer:
    """Where every drawn trajectory and every received token is now."""
    books = view.state.ledger
    reasons = dict.fromkeys([*books.trajectories.dropped, *books.tokens.dropped])
    rows: list[list[Cell]] = [[place, *_amounts(view, place)] for place in PLACES]
    rows += [[f"dropped: {reason}", *_dropped(view, reason)] for reason in reasons]
    rows.append(["all", books.trajectories.total, books.tokens.total])
    state = "closed: everything is in exactly one place" if _is_closed(view) else "OPEN: this is a bug"
    live = [g for g in view.state.groups.values() if g.version and g.state != GroupState.LEASED]
    behind = histogram(bounds.staleness(view.turn, group) for group in live)
    lines = [state, *([f"groups in flight or buffered, by trainer steps behind: {behind}"] if behind else [])]
    return Answer(tables=[table("", "place trajectories tokens", rows)], lines=lines)


def _amounts(view: View, place: str) -> list[Cell]:
    books = view.state.ledger
    return [getattr(books.trajectories, place), getattr(books.tokens, place)]


def _dropped(view: View, reason: str) -> list[Cell]:
    def of(account: Account) -> int:
        return account.dropped.get(reason, 0)

    return [of(view.state.ledger.trajectories), of(view.state.ledger.tokens)]


def _is_closed(view: View) -> bool:
    books = view.state.ledger
    return ledger.is_closed(books.trajectories) and ledger.is_closed(books.tokens)


COMMANDS = (
    Command(
        name="status",
        part="Look",
        usage="status",
        summary="where the run is: step, trainer, groups, replicas, weights, what is held",
        function=show_status,
        examples=(("status", "a screen to begin with"),),
    ),
    Command(
        name="ledger",
        part="Look",
        usage="ledger",
        summary="where every drawn trajectory and every received token is now",
        function=show_ledger,
        examples=(("ledger", "the closed ledger, and why what was dropped was dropped"),),
    ),
)
