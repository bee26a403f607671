"""The chain over every transport that is installed: the same bytes, and the same repair."""

import pytest
from chain_world import arrange, chain
from transport_world import KINDS, Kind

MIB = 1 << 20
LARGE = 96 * MIB  # takes long enough for something to happen in the middle

over_each_other = pytest.mark.parametrize("kind", KINDS[1:])  # plain tcp: tests/test_relay_chain.py


@over_each_other
def test_versions_cross_three_relays_whole(kind: Kind):
    with chain(3, options=kind.options) as relays:
        for step in (1, 2):
            version = relays[0].publish(step, 5 * MIB + 4096)
            assert all(relay.holds(version, 5 * MIB + 4096) for relay in relays)
        assert all(relay.client.status().chain.transport.startswith(f"{kind.name} over ") for relay in relays)


@over_each_other
def test_survivors_of_a_killed_relay_get_the_whole_version_after_one_new_epoch(kind: Kind):
    with chain(3, options=kind.options) as relays:
        version = relays[0].publish(1, LARGE)
        relays[1].until(lambda status: any(slot.state == "filling" for slot in status.slots))
        relays[1].kill()
        assert relays[0].until(lambda status: bool(status.chain_broken)).chain_broken == ["1: r1"]
        survivors = [relays[0], relays[2]]
        arrange(2, survivors)
        assert all(relay.holds(version, LARGE) for relay in survivors)
