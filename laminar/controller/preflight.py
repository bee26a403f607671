"""The check of other hosts before a run begins: all at once, all failures in one message, nothing started and nothing left.

Each is asked over ssh, by every Python that will run something there, whether it has the same Laminar, reaches the controller's
address, and has what it needs (`laminar.workers.remote.check`).
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from laminar import remote
from laminar.config import Config
from laminar.controller import ssh
from laminar.controller.plan import addresses_of, listen_of, pythons_of, vllm_pythons_of
from laminar.controller.reach import Reach
from laminar.errors import StartError
from laminar.hosts import Host, is_local
from laminar.plugins import is_file_reference
from laminar.remote import Answer, Question

CHECK = "laminar.workers.remote.check"
ANSWER_S = 60.0  # connecting, and a first start of Python on a file system that is shared by many
AT_ONCE_MAX = 64  # clients
SHOWN_MAX = 16  # hosts in a message: one screen; they mostly fail alike


def check_hosts(config: Config, hosts: list[Host], reach: Reach) -> dict[str, Answer]:
    """What other hosts answered, by address; empty if there are none. Raises StartError that names all that cannot take part."""
    others = [address for address in addresses_of(hosts) if not is_local(address)]
    if not others:
        return {}
    with _listening(reach.bind, config.controller.port) as port, _marker(Path(config.run.dir)) as marker:
        return asyncio.run(_ask_all(config, hosts, others, (reach.dial, port), marker))


async def _ask_all(
    config: Config, hosts: list[Host], others: list[str], controller: tuple[str, int], marker: str
) -> dict[str, Answer]:
    limit = asyncio.Semaphore(AT_ONCE_MAX)
    own = remote.version()

    async def ask(address: str, python: str) -> Answer | str:
        async with limit:
            question = _question(address, config, hosts, controller, marker)
            return await _ask(config.controller.ssh, address, python, question, own)

    asked = [(address, python) for address in others for python in pythons_of(address, hosts)]
    answers = await asyncio.gather(*(ask(address, python) for address, python in asked))
    problems: dict[str, list[str]] = {}
    for (address, _), answer in zip(asked, answers, strict=True):
        found = [answer] if isinstance(answer, str) else answer.problems
        problems.setdefault(address, []).extend(problem for problem in found if problem not in problems[address])
    for address, other in _same_machines(hosts, dict(zip(asked, answers, strict=True))).items():
        problems[address].append(
            f"it is the machine that the hosts file calls {other} too: call it the same in both lines, or it gets two relays, each "
            "with slots of its own, and its GPUs are given out twice"
        )
    failed = {address: found for address, found in problems.items() if found}
    if failed:
        raise StartError(_message(failed, len(others)))
    return {address: answer for (address, _), answer in zip(asked, answers, strict=True) if isinstance(answer, Answer)}


def _same_machines(hosts: list[Host], answers: dict[tuple[str, str], Answer | str]) -> dict[str, str]:
    """Addresses at which a machine answered that another address stands for, with that one."""
    known = {remote.machine(): host.address for host in hosts if is_local(host.address)}
    machines = {address: answer.machine for (address, _), answer in answers.items() if isinstance(answer, Answer)}
    first = {address: known.setdefault(machine, address) for address, machine in machines.items()}
    return {address: other for address, other in first.items() if other != address}


def _question(address: str, config: Config, hosts: list[Host], controller: tuple[str, int], marker: str) -> Question:
    roles = [host.role for host in hosts if host.address == address]
    return Question(
        controller=controller,
        chained=len(addresses_of(hosts)) > 1,
        listen=listen_of(address, hosts),
        files=_files(config, "rollout" in roles),
        marker=marker if "trainer" in roles else "",
        pythons=vllm_pythons_of(address, hosts),
    )


def _files(config: Config, generates: bool) -> list[str]:
    """What a worker reads of its host: the model, and where it generates the user's reward."""
    files = [str(Path(config.model.path) / "config.json")]
    if generates and is_file_reference(config.task.reward):
        files.append(config.task.reward.rpartition(":")[0])
    return files


async def _ask(client: str, address: str, python: str, question: Question, own: str) -> Answer | str:
    """The answer, or why there is none."""
    process = await asyncio.create_subprocess_exec(
        *ssh.command(client, address, python, CHECK),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        asked = process.communicate(msgspec.json.encode(question) + b"\n")
        output, words = await asyncio.wait_for(asked, ANSWER_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return ssh.explain(remote.LOST, f"no answer within {ANSWER_S:g} s", address, python)
    line = next((line for line in output.splitlines() if line.startswith(remote.ANSWER)), None)
    if line is None:
        return ssh.explain(process.returncode or 0, words.decode(errors="replace"), address, python)
    try:
        answer = msgspec.json.decode(line.removeprefix(remote.ANSWER), type=Answer)
    except msgspec.MsgspecError as error:
        return f"its {python} has a Laminar of another version ({error}): install that of the controller, {own}"
    if answer.version != own:
        return f"its {python} has Laminar {answer.version}, the controller {own}: install the same"
    return answer


def _message(failed: dict[str, list[str]], num_others: int) -> str:
    lines = [f"{len(failed)} of {num_others} other hosts cannot take part; nothing was started:"]
    for address in list(failed)[:SHOWN_MAX]:
        lines += [f"  {address}: {problem}" for problem in failed[address]]
    if len(failed) > SHOWN_MAX:
        lines.append(f"  and {', '.join(list(failed)[SHOWN_MAX:])}")
    return "\n".join(lines)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[int]:
    """The port of a socket where the controller's will be, for other hosts to connect to."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): name an address of this machine that other hosts "
            "reach with controller.host=ADDRESS"
        ) from error
    with listener:
        yield int(listener.getsockname()[1])


@contextlib.contextmanager
def _marker(directory: Path) -> Iterator[str]:
    """A file where runs are kept, to be seen by hosts that share it."""
    path = directory.absolute() / f".shared-{secrets.token_hex(8)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise StartError(f"cannot write the runs' directory {directory}: {error.strerror}") from error
    try:
        yield str(path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
