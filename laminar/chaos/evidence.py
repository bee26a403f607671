"""What a run left, read for judgement: `run.db` through the core again, and the rows that were recorded beside it.

The core is deterministic, so its events give every decision, the ledger at every moment, and what had to be recorded. Rows of the
database that differ from that, or a log that the core refuses, are findings.
"""

import sqlite3
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from laminar import __version__, configfile
from laminar.controller.coresettings import settings_of
from laminar.core import actions, events, invariants, ledger
from laminar.core.engine import Core
from laminar.core.records import Trajectory
from laminar.core.settings import Settings
from laminar.errors import ConfigError
from laminar.ids import BOOT_SHIFT, GroupId, TrajectoryId
from laminar.tasks import datasets

CHECK_EVERY = 32  # reports between two checks of the whole state, which takes as long as a hundred of them
FINDINGS_MAX = 20  # more say the same

_COLUMNS = "id, prompt, group_id, behavior_version, digest, num_tokens, step, dropped"


class Row(NamedTuple):
    """A recorded trajectory, as far as it is judged."""

    id: TrajectoryId
    prompt: int
    group: GroupId
    behavior_version: str | None
    digest: str
    num_tokens: int
    step: int | None
    dropped: str | None


class Trained(NamedTuple):
    """A step whose updates were applied."""

    at: float
    step: int
    attempt: int
    branch: int
    groups: tuple[GroupId, ...]


class Dropped(NamedTuple):
    """Trajectories and tokens that an event took out of the run."""

    at: float
    reason: str
    trajectories: int
    tokens: int


class Lost(NamedTuple):
    """A worker that was given up."""

    at: float
    worker: str
    reason: str


class Tables(NamedTuple):
    """Of `run.db`."""

    boots: list[tuple[Any, ...]]
    """(boot, code, continues, outcome)"""
    events: list[events.AnyEvent]
    """Of the boots that continue each other up to the last."""
    rows: dict[TrajectoryId, Row]
    versions: list[tuple[int, int, str]]
    """(step, branch, digest)"""
    metrics: dict[str, dict[int, float]]
    """Name -> step -> value."""
    settings: Settings | None
    """Of the first of these boots; None = it was killed before it could record them."""
    data_state: bytes
    """From which that went on; empty = it began anew."""


class Evidence:
    """A run's whole story. Raises ConfigError if there is none to read. `settings`: by default those of the run's configuration."""

    def __init__(self, run: Path, settings: Settings | None = None) -> None:
        self.run = run
        self.tables = _read(run / "run.db")
        self.settings = settings or self.tables.settings or _settings(run)
        self.findings: list[str] = []
        """What the core refused, and invariants that did not hold."""
        self.recorded: dict[TrajectoryId, Row] = {}
        """What the core said was to be recorded."""
        self.drawn: dict[TrajectoryId, GroupId] = {}
        self.prompts: dict[GroupId, int] = {}
        self.trained: list[Trained] = []
        self.restored: list[tuple[float, int]] = []
        """(at, branch) of each time that the trainer began, or began again."""
        self.dropped: list[Dropped] = []
        self.lost: list[Lost] = []
        self.ended_at = float("inf")
        """When the run was told to stop, or was over."""
        self.received: list[tuple[float, int]] = [(0.0, 0)]
        """(at, response tokens received up to then)"""
        self.core = self._core()
        self._replay()

    @property
    def seconds(self) -> float:
        """From the first event to the last."""
        return self.tables.events[-1].at - self.tables.events[0].at if self.tables.events else 0.0

    def _core(self) -> Core:
        return Core.resumed(self.settings, self.tables.data_state) if self.tables.data_state else Core(self.settings)

    def _replay(self) -> None:
        for number, event in enumerate(self.tables.events):
            try:
                self._take(event)
                if not isinstance(event, events.ReplicaReported) or number % CHECK_EVERY == 0:
                    invariants.check(self.core.state)
            except Exception as error:  # noqa: BLE001 - whatever the core does not take is a finding, not the end of the report
                name = type(event).__name__
                self._find(f"event {event.seq} ({name}) at {event.at:.3f}: {error or type(error).__name__}")
                if self.core.state.seq != event.seq:
                    self._find("the log cannot be followed from there on")
                    return
            if len(self.findings) >= FINDINGS_MAX:
                return

    def _find(self, text: str) -> None:
        self.findings.append(text)

    def _take(self, event: events.AnyEvent) -> None:
        state = self.core.state
        before = {reason: (state.ledger.trajectories.dropped.get(reason, 0), n) for reason, n in _dropped(self.core)}
        if isinstance(event, events.ReplicaReported):
            self._check_versions(event)
        if isinstance(event, events.StopRequested):
            self.ended_at = min(self.ended_at, event.at)
        for action in self.core.handle(event):
            self._note(event, action)
        self._count(event, before)
        branch = state.trainer.branch
        if branch >= 0 and (not self.restored or self.restored[-1][1] != branch):
            self.restored.append((event.at, branch))
        if isinstance(event, events.StepFinished):
            step = state.steps.get(event.step)
            if step is not None and step.done and step.attempt == event.attempt:
                self.trained.append(Trained(event.at, step.step, step.attempt, branch, tuple(step.groups)))

    def _check_versions(self, event: events.ReplicaReported) -> None:
        """Tokens come from a replica that holds the version under which their trajectory began."""
        replica = self.core.state.replicas.get(event.worker)
        if replica is None or replica.incarnation != event.incarnation:
            return
        for trajectory_id, attempt in zip(
            array("q", event.trajectories), array("i", event.attempts), strict=True
        ):  # fmt: skip
            trajectory = self.core.state.trajectories.get(TrajectoryId(trajectory_id))
            if trajectory is None or replica.attempts.get(trajectory.id) != attempt or trajectory.finish_reason:
                continue
            if trajectory.behavior_version != replica.version:
                self._find(
                    f"event {event.seq}: {event.worker} with {replica.version} gave tokens of trajectory {trajectory_id}, "
                    f"which is of {trajectory.behavior_version}"
                )

    def _note(self, event: events.AnyEvent, action: actions.AnyAction) -> None:
        if isinstance(action, actions.StartGroup):
            self.prompts[action.group] = action.prompt
            for start in action.starts:
                self.drawn[start.trajectory] = action.group
        elif isinstance(action, actions.RecordTrajectories):
            self.recorded |= {trajectory.id: _row(trajectory) for trajectory in action.trajectories}
        elif isinstance(action, actions.StopWorker) and action.lost:
            self.lost.append(Lost(event.at, action.worker, action.reason))
        elif isinstance(action, actions.FinishRun):
            self.ended_at = min(self.ended_at, event.at)
        elif isinstance(action, actions.RaiseAlarm) and action.name == "trainer-lost":
            self.lost.append(Lost(event.at, str(self.core.state.trainer.launch), action.text))

    def _count(self, event: events.AnyEvent, before: dict[str, tuple[int, int]]) -> None:
        account = self.core.state.ledger
        if account.tokens.total != self.received[-1][1]:
            self.received.append((event.at, account.tokens.total))
        reasons = dict.fromkeys([*account.tokens.dropped, *account.trajectories.dropped])
        for reason in reasons:
            then = before.get(reason, (0, 0))
            now = (account.trajectories.dropped.get(reason, 0), account.tokens.dropped.get(reason, 0))
            if now != then:
                self.dropped.append(Dropped(event.at, reason, now[0] - then[0], now[1] - then[1]))


def _dropped(core: Core) -> list[tuple[str, int]]:
    account = core.state.ledger
    reasons = dict.fromkeys([*account.tokens.dropped, *account.trajectories.dropped])
    return [(reason, account.tokens.dropped.get(reason, 0)) for reason in reasons]


def _row(t: Trajectory) -> Row:
    version = str(t.behavior_version) if t.behavior_version is not None else None
    return Row(t.id, t.prompt, t.group, version, t.digest, t.num_tokens, t.step or None, t.dropped or None)


def _settings(run: Path) -> Settings:
    config = configfile.load(run / "config.toml", [])
    return settings_of(config, datasets.load(config.task))


def _read(path: Path) -> Tables:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("BEGIN")  # one moment of a run that goes on
            boots = database.execute("SELECT boot, code, continues, outcome FROM boots ORDER BY boot").fetchall()
            if not boots:
                raise ConfigError(f"{path} holds no run")
            if boots[-1][1] != __version__:
                raise ConfigError(
                    f"{path} was made by Laminar {boots[-1][1]}, this is {__version__}: judge it with that"
                )
            return _tables(database, boots)
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _tables(database: sqlite3.Connection, boots: list[tuple[Any, ...]]) -> Tables:
    first = boots[-1][2] or boots[-1][0]
    core = database.execute("SELECT settings, data_state FROM cores WHERE boot = ?", (first,)).fetchone()
    own = f"SELECT {_COLUMNS} FROM trajectories WHERE id >= ?"  # not what went before the checkpoint of a --resume
    rows = database.execute(own, (first << BOOT_SHIFT,))
    metrics: dict[str, dict[int, float]] = {}
    for step, name, value in database.execute("SELECT step, name, value FROM metrics ORDER BY step"):
        metrics.setdefault(name, {})[step] = value
    log = database.execute("SELECT body FROM events WHERE boot >= ? ORDER BY boot, seq", (first,))
    found = [msgspec.msgpack.decode(body, type=events.AnyEvent) for (body,) in log]
    if found and found[0].seq > 1:
        raise ConfigError(
            f"the first {found[0].seq - 1} events have left the log (log.max_mib): a run is judged from its first event on"
        )
    return Tables(
        boots=boots,
        events=found,
        rows={row[0]: Row(*row) for row in rows},
        versions=database.execute("SELECT step, branch, digest FROM versions").fetchall(),
        metrics=metrics,
        settings=msgspec.msgpack.decode(core[0], type=Settings) if core else None,
        data_state=core[1] if core else b"",
    )


def is_closed(core: Core) -> bool:
    """Both accounts of the ledger."""
    return ledger.is_closed(core.state.ledger.trajectories) and ledger.is_closed(core.state.ledger.tokens)
