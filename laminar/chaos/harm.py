"""What is done to a run. Each harm is a context manager: it strikes on entry and is undone on exit, however that comes about."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from laminar import processes
from laminar.errors import LaminarError

SLICE_S = 0.1  # of a slowed process: short enough for links between relays, which break after half a second
STOPPED_SHARE = 0.8
KEEP_STOPPED_S = 0.4  # for frames of every worker to gather unread: it beats and flushes in less
FILL_BYTES = (1 << 20, 512)  # in large pieces first; a tail smaller than the last fits nobody's page
LIMIT_S = 10.0
FLIPPED_BYTES = 64


class Impossible(LaminarError):
    """The fault cannot strike here and now; the run is untouched."""


# ---- processes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def killed(found: list[psutil.Process]) -> Iterator[None]:
    """SIGKILL, which nothing undoes."""
    processes.send(found, signal.SIGKILL)
    yield


@contextlib.contextmanager
def stopped(found: list[psutil.Process]) -> Iterator[None]:
    """SIGSTOP, then SIGCONT to those that live."""
    try:
        processes.send(found, signal.SIGSTOP)
        yield
    finally:
        processes.send(found, signal.SIGCONT)


@contextlib.contextmanager
def slowed(found: list[psutil.Process]) -> Iterator[None]:
    """Stopped for most of every `SLICE_S`."""
    over = threading.Event()

    def pulse() -> None:
        while not over.is_set():
            processes.send(found, signal.SIGSTOP)
            over.wait(SLICE_S * STOPPED_SHARE)
            processes.send(found, signal.SIGCONT)
            over.wait(SLICE_S * (1 - STOPPED_SHARE))

    thread = threading.Thread(target=pulse, name="slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LIMIT_S)
        processes.send(found, signal.SIGCONT)


# ---- connections -------------------------------------------------------------------------------------------


def connections(process: psutil.Process, port: int) -> list[tuple[str, int, str, int]]:
    """(own address, own port, peer's address, peer's port) of its connections to a port."""
    try:
        found = process.net_connections("tcp")
    except psutil.Error:
        return []
    return [(*c.laddr, *c.raddr) for c in found if c.status == psutil.CONN_ESTABLISHED and c.raddr.port == port]


def destroy(sockets: list[tuple[str, int, str, int]]) -> None:
    """Abort connections from this end, whatever is in their buffers. Raises Impossible if the kernel does not do that."""
    if shutil.which("ss") is None:
        raise Impossible("ss is missing (iproute2)")
    for own, own_port, peer, peer_port in sockets:
        ends = ["src", own, "sport", "=", f":{own_port}", "dst", peer, "dport", "=", f":{peer_port}"]
        done = subprocess.run(
            ["ss", "--no-header", "-K", "-t", *ends], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode or f":{own_port}" not in done.stdout:
            why = done.stderr.strip() or "it needs root and a kernel with CONFIG_INET_DIAG_DESTROY"
            raise Impossible(f"ss -K destroyed nothing: {why}")


@contextlib.contextmanager
def cut(process: psutil.Process, port: int) -> Iterator[None]:
    """The worker's connections to the controller break."""
    sockets = connections(process, port)
    if not sockets:
        raise Impossible(f"pid {process.pid} has no connection to port {port} now")
    destroy(sockets)
    yield


@contextlib.contextmanager
def frames_dropped(process: psutil.Process, controller: psutil.Process, port: int) -> Iterator[None]:
    """What the worker has sent and the controller has not read is destroyed: it stands still while frames gather."""
    sockets = [(peer, peer_port, own, own_port) for own, own_port, peer, peer_port in connections(process, port)]
    if not sockets:
        raise Impossible(f"pid {process.pid} has no connection to port {port} now")
    with stopped([controller]):
        time.sleep(KEEP_STOPPED_S)
        destroy(sockets)
    yield


# ---- disk --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def filled(directory: Path, quota_bytes: int) -> Iterator[None]:
    """Not a byte is left on the directory's file system. Impossible if that would take more than the quota."""
    space = os.statvfs(directory)
    free = space.f_bfree * space.f_frsize
    if free > quota_bytes:
        raise Impossible(
            f"the file system of {directory} has {free >> 20} MiB free, and at most {quota_bytes >> 20} would be written to "
            "fill it: as root the run gets a small file system of its own; else raise --disk-quota-mib"
        )
    filler = directory / "chaos-filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in FILL_BYTES:
                _write_until_full(file.fileno(), size)
        yield
    finally:
        filler.unlink(missing_ok=True)


def _write_until_full(descriptor: int, size: int) -> None:
    zeros = bytes(size)
    try:
        while True:
            os.write(descriptor, zeros)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


# ---- shared memory -----------------------------------------------------------------------------------------


def flip(path: Path, num_bytes: int, seed: int) -> list[int]:
    """Flip bytes of the first `num_bytes` of a slot, some in a row at one place; where."""
    rolls = random.Random(seed)
    start = rolls.randrange(max(1, num_bytes - FLIPPED_BYTES))
    end = min(num_bytes, start + FLIPPED_BYTES)
    descriptor = os.open(path, os.O_RDWR)
    try:
        before = os.pread(descriptor, end - start, start)
        os.pwrite(descriptor, bytes(byte ^ 0xFF for byte in before), start)
    finally:
        os.close(descriptor)
    return [start, end]


# ---- network -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unplugged(process: psutil.Process) -> Iterator[None]:
    """All interfaces of the network namespace in which the process is go down, then up with their routes."""
    inside = ["nsenter", f"--net=/proc/{process.pid}/ns/net", "ip"]
    devices = [line.split(":")[1].split("@")[0].strip() for line in _lines(*inside, "-o", "link", "show", "up")]
    devices = [device for device in devices if device != "lo"]
    routes = [line.split() for line in _lines(*inside, "route", "show", "default")]
    handle = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)  # the process may die while it is cut off
    inside = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{handle}", "ip"]
    try:
        for device in devices:
            _lines(*inside, "link", "set", device, "down")
        yield
    finally:
        for device in devices:
            _lines(*inside, "link", "set", device, "up")
        for route in routes:
            _lines(*inside, "route", "replace", *route)
        os.close(handle)


def _lines(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except OSError as error:
        raise Impossible(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise Impossible(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.splitlines()
