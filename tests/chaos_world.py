"""Directories such as runs leave them, made of what a driver of the core went through, for `laminar.chaos` to judge."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from laminar import __version__
from laminar.chaos.evidence import Row
from laminar.chaos.journal import Journal, Strike
from laminar.chaos.report import Report, make
from laminar.controller.schema import SCHEMA
from laminar.core import actions, events
from tests.core_world import Driver, World, settings

SETTINGS: dict[str, Any] = {
    "steps": 6,
    "checkpoint_every": 2,
    "restarts_max": 50,
    "relay_restarts_max": 50,
    "trainer_restarts_max": 50,
}


class Cluster(World):
    """The seeded world, whose replicas have the names that the controller gives."""

    def __init__(self, seed: int, faults: float = 0.0, **changes: Any) -> None:
        super().__init__(settings(**(SETTINGS | changes)), seed, faults)

    def join(self, name: str, *arguments: Any, **options: Any) -> list[actions.AnyAction]:
        return super().join(f"rollout-{name[1:]}" if name[1:].isdigit() else name, *arguments, **options)


def leave(driver: Driver, run: Path, *strikes: Strike) -> Path:
    """What a run of these events leaves, and the faults that it is said to have had."""
    run.mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(run / "run.db")) as database, database:
        database.executescript(SCHEMA)
        database.execute(
            "INSERT INTO boots (boot, resumed_step, code, continues, outcome) VALUES (1, 0, ?, 1, 'over')",
            (__version__,),
        )
        for body in driver.log:
            event = msgspec.msgpack.decode(body, type=events.AnyEvent)
            row = (1, event.seq, event.at, type(event).__name__, body)
            database.execute("INSERT INTO events (boot, seq, at, kind, body) VALUES (?, ?, ?, ?, ?)", row)
            if isinstance(event, events.VersionReady):
                version = (event.version.step, event.version.branch, event.digest, event.num_bytes, event.at)
                database.execute(
                    "INSERT OR REPLACE INTO versions (step, branch, digest, num_bytes, published_at) VALUES (?, ?, ?, ?, ?)",
                    version,
                )
        for action in driver.all(actions.RecordTrajectories):
            for t in action.trajectories:
                version = str(t.behavior_version) if t.behavior_version is not None else None
                row = Row(t.id, t.prompt, t.group, version, t.digest, t.num_tokens, t.step or None, t.dropped or None)
                database.execute(
                    "INSERT OR REPLACE INTO trajectories (id, prompt, group_id, behavior_version, digest, num_tokens, step, "
                    "dropped) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    row,
                )
    journal = Journal(run)
    for strike in strikes or [Strike(number=1, kind="slow", target="controller", at=0.0, skipped="not in this test")]:
        journal.write(strike)
    return run


def judged(driver: Driver, run: Path) -> Report:
    """The report of what `leave` left."""
    return make(run, driver.core.settings)


def broken(report: Report) -> dict[str, list[str]]:
    """Checks with findings."""
    return {name: findings for name, findings in report.checks.items() if findings}


def doctor(run: Path, statement: str, *parameters: Any) -> None:
    """Change the run's database."""
    with contextlib.closing(sqlite3.connect(run / "run.db")) as database, database:
        changed = database.execute(statement, parameters).rowcount
        assert changed, f"nothing was changed by {statement}"


def doctor_event(run: Path, kind: type, at: int, **changes: Any) -> None:
    """Change the `at`-th event of a kind in the log."""
    with contextlib.closing(sqlite3.connect(run / "run.db")) as database, database:
        rows = database.execute("SELECT seq, body FROM events WHERE kind = ? ORDER BY seq", (kind.__name__,)).fetchall()
        seq, body = rows[at]
        event = msgspec.structs.replace(msgspec.msgpack.decode(body, type=events.AnyEvent), **changes)
        database.execute("UPDATE events SET body = ? WHERE seq = ?", (msgspec.msgpack.encode(event), seq))
