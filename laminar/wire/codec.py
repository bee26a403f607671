"""Frames: which messages each side may send, their envelope, and the encoding."""

from typing import Any, TypeVar

import msgspec

from laminar.errors import ProtocolError
from laminar.wire.relay import FromRelay, ToRelay
from laminar.wire.rollout import FromRollout, ToRollout
from laminar.wire.session import FromAny, ToAny
from laminar.wire.trainer import FromTrainer, TokenRequest, ToTrainer

FRAME_BYTES_MAX = 64 << 20  # one flush of 256 trajectories x 2k tokens is ~5 MB; 64 MiB is clearly wrong

FromWorker = FromAny | FromRollout | FromTrainer | FromRelay
FromController = ToAny | ToRollout | ToTrainer | ToRelay


class WorkerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """A frame from a worker."""

    number: int
    received: int
    message: FromWorker


class ControllerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """A frame from the controller."""

    number: int
    received: int
    message: FromController


Decoded = TypeVar("Decoded")

_encoder = msgspec.msgpack.Encoder()
_from_worker = msgspec.msgpack.Decoder(WorkerEnvelope)
_token_request = msgspec.msgpack.Decoder(TokenRequest)
_from_controller = msgspec.msgpack.Decoder(ControllerEnvelope)


def encode(value: Any) -> bytes:
    """msgpack of any message, envelope or struct of this package."""
    return _encoder.encode(value)


def decode_from_worker(frame: bytes) -> WorkerEnvelope:
    """Raises ProtocolError for a frame that is too large, malformed or of an unknown kind."""
    return _decode(_from_worker, frame)


def decode_from_controller(frame: bytes) -> ControllerEnvelope:
    """Raises ProtocolError for a frame that is too large, malformed or of an unknown kind."""
    return _decode(_from_controller, frame)


def decode_token_request(body: bytes) -> TokenRequest:
    """Raises ProtocolError for anything else."""
    return _decode(_token_request, body)


def _decode(decoder: msgspec.msgpack.Decoder[Decoded], frame: bytes) -> Decoded:
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(f"frame of {len(frame)} bytes exceeds the limit of {FRAME_BYTES_MAX}")
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed frame of {len(frame)} bytes: {error}") from error
