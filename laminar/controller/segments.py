"""A run's token segments on disk: files of length-prefixed entries, `tokens/<boot>-<number>.seg`, in the order of their names."""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from laminar.errors import StartError
from laminar.ids import GroupId, TrajectoryId, format_id


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


def encode(entry: Entry) -> bytes:
    """As it stands in a segment."""
    body = msgspec.msgpack.encode(entry)
    return struct.pack("<I", len(body)) + body


def read_segment(path: Path) -> list[Entry]:
    """All whole entries of a segment, in order; a torn tail (cut short, or zeros) is left out."""
    data, entries, position = path.read_bytes(), [], 0
    while position + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, position)
        body = data[position + 4 : position + 4 + length]
        if len(body) < length:
            break
        try:
            entries.append(msgspec.msgpack.decode(body, type=Entry))
        except msgspec.MsgspecError:
            break
        position += 4 + length
    return entries


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
        self._deltas: dict[TrajectoryId, list[Entry]] = {}
        for path in sorted(directory.glob("*.seg")):
            self._read(path)

    def _read(self, path: Path) -> None:
        trajectories, groups = self.trajectories.setdefault(path, {}), self.groups.setdefault(path, {})
        for entry in read_segment(path):
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
            raise StartError(
                f"the token segments have {len(tokens) // 4} tokens of trajectory {format_id(trajectory)}, the log says "
                f"{num_tokens}: a part of them is lost; go on from the last checkpoint with --from-checkpoint"
            )
        kept = bytes(sources[:num_tokens])
        return Tokens(bytes(tokens[: 4 * num_tokens]), bytes(logprobs[: 4 * num_tokens]), kept if any(kept) else b"")

    def _up_to(self, trajectory: TrajectoryId, attempt: int) -> Iterable[Entry]:
        return (entry for entry in self._deltas.get(trajectory, []) if entry.attempt <= attempt)
