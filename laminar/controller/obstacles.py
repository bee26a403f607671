"""What keeps a run from beginning anything new, watched from outside the core: the log's disk, the run's directory, open files.

    a cause appears ──► StorageFailed ──► the core begins nothing ──► all causes are gone ──► StorageRecovered

The log tells of its disk itself, whenever it writes. The directory and the number of open files are looked at every LOOK_S: a run
goes on for long with the files that it has open, and then cannot make a checkpoint, or take a connection.
"""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from laminar import descriptors

LOOK_S = 2.0
ANSWER_S = 30.0  # of the directory's file system; one over a network may hang without an error
SPARE_DESCRIPTORS = 64  # what a few connections, a process that is started, and SQLite open at once
CLEARABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
"""Errors that a person may clear while the run waits."""


class Obstacles:
    """`failed(reason)` and `recovered()` tell the core; `directories`: where files must be makeable."""

    def __init__(
        self, directories: list[Path], failed: Callable[[str], object], recovered: Callable[[], object]
    ) -> None:
        self._directories, self._failed, self._recovered = directories, failed, recovered
        self._reasons: dict[str, str] = {}
        self._probe: asyncio.Future[str] | None = None

    def set(self, cause: str, reason: str) -> None:
        """What is wrong with one of the causes; empty = nothing any more."""
        before = dict(self._reasons)
        if reason:
            self._reasons[cause] = reason
        else:
            self._reasons.pop(cause, None)
        if self._reasons and self._reasons != before:
            self._failed("; ".join(self._reasons.values()))
        elif before and not self._reasons:
            self._recovered()

    async def watch(self) -> None:
        """For ever: look at the directories and at the descriptors."""
        while True:
            self.set("directory", await self._look())
            self.set("descriptors", why_no_descriptors("descriptors" in self._reasons))
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> str:
        """In a thread, one at a time, for which nobody waits at the end: a file system that hangs must hold up nothing."""
        if self._probe is None:
            loop = asyncio.get_running_loop()
            self._probe = loop.create_future()
            threading.Thread(target=self._ask, args=(loop, self._probe), name="probe", daemon=True).start()
        done, _ = await asyncio.wait([self._probe], timeout=ANSWER_S)
        if not done:
            return f"nothing can be written: the file system of {self._directories[0]} does not answer"
        probe, self._probe = self._probe, None
        return probe.result()

    def _ask(self, loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[str]") -> None:
        found = why_unwritable(self._directories)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer.set_result, found)


def why_unwritable(directories: list[Path]) -> str:
    """Why no file can be made in one of them; empty = it can. What is no matter of the directory is left to others."""
    for directory in directories:
        path = directory / f".probe-{os.getpid()}"
        try:
            path.write_bytes(b"?")
            path.unlink()
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT):
                return f"nothing can be written: {directory}: {error.strerror}"
    return ""


def why_no_descriptors(was_short: bool) -> str:
    """Whether so many files and sockets are open that the next may fail; after a shortage, more have to be free again."""
    limit, num = descriptors.limit(), descriptors.used()
    if limit < 0 or limit - num >= SPARE_DESCRIPTORS * (2 if was_short else 1):
        return ""
    return f"no file or connection can be opened soon: {num} of {limit} are open (a higher `ulimit -n` before the start helps)"
