"""The life of a vLLM server's process, with a stand-in for vLLM."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import aiohttp
import psutil
import pytest

from laminar.errors import StartError
from laminar.workers.engines import vllm_server, vllm_shm
from laminar.workers.engines.vllm_server import AttachedServer, OwnServer, last_lines

pytestmark = pytest.mark.timeout(90)

FAKE = Path(__file__).parent / "vllm_fake.py"
START_S = 60.0


@contextlib.asynccontextmanager
async def own_server(tmp_path: Path, *flags: str, start: bool = True, **environment: str) -> AsyncIterator[OwnServer]:
    server = OwnServer(
        [sys.executable, str(FAKE), *flags], {**os.environ, **environment}, tmp_path / "logs" / "x.vllm.log", START_S
    )
    try:
        if start:
            await server.start()
        yield server
    finally:
        await server.stop()


def processes(server: OwnServer) -> list[psutil.Process]:
    """Of the server's group."""
    assert server._process is not None
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == server._process.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def exists(path: str) -> bool:
    return Path(path).exists()


async def healthy(server: OwnServer) -> bool:
    async with aiohttp.ClientSession(connector=server.connector()) as session:
        return await vllm_server._answers(session, f"{server.base_url}/health")


async def test_a_server_answers_on_a_socket_that_only_its_user_can_reach_and_leaves_nothing(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server:
        assert await healthy(server)
        directory = Path(server._socket).parent
        assert directory.stat().st_mode & 0o777 == 0o700
        assert "fake vllm" in server.log_path.read_text()
    assert processes(server) == []
    assert not directory.exists()
    await server.stop()


@pytest.mark.parametrize("flags", [("--child",), ("--deaf",)])
async def test_what_does_not_heed_a_request_to_stop_is_killed(
    tmp_path: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "TERMINATED_S", 0.2)
    async with own_server(tmp_path, *flags) as server:
        assert len(processes(server)) == len(flags) + ("--child" in flags)
    assert processes(server) == []


async def test_one_that_stands_still_is_stopped_too(tmp_path: Path) -> None:
    async with own_server(tmp_path) as server:
        os.kill(processes(server)[0].pid, signal.SIGSTOP)
    assert processes(server) == []


async def test_a_server_that_fails_to_start_is_reported_with_the_cause_and_its_last_lines(tmp_path: Path) -> None:
    async with own_server(tmp_path, "--fails", start=False) as server:
        with pytest.raises(StartError, match=r"did not start \(ended with exit code 2\)") as caught:
            await server.start()
    text = str(caught.value)
    assert str(server.log_path) in text
    assert "ValueError: it does not fit" in text
    assert "line 19" in text
    assert "line 3\n" not in text


async def test_a_port_that_is_taken_is_tried_again_and_only_so_often(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    async with own_server(tmp_path, LAMINAR_FAKE_TAKEN=str(taken)) as server:
        assert server.log_path.read_text().count("fake vllm") == 2
    always = tmp_path / "vllm"
    always.write_text("#!/bin/sh\necho 'Address already in use'; exit 1\n")
    always.chmod(0o755)
    server = OwnServer([str(always)], dict(os.environ), tmp_path / "again.log", START_S)
    with pytest.raises(StartError, match="Address already in use"):
        await server.start()
    await server.stop()
    assert server.log_path.read_text().count("taken") == 0
    assert server.log_path.read_text().count("in use") == vllm_server.STARTS_MAX


async def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path) -> None:
    server = OwnServer([str(tmp_path / "python")], {}, tmp_path / "x.log", START_S)
    with pytest.raises(StartError, match=r"cannot start vLLM: No such file or directory: .*/python"):
        await server.start()
    await server.stop()


async def test_one_that_never_answers_is_given_up(tmp_path: Path) -> None:
    server = OwnServer(["sleep", "60"], dict(os.environ), tmp_path / "x.log", 0.5)
    server._command = ["sh", "-c", "echo loading; sleep 60"]
    vllm_server_words, vllm_server.LAST_WORDS_S = vllm_server.LAST_WORDS_S, 0.1
    try:
        with pytest.raises(StartError, match=r"did not answer within 0.45 s; its last lines .*\n  loading"):
            await server.start()
    finally:
        vllm_server.LAST_WORDS_S = vllm_server_words
        await server.stop()
    assert processes(server) == []


async def test_the_death_of_a_server_is_told_with_its_last_lines_and_takes_its_children_along(tmp_path: Path) -> None:
    async with own_server(tmp_path, "--child") as server:
        assert server._process is not None
        ended = asyncio.create_task(server.until_ended())
        os.kill(server._process.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            text = await ended
        assert text.startswith("vLLM ended by itself (ended by signal 9); its last lines")
        assert "fake vllm" in text
        assert processes(server) == []


async def test_a_server_that_is_killed_with_all_its_processes_leaves_no_shared_memory(tmp_path: Path) -> None:
    async with own_server(tmp_path, LAMINAR_FAKE_SHARES="1") as server:
        assert server._process is not None
        (left,) = vllm_shm.mapped_by([server._process.pid])
        assert exists(left)
        os.killpg(server._process.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await server.until_ended()
        assert not exists(left)


def test_what_servers_of_killed_workers_left_is_removed_unless_a_process_maps_it() -> None:
    ours = SharedMemory(create=True, size=1 << 12)
    left = Path(f"/dev/shm/psm_{uuid.uuid4().hex[:8]}")
    other = Path(f"/dev/shm/{uuid.uuid4().hex}")
    dead = Path(tempfile.mkdtemp(prefix=f"{vllm_server.PREFIX}{2**22 + 1}-"))
    try:
        left.write_bytes(b"x")
        other.write_bytes(b"x")
        (dead / vllm_server.SHARED_NAME).write_text(
            f"{left}\n/dev/shm/{ours.name}\n{other}\n/dev/shm/psm_/../{other.name}"
        )
        vllm_server._sweep()
        assert (left.exists(), Path(f"/dev/shm/{ours.name}").exists(), other.exists()) == (False, True, True)
        assert not dead.exists()
    finally:
        ours.close()
        ours.unlink()
        left.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


async def test_a_server_ends_with_the_worker_that_started_it(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from laminar.workers.engines.vllm_server import OwnServer\n"
        "async def main():\n"
        f"    server = OwnServer([sys.executable, {str(FAKE)!r}], dict(os.environ), Path('x.log'), 60.0)\n"
        "    await server.start()\n"
        "    print(server._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen(  # noqa: ASYNC220 - the test is of processes
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(FAKE.parent.parent)},
    )  # fmt: skip
    assert worker.stdout is not None
    server = psutil.Process(int(worker.stdout.readline()))
    worker.kill()
    worker.wait()
    worker.stdout.close()
    gone, _ = psutil.wait_procs([server], timeout=30)
    assert gone or server.status() == psutil.STATUS_ZOMBIE


def test_sockets_of_dead_workers_are_swept_and_those_of_living_ones_stay() -> None:
    dead = Path(tempfile.mkdtemp(prefix=f"{vllm_server.PREFIX}{2**22 + 1}-"))  # above the largest pid of Linux
    living = Path(tempfile.mkdtemp(prefix=f"{vllm_server.PREFIX}{os.getpid()}-"))
    vllm_server._sweep()
    assert not dead.exists()
    assert living.exists()
    living.rmdir()


async def test_an_attached_server_counts_as_gone_after_some_answers_that_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_server, "SICK_S", 0.05)
    server = AttachedServer("http://127.0.0.1:9/")
    async with asyncio.timeout(30):
        assert "did not answer well 3 times" in await server.until_ended()
    await server.stop()


def test_the_causes_come_before_the_last_lines() -> None:
    log = "\n".join(
        [
            "(EngineCore pid=7) ERROR 11-30 00:00:00 [core.py:9] ValueError: too large",
            "(EngineCore pid=7) ValueError: too large",
            *(f"(APIServer pid=6)   frame {number}" for number in range(30)),
            "(APIServer pid=6) RuntimeError: Engine core initialization failed.",
            ' - leaked function "create_print"',
            "nanobind: this is likely caused by a reference counting issue in the binding code.",
        ]
    )
    lines = last_lines(log).splitlines()
    assert lines[:2] == ["  ValueError: too large", "  …"]
    assert lines[-1].endswith("Engine core initialization failed.")
    assert len(lines) == 2 + vllm_server.LAST_LINES
    assert last_lines("  \n") == "  (it wrote nothing)"
