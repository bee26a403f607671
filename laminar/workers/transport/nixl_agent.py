"""The NIXL library as one process uses it: memory that others may read, other processes' memory, and what was read of ours.

Invariants:
* One thread at a time is inside the library, and no call waits.
* A mapping is registered once: that takes seconds where its pages must be pinned. It stays so while the process lives.
"""

import contextlib
import logging
import mmap
import secrets
import struct
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from nixl_cu12 import _bindings, nixl_agent, nixl_agent_config

logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells every start on stdout

NOTICE = struct.Struct("<QQ")
"""A link's mark, and how many bytes of what it offered were read."""
CLOSE_LIMIT_S = 2.0  # for a read to end after the other process was cut off
INFINIBAND = Path("/sys/class/infiniband")
ERRORS = tuple(
    getattr(_bindings, name) for name in dir(_bindings) if name.startswith("nixl") and name.endswith("Error")
)


def has_rdma() -> bool:
    """Whether a card of this host has an active port. (The library does not tell what it uses.)"""
    return any(state.read_text().startswith("4:") for state in INFINIBAND.glob("*/ports/*/state"))


def address_of(view: memoryview) -> int:
    """Where it lies in this process."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Region(NamedTuple):
    """A mapping that the library knows."""

    mapping: mmap.mmap
    """Held, so that its address means nothing else."""
    metadata: bytes
    """By which another process may read it."""


class Agent:
    """Any thread. Raises ERRORS for what the library refuses."""

    def __init__(self) -> None:
        # Without its progress thread, which would keep a core busy: whoever waits lets it progress.
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._library = nixl_agent(secrets.token_hex(16), config)
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        """By the identity of their mapping."""
        self._read: dict[int, int] = {}
        """Bytes of ours that were read and not yet told to the link of this mark."""
        self._reading: dict[int, Any] = {}
        """Handle of the read that goes on, by the link's mark."""
        self._num_links: dict[str, int] = {}
        """To each other process."""

    def introduction(self) -> bytes:
        """By which another process may reach this one."""
        with self._lock:
            return bytes(self._library.get_agent_metadata())

    def region(self, view: memoryview) -> Region:
        """Of the mapping that the view is a part of."""
        mapping = view.obj
        assert isinstance(mapping, mmap.mmap)
        with self._lock:
            if id(mapping) not in self._regions:
                place = (address_of(memoryview(mapping)), len(mapping), 0, "")
                known = self._library.register_memory([place], mem_type="DRAM")
                metadata = bytes(self._library.get_partial_agent_metadata(known, inc_conn_info=True))
                self._regions[id(mapping)] = Region(mapping, metadata)
            return self._regions[id(mapping)]

    def meet(self, introduction: bytes, mark: int) -> str:
        """The other process's name, for a link whose notices carry this mark."""
        with self._lock:
            name: str = self._library.add_remote_agent(introduction)
            self._num_links[name] = self._num_links.get(name, 0) + 1
            self._read[mark] = 0
            return name

    def learn(self, metadata: bytes) -> None:
        """Of a region of a process that was met."""
        with self._lock:
            self._library.add_remote_agent(metadata)

    def part(self, name: str, mark: int) -> None:
        """A link is over (again: no matter). The other process is forgotten with the last one, and if this one was reading."""
        with self._lock:
            if self._read.pop(mark, None) is None:
                return
            self._num_links[name] -= 1
            if not self._num_links[name]:
                del self._num_links[name]
            if name not in self._num_links or mark in self._reading:
                self._forget(name)

    def begin(self, name: str, mark: int, address: int, view: memoryview, notice: bytes) -> None:
        """Begin to read from there into `view`, a part of a region; `end` is to follow. One read of a link at a time."""
        with self._lock:
            if mark not in self._read:
                raise _bindings.nixlNotFoundError("the link is over")
            here = self._library.get_xfer_descs([(address_of(view), view.nbytes, 0)], mem_type="DRAM")
            there = self._library.get_xfer_descs([(address, view.nbytes, 0)], mem_type="DRAM")
            self._reading[mark] = reading = self._library.initialize_xfer("READ", here, there, name, notice)
            self._library.transfer(reading)

    def has_read(self, mark: int) -> bool:
        """Whether the link's read is done; lets it progress. Raises one of ERRORS when it failed."""
        with self._lock:
            state = self._state(mark)
        if state == "ERR":
            raise _bindings.nixlBackendError("the read failed")
        return state == "DONE"

    def end(self, name: str, mark: int) -> None:
        """The link's read, if there is one, writes nothing any more: one that goes on is ended by cutting the other process off."""
        with self._lock:
            goes_on = self._state(mark) == "PROC"
            if (
                goes_on and mark in self._read
            ):  # else `part` has done it, and another link may have met the process since
                self._forget(name)
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while goes_on and time.monotonic() < deadline:
            time.sleep(0.001)
            with self._lock:
                goes_on = self._state(mark) == "PROC"
        with self._lock, contextlib.suppress(KeyError, *ERRORS):  # there was none, or it could not be ended
            self._reading.pop(mark).release()

    def _state(self, mark: int) -> str:
        """``PROC`` while it goes on, ``DONE``; ``ERR`` also if there is none."""
        try:
            return str(self._library.check_xfer_state(self._reading[mark]))
        except (KeyError, *ERRORS):
            return "ERR"

    def take_read(self, mark: int) -> int:
        """Bytes that were read since the last call of what this link offered."""
        with self._lock:
            for notices in self._library.get_new_notifs().values():
                for notice in notices:
                    self._count(notice)
            taken = self._read.get(mark, 0)
            if taken:
                self._read[mark] = 0
            return taken

    def _count(self, notice: bytes) -> None:
        if len(notice) == NOTICE.size:
            mark, num_bytes = NOTICE.unpack(notice)
            if mark in self._read:
                self._read[mark] += num_bytes

    def _forget(self, name: str) -> None:
        with contextlib.suppress(ERRORS):  # it was cut off before
            self._library.remove_remote_agent(name)
