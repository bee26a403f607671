"""What would have become of a recorded run under other settings (`laminar.replay.whatif`), as an answer of the console."""

from laminar.console.answers import Answer, Cell, table
from laminar.console.language import UsageError
from laminar.errors import ConfigError
from laminar.replay import changes
from laminar.replay.recording import Life, Recording
from laminar.replay.whatif import whatif

DIGITS = 4  # significant ones: more than the simulation is good for


def answer(recording: Recording, words: list[str], life: Life | None = None) -> Answer:
    """`whatif set KEY=VALUE …`: a life of the run (the last by default) as it was, simulated again as it was, and changed. Raises
    LaminarError."""
    if words[0] != "set" or "for" in words:
        raise UsageError("of a recorded run the whole is simulated again: write `whatif set KEY=VALUE …`")
    try:
        found = whatif(recording, changes.parse(words[1:]), life)
    except ConfigError as error:
        raise UsageError(str(error).replace("--whatif ", "whatif set ")) from error
    real, again, changed = found.real._asdict(), found.again._asdict(), found.changed._asdict()
    rows: list[list[Cell]] = [
        [name, _rounded(real[name]), _rounded(again[name]), _rounded(changed[name]), _ratio(again[name], changed[name])]
        for name in real
    ]
    headline = f"if the run had begun with {' '.join(words[1:])}: simulated again with the rates of this run"
    lines = ["`again` is the run as it was, simulated: how far it is from `recorded` says how far to trust `changed`"]
    return Answer(
        headline=headline,
        tables=[table("", "measure recorded again changed ratio", rows)],
        lines=[*lines, *found.notes],
    )


def _rounded(value: float) -> Cell:
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def _ratio(again: float, changed: float) -> Cell:
    return float(f"{changed / again:.{DIGITS}g}") if again else None
