"""Going forward and back in a run that is not live: `step`, `run`, `continue`, `back`, `goto`.

Track (a simulated world, a recording) ──advance──► the next event ──► reached? held? interrupted? ──► Answer
"""

import math
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from laminar.console.answers import Answer
from laminar.console.commands import held, steps, stories
from laminar.console.language import Function, UsageError
from laminar.console.view import Target, View
from laminar.core.engine import Core

STANDSTILL_S = 600.0  # longer than a train step of a simulated run, which moves nothing before its end
FORECAST_S = 600.0  # of a what-if, if nothing is said: a few train steps of the presets
ROWS = 8  # of what happened on the way


class Track(Protocol):
    """A run that can be gone along."""

    @property
    def core(self) -> Core:
        """As of the last event."""

    @property
    def began(self) -> float:
        """Run time of the first event, seconds."""

    @property
    def now(self) -> float:
        """Run time of this moment, seconds."""

    def advance(self) -> bool:
        """To the next event, or the next few if one moment brings several. False if there is none."""

    @property
    def end(self) -> str:
        """Why there is no next event, in a sentence."""

    def rewind(self, seq: int) -> None:
        """To the last moment at or before event `seq`."""

    def release(self) -> None:
        """Apply what is held, so that the run can go on. A recorded run holds what it held."""


@dataclass(frozen=True, kw_only=True)
class Until:
    """Where to stop."""

    seq: float = math.inf
    at: float = math.inf
    step: float = math.inf

    def is_reached(self, core: Core, now: float) -> bool:
        """Whether it is there, or past it."""
        return core.state.seq >= self.seq or now >= self.at or core.state.trainer.step >= self.step


class Standstill:
    """Finds out that a run which is held gets nowhere: its timers would go on for ever."""

    def __init__(self, track: Track) -> None:
        self._seen, self._since = self._moved(track), track.now

    @staticmethod
    def _moved(track: Track) -> tuple[int, int]:
        state = track.core.state
        return state.ledger.tokens.total, state.trainer.step

    def why(self, track: Track) -> str:
        """Empty = it may get somewhere."""
        held = track.core.state.holds or track.core.state.held
        if not held or self._moved(track) != self._seen:
            self._seen, self._since = self._moved(track), track.now
        elif track.now - self._since > STANDSTILL_S:
            return f"nothing has moved for {STANDSTILL_S:g} s of the run, because of what is held"
        return ""


class Stepper:
    """The commands that go along a track."""

    def __init__(self, track: Track, target: Target) -> None:
        self._track, self._target = track, target
        self._interrupted = False

    def functions(self) -> Mapping[str, Function]:
        """By the names of the commands."""
        return {
            "step": self.step,
            "run": self.run,
            "continue": self.go_on,
            "back": self.back,
            "goto": self.goto,
        }

    def step(self, view: View, words: list[str]) -> Answer:
        """`step [N]`: to the next event, N times."""
        seq = view.state.seq
        return self._forward(Until(seq=seq + (_whole(words[0], "events") if words else 1)))

    def run(self, view: View, words: list[str]) -> Answer:
        """`run [until … | for …]`: on, until there, or something is held, or the end."""
        return self._forward(_until(view, words))

    def go_on(self, view: View, words: list[str]) -> Answer:
        """`continue [until … | for …]`: apply what is held, then run."""
        _until(view, words)  # refused before anything is let go
        before = view.state.seq
        self._track.release()
        return self._forward(_until(view, words), before=before)

    def back(self, view: View, words: list[str]) -> Answer:
        """`back [N]`: to N events before."""
        return self._back(view.state.seq - (_whole(words[0], "events") if words else 1))

    def goto(self, view: View, words: list[str]) -> Answer:
        """`goto event N | time S | step N | end`: there, forward or back, whatever is held on the way."""
        until = Until() if words == ["end"] else _place(view, words)
        if until.is_reached(view.core, view.now):
            self._track.rewind(int(until.seq) if until.seq < math.inf else 0)
        return self._forward(until, stops=False)

    def _back(self, seq: int) -> Answer:
        if seq < 1:
            raise UsageError(f"this is event {self._track.core.state.seq}: there are not so many before it")
        self._track.rewind(seq)
        return self._arrived(self._track.core.state.seq, "")

    def _forward(self, until: Until, *, stops: bool = True, before: int | None = None) -> Answer:
        """`stops`: where a decision is held; `before`: the event since which to say what happened."""
        before = self._track.core.state.seq if before is None else before
        waiting, why = dict.fromkeys(self._track.core.state.held), ""
        standstill = Standstill(self._track)
        with self._interruptible():
            while not why and not until.is_reached(self._track.core, self._track.now):
                if not self._track.advance():
                    why = self._track.end
                elif stops and any(number not in waiting for number in self._track.core.state.held):
                    why = "a decision is held: `held` shows it, `continue` applies it and goes on"
                elif self._interrupted:
                    why = "interrupted"
                elif until.at == math.inf:
                    why = standstill.why(self._track)
        return self._arrived(before, why)

    def _arrived(self, before: int, why: str) -> Answer:
        core = self._track.core
        view = View(core, target=self._target, now=self._track.now, began=self._track.began)
        told = [row for row in core.story.rows() if row.cause > before]
        lines = [*([why] if why else []), *held.lines(view)]
        facts = {"events": core.state.seq, "new_events": core.state.seq - before, "time_s": view.run_s(view.now),
                 "step": core.state.trainer.step}  # fmt: skip
        tables = [stories.rows(view, told, rows_max=ROWS, title="what happened", note="`timeline`")] if told else []
        return Answer(facts=dict(facts), tables=tables, lines=lines)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C ends the way at the next event, not in the midst of one."""
        self._interrupted = False

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = True

        try:
            before = signal.signal(signal.SIGINT, interrupt)
        except ValueError:  # not in the main thread: whoever runs us there interrupts in another way
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _whole(word: str, what: str) -> int:
    if not word.isdecimal() or not int(word):
        raise UsageError(f"{word!r}: a number of {what} is expected, 1 or more")
    return int(word)


def _seconds(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{word!r}: seconds are expected, 0 or more")
    return value


def _until(view: View, words: list[str]) -> Until:
    """Raises UsageError."""
    match words:
        case []:
            return Until()
        case ["until", *rest]:
            return _place(view, rest)
        case ["for", number, "events"]:
            return Until(seq=view.state.seq + _whole(number, "events"))
        case ["for", number, "steps" | "step"]:
            return Until(step=view.state.trainer.step + _whole(number, "steps"))
        case ["for", number] | ["for", number, "seconds" | "s"]:
            return Until(at=view.now + _seconds(number))
    raise UsageError(f"{' '.join(words)!r} is no place to stop; write {steps.UNTIL}")


def split_off_until(view: View, words: list[str]) -> tuple[str, Until]:
    """`COMMAND … [for …]`: the command as a line, and where to stop; without a word on that in `FORECAST_S`. Raises UsageError."""
    if "for" not in words:
        return shlex.join(words), Until(at=view.now + FORECAST_S)
    place = len(words) - 1 - words[::-1].index("for")
    return shlex.join(words[:place]), _until(view, words[place:])


def _place(view: View, words: list[str]) -> Until:
    """`event N`, `time S` (of the run), `step N`. Raises UsageError."""
    match words:
        case ["event" | "seq", number]:
            return Until(seq=_whole(number, "events"))
        case ["step", number]:
            return Until(step=_whole(number, "steps"))
        case ["time", seconds]:
            return Until(at=view.began + _seconds(seconds))
    raise UsageError(f"{' '.join(words)!r} is no place; write event N, step N, or time S (seconds of the run)")
