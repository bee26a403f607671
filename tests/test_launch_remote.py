"""The launcher and processes on other hosts: a stand-in for ssh runs their supervisors on this machine."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import ssh_standin

from laminar.controller import launch, remote, ssh
from laminar.controller.launch import Launcher
from laminar.controller.plan import SUPERVISOR, Process
from laminar.errors import StartError
from laminar.processes import living
from laminar.remote import LOST

pytestmark = pytest.mark.timeout(120)

LIMIT_S = 60.0
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


class World:
    """A launcher whose news are kept."""

    def __init__(self, directory: Path) -> None:
        self.client = ssh_standin.make(directory)
        self.exits: list[tuple[str, int, str]] = []
        self.told = asyncio.Event()
        self.launcher = Launcher(directory / "logs", f"token-{os.urandom(8).hex()}", self._on_exit)

    def _on_exit(self, name: str, code: int, last_lines: str) -> None:
        self.exits.append((name, code, last_lines))
        self.told.set()

    def process(
        self, program: str, name: str = "rollout-0", address: str = "there", python: str = sys.executable
    ) -> Process:
        command = [python, "-c", program]
        through = ssh.command(self.client, address, python, SUPERVISOR)
        return Process(
            name=name, role="rollout", address=address, command=command, environment={"MINE": "1"}, ssh=through
        )

    async def start(self, program: str, name: str = "rollout-0") -> psutil.Process:
        """The process itself."""
        await self.launcher.start(self.process(program, name))
        (child,) = psutil.Process(self.launcher._children[name].pid).children()
        return child

    async def ready(self, name: str = "rollout-0") -> None:
        """It has written that."""
        async with asyncio.timeout(LIMIT_S):
            while "ready" not in self.launcher.last_lines(name):  # noqa: ASYNC110 - it is a file
                await asyncio.sleep(0.01)

    async def exit(self) -> tuple[str, int, str]:
        await asyncio.wait_for(self.told.wait(), LIMIT_S)
        return self.exits[0]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(launch, "ASKED_S", 0.5)
    monkeypatch.setattr(launch, "TERMINATED_S", 20.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    world = World(tmp_path)
    yield world
    world.launcher.kill()
    await asyncio.gather(*world.launcher._watchers.values())


def is_gone(process: psutil.Process) -> bool:
    return not living([process])


async def test_a_process_on_another_host_is_reported_with_its_code_and_the_last_lines_of_its_log_here(
    world: World,
) -> None:
    await world.launcher.start(world.process("import os, sys; print(os.environ['MINE']); sys.exit('no such model')"))
    name, code, lines = await world.exit()
    assert (name, code) == ("rollout-0", 1)
    assert lines.splitlines()[-2:] == ["1", "no such model"]
    assert world.launcher.alive == []


async def test_a_process_on_another_host_that_is_killed_is_reported_with_its_signal(world: World) -> None:
    (await world.start(SLEEP)).send_signal(signal.SIGKILL)
    assert (await world.exit())[:2] == ("rollout-0", -signal.SIGKILL)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "nowhere",
            r"cannot start rollout-0 on nowhere: ssh failed \(ssh: Could not resolve hostname nowhere.*hosts file",
        ),
        (
            "locked",
            r"cannot start rollout-0 on locked: ssh failed \(.*Permission denied \(publickey\).*ssh-copy-id locked",
        ),
    ],
)
async def test_a_connection_that_cannot_be_made_is_a_start_error_in_sshs_words(
    world: World, address: str, message: str
) -> None:
    with pytest.raises(StartError, match=message):
        await world.launcher.start(world.process(SLEEP, address=address))
    await asyncio.wait_for(world.launcher._watchers["rollout-0"], LIMIT_S)
    assert world.launcher.alive == []
    assert world.exits == [], "it was told already"


async def test_an_interpreter_that_is_not_there_is_a_start_error_that_names_it(world: World) -> None:
    with pytest.raises(StartError, match=r"rollout-0 on there: it has no Python /no/such/python .*python=PATH"):
        await world.launcher.start(world.process(SLEEP, python="/no/such/python"))


async def test_a_working_directory_that_is_not_there_is_a_start_error_that_names_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    process = world.process(SLEEP)
    here.rmdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match="it has no directory"):
        await world.launcher.start(process)


async def test_a_host_that_does_not_answer_is_given_up_after_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "START_S", 0.5)
    with pytest.raises(StartError, match=r"rollout-0 on silent: ssh failed \(no answer within 0.5 s\)"):
        await world.launcher.start(world.process(SLEEP, address="silent"))
    await asyncio.wait_for(world.launcher._watchers["rollout-0"], LIMIT_S)


async def test_a_stop_does_not_wait_for_a_host_that_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "TERMINATED_S", 0.5)
    starting = asyncio.create_task(world.launcher.start(world.process(SLEEP, address="silent")))
    async with asyncio.timeout(LIMIT_S):
        while not world.launcher.alive:  # noqa: ASYNC110 - the client runs, and says nothing
            await asyncio.sleep(0.01)
    await asyncio.wait_for(world.launcher.stop(set()), LIMIT_S)
    with pytest.raises(StartError):
        await starting
    assert world.launcher.alive == []


async def test_processes_of_several_hosts_start_at_once_and_the_first_failure_is_raised_when_all_are_done(
    world: World,
) -> None:
    wanted = [
        world.process(SLEEP, name="rollout-0", address="nowhere"),
        world.process(SLEEP, name="rollout-1", address="nowhere"),
        world.process(SLEEP, name="rollout-2"),
    ]
    with pytest.raises(StartError, match="cannot start rollout-0 on nowhere"):
        await world.launcher.start_all(wanted)
    assert world.launcher.alive == ["rollout-2"]


async def test_the_token_is_in_no_argument_here_or_there(world: World) -> None:
    child = await world.start(SLEEP)
    await world.ready()  # before its exec it has the environment of whoever forked it
    client = psutil.Process(world.launcher._children["rollout-0"].pid)
    token = child.environ()["LAMINAR_TOKEN"]
    assert token == world.launcher._token
    assert not any(token in argument for process in (child, client) for argument in process.cmdline())


async def test_of_the_controllers_environment_only_what_is_meant_for_workers_is_passed_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SEARCH_KEY", "secret")
    monkeypatch.setenv("OTHER", "1")
    assert ssh.inherited()["NCCL_DEBUG"] == "WARN"
    assert not ssh.inherited().keys() & {"SEARCH_KEY", "OTHER", "PATH", "HOME"}
    assert ssh.inherited(["SEARCH_KEY"])["SEARCH_KEY"] == "secret"


async def test_stop_terminates_what_was_not_asked_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ASKED_S", 3600.0)
    process = await world.start(SLEEP)
    await asyncio.wait_for(world.launcher.stop(set()), LIMIT_S)
    assert is_gone(process)
    assert world.launcher._children["rollout-0"].returncode == -signal.SIGTERM
    assert world.exits == [], "an end that was asked for is no news"


async def test_stop_kills_what_is_stubborn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TERMINATED_S", 1.0)
    process = await world.start(STUBBORN)
    await world.ready()
    await asyncio.wait_for(world.launcher.stop({"rollout-0"}), LIMIT_S)
    assert is_gone(process)
    assert world.launcher.alive == []


async def test_a_process_that_is_given_up_is_killed_and_can_be_started_again_at_once(world: World) -> None:
    first = await world.start(STUBBORN)
    await world.ready()
    world.launcher.give_up("rollout-0")
    second = await world.start(SLEEP)
    assert is_gone(first)
    assert not is_gone(second)
    assert world.launcher.alive == ["rollout-0"]
    assert world.exits == []


async def test_kill_ends_everything_at_once(world: World) -> None:
    stubborn = await world.start(STUBBORN)
    await world.ready()
    world.launcher.kill()
    assert is_gone(stubborn)
    await asyncio.wait_for(asyncio.gather(*world.launcher._watchers.values()), LIMIT_S)
    assert world.exits == []


async def test_a_connection_that_breaks_is_reported_as_such(world: World) -> None:
    await world.start(SLEEP)
    psutil.Process(world.launcher._children["rollout-0"].pid).kill()
    assert (await world.exit())[:2] == ("rollout-0", LOST)
