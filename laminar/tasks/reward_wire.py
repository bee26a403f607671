"""Messages between the reward pool and its child processes: length-prefixed msgpack over two pipes, no pickle."""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from laminar import wire
from laminar.config import TaskConfig
from laminar.errors import ProtocolError

HEADER = struct.Struct("<I")
FRAME_BYTES_MAX = 64 << 20  # one response is at most some MB


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First frame to a child: load this task's scorer."""

    task: TaskConfig


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Score this response."""

    number: int
    prompt: wire.Prompt
    response: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The scorer is loaded."""


class NotReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The scorer cannot be loaded; the child exits."""

    detail: str


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """User code runs for this question from now on: its time limit starts."""

    number: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The score, or the reason (`reward_error`, `reward_nan`) why there is none."""

    number: int
    reward: float
    parts: dict[str, float]
    reason: str = ""
    detail: str = ""


to_child = msgspec.msgpack.Decoder(Setup | Ask)
from_child: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Ready | NotReady | Begun | Answer)


def pack(message: msgspec.Struct) -> bytes:
    """One frame: u32 length, then msgpack."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


class Unpacker:
    """Cuts a byte stream from a child into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Ready | NotReady | Begun | Answer]:
        """The messages complete by now. Raises ProtocolError for anything a child of ours does not send."""
        self._buffer += chunk
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"a reward process sent a frame of {length} bytes")
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            yield self._decode(start + HEADER.size, end)
            start = end
        del self._buffer[:start]

    def _decode(self, start: int, end: int) -> Any:
        try:
            return from_child.decode(self._buffer[start:end])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a reward process sent a malformed frame: {error}") from error
