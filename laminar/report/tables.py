"""Sections of the report that are tables: the ledger, faults, the slowest trajectories, the configuration."""

from collections import Counter
from collections.abc import Iterable, Sequence

from laminar import configfile
from laminar.core.ledger import is_closed
from laminar.core.records import State
from laminar.ids import format_id
from laminar.report import charts
from laminar.report.facts import ALARMS_SHOWN, Facts
from laminar.report.markup import Child, Html, element, joined, table
from laminar.report.words import date

PLACES = ("in_flight", "buffered", "leased", "committed")


def ledger(facts: Facts) -> Html:
    """Where every trajectory and every token is, and why what was dropped was."""
    if facts.state is None:
        return element("p", facts.note, class_="muted")
    accounts = [facts.state.ledger.trajectories, facts.state.ledger.tokens]
    rows: list[list[Child]] = [["drawn / received", *(f"{account.total:,}" for account in accounts)]]
    rows += [[place.replace("_", " "), *(f"{getattr(account, place):,}" for account in accounts)] for place in PLACES]
    reasons = sorted({reason for account in accounts for reason in account.dropped})
    rows += [
        [f"dropped: {reason}", *(f"{account.dropped.get(reason, 0):,}" for account in accounts)] for reason in reasons
    ]
    closed = [is_closed(account) for account in accounts]
    verdicts = [
        element("span", "closed" if good else "NOT CLOSED", class_="good" if good else "bad") for good in closed
    ]
    rows.append(["the parts add up", *verdicts])
    return joined(table(["", "trajectories", "response tokens"], rows))


def faults(facts: Facts) -> Html:
    """Controllers, losses, alarms."""
    rows: list[list[Child]] = [
        [
            b.number,
            date(b.started),
            f"{b.host}, pid {b.pid}",
            b.resumed_step or "–",
            b.outcome or ("ended without a word, or goes on" if b is facts.boots[-1] else "ended without a word"),
        ]
        for b in facts.boots
    ]
    found = [element("h3", "Controller processes"), table(["boot", "began", "where", "from step", "ended"], rows, 9)]
    if facts.state is not None:
        found.append(element("p", _failovers(facts.state)))
    counts = Counter(name for _, name, _ in facts.alarms)
    if not counts:
        return joined(*found, element("p", "No alarm was raised."))
    found += [element("h3", "Alarms"), table(["alarm", "times"], [[name, num] for name, num in counts.most_common()])]
    shown = facts.alarms[-ALARMS_SHOWN:]
    times: list[list[Child]] = [[f"{at - facts.began:,.1f} s", name, element("pre", text)] for at, name, text in shown]
    told = "Each of them" if len(shown) == len(facts.alarms) else f"The last {len(shown)} of {len(facts.alarms)}"
    return joined(
        *found, element("details", element("summary", told), table(["after", "alarm", "text"], times, 9), open="")
    )


def _failovers(state: State) -> str:
    counts, repack = state.num_failovers, state.repack
    lost = counts.same_version + counts.relay + counts.checkpoint + counts.restarted
    return (
        f"{len(state.branches)} restores of the trainer. {lost} trajectories whose replica was lost: "
        f"{counts.same_version} went on with another replica of their version, {counts.relay} with a pull of it, "
        f"{counts.checkpoint} from a checkpoint, {counts.restarted} from the beginning. Repack: {repack.num_moves} moves in "
        f"{repack.num_checks} checks, {repack.num_released} replicas emptied."
    )


def slowest(facts: Facts) -> Html:
    """From draw to reward, in phases."""
    if not facts.slowest:
        return element("p", "no trajectory has its reward yet", class_="muted")
    longest = facts.slowest[0].rewarded - facts.slowest[0].queued
    rows: list[list[Child]] = []
    for t in facts.slowest:
        first, finished = t.first_token or t.queued, t.finished or t.rewarded
        phases = [("waits", first - t.queued), ("generates", finished - first), ("is rewarded", t.rewarded - finished)]
        bar = charts.parts(phases, longest)
        ended = f"dropped: {t.dropped}" if t.dropped else t.finish_reason
        reward = "–" if t.reward is None else f"{t.reward:.3f}"
        rows.append(
            [f"t{format_id(t.id)}", bar, f"{t.rewarded - t.queued:,.2f}", t.num_tokens, t.num_prompt_tokens, t.attempt,
             t.version or "–", reward, ended, t.prompt]
        )  # fmt: skip
    head = ["trajectory", "waits, generates, is rewarded", "seconds", "tokens", "of prompt", "attempts", "version"]
    head += ["reward", "ended", "prompt"]
    reasons = ", ".join(f"{num:,} {name}" for name, num in facts.finish_reasons)
    return joined(
        element("p", f"From the draw to the reward. All trajectories by how they ended: {reasons}.", class_="muted"),
        table(head, rows, 2),
        without_gone(facts),
    )


def without_gone(facts: Facts) -> Html | None:
    """How many trajectories are not counted, because their records have left the log."""
    if not facts.num_gone:
        return None
    text = f"Without {facts.num_gone:,} older trajectories, whose records have left the log (log.max_mib)."
    return element("p", text, class_="muted")


def configuration(facts: Facts) -> Html:
    """Keys that differ from their defaults first, then all; the hosts."""
    hosts = element("details", element("summary", "hosts.txt"), element("pre", facts.hosts)) if facts.hosts else None
    if facts.config is None:
        return joined(
            element("p", f"config.toml beside run.db cannot be read: {facts.config_note}", class_="muted"), hosts
        )
    changed = _codes(configfile.changed(facts.config))
    everything = _codes(configfile.flat(facts.config).items())
    return joined(
        table(["key", "value", "default"], changed, 9),
        element("details", element("summary", "All keys"), table(["key", "value"], everything, 9)),
        hosts,
    )


def _codes(rows: Iterable[Sequence[str]]) -> list[list[Child]]:
    return [[element("code", text) for text in row] for row in rows]
