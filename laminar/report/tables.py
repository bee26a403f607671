"""Tables that are no figures: the ledger, and the configuration beside its defaults."""

import tomllib
from typing import Any

import msgspec

from laminar import configfile
from laminar.config import Config
from laminar.core.ledger import is_closed
from laminar.report.facts import Facts
from laminar.report.markup import Child, Html, element, joined, table

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


def configuration(facts: Facts) -> Html:
    """Keys that differ from their defaults first, then all; the hosts."""
    hosts = element("details", element("summary", "hosts.txt"), element("pre", facts.hosts)) if facts.hosts else None
    if facts.config is None:
        return joined(
            element("p", f"config.toml beside run.db cannot be read: {facts.config_note}", class_="muted"), hosts
        )
    given, default = _flat(configfile.dumps(facts.config)), _flat(configfile.dumps(Config()))
    changed: list[list[Child]] = [
        [element("code", key), element("code", value), element("code", default.get(key, ""))]
        for key, value in given.items()
        if value != default.get(key)
    ]
    everything: list[list[Child]] = [[element("code", key), element("code", value)] for key, value in given.items()]
    return joined(
        table(["key", "value", "default"], changed, 9),
        element("details", element("summary", "All keys"), table(["key", "value"], everything, 9)),
        hosts,
    )


def _flat(toml: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, part in tomllib.loads(toml).items():
        values: dict[str, Any] = part
        found |= {f"{name}.{key}": msgspec.json.encode(value).decode() for key, value in values.items()}
    return found
