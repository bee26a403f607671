"""What the controller and its supervisors on other hosts say to each other (docs/cluster.md).

Each process on another host has a supervisor there, which outlives the ssh connection to it (`laminar.workers.remote.supervise`):

    controller ── stdin ──► one line: `Order`, or `Attach` to one given before; then words: HERE now and then, TERMINATE, KILL
               ◄─ stdout ─  what the process writes
               ◄─ stderr ─  one line: STARTED, or why not
               ◄─ status ─  of the process, `status_of`; LOST is ssh's own: no connection, or it broke

A connection that breaks says nothing about the process: the controller, or the one that takes its place, attaches again. Without a
word for `Order.survive_s` the supervisor ends the process.

Before anything starts, `laminar.workers.remote.check` answers a `Question` in the same way, by one line on stdout.
"""

import hashlib
import os
import signal
from pathlib import Path

import msgspec

import laminar

STARTED = b"laminar: started\n"
HERE, TERMINATE, KILL = b"here\n", b"terminate\n", b"kill\n"
ANSWER = b"laminar: "
"""Begins the line with the answer; a login may print lines of its own."""

LOST = 255
NOT_STARTED = 96
NO_DIRECTORY = 97
GONE = 98  # nobody to attach to
OUTDATED = 99  # a controller with a higher boot number has the process
_SIGNALLED = 128  # and up: the shell's convention


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """A process to start."""

    command: list[str]
    environment: dict[str, str]
    """In addition to that of a login there; `processes.TOKEN` and `processes.NAME` are in it."""
    survive_s: float
    """How long the process may go on without a word of any controller, to its supervisor or to itself. It stops by itself when it
    is orphaned; this is for one that does not."""
    url: str
    """Where the controller is."""
    boot: int
    """Its boot number."""


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """A process that was started before, and whose connection broke or whose controller died."""

    token: str
    """Of its run."""
    name: str
    url: str
    """Where the controller is now."""
    boot: int
    """Its boot number: a supervisor obeys the highest that it has seen."""


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """From supervisor to supervisor: the process is started anew."""

    boot: int


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a host needs for its part in a run."""

    controller: tuple[str, int]
    """Host and port that its workers will dial."""
    chained: bool
    """Whether its relay has links to those of other hosts."""
    listen: str
    """Address for them; empty = the one that ssh reached."""
    files: list[str]
    """Files that its workers read: of the model, of rewards."""
    marker: str
    """File in the run's directory, if this host must share it; else empty."""
    pythons: list[str]
    """Interpreters of environments with vLLM."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is there."""

    version: str
    """`version` of the Laminar that answers."""
    problems: list[str]
    """What keeps the host from taking part, each with what to do."""
    listen: str
    """Address for links of its relay; empty if that is unknown, or it has none."""
    num_cpus: int
    machine: str
    """As `machine` says."""


def machine() -> str:
    """What tells this machine, or container, from others, under whatever name: its boot, process ids and shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.stat('/dev/shm').st_dev}"


def version() -> str:
    """Of this Laminar, exact to the byte: ``0.1.0 (3f2a…)`` with a digest of its sources."""
    package = Path(laminar.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return f"{laminar.__version__} ({digest.hexdigest()[:12]})"


def status_of(returncode: int) -> int:
    """A process's end (negative: its signal) as the status of its supervisor, which ssh passes on."""
    return _SIGNALLED - returncode if returncode < 0 else min(returncode, LOST - 1)


def returncode_of(status: int) -> int:
    """The opposite of `status_of`."""
    is_signal = _SIGNALLED < status < LOST and status - _SIGNALLED in set(signal.Signals)
    return _SIGNALLED - status if is_signal else status
