"""The relay's directory under /dev/shm: its name, its owner, and the sweep of what dead runs left.

Invariants:
* A directory appears under its final name only with a complete `owner.json` (it is prepared aside and renamed).
* Nothing of a live process, of another user or of another PID namespace is ever removed.
"""

import errno
import os
import re
import shutil
import time
from pathlib import Path

import msgspec
import structlog

from laminar.errors import ConfigError, StartError
from laminar.wire import HOST_VARIABLE
from laminar.workers.relay.protocol import SOCKET_NAME

log = structlog.get_logger("laminar.relay")

SHM_ROOT = Path("/dev/shm")
PREFIX = "laminar-"
OWNER_NAME = "owner.json"
SOCKET_PATH_MAX = 107  # sun_path of struct sockaddr_un has 108 bytes, the last one is NUL
ROOM_LOOK_S = 1.0  # somebody has to make room; nobody tells us
UNOWNED_AGE_S = 60.0  # a directory without a readable owner may be one that is just being made
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves a directory. A process is identified by pid and start time, because pids are used again."""

    pid: int
    start_ticks: int
    """Start of the process in clock ticks since boot (field 22 of /proc/<pid>/stat)."""
    pid_namespace: str
    """Target of /proc/self/ns/pid: containers may share /dev/shm and not their pids."""
    run_directory: str


def shm_directory(run_id: str, root: Path = SHM_ROOT, host: str | None = None) -> Path:
    """Where the relay of a run keeps its slots. Raises ConfigError for a run id that cannot be a directory name.

    `host`: as the hosts file names it, None = that of this process; in a run on several hosts it is part of the name, since two of
    them may be one machine. Empty = the run has one host.
    """
    host = os.environ.get(HOST_VARIABLE, "") if host is None else host
    run_id = f"{run_id}-{re.sub(r'[^A-Za-z0-9._-]', '_', host)}" if host else run_id
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run id {run_id!r} cannot name a directory: use letters, digits, '.', '_' and '-'")
    directory = root / f"{PREFIX}{run_id}"
    excess = len(os.fsencode(directory / SOCKET_NAME)) - SOCKET_PATH_MAX
    if excess > 0:
        raise ConfigError(f"run id {run_id!r} is too long for a Unix socket under {root}: shorten it by {excess} bytes")
    return directory


def create(run_id: str, run_directory: str, root: Path = SHM_ROOT, room_s: float = 0.0) -> Path:
    """Make the directory (mode 0700) owned by this process, over what a dead process left of the same run.

    If `root` is full, room is waited for, `room_s` at most. Blocks. Raises StartError if a live relay serves this run or the
    directory cannot be made; ConfigError for a bad run id.
    """
    directory = shm_directory(run_id, root)
    _clear_stale(directory)
    own = owner_of(os.getpid(), run_directory)
    deadline = time.monotonic() + room_s
    while (error := _make(directory, own)) is not None:
        if error.errno != errno.ENOSPC or time.monotonic() > deadline:
            raise StartError(
                f"cannot make {directory}: {error.strerror}; is another relay of this run starting, "
                f"or {root} full or read-only?"
            ) from error
        log.warning("relay_waits_for_room", directory=str(root), hint="remove what fills it, or enlarge it")
        time.sleep(ROOM_LOOK_S)
    return directory


def _make(directory: Path, own: Owner) -> OSError | None:
    """Make it aside and rename it; why that failed."""
    staging = directory.parent / f"{PREFIX}new-{own.pid}-{own.start_ticks}-{time.monotonic_ns()}"
    try:
        staging.mkdir(mode=0o700)
        (staging / OWNER_NAME).write_bytes(msgspec.json.encode(own))
        staging.rename(directory)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        return error
    return None


def remove(directory: Path) -> None:
    """Delete a relay's directory. Processes that still map a slot keep their memory until they unmap it."""
    shutil.rmtree(directory, ignore_errors=True)


def sweep(root: Path = SHM_ROOT) -> list[str]:
    """Remove the directories of dead owners under `root`; returns their paths, sorted."""
    removed = []
    for directory in sorted(root.glob(f"{PREFIX}*")):
        if _is_ours(directory) and _is_abandoned(directory):
            remove(directory)
            if not directory.exists():
                removed.append(str(directory))
    return removed


def owner_of(pid: int, run_directory: str) -> Owner:
    """The owner record of a live process of this PID namespace. Raises ProcessLookupError if there is none."""
    started = _start_ticks(pid)
    if started is None:
        raise ProcessLookupError(f"no process {pid}")
    return Owner(pid=pid, start_ticks=started, pid_namespace=_pid_namespace(), run_directory=run_directory)


def read_owner(directory: Path) -> Owner | None:
    """None when `owner.json` is missing, unreadable or half-written."""
    try:
        return msgspec.json.decode((directory / OWNER_NAME).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


def _clear_stale(directory: Path) -> None:
    if not os.path.lexists(directory):
        return
    if not _is_ours(directory):
        raise StartError(f"{directory} is not a directory of this user: remove it or choose another run name")
    if not _is_abandoned(directory):
        owner = read_owner(directory)
        who = f"process {owner.pid} serves it" if owner else f"its {OWNER_NAME} is unreadable and it is new"
        raise StartError(f"{directory} is in use ({who}): stop that run, or choose another run name")
    remove(directory)


def _is_ours(directory: Path) -> bool:
    try:
        return directory.is_dir() and not directory.is_symlink() and directory.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _is_abandoned(directory: Path) -> bool:
    owner = read_owner(directory)
    if owner is not None:
        return owner.pid_namespace == _pid_namespace() and _start_ticks(owner.pid) != owner.start_ticks
    try:
        return time.time() - directory.stat().st_mtime > UNOWNED_AGE_S
    except OSError:
        return False


def _start_ticks(pid: int) -> int | None:
    """None for a pid without a running process; a zombie runs no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold blanks and brackets
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
