"""Machines on one machine: network namespaces on a bridge, each with its own sshd, host name, process ids and /dev/shm.

The first one, `Machine` 0, is where the controller runs; the others are reached from it by ssh under names that only the client's
configuration knows (node1.cluster is node1 too). Needs root, iproute2, util-linux and openssh-server; `why_not()` says what is
missing.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Self

import psutil

SSHD = "/usr/sbin/sshd"
PORT = 2222
LIMIT_S = 60.0
INSIDE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
SSHD_CONFIG = """\
Port {port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
SSH_CONFIG = """\
Host {name} {name}.cluster
    HostName {address}
    Port {port}
    User root
    IdentityFile {directory}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {directory}/known_hosts
    StrictHostKeyChecking yes

"""


def why_not() -> str:
    """What is missing; empty = nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("ssh", "openssh-client")):
        if shutil.which(program) is None:
            return f"{program} is missing ({package})"
    if not os.access(SSHD, os.X_OK):
        return "sshd is missing (openssh-server)"
    name = f"lm{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"this machine makes no network namespaces: {made.stderr.strip()}"
    tried = subprocess.run(["ip", "netns", "exec", name, *INSIDE, "true"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"this machine makes no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Machines:
    """`num` machines beside that of the controller, called node1, node2, …; their keys and configuration lie in a directory."""

    def __init__(self, num: int) -> None:
        self.mark = f"lm{uuid.uuid4().hex[:6]}"
        self.names = [f"node{number}" for number in range(1, num + 1)]
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="laminar-hosts-"))
        try:
            _run("ip", "link", "add", self.mark, "type", "bridge")
            _run("ip", "link", "set", self.mark, "up")
            for number in range(len(self.names) + 1):
                self._add(number)
            self._make_keys()
            for number in range(1, len(self.names) + 1):
                self._start_sshd(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(LIMIT_S)
            assert daemon.stderr is not None
            daemon.stderr.close()
        for number in range(len(self.names) + 1):
            for process in self.processes(number):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            subprocess.run(["ip", "netns", "del", self.namespace(number)], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", self._cable(number)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.mark], check=False, capture_output=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def client(self) -> str:
        """For `controller.ssh`."""
        return f"ssh -F {self.directory}/ssh_config"

    @property
    def wrap(self) -> tuple[str, ...]:
        """Runs a command on the controller's machine."""
        return self.wrap_at(0, "controller")

    def wrap_at(self, number: int, name: str) -> tuple[str, ...]:
        """Runs a command on a machine of its own, with this name, at the address of another."""
        inside = f'mount -t tmpfs tmpfs /dev/shm && hostname {name} && exec "$@"'
        return ("ip", "netns", "exec", self.namespace(number), *INSIDE, "sh", "-c", inside, "sh")

    def namespace(self, number: int) -> str:
        return f"{self.mark}n{number}"

    def address(self, number: int) -> str:
        return f"10.78.0.{number + 1}"

    def cable(self, number: int, state: str) -> None:
        """``up`` or ``down``: a machine's only connection."""
        _run("ip", "link", "set", self._cable(number), state)

    def processes(self, number: int) -> list[psutil.Process]:
        """What runs there, sshd and what belongs to it included."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace(number)], capture_output=True, text=True, check=False
        )
        processes = []
        for pid in found.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(int(pid)))
        return processes

    def leftovers(self, number: int) -> list[str]:
        """Processes that are neither sshd nor what started it, and shared memory of runs, on a machine with an sshd."""
        left = []
        for process in self.processes(number):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() not in ("sshd", "unshare", "sh") and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{self.names[number - 1]}: {' '.join(process.cmdline()) or process.name()}")
        return left + [f"{self.names[number - 1]}: {path.name}" for path in self._shared_memory(number)]

    def await_nothing_left(self, limit_s: float = LIMIT_S) -> None:
        """On all machines with an sshd. AssertionError names what is."""
        deadline = time.monotonic() + limit_s
        while left := [each for number in range(1, len(self.names) + 1) for each in self.leftovers(number)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    def _shared_memory(self, number: int) -> list[Path]:
        daemon = psutil.Process(self._daemons[number - 1].pid)
        inside = daemon.children()[0].pid  # unshare's child has the file systems of its own
        return sorted(Path(f"/proc/{inside}/root/dev/shm").glob("laminar-*"))

    def _cable(self, number: int) -> str:
        return f"{self.mark}v{number}"

    def _add(self, number: int) -> None:
        name, cable = self.namespace(number), self._cable(number)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", cable, "master", self.mark, "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")

    def _make_keys(self) -> None:
        for key in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / key))
        (self.directory / "sshd_config").write_text(SSHD_CONFIG.format(directory=self.directory, port=PORT))
        host_key = (self.directory / "host_key.pub").read_text()
        known, config = "", ""
        for number, name in enumerate(self.names, start=1):
            address = self.address(number)
            known += f"[{address}]:{PORT} {host_key}"
            config += SSH_CONFIG.format(name=name, address=address, port=PORT, directory=self.directory)
        (self.directory / "known_hosts").write_text(known)
        (self.directory / "ssh_config").write_text(config)

    def _start_sshd(self, number: int) -> None:
        """Returns when it listens. What it says later, a line per login, nobody reads."""
        Path("/run/sshd").mkdir(exist_ok=True)  # its empty directory for the part without privileges
        name, configuration = self.names[number - 1], self.directory / "sshd_config"
        inside = f"mount -t tmpfs tmpfs /dev/shm && hostname {name} && exec {SSHD} -D -e -f {configuration}"
        daemon = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(number), *INSIDE, "sh", "-c", inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._daemons.append(daemon)
        assert daemon.stderr is not None
        with (self.directory / f"sshd-{number}.log").open("wb") as log:
            while b"Server listening" not in (line := daemon.stderr.readline()):
                assert line, f"sshd did not start: {(self.directory / f'sshd-{number}.log').read_text()}"
                log.write(line)
                log.flush()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip() or done.returncode}"
