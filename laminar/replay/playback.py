"""A life of a recorded run, event by event through a core: forward, and back to any event of it.

    keyframe ─ … ─ keyframe ─ … ─ here ─ … ─ last event            seek back = nearest keyframe before it, then forward

Keyframes are this module's own, in memory: the state and the story after every so many events, thinned out as they become many.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from laminar.core.actions import AnyAction
from laminar.core.engine import Core
from laminar.core.events import AnyEvent
from laminar.core.story import Row, Story
from laminar.errors import LaminarError
from laminar.replay.recording import Life, Place, Recorded, Recording

KEYFRAME_EVENTS = 2048  # replayed in some tenths of a second
KEYFRAMES_MAX = 64  # of at most some MB each


class ReplayError(LaminarError):
    """The core refuses a recorded event; `__cause__` is what it raised."""


class Step(NamedTuple):
    """One event that was replayed."""

    boot: int
    event: AnyEvent
    actions: list[AnyAction]
    """What the core gives now."""
    num_decisions: int
    """Of the state before it."""
    answer: str
    """What it answered when it was recorded (`laminar.controller.answers`)."""


class _Keyframe(NamedTuple):
    place: Place
    state: bytes
    story: list[Row]


class Playback:
    """A core and its place in a life. `core.story` has what happened since the life's `begins_after`.

    Not thread-safe. The core is this object's own: look at it, and let events in by `step` only.
    """

    def __init__(self, recording: Recording, life: Life | None = None) -> None:
        """Before the first event there is, of the recording's last life by default. Raises RecordingError."""
        self.recording, self.life = recording, life or recording.life()
        beginning = recording.begin(self.life)
        self.core: Core = beginning.core
        self.begins_after = beginning.place[1]
        """Its first event is the next one; 0 = the life's first."""
        self.left_out = beginning.left_out
        """Why that is not the first, for people; empty = it is."""
        self.refused: Recorded | None = None
        """The event of a ReplayError."""
        self._raised = ""
        """What the core raised at it."""
        self._damage = ""
        """What is wrong with the event that follows `_ahead`."""
        self._place = beginning.place
        self._ahead: deque[Recorded] = deque()
        self._every = KEYFRAME_EVENTS
        self._keyframes = [self._keyframe()]

    @property
    def seq(self) -> int:
        """Of the last event that was replayed."""
        return self._place[1]

    @property
    def cut(self) -> str:
        """What is wrong with the event before which the replay ends, for people; empty = nothing, as far as it has come."""
        return "" if self._ahead else self._damage

    @property
    def last_seq(self) -> int:
        """Of the last event in the log, which grows while the run goes on. Raises RecordingError."""
        return self.recording.last(self.life)[1]

    @property
    def next_event(self) -> AnyEvent | None:
        """What `step` will replay. Raises RecordingError."""
        return self._ahead[0].event if self._read_ahead() else None

    def step(self) -> Step | None:
        """Replay the next event; None = there is none (yet), or it is damaged (`cut`). Raises RecordingError, ReplayError; after a
        ReplayError the core is as it broke, and only `seek` to before the event goes on.
        """
        if not self._read_ahead():
            return None
        recorded = self._ahead.popleft()
        boot, event, answer = recorded
        num_decisions = self.core.state.num_decisions
        try:
            actions = self.core.handle(event)
        except Exception as error:
            self.refused, self._raised = recorded, f"{type(error).__name__}: {error}"
            raise ReplayError(f"event {event.seq} ({type(event).__name__}): the core raised {self._raised}") from error
        self._place = boot, event.seq
        if event.seq - self._keyframes[-1].place[1] >= self._every:
            self._keep()
        return Step(boot, event, actions, num_decisions, answer)

    def steps(self) -> Iterator[Step]:
        """All that is left, up to where the run's own core raised, if it did. Raises RecordingError, ReplayError."""
        try:
            while (step := self.step()) is not None:
                yield step
        except ReplayError:
            if not self.raised_then:
                raise

    @property
    def raised_then(self) -> bool:
        """Whether the run's own core, too, raised that at the event of a ReplayError, and so ended."""
        is_last = self.refused is not None and self.refused.event.seq == self.last_seq
        return is_last and self.life.boots[-1].raised(self._raised)

    def not_replayed(self) -> list[str]:
        """What of the life was left out, as far as it has come, for people. Raises RecordingError."""
        cut = self.cut and f"{self.cut}: what follows is left out"
        raised = "its core raised at the last event, as it does now" if self.raised_then else ""
        return [text for text in (self.left_out, cut, raised) if text]

    def seek(self, seq: int) -> None:
        """To where event `seq` has just been handled, or as near as the log allows. Raises RecordingError, ReplayError."""
        if seq < self.seq or self.refused is not None:
            self._go_back(next((k for k in reversed(self._keyframes) if k.place[1] <= seq), self._keyframes[0]))
        while self.seq < seq and self.step():
            pass

    def _read_ahead(self) -> bool:
        if self.refused is not None:
            return False
        if not self._ahead and not self._damage:
            found, self._damage = self.recording.after(self.life, self._place)
            self._ahead.extend(found)
        return bool(self._ahead)

    def _go_back(self, to: _Keyframe) -> None:
        settings = self.recording.settings(self.life)
        self.core = Core.restore(settings, to.state)
        self.core.story = Story(to.story)
        self._place, self._damage, self.refused = to.place, "", None
        self._ahead.clear()

    def _keyframe(self) -> _Keyframe:
        return _Keyframe(self._place, self.core.snapshot(), self.core.story.rows())

    def _keep(self) -> None:
        self._keyframes.append(self._keyframe())
        if len(self._keyframes) > KEYFRAMES_MAX:
            del self._keyframes[1::2]
            self._every *= 2
