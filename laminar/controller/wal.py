"""SQLite's write-ahead log `run.db-wal`: what SQLite leaves out of it without a word, and who has it open.

    header 32 B: … │ page size at 8 │ salts at 16 (8 B) │ …        frame: header 24 B: … │ salts at 8 (8 B) │ …   + a page

SQLite takes the frames up to the last whole commit whose checksums fit (sqlite.org/fileformat2.html). Frames with other salts than
the header's are what an earlier round left there.
"""

import contextlib
import math
import os
import sqlite3
import struct
from pathlib import Path

_HEADER, _FRAME = 32, 24
_INDEX = 20  # bytes of the index that end with the number of frames taken (sqlite.org/walformat.html)


def path_of(database: Path) -> Path:
    """Of its write-ahead log."""
    return database.with_name(f"{database.name}-wal")


def num_frames(wal: Path) -> int:
    """Frames of the present round, begun ones included; all, if the header fits none. Raises OSError."""
    try:
        file = wal.open("rb")
    except FileNotFoundError:
        return 0
    with file:
        header, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
        if len(header) < _HEADER:
            return min(1, size)
        stride, salts = _FRAME + _page_size(header), header[16:24]
        for number, position in enumerate(range(_HEADER, size, stride)):
            file.seek(position + 8)
            if file.read(8) != salts and position + _FRAME <= size and number:
                return number
        return math.ceil((size - _HEADER) / stride)


def _page_size(header: bytes) -> int:
    (size,) = struct.unpack_from(">I", header, 8)
    return size if size.bit_count() == 1 and 512 <= size <= 65536 else 4096  # damaged: SQLite's default


def left_out(database: Path, frames: int, connection: sqlite3.Connection) -> str:
    """What SQLite did not take of `frames` (`num_frames` before it was opened), for people; empty if it took everything."""
    _, taken, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    if taken < 0 or frames <= taken:
        return ""
    return (
        f"{path_of(database)}: {frames - taken} of its {frames} pages are no whole commit and are left out: nobody was told of "
        "what they held, unless the disk has lost what it had confirmed; workers that know more than the log are refused and lost"
    )


def not_taken(database: Path, frames: int) -> str:
    """The same for a reader, by SQLite's index of the log, `run.db-shm`; it takes nothing out of the log. Raises OSError."""
    try:
        with database.with_name(f"{database.name}-shm").open("rb") as index:
            (taken,) = struct.unpack_from("=I", index.read(_INDEX), _INDEX - 4)
    except (FileNotFoundError, struct.error):
        return ""
    if frames <= taken:
        return ""
    return (
        f"{path_of(database)}: the last {frames - taken} of its {frames} pages are no whole commit (the run goes on, or was killed "
        "in the middle of one) and are left out"
    )


def readers(database: Path) -> list[int]:
    """Other processes of this machine that have its write-ahead log open, as far as this one may see."""
    wal, found = str(path_of(database).absolute()), dict[int, None]()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == wal:
                found[int(link.parts[2])] = None
    return [pid for pid in found if pid != os.getpid()]
