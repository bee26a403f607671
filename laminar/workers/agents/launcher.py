"""Runs one agent program and what it starts, and leaves nothing of it: a script for `python -I -S`, so standard library only.

    launcher.py <parent pid> <memory bytes, 0 = no limit> <directory> <command …>

The agent runs in `directory`, which is made for it, in a session of its own. When it ends, or the parent does, or SIGTERM
comes, everything that it started is killed, also what has left its process group, and the directory is removed. Exit status:
the agent's, or 128 + n for a signal n.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CANNOT_START = 127  # as shells say
FILE_BYTES_MAX = 4 << 30  # a runaway log fills no disk


def main():
    parent, memory_bytes, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the agent's children leave behind becomes ours
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.mkdir(directory, 0o700)  # only now: before SIGTERM was blocked, it would have been left behind
    agent = os.fork()
    if not agent:
        become(sys.argv[4:], directory, memory_bytes)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    status = until_ended(agent) if os.getppid() == parent else 128 + signal.SIGTERM
    kill_descendants()
    remove(directory)
    os._exit(status)


def prctl(option, value):
    ctypes.CDLL(None).prctl(option, value)


def become(command, directory, memory_bytes):
    """Turn this process into the agent."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    try:
        os.setsid()
        os.chdir(directory)
        limit(resource.RLIMIT_CORE, 0)
        limit(resource.RLIMIT_FSIZE, FILE_BYTES_MAX)
        if memory_bytes:
            limit(resource.RLIMIT_AS, memory_bytes)
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
    os._exit(CANNOT_START)


def limit(what, value):
    """No more than that, and no more than there is."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def until_ended(agent):
    """The agent's status, or that of SIGTERM."""
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            return 128 + signal.SIGTERM
        while True:  # one SIGCHLD may stand for several children
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == agent:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if pid == 0:
                break


def kill_descendants():
    """The children of what is killed become ours, until there are none."""
    while True:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def remove(directory):
    """With all that is in it; what cannot be removed stays. (Importing shutil for this would take longer than all the rest.)"""
    for path, directories, files in os.walk(directory, topdown=False):
        for name in files + directories:
            full = os.path.join(path, name)
            attempt(os.rmdir if name in directories and not os.path.islink(full) else os.unlink, full)
    attempt(os.rmdir, directory)


def attempt(function, path):
    try:
        function(path)
    except OSError:
        return


def children():
    """Our own, by /proc."""
    found, me = [], str(os.getpid())
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == me:
            found.append(int(name))
    return found


if __name__ == "__main__":
    main()
