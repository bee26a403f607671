"""What killed servers leave in /dev/shm: segments and semaphores of Python's multiprocessing, whose names say nothing of an owner.

So it is noted which of them a server's processes map while they live, and what they mapped is removed when they are dead, unless a
process that lives maps it too. Their names are random: nobody who does not map one by then can come to know it.
"""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

_NAMES = re.compile(r"/dev/shm/(?:psm_|sem\.mp-)[^\s/]+$", re.MULTILINE)
"""Of what is not deleted: behind the others stands " (deleted)"."""


def mapped_by(pids: Iterable[int]) -> set[str]:
    """Paths of such files that these processes map; nothing for those that have ended, or are somebody else's."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(_NAMES.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    return found


def remove(paths: set[str]) -> None:
    """Those that no process maps any more. Blocks for some milliseconds: it looks at every process, if there is any of them."""
    left = {path for path in paths if _NAMES.fullmatch(path) and Path(path).exists()}
    if left:
        left -= mapped_by(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    for path in left:
        with contextlib.suppress(OSError):
            Path(path).unlink()
