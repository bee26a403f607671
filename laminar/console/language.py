"""A line of the console: which command it is, whether its arguments can be meant, and carrying it out on a view.

    line ──► words ──► Command (its name, or a beginning of it that only it has) ──► function(view, words) ──► Answer
                                                                                             └─► Change ──► post ──► Answer

Invariants: whatever is typed is answered, never by a traceback; a command looks at the view only; what is to change becomes events,
which `post` hands to the core, or which are refused where nothing can be changed.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from laminar.console.answers import ROWS_MAX, Answer, Change
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
    option: str = ""
    """The one word that may be the argument; empty = its function says what is wrong with others."""
    takes: str = ""
    """What completes an argument: words, and in capitals what there is now (REPLICA, HELD …, `laminar.console.help`). A comma goes
    on to the next argument; the last part is for all that follow."""

    def require(self, target: Target) -> None:
        """Raises UsageError where it means nothing."""
        if target not in self.only:
            raise UsageError(f"`{self.name}` is not for {RUNS[target]}: {self.elsewhere}")


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
            command, words = self.understood(line)
            found = _called(command, view, words)
            return found if isinstance(found, Answer) else _changed(command, view, found, post)
        except LaminarError as error:
            return Answer(error=str(error))

    def understood(self, line: str) -> tuple[Command, list[str]]:
        """The command of a line, and its arguments. Raises UsageError."""
        words = split(line)
        if not words:
            raise UsageError("an empty line is no command; `help` lists all")
        command, arguments = self.find(words[0]), words[1:]
        fewest, most = command.arguments
        if not fewest <= len(arguments) <= most or (command.option and arguments not in ([], [command.option])):
            raise UsageError(f"usage: {command.usage}; `help {command.name}` has examples")
        return command, arguments


def split(line: str) -> list[str]:
    """The words of a line; quotes keep spaces. Raises UsageError for a quote that does not end."""
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{line!r}: {str(error).lower()}: a quote is not closed") from None


def num_rows(words: list[str], usual: int) -> int:
    """How many rows are asked for: a number, `all` that a table has, or as many as usual. Raises UsageError."""
    if not words:
        return usual
    if words[0] == "all":
        return ROWS_MAX
    if not words[0].isdecimal() or not 0 < int(words[0]) <= ROWS_MAX:
        raise UsageError(f"{words[0]!r}: a number of rows from 1 to {ROWS_MAX} is expected")
    return int(words[0])


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
    command.require(view.target)
    if command.function is None:  # a target without one of its own
        raise UsageError(f"`{command.name}` is not for {RUNS[view.target]}: {command.elsewhere}")
    return command.function(view, words)


def _changed(command: Command, view: View, change: Change, post: Post | None) -> Answer:
    if post is None:
        raise UsageError(f"`{command.name}` would change the run, and a recorded one is what it was; `help whatif`")
    require_going_on(view)
    numbers = [post(event) for event in change.events]
    events = ", ".join(map(str, numbers))
    return Answer(facts={"event": events} if numbers else {}, lines=[*change.lines, *_followed(view, numbers)])


def require_going_on(view: View) -> None:
    """Raises UsageError where nothing follows any more."""
    if view.state.finished:
        then = ": go back to a moment before its end" if view.target == "sim" else ""
        raise UsageError(f"the run is over ({view.state.finished}){then}")


def _followed(view: View, numbers: list[int]) -> list[str]:
    """What the core did at once because of these events, in its own words."""
    told = [row for row in view.core.story.latest(FOLLOWED_MAX) if row.cause in numbers]
    return [f"→ {row.text} ({' '.join(row.subjects[:2])})" if row.subjects else f"→ {row.text}" for row in told]
