"""The token store: what the trajectories in flight, buffered and leased consist of, in memory and on disk.

Every flush appends its tokens to the open segment `tokens/<boot>-<n>.seg` (frames of 4-byte length + msgpack `Entry`); a
segment is closed at SEGMENT_BYTES and unlinked when everything in it is forgotten. The event log syncs the segments
before it commits the events that speak of them.

The core holds lengths and handles only; what it says about attempts is checked here: a delta must continue what is held.
"""

import os
import struct
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path

import msgspec

from laminar import wire
from laminar.errors import ProtocolError
from laminar.ids import GroupId, TrajectoryId

SEGMENT_BYTES = 64 << 20  # large enough that files are few, small enough that forgetting frees disk soon


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One delta on disk: response tokens [start, start + n) of an attempt; group 0 = response, else a prompt's tokens."""

    trajectory: int
    attempt: int
    start: int
    tokens: bytes
    logprobs: bytes
    sources: bytes
    group: int = 0


class Response(msgspec.Struct):
    """One trajectory's response so far."""

    group: GroupId
    attempt: int
    tokens: bytearray
    logprobs: bytearray
    sources: bytearray
    """One byte per token; empty while all are the model's own."""
    segments: dict[int, None]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class Segment(msgspec.Struct):
    """One file and how many trajectories still need it."""

    path: Path
    users: dict[int, None]
    num_bytes: int = 0


class TokenStore:
    """Called from the event loop; `sync` from the log's writer thread; `rows` from any thread."""

    def __init__(self, directory: Path, boot: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._boot = boot
        self._responses: dict[int, Response] = {}
        self._prompts: dict[int, bytes] = {}
        self._group_sizes: dict[int, int] = {}
        self._segments: dict[int, Segment] = {}
        self._open = 0
        self._outgoing: list[bytes] = []
        self._lock = threading.Lock()
        self._file = -1
        self._new_segment()

    # ---- writing -------------------------------------------------------------------------------------------

    def start(self, trajectory: TrajectoryId, attempt: int, group: GroupId, resume: bool) -> None:
        """An attempt begins; without `resume` what earlier attempts left is void."""
        response = self._responses.get(trajectory)
        if response is None:
            self._group_sizes[group] = self._group_sizes.get(group, 0) + 1
            response = Response(group, attempt, bytearray(), bytearray(), bytearray(), {})
            self._responses[trajectory] = response
        elif not resume:
            response.tokens, response.logprobs, response.sources = bytearray(), bytearray(), bytearray()
        response.attempt = attempt

    def put_prompt(self, group: GroupId, tokens: bytes) -> None:
        """The tokens of a group's prompt (i32)."""
        self._prompts[group] = tokens
        self._persist(Entry(0, 0, 0, tokens, b"", b"", group), ())

    def take(self, report: wire.RolloutReport) -> None:
        """All deltas of a report. Raises ProtocolError for arrays that do not fit together."""
        ids, attempts = wire.unpack_i64(report.trajectories), wire.unpack_i32(report.attempts)
        totals, news = wire.unpack_i32(report.num_tokens), wire.unpack_i32(report.num_new)
        if not len(ids) == len(attempts) == len(totals) == len(news) or 4 * sum(news) != len(report.tokens):
            raise ProtocolError("the arrays of a report do not fit together")
        position = 0
        for trajectory, attempt, total, num in zip(ids, attempts, totals, news, strict=True):
            end = position + num
            if num:
                part = slice(4 * position, 4 * end)
                sources = report.sources[position:end]
                self.append(
                    TrajectoryId(trajectory), attempt, total, report.tokens[part], report.logprobs[part], sources
                )
            position = end

    def append(
        self, trajectory: TrajectoryId, attempt: int, total: int, tokens: bytes, logprobs: bytes, sources: bytes
    ) -> None:
        """New tokens after which the response has `total`. Raises ProtocolError unless they continue what is held."""
        response = self._responses.get(trajectory)
        if response is None or response.attempt != attempt:
            return  # an old attempt's last words
        start = total - len(tokens) // 4
        if start != response.num_tokens or len(logprobs) != len(tokens):
            raise ProtocolError(
                f"trajectory {trajectory}: a delta starts at token {start}, but {response.num_tokens} are held"
            )
        response.tokens += tokens
        response.logprobs += logprobs
        if sources or response.sources:
            response.sources += b"\0" * (start - len(response.sources))
            response.sources += sources or b"\0" * (len(tokens) // 4)
        self._persist(Entry(trajectory, attempt, start, tokens, logprobs, sources), (trajectory,))
        response.segments[self._open] = None

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Their tokens are not needed again; segments that nobody needs are unlinked."""
        for trajectory in trajectories:
            response = self._responses.pop(trajectory, None)
            if response is None:
                continue
            self._leave_group(response.group)
            for number in response.segments:
                segment = self._segments[number]
                segment.users.pop(trajectory, None)
                self._unlink_if_done(number, segment)

    def _leave_group(self, group: GroupId) -> None:
        left = self._group_sizes.pop(group) - 1
        if left:
            self._group_sizes[group] = left
        else:
            self._prompts.pop(group, None)

    # ---- reading -------------------------------------------------------------------------------------------

    def prefix(self, trajectory: TrajectoryId) -> tuple[bytes, bytes]:
        """(tokens, log-probs) received so far."""
        response = self._responses.get(trajectory)
        return (bytes(response.tokens), bytes(response.logprobs)) if response else (b"", b"")

    def rows(self, trajectories: Iterable[TrajectoryId]) -> list[wire.TokenRow]:
        """What a trainer rank fetches. KeyError for a trajectory that is not held."""
        rows = []
        for trajectory in trajectories:
            response = self._responses[trajectory]
            prompt = self._prompts[response.group]
            rows.append(
                wire.TokenRow(
                    trajectory, prompt, bytes(response.tokens), bytes(response.logprobs), bytes(response.sources)
                )
            )
        return rows

    def tokens(self, trajectory: TrajectoryId) -> list[int]:
        """The response's token ids, for people."""
        response = self._responses.get(trajectory)
        return array("i", response.tokens).tolist() if response else []

    @property
    def num_bytes(self) -> int:
        """Memory held by responses, bytes."""
        return sum(len(r.tokens) + len(r.logprobs) + len(r.sources) for r in self._responses.values())

    # ---- disk ----------------------------------------------------------------------------------------------

    def _persist(self, entry: Entry, users: tuple[int, ...]) -> None:
        body = wire.encode(entry)
        segment = self._segments[self._open]
        segment.users.update(dict.fromkeys(users))
        segment.num_bytes += len(body) + 4
        with self._lock:
            self._outgoing.append(struct.pack("<I", len(body)) + body)
        if segment.num_bytes > SEGMENT_BYTES:
            self.sync()
            self._new_segment()

    def sync(self) -> None:
        """Everything handed over so far is on disk when this returns."""
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
            if outgoing:
                data = memoryview(b"".join(outgoing))
                while data:
                    data = data[os.write(self._file, data) :]
                os.fdatasync(self._file)

    def _new_segment(self) -> None:
        old = self._open
        self._open += 1
        path = self._directory / f"{self._boot:04d}-{self._open:06d}.seg"
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._segments[self._open] = Segment(path, {})
        if old:
            self._unlink_if_done(old, self._segments[old])

    def _unlink_if_done(self, number: int, segment: Segment) -> None:
        if not segment.users and number != self._open:
            segment.path.unlink(missing_ok=True)
            del self._segments[number]

    def close(self) -> None:
        """Sync and close the open segment."""
        self.sync()
        with self._lock:
            os.close(self._file)
            self._file = -1


def read_segment(path: Path) -> list[Entry]:
    """All whole entries of a segment, in order; a torn tail is left out."""
    data, entries, position = path.read_bytes(), [], 0
    while position + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, position)
        body = data[position + 4 : position + 4 + length]
        if len(body) < length:
            break
        entries.append(msgspec.msgpack.decode(body, type=Entry))
        position += 4 + length
    return entries
