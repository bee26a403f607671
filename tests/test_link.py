"""The worker's channel against a real server on real sockets."""

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from controller_end import FAST, ORPHANING, TOKEN, ControllerEnd, controller_end, token_row

from laminar import wire
from laminar.channel import Session
from laminar.errors import ProtocolError
from laminar.ids import Version
from laminar.workers.link import Link, LinkClosed, LinkRefused, Orphaned, ThreadLink, TokensUnavailable

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def end() -> AsyncIterator[ControllerEnd]:
    async with controller_end() as server:
        yield server


def make_link(end: ControllerEnd, token: str = TOKEN, orphan_timeout_s: float | None = None) -> Link:
    return Link(end.url, worker="rollout-0", role="rollout", token=token, orphan_timeout_s=orphan_timeout_s)


@contextlib.asynccontextmanager
async def linked(end: ControllerEnd) -> AsyncIterator[Link]:
    link = make_link(end)
    await link.connect()
    try:
        yield link
    finally:
        await link.close()


def lost(step: int) -> wire.VersionLost:
    return wire.VersionLost(version=Version(step, 0), reason="numbered")


def steps(messages: list) -> list[int]:
    return [message.version.step for message in messages]


async def received(link: Link) -> wire.Message:
    async with asyncio.timeout(60):
        return await link.receive()


async def test_a_worker_says_hello_and_learns_the_configuration(end: ControllerEnd) -> None:
    async with linked(end) as link:
        assert link.config == FAST
        hello = end.hellos[0]
        assert (hello.worker, hello.role, hello.boot, hello.received) == ("rollout-0", "rollout", 0, 0)
        assert hello.incarnation > 1_600_000_000_000
    assert end.messages == [wire.Goodbye()]


async def test_a_worker_that_is_started_again_is_newer_than_its_predecessor_though_the_clock_was_set_back(
    end: ControllerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.INCARNATION_VARIABLE, "9_000_000_000_000")
    async with linked(end):
        assert end.hellos[0].incarnation == 9_000_000_000_000


async def test_a_wrong_token_is_refused_at_once(end: ControllerEnd) -> None:
    with pytest.raises(LinkRefused, match="LAMINAR_TOKEN"):
        await make_link(end, token="wrong").connect()


async def test_the_token_comes_from_the_environment(end: ControllerEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINAR_TOKEN", TOKEN)
    link = Link(end.url, worker="w", role="relay")
    await link.connect()
    await link.close()


async def test_a_refusal_shows_its_reason(end: ControllerEnd) -> None:
    end.refuse = "a newer process of rollout-0 is connected"
    with pytest.raises(LinkRefused, match="a newer process of rollout-0"):
        await make_link(end).connect()


async def test_another_protocol_is_refused_by_the_worker(end: ControllerEnd) -> None:
    end.protocol = wire.PROTOCOL + 1
    with pytest.raises(LinkRefused, match="speaks protocol"):
        await make_link(end).connect()


async def test_a_configuration_with_unknown_keys_is_refused(end: ControllerEnd) -> None:
    end.config = {"nonsense": 1}  # type: ignore[assignment]
    with pytest.raises(LinkRefused, match="install the same version"):
        await make_link(end).connect()


async def test_a_url_without_a_controller_is_refused() -> None:
    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(LinkRefused, match="no Laminar controller"):
            await Link(f"http://127.0.0.1:{runner.addresses[0][1]}", worker="w", role="rollout", token="t").connect()
    finally:
        await runner.cleanup()


async def test_no_controller_at_all_ends_in_orphaned() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    link = Link(f"http://127.0.0.1:{port}", worker="w", role="rollout", token="t", orphan_timeout_s=0.3)
    with pytest.raises(Orphaned, match=r"no controller .* for 0.3 s"):
        await link.connect()
    assert link.orphaned


async def test_a_server_that_never_answers_ends_in_orphaned() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Orphaned):
            await Link(url, worker="w", role="rollout", token="t", orphan_timeout_s=0.3).connect()


async def test_messages_arrive_in_order_both_ways(end: ControllerEnd) -> None:
    async with linked(end) as link:
        for step in range(200):
            link.send(lost(step))
            await end.send(wire.Publish(version=Version(step, 0)))
        assert steps([await received(link) for _ in range(200)]) == list(range(200))
        await end.until(lambda: len(end.messages) == 200)
        assert steps(end.messages) == list(range(200))


async def test_acknowledged_frames_are_forgotten(end: ControllerEnd) -> None:
    async with linked(end) as link:
        link.send(lost(1))
        assert link.pending_bytes > 0
        await end.until(lambda: end.heartbeats > 2 and link.pending_bytes == 0)


async def test_heartbeats_acknowledge_what_the_worker_received(end: ControllerEnd) -> None:
    async with linked(end) as link:
        await end.send(wire.Publish(version=Version(1, 0)))
        await received(link)
        await end.until(lambda: end.session.num_pending == 0)


@pytest.mark.parametrize("seed", range(6))
async def test_every_message_arrives_exactly_once_however_often_the_connection_drops(
    end: ControllerEnd, seed: int
) -> None:
    chance = random.Random(seed)
    end.on_frame = lambda number: chance.random() > 0.08
    async with linked(end) as link:
        for step in range(100):
            link.send(lost(step))
            await end.send(wire.Publish(version=Version(step, 0)))
            if chance.random() < 0.05:
                end.drop()
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        got = [await received(link) for _ in range(100)]
        await end.until(lambda: len(end.messages) == 100)
        assert steps(got) == steps(end.messages) == list(range(100))
        end.on_frame = lambda number: True


async def test_what_is_sent_without_a_controller_arrives_after_the_reconnect(end: ControllerEnd) -> None:
    async with linked(end) as link:
        await end.stop()
        for step in range(5):
            link.send(lost(step))
        await end.start()
        await end.until(lambda: len(end.messages) == 5)
        assert steps(end.messages) == list(range(5))
        assert end.hellos[-1].incarnation == end.hellos[0].incarnation


async def test_a_lost_controller_orphans_the_worker_after_the_configured_time(end: ControllerEnd) -> None:
    end.config = ORPHANING
    link = make_link(end)
    await link.connect()
    await end.send(wire.Publish(version=Version(7, 0)))
    await end.until(lambda: end.session.num_pending == 0)
    await end.stop()
    assert steps([await received(link)]) == [7]
    for _ in range(2):
        with pytest.raises(Orphaned):
            await received(link)
    assert link.orphaned
    link.send(lost(1))
    await link.close()


async def test_a_silent_controller_is_redialled(end: ControllerEnd) -> None:
    async with linked(end) as link:
        end.mute = True
        await end.until(lambda: len(end.hellos) >= 2)
        end.mute = False
        link.send(lost(3))
        await end.until(lambda: steps(end.of(wire.VersionLost)) == [3])


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"\x93\x00\x00", wire.encode([0, 0, {"type": "Nonsense"}])])
async def test_a_malformed_frame_closes_the_connection_and_nothing_is_lost(end: ControllerEnd, junk: bytes) -> None:
    async with linked(end) as link:
        await end.send_raw(junk)
        await end.until(lambda: len(end.hellos) == 2)
        await end.send(wire.Publish(version=Version(2, 0)))
        assert steps([await received(link)]) == [2]


async def test_a_gap_closes_the_connection_and_the_missing_frame_is_sent_again(end: ControllerEnd) -> None:
    async with linked(end) as link:
        end.session.reliable(wire.Publish(version=Version(1, 0)))
        await end.send(wire.Publish(version=Version(2, 0)))
        assert steps([await received(link), await received(link)]) == [1, 2]
        assert len(end.hellos) == 2


async def test_a_controller_that_sends_only_nonsense_is_given_up(end: ControllerEnd) -> None:
    end.mute = True
    link = make_link(end)
    await link.connect()
    for number in range(1, 6):
        await end.until(lambda number=number: len(end.hellos) == number and end._ws is not None)
        await end.send_raw(b"\xc1")
    with pytest.raises(ProtocolError, match="in a row"):
        await received(link)
    await link.close()


async def test_a_worker_whose_controller_dies_before_it_has_answered_waits_for_another_as_long_as_is_configured(
    end: ControllerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.ORPHAN_VARIABLE, "0.3")
    await end.stop()
    with pytest.raises(Orphaned, match=r"no controller at .* for 0\.3 s"):
        await make_link(end).connect()


async def test_a_worker_that_hears_its_controller_says_so_to_its_supervisor(
    end: ControllerEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.touch()
    os.utime(file, (1.0, 1.0))
    monkeypatch.setenv(wire.HOST_RENDEZVOUS_VARIABLE, str(file))
    async with linked(end):
        seen = end.heartbeats
        await end.until(lambda: end.heartbeats > seen + 5 and os.stat(file).st_mtime > 1.0)


async def test_a_controller_of_an_older_boot_is_not_obeyed(end: ControllerEnd) -> None:
    end.boot = 3
    link = make_link(end, orphan_timeout_s=1.0)
    await link.connect()
    end.boot = 2
    end.drop()
    with pytest.raises(Orphaned, match=r"boot number 2, but rollout-0 has already obeyed boot 3"):
        await received(link)
    await link.close()


async def test_a_worker_at_the_door_of_an_older_controller_finds_the_newer_one_by_any_file_that_names_it(
    end: ControllerEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (wire.RENDEZVOUS_VARIABLE, wire.HOST_RENDEZVOUS_VARIABLE):
        (tmp_path / variable).write_text(end.url)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    async with controller_end() as newer, linked(end) as link:
        link.send(lost(1))
        await end.until(lambda: len(end.messages) == 1)
        newer.boot = 2
        (tmp_path / wire.HOST_RENDEZVOUS_VARIABLE).write_text(newer.url)
        end.boot = 0
        end.drop()
        link.send(lost(2))
        await newer.until(lambda: 2 in steps(newer.messages))
        assert link.url == newer.url


async def test_a_worker_leaves_a_controller_whose_end_it_did_not_see_for_the_one_that_its_supervisor_knows(
    end: ControllerEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.write_text(end.url)
    monkeypatch.setenv(wire.HOST_RENDEZVOUS_VARIABLE, str(file))
    async with controller_end() as newer, linked(end) as link:
        link.send(lost(1))
        await end.until(lambda: len(end.messages) == 1)
        newer.boot = 2
        file.write_text(newer.url)
        await newer.until(lambda: newer.hellos != [])
        assert link.url == newer.url


async def test_a_new_controller_that_remembers_nothing_gets_all_unacknowledged_frames(end: ControllerEnd) -> None:
    async with linked(end) as link:
        link.send(lost(1))
        await end.until(lambda: link.pending_bytes == 0 and len(end.messages) == 1)
        await end.send(wire.Publish(version=Version(1, 0)))
        await received(link)
        await end.stop()
        link.send(lost(2))
        link.send(lost(3))
        end.boot, end.session = 2, Session(wire.ControllerEnvelope)
        await end.start()
        await end.until(lambda: len(end.messages) == 3)
        await end.send(wire.Publish(version=Version(2, 0)))
        assert steps([await received(link)]) == [2]
        assert steps(end.messages) == [1, 2, 3]
        assert end.hellos[-1].boot == 1


async def test_a_new_controller_that_restored_its_log_gets_only_the_rest(end: ControllerEnd) -> None:
    async with linked(end) as link:
        for step in (1, 2):
            link.send(lost(step))
        await end.until(lambda: len(end.messages) == 2)
        await end.stop()
        link.send(lost(3))
        restored = Session(wire.ControllerEnvelope)
        restored.received = restored.acknowledge = 2
        end.boot, end.session = 2, restored
        await end.start()
        await end.until(lambda: len(end.messages) == 3)
        assert steps(end.messages) == [1, 2, 3]


async def test_a_controller_that_goes_on_with_the_sessions_keeps_the_numbers_of_both_directions(
    end: ControllerEnd,
) -> None:
    async with linked(end) as link:
        for step in (1, 2):
            link.send(lost(step))
        await end.until(lambda: len(end.messages) == 2)
        await end.send(wire.Publish(version=Version(1, 0)))
        await received(link)
        await end.stop()
        link.send(lost(3))
        end.boot, end.continues = 2, 1
        await end.start()
        await end.until(lambda: len(end.messages) == 3)
        await end.send(wire.Publish(version=Version(2, 0)))
        assert steps([await received(link)]) == [2]
        assert steps(end.messages) == [1, 2, 3]
        assert (end.hellos[-1].boot, end.hellos[-1].received) == (1, 1)


async def test_a_link_finds_its_controller_where_the_run_directory_says_that_it_is_now(
    end: ControllerEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = tmp_path / "url"
    monkeypatch.setenv(wire.RENDEZVOUS_VARIABLE, str(rendezvous))
    async with controller_end() as elsewhere, linked(end) as link:
        elsewhere.boot = 2
        link.send(lost(1))
        await end.until(lambda: len(end.messages) == 1)
        await end.stop()
        rendezvous.write_text(elsewhere.url)
        link.send(lost(2))
        await elsewhere.until(lambda: 2 in steps(elsewhere.messages))
        assert link.url == elsewhere.url


async def test_receive_after_close_raises(end: ControllerEnd) -> None:
    async with linked(end) as link:
        waiting = asyncio.create_task(received(link))
        await asyncio.sleep(0)
    with pytest.raises(LinkClosed):
        await waiting
    with pytest.raises(LinkClosed):
        await received(link)


async def test_close_delivers_what_is_queued_before_the_goodbye(end: ControllerEnd) -> None:
    async with linked(end) as link:
        link.send(wire.WorkerFailed(reason="x", detail="y" * (8 << 20)))
        link.send(lost(1))
    kinds = [type(message) for message in end.messages]
    assert kinds == [wire.WorkerFailed, wire.VersionLost, wire.Goodbye]


async def test_a_message_too_large_for_a_frame_is_refused_and_the_channel_goes_on(end: ControllerEnd) -> None:
    async with linked(end) as link:
        with pytest.raises(ProtocolError, match="split it"):
            link.send(wire.WorkerFailed(reason="x", detail="y" * wire.FRAME_BYTES_MAX))
        link.send(lost(1))
    assert [type(message) for message in end.messages] == [wire.VersionLost, wire.Goodbye]


async def test_close_without_a_controller_is_bounded(end: ControllerEnd) -> None:
    link = make_link(end, orphan_timeout_s=60)
    await link.connect()
    await end.stop()
    async with asyncio.timeout(30):
        await link.close(timeout_s=0.1)


async def test_a_thread_link_delivers_receives_and_ends_its_thread(end: ControllerEnd) -> None:
    link = ThreadLink(end.url, "trainer-0", "trainer", token=TOKEN)
    welcome = await asyncio.to_thread(link.connect, 60)
    assert (welcome.run_id, link.config) == ("test", FAST)
    assert await asyncio.to_thread(link.receive, 0.01) is None
    for step in range(20):
        link.send(lost(step))
    await end.send(wire.Publish(version=Version(4, 0)))
    message = await asyncio.to_thread(link.receive, 60)
    rows = await asyncio.to_thread(link.fetch_tokens, [3, 1])
    await asyncio.to_thread(link.close)
    link.close()
    assert steps([message]) == [4]
    assert rows == [token_row(3), token_row(1)]
    assert steps(end.of(wire.VersionLost)) == list(range(20))
    assert end.messages[-1] == wire.Goodbye()
    assert "link trainer-0" not in [thread.name for thread in threading.enumerate()]


async def test_a_thread_link_raises_refusals_and_timeouts(end: ControllerEnd) -> None:
    refused = ThreadLink(end.url, "trainer-0", "trainer", token="wrong")
    with pytest.raises(LinkRefused):
        await asyncio.to_thread(refused.connect, 60)
    await asyncio.to_thread(refused.close)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        late = ThreadLink(url, "trainer-0", "trainer", token=TOKEN)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(late.connect, 0.2)
        await asyncio.to_thread(late.close)


async def test_tokens_of_many_trajectories_come_in_bounded_parts(end: ControllerEnd) -> None:
    async with linked(end) as link:
        wanted = list(range(600, 0, -1))
        assert await link.fetch_tokens(wanted) == [token_row(trajectory) for trajectory in wanted]
        assert end.num_token_requests == 3


async def test_a_token_request_is_tried_again_after_a_server_error(end: ControllerEnd) -> None:
    end.token_answers = [lambda request: web.Response(status=503)]
    async with linked(end) as link:
        assert await link.fetch_tokens([5]) == [token_row(5)]
        assert end.num_token_requests == 2


async def test_a_refused_token_request_says_why(end: ControllerEnd) -> None:
    end.token_answers = [lambda request: web.Response(status=404, text="trajectory 5 is forgotten")]
    async with linked(end) as link:
        with pytest.raises(TokensUnavailable, match="trajectory 5 is forgotten"):
            await link.fetch_tokens([5])


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode([token_row(6)]), msgspec.msgpack.encode([])])
async def test_a_wrong_answer_to_a_token_request_is_a_protocol_error(end: ControllerEnd, body: bytes) -> None:
    end.token_answers = [lambda request: web.Response(body=body)]
    async with linked(end) as link:
        with pytest.raises(ProtocolError):
            await link.fetch_tokens([5])
