"""Watches the controller's own event loop: while it stands still nobody decides, and nothing in it can say so.

A thread of `faulthandler`, which needs neither the loop nor the interpreter's lock, writes the stacks of all threads down when the
loop has not come by for BLOCKED_S. Once it comes by again, people are told for how long it stood still, and where to look.
"""

import asyncio
import contextlib
import faulthandler
import os
import time
from collections.abc import Callable
from pathlib import Path

FILE = "controller-blocked.log"
BEAT_S = 1.0
BLOCKED_S = 5.0  # far more than any step of the controller takes, far less than it takes workers to give it up
FILE_BYTES_MAX = 4 << 20  # some hundred dumps; then only the alarms are left


class LoopWatch:
    """`blocked(seconds)` is called on the loop after it stood still."""

    def __init__(self, logs: Path, blocked: Callable[[float], None]) -> None:
        """OSError if the file cannot be made."""
        self.path = logs / FILE
        self._file = self.path.open("ab")
        self._blocked = blocked

    async def run(self) -> None:
        """For ever."""
        while True:
            if os.fstat(self._file.fileno()).st_size < FILE_BYTES_MAX:
                faulthandler.dump_traceback_later(BLOCKED_S, file=self._file)
            before = time.monotonic()
            await asyncio.sleep(BEAT_S)
            stood_s = time.monotonic() - before - BEAT_S
            if stood_s > BLOCKED_S - BEAT_S:
                self._blocked(stood_s)

    def close(self) -> None:
        """Nothing is written any more; an empty file is removed."""
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            self._file.close()
            if not self.path.stat().st_size:
                self.path.unlink()
