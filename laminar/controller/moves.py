"""Which trajectory moved from where to where, and how long that took: the table `moves` of `run.db`.

AbortAttempts at the source ──► it lets go ──► StartGroup at the destination: a row
                            └─► it ends there first: none
"""

from typing import NamedTuple

from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.core import actions, events
from laminar.ids import TrajectoryId, WorkerId

UNDER_WAY_MAX = 100_000  # more than a fleet generates at once; a move that nothing ended would else stay for ever


class _Begun(NamedTuple):
    source: WorkerId
    at: float


class Move(NamedTuple):
    """A row: it was told to let go at `start` by run time, and began again at `end`, with `num_tokens` response tokens."""

    trajectory: TrajectoryId
    attempt: int
    source: WorkerId
    destination: WorkerId
    version: str
    num_tokens: int
    start: float
    end: float


class Moves:
    """Hears the core's actions and the replicas' reports."""

    def __init__(self, runtime: Runtime, log: EventLog) -> None:
        self._runtime, self._log = runtime, log
        self._under_way: dict[TrajectoryId, _Begun] = {}

    def on_abort(self, action: actions.AbortAttempts) -> None:
        """Attempts are to end; those that will be continued elsewhere move."""
        state = self._runtime.core.state
        for trajectory in action.trajectories:
            record = state.trajectories.get(trajectory)
            if record is not None and record.moving_to is not None:
                self._begin(trajectory, _Begun(action.worker, state.at))

    def _begin(self, trajectory: TrajectoryId, begun: _Begun) -> None:
        if len(self._under_way) >= UNDER_WAY_MAX:
            del self._under_way[next(iter(self._under_way))]
        self._under_way[trajectory] = begun

    def on_start(self, action: actions.StartGroup) -> list[Move]:
        """Attempts begin; those that moved have arrived, wherever that is."""
        arrived = []
        for start in action.starts if self._under_way else ():
            begun = self._under_way.pop(start.trajectory, None)
            if begun is not None:
                arrived.append(self._arrive(start, action, begun))
        for move in arrived:
            self._log.write("INSERT INTO moves VALUES (?, ?, ?, ?, ?, ?, ?, ?)", move)
        return arrived

    def _arrive(self, start: actions.Start, action: actions.StartGroup, begun: _Begun) -> Move:
        state = self._runtime.core.state
        num_tokens = state.trajectories[start.trajectory].num_tokens
        return Move(
            start.trajectory, start.attempt, begun.source, action.worker, str(action.version), num_tokens, begun.at, state.at
        )  # fmt: skip

    def on_report(self, report: events.ReplicaReported) -> None:
        """What ended at the source has not moved."""
        if self._under_way:
            for ended in (*report.finished, *report.failed):
                self._under_way.pop(ended.trajectory, None)
