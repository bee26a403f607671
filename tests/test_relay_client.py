"""Publishing and leasing against a real daemon, and the deaths of either side."""

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from relay_world import (
    LIMIT_S,
    MANIFEST,
    Daemon,
    Peer,
    holds,
    publish,
    publish_and_wait,
    running_daemon,
    slots,
    until,
    version,
)

from laminar.workers.relay import paths
from laminar.workers.relay.client import RelayClient, RelayError
from laminar.workers.relay.digest import digest
from laminar.workers.relay.manifest import BLOCK_BYTES, Manifest


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


# ---- publish and lease


def test_two_writer_processes_publish_one_version_and_a_reader_sees_both_shards(daemon: Daemon):
    client = daemon.client()
    writers = [Peer("write", daemon, 1, rank, 2) for rank in range(2)]
    for writer in writers:
        writer.expect("written")
    with pytest.raises(RelayError, match=r"lease of v1: not ready.*filling: v1"):
        client.lease(version(1))
    for writer in writers:
        writer.go_on()
        writer.expect("committed")
    with client.lease(version(1), verify=True, wait_s=LIMIT_S) as lease:
        half = MANIFEST.num_bytes // 2
        assert bytes(lease.buffer) == bytes([10]) * half + bytes([11]) * half
        assert lease.digest == digest(lease.buffer)
        tensors = dict(lease.snapshot.tensors())
        assert tensors["embed"].shape == (600, 1024)
        del tensors
    for writer in writers:
        writer.end()
    client.close()


def test_one_rank_alone_does_not_make_a_version_ready(daemon: Daemon):
    first, second = daemon.client(), daemon.client()
    for rank, client in enumerate((first, second)):
        assert client.begin(version(1), MANIFEST, rank, 2) is not None
    first.commit(version(1))
    status = second.status()
    assert slots(status)[0] == ("filling", 1)
    assert status.slots[0].num_writers == 1
    second.commit(version(1))
    first.lease(version(1), wait_s=LIMIT_S).release()
    first.close()
    second.close()


def test_the_newest_version_is_leased_when_none_is_named(daemon: Daemon):
    with daemon.client() as client:
        with pytest.raises(RelayError, match="lease of a version: not ready"):
            client.lease()
        for step in (1, 2):
            publish_and_wait(client, step)
        with client.lease() as lease:
            assert lease.version == version(2)
            assert holds(lease, 2)


def test_an_unknown_version_is_refused_naming_what_is_there(daemon: Daemon):
    with daemon.client() as client:
        publish_and_wait(client, 1)
        with pytest.raises(RelayError, match=r"lease of v9: not ready in this relay; ready \(oldest first\): v1;"):
            client.lease(version(9))


def test_a_slow_reader_sees_one_version_through_a_burst_of_five(daemon: Daemon):
    with daemon.client() as writer, daemon.client() as reader:
        publish_and_wait(writer, 1)
        with reader.lease(version(1)) as lease:
            published = [step for step in (2, 3, 4, 5, 6) if publish(writer, step)]
            lease.verify()
            assert holds(lease, 1)
            assert published[0] == 2
            with reader.lease(version(published[-1]), wait_s=LIMIT_S, verify=True) as newest:
                assert holds(newest, published[-1])
            lease.verify()
        publish_and_wait(writer, 7)


def test_readers_never_see_a_torn_version_while_versions_are_published_under_them(daemon: Daemon):
    with daemon.client() as writer, daemon.client() as reader:
        publish_and_wait(writer, 1)
        done = threading.Event()
        seen: list[int] = []
        failures: list[str] = []

        def read() -> None:
            while not done.is_set():
                with reader.lease() as lease:
                    seen.append(lease.version.step)
                    if digest(lease.buffer) != lease.digest or not holds(lease, lease.version.step):
                        failures.append(f"torn {lease.version}")

        thread = threading.Thread(target=read)
        thread.start()
        for step in range(2, 40):
            publish(writer, step)
        done.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert not failures
        assert seen == sorted(seen)


def test_a_publication_that_finds_no_slot_is_superseded_on_every_rank_and_the_next_one_serves(daemon: Daemon):
    with daemon.client() as client, daemon.client() as second:
        publish_and_wait(client, 1)
        with client.lease(version(1)):
            for step in (2, 3):
                assert client.begin(version(step), MANIFEST, 0, 2) is not None
            assert client.begin(version(4), MANIFEST, 0, 2) is None
            client.abandon(version(3), "test")
            assert second.begin(version(4), MANIFEST, 1, 2) is None
            publish_and_wait(client, 5)


def test_a_version_of_another_size_is_refused_and_the_relay_goes_on(daemon: Daemon):
    with daemon.client() as client:
        publish_and_wait(client, 1)
        larger = Manifest.plan([("embed", "float32", (6000, 1024), 4)])
        with pytest.raises(RelayError, match=r"do not fit in slots of .* restart the run"):
            client.begin(version(2), larger, 0, 1)
        publish_and_wait(client, 3)


def test_ranks_with_different_manifests_lose_the_version_and_free_the_slot(daemon: Daemon):
    with daemon.client() as first, daemon.client() as second:
        assert first.begin(version(1), MANIFEST, 0, 2) is not None
        other = Manifest.plan([("embed", "bfloat16", (600, 1024), 2), ("head", "float32", (1000,), 4)])
        with pytest.raises(RelayError, match="tensor 'embed' bfloat16"):
            second.begin(version(1), other, 1, 2)
        with pytest.raises(RelayError, match="commit of v1 by rank 0: the version is lost"):
            first.commit(version(1))
        assert slots(first.status())[0] == ("free", None)
        publish_and_wait(first, 2)


def test_a_commit_without_a_begin_is_refused(daemon: Daemon):
    with daemon.client() as client, pytest.raises(RelayError, match="begin it first"):
        client.commit(version(1))


def test_verify_finds_bytes_that_changed_after_the_commit(daemon: Daemon):
    with daemon.client() as client:
        publish_and_wait(client, 1)
        slot = daemon.directory / client.status().slots[0].file
        with slot.open("r+b") as file:
            file.seek(BLOCK_BYTES + 5)
            file.write(b"\xff")
        with pytest.raises(RelayError, match="the bytes changed after the relay digested them"):
            client.lease(version(1), verify=True)
        assert client.status().slots[0].num_leases == 0


def test_a_version_whose_bytes_have_changed_leaves_the_relay_and_may_be_published_again(daemon: Daemon):
    with daemon.client() as client:
        publish_and_wait(client, 1)
        with client.lease(version(1)) as other:
            flip(daemon.directory / client.status().slots[0].file)
            with pytest.raises(RelayError, match="the bytes changed"):
                client.lease(version(1), verify=True)
            assert slots(client.status())[0] == ("filling", 1), "a reader is there still, and nobody else gets it"
            with pytest.raises(RelayError, match=r"not ready.*ready \(oldest first\): none"):
                client.lease(version(1))
            publish_and_wait(client, 1)
            other.release()
        client.lease(version(1), verify=True).release()
        assert [state for state, _ in slots(client.status())] == ["free", "ready", "free"]


def test_a_reader_that_is_wrong_about_a_version_takes_it_away_from_nobody(daemon: Daemon):
    with daemon.client() as client:
        publish_and_wait(client, 1)
        with client.lease(version(1)) as lease:
            lease.buffer[0:4] = b"oops"  # stays with this reader
            with pytest.raises(RelayError, match="the bytes changed"):
                lease.verify()
        client.lease(version(1), verify=True).release()


def flip(path: Path) -> None:
    """A byte in the middle."""
    with path.open("r+b") as file:
        file.seek(BLOCK_BYTES + 5)
        (byte,) = file.read(1)
        file.seek(BLOCK_BYTES + 5)
        file.write(bytes([byte ^ 0xFF]))


def test_a_write_of_a_reader_stays_with_the_reader(daemon: Daemon):
    with daemon.client() as client:
        publish_and_wait(client, 1)
        with client.lease() as lease:
            lease.buffer[0:4] = b"oops"
        client.lease(version(1), verify=True).release()


def test_a_truncated_slot_is_an_error_and_not_a_crash_of_the_reader(daemon: Daemon):
    with daemon.client() as client:
        publish_and_wait(client, 1)
        os.truncate(daemon.directory / client.status().slots[0].file, 4096)
        with pytest.raises(RelayError, match="truncated"):
            client.lease(version(1))


# ---- deaths


def test_a_reader_killed_with_a_lease_gives_its_slot_back(daemon: Daemon):
    with daemon.client() as client:
        publish_and_wait(client, 1)
        reader = Peer("read", daemon, 1)
        reader.expect("leased")
        publish_and_wait(client, 2)
        publish_and_wait(client, 3)
        publish_and_wait(client, 4)
        assert ("ready", 1) in slots(client.status())
        reader.end(signal.SIGKILL)
        until(client, lambda status: all(slot.num_leases == 0 for slot in status.slots))
        publish_and_wait(client, 5)
        assert ("ready", 1) not in slots(client.status())


def test_a_writer_killed_in_mid_publication_loses_the_version_for_all_ranks(daemon: Daemon):
    with daemon.client() as survivor:
        publish_and_wait(survivor, 1)
        assert survivor.begin(version(2), MANIFEST, 0, 2) is not None
        writer = Peer("write", daemon, 2, 1, 2)
        writer.expect("written")
        writer.end(signal.SIGKILL)
        until(survivor, lambda status: any(slot.state == "filling" and slot.num_writers == 1 for slot in status.slots))
        with pytest.raises(RelayError, match=r"rank 1 \(pid \d+\) went away before its commit"):
            survivor.commit(version(2))
        assert sorted(state for state, _ in slots(survivor.status())) == ["free", "free", "ready"]
        publish_and_wait(survivor, 3)


def test_a_wait_for_a_version_ends_as_soon_as_it_is_lost(daemon: Daemon):
    with daemon.client() as writer, daemon.client() as reader:
        writer.begin(version(1), MANIFEST, 0, 1)
        failures: list[str] = []

        def wait() -> None:
            try:
                reader.lease(version(1), wait_s=600.0)
            except RelayError as error:
                failures.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        until(writer, lambda status: status.num_connections == 3)
        writer.abandon(version(1), "changed my mind")
        thread.join(LIMIT_S)
        assert len(failures) == 1
        assert "lease of v1: not ready" in failures[0]


def test_a_reader_keeps_its_weights_when_the_relay_is_killed(daemon: Daemon):
    client = daemon.client()
    publish_and_wait(client, 1)
    with client.lease() as lease:
        daemon.end(signal.SIGKILL)
        paths.sweep()  # or that of another relay, which starts in these moments
        assert not daemon.directory.exists()
        assert holds(lease, 1)
    client.close()


def test_a_restarted_relay_serves_the_same_clients_and_knows_no_version_of_its_predecessor(daemon: Daemon):
    client = daemon.client()
    publish_and_wait(client, 1)
    daemon.end(signal.SIGKILL)
    assert daemon.directory.exists()
    again = Daemon(daemon.run_id)
    try:
        with pytest.raises(RelayError, match=r"ready \(oldest first\): none"):
            client.lease()
        assert client.status().capacity_bytes == 0
        publish_and_wait(client, 2)
    finally:
        client.close()
        assert again.end()[0] == 0
    assert not daemon.directory.exists()


def test_a_commit_to_a_relay_that_died_fails_at_once_and_says_so(daemon: Daemon):
    client = daemon.client()
    client.begin(version(1), MANIFEST, 0, 1)
    daemon.end(signal.SIGKILL)
    with pytest.raises(RelayError, match=r"the connection to the relay in .* broke in commit"):
        client.commit(version(1))
    client.close()


def test_a_relay_that_is_stopped_ends_every_wait_with_an_error(daemon: Daemon):
    daemon.client().close()
    client = daemon.client(timeout_s=0.3)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(RelayError, match=r"did not answer getstatus within 0.3 s"):
            client.status()
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert client.status().num_connections >= 1
    client.close()


def test_no_relay_is_an_error_after_the_timeout():
    client = RelayClient(paths.shm_directory(f"test-{uuid.uuid4().hex[:12]}"), timeout_s=0.1)
    with pytest.raises(RelayError, match=r"no relay listens at .*relay.sock after 0.1 s"):
        client.connect()


def test_hundreds_of_publications_and_leases_leak_nothing(daemon: Daemon):
    small = Manifest.plan([("w", "float32", (4096,), 4)])

    def cycle(client: RelayClient, step: int) -> None:
        buffer = client.begin(version(step), small, 0, 1)
        assert buffer is not None
        buffer[:] = bytes([step % 256]) * len(buffer)
        del buffer
        client.commit(version(step))
        with client.lease(version(step), wait_s=LIMIT_S, verify=True) as lease:
            assert lease.buffer[0] == step % 256

    def count(pid: int, what: str) -> int:
        return len(os.listdir(f"/proc/{pid}/{what}"))

    with daemon.client() as client:
        for step in range(1, 11):
            cycle(client, step)
        until(client, lambda status: status.num_connections == 1)
        own_before = count(os.getpid(), "fd"), count(os.getpid(), "task")
        theirs_before = count(daemon.process.pid, "fd"), count(daemon.process.pid, "task")
        for step in range(11, 301):
            cycle(client, step)
        assert (count(os.getpid(), "fd"), count(os.getpid(), "task")) == own_before
        # The daemon closes the last lease's socket just after its client went on.
        until(client, lambda status: count(daemon.process.pid, "fd") <= theirs_before[0])
        assert count(daemon.process.pid, "task") <= theirs_before[1] + 1, "the pool's second thread may begin late"
        assert sorted(os.listdir(daemon.directory)) == ["owner.json", "relay.sock", "slot-0", "slot-1", "slot-2"]
