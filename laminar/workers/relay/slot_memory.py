"""The memory of all slots, as the event loop sees it: made for the first version, and backed with pages while that begins.

Allocation and first touch of pages go on in threads. Each slot is waited for alone, so that the first version need not wait for the
pages of the others.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from laminar.workers.relay.protocol import RelayError
from laminar.workers.relay.slot_files import SlotFiles
from laminar.workers.relay.slots import Slot


class SlotMemory:
    """`free`: bytes that the directory still takes. `threads` run what is slow."""

    def __init__(self, directory: Path, num_slots: int, free: Callable[[Path], int], threads: Executor) -> None:
        self._directory, self._num_slots, self._free, self._threads = directory, num_slots, free, threads
        self.files: SlotFiles | None = None
        """None until `allocate`."""
        self._prefaulted: list[asyncio.Future[None]] = []

    @property
    def num_prefaulted(self) -> int:
        """Slots whose pages are all backed."""
        return sum(future.done() for future in self._prefaulted)

    @property
    def capacity_bytes(self) -> int:
        """Of each slot; 0 until `allocate`."""
        return self.files.capacity_bytes if self.files is not None else 0

    def stop(self) -> None:
        """What goes on in threads ends early."""
        if self.files is not None:
            self.files.stop.set()

    def close(self) -> None:
        """Unmap. The files stay."""
        if self.files is not None:
            self.files.close()

    async def allocate(self, capacity_bytes: int) -> SlotFiles:
        """Make the files of all slots; `prefault` is to follow. Raises RelayError when there is no space."""
        files = SlotFiles(self._directory, self._num_slots, capacity_bytes)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, files.allocate, self._free)
        self._prefaulted = [loop.create_future() for _ in range(self._num_slots)]
        self.files = files
        return files

    async def prefault(self) -> None:
        """Back the pages of one slot after another."""
        assert self.files is not None
        for index, backed in enumerate(self._prefaulted):
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, self.files.prefault, index)
            except OSError as error:
                backed.set_exception(error)
                backed.exception()  # retrieved, also if no version ever comes to this slot
            else:
                backed.set_result(None)

    async def backed(self, slot: Slot) -> None:
        """Wait until the slot's pages are there. Raises RelayError if they cannot be had."""
        try:
            await asyncio.shield(self._prefaulted[slot.index])
        except OSError as error:
            raise RelayError(
                f"the pages of slot {slot.index} cannot be backed: {error}; free memory on this host"
            ) from error

    def view(self, slot: Slot) -> memoryview:
        """The bytes of the version in it, read-only."""
        assert self.files is not None
        return self.files.view(slot.index, slot.num_bytes)

    def writable(self, slot: Slot) -> memoryview:
        """The bytes of the version in it, for what comes from another relay, or of a delta."""
        assert self.files is not None
        return self.files.writable(slot.index, slot.num_bytes)
