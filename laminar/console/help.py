"""`help`, and what can be typed next: from the table of commands alone."""

from collections.abc import Mapping, Sequence

from laminar.console.answers import Answer, Cell, Table, table
from laminar.console.commands.change import KEYS, OF_REPLICAS
from laminar.console.commands.held import PASSES
from laminar.console.language import RUNS, Command, Language, UsageError
from laminar.console.view import Target

PARTS = ("Look", "Ask", "Step", "Change", "Try", "Console")
NAMES = "r3 is rollout-3; g7, t42: group, trajectory; v12, s12: version, train step; a command may be shortened: `ver`"


def help_of(language: Language, target: Target, words: Sequence[str]) -> Answer:
    """All commands, or one with its examples. Raises UsageError for one that there is not."""
    if words:
        return _of_one(language.find(words[0]), target)
    parts: dict[str, list[list[Cell]]] = {part: [] for part in PARTS}
    for command in language.commands.values():
        if target in command.only:
            parts[command.part].append([command.usage.split(" [until")[0], command.summary])
    tables = [table(part, "command what_it_does", rows) for part, rows in parts.items() if rows]
    return Answer(tables=tables, lines=[NAMES, "`help COMMAND` has examples; `;` separates commands in -c"])


def _of_one(command: Command, target: Target) -> Answer:
    lines = [command.summary, *([command.details] if command.details else [])]
    if target not in command.only:
        lines.append(f"not for {RUNS[target]}: {command.elsewhere}")
    examples: list[list[Cell]] = [[line, what] for line, what in command.examples]
    tables: list[Table] = [table("", "example what_it_does", examples)] if examples else []
    return Answer(facts={"usage": command.usage}, tables=tables, lines=lines)


def completions(
    language: Language, target: Target, before: str, names: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """What the last word of the line before the cursor could become: (word, what it is)."""
    words = before.split()
    last = words.pop() if words and not before.endswith(" ") else ""
    if not words:
        found = [(c.name, c.summary) for c in language.commands.values() if target in c.only]
        return [(name, what) for name, what in found if name.startswith(last)]
    try:
        command = language.find(words[0])
    except UsageError:
        return []
    known = {
        "pass": PASSES,
        "setting": [f"{key}=" for key in (*KEYS, *OF_REPLICAS)],
        "command": list(language.commands),
        **names,
    }
    return [(word, "") for word in _arguments(command, len(words) - 1, known) if word.startswith(last)]


def _arguments(command: Command, place: int, known: Mapping[str, Sequence[str]]) -> list[str]:
    """What `Command.takes` says of the argument at `place`."""
    parts = (command.option or command.takes).split(", ")
    words = parts[min(place, len(parts) - 1)].split()
    return [each for word in words for each in (known.get(word.lower(), []) if word.isupper() else [word])]
