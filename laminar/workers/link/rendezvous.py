"""Files that say where the controller is: one in the run's directory, one that the worker's supervisor has on its own host.

A worker sees the first only where the directory is shared, and has the second only if it was started by ssh.
"""

import contextlib
import os
from pathlib import Path

from laminar import wire


def candidates() -> list[str]:
    """URLs where the controller may have come back."""
    found = map(_read, (wire.RENDEZVOUS_VARIABLE, wire.HOST_RENDEZVOUS_VARIABLE))
    return [url for url in found if url]


def by_supervisor() -> str:
    """Where the last controller is that spoke to the supervisor; empty = there is none."""
    return _read(wire.HOST_RENDEZVOUS_VARIABLE)


def tell_supervisor() -> None:
    """That the worker hears a controller, should the supervisor have lost its own connection to one."""
    with contextlib.suppress(OSError):
        os.utime(os.environ.get(wire.HOST_RENDEZVOUS_VARIABLE, ""))


def _read(variable: str) -> str:
    try:
        return Path(os.environ.get(variable, "")).read_text().strip().rstrip("/")
    except (OSError, ValueError):
        return ""
