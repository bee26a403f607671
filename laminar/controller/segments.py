"""A run's token segments on disk: files of entries, `tokens/<boot>-<number>.seg`, in the order of their names.

    entry:  u32 length of the body │ u32 CRC-32 of length and body │ body, the msgpack of an `Entry` or of `Deltas`

Invariant: what does not fit its checksum is never read back. It is named (`Damage`), and `Past.check` refuses it where the log
says that something was written.
"""

import struct
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from laminar.core.records import Trajectory, TrajectoryState
from laminar.errors import StartError
from laminar.ids import GroupId, TrajectoryId, format_id

OTHERWISE = "go on from the last checkpoint with --from-checkpoint"
DAMAGES_SHOWN = 4  # in one message
_HEAD = struct.Struct("<II")


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """One delta: response tokens [start, start + n) of an attempt; or a prompt's, of a group or (its own) of an attempt."""

    trajectory: int
    attempt: int
    start: int
    tokens: bytes
    logprobs: bytes
    sources: bytes
    group: int = 0
    """0 = response tokens."""


class Deltas(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """All that one report brought, in its own arrays (`wire.RolloutReport`): a frame costs one entry, not one per trajectory."""

    trajectories: bytes
    """i64"""
    attempts: bytes
    """i32, as the others"""
    num_tokens: bytes
    """Of the response with this delta."""
    num_new: bytes
    tokens: bytes
    logprobs: bytes
    sources: bytes

    def without(self, left_out: list[int]) -> "Deltas":
        """All but those at these places of the arrays."""
        places, begin = [], 0
        for at, num in enumerate(array("i", self.num_new)):
            if at not in left_out:
                places.append((at, begin, begin + num))
            begin += num

        def of_trajectories(column: bytes, width: int) -> bytes:
            return b"".join(column[width * at : width * (at + 1)] for at, _, _ in places)

        def of_tokens(column: bytes, width: int) -> bytes:
            return b"".join(column[width * begin : width * end] for _, begin, end in places)

        return Deltas(
            of_trajectories(self.trajectories, 8),
            *(of_trajectories(column, 4) for column in (self.attempts, self.num_tokens, self.num_new)),
            *(of_tokens(column, 4) for column in (self.tokens, self.logprobs)),
            of_tokens(self.sources, 1),
        )

    def entries(self) -> Iterable[Entry]:
        """One by one."""
        news, begin = array("i", self.num_new), 0
        ids, attempts, totals = array("q", self.trajectories), array("i", self.attempts), array("i", self.num_tokens)
        for trajectory, attempt, total, num in zip(ids, attempts, totals, news, strict=True):
            if num:
                part = slice(4 * begin, 4 * (begin + num))
                sources = self.sources[begin : begin + num]
                yield Entry(trajectory, attempt, total - num, self.tokens[part], self.logprobs[part], sources)
            begin += num


Record = Entry | Deltas


class Damage(NamedTuple):
    """Bytes of a segment that are no entry."""

    path: Path
    start: int
    num_bytes: int
    torn: bool
    """They are the end of the file and no whole entry: it was being written."""

    def __str__(self) -> str:
        where = f"{self.path}: {self.num_bytes} bytes at byte {self.start}"
        if self.torn:
            return f"{where} were not written to the end"
        return f"{where} are damaged (another checksum)"


_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """As it stands in a segment."""
    body = msgspec.msgpack.encode(record)
    return _HEAD.pack(len(body), zlib.crc32(body, len(body))) + body


class Contents(NamedTuple):
    """All whole records of a segment, in order, and what else is there."""

    records: list[Record]
    damages: list[Damage]

    @property
    def entries(self) -> list[Entry]:
        """The records, deltas one by one."""
        each = (record.entries() if isinstance(record, Deltas) else [record] for record in self.records)
        return [entry for some in each for entry in some]


def read_segment(path: Path) -> Contents:
    """Raises OSError if it cannot be read."""
    data, records, damages, position = path.read_bytes(), list[Record](), list[Damage](), 0
    while position < len(data):
        record, end = _record_at(data, position)
        if record is not None:
            records.append(record)
        else:
            if end > len(data) or _record_at(data, end)[0] is None:  # nothing says where the next one begins
                end = len(data)
            damages.append(Damage(path, position, end - position, _is_torn(data, position)))
        position = end
    return Contents(records, damages)


def _record_at(data: bytes, position: int) -> tuple[Record | None, int]:
    """The record, None if there is none, and where it ends by its own word."""
    if position + _HEAD.size > len(data):
        return None, len(data) + 1
    length, checksum = _HEAD.unpack_from(data, position)
    end = position + _HEAD.size + length
    body = memoryview(data)[position + _HEAD.size : end]
    if not length or len(body) < length or zlib.crc32(body, length) != checksum:
        return None, end
    try:
        return _decoder.decode(body), end
    except msgspec.MsgspecError:
        return None, end


def _is_torn(data: bytes, position: int) -> bool:
    rest = len(data) - position
    return _record_at(data, position)[1] > len(data) or data.count(0, position) == rest


class Tokens(NamedTuple):
    """A response: i32, f32, and a byte per token, which may be left out while all are 0."""

    tokens: bytes
    logprobs: bytes
    sources: bytes


class Past:
    """What the segments of earlier boots hold. Raises OSError if they cannot be read.

    They may hold more than the log tells of: deltas whose events were not on disk when the controller died, and those again that
    workers sent once more. So a response is as long as the log says, and a later entry wins.
    """

    def __init__(self, directory: Path) -> None:
        self.prompts: dict[GroupId, bytes] = {}
        self.own_prompts: dict[tuple[TrajectoryId, int], bytes] = {}
        self.trajectories: dict[Path, dict[TrajectoryId, None]] = {}
        """Of whose responses a segment has something."""
        self.groups: dict[Path, dict[GroupId, None]] = {}
        """Of which prompts."""
        self.damages: list[Damage] = []
        self._lengths: dict[str, int] = {}
        self._deltas: defaultdict[int, list[tuple[int, int, int, int, Record]]] = defaultdict(list)
        """Trajectory -> (attempt, first token in the response, first and last + 1 of its bytes in the record, record), in order.

        Of millions: no objects of their own, and no work on them that can wait.
        """
        for path in sorted(directory.glob("*.seg")):
            self._read(path)

    def _read(self, path: Path) -> None:
        trajectories, groups = self.trajectories.setdefault(path, {}), self.groups.setdefault(path, {})
        contents = read_segment(path)
        self._lengths[path.name] = path.stat().st_size
        self.damages += contents.damages
        for record in contents.records:
            if isinstance(record, Deltas):
                trajectories.update(dict.fromkeys(self._take(record)))  # type: ignore[arg-type]
            elif record.group:
                self._take_prompt(record, groups)
            else:
                trajectories[TrajectoryId(record.trajectory)] = None
                part = (record.attempt, record.start, 0, len(record.tokens), record)
                self._deltas[record.trajectory].append(part)

    def _take(self, record: Deltas) -> list[int]:
        """The trajectories in it."""
        deltas, begin = self._deltas, 0
        ids, attempts = array("q", record.trajectories).tolist(), array("i", record.attempts)
        totals, news = array("i", record.num_tokens), array("i", record.num_new)
        for trajectory, attempt, total, num in zip(ids, attempts, totals, news, strict=True):
            if num:
                end = begin + 4 * num
                deltas[trajectory].append((attempt, total - num, begin, end, record))
                begin = end
        return ids

    def _take_prompt(self, entry: Entry, seen: dict[GroupId, None]) -> None:
        group = GroupId(entry.group)
        seen[group] = None
        if entry.trajectory:
            self.own_prompts[TrajectoryId(entry.trajectory), entry.attempt] = entry.tokens
        else:
            self.prompts[group] = entry.tokens

    def num_whole(self, path: Path) -> int:
        """Bytes of a segment before its first damage."""
        starts = [damage.start for damage in self.damages if damage.path == path]
        return min(starts, default=self._lengths[path.name])

    def knows(self, trajectory: TrajectoryId) -> bool:
        """Whether there is anything of its response."""
        return trajectory in self._deltas

    def check(self, written: dict[str, int]) -> None:
        """`written`: segment -> bytes, as the log says. Raises StartError if any of them is lost or damaged."""
        short = [
            f"{name} has {self._lengths.get(name, 0)} of {num_bytes} bytes"
            for name, num_bytes in written.items()
            if self._lengths.get(name, 0) < num_bytes
        ]
        bad = [str(damage) for damage in self.damages if damage.start < written.get(damage.path.name, 0)]
        if found := short + bad:
            raise StartError(f"token segments are damaged: {'; '.join(found[:DAMAGES_SHOWN])}; {OTHERWISE}")

    def response(self, trajectory: TrajectoryId, attempt: int, num_tokens: int) -> Tokens:
        """The first `num_tokens` tokens as they were during `attempt`. Raises StartError if they are not all here."""
        tokens, logprobs, sources, length = bytearray(), bytearray(), bytearray(), 0
        for its_attempt, start, begin, end, record in self._deltas.get(trajectory, ()):
            if its_attempt > attempt or start > length:
                continue  # later than asked for, or what it continues is lost
            if start < length:
                del tokens[4 * start :], logprobs[4 * start :], sources[start:]
            if record.sources:
                sources += bytes(start - len(sources))
                sources += record.sources[begin // 4 : end // 4]
            tokens += record.tokens[begin:end]
            logprobs += record.logprobs[begin:end]
            length = len(tokens) // 4
        if len(tokens) < 4 * num_tokens or len(tokens) != len(logprobs):
            raise self._lost(f"{len(tokens) // 4} tokens of trajectory {format_id(trajectory)}", num_tokens)
        kept = bytes(sources[:num_tokens]).ljust(num_tokens, b"\0")
        return Tokens(bytes(tokens[: 4 * num_tokens]), bytes(logprobs[: 4 * num_tokens]), kept if any(kept) else b"")

    def prompt(self, record: Trajectory) -> bytes | None:
        """Of this attempt alone; None = its group's. Raises StartError if neither is here and it has been reported."""
        own = self.own_prompts.get((record.id, record.attempt))
        found = own or self.prompts.get(record.group, b"")
        if record.state is TrajectoryState.DONE and len(found) != 4 * record.num_prompt_tokens:
            words = f"{len(found) // 4} tokens of the prompt of trajectory {format_id(record.id)}"
            raise self._lost(words, record.num_prompt_tokens)
        return own

    def _lost(self, found: str, num_tokens: int) -> StartError:
        return StartError(
            f"the token segments have {found}, the log says {num_tokens}: a part of them is lost; {OTHERWISE}"
        )
