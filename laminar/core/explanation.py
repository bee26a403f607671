"""What an answer to "why" looks like (`laminar.core.explain`): a sentence, and the lines that it rests on."""

from collections.abc import Sequence

import msgspec

from laminar.core import holds
from laminar.core.records import State

NAMES_SHOWN = 12  # of replicas or groups in one sentence; the rest is counted


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One part of an answer."""

    topic: str
    """What it is about, in two words."""
    text: str
    yes: bool | None = None
    """The answer, where the topic is a question (``new groups``, ``drains``, ``refresh``, ``source`` …)."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""

    subject: str
    text: str
    """In one sentence."""
    lines: list[Line]

    def line(self, topic: str) -> Line:
        """The line about a topic. Raises KeyError if it has none."""
        for line in self.lines:
            if line.topic == topic:
                return line
        raise KeyError(topic)


def listed(names: Sequence[str]) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return (", ".join(names[:NAMES_SHOWN]) or "none") + more


def held(state: State, name: str) -> str:
    """Who keeps this pass from deciding, as the end of a sentence; empty = nobody."""
    reason = holds.why(state, name)
    return f"; but {reason}" if reason else ""


def seconds(turn_at: float, since: float) -> str:
    """How long that is, for people; `since` 0 = not known."""
    return f"for {turn_at - since:.1f} s" if since else "for an unknown time"
