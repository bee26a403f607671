"""Ranks of several hosts publish one version: real relays, each with shards of its own, stream them to the one that collects."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from chain_world import Relay, arrange, chain, content, manifest_of
from relay_world import LIMIT_S

from laminar.ids import Version
from laminar.wire import Neighbour
from laminar.workers.relay.client import RelayClient, RelayError
from laminar.workers.relay.digest import digest
from laminar.workers.relay.ranges import pack

SMALL = 3 * (1 << 20) + 4096  # ends within a digest block
LARGE = 96 << 20  # more than the buffers between two relays hold

V1, V2 = Version(1, 0), Version(2, 0)


class Rank:
    """One rank of a trainer, which writes to the relay of its host."""

    def __init__(self, number: int, world_size: int, relay: Relay) -> None:
        self.number, self.world_size = number, world_size
        self.client = RelayClient(relay.directory, LIMIT_S)

    def begin(self, version: Version, num_bytes: int, collector: Neighbour, publication: int = 1) -> None:
        """Its rows are a contiguous part, cut in two ranges so that it can be sent in parts."""
        share = num_bytes // 2 // self.world_size * 2
        start = self.number * share
        end = num_bytes if self.number == self.world_size - 1 else start + share
        middle = (start + end) // 4 * 2
        self.ranges = [(start, middle), (middle, end)]
        buffer = self.client.begin(
            version,
            manifest_of(num_bytes),
            self.number,
            self.world_size,
            ranges=pack(self.ranges),
            publication=publication,
            num_here=1,
            collector=collector,
        )
        assert buffer is not None
        self.buffer, self.data = buffer, content(version, num_bytes).tobytes()

    def write(self, *parts: int) -> None:
        for part in parts or (0, 1):
            start, end = self.ranges[part]
            self.buffer[start:end] = self.data[start:end]

    def publish(self, version: Version, num_bytes: int, collector: Neighbour, publication: int = 1) -> None:
        self.begin(version, num_bytes, collector, publication)
        self.write()
        self.client.commit(version)


def publish(ranks: list[Rank], version: Version, num_bytes: int, collector: Neighbour, publication: int = 1) -> None:
    """As a trainer does it: all begin before any writes."""
    for rank in ranks:
        rank.begin(version, num_bytes, collector, publication)
    for rank in ranks:
        rank.write()
        rank.client.commit(version)


@contextlib.contextmanager
def trainer(num_relays: int = 3, num_ranks: int = 2, **options: float) -> Iterator[tuple[list[Relay], list[Rank]]]:
    """A chain whose first relays have a rank each."""
    with chain(num_relays, **options) as relays:
        ranks = [Rank(number, num_ranks, relays[number]) for number in range(num_ranks)]
        try:
            yield relays, ranks
        finally:
            for rank in ranks:
                rank.client.close()


def is_free(relay: Relay) -> bool:
    return all(slot.state == "free" for slot in relay.client.status().slots)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


# ---- what goes right ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
def test_a_version_of_ranks_on_three_hosts_is_whole_everywhere_and_has_the_digest_of_a_one_host_publication(num_bytes):
    with trainer(num_relays=4, num_ranks=3) as (relays, ranks):
        publish(ranks, V1, num_bytes, relays[0].neighbour)
        assert all(relay.holds(V1, num_bytes) for relay in relays)
        with relays[3].client.lease(V1) as lease:
            assert lease.digest == digest(memoryview(content(V1, num_bytes)))


def test_the_collecting_relay_need_not_be_the_first_rank_nor_the_first_of_the_chain():
    with trainer() as (relays, ranks):
        publish(ranks, V1, SMALL, relays[1].neighbour)
        assert relays[1].holds(V1, SMALL)
        arrange(2, [relays[1], relays[2], relays[0]])
        assert all(relay.holds(V1, SMALL) for relay in relays)


def test_versions_follow_one_another_through_the_same_slots():
    with trainer() as (relays, ranks):
        for step in range(1, 8):
            publish(ranks, Version(step, 0), SMALL, relays[0].neighbour, publication=step)
            assert all(relay.holds(Version(step, 0), SMALL) for relay in relays)


def test_what_a_rank_has_written_is_sent_before_it_commits():
    with trainer() as (relays, ranks):
        for rank in ranks:
            rank.begin(V1, SMALL, relays[0].neighbour)
        ranks[1].write(0)
        ranks[1].client.wrote(V1, 1)
        start, end = ranks[1].ranges[0]
        slot = relays[0].directory / "slot-0"
        until(lambda: slot.read_bytes()[start:end] == ranks[1].data[start:end])
        ranks[1].write(1)
        ranks[1].client.commit(V1)
        ranks[0].write()
        ranks[0].client.commit(V1)
        assert all(relay.holds(V1, SMALL) for relay in relays)


def test_a_version_is_not_ready_before_the_last_host_has_sent_its_shards():
    with trainer() as (relays, ranks):
        for rank in ranks:
            rank.begin(V1, SMALL, relays[0].neighbour)
        ranks[0].write()
        ranks[0].client.commit(V1)
        with pytest.raises(RelayError, match="not ready"):
            relays[0].client.lease(V1)
        ranks[1].write()
        ranks[1].client.commit(V1)
        assert all(relay.holds(V1, SMALL) for relay in relays)


# ---- what is refused ---------------------------------------------------------------------------------------


def test_ranks_whose_ranges_overlap_lose_the_version_and_the_next_one_serves():
    with trainer() as (relays, ranks):
        collector = relays[0].neighbour
        ranks[0].begin(V1, SMALL, collector)
        greedy = relays[1].client
        options = {"ranges": pack([(0, SMALL)]), "publication": 1, "num_here": 1, "collector": collector}
        assert greedy.begin(V1, manifest_of(SMALL), 1, 2, **options) is not None
        greedy.commit(V1)
        until(lambda: is_free(relays[1]))
        with pytest.raises(RelayError, match=r"ranks 0 and 1 both write elements 0 to .* of 'weights'"):
            ranks[0].client.commit(V1)
        publish(ranks, V2, SMALL, collector, publication=2)
        assert all(relay.holds(V2, SMALL) for relay in relays)


def test_shards_of_a_publication_that_is_over_reach_no_slot():
    with trainer() as (relays, ranks):
        publish(ranks, V1, SMALL, relays[0].neighbour, publication=5)
        assert relays[2].holds(V1, SMALL)
        ranks[1].publish(V2, SMALL, relays[0].neighbour, publication=4)
        relays[1].until(lambda status: all(slot.version != V2 for slot in status.slots))
        assert all(slot.version != V2 for slot in relays[0].client.status().slots)


def test_a_rank_whose_shards_are_to_be_sent_on_has_to_tell_what_it_writes():
    with trainer() as (relays, ranks):
        client, collector = ranks[1].client, relays[0].neighbour
        with pytest.raises(RelayError, match="rank 1 did not tell what it writes, for r0 to collect"):
            client.begin(V1, manifest_of(SMALL), 1, 2, publication=1, num_here=1, collector=collector)
        assert is_free(relays[1])


# ---- faults ------------------------------------------------------------------------------------------------


def test_a_relay_that_dies_before_its_shards_are_sent_costs_the_version_and_the_next_one_serves():
    with trainer() as (relays, ranks):
        for rank in ranks:
            rank.begin(V1, SMALL, relays[0].neighbour)
        ranks[0].write()
        ranks[0].client.commit(V1)
        ranks[1].write(0)
        ranks[1].client.wrote(V1, 1)
        relays[0].until(lambda status: status.slots[0].num_writers == 1)
        relays[1].kill()
        until(lambda: is_free(relays[0]))
        relays[1].restart()
        arrange(2, relays)
        publish(ranks, V2, SMALL, relays[0].neighbour, publication=2)
        assert all(relay.holds(V2, SMALL) for relay in relays)


def test_a_relay_that_stands_still_costs_the_version_and_what_it_does_later_reaches_no_slot():
    with trainer(progress_timeout_s=2.0) as (relays, ranks):
        for rank in ranks:
            rank.begin(V1, LARGE, relays[0].neighbour)
        ranks[0].write()
        ranks[0].client.commit(V1)
        ranks[1].write(0)
        ranks[1].client.wrote(V1, 1)
        relays[0].until(lambda status: status.slots[0].num_writers == 1)
        relays[1].signal(signal.SIGSTOP)
        until(lambda: is_free(relays[0]))
        relays[1].signal(signal.SIGCONT)
        until(lambda: is_free(relays[1]) or relays[1].client.status().slots[0].num_writers == 1)
        ranks[1].client.abandon(V1)
        arrange(2, relays)
        publish(ranks, V2, LARGE, relays[0].neighbour, publication=2)
        assert all(relay.holds(V2, LARGE) for relay in relays)


def test_a_collecting_relay_that_stands_still_costs_the_version_in_bounded_time():
    with trainer(progress_timeout_s=2.0) as (relays, ranks):
        for rank in ranks:
            rank.begin(V1, LARGE, relays[0].neighbour)
        collector = relays[0].neighbour
        relays[0].signal(signal.SIGSTOP)
        ranks[1].write()
        ranks[1].client.commit(V1)
        until(lambda: is_free(relays[1]))
        relays[0].signal(signal.SIGCONT)
        ranks[0].client.abandon(V1)
        arrange(2, relays)
        publish(ranks, V2, LARGE, collector, publication=2)
        assert all(relay.holds(V2, LARGE) for relay in relays)


def test_a_version_whose_collecting_relay_died_is_published_again_to_another():
    with trainer() as (relays, ranks):
        for rank in ranks:
            rank.begin(V1, SMALL, relays[0].neighbour)
        ranks[1].write()
        ranks[1].client.commit(V1)
        relays[0].kill()
        until(lambda: is_free(relays[1]))
        relays[0].restart()
        arrange(2, [relays[1], relays[0], relays[2]])
        publish(ranks, V1, SMALL, relays[1].neighbour, publication=2)
        assert all(relay.holds(V1, SMALL) for relay in relays)


def test_a_rank_that_dies_costs_the_version_on_every_host():
    with trainer() as (relays, ranks):
        for rank in ranks:
            rank.begin(V1, SMALL, relays[0].neighbour)
        ranks[1].write(0)
        ranks[1].client.wrote(V1, 1)
        relays[0].until(lambda status: status.slots[0].num_writers == 2)
        ranks[1].client.close()
        until(lambda: is_free(relays[1]))
        relays[0].until(lambda status: status.slots[0].num_writers == 1)
        with pytest.raises(RelayError, match="v1 by rank 0: the version is lost"):
            ranks[0].client.commit(V1)
        assert is_free(relays[0])
        publish(ranks, V2, SMALL, relays[0].neighbour, publication=2)
        assert all(relay.holds(V2, SMALL) for relay in relays)


def test_bytes_of_the_next_version_go_while_a_rank_of_the_last_has_not_ended():
    """Neither version waits for the other's ranks for ever; the first is lost with its rank, the second is whole."""
    with trainer() as (relays, ranks):
        slow = Rank(1, 2, relays[1])
        first = Rank(0, 2, relays[0])
        for rank in (first, slow):
            rank.begin(V1, SMALL, relays[0].neighbour)
        first.write()
        first.client.commit(V1)
        for rank in ranks:
            rank.begin(V2, SMALL, relays[0].neighbour, publication=2)
        slow.client.close()
        for rank in ranks:
            rank.write()
            rank.client.commit(V2)
        assert all(relay.holds(V2, SMALL) for relay in relays)
        first.client.close()
