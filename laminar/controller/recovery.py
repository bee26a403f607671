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
from laminar.controller import damage, schema, wal
from laminar.controller.channels import Channels, Kept
from laminar.controller.effects import Effects
from laminar.controller.schema import checksum
from laminar.controller.segments import DAMAGES_SHOWN, OTHERWISE, Past
from laminar.core import events
from laminar.core.engine import Core
from laminar.core.records import State
from laminar.errors import LaminarError, StartError
from laminar.ids import GroupId, TrajectoryId, WorkerId

GOES_ON = "goes on after a controller"
"""How a controller that takes over begins to say so; `laminar.chaos` waits for it."""

ROLES: dict[type, str] = {
    events.ReplicaJoined: "rollout",
    events.TrainerRankReady: "trainer",
    events.RelayJoined: "relay",
}


class Snapshot(msgspec.Struct, kw_only=True):
    """All that a controller needs to go on, after one event."""

    core: msgspec.Raw
    channels: Kept
    relay_addresses: dict[WorkerId, wire.Neighbour]


def snapshot(core: Core, channels: Channels, effects: Effects) -> bytes:
    """msgpack of a `Snapshot` as of the last event."""
    now = Snapshot(core=msgspec.Raw(core.snapshot()), channels=channels.keep(), relay_addresses=effects.relay_addresses)
    return msgspec.msgpack.encode(now)


class History(NamedTuple):
    """What the database says of the boots that are to be continued."""

    snapshot: Snapshot
    events: list[events.AnyEvent]
    """Since the snapshot."""
    frames: dict[tuple[str, int], int]
    """(worker, incarnation) -> frame up to which all that it said is in `events`."""
    segments: dict[str, int]
    """Token segment -> bytes that are on disk if nothing was lost."""
    began: float
    """Run time of the first event in the log of what is continued, seconds since the epoch."""
    died_at: float
    """Of the last event."""
    left_out: str
    """What of the write-ahead log could not be taken; empty = nothing."""


def read(database: Path) -> History:
    """Raises StartError when it cannot be continued from there."""
    try:
        frames = wal.num_frames(wal.path_of(database))
        with contextlib.closing(sqlite3.connect(database, timeout=30.0)) as connection:
            _check(database, connection, frames)
            return _read(connection, wal.left_out(database, frames, connection))
    except (
        OSError,
        sqlite3.Error,
        msgspec.MsgspecError,
        TypeError,
    ) as error:  # TypeError: a damaged row has other columns
        raise StartError(f"cannot go on from the log {database}: {error}; {OTHERWISE}") from error


def _check(database: Path, connection: sqlite3.Connection, num_frames: int) -> None:
    if found := damage.of_length(database, connection, num_frames) or damage.of_needed(connection):
        raise StartError(f"the log {database} is damaged ({found}); {OTHERWISE}")
    (code,) = connection.execute("SELECT code FROM boots ORDER BY boot DESC LIMIT 1").fetchone()
    if code != __version__:
        raise StartError(
            f"the run was made by Laminar {code}, this is {__version__}: its log may not replay; {OTHERWISE}"
        )


def _read(connection: sqlite3.Connection, left_out: str) -> History:
    boot, seq, core = _last_snapshot(connection)
    rows = connection.execute(
        "SELECT seq, body, crc FROM events WHERE (boot, seq) > (?, ?) ORDER BY boot, seq", (boot, seq)
    ).fetchall()
    for expected, row in enumerate(rows, seq + 1):
        if row[0] != expected or checksum(*row[:2]) != row[2]:
            raise sqlite3.DatabaseError(f"event {expected} is damaged or missing")
    died_at = _end(connection)
    return History(
        snapshot=core,
        events=[msgspec.msgpack.decode(body, type=events.AnyEvent) for _, body, _ in rows],
        frames=_frames(connection),
        segments=_segments(connection),
        began=_began(connection),
        died_at=died_at,
        left_out=left_out,
    )


def _end(connection: sqlite3.Connection) -> float:
    """Run time of the last event, which has to be the one that was noted as such."""
    last = connection.execute("SELECT boot, seq, at FROM events ORDER BY boot DESC, seq DESC LIMIT 1").fetchone()
    noted = connection.execute("SELECT boot, seq, crc FROM ends ORDER BY boot DESC LIMIT 1").fetchone()
    if last is None or noted is None or last[:2] != noted[:2] or schema.end_checksum(*noted[:2]) != noted[2]:
        ends, written = (f"event {row[1]} of boot {row[0]}" if row else "no event" for row in (last, noted))
        raise sqlite3.DatabaseError(f"it ends with {ends}, and {written} was written last")
    return float(last[2])


def _began(connection: sqlite3.Connection) -> float:
    """Run time of the first event in the log of the boots that are continued; if that is damaged, when the first of them began.
    Only the seconds that people are shown depend on it."""
    life = "boot >= (SELECT continues FROM boots ORDER BY boot DESC LIMIT 1)"
    try:
        (at,) = connection.execute(f"SELECT at FROM events WHERE {life} ORDER BY boot, seq LIMIT 1").fetchone()
    except sqlite3.DatabaseError as error:
        if not damage.is_damage(error):
            raise
        (at,) = connection.execute(f"SELECT started FROM boots WHERE {life} ORDER BY boot LIMIT 1").fetchone()
    return float(at)


def _last_snapshot(connection: sqlite3.Connection) -> tuple[int, int, Snapshot]:
    """(boot, seq, snapshot) of the last that is whole."""
    rows = connection.execute("SELECT boot, seq, body, crc FROM snapshots ORDER BY boot DESC, seq DESC")
    for boot, seq, body, crc in rows:
        if checksum(seq, body) == crc:
            return boot, seq, msgspec.msgpack.decode(body, type=Snapshot)
    raise sqlite3.DatabaseError("no snapshot of the state is whole")


def _frames(connection: sqlite3.Connection) -> dict[tuple[str, int], int]:
    found = {}
    for worker, incarnation, number, crc in connection.execute("SELECT worker, incarnation, number, crc FROM frames"):
        if checksum(number, repr((worker, incarnation)).encode()) != crc:
            raise sqlite3.DatabaseError(f"the row of {worker} in the table frames is damaged")
        found[worker, incarnation] = number
    return found


def _segments(connection: sqlite3.Connection) -> dict[str, int]:
    found = {}
    for name, num_bytes, crc in connection.execute("SELECT name, num_bytes, crc FROM segments"):
        if checksum(num_bytes, name.encode()) != crc:
            raise sqlite3.DatabaseError(f"the row of {name} in the table segments is damaged")
        found[name] = num_bytes
    return found


def replay(history: History, core: Core, channels: Channels, effects: Effects, past: Past) -> None:
    """Bring a core that was restored from the snapshot, and the channels, to the last event. Raises StartError for
    lost tokens, or an event that the core does not take.
    """
    channels.acknowledge(core.state.seq + len(history.events))
    channels.resume(history.snapshot.channels)
    effects.relay_addresses.update(history.snapshot.relay_addresses)
    if core.state.sampler:
        effects.samplers.use(core.state.sampler)
    tokens, effects.tokens = effects.tokens, _PastPrefixes(past, core.state)
    for event in history.events:
        try:
            _handle_again(event, core, channels, effects)
        except LaminarError:
            raise
        except Exception as error:  # the log is no more what it was, or another core wrote it
            what = f"event {event.seq} ({type(event).__name__}): {type(error).__name__}: {error}"
            raise StartError(f"the log cannot be followed: {what}; {OTHERWISE}") from error
    effects.tokens = tokens
    channels.vouch(history.frames)


def _handle_again(event: events.AnyEvent, core: Core, channels: Channels, effects: Effects) -> None:
    if type(event) in ROLES:
        _expect(channels, event, ROLES[type(event)])
    new = core.handle(event)
    if isinstance(event, events.RelayJoined):
        effects.on_relay_joined(event)
    elif isinstance(event, events.CheckpointSaved):
        effects.on_checkpoint_saved(event.step)
    for action in new:
        effects.replay(action)


def what_was_cut(history: History | None, past: Past) -> list[str]:
    """For people: what the log and the segments have that is no whole commit, of a run that goes on."""
    if history is None:
        return []
    cut = [f"{each}; left out: the log does not know of it" for each in past.damages[:DAMAGES_SHOWN]]
    return [history.left_out, *cut]


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
