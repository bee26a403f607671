"""Text streams for logs: what cannot be written is dropped, because a full disk under a log is no reason to stop."""

import contextlib
from typing import Any, TextIO


class Lossy:
    """`file`, whose writes and flushes do not fail. Python's own buffer keeps some lines until the disk takes them again."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """All of it, as far as anybody is told."""
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """As far as the disk takes it."""
        with contextlib.suppress(OSError):
            self._file.flush()

    def close(self) -> None:
        """After a last try."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
