"""Which faults are to strike, when and where: from a file, or drawn from a seed.

[[fault]]
kind = "kill_rollout"       # laminar/chaos/kinds.py has all kinds
at = "30s"                  # after the first train step
target = "rollout-1"        # left out: drawn from the seed
for = "5s"                  # for kinds that last; left out: drawn from the seed
"""

import difflib
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from laminar.chaos.kinds import KINDS, Kind
from laminar.chaos.roster import Roster
from laminar.config import Config
from laminar.errors import ConfigError

FAULTS_MAX = 10_000  # more than one every second for hours is a slip of the hand
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smh]?)")
_KEYS = ("kind", "at", "target", "for")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that is to strike."""

    number: int
    kind: str
    target: str
    at_s: float | None = None
    """After the first train step; None = `gap_s` after the run has recovered from the one before."""
    gap_s: float = 0.0
    for_s: float = 0.0
    """How long it lasts; 0 = it is over at once."""


def seconds(text: str | int | float, what: str) -> float:
    """`90`, `"90s"`, `"1.5m"`, `"2h"`. Raises ConfigError naming `what`."""
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < 1e9:
        return float(text)
    found = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise ConfigError(f'{what} = {text!r}: expected a duration such as 30, "30s", "1.5m" or "2h"')
    return float(found[1]) * _UNITS_S[found[2]]


def read(path: Path, roster: Roster, config: Config, seed: int) -> list[Fault]:
    """The faults of a file, in order of time. Raises ConfigError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the plan: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    if unknown := [key for key in document if key != "fault"]:
        raise ConfigError(
            f"{path}: {unknown[0]!r} is no key of a plan: expected [[fault]]{_near(unknown[0], ['fault'])}"
        )
    tables = document.get("fault", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: expected at least one [[fault]] with kind and at")
    if len(tables) > FAULTS_MAX:
        raise ConfigError(f"{path}: {len(tables)} faults; at most {FAULTS_MAX} are taken")
    rolls = random.Random(seed)
    faults = [
        _fault(table, f"{path}: fault {at}", at, roster, config, rolls) for at, table in enumerate(tables, start=1)
    ]
    return sorted(faults, key=lambda fault: fault.at_s or 0.0)


def _fault(
    table: dict[str, Any], where: str, number: int, roster: Roster, config: Config, rolls: random.Random
) -> Fault:
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{where}: {key!r} is no key of a fault: expected {', '.join(_KEYS)}{_near(key, _KEYS)}")
    for key in ("kind", "at"):
        if key not in table:
            raise ConfigError(f"{where}: {key} is missing")
    kind = kind_named(table["kind"], where)
    target = table["target"] if "target" in table else _drawn_target(kind, roster, rolls, where)
    if target not in kind.targets(roster):
        raise ConfigError(
            f"{where}: {kind.name} cannot strike {target!r}: expected one of {', '.join(kind.targets(roster)) or 'none'}"
            f"{_near(str(target), kind.targets(roster))}"
        )
    if "for" in table and not kind.lasts:
        raise ConfigError(f"{where}: {kind.name} is over at once; leave `for` away")
    for_s = seconds(table["for"], f"{where}: for") if "for" in table else kind.draw_duration_s(config, rolls)
    return Fault(number=number, kind=kind.name, target=target, at_s=seconds(table["at"], f"{where}: at"), for_s=for_s)


def kind_named(name: object, where: str) -> Kind:
    """Raises ConfigError with the nearest name."""
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    raise ConfigError(
        f"{where}: there is no kind {name!r}; there are {', '.join(KINDS)}{_near(str(name), list(KINDS))}"
    )


def _drawn_target(kind: Kind, roster: Roster, rolls: random.Random, where: str) -> str:
    targets = kind.targets(roster)
    if not targets:
        raise ConfigError(f"{where}: {kind.name} has nothing to strike in this cluster ({kind.strikes})")
    return rolls.choice(targets)


def draw(seed: int, kinds: Sequence[Kind], roster: Roster, config: Config, gap_s: float) -> Iterator[Fault]:
    """Faults without end, the same for the same arguments, each once the run has recovered from the one before.

    Kinds are dealt from a shuffled deck that has each as often as its weight says, so that all come up soon.
    """
    rolls = random.Random(seed)
    deck: list[Kind] = []
    for number in range(1, FAULTS_MAX):
        if not deck:
            deck = [kind for kind in kinds for _ in range(kind.weight)]
            rolls.shuffle(deck)
        kind = deck.pop()
        yield Fault(
            number=number,
            kind=kind.name,
            target=rolls.choice(kind.targets(roster)),
            gap_s=rolls.uniform(0.5, 1.5) * gap_s,
            for_s=kind.draw_duration_s(config, rolls),
        )


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else ""
