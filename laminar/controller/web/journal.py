"""The list of what happened, for the page: alarms, and those rows of the core's story that are about the run as a whole.

What happens to groups and trajectories, moves included, and that replicas pull, is left out: it would bury the rest, and the lanes
show it.
"""

import re
from typing import NamedTuple

from laminar.controller.web.lanes import Kept
from laminar.core import events
from laminar.core.story import Row, Story

KEPT = 2_000
LOOKED_AT = 2_000  # rows of the story between two looks: some hundred at 256 replicas
SUBJECTS_SHOWN = 4
_OF_SAMPLES = re.compile(r"[gt]\d+\.\d+")
_VERSION = re.compile(r"v\d+(\.b\d+)?")
_OF_STEP = re.compile(r"s\d+|v\d+(\.b\d+)?")
_ROUTINE = [
    each.__name__ for each in (events.StepFinished, events.ReplicaReported, events.ShardsWritten, events.VersionReady)
]


class Entry(NamedTuple):
    """One line. `kind`: ``alarm`` or ``event``."""

    at: float
    kind: str
    text: str
    subjects: list[str]
    because: str


class Journal:
    """Of this process."""

    def __init__(self) -> None:
        self.entries: Kept[Entry] = Kept(KEPT)
        self.routine: Kept[Entry] = Kept(KEPT)
        """What every train step brings: apart, so that the rest is kept for longer."""
        self._seen = 0
        """Seq of the last event whose rows are taken."""

    def alarm(self, at: float, name: str, text: str) -> None:
        """People are told."""
        self.entries.add(Entry(round(at, 3), "alarm", text, [name], ""))

    def look(self, story: Story, seq: int) -> None:
        """Take what the story has new, up to the event `seq`."""
        for row in story.latest(LOOKED_AT):
            if row.cause > self._seen and is_of_run(row):
                subjects = list(row.subjects[:SUBJECTS_SHOWN])
                kept = self.routine if is_routine(row) else self.entries
                kept.add(Entry(round(row.at, 3), "event", row.text, subjects, row.because))
        self._seen = seq


def is_of_run(row: Row) -> bool:
    """Whether it is neither about groups or trajectories, nor about a replica that pulls."""
    if any(_OF_SAMPLES.fullmatch(subject) for subject in row.subjects):
        return False
    num_versions = sum(bool(_VERSION.fullmatch(subject)) for subject in row.subjects)
    return not (num_versions and num_versions < len(row.subjects))


def is_routine(row: Row) -> bool:
    """Whether a train step or its weights go their usual way."""
    return row.because.split(" ")[0] in _ROUTINE and all(_OF_STEP.fullmatch(subject) for subject in row.subjects)
