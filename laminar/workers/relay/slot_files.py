"""The files behind the slots: plain files under /dev/shm, made once at capacity, backed at once, and recycled.

Invariant: all pages of a file are reserved before anybody maps it, so a full /dev/shm is an error here and never a
SIGBUS later. First touch of fresh pages costs tens of warm writes, so `prefault` backs them before the first writer.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from laminar.workers.relay.manifest import BLOCK_BYTES
from laminar.workers.relay.protocol import RelayError

ALLOCATE_BYTES = 256 << 20  # per fallocate call (about 0.1 s): between two of them a stop is noticed


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still allocate on the file system of `directory`."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def slot_name(index: int) -> str:
    """Of its file."""
    return f"slot-{index}"


class SlotFiles:
    """All slot files of one relay. Methods block: the daemon calls them in a thread."""

    def __init__(self, directory: Path, num_slots: int, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.names = [slot_name(index) for index in range(num_slots)]
        self._directory = directory
        self._maps: list[mmap.mmap] = []
        self.stop = threading.Event()
        """Set it to make running calls end early; the slots are of no use then."""

    def allocate(self, free: Callable[[Path], int] = free_bytes) -> None:
        """Make the files and reserve their pages. On a RelayError (no space) nothing is left behind."""
        needed, available = len(self.names) * self.capacity_bytes, free(self._directory)
        if needed > available:
            raise RelayError(self._no_space(available))
        try:
            for name in self.names:
                self._reserve(self._directory / name)
        except OSError as error:
            self.close()
            for name in self.names:
                (self._directory / name).unlink(missing_ok=True)
            raise RelayError(f"{self._no_space(free(self._directory))} ({error.strerror})") from error

    def prefault(self, index: int) -> None:
        """Back all pages of one slot, before its first writer. Raises OSError."""
        # Writing zeros backs a page without mapping it, and without the GIL; a page fault costs more and holds it.
        zeros = bytes(BLOCK_BYTES)
        descriptor = os.open(self._directory / self.names[index], os.O_WRONLY)
        try:
            for start in range(0, self.capacity_bytes, BLOCK_BYTES):
                if self.stop.is_set():
                    return
                os.pwrite(descriptor, zeros[: self.capacity_bytes - start], start)
        finally:
            os.close(descriptor)

    def view(self, index: int, num_bytes: int) -> memoryview:
        """The first bytes of a slot, read-only."""
        return memoryview(self._maps[index]).toreadonly()[:num_bytes]

    def writable(self, index: int, num_bytes: int) -> memoryview:
        """The first bytes of a slot, for what comes from the neighbour upstream."""
        return memoryview(self._maps[index])[:num_bytes]

    def close(self) -> None:
        """Unmap; what a thread of the chain still looks at goes with that thread. The files stay: they go with the directory."""
        for mapping in self._maps:
            with contextlib.suppress(BufferError):
                mapping.close()
        self._maps.clear()

    def _reserve(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for start in range(0, self.capacity_bytes, ALLOCATE_BYTES):
                if self.stop.is_set():
                    return
                os.posix_fallocate(descriptor, start, min(ALLOCATE_BYTES, self.capacity_bytes - start))
            self._maps.append(mmap.mmap(descriptor, self.capacity_bytes))
        finally:
            os.close(descriptor)

    def _no_space(self, available: int) -> str:
        return (
            f"{self._directory}: the weights need {len(self.names)} slots x {self.capacity_bytes} bytes, "
            f"there are {available} bytes free; enlarge /dev/shm (docker: --shm-size, Kubernetes: an emptyDir with "
            f"medium Memory; else mount -o remount,size=…) or set relay.slots lower (at least 2)"
        )
