"""Publication by ranks on several hosts: who collects the shards, what is waited for, whose word counts."""

import pytest
from core_world import Driver, of, settings

from laminar.core import actions, events, versions
from laminar.ids import Version, WorkerId

V0, V1 = Version(0, 0), Version(1, 0)


def rank(driver: Driver, node: int, incarnation: int = 1) -> list[actions.AnyAction]:
    """The rank of `trainer-<node>`, on host `a<node>`."""
    event = events.TrainerRankReady(
        worker=WorkerId(f"trainer-{node}/{node}"),
        incarnation=incarnation,
        rank=node,
        world_size=2,
        step=0,
        host=f"a{node}",
    )
    return driver.send(event)


def two_hosts(*hosts: str, **changes) -> Driver:
    """Relays on these hosts, ranks on a0 and a1."""
    driver = Driver(settings(**({"relay_restarts_max": 3, "trainer_restarts_max": 3} | changes)))
    driver.send(events.RunStarted(boot=1))
    for host in hosts or ("a0", "a1", "b0"):
        driver.relay(f"relay-{host}", host=host, rack=host[0])
    rank(driver, 0)
    rank(driver, 1)
    return driver


def orders(new: list[actions.AnyAction]) -> list[tuple[Version, int, str | None]]:
    return [(a.version, a.publication, a.relay) for a in of(new, actions.PublishVersion)]


def lost(driver: Driver, version: Version, publication: int) -> list[actions.AnyAction]:
    return driver.send(events.VersionLost(version=version, reason="link", publication=publication))


def stepping(*hosts: str) -> Driver:
    """v1 is being published, and step 2 runs."""
    driver = two_hosts(*hosts, batch_groups=1, buffer_groups_max=4)
    driver.ready(V0)
    driver.join("r0", host="a0")
    driver.refreshed("r0")
    driver.complete_all("r0")
    driver.step_done()
    assert driver.core.state.trainer.running == 2
    return driver


def test_the_master_collects_what_ranks_of_all_hosts_write_and_every_order_has_a_number_of_its_own():
    driver = stepping()
    assert orders(driver.actions) == [(V0, 1, "relay-a0"), (V1, 2, "relay-a0")]
    assert driver.core.state.chain.master == "relay-a0"


def test_a_trainer_on_one_host_is_told_no_relay():
    driver = Driver(settings())
    driver.start()
    assert orders(driver.actions) == [(V0, 1, None)]


def test_a_master_on_a_rollout_host_does_not_collect_because_no_rank_writes_there():
    driver = stepping()
    driver.held("relay-b0", V0)
    driver.lost("relay-a0")
    driver.lost("relay-a1")
    assert driver.core.state.chain.master == "relay-b0"
    driver.relay("relay-a1", 2, host="a1", rack="a")
    driver.relay("relay-a0", 2, host="a0", rack="a")
    driver.step_done()
    assert orders(driver.actions)[-1][2] == "relay-a1", "the first of the chain that has ranks beside it"


def test_nothing_is_published_until_the_relay_of_every_trainer_host_has_joined():
    driver = two_hosts("a0", "b0")
    assert not orders(driver.actions)
    assert orders(driver.relay("relay-a1", host="a1", rack="a")) == [(V0, 1, "relay-a0")]


def test_nothing_is_published_while_the_relay_of_a_trainer_host_is_away():
    driver = stepping()
    driver.ready(V1)
    driver.lost("relay-a1")
    assert not orders(driver.step_done())
    driver.send(events.TimerFired(), after=1.0)
    driver.relay("relay-a1", 2, host="a1", rack="a")
    driver.complete_all("r0")
    assert orders(driver.step_done())[0][0].step >= 2


def test_of_the_words_of_several_relays_and_ranks_about_one_loss_the_first_counts():
    driver = stepping()
    (alarm,) = of(lost(driver, V1, 2), actions.RaiseAlarm)
    assert "v1 was not published: link" in alarm.text
    assert lost(driver, V1, 2) == []


def test_word_about_an_older_order_does_not_end_the_present_one():
    driver = two_hosts()
    assert orders(lost(driver, V0, 1)) == [(V0, 2, "relay-a0")]
    assert lost(driver, V0, 1) == []
    assert driver.core.state.versions[-1].deadline
    driver.send(events.ShardsWritten(version=V0, stall_s=0.1, publication=1))
    assert not driver.core.state.versions[-1].written
    driver.ready(V0)
    assert versions.newest(driver.core.state).version == V0


def test_a_version_that_is_whole_after_all_is_pulled_although_a_relay_said_it_was_lost():
    driver = stepping()
    lost(driver, V1, 2)
    driver.ready(V1)
    assert versions.newest(driver.core.state).version == V1


def test_a_version_whose_collecting_relay_dies_is_skipped_when_the_trainer_has_gone_on():
    driver = stepping()
    driver.held("relay-a1", V0)
    driver.held("relay-b0", V0)
    new = driver.lost("relay-a0")
    assert [a.name for a in of(new, actions.RaiseAlarm)] == ["version-lost"]
    assert driver.core.state.chain.master == "relay-a1"
    driver.send(events.TimerFired(), after=1.0)
    driver.relay("relay-a0", 2, host="a0", rack="a")
    assert orders(driver.step_done()) == [(Version(2, 0), 3, "relay-a1")]


def test_it_is_published_to_the_next_one_as_soon_as_all_relays_are_there_when_the_trainer_has_not():
    driver = two_hosts()
    driver.lost("relay-a0")
    driver.send(events.TimerFired(), after=1.0)
    assert orders(driver.relay("relay-a0", 2, host="a0", rack="a")) == [(V0, 2, "relay-a1")]


# ---- the trainer's nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_node_is_the_loss_of_the_trainer_which_is_started_again_as_a_whole(node: int):
    driver = two_hosts()
    new = driver.lost(f"trainer-{node}/{node}", 1)
    assert sorted(a.worker for a in of(new, actions.StopWorker)) == ["trainer-0/0", "trainer-1/1"]
    assert [a.worker for a in of(driver.send(events.TimerFired(), after=1.0), actions.StartWorker)] == ["trainer-0"]


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_ends_before_it_joined_is_the_end_of_that_restart(node: int):
    driver = two_hosts()
    driver.lost("trainer-1/1", 1)
    early = events.WorkerLost(worker=WorkerId(f"trainer-{node}"), incarnation=0, reason="killed with the others")
    assert driver.send(early) == [], "the old launch, while the next one is waited for"
    driver.send(events.TimerFired(), after=1.0)
    driver.send(early)
    assert driver.core.state.restarts[WorkerId("trainer-0")].num == 2
    assert [a.worker for a in of(driver.send(events.TimerFired(), after=2.0), actions.StartWorker)] == ["trainer-0"]
    rank(driver, 1, incarnation=2)
    assert not driver.core.state.trainer.ready
    rank(driver, 0, incarnation=2)
    assert driver.core.state.trainer.ready
    assert not driver.core.state.restarts[WorkerId("trainer-0")].starting
