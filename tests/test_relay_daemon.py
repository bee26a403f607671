"""The relay daemon and its client: real processes, real shared memory."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from chain_world import Relay, content, manifest_of
from controller_end import FAST, ORPHANING, TOKEN, ControllerEnd
from relay_world import (
    LIMIT_S,
    MANIFEST,
    Daemon,
    publish,
    publish_and_wait,
    running_daemon,
    slots,
    until,
    version,
)

from laminar import wire
from laminar.channel import Session
from laminar.config import Config, RelayConfig
from laminar.workers.relay import paths, protocol
from laminar.workers.relay.client import RelayClient, RelayError
from laminar.workers.relay.daemon import RelayServer
from laminar.workers.relay.digest import digest
from laminar.workers.relay.manifest import Manifest
from laminar.workers.relay.versions import Versions

BROADCAST_BYTES = 24 << 20  # at 20 Mbit/s ten seconds: some reports fall into it


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


# ---- its end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_daemon_and_leaves_nothing_in_shared_memory(daemon: Daemon, number: int):
    client = daemon.client()
    publish_and_wait(client, 1)
    lease = client.lease()
    assert daemon.directory.stat().st_mode & 0o777 == 0o700
    status, _ = daemon.end(number)
    assert status == 0
    assert not daemon.directory.exists()
    lease.release()
    client.close()


def test_a_second_relay_of_the_same_run_is_refused_and_the_first_goes_on(daemon: Daemon):
    with daemon.client() as client:
        status, log = Daemon(daemon.run_id).end(0)
        assert status == 1
        assert "is in use" in log
        assert str(daemon.process.pid) in log
        publish_and_wait(client, 1)


# ---- bad peers


def raw_socket(daemon: Daemon) -> socket.socket:
    daemon.client().close()
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(LIMIT_S)
    connection.connect(str(daemon.directory / protocol.SOCKET_NAME))
    return connection


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0),
        struct.pack("<I", protocol.FRAME_BYTES_MAX + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 20) + msgspec.msgpack.encode({"type": "Launch", "x": 1}).ljust(20, b"\0"),
        protocol.encode(protocol.Done()),
    ],
    ids=["http", "empty", "too large", "not msgpack", "unknown request", "a reply"],
)
def test_a_malformed_frame_closes_that_connection_only_and_is_logged(daemon: Daemon, junk: bytes):
    with daemon.client() as client, raw_socket(daemon) as connection:
        connection.sendall(junk)
        assert connection.recv(1) == b""
        publish_and_wait(client, 1)
    _, log = daemon.end()
    assert "relay_peer_refused" in log


def test_a_connection_cut_in_mid_frame_disturbs_nobody(daemon: Daemon):
    with daemon.client() as client:
        with raw_socket(daemon) as connection:
            connection.sendall(struct.pack("<I", 1000) + b"half")
        until(client, lambda status: status.num_connections == 1)
        publish_and_wait(client, 1)


def test_a_lease_of_another_connection_cannot_be_released(daemon: Daemon):
    with daemon.client() as client, raw_socket(daemon) as stranger:
        publish_and_wait(client, 1)
        with client.lease():
            stranger.sendall(protocol.encode(protocol.Release(lease=2)))
            length = protocol.body_length(stranger.recv(4, socket.MSG_WAITALL))
            reply = protocol.decode_reply(stranger.recv(length, socket.MSG_WAITALL))
            assert isinstance(reply, protocol.Refusal)
            assert "does not hold it" in reply.reason
            assert client.status().slots[0].num_leases == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_even_if_the_directory_were_open(daemon: Daemon):
    daemon.client().close()
    daemon.directory.chmod(0o711)
    (daemon.directory / protocol.SOCKET_NAME).chmod(0o777)
    code = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(20)
    connection.connect(sys.argv[1])
    print(connection.recv(1))
"""
    command = [sys.executable, "-c", code, str(daemon.directory / protocol.SOCKET_NAME)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert answer.stdout.strip() == "b''", answer.stderr
    assert "of user 65534 may not use the relay" in daemon.end()[1]


# ---- the server inside this process


class LocalServer:
    """A RelayServer on this loop; its client's calls run in a thread."""

    def __init__(self, **options: object) -> None:
        self.events: asyncio.Queue[wire.VersionReady | wire.VersionLost | wire.VersionDropped] = asyncio.Queue()
        self.directory = paths.create(f"test-{uuid.uuid4().hex[:12]}", "runs/test")
        self.server = RelayServer(Versions(self.directory, 3, self.events.put_nowait, **options))  # type: ignore[arg-type]
        self.client = RelayClient(self.directory, LIMIT_S)

    async def __aenter__(self) -> "LocalServer":
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()
        self.client.close()
        paths.remove(self.directory)


async def test_every_version_is_reported_once_as_ready_or_lost():
    async with LocalServer() as local:
        await asyncio.to_thread(publish, local.client, 1)
        ready = await local.events.get()
        expected = digest(memoryview(bytes([1]) * MANIFEST.num_bytes))
        assert ready == wire.VersionReady(version=version(1), digest=expected, num_bytes=MANIFEST.num_bytes)
        await asyncio.to_thread(local.client.begin, version(2), MANIFEST, 0, 1)
        await asyncio.to_thread(local.client.abandon, version(2), "no reason")
        assert await local.events.get() == wire.VersionLost(version=version(2), reason="rank 0 gave up: no reason")
        assert local.events.empty()


async def test_a_ready_version_is_reported_once_more_when_its_slot_is_recycled():
    async with LocalServer() as local:
        for step in range(1, 5):
            # Ready before the next begins: digests of two versions run side by side and may end in either order.
            await asyncio.to_thread(publish_and_wait, local.client, step)
        told = [await local.events.get() for _ in range(5)]
        assert [type(each).__name__ for each in told] == ["VersionReady"] * 3 + ["VersionDropped", "VersionReady"]
        assert told[3] == wire.VersionDropped(version=version(1))
        assert local.events.empty()


async def test_too_small_a_shared_memory_is_refused_to_every_rank_with_what_to_do():
    async with LocalServer(free=lambda directory: 64 << 20) as local:
        large = Manifest.plan([("w", "float32", (10, 1 << 20), 4)])
        for rank in range(2):
            with pytest.raises(
                RelayError, match=r"3 slots x 41943040 bytes, there are 67108864 bytes free.*--shm-size"
            ):
                await asyncio.to_thread(local.client.begin, version(1), large, rank, 2)
        assert sorted(path.name for path in local.directory.iterdir()) == ["owner.json", "relay.sock"]
        await asyncio.to_thread(publish, local.client, 2)
        assert isinstance(await local.events.get(), wire.VersionReady)


async def test_a_rank_that_never_commits_costs_the_version_and_not_the_relay():
    async with LocalServer(fill_timeout_s=0.05) as local:
        await asyncio.to_thread(local.client.begin, version(1), MANIFEST, 0, 2)
        lost = await local.events.get()
        assert isinstance(lost, wire.VersionLost)
        assert lost.reason == "ranks [0, 1] did not commit within 0.05 s"
        status = await asyncio.to_thread(local.client.status)
        assert slots(status)[0] == ("filling", 1), "rank 0 is alive and may still write"
        with pytest.raises(RelayError, match="did not commit within"):
            await asyncio.to_thread(local.client.commit, version(1))
        assert slots(await asyncio.to_thread(local.client.status))[0] == ("free", None)


async def test_closing_the_server_in_the_middle_of_everything_is_clean():
    allocating, loop = asyncio.Event(), asyncio.get_running_loop()

    def free(directory: Path) -> int:
        loop.call_soon_threadsafe(allocating.set)
        return 1 << 40

    async with LocalServer(free=free) as local:
        large = Manifest.plan([("w", "float32", (16, 1 << 20), 4)])
        begun = asyncio.create_task(asyncio.to_thread(local.client.begin, version(1), large, 0, 1))
        await allocating.wait()
        await local.server.close()
        with pytest.raises(RelayError):
            await begun


# ---- under a controller


class NamedSession(Session):
    """Greets with a run id of its own, so that tests at the same time do not meet in /dev/shm."""

    run_id = ""

    def unreliable(self, message: wire.Message) -> bytes:
        if isinstance(message, wire.Welcome):
            message = msgspec.structs.replace(message, run_id=self.run_id)
        return super().unreliable(message)


def start_under(controller: ControllerEnd, token: str = TOKEN, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "laminar.workers.relay", "--controller", controller.url, "--name", "relay-0"]
    command += options
    environment = os.environ | {"LAMINAR_TOKEN": token}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


async def run_controller(config: Config = FAST) -> tuple[ControllerEnd, Path]:
    controller = ControllerEnd(config)
    controller.session = NamedSession(wire.ControllerEnvelope)
    controller.session.run_id = f"test-{uuid.uuid4().hex[:12]}"
    await controller.start()
    return controller, paths.shm_directory(controller.session.run_id)


async def test_under_a_controller_it_reports_versions_and_leaves_cleanly_on_stop():
    controller, directory = await run_controller()
    process = start_under(controller)
    try:
        await controller.until(lambda: controller.of(wire.RelayReady) != [])
        assert controller.of(wire.RelayReady) == [wire.RelayReady(directory=str(directory))]
        assert controller.hellos[0].role == "relay"
        client = RelayClient(directory, LIMIT_S)
        await asyncio.to_thread(publish, client, 1)
        await controller.until(lambda: controller.of(wire.VersionReady) != [])
        assert controller.of(wire.VersionReady)[0].version == version(1)
        client.close()
        await controller.send(wire.Stop(reason="the run is done"))
        _, log = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
        assert process.returncode == 0, log
        assert controller.of(wire.Goodbye)
        assert not directory.exists()
    finally:
        process.kill()
        await controller.stop()


async def test_it_tells_the_controller_what_its_links_are_made_of():
    controller, _ = await run_controller()
    process = start_under(controller, TOKEN, "--listen", "127.0.0.1")
    try:
        await controller.until(lambda: controller.of(wire.RelayReport) != [])
        empty = [wire.SlotReport(state="free")] * 3
        assert controller.of(wire.RelayReport) == [wire.RelayReport(transport="tcp over TCP", slots=empty)]
        await controller.send(wire.Stop(reason="the run is done"))
        _, log = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
        assert process.returncode == 0, log
    finally:
        process.kill()
        await controller.stop()


async def test_in_the_middle_of_a_broadcast_it_tells_the_controller_what_is_in_its_slots_and_how_far_it_is():
    limited = msgspec.structs.replace(FAST, relay=RelayConfig(rate_limit_mbit=20))
    controller, directory = await run_controller(limited)
    process = start_under(controller, TOKEN, "--listen", "127.0.0.1")
    downstream = await asyncio.to_thread(Relay, "r1", TOKEN)
    client = RelayClient(directory, LIMIT_S)
    try:
        neighbour = await asyncio.to_thread(lambda: downstream.neighbour)
        await asyncio.to_thread(downstream.client.arrange, 1, "relay-0", None)
        await controller.until(lambda: controller.of(wire.RelayReady) != [])
        await controller.send(wire.ArrangeChain(epoch=1, upstream=None, downstream=neighbour, num_relays=2))
        data = memoryview(content(version(1), BROADCAST_BYTES))
        buffer = await asyncio.to_thread(client.begin, version(1), manifest_of(BROADCAST_BYTES), 0, 1)
        assert buffer is not None
        buffer[:] = data
        await asyncio.to_thread(client.commit, version(1))
        with await asyncio.to_thread(lambda: client.lease(version(1), wait_s=LIMIT_S)):
            before, report, after = await _report_between(controller, client)
        assert report.sending is not None
        assert (report.sending.version, report.sending.total_bytes) == (version(1), BROADCAST_BYTES)
        assert _sent(before) <= report.sending.num_bytes <= _sent(after)
        assert before.chain_sent_bytes <= report.sent_bytes <= after.chain_sent_bytes
        told = [(slot.state, slot.version, slot.num_leases) for slot in report.slots]
        assert told == [(slot.state, slot.version, slot.num_leases) for slot in after.slots]
        assert told == [("ready", version(1), 2), ("free", None, 0), ("free", None, 0)], "a reader, and the link"
        assert report.slot_bytes == after.capacity_bytes == BROADCAST_BYTES
    finally:
        client.close()
        process.kill()
        process.communicate()
        paths.remove(directory)
        await asyncio.to_thread(downstream.end)
        await controller.stop()


async def _report_between(
    controller: ControllerEnd, client: RelayClient
) -> tuple[protocol.Status, wire.RelayReport, protocol.Status]:
    """The first report in which a version is going downstream, and the relay's own status before and after it."""
    while True:
        num, before = len(controller.of(wire.RelayReport)), await asyncio.to_thread(client.status)
        await controller.until(lambda: len(controller.of(wire.RelayReport)) > num)  # noqa: B023 - called at once
        report, after = controller.of(wire.RelayReport)[num], await asyncio.to_thread(client.status)
        if report.sending is not None and before.chain is not None and before.chain.outgoing is not None:
            return before, report, after


def _sent(status: protocol.Status) -> int:
    going = status.chain.outgoing if status.chain is not None else None
    return going.num_bytes if going is not None else BROADCAST_BYTES


async def test_an_orphan_stops_and_removes_its_shared_memory():
    controller, directory = await run_controller(ORPHANING)
    process = start_under(controller)
    try:
        await controller.until(lambda: controller.of(wire.RelayReady) != [])
        await controller.stop()
        _, log = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
        assert process.returncode == 1
        assert "no controller at" in log
        assert not directory.exists()
    finally:
        process.kill()


async def test_a_controller_that_refuses_the_token_ends_it_with_the_reason_and_makes_nothing():
    controller, directory = await run_controller()
    process = start_under(controller, token="wrong")
    try:
        _, log = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
        assert process.returncode == 1
        assert "refused the run token" in log
        assert not directory.exists()
    finally:
        process.kill()
        await controller.stop()
