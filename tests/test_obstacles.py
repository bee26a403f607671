"""What keeps a run from beginning anything new: unwritable directories, too few descriptors; real ones where we may make them."""

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar import descriptors
from laminar.controller import obstacles
from laminar.controller.obstacles import Obstacles, why_no_descriptors, why_unwritable
from laminar.errors import StartError

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parent.parent


class World:
    """Obstacles that look often; `told` has what the core would hear."""

    def __init__(self, *directories: Path) -> None:
        self.told: list[str] = []
        self.heard = asyncio.Event()
        self.obstacles = Obstacles(list(directories), self._note, lambda: self._note(""))

    def _note(self, reason: str) -> None:
        self.told.append(reason)
        self.heard.set()

    async def next(self) -> str:
        await asyncio.wait_for(self.heard.wait(), 30.0)
        self.heard.clear()
        return self.told[-1]


@contextlib.contextmanager
def immutable(directory: Path) -> Iterator[None]:
    """No file can be made there, by root neither."""
    if os.geteuid() != 0 or not shutil.which("chattr"):
        pytest.skip("to take even root the right to write needs root and chattr")
    if subprocess.run(["chattr", "+i", directory], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no immutable directories")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", directory], check=True)


def test_reasons_of_several_causes_are_told_together_and_recovery_once_all_are_gone() -> None:
    told: list[str] = []
    found = Obstacles([], told.append, lambda: told.append("recovered"))
    found.set("log", "")
    found.set("log", "full")
    found.set("log", "full")
    found.set("directory", "read-only")
    found.set("log", "")
    found.set("directory", "")
    assert told == ["full", "full; read-only", "read-only", "recovered"]


async def test_a_directory_that_loses_its_permissions_is_an_obstacle_until_it_has_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstacles, "LOOK_S", 0.02)
    world = World(tmp_path)
    watching = asyncio.create_task(world.obstacles.watch())
    with immutable(tmp_path):
        assert str(tmp_path) in await world.next()
    assert await world.next() == ""
    watching.cancel()
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - a temporary directory


def test_a_directory_that_is_gone_is_told_and_a_full_one_is_left_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_unwritable([tmp_path]) == ""
    assert "No such file" in why_unwritable([tmp_path, tmp_path / "gone"])

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert why_unwritable([tmp_path]) == ""


async def test_a_file_system_that_hangs_is_told_and_neither_holds_up_the_loop_nor_gathers_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstacles, "LOOK_S", 0.01)
    monkeypatch.setattr(obstacles, "ANSWER_S", 0.05)
    released = threading.Event()
    monkeypatch.setattr(obstacles, "why_unwritable", lambda directories: "" if released.wait(50.0) else "never")
    world = World(tmp_path)
    watching = asyncio.create_task(world.obstacles.watch())
    assert "does not answer" in await world.next()
    await asyncio.sleep(0.2)
    assert [thread.name for thread in threading.enumerate()].count("probe") == 1
    released.set()
    assert await world.next() == ""
    watching.cancel()


# ---- descriptors -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def spare_descriptors(num: int) -> Iterator[None]:
    """So many more than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors.used() + num, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_that_is_about_to_run_out_of_descriptors_begins_nothing_until_many_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstacles, "LOOK_S", 0.02)
    world = World(tmp_path)
    with spare_descriptors(obstacles.SPARE_DESCRIPTORS + 40):
        watching = asyncio.create_task(world.obstacles.watch())
        opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(80)]
        assert "are open" in await world.next()
        assert "ulimit -n" in world.told[-1]
        for descriptor in opened[:20]:
            os.close(descriptor)
        assert why_no_descriptors(was_short=True)
        for descriptor in opened[20:]:
            os.close(descriptor)
    assert await world.next() == ""
    watching.cancel()


def test_the_limit_is_raised_to_the_hard_one_and_one_that_does_not_do_is_named() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        descriptors.require(min(256, hard), "two processes")
        assert descriptors.limit() == (descriptors.LIMIT_MAX if hard < 0 else min(hard, descriptors.LIMIT_MAX))
        with pytest.raises(StartError, match="ulimit -n 100000000"):
            descriptors.require(100_000_000, "many processes")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_that_may_open_too_few_files_is_refused_before_it_begins(tmp_path: Path) -> None:
    quickstart = ROOT / "configs" / "quickstart"
    command = [sys.executable, "-m", "laminar.controller", "--cluster", quickstart / "hosts.txt"]
    command += ["--config", quickstart / "config.toml", f"run.dir={tmp_path}"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 100; exec "$@"', "sh", *command],
        capture_output=True, text=True, timeout=50, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "this process may have 100" in done.stderr
    assert "ulimit -n" in done.stderr
    assert list(tmp_path.iterdir()) == []
