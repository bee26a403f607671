"""The directory of a run's checkpoints: what is complete, whether its bytes are those that were written, what may be deleted.

    step-8.writing-3f2a/  ──(all files and their digests on disk)──►  step-8/  ──(superseded)──►  step-8.deleted/  ──►  gone
                                                                        └──(other bytes than were written)──►  step-8.damaged/

Invariants:
* A directory under its final name was written to the end: its files and its manifest were on disk before the rename.
* Nothing is deleted under its final name, so what was half deleted is never taken for a checkpoint.
* What is damaged is kept, for people to look at.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from laminar.errors import LaminarError, StartError

FORMAT = 2
MANIFEST, DATA_STATE, META = "manifest.json", "data_state.bin", "meta.json"
EXPORT = "hf"
READ_BYTES = 16 << 20  # large enough for any disk; a digest of it lets other threads run
_LEFT = (".writing-", ".old", ".deleted")


class UnreadableError(LaminarError):
    """A checkpoint cannot be read now, which says nothing about its bytes."""


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    """One file as it was written."""

    num_bytes: int
    xxh3: str
    """xxh3_128, 32 hex digits: against disks and copies that go wrong, not against an adversary."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json: every other file of the checkpoint, by its path within it."""

    format: int = FORMAT
    files: dict[str, FileDigest]


def complete(directory: Path) -> list[Path]:
    """Checkpoints that were written to the end, oldest first."""
    found = [path for path in directory.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step of a complete checkpoint."""
    return int(path.name[5:])


def until(path: Path) -> list[Path]:
    """This checkpoint and the complete ones before it, newest first."""
    older = (
        [other for other in complete(path.parent) if step_of(other) < step_of(path)] if path.name[5:].isdigit() else []
    )
    return [path, *reversed(older)]


def superseded(steps: Iterable[int], keep_last: int, keep_every: int) -> list[int]:
    """Steps whose checkpoints may go: not among the last few, nor the first at or after a multiple of `keep_every` (0 = none).

    >>> superseded([3, 6, 9, 12, 15, 18], keep_last=2, keep_every=6)
    [3, 9]
    """
    ordered = sorted(steps)
    kept = dict.fromkeys(ordered[-max(1, keep_last) :])
    passed: dict[int, None] = {}
    for step in ordered:
        if keep_every and step >= keep_every and step // keep_every not in passed:
            passed[step // keep_every] = None
            kept[step] = None
    return [step for step in ordered if step not in kept]


# ---- bytes -------------------------------------------------------------------------------------------------


def digest(file: Path) -> FileDigest:
    """Of a file's bytes, read again. Raises OSError."""
    hasher, num_bytes = xxhash.xxh3_128(), 0
    with file.open("rb", buffering=0) as opened:
        while part := opened.read(READ_BYTES):
            hasher.update(part)
            num_bytes += len(part)
    return FileDigest(num_bytes=num_bytes, xxh3=hasher.hexdigest())


def write_manifest(path: Path, files: dict[str, FileDigest]) -> None:
    """Raises OSError."""
    manifest = Manifest(files=dict(sorted(files.items())))
    (path / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(path: Path) -> Manifest | str:
    """The manifest, or why the checkpoint is damaged. Raises UnreadableError."""
    try:
        manifest = msgspec.json.decode(_read(path / MANIFEST), type=Manifest)
    except FileNotFoundError:
        return f"{MANIFEST} is missing" if path.is_dir() else "it is missing"
    except msgspec.MsgspecError as error:
        return f"{MANIFEST} is no manifest: {error}"
    if manifest.format != FORMAT:
        raise UnreadableError(f"it has checkpoint format {manifest.format}, this Laminar reads {FORMAT}")
    return manifest


def damage(path: Path, names: Iterable[str], manifest: Manifest) -> str:
    """What is wrong with these files of a checkpoint; empty = nothing. Raises UnreadableError."""
    for name in names:
        written = manifest.files.get(name)
        if written is None:
            return f"{name} is not in its {MANIFEST}"
        try:
            found = digest(path / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            if error.errno == errno.EIO:
                return f"{name} cannot be read: {error.strerror}"
            raise UnreadableError(f"{name} cannot be read: {error.strerror}") from error
        if found.num_bytes != written.num_bytes:
            return f"{name} has {found.num_bytes} bytes, {written.num_bytes} were written"
        if found != written:
            return f"{name} has other bytes than were written"
    return ""


class Newest(NamedTuple):
    """The newest checkpoint in which the controller's part is undamaged. Whether its weights are, the trainer has to see."""

    path: Path
    data_state: bytes
    damaged: dict[Path, str]
    """Newer ones, and what is wrong with each."""


def newest_data_state(newest: Path) -> Newest:
    """Of `newest`, or the checkpoints before it. Raises StartError if there is none."""
    damaged: dict[Path, str] = {}
    for path in until(newest):
        try:
            found = _data_state(path)
        except UnreadableError as error:
            raise StartError(f"cannot resume from {path}: {error}") from error
        if isinstance(found, bytes):
            return Newest(path, found, damaged)
        damaged[path] = found
    told = "; ".join(f"{path.name}: {what}" for path, what in damaged.items())
    raise StartError(f"cannot resume from {newest}: no checkpoint there is undamaged: {told}")


def _data_state(path: Path) -> bytes | str:
    """The controller's part of a checkpoint, or why that is damaged. Raises UnreadableError."""
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return manifest
    return damage(path, [DATA_STATE], manifest) or _read(path / DATA_STATE)


def _read(file: Path) -> bytes:
    """Raises FileNotFoundError, UnreadableError."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"{file.name} cannot be read: {error.strerror}") from error


# ---- renaming and deleting ---------------------------------------------------------------------------------


def publish(staging: Path, path: Path) -> None:
    """Give a directory whose files are on disk its final name. An older one of that name goes. Raises OSError."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    staging.rename(path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """What was written there is on disk afterwards. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> None:
    """Never take a damaged checkpoint for a good one again. Raises OSError."""
    damaged = path.with_name(path.name + ".damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    path.rename(damaged)


def delete(path: Path) -> None:
    """A complete one, which may take seconds; best effort."""
    deleted = path.with_name(path.name + ".deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    try:
        path.rename(deleted)
    except OSError:
        return
    shutil.rmtree(deleted, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what was half written or half deleted, by processes that are dead; best effort."""
    for path in directory.glob("step-*"):
        if any(mark in path.name for mark in _LEFT):
            shutil.rmtree(path, ignore_errors=True)
