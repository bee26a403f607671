"""A recorded run, stepped through event by event (`--log RUN`): what its core knew and decided, at any moment. It is not changed.

The run may be going on: what is logged meanwhile can be stepped through too.
"""

from collections.abc import Mapping
from pathlib import Path

from laminar.console.answers import Answer, Cell
from laminar.console.commands import COMMANDS
from laminar.console.language import Function, Language
from laminar.console.place import Reply, reply
from laminar.console.stepping import Stepper, Until
from laminar.console.targets import compare, futures
from laminar.console.targets.futures import WorldTrack
from laminar.console.view import Target, View
from laminar.core.engine import Core
from laminar.replay import forecast
from laminar.replay.forecast import Fit
from laminar.replay.playback import Playback
from laminar.replay.recording import Life, Recording


class RecordedTrack:
    """A playback, as the stepper goes along it."""

    def __init__(self, playback: Playback) -> None:
        self._playback = playback
        first = playback.next_event
        self.began = first.at if first else 0.0

    @property
    def core(self) -> Core:
        return self._playback.core

    @property
    def now(self) -> float:
        return max(self.began, self.core.state.at)

    def advance(self) -> bool:
        """To the next event. False at the end of what is recorded."""
        return self._playback.step() is not None

    @property
    def end(self) -> str:
        """Why it ends here."""
        if self._playback.cut:
            return f"the log ends here: {self._playback.cut}"
        return "this is the last event in the log" + (
            f": {self.core.state.finished}" if self.core.state.finished else ""
        )

    def rewind(self, seq: int) -> None:
        """To event `seq`, or as near as the log allows."""
        self._playback.seek(max(seq, self._playback.begins_after))

    def release(self) -> None:
        """A recorded run holds what it held, for as long as it did."""


class Recorded:
    """The target."""

    kind: Target = "log"

    def __init__(self, recording: Recording, life: Life) -> None:
        self._recording = recording
        self._playback = Playback(recording, life)
        self._track = RecordedTrack(self._playback)
        self.title = recording.path.parent.name
        self._fitted: tuple[int, Fit] | None = None
        """With the last event that it is made of."""
        self._language = Language(COMMANDS, self._functions())

    def _functions(self) -> Mapping[str, Function]:
        return {**Stepper(self._track, self.kind).functions(), "whatif": self._whatif}

    def _whatif(self, view: View, words: list[str]) -> Answer:
        """Rates are those of the whole log; beside the simulated futures is the recorded one."""
        last = self._playback.last_seq
        if self._fitted is None or self._fitted[0] != last:
            self._fitted = last, forecast.fit(Playback(self._recording, self._playback.life))
        fitted = self._fitted[1]

        def copy() -> WorldTrack:
            return WorldTrack(forecast.world(self.core, fitted), began=self._track.began)

        return futures.whatif(view, words, copy, self._recorded)

    def _recorded(self, until: Until) -> dict[str, Cell]:
        """What happened from here on; it is here again afterwards."""
        seq, tally = self._playback.seq, compare.Tally(self.core)
        before = tally.mark(self.core)
        try:
            for step in self._playback.steps():
                tally.observe(self.core, step.event, step.actions)
                if until.is_reached(self.core, self._track.now):
                    break
            return compare.between(before, tally.mark(self.core))
        finally:
            self._playback.seek(seq)

    @property
    def core(self) -> Core:
        """As of the event that was gone to."""
        return self._track.core

    def ask(self, line: str) -> Reply:
        """Raises LaminarError when the log cannot be read, or the core refuses what is in it."""
        answer = self._language.answer(self._view(), line, None)
        return reply(self._view(), answer)

    def look(self) -> Reply:
        """Where it is, and how far it can be gone along."""
        first, last = self._playback.begins_after + 1, self._playback.last_seq
        lines = [
            f"events {first} to {last} are recorded; `run until step 3`, `goto time 60`, `goto end`, `step`, `back`"
        ]
        lines += [text for text in (self._playback.left_out, self._recording.left_out) if text]
        return reply(self._view(), Answer(lines=lines))

    def _view(self) -> View:
        return View(self._track.core, target=self.kind, now=self._track.now, began=self._track.began)

    def close(self) -> None:
        self._recording.close()


def opened(path: Path, boot: int | None = None) -> Recorded:
    """The life that a boot belongs to, the last by default, of a run's directory or run.db; before its first event. Raises
    RecordingError."""
    recording = Recording(path)
    try:
        return Recorded(recording, recording.life(boot))
    except BaseException:
        recording.close()
        raise
