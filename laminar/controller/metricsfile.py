"""`metrics.jsonl` says the same as the table `metrics` when a controller begins: rows commit with the step's event, lines do not.

A line is written at once, so a controller that was killed may leave the line of a step that the log does not know (it is reported,
and written, again), and a full disk may have taken a row and not the line.
"""

import contextlib
import os
import sqlite3
from pathlib import Path

import msgspec


def agree(path: Path, database: Path, resumed_step: int) -> None:
    """Leave one line for each step of the table, in order: the last there was, else one made of the table. Raises OSError.

    Lines of steps up to `resumed_step` stay, if the table has them or not: it may have begun anew after a damage.
    """
    old = path.read_bytes() if path.exists() else b""
    known = _lines(old)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        steps = {row[0] for row in connection.execute("SELECT DISTINCT step FROM metrics")}
        steps |= {step for step in known if step <= resumed_step}
        lines = [known.get(step) or _line(connection, step) for step in sorted(steps)]
    new = b"".join(line + b"\n" for line in lines)
    if new != old:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(new)
        os.replace(temporary, path)


def _lines(data: bytes) -> dict[int, bytes]:
    """The last whole line of each step."""
    found = {}
    for line in data.splitlines():
        with contextlib.suppress(msgspec.MsgspecError, KeyError, TypeError):
            found[int(msgspec.json.decode(line)["step"])] = line
    return found


def _line(connection: sqlite3.Connection, step: int) -> bytes:
    """As `laminar.controller.telemetry` writes it: a step ends when its trajectories are trained."""
    rows = connection.execute("SELECT name, value FROM metrics WHERE step = ?", (step,)).fetchall()
    (at,) = connection.execute("SELECT max(trained_at) FROM trajectories WHERE step = ?", (step,)).fetchone()
    return msgspec.json.encode({"step": step, "at": at, **dict(rows)})
