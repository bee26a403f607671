"""What is done to processes, sockets, files and memory, on real ones; and that it is undone, whatever happens meanwhile."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from laminar.chaos import disk, harm
from laminar.chaos.harm import Impossible
from laminar.errors import StartError

LIMIT_S = 20.0


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    """One that waits."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def test_a_stopped_process_is_let_go_also_when_something_fails_meanwhile(process: psutil.Process) -> None:
    with contextlib.suppress(ZeroDivisionError), harm.stopped([process]):
        until(lambda: is_stopped(process))
        raise ZeroDivisionError
    until(lambda: not is_stopped(process))


def test_a_slowed_process_is_stopped_and_let_go_by_turns_and_runs_at_the_end(process: psutil.Process) -> None:
    with harm.slowed([process]):
        for _ in range(2):
            until(lambda: is_stopped(process))
            until(lambda: not is_stopped(process))
    until(lambda: not is_stopped(process))


def test_a_killed_process_is_gone_and_one_that_is_gone_does_no_harm(process: psutil.Process) -> None:
    with harm.killed([process]):
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    with harm.stopped([process]):
        pass


def test_flipped_bytes_are_few_and_the_same_for_a_seed(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    path.write_bytes(bytes(10_000))
    start, end = harm.flip(path, 4_000, seed=3)
    changed = [at for at, byte in enumerate(path.read_bytes()) if byte]
    assert changed == list(range(start, end))
    assert len(changed) == harm.FLIPPED_BYTES
    assert end <= 4_000
    assert harm.flip(path, 4_000, seed=3) == [start, end]
    assert path.read_bytes() == bytes(10_000), "twice is as before"


def test_a_disk_that_would_take_too_much_is_not_filled(tmp_path: Path) -> None:
    with pytest.raises(Impossible, match="MiB free, and at most 0 would be written"), harm.filled(tmp_path, 0):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_a_small_file_system_is_filled_to_the_last_byte_emptied_and_what_was_left_there_is_kept(tmp_path: Path) -> None:
    code = """
import sys, errno
from pathlib import Path
from laminar.chaos import disk, harm

directory = Path(sys.argv[1]) / "run"
with disk.small(directory, 2):
    (directory / "kept").write_text("before")
    (directory / "large").write_bytes(bytes(1 << 19))

    def has_room():
        try:
            (directory / "more").write_bytes(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return False
        return True

    with harm.filled(directory, 4 << 20):
        if has_room():
            sys.exit("there was room")
        (directory / "large").unlink()
        while has_room():
            (directory / "more").unlink()
    (directory / "after").write_text("room again")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=LIMIT_S)
    assert (tmp_path / "run" / "kept").read_text() == "before"
    assert (tmp_path / "run" / "after").read_text() == "room again"
    assert not (tmp_path / "run" / "chaos-filler").exists()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ss") is None, reason="ss -K needs root and iproute2")
def test_a_connection_is_found_deafened_and_destroyed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        port = server.getsockname()[1]
        accepted, _ = server.accept()
        accepted.settimeout(0.2)
        own = psutil.Process()
        (sent_from,), (received_at,) = harm.connections(own, port), harm.connections(own, port, served=True)
        assert sent_from.ends == (received_at.peer, received_at.own) == (client.getsockname(), accepted.getsockname())
        client.sendall(b"heard")
        assert accepted.recv(16) == b"heard"
        harm.deafen(received_at)
        client.sendall(b"lost")
        with contextlib.closing(accepted):
            with pytest.raises(TimeoutError):
                accepted.recv(16)
            try:
                harm.destroy([received_at])
            except Impossible as error:
                pytest.skip(str(error))
            with pytest.raises(ConnectionError):
                accepted.recv(16)
        with pytest.raises(Impossible, match="destroyed nothing"):
            harm.destroy([received_at])


def test_a_process_without_a_connection_cannot_be_cut(process: psutil.Process) -> None:
    with pytest.raises(Impossible, match="has no connection at port 1"), harm.cut(process, 1):
        pass


def test_what_was_unplugged_is_plugged_in_again_though_one_of_its_interfaces_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def lines(*command: str) -> list[str]:
        words = " ".join(command[3:])  # after nsenter --net=… ip
        if words == "-o link show up":
            return ["1: lo: <UP>", "2: eth0@if7: <UP>", "3: eth1: <UP>"]
        if words == "route show":
            return ["default via 10.0.0.1 dev eth0", "10.0.0.0/24 dev eth0 proto kernel scope link"]
        done.append(words)
        if words == "link set eth1 up":
            raise Impossible("no such device")
        return []

    monkeypatch.setattr(harm, "_lines", lines)
    with pytest.raises(Impossible, match="no such device"), harm.unplugged(psutil.Process()):
        assert done == ["link set eth0 down", "link set eth1 down"]
    assert done[2:] == ["link set eth1 up", "link set eth0 up", "route replace default via 10.0.0.1 dev eth0"]


def test_a_program_that_hangs_makes_a_fault_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harm, "LIMIT_S", 0.05)
    with pytest.raises(Impossible, match=r"sleep 60 took longer than 0\.05 s"):
        harm._lines("sleep", "60")


def test_a_file_system_of_its_own_that_could_not_be_kept_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    message = "MiB free, .* make room, or give a smaller --disk-mib"
    with pytest.raises(StartError, match=message), disk.small(tmp_path / "run", 1 << 30):
        pass
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    with (
        pytest.raises(StartError, match=r"Not a directory; choose another place with run\.dir"),
        disk.small(tmp_path / "file" / "run", 1),
    ):
        pass
