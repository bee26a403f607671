"""How a run stands: the core's state after its last event, from the last snapshot and the events since."""

import msgspec

from laminar.controller.recovery import Snapshot
from laminar.controller.schema import checksum
from laminar.core import snapshot
from laminar.core.engine import Core
from laminar.core.records import State
from laminar.errors import LaminarError
from laminar.replay.recording import Life, Place, Recording


def state_of(recording: Recording) -> tuple[State | None, str]:
    """The state at the end of the last life, as far as this Laminar can tell, and what is missing, for people."""
    life = recording.life()
    found = _last_snapshot(recording, life)
    if found is None:
        return None, "no snapshot of the controller's state can be read: the ledger is not known"
    place, body = found
    try:
        core = Core.restore(recording.settings(life), body)
    except (LaminarError, msgspec.MsgspecError) as error:
        state = _undecided(body)
        return state, f"{'as of event ' + str(place[1]) if state else 'the ledger is not known'}: {error}"
    return _follow(recording, life, place, core)


def _last_snapshot(recording: Recording, life: Life) -> tuple[Place, bytes] | None:
    query = "SELECT boot, seq, body, crc FROM snapshots WHERE boot BETWEEN ? AND ? ORDER BY boot DESC, seq DESC"
    for boot, seq, body, crc in recording.query(query, *life.span):
        if checksum(seq, body) == crc:
            try:
                return (boot, seq), bytes(msgspec.msgpack.decode(body, type=Snapshot).core)
            except msgspec.MsgspecError:
                continue
    return None


def _undecided(body: bytes) -> State | None:
    try:
        return snapshot.decode(body)
    except msgspec.MsgspecError:
        return None


def _follow(recording: Recording, life: Life, place: Place, core: Core) -> tuple[State, str]:
    while True:
        found, damage = recording.after(life, place)
        for recorded in found:
            try:
                core.handle(recorded.event)
            except Exception as error:  # noqa: BLE001 - another Laminar's event may make this core raise anything
                return (
                    core.state,
                    f"as of event {place[1]}: the next one makes this core raise {type(error).__name__}: {error}",
                )
            place = recorded.boot, recorded.event.seq
        if damage or not found:
            return core.state, f"as of event {place[1]}: {damage}" if damage else ""
