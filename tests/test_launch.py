"""The launcher with real processes: last words, stubborn ones, descendants in other sessions, the token."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from laminar.controller import launch
from laminar.controller.launch import Launcher
from laminar.controller.plan import Process
from laminar.errors import StartError
from laminar.processes import living

pytestmark = pytest.mark.timeout(60)

TOKEN = "secret-" + "x" * 36


class World:
    """A launcher whose news are kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.exits: list[tuple[str, int, str]] = []
        self.told = asyncio.Event()
        self.launcher = Launcher(directory / "logs", TOKEN, self._on_exit)

    def _on_exit(self, name: str, code: int, last_lines: str) -> None:
        self.exits.append((name, code, last_lines))
        self.told.set()

    async def python(self, program: str, name: str = "rollout-0") -> psutil.Process:
        """Start a Python program and wait for its first line, which it prints when it is ready."""
        command = [sys.executable, "-u", "-c", program]
        process = Process(name=name, role="rollout", address="localhost", command=command, environment={"MINE": "1"})
        await self.launcher.start(process)
        return psutil.Process(self.launcher._children[name].pid)

    async def line(self, name: str = "rollout-0", number: int = 1) -> list[str]:
        """The first lines of a log, once they are there."""
        async with asyncio.timeout(60):
            while len(lines := self.launcher.last_lines(name).splitlines()) < number:  # noqa: ASYNC110 - it is a file
                await asyncio.sleep(0.01)
        return lines

    async def exit(self) -> tuple[str, int, str]:
        await asyncio.wait_for(self.told.wait(), 60)
        return self.exits[0]

    async def stop(self, *asked: str) -> None:
        await asyncio.wait_for(self.launcher.stop(set(asked)), 30)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(launch, "ASKED_S", 0.5)
    monkeypatch.setattr(launch, "TERMINATED_S", 1.0)
    world = World(tmp_path)
    yield world
    world.launcher.kill()
    await asyncio.gather(*world.launcher._watchers.values())


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def gone(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    async with asyncio.timeout(60):
        while living([process for process in psutil.process_iter() if process.pid == pid]):  # noqa: ASYNC110 - not our child: nobody tells us
            await asyncio.sleep(0.01)


SLEEP = "import time; print('ready'); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
WITH_CHILD = (  # as torchrun starts its ranks: in a session of their own
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-u', '-c', '{program}'], start_new_session=True)\n"
    "print('child', child.pid)\n"
    "time.sleep(600)\n"
)


async def with_child(world: World, program: str = "import time; time.sleep(600)") -> tuple[psutil.Process, int]:
    root = await world.python(WITH_CHILD.format(program=program))
    lines = await world.line()
    return root, int(lines[0].split()[1])


# ---- the end of one process --------------------------------------------------------------------------------


async def test_a_process_that_dies_at_once_is_reported_with_its_code_and_last_lines(world: World) -> None:
    await world.python("import sys; print('\\n'.join(f'line {n}' for n in range(100))); sys.exit('no such model')")
    name, code, lines = await world.exit()
    assert (name, code) == ("rollout-0", 1)
    assert lines.splitlines()[-1] == "no such model"
    assert lines.splitlines()[0] == f"line {101 - launch.LAST_LINES}"
    assert world.launcher.alive == []


async def test_a_process_that_is_killed_is_reported_with_its_signal(world: World) -> None:
    process = await world.python(SLEEP)
    await world.line()
    process.send_signal(signal.SIGKILL)
    assert await world.exit() == ("rollout-0", -9, "ready")


async def test_a_log_that_is_no_text_or_very_long_gives_its_last_lines_all_the_same(world: World) -> None:
    await world.python("import os; os.write(1, b'\\xff' * 100_000 + b'\\n' + b'last \\xfe words')")
    _, _, lines = await world.exit()
    assert lines.splitlines()[-1] == "last � words"
    assert len(lines) < 20_000


async def test_a_process_without_a_word_is_reported_without_one(world: World) -> None:
    await world.python("")
    assert await world.exit() == ("rollout-0", 0, "")


async def test_an_interpreter_that_does_not_exist_is_a_start_error_that_names_it(world: World) -> None:
    process = Process(name="rollout-0", role="rollout", address="h", command=["/no/such/python"], environment={})
    with pytest.raises(StartError, match=r"cannot start rollout-0: No such file or directory: /no/such/python"):
        await world.launcher.start(process)
    assert world.launcher.alive == []


async def test_a_log_directory_that_cannot_be_is_no_hang(world: World) -> None:
    (world.directory / "logs").write_text("a file")
    with pytest.raises(StartError, match="cannot start rollout-0: File exists"):
        await world.python(SLEEP)


# ---- what a process gets -----------------------------------------------------------------------------------


async def test_a_process_gets_its_environment_its_own_session_and_no_input(world: World) -> None:
    await world.python(
        "import os, sys\n"
        "print(os.environ['MINE'], os.environ['LAMINAR_PROCESS'], os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    )
    _, _, lines = await world.exit()
    assert lines == "1 rollout-0 True ''"


async def test_the_token_travels_in_the_environment_and_never_in_arguments_or_logs(world: World) -> None:
    process = await world.python(SLEEP)
    await world.line()
    assert process.environ()["LAMINAR_TOKEN"] == TOKEN
    assert not any(TOKEN in argument for argument in process.cmdline())
    await world.stop()
    assert TOKEN.encode() not in b"".join(path.read_bytes() for path in (world.directory / "logs").iterdir())


# ---- the end of all ----------------------------------------------------------------------------------------


async def test_stop_waits_for_processes_that_were_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ASKED_S", 30.0)
    stop_file = world.directory / "stop"
    process = await world.python(
        "import os, time\nprint('ready')\n"
        f"while not os.path.exists({str(stop_file)!r}): time.sleep(0.01)\n"
        "print('clean end')"
    )
    await world.line()
    stopping = asyncio.create_task(world.stop("rollout-0"))
    await asyncio.sleep(0)
    stop_file.touch()
    await stopping
    assert is_gone(process)
    assert world.launcher.last_lines("rollout-0") == "ready\nclean end"
    assert world.exits == [], "an end that was asked for is no news"


async def test_stop_terminates_who_was_not_asked_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ASKED_S", 3600.0)
    process = await world.python(SLEEP)
    await world.line()
    await world.stop()
    assert is_gone(process)
    assert world.launcher._children["rollout-0"].returncode == -signal.SIGTERM


async def test_a_process_that_ignores_sigterm_is_killed(world: World) -> None:
    process = await world.python(STUBBORN)
    await world.line()
    await world.stop("rollout-0")
    assert is_gone(process)
    assert world.launcher._children["rollout-0"].returncode == -signal.SIGKILL


async def test_descendants_in_other_sessions_end_too(world: World) -> None:
    root, child = await with_child(world)
    assert os.getsid(child) == child
    await world.stop("rollout-0")
    await gone(child)
    assert is_gone(root)


async def test_descendants_without_the_token_in_their_environment_end_too(world: World) -> None:
    sleep = "import time; print('up', flush=True); time.sleep(600)"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], env={{}}); "
    root = await world.python(start + "import time; time.sleep(600)")
    await world.line()
    (child,) = root.children()
    await world.stop()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_descendants_that_ignore_sigterm_are_killed(world: World) -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    _, child = await with_child(world, program)
    await world.stop("rollout-0")
    await gone(child)


async def test_descendants_whose_parent_is_dead_end_too(world: World) -> None:
    root, child = await with_child(world)
    root.kill()
    await world.exit()
    assert psutil.pid_exists(child)
    await world.stop()
    await gone(child)


async def test_kill_ends_everything_at_once(world: World) -> None:
    stubborn = await world.python(STUBBORN, name="rollout-1")
    _, child = await with_child(world)
    world.launcher.kill()
    await gone(child)
    await asyncio.wait_for(asyncio.gather(*world.launcher._watchers.values()), 60)
    assert is_gone(stubborn)
    assert world.exits == []


async def test_a_process_that_is_given_up_is_killed_with_its_descendants_and_the_others_live(world: World) -> None:
    other = await world.python(SLEEP, name="rollout-1")
    root, child = await with_child(world)
    world.launcher.give_up("rollout-0")
    await gone(child)
    await asyncio.wait_for(world.launcher._watchers["rollout-0"], 60)
    assert is_gone(root)
    assert not is_gone(other)
    assert world.exits == []
    assert world.launcher.alive == ["rollout-1"]


async def test_giving_up_a_rank_ends_its_launch(world: World) -> None:
    process = await world.python(SLEEP, name="trainer-0")
    world.launcher.give_up("trainer-0/1")
    await asyncio.wait_for(world.launcher._watchers["trainer-0"], 60)
    assert is_gone(process)


async def test_descendants_of_a_dead_process_end_when_it_is_given_up(world: World) -> None:
    root, child = await with_child(world)
    root.kill()
    await world.exit()
    world.launcher.give_up("rollout-0")
    await gone(child)


async def test_giving_up_an_unknown_process_does_nothing(world: World) -> None:
    world.launcher.give_up("rollout-9")


async def test_processes_of_another_run_are_left_alone(world: World) -> None:
    other = World(world.directory / "other")
    other.launcher = Launcher(other.directory / "logs", "another token", other._on_exit)
    process = await other.python(SLEEP)
    await other.line()
    await world.python(SLEEP)
    await world.stop()
    assert not is_gone(process)
    other.launcher.kill()
    await asyncio.gather(*other.launcher._watchers.values())
