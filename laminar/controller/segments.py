"""A run's token segments on disk: files of entries, `tokens/<boot>-<number>.seg`, in the order of their names.

    entry:  u32 length of the body │ u32 CRC-32 of length and body │ body, the msgpack of an `Entry`

Invariant: what does not fit its checksum is never read back. It is named (`Damage`), and `Past.check` refuses it where the log
says that something was written.
"""

import struct
import zlib
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


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One delta on disk: response tokens [start, start + n) of an attempt; or a prompt's, of a group or (its own) of an attempt."""

    trajectory: int
    attempt: int
    start: int
    tokens: bytes
    logprobs: bytes
    sources: bytes
    group: int = 0
    """0 = response tokens."""


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


def encode(entry: Entry) -> bytes:
    """As it stands in a segment."""
    body = msgspec.msgpack.encode(entry)
    return _HEAD.pack(len(body), zlib.crc32(body, len(body))) + body


class Contents(NamedTuple):
    """All whole entries of a segment, in order, and what else is there."""

    entries: list[Entry]
    damages: list[Damage]


def read_segment(path: Path) -> Contents:
    """Raises OSError if it cannot be read."""
    data, entries, damages, position = path.read_bytes(), list[Entry](), list[Damage](), 0
    while position < len(data):
        entry, end = _entry_at(data, position)
        if entry is not None:
            entries.append(entry)
        else:
            if end > len(data) or _entry_at(data, end)[0] is None:  # nothing says where the next one begins
                end = len(data)
            damages.append(Damage(path, position, end - position, _is_torn(data, position)))
        position = end
    return Contents(entries, damages)


def _entry_at(data: bytes, position: int) -> tuple[Entry | None, int]:
    """The entry, None if there is none, and where it ends by its own word."""
    if position + _HEAD.size > len(data):
        return None, len(data) + 1
    length, checksum = _HEAD.unpack_from(data, position)
    end = position + _HEAD.size + length
    body = memoryview(data)[position + _HEAD.size : end]
    if not length or len(body) < length or zlib.crc32(body, length) != checksum:
        return None, end
    try:
        return msgspec.msgpack.decode(body, type=Entry), end
    except msgspec.MsgspecError:
        return None, end


def _is_torn(data: bytes, position: int) -> bool:
    rest = len(data) - position
    return _entry_at(data, position)[1] > len(data) or data.count(0, position) == rest


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
        self._deltas: dict[TrajectoryId, list[Entry]] = {}
        for path in sorted(directory.glob("*.seg")):
            self._read(path)

    def _read(self, path: Path) -> None:
        trajectories, groups = self.trajectories.setdefault(path, {}), self.groups.setdefault(path, {})
        contents = read_segment(path)
        self._lengths[path.name] = path.stat().st_size
        self.damages += contents.damages
        for entry in contents.entries:
            trajectory, group = TrajectoryId(entry.trajectory), GroupId(entry.group)
            if not group:
                trajectories[trajectory] = None
                self._deltas.setdefault(trajectory, []).append(entry)
                continue
            groups[group] = None
            if trajectory:
                self.own_prompts[trajectory, entry.attempt] = entry.tokens
            else:
                self.prompts[group] = entry.tokens

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
        tokens, logprobs, sources = bytearray(), bytearray(), bytearray()
        for entry in self._up_to(trajectory, attempt):
            if 4 * entry.start > len(tokens):
                continue  # what it continues is lost
            del tokens[4 * entry.start :], logprobs[4 * entry.start :], sources[entry.start :]
            tokens += entry.tokens
            logprobs += entry.logprobs
            sources += entry.sources or bytes(len(entry.tokens) // 4)
        if len(tokens) < 4 * num_tokens or len(tokens) != len(logprobs):
            raise self._lost(f"{len(tokens) // 4} tokens of trajectory {format_id(trajectory)}", num_tokens)
        kept = bytes(sources[:num_tokens])
        return Tokens(bytes(tokens[: 4 * num_tokens]), bytes(logprobs[: 4 * num_tokens]), kept if any(kept) else b"")

    def _up_to(self, trajectory: TrajectoryId, attempt: int) -> Iterable[Entry]:
        return (entry for entry in self._deltas.get(trajectory, []) if entry.attempt <= attempt)

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
