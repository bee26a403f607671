"""What relays and the core make of faults together: real daemons, the real core, and a network that a test can hurt."""

import asyncio
import signal

import pytest
from cluster_world import SILENT_S, Cluster, cluster

from laminar.core import actions, versions
from laminar.ids import Version

LARGE = 48 << 20  # takes some time, and more than buffers between two relays hold


def live(relays: Cluster) -> list[str]:
    return sorted(relays.core.state.relays)


@pytest.mark.parametrize("victims", [(1,), (1, 2), (1, 2, 3)], ids=["first", "adjacent", "all"])
async def test_relays_that_are_killed_in_mid_version_cost_the_others_nothing(victims: tuple[int, ...]) -> None:
    async with cluster(4, num_bytes=LARGE) as relays:
        order = relays.order
        version = await relays.train()
        await relays.flows(order[victims[0]], version)
        for at in victims:
            order[at].signal(signal.SIGKILL)
        await relays.until(lambda: len(live(relays)) == 4 - len(victims))
        await relays.converged(version)
        await relays.publish()


async def test_a_stopped_relay_is_left_out_and_when_it_wakes_up_nothing_it_does_reaches_a_slot() -> None:
    async with cluster(4, num_bytes=LARGE, link_timeout_s=SILENT_S) as relays:
        zombie = relays.order[1]
        zombie.signal(signal.SIGSTOP)
        version = await relays.train()
        await relays.until(lambda: zombie.name not in live(relays))
        await relays.converged(version)
        zombie.signal(signal.SIGCONT)
        assert zombie.process is not None
        assert await asyncio.to_thread(zombie.process.wait, 60) == 1, "it was given up, and must end"
        assert not zombie.directory.exists()
        await relays.publish()
        assert len(live(relays)) == 3


async def test_a_host_whose_words_are_lost_and_one_that_hears_nothing_are_left_out_and_no_other() -> None:
    async with cluster(4, num_bytes=LARGE, link_timeout_s=SILENT_S) as relays:
        for host, direction in ((relays.order[1], "out"), (relays.order[3], "in")):
            relays.block(host, direction)
            version = await relays.train()
            await relays.until(lambda host=host: host.name not in live(relays))
            await relays.converged(version)
        assert len(live(relays)) == 2


async def test_one_link_that_works_in_one_direction_only_costs_no_relay() -> None:
    async with cluster(3, num_bytes=LARGE, link_timeout_s=SILENT_S) as relays:
        relays.proxy(relays.order[0], relays.order[1]).backward_blocked = True
        await relays.publish()
        assert len(live(relays)) == 3


async def test_a_relay_behind_a_slow_link_goes_to_the_tail_and_lives_on() -> None:
    async with cluster(4, num_bytes=LARGE) as relays:
        slow = relays.order[2]
        relays.proxy(relays.order[1], slow).rate_bytes_per_s = 1e6
        version = await relays.train()
        await relays.until(lambda: relays.order[-1] is slow)
        await relays.converged(version)
        assert len(live(relays)) == 4
        assert not relays.all(actions.StopWorker)


@pytest.mark.parametrize("at", [5, 10 << 20], ids=["in a header", "in the weights"])
async def test_a_flipped_bit_never_reaches_a_reader_and_costs_no_relay(at: int) -> None:
    async with cluster(3) as relays:
        epoch = relays.core.state.chain.epoch
        relays.proxy(relays.order[0], relays.order[1]).flip_in = at
        await relays.publish()
        await relays.until(lambda: relays.core.state.chain.epoch > epoch)
        await relays.publish()
        assert len(live(relays)) == 3


@pytest.mark.parametrize("moment", ["before", "during", "after"])
async def test_the_death_of_the_master_costs_at_most_the_version_that_was_being_published(moment: str) -> None:
    async with cluster(3, num_bytes=LARGE) as relays:
        master, survivors = relays.order[0], relays.order[1:]
        if moment == "during":
            relays.may_commit.clear()
        if moment != "before":
            version = await relays.train()
            await relays.flows(master if moment == "during" else survivors[0], version)
        master.signal(signal.SIGKILL)
        await relays.until(lambda: master.name not in live(relays))
        relays.may_commit.set()
        assert relays.core.state.chain.master in [survivor.name for survivor in survivors]
        await relays.settled()  # what was under way may be published again: the trainer still holds it
        await relays.publish()


async def test_a_cut_off_master_is_replaced_and_what_is_published_to_it_reaches_nobody() -> None:
    async with cluster(3, num_bytes=LARGE, link_timeout_s=SILENT_S) as relays:
        old, *others = relays.order
        old.cut()
        relays.block(old, "in", "out")
        await relays.train()
        await relays.until(lambda: old.name not in live(relays))
        assert relays.core.state.chain.master in [other.name for other in others]
        await relays.publish()
        old.cut_off = False
        relays.block(old)
        assert old.process is not None
        assert await asyncio.to_thread(old.process.wait, 60) == 1, "its time as master is over, and it must end"
        await relays.publish()


async def test_the_newest_of_a_burst_reaches_everybody_while_a_slow_reader_keeps_its_version_whole() -> None:
    async with cluster(3) as relays:
        with relays.order[-1].client.lease(Version(0, 0)) as lease:
            for _ in range(5):
                await relays.train()
            await relays.settled()
            newest = versions.newest(relays.core.state)
            assert newest is not None
            await relays.converged(newest.version)
            lease.verify()


async def test_a_relay_that_died_comes_back_over_what_it_left_and_is_filled_by_its_neighbour() -> None:
    async with cluster(3, restarts=3) as relays:
        member = relays.order[1]
        stale = sorted(member.directory.iterdir())
        member.signal(signal.SIGKILL)
        await relays.until(lambda: member.name not in live(relays))
        version = await relays.train()
        assert stale, "a killed relay leaves its slots"
        await relays.until(lambda: member.name in live(relays))
        await relays.converged(version)
        await relays.publish()


async def test_a_host_without_room_for_the_weights_leaves_the_chain_and_says_why() -> None:
    relays = Cluster(3, link_timeout_s=SILENT_S)
    relays.members["r1"].options = ["--slots", "100000"]
    try:
        await relays.start()
        assert live(relays) == ["r0", "r2"]
        await relays.publish()
        (stopped,) = relays.all(actions.StopWorker)
        assert "the weights need 100000 slots" in stopped.reason
    finally:
        await relays.close()
