"""One controller per run: `run.lock` beside the database, held for the life of the process (flock, so it dies with it).

Across machines it works where the file system carries such locks; where it does not, boot numbers fence off the older controller
(`laminar.controller.eventlog`).
"""

import fcntl
import os
import socket
from pathlib import Path

from laminar.errors import StartError


class RunLock:
    """Of the run with this database."""

    def __init__(self, database: Path) -> None:
        self._path, self._run = database.with_suffix(".lock"), database.parent
        self._holder = ""
        self._file = -1
        self.last_boot = 0
        """Highest boot that was noted; for a run whose database is lost."""

    @property
    def is_held(self) -> bool:
        """By us."""
        return self._file >= 0

    def take(self, pid: int, host: str) -> None:
        """For the process `pid` on `host`. Raises StartError if another has it, or locks do not work there."""
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 256, 0).decode(errors="replace").strip() or "another process"
            self.release()
            raise StartError(
                f"the run {self._run} is in use by the controller {holder}; stop that one, or choose another run.name"
            ) from None
        except OSError as error:
            self.release()
            raise StartError(
                f"cannot lock the run with {self._path}: {error.strerror}; its directory must be there and yours to write"
            ) from error
        if not _locks_work(self._path):
            self.release()
            raise StartError(
                f"the file system of {self._run} has no working locks (flock), so two controllers could write one run; "
                "choose a local one with run.dir"
            )
        _, _, boot = os.pread(self._file, 256, 0).decode(errors="replace").rpartition("boot ")
        self.last_boot = int(boot) if boot.strip().isdecimal() else 0
        self._holder = f"with pid {pid} on {host}"
        self.note(self.last_boot)

    def note(self, boot: int) -> None:
        """Which boot of the run this is."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{self._holder}, boot {boot}\n".encode(), 0)

    def check(self) -> None:
        """That it can be taken. Raises as `take`."""
        self.take(os.getpid(), socket.gethostname())
        self.release()

    def release(self) -> None:
        """Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _locks_work(path: Path) -> bool:
    """Whether a file that is locked cannot be locked again."""
    second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(second)
    return False
