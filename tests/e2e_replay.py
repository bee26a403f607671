"""What a run did, read from what it left: its event log through the core again, and its token segments.

The events give the actions that the run took, each with its cause (`laminar.replay`). Tokens are unlinked once they
are committed; `keep_tokens` holds on to their file by a second link, taken while the run has just begun.
"""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from e2e import Run

from laminar.controller.segments import read_segment
from laminar.core import actions, events, versions
from laminar.core.records import State
from laminar.ids import TrajectoryId, Version, WorkerId
from laminar.replay.playback import Playback
from laminar.replay.recording import Recording


class Move(NamedTuple):
    """A trajectory that went on elsewhere from a non-empty prefix."""

    trajectory: TrajectoryId
    attempt: int
    """The one that went on."""
    seed: int
    source: WorkerId
    destination: WorkerId
    held: tuple[Version | None, Version | None]
    """Versions of source and destination at the start of the attempt; None of a source that is lost."""
    started_under: Version
    num_flushed: int
    """Response tokens in the source's last report of the attempt before."""


class Freed(NamedTuple):
    """A replica whose last leaving trajectory was let go."""

    worker: WorkerId
    held: Version | None
    newest: Version
    """Newest readable version at that moment."""
    pulled: Version | None
    """What it was told to pull because of that very event."""
    then: events.ReplicaRefreshed | events.ReplicaRefreshFailed | None
    """How its next pull ended."""


class Replay:
    """A finished run's events through a new core: of its last life."""

    def __init__(self, run: Run) -> None:
        self.moves: list[Move] = []
        self.freed: list[Freed] = []
        self.pulls: list[actions.PullWeights] = []
        self.num_split_fleet = 0
        """Events after which two replicas generated under different versions."""
        self.num_divided = 0
        """Sources whose trajectories were sent to several destinations by one decision."""
        self._flushed: dict[tuple[int, int], int] = {}
        self._workers: dict[TrajectoryId, WorkerId] = {}
        with Recording(run.path) as recording:
            playback = Playback(recording)
            self.core = playback.core
            while (event := playback.next_event) is not None:
                self._take(event, playback)

    def _take(self, event: events.AnyEvent, playback: Playback) -> None:
        if isinstance(event, events.ReplicaReported):
            self._take_lengths(event)
        elif isinstance(event, events.ReplicaRefreshed | events.ReplicaRefreshFailed):
            self._note_refresh(event)
        leaving = {r.id: r.version for r in self.core.state.replicas.values() if r.leaving}
        step = playback.step()
        assert step is not None
        self.num_divided += num_divided(self.core.state, step.actions)
        for action in step.actions:
            if isinstance(action, actions.StartGroup):
                self._take_starts(action)
            if isinstance(action, actions.PullWeights):
                self.pulls.append(action)
        self.freed += [
            _freed(self.core.state, r, leaving[r], step.actions) for r in leaving if _is_free(self.core.state, r)
        ]
        generating = {r.version for r in self.core.state.replicas.values() if r.num_generating}
        self.num_split_fleet += len(generating) > 1

    def _take_lengths(self, event: events.ReplicaReported) -> None:
        ids, attempts, lengths = (
            array("q", event.trajectories),
            array("i", event.attempts),
            array("i", event.num_tokens),
        )
        self._flushed |= dict(zip(zip(ids, attempts, strict=True), lengths, strict=True))

    def _note_refresh(self, event: events.ReplicaRefreshed | events.ReplicaRefreshFailed) -> None:
        self.freed = [f._replace(then=f.then or event) if f.worker == event.worker else f for f in self.freed]

    def _take_starts(self, action: actions.StartGroup) -> None:
        replicas = self.core.state.replicas
        for start in action.starts:
            source = self._workers.get(start.trajectory, action.worker)
            self._workers[start.trajectory] = action.worker
            if start.resume and not start.score_only and source != action.worker:
                self.moves.append(
                    Move(
                        trajectory=start.trajectory,
                        attempt=start.attempt,
                        seed=start.seed,
                        source=source,
                        destination=action.worker,
                        held=(
                            replicas[source].version if source in replicas else None,
                            replicas[action.worker].version,
                        ),
                        started_under=action.version,
                        num_flushed=self._flushed[start.trajectory, start.attempt - 1],
                    )
                )


def events_of(run: Run) -> Iterator[events.AnyEvent]:
    """All lives' logs, in order."""
    with Recording(run.path) as recording:
        for life in recording.lives:
            yield from recording.events_of(life)


def num_divided(state: State, taken: list[actions.AnyAction]) -> int:
    """Of the sources that were just told to stop trajectories, those with several destinations."""
    destinations: dict[WorkerId, set[WorkerId | None]] = {}
    for action in taken:
        if isinstance(action, actions.AbortAttempts):
            found = {state.trajectories[t].moving_to for t in action.trajectories if t in state.trajectories}
            destinations.setdefault(action.worker, set()).update(found - {None})
    return sum(len(found) > 1 for found in destinations.values())


def _is_free(state: State, worker: WorkerId) -> bool:
    replica = state.replicas.get(worker)
    return replica is not None and not replica.leaving and not replica.num_generating


def _freed(state: State, worker: WorkerId, held: Version | None, taken: list[actions.AnyAction]) -> Freed:
    newest = versions.newest(state)
    assert newest is not None
    pulled = [a.version for a in taken if isinstance(a, actions.PullWeights) and a.worker == worker]
    return Freed(worker, held, newest.version, pulled[0] if pulled else None, None)


class Part(NamedTuple):
    """Consecutive response tokens that one report of one attempt brought."""

    attempt: int
    start: int
    tokens: list[int]
    logprobs: list[float]


class Tokens(NamedTuple):
    """All tokens of a run, as they came."""

    prompts: dict[int, list[int]]
    """By group."""
    responses: dict[int, list[Part]]
    """By trajectory."""


def keep_tokens(run: Run) -> Path:
    """A second link to the run's first token segment, which short runs never fill."""
    segment = run.path / "tokens" / "0001-000001.seg"
    run.until(segment.exists)
    kept = run.path.with_suffix(".seg")
    os.link(segment, kept)
    return kept


def read_tokens(path: Path) -> Tokens:
    """Everything in a segment."""
    tokens = Tokens({}, {})
    for entry in read_segment(path).entries:
        ids = array("i", entry.tokens).tolist()
        if entry.group:
            tokens.prompts[entry.group] = ids
        else:
            part = Part(entry.attempt, entry.start, ids, array("f", entry.logprobs).tolist())
            tokens.responses.setdefault(entry.trajectory, []).append(part)
    return tokens
