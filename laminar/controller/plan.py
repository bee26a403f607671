"""Which process runs where, with which command: what `--dry-run` prints and the launcher starts.

A process of another host has two commands: that of the ssh client here, which starts a supervisor there, and its own.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import laminar
from laminar.config import Config
from laminar.controller import ssh
from laminar.errors import ConfigError
from laminar.hosts import Host, is_local, is_name_of_this
from laminar.remote import Answer
from laminar.wire import ADDRESS_VARIABLE, HOST_VARIABLE

RENDEZVOUS_PORT = 29500
"""Where the nodes of a trainer on several hosts meet, on the first of them; torchrun's own default."""
GPUS = "CUDA_VISIBLE_DEVICES"
SUPERVISOR = "laminar.workers.remote.supervise"
LOCAL_ADDRESS = "--local-addr=127.0.0.1"  # or torchrun waits for ever on a host whose own name does not resolve


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start."""

    name: str
    """Worker name; the ranks of a trainer are ``<name>/<rank>``, numbered over all its hosts."""
    role: str
    address: str
    command: list[str]
    environment: dict[str, str]
    """In addition to the controller's own, or on another host that of a login there; the run's token is added when it starts."""
    ssh: list[str] = []
    """On another host: the client's command line that starts its supervisor. Empty = it runs here."""
    inherits: list[str] = []
    """On another host: names of further variables of the controller that it gets (`ssh.PASSED_ON` are given to all)."""
    num_workers: int = 1
    """Channels that it opens."""


def url_of(host: str, port: int | str) -> str:
    """Where workers on this machine reach a controller that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def addresses_of(hosts: list[Host]) -> list[str]:
    """Each host once, in the order of the file."""
    return list(dict.fromkeys(host.address for host in hosts))


def plan(
    config: Config,
    hosts: list[Host],
    url: str,
    resume: Path | None,
    found: Mapping[str, Answer] | None = None,
    rendezvous_port: int = RENDEZVOUS_PORT,
) -> list[Process]:
    """All processes of a run but the controller. Raises ConfigError for what this version cannot launch.

    `found`: what the check of other hosts found, by address; without it (to show a plan) the defaults stand.
    """
    _require_supported(config, hosts)
    found = found or {}
    addresses = addresses_of(hosts)
    processes = [_relay(address, index, hosts, url, found) for index, address in enumerate(addresses)]
    trainers = _role(hosts, "trainer")
    reached = [_links_at(host.address, hosts, url, found) for host in trainers]
    for index, host in enumerate(trainers):
        process = _trainer(host, index, url, _rendezvous(reached, index, rendezvous_port))
        process.environment.update({ADDRESS_VARIABLE: reached[index]} if len(trainers) > 1 else {})
        processes.append(going_on_from(process, resume, rendezvous_port))
    number = 0
    for host in _role(hosts, "rollout"):
        for index in range(host.replicas):
            process = _rollout(host, number, url, config)
            process.environment.update(_gpus(host, index, hosts))
            processes.append(process)
            number += 1
    for process in processes:
        process.environment.update(_of_host(process, hosts, found))
    return [_with_ssh(process, config) for process in processes]


def one_more(
    config: Config,
    hosts: list[Host],
    url: str,
    running: Sequence[Process],
    address: str = "",
    found: Mapping[str, Answer] | None = None,
) -> Process:
    """One more replica, on the first rollout host that has room for it, or on the one at `address`.

    `running`: the run's processes so far; the new one has a name that none of them has. Raises ConfigError if there is no room.
    """
    known = [host for host in _role(hosts, "rollout") if address in ("", host.address)]
    if not known:
        there = ", ".join(host.address for host in _role(hosts, "rollout"))
        raise ConfigError(f"{address} is no rollout host of this run; there are: {there}")
    taken = [(process.address, process.environment.get(GPUS)) for process in running]
    numbers = [int(process.name.rpartition("-")[2]) for process in running if process.role == "rollout"]
    for host in known:
        for index in range(host.gpus // host.tp if host.gpus else 1):
            gpus = _gpus(host, index, hosts)
            if host.url or (gpus and (host.address, gpus[GPUS]) in taken):
                continue
            process = _rollout(host, max(numbers, default=-1) + 1, url, config)
            process.environment.update(gpus)
            process.environment.update(_of_host(process, hosts, found or {}))
            return _with_ssh(process, config)
    where = address or "every rollout host"
    raise ConfigError(
        f"{where} has no room: all its GPUs, or its servers, are in use; drain a replica, or name another host"
    )


def _of_host(process: Process, hosts: list[Host], found: Mapping[str, Answer]) -> dict[str, str]:
    """Environment that depends on the process's host: its name, where there are several, and its share of the CPUs, where known."""
    address = process.address
    environment = {HOST_VARIABLE: address} if len(addresses_of(hosts)) > 1 else {}
    if is_local(address):
        sharing, num_cpus = [host for host in hosts if is_local(host.address)], os.cpu_count() or 1
    elif address in found:
        sharing, num_cpus = [host for host in hosts if host.address == address], found[address].num_cpus
    else:
        return environment
    num_busy = sum(map(_num_busy, sharing))
    threads = 1 if process.role == "relay" else max(1, num_cpus // max(1, num_busy))
    return {"OMP_NUM_THREADS": str(threads), **environment}


def _with_ssh(process: Process, config: Config) -> Process:
    if is_local(process.address):
        return process
    command = ssh.command(config.controller.ssh, process.address, process.command[0], SUPERVISOR)
    inherits = config.task.agent_env if process.role == "rollout" else []
    return msgspec.structs.replace(process, ssh=command, inherits=inherits)


def _role(hosts: list[Host], role: str) -> list[Host]:
    return [host for host in hosts if host.role == role]


def _num_busy(host: Host) -> int:
    return host.ranks if host.role == "trainer" else host.replicas


def _require_supported(config: Config, hosts: list[Host]) -> None:
    here = next((host for host in hosts if is_name_of_this(host.address)), None)
    for host in hosts:
        if here is not None and is_name_of_this(host.address) and host.address != here.address:
            raise ConfigError(
                f"hosts file, line {host.line}: {host.address} is this machine, which line {here.line} calls {here.address}: call "
                f"it the same in both, or it gets two relays, each with slots of its own, and its GPUs are given out twice"
            )
    rollout = config.rollout
    truncated = rollout.top_p < 1 or rollout.top_k > 0
    for host in hosts:
        if host.engine == "vllm" and rollout.temperature not in (0.0, 1.0) and truncated:
            raise ConfigError(
                f"hosts file, line {host.line}: vLLM reports no log-probs before truncation at temperature "
                f"{rollout.temperature}; use rollout.temperature = 1, or no rollout.top_p and rollout.top_k"
            )
        if host.role == "rollout" and host.gpus and host.replicas * host.tp > host.gpus:
            raise ConfigError(
                f"hosts file, line {host.line}: {host.replicas} replicas of {host.tp} GPUs need more than gpus={host.gpus}"
            )


def pythons_of(address: str, hosts: list[Host]) -> list[str]:
    """Interpreters with Laminar that run something at an address."""
    return list(dict.fromkeys(_python(host) for host in hosts if host.address == address))


def vllm_pythons_of(address: str, hosts: list[Host]) -> list[str]:
    """Interpreters that run vLLM servers there."""
    own = [host for host in hosts if host.address == address and host.engine == "vllm" and not host.url]
    return list(dict.fromkeys(map(_vllm_python, own)))


def _python(host: Host) -> str:
    return sys.executable if host.engine == "vllm" else host.python or sys.executable


def _vllm_python(host: Host) -> str:
    """Of the environment with vLLM: named, or the one that scripts/setup-vllm makes. Raises ConfigError if it is not here, but
    should be."""
    beside = [Path(sys.prefix).parent, Path(laminar.__file__).parent.parent]
    made = [str(directory / ".venv-vllm" / "bin" / "python") for directory in beside]
    named = host.python or os.environ.get("LAMINAR_VLLM_PYTHON", "")
    for python in [named] if named else made:
        if Path(python).is_file() or not is_local(host.address):
            return python
    if named:
        raise ConfigError(f"hosts file, line {host.line}: no Python {named} for vLLM")
    raise ConfigError(
        f"hosts file, line {host.line}: engine=vllm needs an environment with vLLM: run scripts/setup-vllm, which makes "
        f"{made[0]}, or name its interpreter with python=PATH, or a server that runs with url=URL"
    )


def _gpus(host: Host, index: int, hosts: list[Host]) -> dict[str, str]:
    """The GPUs of a host's replica `index`; a trainer on the same host has the first ones."""
    if not host.gpus:
        return {}
    first = sum(other.gpus for other in _role(hosts, "trainer") if other.address == host.address) + index * host.tp
    return {GPUS: ",".join(str(first + number) for number in range(host.tp))}


def _environment() -> dict[str, str]:
    return {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _relay(address: str, index: int, hosts: list[Host], url: str, found: Mapping[str, Answer]) -> Process:
    """One per host; where there are several they listen for their neighbours in the chain."""
    host = next(host for host in hosts if host.address == address)
    name = f"relay-{index}"
    command = [_python(host), "-m", "laminar.workers.relay", "--controller", url, "--name", name]
    if len(addresses_of(hosts)) > 1:
        command += ["--listen", _links_at(address, hosts, url, found)]
    return Process(name=name, role="relay", address=address, command=command, environment=_environment())


def _rendezvous(reached: list[str], index: int, port: int) -> list[str]:
    """How torchrun on one of the trainer's hosts finds those on the others, by the addresses at which they reach each other."""
    if len(reached) == 1:
        return ["--standalone", LOCAL_ADDRESS]
    meet = [f"--master-addr={reached[0]}", f"--master-port={port}"]
    return [f"--nnodes={len(reached)}", f"--node-rank={index}", *meet]


def _links_at(address: str, hosts: list[Host], url: str, found: Mapping[str, Answer]) -> str:
    """Where other hosts reach this one: its relay, its ranks. Of this machine, if there are others: where workers reach us."""
    named = listen_of(address, hosts)
    if named or (is_local(address) and all(is_local(host.address) for host in hosts)):
        return named or address
    if is_local(address):
        return urlsplit(url).hostname or address
    return (found[address].listen if address in found else "") or address


def listen_of(address: str, hosts: list[Host]) -> str:
    """``listen=`` of the first line of a host that has it; else empty."""
    return next((host.listen for host in hosts if host.address == address and host.listen), "")


def _trainer(host: Host, index: int, url: str, rendezvous: list[str]) -> Process:
    name = f"trainer-{index}"
    command = [
        _python(host), "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={host.ranks}",
        "-m", "laminar.workers.trainer", "--controller", url, "--name", name,
    ]  # fmt: skip
    return Process(
        name=name,
        role="trainer",
        address=host.address,
        command=command,
        environment=_environment(),
        num_workers=host.ranks,
    )


def going_on_from(trainer: Process, checkpoint: Path | None, rendezvous_port: int) -> Process:
    """The trainer as it is started to go on from a checkpoint; None = from the initial model."""
    meet = f"--master-port={rendezvous_port}"
    command = [meet if word.startswith("--master-port=") else word for word in trainer.command]
    if "--resume" in command:
        command = command[: command.index("--resume")]
    if checkpoint is not None:
        command = [*command, "--resume", str(checkpoint)]
    return msgspec.structs.replace(trainer, command=command)


def _rollout(host: Host, number: int, url: str, config: Config) -> Process:
    name = f"rollout-{number}"
    concurrent = host.max_concurrent or config.rollout.max_concurrent
    command = [
        _python(host), "-m", "laminar.workers.rollout", "--controller", url, "--name", name,
        "--engine", host.engine, "--max-concurrent", str(concurrent),
    ]  # fmt: skip
    if host.url:
        command += ["--vllm-url", host.url]
    elif host.engine == "vllm":
        gpus = host.tp if host.gpus else 0
        command += ["--vllm-python", _vllm_python(host), "--gpus", str(gpus), "--", *host.vllm_flags]
    return Process(
        name=name,
        role="rollout",
        address=host.address,
        command=command,
        environment=_environment(),
    )


def describe(processes: list[Process]) -> str:
    """The plan for people: one block per process, its commands as they can be typed."""
    lines = []
    for process in processes:
        environment = " ".join(f"{key}={value}" for key, value in process.environment.items())
        lines.append(f"{process.name:<12} {process.role:<8} on {process.address}")
        if process.ssh:
            lines.append(f"    {shlex.join(process.ssh)}")
        lines.append(f"    {environment} {shlex.join(process.command)}")
    return "\n".join(lines)
