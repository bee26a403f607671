"""The relay's blocking client, for trainer ranks (publish) and rollouts (lease). Call it from a worker thread.

    client = RelayClient(directory)
    buffer = client.begin(version, manifest, rank, world_size)
    if buffer is not None:                       # None: superseded on every rank, go on training
        ... copy this rank's bytes into buffer ...
        client.commit(version)

    with client.lease(version) as lease:
        engine.load(lease.snapshot)

Invariants:
* Publications live on the client's one connection; every lease has a connection of its own, so that nothing but its
  release or the death of this process ends it.
* Every wait ends: at `timeout_s`, or later by what the request itself asks for, with a RelayError.
* Death of the relay neither stops nor corrupts a reader: its mapping stays, and no later relay writes to it.
"""

import contextlib
import mmap
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from laminar.errors import ProtocolError
from laminar.ids import Version
from laminar.wire import Neighbour
from laminar.workers.canary import Canary
from laminar.workers.relay import protocol
from laminar.workers.relay.digest import digest
from laminar.workers.relay.manifest import Manifest, Snapshot
from laminar.workers.relay.protocol import RelayError, Status
from laminar.workers.relay.slot_files import slot_name

__all__ = ["Lease", "RelayClient", "RelayError", "Status"]

CONNECT_RETRY_S = 0.02
REBUILD_BYTES_PER_S = 64 << 20  # a tenth of what one core does
PREFAULT_BYTES_PER_S = 64 << 20  # slowest first touch seen was 230 MiB/s; the first publication waits for it

_Reply = TypeVar("_Reply", bound=protocol.Reply)


class RelayClient:
    """Talks to the relay that serves `directory`. No I/O before the first request; reconnects when needed.

    `timeout_s` bounds the wait for the relay to appear (it may start in parallel) and for each of its answers.
    """

    def __init__(self, directory: Path | str, timeout_s: float = 30.0) -> None:
        self.directory = Path(directory)
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._connection: _Connection | None = None
        self._publications: dict[Version, tuple[int, memoryview]] = {}
        self._maps: dict[str, mmap.mmap] = {}

    def connect(self) -> None:
        """Wait until the relay listens. Raises RelayError after `timeout_s`."""
        with self._lock:
            if self._connection is None:
                self._connection = _Connection(self.directory, self._timeout_s)

    def begin(
        self,
        version: Version,
        manifest: Manifest,
        rank: int,
        world_size: int,
        *,
        ranges: bytes | None = None,
        publication: int = 0,
        num_here: int = 0,
        collector: Neighbour | None = None,
    ) -> memoryview | None:
        """A writable view of all bytes of the version, shared by the ranks of this host; each writes its own shards only.

        None = superseded: the same answer goes to every rank of this host. The view must not be written to after `commit`
        or `abandon`; a view of an earlier version is not erased. The options are as in `protocol.Begin`. Raises RelayError.
        """
        patience_s = manifest.num_bytes / PREFAULT_BYTES_PER_S
        request = protocol.Begin(
            version=version,
            manifest=manifest,
            rank=rank,
            world_size=world_size,
            ranges=ranges,
            publication=publication,
            num_here=num_here,
            collector=collector,
        )
        with self._lock:
            file = self._ask(request, protocol.Begun, patience_s).file
            if file is None:
                return None
            view = memoryview(self._map(file, manifest.num_bytes))[: manifest.num_bytes]
            self._publications[version] = (rank, view)
            return view

    def wrote(self, version: Version, num_ranges: int) -> None:
        """The first `num_ranges` of the ranges that `begin` was given are written and may be sent on. Raises RelayError."""
        with self._lock:
            rank, _ = self._publications[version]
            self._ask_here(protocol.Wrote(version=version, rank=rank, num_ranges=num_ranges), protocol.Done)

    def commit(self, version: Version, canary: Canary | None = None) -> None:
        """This rank's bytes are written. Returns at once; READY follows when all ranks committed and it is digested.

        The canary that one rank gives comes with every lease of the version.
        Raises RelayError if it is lost, or was not begun here.
        """
        with self._lock:
            rank = self._end_publication(version)
            self._ask_here(protocol.Commit(version=version, rank=rank, canary=canary), protocol.Done)

    def abandon(self, version: Version, reason: str = "no reason given") -> None:
        """Give a begun version up; it is lost for all ranks. Raises RelayError if it was not begun here."""
        with self._lock:
            rank = self._end_publication(version)
            self._ask_here(protocol.Abandon(version=version, rank=rank, reason=reason), protocol.Done)

    def lease(self, version: Version | None = None, *, verify: bool = False, wait_s: float = 0.0) -> "Lease":
        """Lease a READY version (None = the newest), waiting at most `wait_s` for it to become READY.

        `verify` computes the digest again, at about the cost of one more memcpy. It is off by default: the relay
        computed the digest from these very pages, and a leased slot is never written. Raises RelayError.
        """
        connection = _Connection(self.directory, self._timeout_s)
        try:
            request = protocol.Acquire(version=version, wait_s=wait_s)
            leased = connection.ask(request, protocol.Leased, self._timeout_s + wait_s + self._rebuilding_s())
            lease = Lease(connection, leased, self._timeout_s)
        except BaseException:
            connection.close()
            raise
        if verify:
            lease.verify()
        return lease

    def arrange(self, epoch: int, upstream: str | None, downstream: Neighbour | None, num_relays: int = 0) -> None:
        """Give a relay that stands alone its place in a chain of so many (0: not told). Raises RelayError."""
        place = protocol.Arrange(epoch=epoch, upstream=upstream, downstream=downstream, num_relays=num_relays)
        self._ask(place, protocol.Done)

    def retain(self, versions: list[Version]) -> None:
        """Have a relay that stands alone keep these old versions, and no others. Raises RelayError."""
        self._ask(protocol.Retain(versions=versions), protocol.Done)

    def status(self) -> Status:
        """Slots, their states, leases and bytes, now. Raises RelayError."""
        return self._ask(protocol.GetStatus(), Status)

    def close(self) -> None:
        """Hang up; publications that are not committed are lost. Leases go on. Safe to call twice."""
        with self._lock:
            self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: protocol.Request, expected: type[_Reply], patience_s: float = 0.0) -> _Reply:
        """Ask over a live connection, a new one if the relay has hung up since."""
        with self._lock:
            if self._connection is not None and self._connection.is_stale():
                self._hang_up()
            self.connect()
            return self._ask_here(request, expected, patience_s)

    def _ask_here(self, request: protocol.Request, expected: type[_Reply], patience_s: float = 0.0) -> _Reply:
        """Ask over the connection that the publications belong to."""
        assert self._connection is not None
        try:
            return self._connection.ask(request, expected, self._timeout_s + patience_s)
        finally:
            if self._connection.broken:
                self._hang_up()

    def _rebuilding_s(self) -> float:
        """What it may take the relay to make an old version of its delta."""
        try:
            return (self.directory / slot_name(0)).stat().st_size / REBUILD_BYTES_PER_S
        except OSError:
            return 0.0  # there are no slots yet

    def _map(self, file: str, num_bytes: int) -> mmap.mmap:
        """The slot, mapped once per connection: a second mapping would fault all its pages in again."""
        mapping = self._maps.get(file)
        if mapping is None:
            mapping = self._maps[file] = _map_slot(self.directory / file, num_bytes, mmap.MAP_SHARED, whole=True)
        return mapping

    def _end_publication(self, version: Version) -> int:
        if version not in self._publications:
            raise RelayError(f"{version} is not being published by this client: begin it first, commit it once")
        rank, view = self._publications.pop(version)
        _release(view)
        return rank

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for _, view in self._publications.values():
            _release(view)
        self._publications.clear()
        for mapping in self._maps.values():
            _unmap(mapping)
        self._maps.clear()


class Lease:
    """A READY version that stays whole until `release` (or the end of the `with` block)."""

    def __init__(self, connection: "_Connection", leased: protocol.Leased, timeout_s: float) -> None:
        self.version = leased.version
        self.digest = leased.digest
        self.canary = leased.canary
        self._connection, self._lease, self._timeout_s = connection, leased.lease, timeout_s
        # Copy-on-write: torch warns about read-only buffers, and so a stray write stays with the process that made it.
        num_bytes = leased.manifest.num_bytes
        path = connection.directory / leased.file
        self._mapping = _map_slot(path, num_bytes, mmap.MAP_PRIVATE, whole=False)
        self._view = memoryview(self._mapping)
        self.snapshot = Snapshot(leased.manifest, self._view, path=path, digest=leased.digest)

    @property
    def buffer(self) -> memoryview:
        """All bytes of the version. Never write."""
        return self._view

    def verify(self) -> None:
        """Compute the digest again. On a mismatch the relay is told, the lease ends and RelayError is raised."""
        found = digest(self._view)
        if found != self.digest:
            with contextlib.suppress(RelayError):  # a relay that is gone gives it to nobody
                self._connection.ask(protocol.Distrust(lease=self._lease), protocol.Done, self._timeout_s)
            self.release()
            raise RelayError(
                f"{self.version} in {self._connection.directory}: digest {found} instead of {self.digest}; the bytes "
                f"changed after the relay digested them (a writer that wrote after its commit?)"
            )

    def release(self) -> None:
        """End the lease; its tensors must not be used any more. Never raises: a relay that is gone holds no lease."""
        _release(self._view)
        _unmap(self._mapping)
        if self._connection.broken:
            return
        try:
            self._connection.ask(protocol.Release(lease=self._lease), protocol.Done, self._timeout_s)
        except RelayError:
            pass
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Connection:
    """One socket; a request and its reply at a time. After any failure but a refusal it is closed (`broken`)."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.directory = directory
        self.broken = False
        self._lock = threading.Lock()
        self._socket = _dial(directory / protocol.SOCKET_NAME, timeout_s)

    def ask(self, request: protocol.Request, expected: type[_Reply], timeout_s: float) -> _Reply:
        """The reply. Raises RelayError for a refusal, a wrong or malformed reply, a lost connection or a timeout."""
        what = type(request).__name__.lower()
        frame = protocol.encode(request)
        try:
            with self._lock:
                reply = self._exchange(frame, time.monotonic() + timeout_s)
        except TimeoutError as error:
            self.close()
            raise RelayError(
                f"the relay in {self.directory} did not answer {what} within {timeout_s:g} s; is it stopped or starved?"
            ) from error
        except (OSError, ProtocolError) as error:
            self.close()
            raise RelayError(f"the connection to the relay in {self.directory} broke in {what}: {error}") from error
        if isinstance(reply, protocol.Refusal):
            raise RelayError(reply.reason)
        if not isinstance(reply, expected):
            self.close()
            raise RelayError(f"the relay in {self.directory} answered {what} with {type(reply).__name__}")
        return reply

    def is_stale(self) -> bool:
        """The relay has hung up since the last reply (it was restarted, or died)."""
        self._socket.setblocking(False)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.broken = True
        self._socket.close()

    def _exchange(self, frame: bytes, deadline: float) -> protocol.Reply:
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(frame)
        length = protocol.body_length(self._receive(protocol.LENGTH.size, deadline))
        return protocol.decode_reply(self._receive(length, deadline))

    def _receive(self, num_bytes: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            self._socket.settimeout(_left(deadline))
            part = self._socket.recv(num_bytes - len(data))
            if not part:
                raise ConnectionResetError("the relay hung up (did it stop, or refuse this process? see its log)")
            data += part
        return bytes(data)


def _dial(path: Path, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        candidate = socket.socket(socket.AF_UNIX)
        try:
            candidate.settimeout(max(deadline - time.monotonic(), CONNECT_RETRY_S))
            candidate.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError) as error:
            candidate.close()
            if time.monotonic() >= deadline:
                raise RelayError(
                    f"no relay listens at {path} after {timeout_s:g} s ({error.strerror or error}); did it start?"
                ) from error
            time.sleep(CONNECT_RETRY_S)
        except OSError as error:
            candidate.close()
            raise RelayError(f"cannot connect to the relay at {path}: {error.strerror or error}") from error
        else:
            return candidate


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _map_slot(path: Path, num_bytes: int, flags: int, *, whole: bool) -> mmap.mmap:
    """Map the first `num_bytes`, or the `whole` file. A file that is too short would mean SIGBUS at some later read."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RelayError(f"{path}: {error.strerror}; was the relay stopped just now?") from error
    try:
        size = os.fstat(descriptor).st_size
        if size < num_bytes:
            raise RelayError(
                f"{path} has {size} bytes, the version has {num_bytes}: the slot was truncated; restart the relay"
            )
        return mmap.mmap(descriptor, size if whole else num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def _release(view: memoryview) -> None:
    with contextlib.suppress(BufferError):  # tensors over it are still alive; it goes with the last of them
        view.release()


def _unmap(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # as above
        mapping.close()
