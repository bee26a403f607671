"""The core's state as bytes and back (msgpack; dict order is kept, and matters)."""

import msgspec

from laminar.core.records import State

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


def encode(state: State) -> bytes:
    """The whole state."""
    return _encoder.encode(state)


def decode(data: bytes) -> State:
    """Inverse of `encode`. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(data)
