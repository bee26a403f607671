"""What is done to a run. Each harm is a context manager: it strikes on entry and is undone on exit, however that comes about."""

import contextlib
import ctypes
import errno
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from laminar import processes
from laminar.errors import LaminarError

SLICE_S = 0.1  # of a slowed process: short enough for links between relays, which break after half a second
STOPPED_SHARE = 0.8
SO_ATTACH_FILTER, BPF_RET, SYS_PIDFD_GETFD = 26, 0x06, 438  # Linux, the same on all its architectures but the oldest
FILL_BYTES = (1 << 20, 512)  # in large pieces first; a tail smaller than the last fits nobody's page
KEEP_FULL_S = 0.02  # a checkpoint that is deleted makes room for the rest of the fault
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


class Connection(NamedTuple):
    """One end of a TCP connection."""

    pid: int
    descriptor: int
    own: tuple[str, int]
    peer: tuple[str, int]

    @property
    def ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Which connection it is, seen from here."""
        return self.own, self.peer


def connections(process: psutil.Process, port: int, *, served: bool = False) -> list[Connection]:
    """Of a process to a port, or, if they are `served`, at a port of its own."""
    try:
        found = process.net_connections("tcp")
    except psutil.Error:
        return []
    made = [
        Connection(process.pid, c.fd, tuple(c.laddr), tuple(c.raddr))
        for c in found
        if c.status == psutil.CONN_ESTABLISHED
    ]
    return [each for each in made if (each.own if served else each.peer)[1] == port]


def destroy(found: list[Connection]) -> None:
    """Abort connections from this end. Raises Impossible if the kernel does not do that."""
    if shutil.which("ss") is None:
        raise Impossible("ss is missing (iproute2)")
    for each in found:
        (own, own_port), (peer, peer_port) = each.ends
        which = ["src", own, "sport", "=", f":{own_port}", "dst", peer, "dport", "=", f":{peer_port}"]
        if not any(f":{own_port}" in line for line in _lines("ss", "--no-header", "-K", "-t", *which)):
            raise Impossible(
                "ss -K destroyed nothing: it is gone, or the kernel lacks CONFIG_INET_DIAG_DESTROY, or this is not root"
            )


def deafen(connection: Connection) -> None:
    """From now on the kernel drops every packet that comes for this end, without a word to either side. Raises Impossible."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    try:
        with contextlib.closing(_socket_of(connection)) as end:
            end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    except OSError as error:
        raise Impossible(f"packets for pid {connection.pid} cannot be dropped: {error.strerror}") from error


def _socket_of(connection: Connection) -> socket.socket:
    """Another descriptor for a socket of another process. Raises OSError."""
    process = os.pidfd_open(connection.pid)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        descriptor = library.syscall(SYS_PIDFD_GETFD, process, connection.descriptor, 0)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return socket.socket(fileno=descriptor)
    finally:
        os.close(process)


@contextlib.contextmanager
def cut(process: psutil.Process, port: int) -> Iterator[None]:
    """The worker's connections to the controller break."""
    destroy(_some(connections(process, port), process, port))
    yield


@contextlib.contextmanager
def frames_dropped(process: psutil.Process, controller: psutil.Process, port: int) -> Iterator[None]:
    """What the worker says is lost on its way, until its connections break: it has to say that again."""
    wanted = [each.ends for each in _some(connections(process, port), process, port)]
    found = [each for each in connections(controller, port, served=True) if (each.peer, each.own) in wanted]
    for each in _some(found, controller, port):
        deafen(each)
    try:
        yield
    finally:
        with contextlib.suppress(Impossible):  # the controller may have given a silent one up
            destroy(found)


def _some(found: list[Connection], process: psutil.Process, port: int) -> list[Connection]:
    if not found:
        raise Impossible(f"pid {process.pid} has no connection at port {port} now")
    return found


# ---- disk --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def filled(directory: Path, quota_bytes: int) -> Iterator[None]:
    """Not a byte is left on the directory's file system, nor of what is deleted meanwhile. Impossible if that would take more than
    the quota."""
    space = os.statvfs(directory)
    free = space.f_bfree * space.f_frsize
    if free > quota_bytes:
        raise Impossible(
            f"the file system of {directory} has {free >> 20} MiB free, and at most {quota_bytes >> 20} would be written to "
            "fill it: as root the run gets a small file system of its own; else raise --disk-quota-mib"
        )
    filler, over = directory / "chaos-filler", threading.Event()
    try:
        with filler.open("wb", buffering=0) as file:
            _write_until_full(file.fileno())
            arguments = (os.dup(file.fileno()), over)
            keeper = threading.Thread(target=_keep_full, args=arguments, name="keep the disk full", daemon=True)
            keeper.start()
            try:
                yield
            finally:
                over.set()
                keeper.join(LIMIT_S)  # a file system may hang
    finally:
        filler.unlink(missing_ok=True)


def _keep_full(descriptor: int, over: threading.Event) -> None:
    try:
        while not over.wait(KEEP_FULL_S):
            _write_until_full(descriptor)
    finally:
        os.close(descriptor)


def _write_until_full(descriptor: int) -> None:
    for size in FILL_BYTES:
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
    routes = [line.split() for line in _lines(*inside, "route", "show") if "proto kernel" not in line]
    handle = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)  # the process may die while it is cut off
    inside = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{handle}", "ip"]
    with contextlib.ExitStack() as undo:  # all of it is tried, whatever fails, the interfaces first
        undo.callback(os.close, handle)
        for route in routes:
            undo.callback(_lines, *inside, "route", "replace", *route)
        for device in devices:
            undo.callback(_lines, *inside, "link", "set", device, "up")
            _lines(*inside, "link", "set", device, "down")
        yield


def _lines(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except OSError as error:
        raise Impossible(f"{command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Impossible(f"{' '.join(command)} took longer than {LIMIT_S:g} s") from error
    if done.returncode:
        raise Impossible(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.splitlines()
