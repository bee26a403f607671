"""Whether the present code decides as the run did: every answer, and every state that was kept, compared; the first difference.

A life is compared event by event until the core answers otherwise. What follows then is not compared: the recorded events are the
world's answers to what was decided then.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from laminar import __version__
from laminar.controller import answers
from laminar.controller.recovery import Snapshot
from laminar.controller.schema import checksum
from laminar.core import snapshot
from laminar.core.actions import AnyAction
from laminar.core.decisions import AnyDecision
from laminar.core.story import name_of
from laminar.errors import LaminarError
from laminar.replay.playback import Playback, ReplayError, Step
from laminar.replay.recording import Boot, Life, Recording

SHOWN_CHARACTERS_MAX = 400  # of one action or decision; its kind and subject come first


class Divergence(NamedTuple):
    """The first event of a life after which the present code differs from the run."""

    boot: int
    seq: int
    event: str
    """Its kind, and of whom."""
    what: list[str]
    """Then and now, for people."""
    code: str
    """Which code it was then and is now."""


class Verdict(NamedTuple):
    """On one life."""

    life: Life
    num_events: int
    """Replayed without a difference."""
    num_answers: int
    """Of them not empty, and compared."""
    num_states: int
    """Whole states compared."""
    divergence: Divergence | None
    unusable: str
    """Why nothing could be compared; empty = it could."""
    cut: str
    """Why not all of the log could be replayed; empty = it could, as far as it was asked for."""
    notes: list[str]
    """What is to be known about what was not compared."""


def verify(recording: Recording, lives: list[Life], events_max: int = 0) -> list[Verdict]:
    """Of each life. `events_max`: of each at most, 0 = all. Raises RecordingError if the file cannot be read."""
    return [_verify(recording, life, events_max) for life in lives]


def _verify(recording: Recording, life: Life, events_max: int) -> Verdict:
    if recording.last(life)[1] == 0:
        return Verdict(life, 0, 0, 0, None, "", "", ["it heard nothing: there is nothing to compare"])
    try:
        playback = Playback(recording, life)
    except LaminarError as error:
        return Verdict(life, 0, 0, 0, None, str(error), "", [])
    comparison = _Comparison(recording, playback)
    divergence = comparison.run(events_max)
    begun = playback.begins_after
    notes = [*playback.not_replayed(), *comparison.notes()]
    if events_max and playback.seq - begun >= events_max and playback.next_event is not None:
        notes.append(f"compared up to event {playback.seq} of {playback.last_seq}")
    nothing = not (comparison.knows_answers or comparison.num_states or divergence)
    unusable = "neither answers nor states that this Laminar can read were recorded" if nothing else ""
    done = playback.seq - begun - (divergence is not None and divergence.seq == playback.seq)
    num_answers, num_states = comparison.num_answers, comparison.num_states
    return Verdict(life, done, num_answers, num_states, divergence, unusable, playback.cut, notes)


class _Comparison:
    """Of one life."""

    def __init__(self, recording: Recording, playback: Playback) -> None:
        self._recording, self._playback = recording, playback
        self._boots = {boot.number: boot for boot in playback.life.boots}
        rows = recording.query("SELECT boot, seq FROM snapshots WHERE boot BETWEEN ? AND ?", *playback.life.span)
        self._states = {(boot, seq) for boot, seq in rows}
        self.knows_answers = False
        """Of some event; also that there were none."""
        self.num_answers = self.num_states = 0
        self._damaged: list[int] = []
        self._strange: list[int] = []

    def notes(self) -> Iterator[str]:
        """What was not compared."""
        if old := self._recording.unanswered(self._playback.life):
            yield f"boot {', '.join(map(str, old))} did not record what it answered: only the states kept are compared"
        if self._damaged:
            yield f"the state kept after event {', '.join(map(str, self._damaged))} is damaged, and was not compared"
        if self._strange:
            yield f"the state kept after event {', '.join(map(str, self._strange))} is not of this Laminar, and was not compared"

    def run(self, events_max: int) -> Divergence | None:
        """To the end of the life, or the first difference."""
        until = self._playback.seq + events_max if events_max else None
        while until is None or self._playback.seq < until:
            try:
                step = self._playback.step()
            except ReplayError as error:
                return self._raised(error)
            if step is None:
                return None
            if what := self._difference(step):
                return self._divergence(step.boot, step.event, what)
        return None

    def _difference(self, step: Step) -> list[str]:
        core = self._playback.core
        if self._boots[step.boot].code is not None:
            self.knows_answers = True
            now = answers.answer(core.state, step.actions, step.num_decisions)
            if now != step.answer:
                said = [*step.actions, *answers.held_since(core.state, step.num_decisions)]
                return _between(step.answer.split(), now.split(), said)
            self.num_answers += bool(now)
        if (step.boot, step.event.seq) in self._states:
            return self._state_difference(step.boot, step.event.seq)
        return []

    def _state_difference(self, boot: int, seq: int) -> list[str]:
        rows = self._recording.query("SELECT body, crc FROM snapshots WHERE (boot, seq) = (?, ?)", boot, seq)
        if not rows:
            return []  # the run goes on, and needs it no more
        body, crc = rows[0]
        if checksum(seq, body) != crc:
            self._damaged.append(seq)
            return []
        try:
            then = snapshot.decode(bytes(msgspec.msgpack.decode(body, type=Snapshot).core))
        except msgspec.MsgspecError as error:
            if self._boots[boot].code == answers.code():
                return [f"the state that was kept cannot be read: {error}"]
            self._strange.append(seq)
            return []
        self.num_states += 1
        now = snapshot.decode(self._playback.core.snapshot())  # as it is after a restore, too: 1 and 1.0 are the same
        if snapshot.encode(then) == snapshot.encode(now):
            return []
        return [f"the same answer, another state: {_first_difference(_plain(then), _plain(now))}"]

    def _raised(self, error: ReplayError) -> Divergence | None:
        event = self._playback.refused
        assert event is not None
        if self._playback.raised_then:
            return None
        return self._divergence(event.boot, event.event, [f"now: {error}"])

    def _divergence(self, boot: int, event: Any, what: list[str]) -> Divergence:
        return Divergence(boot, event.seq, name_of(event), what, _code_of(self._boots[boot]))


def _code_of(boot: Boot) -> str:
    present = answers.code()
    if boot.code is None:
        return f"recorded by Laminar {boot.version}, this is {__version__}; which core that was is not known"
    if boot.code != present or not present:
        return (
            f"recorded by core {boot.code} of Laminar {boot.version}, this is core {present} of {__version__}: the code differs, "
            "and so does what it decides"
        )
    return f"recorded by this very code (core {present}): a core that decides in two ways is a bug of Laminar; please report it"


def _between(then: list[str], now: list[str], said: list[AnyAction | AnyDecision]) -> list[str]:
    """What two answers differ in: kinds and numbers of then; of now, what the words stand for, whole."""
    lines = [f"answered then: {_kinds(then)}", f"answered now:  {_kinds(now)}"]
    kinds_then, kinds_now = _counts(then), _counts(now)
    if kinds_then == kinds_now:
        known = set(then)
        changed = [word for word in now if word not in known]
        kinds = ", ".join(dict.fromkeys(map(_kind, changed)))
        lines.append(f"the same kinds; {kinds} says something else" if changed else "the same in another order")
    known = set(then)
    for word, whole in zip(now, said, strict=True):
        if word not in known:
            lines.append(f"  now: {_shown(whole)}")
    return lines


def _kind(word: str) -> str:
    return word.partition(":")[0]


def _counts(words: list[str]) -> Counter[str]:
    return Counter(map(_kind, words))


def _kinds(words: list[str]) -> str:
    counts = _counts(words)
    return ", ".join(f"{kind} ×{num}" if num > 1 else kind for kind, num in counts.items()) or "nothing"


def _shown(said: AnyAction | AnyDecision) -> str:
    text = msgspec.json.encode(_plain(said)).decode(errors="replace")
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]} …"


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, str_keys=True)


def _first_difference(then: Any, now: Any, path: str = "state") -> str:
    """Where two plain values differ first, by path. The order of keys counts: decisions depend on it."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(key for key in now if key not in then)]:
            if key not in then or key not in now or _differ(then[key], now[key]):
                return _first_difference(then.get(key), now.get(key), f"{path}.{key}")
        return f"{path} had the order {_keys(then)}, has {_keys(now)}"
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for at, (a, b) in enumerate(zip(then, now, strict=True)):
            if _differ(a, b):
                return _first_difference(a, b, f"{path}[{at}]")
    return f"{path} was {str(then)[:SHOWN_CHARACTERS_MAX]}, is {str(now)[:SHOWN_CHARACTERS_MAX]}"


def _differ(then: Any, now: Any) -> bool:
    return msgspec.msgpack.encode(then) != msgspec.msgpack.encode(now)


def _keys(value: dict[str, Any]) -> str:
    return ", ".join(value)[:SHOWN_CHARACTERS_MAX]
