"""Ask why: answers of the core's own predicates (`laminar.core.explain`, `preview`, `waits`), laid out as tables."""

from laminar.console import subjects
from laminar.console.answers import Answer, Cell, Table, table
from laminar.console.commands import held
from laminar.console.language import Command
from laminar.console.subjects import UnknownSubject
from laminar.console.view import View
from laminar.core import explain, holds, preview, waits
from laminar.core.decisions import in_words
from laminar.core.operator_records import HeldDecision
from laminar.core.waits import Wait

WAITS_SHOWN = 100  # in a large fleet most replicas wait for the same


def why(view: View, words: list[str]) -> Answer:
    """Why a subject is as it is."""
    try:
        found = explain.why(view.turn, _subject(view, words))
    except LookupError as error:
        raise UnknownSubject(str(error).strip("'\"")) from None
    rows: list[list[Cell]] = [[line.topic, line.yes, line.text] for line in found.lines]
    return Answer(headline=found.text, tables=[table("", "about is_so why", rows)] if rows else [])


def _subject(view: View, words: list[str]) -> str:
    """As `explain` takes it. Raises UnknownSubject."""
    text = " ".join(words)
    if text in (waits.TRAINER, waits.NEW_GROUPS):
        return text
    if len(words) > 1:
        raise UnknownSubject(f"{text!r} is more than one subject: `why r3`, `why g7`, `why new groups`")
    return subjects.told_of(view, text)[0]


def why_stalled(view: View, words: list[str]) -> Answer:
    """Who waits for whom, and what ends each wait."""
    found = waits.waits(view.turn)
    stall = view.state.stall
    headline = "something useful happens, or nothing has to; this is who waits for what"
    if stall.told:
        headline = f"nothing useful has happened for {view.now - stall.since:.0f} s; this is who waits for what"
    rings = [f"these wait for one another, in a ring: {' → '.join([*ring, ring[0]])}" for ring in waits.cycles(found)]
    more = ["`python -m laminar.controller --why-stalled` also asks every worker what it is doing"]
    lines = [*rings, *(more if view.target == "live" else [])]
    return Answer(headline=headline, tables=[_waits(view, found)] if found else [], lines=lines)


def _waits(view: View, found: list[Wait]) -> Table:
    rows: list[list[Cell]] = [
        [wait.who, wait.what, ", ".join(wait.on), view.since_s(wait.since), _left_s(view, wait.deadline), wait.ends]
        for wait in found
    ]
    return table("", "who waits_for which_is for_s given_up_in_s ended_by", rows, rows_max=WAITS_SHOWN)


def _left_s(view: View, deadline: float) -> float | None:
    return max(0.0, deadline - view.now) if deadline else None


def ahead(view: View, words: list[str]) -> Answer:
    """What the core waits for now: its timers in order, and who must say something."""
    found = preview.ahead(view.turn)
    timers: list[list[Cell]] = [
        [max(0.0, timer.at - view.now), view.run_s(timer.at), timer.what, timer.who] for timer in found.timers
    ]
    tables = [table("timers", "in_s at_s what who", timers, rows_max=WAITS_SHOWN)] if timers else []
    tables += [_waits(view, found.waits)] if found.waits else []
    lines = held.lines(view) or ([] if tables else [f"nothing: the run is over ({view.state.finished})"])
    return Answer(tables=tables, lines=lines)


# ---- the repack of now -------------------------------------------------------------------------------------


def plan(view: View, words: list[str]) -> Answer:
    """The repack that is held, as its check saw things; else what a check would decide now, candidate by candidate."""
    waiting = holds.shown(view.state, "repack")
    if waiting is not None and words != ["now"]:
        return _held_plan(view, waiting)
    found = preview.plan(view.turn)
    moves = [
        f"{choice.move.source} → {choice.move.destination} ({choice.move.num_requests})" for choice in found.choices
    ]
    what = f"a check now would move: {', '.join(moves)}" if moves else "a check now would move nothing"
    headline = f"{what}; but {found.why_none}" if found.why_none else what
    facts: dict[str, Cell] = {
        "policy": found.policy,
        "last_check_s": view.since_s(found.checked_at),
        "next_check_in_s": _left_s(view, found.next_at),
    }
    tables = [_candidates(found), *_others(found)]
    return Answer(headline=headline, facts=facts, tables=tables, lines=held.lines(view))


def _held_plan(view: View, waiting: HeldDecision) -> Answer:
    """Every replica with the reason that the check gave, and the moves, as they have been edited since."""
    record = view.state.repack
    rows: list[list[Cell]] = [
        [r.id, str(r.version or "–"), r.num_generating, r.kv_tokens, record.moved_reasons.get(r.id, "it was not there")]
        for r in view.state.replicas.values()
    ]
    facts: dict[str, Cell] = {"policy": view.settings.repack_policy, "held_s": view.since_s(waiting.held_at)}
    tables = [
        table("the replicas now, and what the check said of them", "replica version requests kv_tokens why", rows),
        held.detail(view, waiting.decision),
    ]
    lines = [held.then(waiting.id), "`plan now`: what a check would decide now"]
    if record.moved_at > waiting.held_at:
        lines.insert(0, "a later check has planned moves too; the reasons are of that one")
    headline = f"decision {waiting.id} is held: {in_words(waiting.decision)}"
    return Answer(headline=headline, facts=facts, tables=tables, lines=lines)


def _candidates(found: preview.Preview) -> Table:
    rows: list[list[Cell]] = []
    for each in found.candidates:
        load = each.load
        rows.append(
            [
                each.worker,
                str(each.version or "–"),
                each.role,
                load.num_requests if load else None,
                load.requests_max if load else None,
                load.kv_used if load else None,
                load.kv_previous if load else None,
                load.kv_max if load else None,
                each.kv_after if load else None,
                each.reason,
            ]
        )
    columns = "replica version role requests B kv_tokens tokens_before tokens_max tokens_after why"
    return table("candidates", columns, rows)


def _others(found: preview.Preview) -> list[Table]:
    """For each move, where else the source could have gone."""
    rows: list[list[Cell]] = []
    for choice in found.choices:
        move = choice.move
        rows.append([move.source, move.destination, move.kv_after, move.requests_after, True, move.reason])
        for other in choice.others:
            why_not = other.why_not or "it has room, and would be left less full"
            rows.append([move.source, other.worker, other.kv_after, other.requests_after, False, why_not])
    columns = "source destination tokens_after requests_after chosen why"
    return [table("destinations", columns, rows)] if rows else []


COMMANDS = (
    Command(
        name="why",
        part="Ask",
        usage="why SUBJECT",
        summary="why a replica drains or is idle, a group is not sampled, a version not readable …",
        function=why,
        arguments=(1, 2),
        takes="SUBJECT trainer new",
        examples=(
            (
                "why r3",
                "what rollout-3 does; whether it gets groups, drains, pulls, is a source or a destination of a repack",
            ),
            ("why g7", "why the group has not been sampled yet"),
            ("why t42", "what the trajectory waits for"),
            ("why v12", "who can pull the version, who holds it, who still needs it"),
            ("why trainer", "what the trainer works on or waits for"),
            ("why new groups", "what keeps each replica from beginning one"),
            ("why relay-0", "its place in the chain"),
        ),
        details="The sentences are made of the predicates that the core itself decides by.",
    ),
    Command(
        name="why-stalled",
        part="Ask",
        usage="why-stalled",
        summary="who waits for whom, since when, and what ends each wait",
        function=why_stalled,
        examples=(("why-stalled", "rings of waits first: only a deadline or a person ends them"),),
    ),
    Command(
        name="plan",
        part="Ask",
        usage="plan [now]",
        summary="the repack that is held, or what one would do now, candidate by candidate",
        function=plan,
        arguments=(0, 1),
        option="now",
        examples=(
            ("plan", "KV use now and at the last check, B, roles, and each destination that was not chosen"),
            ("plan now", "the same while a repack is held"),
        ),
        details="`B` is the largest decode batch that is still memory-bound; `tokens before` the KV use at the last check: a "
        "replica whose use still grows is no candidate; `tokens max` is C_max.",
    ),
    Command(
        name="next",
        part="Ask",
        usage="next",
        summary="what the core waits for: its timers in order, and who must say something",
        function=ahead,
        examples=(("next", "the first row is what happens if nothing else does"),),
    ),
)
