"""Versions flow from relay to relay: real processes, real sockets, real shared memory."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable

import numpy as np
import pytest
from chain_world import TOKEN, Relay, arrange, chain, content, manifest_of
from relay_world import LIMIT_S

from laminar.ids import Version
from laminar.wire import Neighbour
from laminar.workers.relay import chain_frames as frames
from laminar.workers.relay import paths, protocol
from laminar.workers.relay.chain import Chain, Place
from laminar.workers.relay.client import RelayError
from laminar.workers.relay.digest import digest, digest_blocks
from laminar.workers.relay.manifest import BLOCK_BYTES
from laminar.workers.transport import Link, LinkEnded, make_transport

SMALL = 3 * (1 << 20) + 4096  # ends within a digest block
MEDIUM = 48 << 20  # more than the buffers between two relays hold
LARGE = 96 << 20  # takes long enough on loopback for something to happen in the middle


def test_a_published_version_reaches_every_relay_whole():
    with chain(4) as relays:
        version = relays[0].publish(1, SMALL)
        assert all(relay.holds(version, SMALL) for relay in relays)


def test_the_newest_of_a_burst_reaches_the_last_relay():
    with chain(3) as relays:
        for step in range(1, 6):
            version = relays[0].publish(step, SMALL)
            assert relays[0].holds(version, SMALL)
        assert relays[2].holds(version, SMALL)


def test_a_late_joiner_is_filled_by_its_neighbour():
    with chain(2) as relays:
        version = relays[0].publish(1, SMALL)
        assert relays[1].holds(version, SMALL)
        late = Relay("late")
        try:
            arrange(2, [*relays, late])
            assert late.holds(version, SMALL)
        finally:
            late.end()


@pytest.mark.parametrize("victims", [(1,), (3,), (1, 2), (1, 2, 3)], ids=["first", "last", "adjacent", "all"])
def test_survivors_of_killed_relays_get_the_whole_version_after_one_new_epoch(victims: tuple[int, ...]):
    with chain(4) as relays:
        version = relays[0].publish(1, LARGE)
        relays[victims[0]].until(lambda status: any(slot.state == "filling" for slot in status.slots))
        for victim in victims:
            relays[victim].kill()
        survivors = [relay for number, relay in enumerate(relays) if number not in victims]
        arrange(2, survivors)
        assert all(relay.holds(version, LARGE) for relay in survivors)


def test_a_killed_neighbour_is_reported_with_its_epoch():
    with chain(3) as relays:
        relays[0].until(lambda status: status.chain_epoch == 1)
        version = relays[0].publish(1, SMALL)
        assert relays[2].holds(version, SMALL)
        relays[1].kill()
        for end in (relays[0], relays[2]):
            assert end.until(lambda status: bool(status.chain_broken)).chain_broken == ["1: r1"]


def test_a_stopped_relay_is_reported_while_bytes_are_due_and_wakes_up_fenced():
    with chain(3, progress_timeout_s=1.5) as relays:
        first = relays[0].publish(1, MEDIUM)
        assert relays[2].holds(first, MEDIUM)
        relays[1].signal(signal.SIGSTOP)
        second = relays[0].publish(2, MEDIUM)
        assert relays[0].until(lambda status: bool(status.chain_broken)).chain_broken[0] == "1: r1"
        arrange(2, [relays[0], relays[2]])
        assert relays[2].holds(second, MEDIUM)
        relays[1].signal(signal.SIGCONT)
        third = relays[0].publish(3, MEDIUM)
        assert relays[2].holds(third, MEDIUM)
        with pytest.raises(RelayError, match="not ready"):
            relays[1].client.lease(third)


def test_the_master_may_die_and_a_complete_holder_goes_on():
    with chain(3) as relays:
        first = relays[0].publish(1, MEDIUM)
        assert relays[2].holds(first, MEDIUM)
        relays[0].publish(2, MEDIUM)
        relays[0].kill()
        arrange(2, relays[1:])
        third = relays[1].publish(3, MEDIUM)
        assert relays[1].holds(third, MEDIUM)
        assert relays[2].holds(third, MEDIUM)


def test_a_reader_holds_its_version_while_others_flow_through_its_relay():
    with chain(2) as relays:
        first = relays[0].publish(1, SMALL)
        with relays[1].client.lease(first, wait_s=LIMIT_S) as lease:
            for step in range(2, 8):
                version = relays[0].publish(step, SMALL)
                assert relays[1].holds(version, SMALL)
            lease.verify()


def test_a_version_of_which_little_changed_crosses_every_hop_as_deltas_and_arrives_bit_for_bit():
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 1 << 15, (8 << 20) // 2, dtype=np.uint16)
    with chain(3, deltas="always") as relays:
        first = relays[0].publish_bytes(1, weights)
        assert relays[2].bytes_of(first, weights.nbytes) == weights.tobytes()
        whole = [relay.client.status().chain_wire_bytes for relay in relays[:2]]
        weights[rng.choice(len(weights), len(weights) // 100, replace=False)] += 1
        second = relays[0].publish_bytes(2, weights)
        assert relays[2].bytes_of(second, weights.nbytes) == weights.tobytes()
        for relay, before in zip(relays, whole, strict=False):
            relay.until(lambda status: status.chain_sent_bytes >= 2 * weights.nbytes)
            assert relay.client.status().chain_wire_bytes - before < weights.nbytes / 30


def test_a_slow_link_keeps_to_deltas_from_version_to_version_once_it_has_seen_a_whole_one():
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 1 << 15, (8 << 20) // 2, dtype=np.uint16)
    with chain(2, deltas="auto", options=("--rate-limit-mbit", "160")) as relays:
        for step in range(1, 6):
            version = relays[0].publish_bytes(step, weights)
            assert relays[1].bytes_of(version, weights.nbytes) == weights.tobytes()
            weights[rng.choice(len(weights), len(weights) // 200, replace=False)] += 1
        wire_bytes = relays[0].until(lambda status: status.chain_sent_bytes >= 5 * weights.nbytes).chain_wire_bytes
        assert wire_bytes - weights.nbytes < 4 * weights.nbytes / 20


def test_a_relay_that_lacks_the_base_gets_whole_chunks():
    weights = np.zeros((4 << 20) // 2, np.uint16)
    with chain(2, deltas="always") as relays:
        first = relays[0].publish_bytes(1, weights)
        assert relays[1].bytes_of(first, weights.nbytes) == weights.tobytes()
        late = Relay("late", deltas="always")
        try:
            weights[::1000] += 1
            second = relays[0].publish_bytes(2, weights)
            assert relays[1].bytes_of(second, weights.nbytes) == weights.tobytes()
            arrange(2, [*relays, late])
            assert late.bytes_of(second, weights.nbytes) == weights.tobytes()
            assert relays[1].client.status().chain_wire_bytes == weights.nbytes
        finally:
            late.end()


def flip(relay: Relay, version: Version, at: int) -> None:
    """Change a byte of a version in a relay's memory."""
    (slot,) = [each for each in relay.client.status().slots if each.version == version]
    with (relay.directory / slot.file).open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_version_that_changed_in_a_relays_memory_is_not_passed_on_and_that_relay_gets_it_again():
    with chain(2) as relays:
        first = relays[0].publish(1, SMALL)
        assert relays[1].holds(first, SMALL)
        flip(relays[1], first, BLOCK_BYTES + 5)
        late = Relay("late")
        try:
            arrange(2, [*relays, late])
            relays[1].until(lambda status: all(slot.version != first for slot in status.slots))
            assert not relays[1].client.status().chain_broken, "nobody is to blame for a link"
            arrange(3, [*relays, late])  # as the core does when a relay has lost the newest version
            assert late.holds(first, SMALL)
            assert relays[1].holds(first, SMALL)
        finally:
            late.end()


@pytest.mark.parametrize("end", [0, 1], ids=["sender", "receiver"])
def test_a_base_that_changed_in_memory_costs_deltas_and_nothing_else(end: int):
    weights = np.zeros((4 << 20) // 2, np.uint16)
    with chain(2, deltas="always") as relays:
        first = relays[0].publish_bytes(1, weights)
        assert relays[1].bytes_of(first, weights.nbytes) == weights.tobytes()
        flip(relays[end], first, 2 * BLOCK_BYTES + 6)
        weights[::1000] += 1
        second = relays[0].publish_bytes(2, weights)
        relays[1].until(lambda status: bool(status.chain_broken))
        arrange(2, relays)
        assert relays[1].bytes_of(second, weights.nbytes) == weights.tobytes()


def test_a_limited_link_shows_how_far_a_version_has_come_at_both_its_ends():
    with chain(2, options=("--rate-limit-mbit", "20")) as relays:
        version = relays[0].publish(1, 8 << 20)

        def is_half_way(status: protocol.Status, end: str) -> bool:
            progress = getattr(status.chain, end)
            return (
                progress is not None and progress.version == version and 0 < progress.num_bytes < progress.total_bytes
            )

        relays[1].until(lambda status: is_half_way(status, "incoming"))
        relays[0].until(lambda status: is_half_way(status, "outgoing"))
        assert relays[1].holds(version, 8 << 20)
        relays[0].until(lambda status: status.chain is not None and status.chain.outgoing is None)


def test_chunks_are_sized_by_the_link_where_no_size_is_set():
    with chain(3, options=("--chunk-mib", "0")) as relays:
        for step in (1, 2):
            version = relays[0].publish(step, MEDIUM)
            assert relays[2].holds(version, MEDIUM)
        status = relays[0].client.status().chain
        assert status is not None
        assert status.start_s > 0
        assert status.byte_s > 0
        assert status.chunk_bytes > 0
        assert status.chunk_bytes % BLOCK_BYTES == 0


def test_a_stranger_without_the_runs_token_gets_no_link():
    stranger = Relay("stranger", token="another token")
    try:
        with chain(1) as relays:
            stranger.client.arrange(1, None, relays[0].neighbour)
            relays[0].client.arrange(2, "stranger", None)
            stranger.client.arrange(2, None, relays[0].neighbour)
            version = stranger.publish(1, SMALL)
            stranger.until(lambda status: bool(status.chain_broken))
            with pytest.raises(RelayError, match="not ready"):
                relays[0].client.lease(version)
    finally:
        stranger.end()


def test_garbage_and_silence_on_the_port_harm_nobody():
    with chain(2) as relays:
        port = relays[1].neighbour.port
        with socket.create_connection(("127.0.0.1", port)) as garbage, socket.create_connection(("127.0.0.1", port)):
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
            version = relays[0].publish(1, SMALL)
            assert relays[1].holds(version, SMALL)


@pytest.mark.parametrize(
    ("address", "token", "reason"),
    [("203.0.113.9", "t", "cannot listen on 203.0.113.9"), ("127.0.0.1", "", "needs the run's token in LAMINAR_TOKEN")],
)
def test_a_relay_that_cannot_take_part_says_why_and_leaves_nothing(address: str, token: str, reason: str):
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    command = [sys.executable, "-m", "laminar.workers.relay", "--run-id", run_id, "--listen", address]
    done = subprocess.run(
        command, env={**os.environ, "LAMINAR_TOKEN": token}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert reason in done.stderr
    assert not paths.shm_directory(run_id).exists()


# ---- an upstream that does not keep to the rules


class Upstream:
    """Plays the neighbour upstream of a relay, by the book until a test departs from it."""

    def __init__(self, relay: Relay, epoch: int, last: Relay | None = None) -> None:
        if last is not None:
            last.client.arrange(epoch, relay.name, None)
        relay.client.arrange(epoch, "upstream", last.neighbour if last is not None else None)
        self.link = make_transport("tcp", LIMIT_S).connect("127.0.0.1", relay.neighbour.port, LIMIT_S)
        self.frames = frames.Frames(self.link)
        hello = frames.Hello(name="upstream", epoch=epoch, nonce=bytes(frames.NONCE_BYTES))
        frames.send(self.link, hello)
        challenge = self.frames.expect(frames.Challenge)
        assert isinstance(challenge, frames.Challenge)
        frames.send(self.link, frames.Proof(proof=frames.proof(TOKEN, "upstream", hello, challenge.nonce)))
        self.frames.expect(frames.Welcome)

    def offer(self, version: Version, num_bytes: int) -> int:
        """From where on the relay lacks bytes."""
        frames.send(self.link, frames.Offer(version=version, manifest=manifest_of(num_bytes)))
        have = self.frames.expect(frames.Have)
        assert isinstance(have, frames.Have)
        return have.offset

    def end(self, version: Version, digest: str) -> bool:
        """Whether the relay found the digest right."""
        frames.send(self.link, frames.End(version=version, digest=digest))
        done = self.frames.expect(frames.Done)
        assert isinstance(done, frames.Done)
        return done.verified


MIB = 1 << 20


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([(0, MIB), (0, MIB)], MIB),
        ([(MIB, 2 * MIB)], 0),
        ([(0, MIB), (2 * MIB, 3 * MIB)], MIB),
        ([(0, 4096)], 0),
        ([(0, SMALL + MIB)], 0),
        ([(SMALL - 4096, SMALL + MIB)], 0),
    ],
    ids=["twice", "not from the beginning", "a gap", "part of a block", "too long", "beyond the end"],
)
def test_bytes_that_are_not_due_end_the_link_and_the_next_one_goes_on_from_those_that_were(
    parts: list[tuple[int, int]], kept: int
) -> None:
    version = Version(1, 0)
    data = memoryview(content(version, SMALL + MIB))
    expected = digest(data[:SMALL])
    with chain(1) as (relay,):
        upstream = Upstream(relay, 2)
        assert upstream.offer(version, SMALL) == 0
        with contextlib.suppress(LinkEnded):  # it may have hung up before all of them are sent
            for start, stop in parts:
                frames.send_bytes(upstream.link, start, data[start:stop], digest_blocks(data[start:stop]))
        relay.until(lambda status: status.chain_broken == ["2: upstream"])
        upstream.link.close()
        upstream = Upstream(relay, 3)
        assert upstream.offer(version, SMALL) == kept
        frames.send_bytes(upstream.link, kept, data[kept:SMALL], digest_blocks(data[kept:SMALL]))
        assert upstream.end(version, expected)
        assert relay.bytes_of(version, SMALL) == bytes(data[:SMALL])
        upstream.link.close()


def test_bytes_that_do_not_have_the_digest_are_dropped_and_may_come_again() -> None:
    version = Version(1, 0)
    data = memoryview(content(version, SMALL))
    with chain(1) as (relay,):
        upstream = Upstream(relay, 2)
        for found in ("0" * 32, digest(data)):
            assert upstream.offer(version, SMALL) == 0
            frames.send_bytes(upstream.link, 0, data, digest_blocks(data))
            assert upstream.end(version, found) == (found == digest(data))
        assert relay.holds(version, SMALL)
        upstream.link.close()


def test_a_block_that_does_not_have_its_digest_is_not_taken_and_not_forwarded() -> None:
    version = Version(1, 0)
    data = memoryview(content(version, SMALL))
    wrong = bytearray(data)
    wrong[MIB + 5] ^= 1
    with chain(2) as (relay, last):
        upstream = Upstream(relay, 2, last)
        assert upstream.offer(version, SMALL) == 0
        with contextlib.suppress(LinkEnded):
            frames.send_bytes(upstream.link, 0, memoryview(wrong), digest_blocks(data))
        relay.until(lambda status: "2: upstream" in status.chain_broken)
        upstream.link.close()
        upstream = Upstream(relay, 3, last)
        assert upstream.offer(version, SMALL) == MIB
        frames.send_bytes(upstream.link, MIB, data[MIB:], digest_blocks(data[MIB:]))
        assert upstream.end(version, digest(data))
        assert last.holds(version, SMALL)
        upstream.link.close()


def test_what_fails_inside_a_thread_of_the_chain_ends_its_link_and_is_reported() -> None:
    broken: list[tuple[str, int]] = []
    reported = threading.Event()

    class Failing:
        """A store whose slots are gone."""

        def behind(self, link: Link) -> "Failing":
            return self

        def lose_incoming(self) -> None:
            pass

        def newest(self) -> None:
            raise BufferError("a bug")

        def held(self, found: object) -> None:
            raise AssertionError("there is nothing to hold")

    def on_broken(peer: str, epoch: int) -> None:
        broken.append((peer, epoch))
        reported.set()

    with chain(1) as (relay,):
        relay.client.arrange(2, "r9", None)
        place = Place("r9", TOKEN, make_transport("tcp", LIMIT_S), "127.0.0.1")
        failing = Chain(place, Failing(), on_broken, on_broken)  # type: ignore[arg-type]
        failing.arrange(2, None, relay.neighbour)
        assert reported.wait(LIMIT_S)
        assert broken == [("r0", 2)]
        relay.until(lambda status: status.chain_broken == ["2: r9"])
        failing.close()


class NoStore:
    """Of a relay that has nothing."""

    def lose_incoming(self) -> None:
        pass


def alone(on_broken: Callable[[str, int], None]) -> Chain:
    """A chain's end in this process."""
    place = Place("r9", TOKEN, make_transport("tcp", LIMIT_S), "127.0.0.1")
    return Chain(place, NoStore(), on_broken, on_broken)  # type: ignore[arg-type]


def give_signs_of_life(link: Link) -> None:
    """And nothing else, until the link ends; that may take long."""
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(LinkEnded):
        while time.monotonic() < deadline:
            frames.send_nothing(link)
            threading.Event().wait(0.01)
    assert time.monotonic() < deadline, "a stranger keeps a thread and a place for ever"


def test_signs_of_life_of_one_who_does_not_say_who_he_is_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.workers.relay.chain.HANDSHAKE_S", 0.2)
    broken: queue.Queue[tuple[str, int]] = queue.Queue()
    relay = alone(lambda peer, epoch: broken.put((peer, epoch)))
    link = make_transport("tcp", LIMIT_S).connect("127.0.0.1", relay.port, LIMIT_S)
    give_signs_of_life(link)
    link.close()
    listener = make_transport("tcp", LIMIT_S).listen("127.0.0.1")
    relay.arrange(1, None, Neighbour(name="mute", host="127.0.0.1", port=listener.port))
    link = listener.accept()
    give_signs_of_life(link)
    assert broken.get(timeout=LIMIT_S) == ("mute", 1)
    for each in (link, listener, relay):
        each.close()
