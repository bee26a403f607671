"""Going on after a controller that died: its state, what it said, and its tokens, from the run's directory.

    last snapshot ──► core, channels ──► events since then ──► actions performed again ──► as of the last event on disk

Nothing was said to a worker before its cause was on disk, and the core and the effects give the same messages again in the same
order; so each worker, when it dials in, gets exactly those that it has not received, and sends again what the log does not have.
"""

import contextlib
import sqlite3
from pathlib import Path
from typing import NamedTuple

import msgspec

from laminar import __version__, wire
from laminar.controller.channels import Channels, Kept
from laminar.controller.effects import Effects
from laminar.controller.segments import Past
from laminar.core import events
from laminar.core.engine import Core
from laminar.core.records import State
from laminar.errors import StartError
from laminar.ids import GroupId, TrajectoryId, WorkerId

ROLES: dict[type, str] = {
    events.ReplicaJoined: "rollout",
    events.TrainerRankReady: "trainer",
    events.RelayJoined: "relay",
}
OTHERWISE = "go on from the last checkpoint with --from-checkpoint"


class Snapshot(msgspec.Struct, kw_only=True):
    """All that a controller needs to go on, after one event."""

    core: bytes
    channels: Kept
    relay_addresses: dict[WorkerId, wire.Neighbour]


def snapshot(core: Core, channels: Channels, effects: Effects) -> bytes:
    """msgpack of a `Snapshot` as of the last event."""
    now = Snapshot(core=core.snapshot(), channels=channels.keep(), relay_addresses=effects.relay_addresses)
    return msgspec.msgpack.encode(now)


class History(NamedTuple):
    """What the database says of the boots that are to be continued."""

    snapshot: Snapshot
    events: list[events.AnyEvent]
    """Since the snapshot."""
    frames: dict[tuple[str, int], int]
    """(worker, incarnation) -> frame up to which all that it said is in `events`."""
    died_at: float
    """Run time of the last event, seconds since the epoch."""


def read(database: Path) -> History:
    """Raises StartError when it cannot be continued from there."""
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=30.0)) as connection:
            _check(database, connection)
            return _read(connection)
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise StartError(f"cannot go on from the log {database}: {error}; {OTHERWISE}") from error


def _check(database: Path, connection: sqlite3.Connection) -> None:
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StartError(f"the log {database} is damaged ({found}); {OTHERWISE}")
    (code,) = connection.execute("SELECT code FROM boots ORDER BY boot DESC LIMIT 1").fetchone()
    if code != __version__:
        raise StartError(
            f"the run was made by Laminar {code}, this is {__version__}: its log may not replay; {OTHERWISE}"
        )


def _read(connection: sqlite3.Connection) -> History:
    boot, seq, body = connection.execute("SELECT * FROM snapshots ORDER BY boot DESC, seq DESC LIMIT 1").fetchone()
    rows = connection.execute(
        "SELECT body FROM events WHERE boot >= ? AND seq > ? ORDER BY boot, seq", (boot, seq)
    ).fetchall()
    (died_at,) = connection.execute("SELECT max(at) FROM events WHERE boot >= ?", (boot,)).fetchone()
    frames = connection.execute("SELECT worker, incarnation, number FROM frames").fetchall()
    return History(
        snapshot=msgspec.msgpack.decode(body, type=Snapshot),
        events=[msgspec.msgpack.decode(row[0], type=events.AnyEvent) for row in rows],
        frames={(worker, incarnation): number for worker, incarnation, number in frames},
        died_at=died_at or 0.0,
    )


def replay(history: History, core: Core, channels: Channels, effects: Effects, past: Past) -> None:
    """Bring a core that was restored from the snapshot, and the channels, to the last event. Raises StartError for lost tokens."""
    channels.acknowledge(core.state.seq + len(history.events))
    channels.resume(history.snapshot.channels)
    effects.relay_addresses.update(history.snapshot.relay_addresses)
    tokens, effects.tokens = effects.tokens, _PastPrefixes(past, core.state)
    for event in history.events:
        if type(event) in ROLES:
            _expect(channels, event, ROLES[type(event)])
        new = core.handle(event)
        if isinstance(event, events.RelayJoined):
            effects.on_relay_joined(event)
        elif isinstance(event, events.CheckpointSaved):
            effects.on_checkpoint_saved(event.step)
        for action in new:
            effects.replay(action)
    effects.tokens = tokens
    channels.vouch(history.frames)


def _expect(channels: Channels, event: events.AnyEvent, role: str) -> None:
    """The process that joins has a channel; an older one of its name has none any more."""
    assert isinstance(event, events.ReplicaJoined | events.TrainerRankReady | events.RelayJoined)
    known = next((channel for channel in channels.all() if channel.worker == event.worker), None)
    if known is None or known.incarnation < event.incarnation:
        channels.expect(event.worker, role, event.incarnation, event.host)


class _PastPrefixes:
    """Prefixes as they were when the core was at a past event: what an attempt then began with."""

    def __init__(self, past: Past, state: State) -> None:
        self._past, self._state = past, state

    def start(self, trajectory: TrajectoryId, attempt: int, group: GroupId, resume: bool) -> None:
        """Nothing: the segments have it."""

    def prefix(self, trajectory: TrajectoryId) -> tuple[bytes, bytes]:
        """Of the attempts before the present one."""
        record = self._state.trajectories[trajectory]
        found = self._past.response(trajectory, record.attempt - 1, record.num_tokens)
        return found.tokens, found.logprobs

    def forget(self, trajectories: object) -> None:
        """Nothing: see `NOT_REPLAYED`."""
