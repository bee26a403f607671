"""The token store: what the trajectories in flight, buffered and leased consist of, in memory and on disk.

Every flush appends its tokens to the open segment `tokens/<boot>-<n>.seg` (`laminar.controller.segments`); a segment is
closed at SEGMENT_BYTES and unlinked when all groups that have something in it are forgotten. The event log syncs the
segments before it commits the events that speak of them, and commits with those how long each segment is (table `segments`).

Invariants:
* A delta continues what is held of its attempt, or it is refused; the core's lengths are those of this store.
* The event loop never waits for the disk: it hands bytes over, `sync` writes them in the log's thread.
* `rows` sees each response as it is between two deltas.
* Every segment of the table `segments` is there, whole up to the length given there: it leaves the table first, then the disk.
"""

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from laminar import wire
from laminar.controller.schema import Statement, checksum
from laminar.controller.segments import Deltas, Entry, Past, Record, encode
from laminar.core.records import Trajectory
from laminar.errors import ProtocolError, StartError
from laminar.ids import GroupId, TrajectoryId, format_id

SEGMENT_BYTES = 64 << 20  # large enough that files are few, small enough that forgetting frees disk soon


class Response(msgspec.Struct, gc=False):
    """One trajectory's response so far."""

    group: GroupId
    attempt: int
    tokens: bytearray
    logprobs: bytearray
    sources: bytearray
    """One byte per token; empty while all are the model's own."""
    prompt: bytes | None = None
    """i32; None = its group's."""
    segment: int = 0
    """The last that has something of it; 0 = of an earlier boot, or none."""


class Held(msgspec.Struct):
    """What the siblings of a group share."""

    num_responses: int = 0
    prompt: bytes | None = None
    """i32; None = not reported yet."""
    segments: dict[int, None] = {}


class Segment(msgspec.Struct):
    """One file and the groups that still need it."""

    path: Path
    file: int
    users: dict[int, None] = {}
    num_bytes: int = 0
    """Handed over, not necessarily written."""


class TokenStore:
    """Called from the event loop; `sync` and `committed` from the log's writer thread; `rows` from any thread."""

    def __init__(self, directory: Path, boot: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._boot = boot
        self._responses: dict[int, Response] = {}
        self._groups: dict[int, Held] = {}
        self._segments: dict[int, Segment] = {}
        self._open = self._num_kept = 0
        """Numbers of the segment that is written to, and of those of earlier boots (-1, -2 …)."""
        self._lock = threading.Lock()
        """Held for moments: over `_outgoing`, `_full`, `_done` and the arrays of a response."""
        self._disk = threading.RLock()
        """Held by whoever writes."""
        self._outgoing: list[tuple[int, bytes]] = []
        """(file, bytes) that are not written yet."""
        self._full: list[int] = []
        """Files to close once they are written."""
        self._done: dict[Path, None] = {}
        """To be unlinked once the log does not name them any more."""
        self._synced: dict[str, int] = {}
        """Segments that grew since the last commit -> bytes on disk."""
        self._names: dict[int, str] = {}
        """Of the files that are open."""
        self._leaving: list[Path] = []
        """Those of `_done` that the transaction under way takes out of the log."""
        self._new_segment()

    # ---- going on ------------------------------------------------------------------------------------------

    def adopt(
        self, past: Past, trajectories: Iterable[Trajectory], trained: Iterable[Trajectory] = ()
    ) -> list[TrajectoryId]:
        """Hold what earlier boots wrote of these; segments that none needs are unlinked. Raises StartError if some is lost.

        Of `trained` ones, which nothing but the archive needs, some may be lost: those that are held.
        """
        for record in trajectories:
            self._hold(past, record)
        held = []
        for record in trained:
            with contextlib.suppress(StartError):
                self._hold(past, record)
                held.append(record.id)
        for path, members in past.trajectories.items():
            groups = [self._responses[t].group for t in members if t in self._responses]
            users = {group: None for group in [*groups, *past.groups[path]] if group in self._groups}
            self._keep(path, users, past.num_whole(path))
        return held

    def _hold(self, past: Past, record: Trajectory) -> None:
        found, prompt = past.response(record.id, record.attempt, record.num_tokens), past.prompt(record)
        held = self._groups.setdefault(record.group, Held(prompt=past.prompts.get(record.group)))
        held.num_responses += 1
        parts = [bytearray(part) for part in found]
        self._responses[record.id] = Response(record.group, record.attempt, *parts, prompt)

    def _keep(self, path: Path, users: dict[GroupId, None], num_bytes: int) -> None:
        """`num_bytes`: those that the next controller has to find; a torn end, which this one left out, is none of them."""
        if not users:
            self._done[path] = None
            return
        self._num_kept += 1
        self._synced[path.name] = num_bytes
        self._segments[-self._num_kept] = Segment(path, -1, dict(users))
        for group in users:
            self._groups[group].segments[-self._num_kept] = None

    # ---- writing -------------------------------------------------------------------------------------------

    def start(self, trajectory: TrajectoryId, attempt: int, group: GroupId, resume: bool) -> None:
        """An attempt begins; without `resume` what earlier attempts left is void."""
        response = self._responses.get(trajectory)
        if response is None:
            self._groups.setdefault(group, Held()).num_responses += 1
            response = Response(group, attempt, bytearray(), bytearray(), bytearray())
            self._responses[trajectory] = response
        elif not resume:
            with self._lock:
                response.tokens, response.logprobs, response.sources = bytearray(), bytearray(), bytearray()
                response.prompt = None
        response.attempt = attempt

    def put_prompt(self, group: GroupId, tokens: bytes) -> None:
        """The tokens of a group's prompt (i32); nothing if the group is forgotten."""
        held = self._groups.get(group)
        if held is not None:
            held.prompt = tokens
            self._need_open_segment(group)
            self._persist(Entry(0, 0, 0, tokens, b"", b"", group))

    def put_own_prompt(self, trajectory: TrajectoryId, attempt: int, tokens: bytes) -> None:
        """The tokens of the prompt of one attempt, which its siblings need not share; nothing if it is an old one."""
        response = self._responses.get(trajectory)
        if response is not None and response.attempt == attempt:
            response.prompt = tokens
            self._need_open_segment(response.group)
            self._persist(Entry(trajectory, attempt, 0, tokens, b"", b"", response.group))

    def take(self, report: wire.RolloutReport) -> None:
        """All deltas of a report. Raises ProtocolError, and takes nothing, unless they continue what is held.

        Words of an old attempt are left out.
        """
        ids, attempts = wire.unpack_i64(report.trajectories), wire.unpack_i32(report.attempts)
        totals, news = wire.unpack_i32(report.num_tokens), wire.unpack_i32(report.num_new)
        _require_fit(report, [len(ids), len(attempts), len(totals), len(news)], news)
        parts, left_out, begin = [], [], 0
        held = map(self._responses.get, ids)
        for at, (response, attempt, total, num) in enumerate(zip(held, attempts, totals, news, strict=True)):
            if response is None or response.attempt != attempt:
                left_out.append(at)
            elif num:
                if 4 * (total - num) != len(response.tokens):
                    raise _gap(ids[at], total - num, response)
                parts.append((response, begin, begin + num))
            begin += num
        if parts:
            self._append(report, parts)
            deltas = Deltas(*(getattr(report, name) for name in Deltas.__struct_fields__))
            self._persist(deltas.without(left_out) if left_out else deltas)

    def _append(self, report: wire.RolloutReport, parts: list[tuple[Response, int, int]]) -> None:
        """`parts`: (response, first of its tokens in the report, end of them)."""
        tokens, logprobs, sources = report.tokens, report.logprobs, report.sources
        with self._lock:
            for response, begin, end in parts:
                if sources or response.sources:
                    response.sources += bytes(len(response.tokens) // 4 - len(response.sources))
                    response.sources += sources[begin:end] or bytes(end - begin)
                response.tokens += tokens[4 * begin : 4 * end]
                response.logprobs += logprobs[4 * begin : 4 * end]
        for response, _, _ in parts:
            if response.segment != self._open:
                response.segment = self._open
                self._need_open_segment(response.group)

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Their tokens are not needed again; segments that no group needs are unlinked."""
        for trajectory in trajectories:
            response = self._responses.pop(trajectory, None)
            if response is None:
                continue
            held = self._groups[response.group]
            held.num_responses -= 1
            if held.num_responses == 0:
                self._forget_group(response.group)

    def _forget_group(self, group: GroupId) -> None:
        for number in self._groups.pop(group).segments:
            del self._segments[number].users[group]
            self._unlink_if_done(number)

    # ---- reading -------------------------------------------------------------------------------------------

    def prefix(self, trajectory: TrajectoryId) -> tuple[bytes, bytes]:
        """(tokens, log-probs) received so far."""
        response = self._responses.get(trajectory)
        return (bytes(response.tokens), bytes(response.logprobs)) if response else (b"", b"")

    def rows(self, trajectories: Iterable[TrajectoryId]) -> list[wire.TokenRow]:
        """What a trainer rank fetches. KeyError for a trajectory that is not held, or whose prompt was not reported."""
        return [self._row(trajectory) for trajectory in trajectories]

    def _row(self, trajectory: TrajectoryId) -> wire.TokenRow:
        response = self._responses[trajectory]
        held = self._groups.get(response.group)
        prompt = response.prompt or (held.prompt if held else None)
        if prompt is None:
            raise KeyError(trajectory)
        with self._lock:
            return wire.TokenRow(
                trajectory, prompt, bytes(response.tokens), bytes(response.logprobs), bytes(response.sources)
            )

    def num_tokens(self, trajectories: Iterable[TrajectoryId]) -> int:
        """Response tokens of these. KeyError for one that is not held."""
        return sum(len(self._responses[trajectory].tokens) for trajectory in trajectories) // 4

    @property
    def num_bytes(self) -> int:
        """Memory held by responses, bytes."""
        return sum(len(r.tokens) + len(r.logprobs) + len(r.sources) for r in self._responses.values())

    # ---- disk ----------------------------------------------------------------------------------------------

    def _need_open_segment(self, group: GroupId) -> None:
        """It has, or is about to have, something there."""
        self._segments[self._open].users[group] = self._groups[group].segments[self._open] = None

    def _persist(self, record: Record) -> None:
        data = encode(record)
        segment = self._segments[self._open]
        segment.num_bytes += len(data)
        with self._lock:
            self._outgoing.append((segment.file, data))
        if segment.num_bytes > SEGMENT_BYTES:
            with contextlib.suppress(OSError):  # no file can be made now: this one grows until one can
                self._new_segment()

    def sync(self) -> list[Statement]:
        """Everything handed over so far is on disk when this returns. OSError if the disk does not take it; then it is kept.

        The transaction that follows is to contain the statements, and `committed` to be called after it.
        """
        with self._disk:
            with self._lock:
                outgoing, self._outgoing = self._outgoing, []
                full, self._full = self._full, []
                self._leaving = list(self._done)
            by_file = _joined(outgoing)
            try:
                for file in list(by_file):
                    _write(file, by_file)
                    os.fdatasync(file)
                    self._synced[self._names[file]] = os.fstat(file).st_size
                    del by_file[file]
            except OSError:
                with self._lock:
                    self._outgoing, self._full = [*by_file.items(), *self._outgoing], [*full, *self._full]
                raise
            for file in full:
                self._close_file(file)
        rows = [(name, num_bytes, checksum(num_bytes, name.encode())) for name, num_bytes in self._synced.items()]
        grown = [("INSERT OR REPLACE INTO segments VALUES (?, ?, ?)", row) for row in rows]
        return [*grown, *(("DELETE FROM segments WHERE name = ?", (path.name,)) for path in self._leaving)]

    def committed(self) -> None:
        """What `sync` had to say is in the log."""
        self._synced.clear()
        gone = [path for path in self._leaving if _unlinked(path)]  # the others are left for the next commit
        with self._lock:
            for path in gone:
                del self._done[path]
        self._leaving = []

    def _close_file(self, file: int) -> None:
        os.close(file)
        del self._names[file]

    def _new_segment(self) -> None:
        old = self._open
        path = self._directory / f"{self._boot:04d}-{old + 1:06d}.seg"
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._open += 1
        self._segments[self._open] = Segment(path, file)
        self._names[file] = path.name
        if old:
            with self._lock:
                self._full.append(self._segments[old].file)
            self._unlink_if_done(old)

    def _unlink_if_done(self, number: int) -> None:
        segment = self._segments[number]
        if not segment.users and number != self._open:
            del self._segments[number]
            with self._lock:
                self._done[segment.path] = None

    def finish(self) -> None:
        """Nothing more comes: the open segment goes with the next commit if nobody needs it."""
        last, self._open = self._open, 0
        with self._lock:
            self._full.append(self._segments[last].file)
        self._unlink_if_done(last)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close what is open. OSError if the disk does not take it: also if another thread has been writing for so long."""
        if not self._disk.acquire(timeout=timeout_s):
            raise TimeoutError(f"the disk has not taken the last tokens within {timeout_s:g} s")
        try:
            self.sync()
        finally:
            for file in list(self._names):
                self._close_file(file)
            self._disk.release()


def _joined(outgoing: list[tuple[int, bytes]]) -> dict[int, bytes]:
    """What each file gets, in order."""
    parts: dict[int, list[bytes]] = {}
    for file, part in outgoing:
        parts.setdefault(file, []).append(part)
    return {file: b"".join(some) for file, some in parts.items()}


def _unlinked(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _write(file: int, rest: dict[int, bytes]) -> None:
    """What `rest` has for the file; also if that fails in the middle, only what was not written is left there."""
    while rest[file]:
        rest[file] = rest[file][os.write(file, rest[file]) :]


def _gap(trajectory: int, start: int, response: Response) -> ProtocolError:
    name = format_id(TrajectoryId(trajectory))
    num_held = len(response.tokens) // 4
    return ProtocolError(f"trajectory {name}: a delta starts at token {start}, but {num_held} are held")


def _require_fit(report: wire.RolloutReport, lengths: list[int], news: list[int]) -> None:
    num_new = sum(news)
    if (
        len(set(lengths)) > 1
        or min(news, default=0) < 0
        or len(report.tokens) != 4 * num_new
        or len(report.logprobs) != 4 * num_new
        or len(report.sources) not in (0, num_new)
    ):
        raise ProtocolError("the arrays of a report do not fit together")
