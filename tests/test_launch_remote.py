"""The launcher and processes on other hosts: a stand-in for ssh runs their supervisors on this machine."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
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
SURVIVE_S = 40.0
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


class World:
    """A launcher whose news are kept."""

    def __init__(self, directory: Path, token: str = "", boot: int = 1) -> None:
        self.directory = directory
        self.client = ssh_standin.make(directory)
        self.exits: list[tuple[str, int, str]] = []
        self.told = asyncio.Event()
        self.token = token or f"token-{os.urandom(8).hex()}"
        self.launcher = Launcher(directory / "logs", self.token, self._on_exit, survive_s=SURVIVE_S, boot=boot)

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
        (supervisor,) = self.client_of(name).children()
        (child,) = supervisor.children()
        return child

    def client_of(self, name: str = "rollout-0") -> psutil.Process:
        """The present ssh client."""
        return psutil.Process(self.launcher._children[name].pid)

    async def ready(self, name: str = "rollout-0") -> None:
        """It has written that."""
        async with asyncio.timeout(LIMIT_S):
            while "ready" not in self.launcher.last_lines(name):  # noqa: ASYNC110 - it is a file
                await asyncio.sleep(0.01)

    def break_ssh(self) -> None:
        """No connection is made any more."""
        Path(self.client).write_text(
            "#!/bin/sh\necho 'ssh: connect to host there port 22: No route to host' >&2\nexit 255\n"
        )

    def mend_ssh(self) -> None:
        ssh_standin.make(self.directory)

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
    client = world.client_of()
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


# ---- connections that break, controllers that die ----------------------------------------------------------


async def another_connection(world: World, before: psutil.Process) -> psutil.Process:
    """The client that took the place of one that was killed."""
    async with asyncio.timeout(LIMIT_S):
        while world.launcher._children["rollout-0"].pid in (-1, before.pid):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    return world.client_of()


async def test_a_connection_that_breaks_is_made_again_and_the_process_does_not_notice(world: World) -> None:
    process = await world.start("import sys, time\nprint('ready', flush=True)\ntime.sleep(600)")
    await world.ready()
    for _ in range(2):
        before = world.client_of()
        before.kill()
        await another_connection(world, before)
        assert not is_gone(process)
    process.send_signal(signal.SIGKILL)
    assert (await world.exit())[:2] == ("rollout-0", -signal.SIGKILL)
    assert "laminar: the ssh connection to there broke" in world.launcher.last_lines("rollout-0")


async def test_a_process_that_ended_while_its_connection_was_broken_is_reported_with_its_own_end(world: World) -> None:
    process = await world.start(SLEEP)
    world.break_ssh()
    world.client_of().kill()
    process.send_signal(signal.SIGABRT)
    await asyncio.to_thread(process.wait, LIMIT_S)
    world.mend_ssh()
    assert (await world.exit())[:2] == ("rollout-0", -signal.SIGABRT)


async def test_a_process_whose_host_is_not_reached_for_as_long_as_it_may_live_alone_is_lost(world: World) -> None:
    world.launcher._survive_s = 2.0
    process = await world.start(SLEEP)
    world.break_ssh()
    world.client_of().kill()
    name, code, lines = await world.exit()
    assert (name, code) == ("rollout-0", LOST)
    assert "nothing more is known of it: ssh failed (ssh: connect to host there port 22: No route to host)" in lines
    await asyncio.to_thread(process.wait, LIMIT_S)


async def test_a_process_whose_supervisor_was_killed_is_lost_at_once(world: World) -> None:
    process = await world.start(SLEEP)
    await world.ready()  # what it writes later nobody takes, and it would end by that
    world.client_of().children()[0].kill()
    name, code, lines = await world.exit()
    assert (name, code) == ("rollout-0", LOST)
    assert "rollout-0 has no supervisor here" in lines
    process.kill()


async def test_a_process_that_is_to_stop_while_its_connection_is_broken_is_told_when_there_is_one(world: World) -> None:
    process = await world.start(SLEEP)
    world.break_ssh()
    before = world.client_of()
    before.kill()
    await asyncio.to_thread(before.wait, LIMIT_S)
    stopping = asyncio.create_task(world.launcher.stop(set()))
    await asyncio.sleep(0)
    world.mend_ssh()
    await asyncio.wait_for(stopping, LIMIT_S)
    assert is_gone(process)
    assert world.exits == []


def successor(world: World) -> World:
    """The controller that takes the place of one that was killed."""
    for name in world.launcher.alive:
        world.client_of(name).kill()
    world.launcher.leave()
    return World(world.directory, world.token, boot=2)


async def test_the_next_controller_takes_over_what_lives_on_other_hosts_with_its_output_and_its_end(
    world: World,
) -> None:
    process = await world.start(SLEEP)
    await world.ready()
    following = successor(world)
    wanted = [world.process(SLEEP), world.process(SLEEP, "rollout-1")]
    assert await following.launcher.adopt(wanted) == ["rollout-0"], "nobody has ever started rollout-1"
    assert not is_gone(process)
    process.send_signal(signal.SIGKILL)
    assert (await following.exit())[:2] == ("rollout-0", -signal.SIGKILL)
    assert world.exits == []


async def test_the_next_controller_takes_over_what_is_on_its_own_machine_and_was_started_from_another(
    world: World,
) -> None:
    process = await world.start(SLEEP)
    following = successor(world)
    here = msgspec.structs.replace(world.process(SLEEP), ssh=[])
    assert await following.launcher.adopt([here]) == ["rollout-0"]
    process.send_signal(signal.SIGKILL)
    assert (await following.exit())[:2] == ("rollout-0", -signal.SIGKILL)


async def test_the_next_controller_stops_what_it_took_over(world: World) -> None:
    process = await world.start(STUBBORN)
    await world.ready()
    following = successor(world)
    await following.launcher.adopt([world.process(STUBBORN)])
    following.launcher.kill()
    assert is_gone(process)
    await asyncio.gather(*following.launcher._watchers.values())


async def test_what_is_on_a_host_that_does_not_answer_counts_as_alive_and_is_found_later(world: World) -> None:
    process = await world.start(SLEEP)
    following = successor(world)
    following.break_ssh()
    assert await following.launcher.adopt([world.process(SLEEP)]) == ["rollout-0"]
    world.mend_ssh()
    async with asyncio.timeout(LIMIT_S):
        while following.launcher._children["rollout-0"].pid == -1:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert (await following.exit())[:2] == ("rollout-0", -signal.SIGKILL)


async def test_a_controller_whose_processes_another_has_taken_over_starts_none_in_their_place(world: World) -> None:
    process = await world.start(SLEEP)
    following = World(world.directory, world.token, boot=2)
    await following.launcher.adopt([world.process(SLEEP)])
    assert (await world.exit())[:2] == ("rollout-0", LOST)
    with pytest.raises(StartError, match="rollout-0 belongs to another controller, of a boot after 1"):
        await world.launcher.start(world.process(SLEEP))
    assert not is_gone(process)
    following.launcher.kill()
    await asyncio.gather(*following.launcher._watchers.values())
