"""What a recorded run is compared with when it is replayed: what each boot's core was made of, and what it answered to each event.

An answer is a word per action, ``StartGroup:1f3a90c2``, with the CRC-32 of its msgpack; then one per decision that was held,
``held.TakeBatch:…``. Events with an empty answer, most of them, have no row. An answer commits with its event.
"""

import zlib
from functools import cache
from pathlib import Path

import msgspec

import laminar.core
import laminar.ids
from laminar.controller.schema import Statement
from laminar.core.actions import AnyAction
from laminar.core.decisions import AnyDecision
from laminar.core.records import State
from laminar.core.settings import Settings

_encode = msgspec.msgpack.Encoder().encode


def answer(state: State, new: list[AnyAction], num_decisions: int) -> str:
    """To the event that was just handled. `num_decisions`: of the state before it."""
    words = [f"{type(action).__name__}:{zlib.crc32(_encode(action)):08x}" for action in new]
    if state.num_decisions > num_decisions:
        held = held_since(state, num_decisions)
        words += [f"held.{type(decision).__name__}:{zlib.crc32(_encode(decision)):08x}" for decision in held]
    return " ".join(words)


def held_since(state: State, num_decisions: int) -> list[AnyDecision]:
    """Decisions that are held, of those after the first `num_decisions`."""
    return [held.decision for number, held in state.held.items() if number > num_decisions]


def beginning(boot: int, settings: Settings, data_state: bytes) -> Statement:
    """The row of a boot. `data_state`: what the checkpoint carried from which it goes on; empty = it began anew or took over."""
    return "INSERT INTO cores VALUES (?, ?, ?, ?)", (boot, _encode(settings), data_state, code())


@cache
def code() -> str:
    """CRC-32 of the core's source: cores with the same one answer the same; empty if there is no source to read."""
    try:
        files = [*sorted(Path(laminar.core.__path__[0]).glob("*.py")), Path(laminar.ids.__file__)]
        return f"{zlib.crc32(b''.join(file.read_bytes() for file in files)):08x}"
    except OSError:
        return ""
