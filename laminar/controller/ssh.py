"""The OpenSSH client: its command lines, what it passes on, and what its failures mean.

Names, ports, keys and jump hosts are the user's, in ~/.ssh/config. Passwords are never asked for.
"""

import os
import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence

from laminar.errors import ConfigError
from laminar.remote import LOST, NO_DIRECTORY

CONNECT_TIMEOUT_S = 10
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": CONNECT_TIMEOUT_S,
    "ServerAliveInterval": 10,  # a host that is silent for three of them is gone
    "ServerAliveCountMax": 3,
    "ControlMaster": "no",  # a connection per process: the end of one must not end others; a master that is there is used
    "ClearAllForwardings": "yes",
}
PASSED_ON = ("LAMINAR_", "HF_", "NCCL_", "GLOO_", "UCX_", "TORCH_", "VLLM_")
"""Beginnings of variables of the controller that processes on other hosts get too; its others mean this machine."""
NO_PYTHON = (126, 127)  # the shell's: no such program, or not one
LAST_WORDS = 3  # lines of ssh's that are shown
CONFIG_TIMEOUT_S = 10.0
ANY_PORT = 9  # of a datagram that is never sent
ASKED_MAX = 4  # hosts whose names are looked up: a resolver may take seconds for one that there is not

_ADVICE = (
    ("Could not resolve hostname", "correct the name in the hosts file, or give it a HostName in ~/.ssh/config"),
    (
        "Permission denied",
        "let ssh in without a password: ssh-copy-id ADDRESS, and ssh-add for a key with a passphrase; the user is the one that "
        "~/.ssh/config names, else yours",
    ),
    ("Too many authentication failures", "name its key with IdentityFile and IdentitiesOnly=yes in ~/.ssh/config"),
    (
        "IDENTIFICATION HAS CHANGED",
        "if it was installed anew, forget its old key (ssh-keygen -R ADDRESS) and connect once by hand",
    ),
    ("Host key verification failed", "connect once by hand to accept its key: ssh ADDRESS"),
    ("Connection refused", "start sshd there, or name its port in ~/.ssh/config"),
    ("timed out", "is it up, and does a firewall let ssh through?"),
    ("No route to host", "is it up, and in this network?"),
    ("Bad configuration option", "correct ~/.ssh/config, or the options in controller.ssh"),
)


def command(client: str, address: str, python: str, module: str) -> list[str]:
    """A Python module on another host, in the controller's working directory."""
    options = [word for key, value in OPTIONS.items() for word in ("-o", f"{key}={value}")]
    path = os.environ.get("PYTHONPATH", "")
    start = [*(["env", f"PYTHONPATH={path}"] if path else []), python, "-m", module]
    there = f"cd {shlex.quote(os.getcwd())} || exit {NO_DIRECTORY}; exec {shlex.join(start)}"
    return [*shlex.split(client), "-T", *options, address, there]


def inherited(names: Iterable[str] = ()) -> dict[str, str]:
    """What a process on another host has of the controller's environment: PASSED_ON, and `names`."""
    wanted = set(names)
    return {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON) or key in wanted}


def explain(status: int, words: str, address: str, python: str) -> str:
    """Why nothing runs there, and what to do, from the client's exit status and stderr."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    said = "; ".join(lines[-LAST_WORDS:]) or "not a word"
    if status == NO_DIRECTORY:
        return (
            f"it has no directory {os.getcwd()}: start the controller in one that every host has, with the same files"
        )
    if status in NO_PYTHON:
        return (
            f"it has no Python {python} ({said}): install it there, or name another with python=PATH in the hosts file"
        )
    if "No module named" in words:
        return f"its {python} lacks what is needed ({said}): install the same Laminar there, or name another with python=PATH"
    if status == LOST or status < 0:
        advice = next((advice for mark, advice in _ADVICE if mark in words), "does `ssh ADDRESS true` work by hand?")
        return f"ssh failed ({said}): {advice.replace('ADDRESS', address)}"
    return said


def own_address_towards(client: str, addresses: Sequence[str]) -> str:
    """This machine's address as those hosts may see it, by the route to the first of them that there is one to; nothing is sent.

    Raises ConfigError.
    """
    reasons = []
    for address in addresses[:ASKED_MAX]:
        name = _host_name(client, address)
        try:
            family, kind, _, _, target = socket.getaddrinfo(name, ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            reasons.append(f"{name}: {error.strerror or error}")
    raise ConfigError(
        f"no name of another host in the hosts file leads anywhere from here ({'; '.join(reasons)}): correct the names, or give "
        "each a HostName in ~/.ssh/config; if only a jump host knows them, say which address of this machine they reach with "
        "controller.advertise=ADDRESS"
    )


def _host_name(client: str, address: str) -> str:
    """What ~/.ssh/config makes of a host's name. Raises ConfigError without a client."""
    asking = [*shlex.split(client), "-G", address]
    try:
        done = subprocess.run(
            asking, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=CONFIG_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise ConfigError(
            f"the hosts file names {address}, which is not this machine, and there is no {asking[0]} ({error.strerror}): "
            "install the OpenSSH client, or name it with controller.ssh"
        ) from error
    except subprocess.TimeoutExpired:
        return address
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else address
