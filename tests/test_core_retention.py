"""Which relays are told to keep which versions."""

from core_relay_world import RelayWorld
from core_world import Driver, of, settings

from laminar.core import actions, retention
from laminar.core.turn import Turn
from laminar.ids import Version

V0, V1, V2 = Version(0, 0), Version(1, 0), Version(2, 0)


def world(num_relays: int) -> Driver:
    """v0 is on every relay; a replica beside all but the first."""
    driver = Driver(settings(steps=9, local_batch_groups=1, batch_groups=1, buffer_groups_max=9, restarts_max=3))
    driver.start()
    for number in range(1, num_relays):
        driver.relay(f"relay-{number}", host=f"h{number}")
        driver.held(f"relay-{number}", V0)
        driver.join(f"r{number}", host=f"h{number}")
    return driver


def kept(driver: Driver) -> dict[str, list[int]]:
    """Relay -> steps of the versions that it was told last to keep."""
    told: dict[str, list[int]] = {}
    for action in of(driver.actions, actions.RetainVersions):
        told[action.worker] = [version.step for version in action.versions]
    return {worker: steps for worker, steps in told.items() if steps}


def publish(driver: Driver, version: Version, *relays: str) -> None:
    """A step with what r1 generates makes it; it reaches these relays behind the first."""
    driver.complete_all("r1")
    driver.step_done()
    driver.ready(version)
    for relay in relays:
        driver.held(relay, version)


def test_what_replicas_hold_is_kept_by_two_relays_beside_them_and_no_more():
    driver = world(5)
    assert kept(driver) == {}, "no replica holds anything yet"
    for number in range(1, 5):
        driver.refreshed(f"r{number}")
    assert kept(driver) == {"relay-1": [0], "relay-2": [0]}
    assert len(of(driver.actions, actions.RetainVersions)) == retention.HOSTS


def test_a_version_is_kept_until_the_last_replica_has_left_it():
    driver = world(3)
    for name in ("r1", "r2"):
        driver.refreshed(name)
    publish(driver, V1, "relay-1", "relay-2")
    driver.complete_all("r1")
    driver.refreshed("r1")
    assert kept(driver) == {"relay-1": [0, 1], "relay-2": [0, 1]}
    driver.complete_all("r2")
    driver.refreshed("r2")
    assert kept(driver) == {"relay-1": [1], "relay-2": [1]}


def test_a_version_whose_replica_was_lost_is_kept_for_the_siblings_that_wait_for_it():
    driver = world(3)
    for name in ("r1", "r2"):
        driver.refreshed(name)
    publish(driver, V1, "relay-1", "relay-2")
    driver.complete_all("r1")
    driver.refreshed("r1")
    driver.lost("r2")
    assert kept(driver)["relay-1"] == [0, 1]


def test_a_relay_that_cannot_keep_it_says_so_and_the_next_one_does():
    driver = world(4)
    for number in range(1, 4):
        driver.refreshed(f"r{number}")
    assert kept(driver) == {"relay-1": [0], "relay-2": [0]}
    publish(driver, V1, "relay-1", "relay-2", "relay-3")
    driver.dropped(V0, "relay-1")
    assert {relay for relay, steps in kept(driver).items() if 0 in steps} == {"relay-2", "relay-3"}


def test_a_relay_that_serves_nobody_keeps_a_version_only_if_no_other_has_it():
    driver = world(3)
    for name in ("r1", "r2"):
        driver.refreshed(name)
    for relay in ("relay-1", "relay-2"):
        driver.dropped(V0, relay)
    assert kept(driver) == {"relay-0": [0]}


def test_a_relay_that_is_lost_leaves_its_versions_to_another():
    driver = world(4)
    for number in range(1, 4):
        driver.refreshed(f"r{number}")
    driver.lost("relay-1")
    assert kept(driver) == {"relay-0": [0], "relay-1": [0], "relay-2": [0]}, (
        "the master serves the host of the lost one"
    )


def test_in_whole_runs_with_faults_every_version_that_may_be_needed_is_kept_where_it_can_be():
    for seed in range(8):
        run = RelayWorld(settings(relay_restarts_max=2, restarts_max=3, steps=4), seed, faults=0.05)
        run.run()
        state = run.core.state
        before = {relay.id: list(relay.retained) for relay in state.relays.values()}
        retention.review(Turn(state, run.core.settings, run.core.story))
        after = {relay.id: relay.retained for relay in state.relays.values()}
        assert state.finished
        assert before == after or state.review_due, "something changed, and nobody looked"
