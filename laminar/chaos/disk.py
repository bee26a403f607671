"""A small file system of its own for a run, so that it can be filled without harm to anybody else. Needs root.

It is a tmpfs in a private mount namespace of this process and what it starts, and so goes with the last of them. At the end what
the run has left is copied to where it belongs.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from laminar.errors import StartError

CLONE_NEWNS, MS_REC, MS_PRIVATE, MNT_DETACH = 0x00020000, 0x4000, 0x40000, 2


def why_not() -> str:
    """Why there can be none; empty = there can."""
    if os.geteuid() != 0:
        return "a file system of its own needs root"
    try:
        tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        return f"unshare cannot be run: {error.strerror}"
    return f"this machine makes no mount namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def small(directory: Path, num_mib: int) -> Iterator[None]:
    """`directory` is on a file system of so many MiB. Call it before any thread begins. Raises StartError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise StartError(f"cannot make {directory}: {error.strerror}; choose another place with run.dir") from error
    if free < num_mib << 20:
        directory.rmdir()
        raise StartError(
            f"{directory} has {free >> 20} MiB free, and the run's own file system of {num_mib} MiB is copied there at the end: "
            "make room, or give a smaller --disk-mib"
        )
    beneath = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _call("unshare", CLONE_NEWNS)
        _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
        _call("mount", b"tmpfs", os.fsencode(directory), b"tmpfs", 0, f"size={num_mib}m,mode=755".encode())
        try:
            yield
        finally:
            _copy(directory, Path(f"/proc/self/fd/{beneath}"))
            _call("umount2", os.fsencode(directory), MNT_DETACH)
    finally:
        os.close(beneath)


def _copy(directory: Path, beneath: Path) -> None:
    try:
        shutil.copytree(directory, beneath, dirs_exist_ok=True, symlinks=True)
    except OSError as error:
        raise StartError(f"what the run left in {directory} could not be kept, all or in part: {error}") from error


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        why = os.strerror(ctypes.get_errno())
        raise StartError(f"no file system of its own for the run: {name}: {why}; leave fill_disk out (--kinds)")
