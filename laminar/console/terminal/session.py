"""One sitting: lines from a person or a script, answered by a target or by the console itself."""

import shlex
import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live

from laminar.console.answers import Answer
from laminar.console.commands import COMMANDS
from laminar.console.help import help_of
from laminar.console.language import Language, UsageError, split
from laminar.console.place import Place
from laminar.console.targets.base import Target
from laminar.console.terminal import render
from laminar.errors import LaminarError

WATCH_S = 1.0  # a look at a live run costs its controller a few milliseconds
WATCHED = ("Look", "Ask")


class Session:
    """Answers lines and shows what came of them."""

    def __init__(self, target: Target, output: Console, *, as_json: bool) -> None:
        self.target, self.language = target, Language(COMMANDS)
        self.place: Place | None = None
        self.names: dict[str, list[str]] = {}
        self.over = False
        self._output, self._as_json = output, as_json

    def run(self, lines: Iterable[str]) -> bool:
        """All of them, each shown before its answer, up to the first that fails. True if none did."""
        for line in lines:
            if not self._as_json:
                self._output.print(f"> {line}", style="bold")
            if not self.take(line):
                return False
            if self.over:
                break
        return True

    def open(self) -> None:
        """Say what is looked at, and where it is."""
        reply = self.target.look()
        self.place, self.names = reply.place, reply.names
        self._show("", reply.answer)
        self.take("status")
        self._output.print("`help` lists the commands; Tab completes, Ctrl-D leaves", style="dim")

    def take(self, line: str) -> bool:
        """Carry out one line and show the answer. False if it was refused, or nobody answered."""
        try:
            words = split(line)
            if not words:
                return True
            name = self._name(words[0])
            if name == "quit":
                self.over = True
                return True
            if name == "watch":
                return self._watch(self._watched(line))
            answer = help_of(self.language, self.target.kind, words[1:]) if name == "help" else self._ask(line)
        except LaminarError as error:
            answer = Answer(error=str(error))
        self._show(line, answer)
        return not answer.error

    def _name(self, word: str) -> str:
        """Of one of the console's own commands; anything else is the target's affair."""
        if word == "exit":
            return "quit"
        try:
            return self.language.find(word).name
        except LaminarError:
            return word

    def _ask(self, line: str) -> Answer:
        reply = self.target.ask(line)
        self.place, self.names = reply.place, reply.names
        return reply.answer

    def _show(self, line: str, answer: Answer) -> None:
        if self._as_json:
            self._output.file.write(render.as_json(line, answer, self.place) + "\n")
            self._output.file.flush()
        else:
            self._output.print(render.drawn(answer))

    def _watched(self, line: str) -> str:
        """What `watch …` repeats. Raises UsageError for what does more than look."""
        watch, words = self.language.understood(line)
        watch.require(self.target.kind)
        repeated = shlex.join(words)
        command, _ = self.language.understood(repeated)
        if command.part not in WATCHED:
            raise UsageError(f"`{command.name}` is not repeated: `watch` takes what only looks, such as `watch fleet`")
        return repeated

    def _watch(self, line: str) -> bool:
        """Repeat a command until Ctrl-C, or until it is refused."""
        answer = self._ask(line)
        if self._as_json or not self._output.is_terminal:
            return self._watch_plainly(line, answer)
        with Live(render.drawn(answer), console=self._output, auto_refresh=False, screen=True) as live:
            try:
                while not answer.error:
                    time.sleep(WATCH_S)
                    answer = self._ask(line)
                    live.update(render.drawn(answer), refresh=True)
            except KeyboardInterrupt:
                pass
        self._show(line, answer)
        return not answer.error

    def _watch_plainly(self, line: str, answer: Answer) -> bool:
        """For a file or a program: one answer after the other."""
        try:
            while not answer.error:
                self._show(line, answer)
                time.sleep(WATCH_S)
                answer = self._ask(line)
        except KeyboardInterrupt:
            return True
        self._show(line, answer)
        return False
