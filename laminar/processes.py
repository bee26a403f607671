"""The processes of a run on this machine: finding all of them, and ending them.

They are known by the run's token in their environment, also when their parent is dead and they are in sessions of their own
(torchrun's ranks); and by the session of such a process, since some wipe their environment (vLLM's).
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping

import psutil

TOKEN, NAME, LOG = "LAMINAR_TOKEN", "LAMINAR_PROCESS", "LAMINAR_LOG"  # environment of every process of a run
SUPERVISED = "LAMINAR_LAUNCH"  # and of those that have a supervisor, which tells one from a later one of the same name
LOOK_S = 0.01  # nobody tells us of the end of processes that are not our children
KILL_ROUNDS = 2  # the second meets what the first saw being born


def marked(marks: Mapping[str, str], roots: Collection[int] = ()) -> list[psutil.Process]:
    """Everything that runs now with these variables in its environment; `roots`: pids of sessions that belong to it in any case."""
    running = list(psutil.process_iter())
    known = [process for process in running if process.pid in roots or _has(process, marks)]
    sessions = ({_session(process) for process in known} | set(roots)) - {0, os.getsid(0)}
    return living([process for process in running if process in known or _session(process) in sessions])


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; a zombie has."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """A signal to each; one that has ended meanwhile is fine."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def kill(find: Callable[[], list[psutil.Process]]) -> None:
    """End at once what `find` finds."""
    for _ in range(KILL_ROUNDS):
        send(find(), signal.SIGKILL)


def end(find: Callable[[], list[psutil.Process]], limit_s: float) -> None:
    """The same until it finds nothing, but not for ever: a process may hang in the kernel."""
    deadline = time.monotonic() + limit_s
    while (found := find()) and time.monotonic() < deadline:
        send(found, signal.SIGKILL)
        time.sleep(LOOK_S)


def _has(process: psutil.Process, marks: Mapping[str, str]) -> bool:
    try:
        environment = process.environ()
    except (psutil.Error, OSError):  # ended, or somebody else's
        return False
    return all(environment.get(key) == value for key, value in marks.items())


def _session(process: psutil.Process) -> int:
    """Of this process; 0 if it has ended."""
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0
