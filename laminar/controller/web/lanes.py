"""What each replica did in the last minutes: lanes of segments, moves between them, and marks of what concerns all.

    rollout-0  │ v6 generating ▒ v6 draining │pull│ v7 generating …
    rollout-1  │ v7 generating ……… ╲ move
    rollout-2  │ v6 draining   ……… ╱
    trainer      s6 │ s7 │   │ s8 …

A segment is closed when the replica's activity or version changes. That is noticed at once for whoever reports, at the next
`look` for the others; a pull that nobody saw begin is as long as the replica says that it took.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from laminar.core import actions, events, health
from laminar.core.engine import Core
from laminar.core.health import Health
from laminar.core.records import Replica
from laminar.core.turn import Turn
from laminar.ids import WorkerId

KEPT_S = 900.0
SEGMENTS_MAX = 60_000  # 256 replicas that pull every 20 s make some 45,000 in KEPT_S; about 10 MB
MOVES_MAX = 8_000
MARKS_MAX = 4_000
LANES_MAX = 4_096  # replicas that ever joined, under different names; later ones have no lane

Row = TypeVar("Row", bound=tuple[Any, ...])


class Activity(IntEnum):
    """What one replica does, in the order of the legend."""

    STARTING = 0
    SYNCING = 1
    GENERATING = 2
    DRAINING = 3
    IDLE = 4
    """Healthy, and there is nothing for it to generate: it waits for a group, or for rewards."""
    EVALUATING = 5
    SUSPECT = 6
    QUARANTINED = 7
    DEAD = 8
    GONE = 9
    """It was taken out."""


_OF_HEALTH = {each: Activity[each.name] for each in Health}


class Segment(NamedTuple):
    """`lane` did one thing under one version. Times are run time, seconds, to the millisecond."""

    lane: int
    start: float
    end: float
    activity: int
    version: str


class Move(NamedTuple):
    """Trajectories were told to leave one lane for another."""

    at: float
    source: int
    destination: int
    num: int


class Mark(NamedTuple):
    """Something that concerns all lanes: ``version``, ``step``, ``checkpoint``, ``lost``."""

    at: float
    kind: str
    text: str


class Train(NamedTuple):
    """The trainer worked on a step: `text` is its name."""

    start: float
    end: float
    text: str


class Kept(Generic[Row]):
    """Rows with running numbers, of which the oldest are dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: list[Row] = []
        self.first = 0
        """Number of the oldest that is kept."""

    @property
    def end(self) -> int:
        """Number of the next."""
        return self.first + len(self._rows)

    def add(self, row: Row) -> None:
        """Keep it, and drop an eighth if there are too many."""
        self._rows.append(row)
        if len(self._rows) > self._limit:
            self._drop(self._limit // 8)

    def since(self, number: int, limit: int) -> tuple[int, list[Row]]:
        """(number of the first row, at most `limit` rows) from `number` on, or from the oldest."""
        begin = max(number, self.first) - self.first
        return self.first + begin, self._rows[begin : begin + limit]

    def forget(self, is_old: Callable[[Row], bool]) -> None:
        """Drop from the oldest on what is old, once that is an eighth of the limit."""
        at = self._limit // 8
        if len(self._rows) > at and is_old(self._rows[at]):
            self._drop(at)

    def _drop(self, num: int) -> None:
        del self._rows[:num]
        self.first += num


class Open(NamedTuple):
    """What a lane does now."""

    since: float
    activity: Activity
    version: str


class Lanes:
    """Of one run, as far as this process saw it. Called on the event loop."""

    def __init__(self) -> None:
        self.names: list[WorkerId] = []
        """By lane."""
        self.open: list[Open] = []
        """By lane."""
        self.segments: Kept[Segment] = Kept(SEGMENTS_MAX)
        self.moves: Kept[Move] = Kept(MOVES_MAX)
        self.marks: Kept[Mark] = Kept(MARKS_MAX)
        self.trains: Kept[Train] = Kept(MARKS_MAX)
        self._training = (0, 0.0)
        """Step that the trainer works on, 0 = none, and since when."""
        self._lane_of: dict[WorkerId, int] = {}

    def lane(self, worker: WorkerId) -> int | None:
        """Its number; None if it has none."""
        return self._lane_of.get(worker)

    # ---- noticing ------------------------------------------------------------------------------------------

    def observe(self, core: Core, event: events.AnyEvent) -> None:
        """After the core took an event."""
        self._look_at_trainer(core, event.at)
        if isinstance(event, events.ReplicaReported):
            self._look_at(core, event.worker)
        elif isinstance(event, events.ReplicaRefreshed):
            self._on_refreshed(core, event)
        elif isinstance(event, events.ReplicaJoined):
            self._look_at(core, event.worker)
        elif (text := _mark(event)) is not None:
            self.marks.add(Mark(_ms(event.at), *text))

    def on_abort(self, core: Core, action: actions.AbortAttempts) -> None:
        """Attempts are to end; those that will be continued elsewhere move."""
        told: dict[WorkerId, int] = {}
        for trajectory in action.trajectories:
            record = core.state.trajectories.get(trajectory)
            if record is not None and record.moving_to is not None:
                told[record.moving_to] = told.get(record.moving_to, 0) + 1
        for destination, num in told.items():
            if action.worker in self._lane_of and destination in self._lane_of:
                ends = self._lane_of[action.worker], self._lane_of[destination]
                self.moves.add(Move(_ms(core.state.at), *ends, num))

    def look(self, core: Core, begin: int = 0, num: int = LANES_MAX) -> None:
        """Notice what so many lanes do, from one on, and who has joined or is gone."""
        for worker in core.state.replicas:
            if worker not in self._lane_of:
                self._look_at(core, worker)
        for worker in self.names[begin : begin + num]:
            self._look_at(core, worker)

    def forget(self, now: float) -> None:
        """What is older than KEPT_S may go."""
        self.segments.forget(lambda row: row.end < now - KEPT_S)
        self.moves.forget(lambda row: row.at < now - KEPT_S)
        self.marks.forget(lambda row: row.at < now - KEPT_S)
        self.trains.forget(lambda row: row.end < now - KEPT_S)

    def _look_at_trainer(self, core: Core, at: float) -> None:
        present = core.state.trainer.running, core.state.trainer.running_since
        if present != self._training:
            step, since = self._training
            if step:
                self.trains.add(Train(_ms(since), _ms(at), f"s{step}"))
            self._training = present

    def _look_at(self, core: Core, worker: WorkerId) -> None:
        activity, version = _present(core, worker)
        self._set(worker, core.state.at, activity, version)

    def _set(self, worker: WorkerId, at: float, activity: Activity, version: str) -> None:
        lane = self._lane_of.get(worker)
        if lane is None:
            if len(self.names) < LANES_MAX:
                self._lane_of[worker] = len(self.names)
                self.names.append(worker)
                self.open.append(Open(_ms(at), activity, version))
            return
        known = self.open[lane]
        if known.activity != activity or known.version != version:
            self._close(lane, at)
            self.open[lane] = Open(_ms(max(at, known.since)), activity, version)

    def _close(self, lane: int, at: float) -> None:
        since, activity, version = self.open[lane]
        if _ms(at) > since:
            self.segments.add(Segment(lane, since, _ms(at), int(activity), version))

    def _on_refreshed(self, core: Core, event: events.ReplicaRefreshed) -> None:
        lane = self._lane_of.get(event.worker)
        if lane is not None and self.open[lane].activity != Activity.SYNCING:
            began = max(self.open[lane].since, event.at - event.wait_s)
            self._set(event.worker, began, Activity.SYNCING, str(event.version))
        self._look_at(core, event.worker)


def _ms(at: float) -> float:
    return round(at, 3)


def _present(core: Core, worker: WorkerId) -> tuple[Activity, str]:
    replica = core.state.replicas.get(worker)
    if replica is None:
        return (Activity.DEAD if worker in core.state.restarts else Activity.GONE), ""
    word = health.status(Turn(core.state, core.settings, core.story), replica).health
    version = replica.target if word is Health.SYNCING else replica.version
    activity = _OF_HEALTH[word]
    if word is Health.GENERATING and not replica.num_generating:
        activity = Activity.EVALUATING if _evaluates(core, replica) else Activity.IDLE
    return activity, str(version) if version is not None else ""


def _evaluates(core: Core, replica: Replica) -> bool:
    return any(each.worker == replica.id and not each.done for each in core.state.evaluations)


def _mark(event: events.AnyEvent) -> tuple[str, str] | None:
    """(kind, text) of what concerns all."""
    if isinstance(event, events.VersionReady):
        return "version", str(event.version)
    if isinstance(event, events.StepFinished):
        return "step", f"s{event.step}"
    if isinstance(event, events.CheckpointSaved):
        return "checkpoint", f"s{event.step}"
    if isinstance(event, events.WorkerLost):
        return "lost", str(event.worker)
    return None
