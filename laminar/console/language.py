"""A line of the console: which command it is, whether its arguments can be meant, and carrying it out on a view.

    line ──► words ──► Command (its name, or a beginning of it that only it has) ──► function(view, words) ──► Answer
                                                                                             └─► Change ──► post ──► Answer

Invariants: whatever is typed is answered, never by a traceback; a command looks at the view only; what is to change becomes events,
which `post` hands to the core, or which are refused where nothing can be changed.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from laminar.console.answers import Answer, Change
from laminar.console.subjects import listed, nearest
from laminar.console.view import Target, View
from laminar.core.events import AnyEvent
from laminar.errors import ConfigError, LaminarError

TARGETS: tuple[Target, ...] = ("live", "sim", "log")
FOLLOWED_MAX = 12  # rows of what a change led to; `timeline` has all
RUNS: dict[Target, str] = {"live": "a live run", "sim": "a simulated run", "log": "a recorded run"}
Function = Callable[[View, list[str]], Answer | Change]
Post = Callable[[AnyEvent], int]
"""Hands an event to the core, now; its sequence number."""


class UsageError(ConfigError):
    """The arguments of a command cannot be meant."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the language, with its documentation."""

    name: str
    part: str
    """Of the help: Look, Ask, Step, Change, Try."""
    usage: str
    """`replica NAME`: capitals are what to put in, brackets may be left away."""
    summary: str
    """One line."""
    function: Function | None = None
    """None = each target has its own, if it has one."""
    examples: tuple[tuple[str, str], ...] = ()
    """(line, what it does)."""
    details: str = ""
    only: tuple[Target, ...] = TARGETS
    """Where it means something."""
    elsewhere: str = ""
    """What to do in its place where it does not."""
    arguments: tuple[int, int] = (0, 0)
    """Fewest and most words after the name."""
    takes: str = ""
    """What completes an argument: replica, group, subject, pass, held, setting, command; or words to choose from."""


class Language:
    """Commands by name. Those of a target of its own kind come with `functions`."""

    def __init__(self, commands: Iterable[Command], functions: Mapping[str, Function] | None = None) -> None:
        own = functions or {}
        self.commands = {c.name: replace(c, function=own.get(c.name, c.function)) for c in commands}

    def find(self, word: str) -> Command:
        """By name, or a beginning that only one has. Raises UsageError."""
        if word in self.commands:
            return self.commands[word]
        begin = [name for name in self.commands if name.startswith(word)]
        if len(begin) == 1:
            return self.commands[begin[0]]
        if begin:
            raise UsageError(f"{word!r} may be {listed(begin)}: write more of it")
        raise UsageError(f"there is no command {word!r}{nearest(word, self.commands)}; `help` lists all")

    def answer(self, view: View, line: str, post: Post | None) -> Answer:
        """Carry a line out. `post`: None = nothing can be changed here."""
        try:
            command, words = self._understood(line)
            found = _called(command, view, words)
            return found if isinstance(found, Answer) else _changed(command, view, found, post)
        except LaminarError as error:
            return Answer(error=str(error))

    def _understood(self, line: str) -> tuple[Command, list[str]]:
        words = split(line)
        if not words:
            raise UsageError("an empty line is no command; `help` lists all")
        command, arguments = self.find(words[0]), words[1:]
        fewest, most = command.arguments
        if not fewest <= len(arguments) <= most:
            raise UsageError(f"usage: {command.usage}; `help {command.name}` has examples")
        return command, arguments


def split(line: str) -> list[str]:
    """The words of a line; quotes keep spaces. Raises UsageError for a quote that does not end."""
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{line!r}: {str(error).lower()}: a quote is not closed") from None


def commands_of(text: str) -> list[str]:
    """The lines of `command; command`. A semicolon in quotes is part of its command."""
    lexer = shlex.shlex(text, posix=False, punctuation_chars=";")
    lexer.whitespace_split, lexer.commenters = True, ""
    lines: list[list[str]] = [[]]
    try:
        for token in lexer:
            if set(token) == {";"}:
                lines.append([])
            else:
                lines[-1].append(token)
    except ValueError as error:
        raise UsageError(f"{text!r}: {str(error).lower()}: a quote is not closed") from None
    return [" ".join(words) for words in lines if words]


def _called(command: Command, view: View, words: list[str]) -> Answer | Change:
    if view.target not in command.only or command.function is None:
        raise UsageError(f"`{command.name}` is not for {RUNS[view.target]}: {command.elsewhere}")
    return command.function(view, words)


def _changed(command: Command, view: View, change: Change, post: Post | None) -> Answer:
    if post is None:
        raise UsageError(f"`{command.name}` would change the run, and a recorded one is what it was; `help whatif`")
    numbers = [post(event) for event in change.events]
    events = ", ".join(map(str, numbers))
    return Answer(facts={"event": events} if numbers else {}, lines=[*change.lines, *_followed(view, numbers)])


def _followed(view: View, numbers: list[int]) -> list[str]:
    """What the core did at once because of these events, in its own words."""
    told = [row for row in view.core.story.latest(FOLLOWED_MAX) if row.cause in numbers]
    return [f"→ {row.text} ({' '.join(row.subjects[:2])})" if row.subjects else f"→ {row.text}" for row in told]
