"""Runs of agent programs: what they are given, what is left of them, whatever ends them."""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from laminar.config import TaskConfig
from laminar.errors import StartError
from laminar.workers.agents.program import LAUNCHER, STDOUT_BYTES_MAX, Exit, Program

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the agents' directories are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def run(*command: str, until: asyncio.Event | None = None, prompt: str = "the prompt", **task: Any) -> Exit:
    program = Program(TaskConfig(agent=list(command), **task))
    return await program.run(
        environment={"GIVEN": "1"}, stdin=b'{"id": 1}', prompt=prompt, until=until or asyncio.Event()
    )


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


async def test_it_gets_stdin_arguments_an_empty_directory_of_its_own_and_the_named_environment_only(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    monkeypatch.setenv("LAMINAR_TOKEN", "secret")
    monkeypatch.setenv("PASSED", "2")
    code = "import os, sys; print(sys.stdin.read(), sys.argv[1:], os.listdir(), os.getcwd(), sorted(os.environ))"
    done = await run(*python(code), "--task={prompt}", prompt="say 'hi'", agent_env=["PASSED", "ABSENT"])
    assert (done.status, done.stderr, done.timed_out) == (0, "", False)
    assert done.stdout.startswith(f"""{{"id": 1}} ["--task=say 'hi'"] [] {directory}/laminar-agent-""")
    assert "'GIVEN'" in done.stdout
    assert "'PASSED'" in done.stdout
    assert "LAMINAR_TOKEN" not in done.stdout
    assert os.listdir(directory) == []


async def test_python_in_its_path_is_that_of_the_worker() -> None:
    done = await run("python", "-c", "import sys; print(sys.prefix)")
    assert done.stdout.strip() == sys.prefix


async def test_what_it_writes_is_removed_with_its_directory(directory: Path) -> None:
    code = (
        "import os; os.makedirs('a/b'); open('a/b/c', 'w').close(); os.symlink('/etc', 'a/etc'); os.symlink('x', 'y')"
    )
    assert (await run(*python(code))).status == 0
    assert os.listdir(directory) == []
    assert "passwd" in os.listdir("/etc")


async def test_a_status_or_signal_is_told_as_shells_do() -> None:
    assert (await run("sh", "-c", "exit 3")).status == 3
    assert (await run("sh", "-c", "kill -9 $$")).status == 128 + signal.SIGKILL


async def test_long_output_is_read_to_its_end_and_cut() -> None:
    code = "import sys; print('o' * 3_000_000); print('e' * 100_000 + 'end', file=sys.stderr)"
    done = await run(*python(code))
    assert len(done.stdout) == STDOUT_BYTES_MAX
    assert done.stderr.strip().endswith("end")
    assert len(done.stderr) <= 4096


async def test_limits_hold_for_memory_and_core_dumps() -> None:
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_AS)[1], r.getrlimit(r.RLIMIT_CORE)[1])"
    assert (await run(*python(code), agent_memory_mb=3000)).stdout.split() == [str(3000 << 20), "0"]


async def test_an_agent_that_is_late_is_killed_with_what_it_started(directory: Path) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '4711.5'], start_new_session=True); time.sleep(1000)"
    done = await run(*python(code), agent_timeout_s=1.0)
    assert done.timed_out
    check_nothing_left(directory, "4711.5")


async def test_what_it_leaves_running_with_its_output_open_does_not_hold_up_the_end(directory: Path) -> None:
    done = await run("sh", "-c", "(setsid sleep 4711.6 &) ; echo done")
    assert (done.status, done.stdout) == (0, "done\n")
    check_nothing_left(directory, "4711.6")


async def test_it_is_stopped_when_asked_at_any_time(directory: Path) -> None:
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.3):
        until = asyncio.Event()
        asyncio.get_running_loop().call_later(delay_s, until.set)
        done = await run("sleep", "4711.7", until=until)
        assert not done.timed_out
        check_nothing_left(directory, "4711.7")


async def test_it_is_killed_when_whoever_waits_is_cancelled(directory: Path) -> None:
    for delay_s in (0.0, 0.05, 0.3):
        waiting = asyncio.create_task(run("sleep", "4711.8"))
        await asyncio.wait([waiting], timeout=delay_s)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        check_nothing_left(directory, "4711.8")


def check_nothing_left(directory: Path, argument: str) -> None:
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if argument in (p.info["cmdline"] or [])] == []
    assert os.listdir(directory) == []


def test_a_program_that_is_not_there_is_a_start_error() -> None:
    with pytest.raises(StartError, match="no program 'no-such-agent' in PATH"):
        Program(TaskConfig(agent="no-such-agent --fast"))


def test_the_launcher_needs_nothing_but_the_standard_library() -> None:
    assert "laminar" not in LAUNCHER.read_text().replace("laminar-agent", "")
