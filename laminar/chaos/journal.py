"""What was done to a run, beside its database: `chaos.jsonl`, a line per fault when it strikes, and another when it is over."""

import errno
import os
from pathlib import Path
from typing import Any

import msgspec

from laminar.errors import ConfigError

NAME = "chaos.jsonl"


class Strike(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One fault as it came about."""

    number: int
    kind: str
    target: str
    at: float
    """Seconds since the epoch."""
    until: float = 0.0
    """When it was undone; 0 = it is not."""
    workers: list[str] = []
    """Who was hit."""
    facts: dict[str, Any] = {}
    """What its signs depend on."""
    skipped: str = ""
    """Why it did not strike."""
    stuck: str = ""
    """Why it could not be undone."""


class Journal:
    """Appends to the file of a run. A full disk delays a line, it does not lose it."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        self.unwritten: list[bytes] = []
        """Lines that the disk has not taken."""

    def write(self, strike: Strike) -> None:
        """Add a line: the last of a fault counts."""
        self.unwritten.append(msgspec.json.encode(strike) + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what a full disk has refused so far: all of it, or nothing."""
        data = b"".join(self.unwritten)
        try:
            with self.path.open("ab", buffering=0) as file:
                begin = file.seek(0, os.SEEK_END)
                if file.write(data) != len(data):
                    file.truncate(begin)
                    raise OSError(errno.ENOSPC, "a part of it was taken")
        except OSError:
            return
        self.unwritten.clear()


def read(run: Path) -> list[Strike]:
    """All faults of a run, in the order in which they struck. Raises ConfigError."""
    try:
        lines = (run / NAME).read_bytes().splitlines()
        strikes = [msgspec.json.decode(line, type=Strike) for line in lines if line.strip()]
    except FileNotFoundError:
        raise ConfigError(f"{run} has no {NAME}: no faults were injected there by laminar.chaos") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{run / NAME} cannot be read: {error}") from error
    last = {(strike.number, strike.at): strike for strike in strikes}
    return sorted(last.values(), key=lambda strike: strike.at)
