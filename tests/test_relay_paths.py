"""The relay's directory: names, owners, sweeping."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from laminar.errors import ConfigError, StartError
from laminar.workers.relay import paths


@pytest.fixture
def living() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def own(root: Path, run_id: str, owner: paths.Owner) -> Path:
    directory = root / f"laminar-{run_id}"
    directory.mkdir()
    (directory / "owner.json").write_bytes(msgspec.json.encode(owner))
    (directory / "slot-0").write_bytes(b"weights")
    return directory


def age(directory: Path) -> None:
    then = directory.stat().st_mtime - 2 * paths.UNOWNED_AGE_S
    os.utime(directory, (then, then))


def test_create_makes_a_private_directory_with_its_owner(tmp_path):
    directory = paths.create("run-1", "runs/one", tmp_path)
    assert directory == tmp_path / "laminar-run-1"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert paths.read_owner(directory) == paths.owner_of(os.getpid(), "runs/one")
    assert [path.name for path in tmp_path.iterdir()] == ["laminar-run-1"]


def test_the_directory_of_a_dead_process_is_swept_and_that_of_a_live_one_stays(tmp_path, living):
    live = own(tmp_path, "live", paths.owner_of(living.pid, ""))
    dead = own(tmp_path, "dead", paths.owner_of(living.pid, ""))
    other = tmp_path / "something-else"
    other.mkdir()
    assert paths.sweep(tmp_path) == []
    living.kill()
    living.communicate(timeout=60)
    assert paths.sweep(tmp_path) == [str(dead), str(live)]
    assert list(tmp_path.iterdir()) == [other]


def test_a_zombie_owner_is_dead(tmp_path, living):
    directory = own(tmp_path, "zombie", paths.owner_of(living.pid, ""))
    living.kill()
    os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{living.pid}").exists()
    assert paths.sweep(tmp_path) == [str(directory)]


def test_a_pid_that_is_used_again_does_not_protect_a_dead_run(tmp_path, living):
    owner = paths.owner_of(living.pid, "")
    directory = own(tmp_path, "reused", msgspec.structs.replace(owner, start_ticks=owner.start_ticks - 1))
    assert paths.sweep(tmp_path) == [str(directory)]


def test_an_owner_in_another_pid_namespace_is_left_alone(tmp_path):
    owner = paths.Owner(pid=2**30, start_ticks=1, pid_namespace="pid:[1]", run_directory="")
    own(tmp_path, "container", owner)
    assert paths.sweep(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b'{"pid": 12', b'{"pid": "x"}', b"\xff\xfe", None])
def test_a_directory_without_a_readable_owner_is_swept_only_when_old(tmp_path, content: bytes | None):
    directory = tmp_path / "laminar-half"
    directory.mkdir()
    if content is not None:
        (directory / "owner.json").write_bytes(content)
    assert paths.sweep(tmp_path) == []
    age(directory)
    assert paths.sweep(tmp_path) == [str(directory)]


def test_files_and_links_with_the_name_of_a_run_are_left_alone(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep")
    (tmp_path / "laminar-link").symlink_to(precious)
    (tmp_path / "laminar-file").write_text("keep")
    age(precious)
    assert paths.sweep(tmp_path) == []
    assert (precious / "data").read_text() == "keep"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_the_directory_of_another_user_is_left_alone(tmp_path):
    owner = paths.Owner(pid=2**30, start_ticks=1, pid_namespace=os.readlink("/proc/self/ns/pid"), run_directory="")
    directory = own(tmp_path, "theirs", owner)
    os.chown(directory, 65534, 65534)
    age(directory)
    assert paths.sweep(tmp_path) == []
    with pytest.raises(StartError, match="not a directory of this user"):
        paths.create("theirs", "", tmp_path)


def test_create_replaces_what_a_dead_run_of_the_same_name_left(tmp_path):
    owner = paths.Owner(pid=2**30, start_ticks=1, pid_namespace=os.readlink("/proc/self/ns/pid"), run_directory="")
    directory = own(tmp_path, "again", owner)
    assert paths.create("again", "", tmp_path) == directory
    assert [path.name for path in directory.iterdir()] == ["owner.json"]


def test_create_refuses_a_run_that_is_alive(tmp_path, living):
    own(tmp_path, "live", paths.owner_of(living.pid, ""))
    with pytest.raises(StartError, match=f"in use \\(process {living.pid} serves it\\): stop that run"):
        paths.create("live", "", tmp_path)


def test_create_says_so_when_the_root_cannot_be_written(tmp_path):
    with pytest.raises(StartError, match=r"cannot make .*No such file"):
        paths.create("run", "", tmp_path / "missing")


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "a\0b", "-x", "é"])
def test_a_run_id_that_cannot_be_a_directory_name_is_refused(run_id: str):
    with pytest.raises(ConfigError, match="cannot name a directory"):
        paths.shm_directory(run_id)


def test_a_run_id_too_long_for_a_socket_says_by_how_much():
    longest = "x" * 79
    assert len(str(paths.shm_directory(longest) / "relay.sock")) == 107
    with pytest.raises(ConfigError, match="shorten it by 3 bytes"):
        paths.shm_directory(longest + "xxx")


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_a_relay_that_is_started_again_waits_for_room_in_a_full_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "ROOM_LOOK_S", 0.02)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        filler = tmp_path / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        with pytest.raises(StartError, match="No space left"):
            paths.create("run-1", "runs/one", tmp_path)
        made = threading.Thread(target=paths.create, args=("run-1", "runs/one", tmp_path), kwargs={"room_s": 50.0})
        made.start()
        filler.unlink()
        made.join(50.0)
        assert paths.read_owner(tmp_path / "laminar-run-1").pid == os.getpid()
        assert [path.name for path in tmp_path.iterdir()] == ["laminar-run-1"], "nothing of the tries is left"
    finally:
        subprocess.run(["umount", tmp_path], check=True)
