"""`python -m laminar.workers.remote.check`: whether this host can take part in a run; asked over ssh before anything starts.

`Question` on stdin, `Answer` on stdout. Each problem says what is wrong here and what to do.
"""

import ipaddress
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from laminar.remote import ANSWER, Answer, Question, machine, version

CONNECT_TIMEOUT_S = 5.0


def main() -> int:
    """Always 0: the answer says the rest."""
    question = msgspec.json.decode(sys.stdin.buffer.readline(), type=Question)
    listen = question.listen or (_address_that_ssh_reached() if question.chained else "")
    answer = Answer(
        version=version(),
        problems=list(_problems(question, listen)),
        listen=listen,
        num_cpus=os.cpu_count() or 1,
        machine=machine(),
    )
    sys.stdout.buffer.write(ANSWER + msgspec.json.encode(answer) + b"\n")
    return 0


def _address_that_ssh_reached() -> str:
    fields = os.environ.get("SSH_CONNECTION", "").split()  # client, its port, this host, its port
    return fields[2] if len(fields) == 4 else ""


def _problems(question: Question, listen: str) -> Iterator[str]:
    yield from _of_controller(*question.controller)
    if listen:
        yield from _of_listening(listen)
    for file in question.files:
        if not os.access(file, os.R_OK):
            yield f"it has no file {file} that it can read: put it there, or on a file system that all hosts share"
    if question.marker:
        yield from _of_run_directory(Path(question.marker))
    for python in question.pythons:
        if not os.access(python, os.X_OK):
            yield f"there is no Python {python} for vLLM: run scripts/setup-vllm there, or name another with python=PATH"


def _of_controller(host: str, port: int) -> Iterator[str]:
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        yield (
            f"it cannot connect to the controller at {host}:{port} ({why}): name an address of the controller that it reaches with "
            "controller.advertise=ADDRESS, or a port that firewalls let through with controller.port=PORT"
        )


def _of_listening(address: str) -> Iterator[str]:
    """A relay listens for the relays of other hosts."""
    advice = "name the address at which the other hosts reach it with listen=ADDRESS in the hosts file"
    try:
        family, _, _, _, resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(resolved)
    except OSError as error:
        yield f"its relay cannot listen on {address} ({error.strerror or error}): {advice}"
        return
    if ipaddress.ip_address(str(resolved[0]).partition("%")[0]).is_loopback:
        yield f"{address} is {resolved[0]} there, where no other host reaches its relay: {advice}"


def _of_run_directory(marker: Path) -> Iterator[str]:
    """A trainer writes checkpoints where the controller looks for them."""
    if not marker.exists():
        yield (
            f"the run's directory {marker.parent} is not the controller's: the trainer writes checkpoints for it to read, "
            "so put it on a file system that both share (run.dir=PATH)"
        )
        return
    try:
        tempfile.NamedTemporaryFile(dir=marker.parent).close()
    except OSError as error:
        yield f"it cannot write into the run's directory {marker.parent} ({error.strerror}): correct its permissions"


if __name__ == "__main__":
    sys.exit(main())
