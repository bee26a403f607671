"""Watches the controller's own event loop: while it stands still nobody decides, and nothing in it can say so.

When the loop has not come by for BLOCKED_S, a thread writes down the stack of the loop's thread. A little later a thread of
`faulthandler`, which needs neither the loop nor the interpreter's lock, does so with all threads, of which it shows the newest
hundred. Once the loop comes by again, people are told for how long it stood still, and where to look.
"""

import asyncio
import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from laminar import stacks

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
        self._came_by = time.monotonic()
        self._over = threading.Event()

    async def run(self) -> None:
        """For ever."""
        args = (threading.get_ident(),)
        threading.Thread(target=self._look_at_loop, args=args, name="loopwatch", daemon=True).start()
        try:
            while True:
                if self._has_room():
                    faulthandler.dump_traceback_later(BLOCKED_S + BEAT_S / 2, file=self._file)
                self._came_by = before = time.monotonic()
                await asyncio.sleep(BEAT_S)
                stood_s = time.monotonic() - before - BEAT_S
                if stood_s > BLOCKED_S:
                    self._blocked(stood_s)
        finally:
            self._stop()

    def _look_at_loop(self, loop_thread: int) -> None:
        """In a thread, until nobody watches any more."""
        told = 0.0
        while not self._over.wait(max(BEAT_S, self._came_by + BLOCKED_S - time.monotonic())):
            came_by = self._came_by
            if came_by != told and time.monotonic() - came_by >= BLOCKED_S:
                told = came_by
                self._write(stacks.of_thread(loop_thread))

    def _write(self, lines: list[str]) -> None:
        text = "\n".join(["The thread of the event loop, which stands still:", *(f"  {line}" for line in lines)])
        with contextlib.suppress(OSError, ValueError):  # a full disk; closed meanwhile
            if self._has_room():
                self._file.write(f"{text}\n\n".encode())
                self._file.flush()

    def _has_room(self) -> bool:
        return os.fstat(self._file.fileno()).st_size < FILE_BYTES_MAX

    def _stop(self) -> None:
        """Nobody comes by any more: that is no standstill."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Nothing is written any more; an empty file is removed."""
        self._stop()
        with contextlib.suppress(OSError):
            self._file.close()
            if not self.path.stat().st_size:
                self.path.unlink()
