"""Turn anything a data set may hold into JSON-able values, so that it survives msgpack and means the same everywhere."""

import datetime
import enum
from typing import Any

INT_LOW, INT_HIGH = -(1 << 63), 1 << 64  # msgpack's integers: INT_LOW <= value < INT_HIGH


def plain(value: Any) -> Any:
    """None, bool, int, float, str, or a list or dict with text keys of those.

    Tuples become lists, sets sorted lists, numpy values and arrays their Python equivalents, dates ISO 8601, bytes
    text (or hexadecimal where they are not UTF-8), integers beyond 64 bits and everything else ``str(value)``.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value).encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return int(value) if INT_LOW <= value < INT_HIGH else str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return {plain(key) if isinstance(key, str) else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return value.decode() if _is_utf8(value) else value.hex()
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(value.tolist())
    return plain(str(value))


def _is_utf8(value: bytes | bytearray) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
