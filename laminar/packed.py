"""Arrays on the wire: little-endian bytes, one C call each way (the machines Laminar runs on are little-endian)."""

from array import array
from typing import Any

from laminar.errors import ProtocolError


def pack_i64(values: list[int]) -> bytes:
    """Little-endian int64 array (the machines Laminar runs on are little-endian)."""
    return array("q", values).tobytes()


def pack_i32(values: list[int]) -> bytes:
    """Little-endian int32 array."""
    return array("i", values).tobytes()


def pack_f32(values: list[float]) -> bytes:
    """Little-endian float32 array."""
    return array("f", values).tobytes()


def unpack_i64(data: bytes) -> list[int]:
    """Inverse of `pack_i64`. Raises ProtocolError when the length does not fit."""
    return _unpack("q", data)


def unpack_i32(data: bytes) -> list[int]:
    """Inverse of `pack_i32`. Raises ProtocolError when the length does not fit."""
    return _unpack("i", data)


def unpack_f32(data: bytes) -> list[float]:
    """Inverse of `pack_f32`. Raises ProtocolError when the length does not fit."""
    return _unpack("f", data)


def _unpack(code: str, data: bytes) -> list[Any]:
    values: array[Any] = array(code)
    try:
        values.frombytes(data)
    except ValueError as error:
        raise ProtocolError(f"packed array of {len(data)} bytes does not hold items of {values.itemsize}") from error
    return values.tolist()
