"""The relay chain: order, epochs, rewiring, election, what a host's replicas may pull. Events in, actions out."""

import pytest
from core_relay_world import RelayWorld
from core_world import Driver, of, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_core_fuzz import check_end

from laminar.core import actions, events, versions
from laminar.ids import Version, WorkerId

V0, V1, V2 = Version(0, 0), Version(1, 0), Version(2, 0)


def chained(*hosts: str, **changes) -> Driver:
    """Relays `relay-<host>`; a host is written with its rack: ``a1`` is in rack ``a``. The trainer is on the first host."""
    driver = Driver(settings(**({"relay_restarts_max": 3} | changes)))
    driver.send(events.RunStarted(boot=1))
    for host in hosts:
        driver.relay(f"relay-{host}", host=host, rack=host[0])
    driver.send(
        events.TrainerRankReady(
            worker=WorkerId("trainer-0/0"), incarnation=1, rank=0, world_size=1, step=0, host=hosts[0]
        )
    )
    return driver


def filled(*hosts: str, **changes) -> Driver:
    """v0 has reached every relay."""
    driver = chained(*hosts, **changes)
    driver.ready(V0)
    for host in hosts[1:]:
        driver.held(f"relay-{host}", V0)
    return driver


def order(driver: Driver) -> list[str]:
    return [worker.removeprefix("relay-") for worker in driver.core.state.chain.order]


def epochs(driver: Driver) -> list[int]:
    return [action.epoch for action in driver.all(actions.ArrangeChain)]


def broken(driver: Driver, host: str, peer: str, epoch: int | None = None) -> list[actions.AnyAction]:
    epoch = driver.core.state.chain.epoch if epoch is None else epoch
    return driver.send(events.LinkBroken(worker=WorkerId(f"relay-{host}"), peer=WorkerId(f"relay-{peer}"), epoch=epoch))


def slow(driver: Driver, host: str, peer: str) -> list[actions.AnyAction]:
    return driver.send(
        events.LinkSlow(
            worker=WorkerId(f"relay-{host}"), peer=WorkerId(f"relay-{peer}"), epoch=driver.core.state.chain.epoch
        )
    )


# ---- order -------------------------------------------------------------------------------------------------


def test_the_trainers_host_leads_its_rack_comes_next_and_racks_are_kept_together():
    driver = chained("b1", "a1", "b2", "c1", "a2", "b3")
    assert order(driver) == ["b1", "b2", "b3", "a1", "a2", "c1"]


def test_a_relay_that_was_first_gives_way_to_the_trainers_host_before_anything_is_published():
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    driver.relay("relay-a1", host="a1", rack="a")
    driver.relay("relay-b1", host="b1", rack="b")
    new = driver.send(
        events.TrainerRankReady(worker=WorkerId("t/0"), incarnation=1, rank=0, world_size=1, step=0, host="b1")
    )
    kinds = [type(action).__name__ for action in new]
    assert kinds == ["ArrangeChain", "PublishVersion"]
    assert driver.core.state.chain.master == "relay-b1"


def test_a_joining_relay_enters_at_the_end_of_its_rack_and_a_new_rack_at_the_tail():
    driver = filled("a1", "b1")
    driver.relay("relay-a2", host="a2", rack="a")
    driver.relay("relay-c1", host="c1", rack="c")
    assert order(driver) == ["a1", "a2", "b1", "c1"]


def test_every_change_is_a_new_epoch_and_a_repeated_word_is_none():
    driver = filled("a1", "a2", "b1")
    before = driver.core.state.chain.epoch
    driver.relay("relay-a2", host="a2", rack="a")
    assert driver.core.state.chain.epoch == before
    driver.lost("relay-a2")
    driver.relay("relay-a2", 2, host="a2", rack="a")
    assert driver.core.state.chain.epoch == before + 2
    assert epochs(driver) == sorted(set(epochs(driver)))


def test_a_slow_relay_goes_to_the_tail_and_lives_on():
    driver = filled("a1", "a2", "a3", "b1")
    (arranged,) = of(slow(driver, "a1", "a2"), actions.ArrangeChain)
    assert order(driver) == ["a1", "a3", "b1", "a2"]
    assert arranged.master == "relay-a1"
    slow(driver, "a1", "a3")
    assert order(driver) == ["a1", "b1", "a2", "a3"], "in the order in which they became slow"


def test_a_slow_link_to_the_master_sends_its_other_end_to_the_tail():
    driver = filled("a1", "a2", "a3")
    slow(driver, "a2", "a1")
    assert order(driver) == ["a1", "a3", "a2"]


def test_a_relay_goes_to_the_tail_for_being_slow_once_and_not_again_for_still_being_slow():
    driver = filled("a1", "a2", "a3", "a4")
    slow(driver, "a1", "a2")
    slow(driver, "a1", "a3")
    before = driver.core.state.chain.epoch
    assert slow(driver, "a4", "a2") == []
    assert slow(driver, "a2", "a3") == []
    assert (order(driver), driver.core.state.chain.epoch) == (["a1", "a4", "a2", "a3"], before)


def test_one_that_calls_two_neighbours_slow_is_slow_itself():
    driver = filled("a1", "a2", "a3", "a4", "a5")
    slow(driver, "a2", "a3")
    assert order(driver) == ["a1", "a2", "a4", "a5", "a3"]
    slow(driver, "a2", "a4")
    assert order(driver) == ["a1", "a4", "a5", "a3", "a2"]


@hypothesis_settings(deadline=None)
@given(links=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_slow_links_make_no_more_epochs_than_there_are_relays_and_lose_none(links):
    hosts = [f"a{index}" for index in range(6)]
    driver = filled(*hosts)
    before = driver.core.state.chain.epoch
    for first, second in links:
        if first != second:
            slow(driver, hosts[first], hosts[second])
    assert driver.core.state.chain.epoch <= before + len(hosts)
    assert not driver.all(actions.StopWorker)


# ---- broken links ------------------------------------------------------------------------------------------


def test_the_end_that_the_controller_cannot_reach_either_is_lost_at_once():
    driver = filled("a1", "a2", "a3")
    driver.send(events.WorkerDisconnected(worker=WorkerId("relay-a2"), incarnation=1))
    new = broken(driver, "a1", "a2")
    assert [a.worker for a in of(new, actions.StopWorker)] == ["relay-a2"]
    assert order(driver) == ["a1", "a3"]


def test_the_accused_goes_to_the_tail_first_and_is_lost_when_another_accuses_it_too():
    driver = filled("a1", "a2", "a3")
    assert not of(broken(driver, "a1", "a2"), actions.StopWorker)
    assert order(driver) == ["a1", "a3", "a2"]
    assert [a.worker for a in of(broken(driver, "a3", "a2"), actions.StopWorker)] == ["relay-a2"]


def test_one_that_accuses_two_neighbours_in_a_row_is_itself_to_blame():
    driver = filled("a1", "a2", "a3", "a4")
    broken(driver, "a2", "a3")
    new = broken(driver, "a2", "a4")
    assert [a.worker for a in of(new, actions.StopWorker)] == ["relay-a2"]


def test_a_relay_that_has_received_a_version_since_is_not_accused_in_a_row():
    driver = filled("a1", "a2", "a3", batch_groups=1, buffer_groups_max=4)
    driver.join("r0", host="a1")
    driver.refreshed("r0")
    broken(driver, "a1", "a2")
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(V1)
    driver.held("relay-a3", V1)
    driver.held("relay-a2", V1)
    assert not of(broken(driver, "a3", "a2"), actions.StopWorker)


def test_a_broken_link_of_two_makes_a_new_epoch_so_that_they_connect_again():
    driver = filled("a1", "a2")
    before = driver.core.state.chain.epoch
    broken(driver, "a1", "a2")
    assert (order(driver), driver.core.state.chain.epoch) == (["a1", "a2"], before + 1)


@pytest.mark.parametrize("kind", [events.LinkBroken, events.LinkSlow])
def test_word_of_an_older_epoch_or_of_a_stranger_changes_nothing(kind):
    driver = filled("a1", "a2")
    epoch = driver.core.state.chain.epoch
    words = [("relay-a1", "relay-a2", epoch - 1), ("relay-a1", "relay-x", epoch), ("relay-a1", "relay-a1", epoch)]
    for worker, peer, of_epoch in words:
        assert driver.send(kind(worker=WorkerId(worker), peer=WorkerId(peer), epoch=of_epoch)) == []
    assert driver.core.state.relays["relay-a2"].num_broken == 0


# ---- the master --------------------------------------------------------------------------------------------


def test_a_dead_master_is_replaced_by_the_first_complete_holder_of_the_newest_version():
    driver = chained("a1", "a2", "a3", "b1")
    driver.ready(V0)
    driver.held("relay-a3", V0)
    driver.held("relay-b1", V0)
    (arranged,) = of(driver.lost("relay-a1"), actions.ArrangeChain)
    assert (arranged.master, order(driver)) == ("relay-a3", ["a3", "a2", "b1"])


def returns(driver: Driver, host: str) -> list[actions.AnyAction]:
    """The lost relay of this host is started again after its pause, and joins."""
    started = of(driver.send(events.TimerFired(), after=1.0), actions.StartWorker)
    assert [action.worker for action in started] == [f"relay-{host}"]
    return driver.relay(f"relay-{host}", 2, host=host, rack=host[0])


def test_the_version_that_was_being_published_to_the_dead_relay_of_the_trainers_host_is_published_when_it_is_back():
    driver = chained("a1", "a2")
    new = driver.lost("relay-a1")
    assert [type(a).__name__ for a in new] == ["StopWorker", "ArrangeChain", "RaiseAlarm"]
    assert [a.version for a in of(returns(driver, "a1"), actions.PublishVersion)] == [V0]


def test_the_relay_of_a_trainers_host_that_is_given_up_ends_the_run_with_a_checkpoint():
    driver = filled("a1", "a2", relay_restarts_max=1, batch_groups=1, buffer_groups_max=4)
    driver.join("r0", host="a2")
    driver.refreshed("r0")
    driver.complete_all("r0")
    driver.step_done()
    driver.complete_all("r0")
    driver.lost("relay-a1")
    driver.send(events.TimerFired(), after=600.0)
    assert not driver.core.state.stopping, "it is started again"
    new = driver.send(events.WorkerLost(worker=WorkerId("relay-a1"), incarnation=0, reason="no space in /dev/shm"))
    (told,) = [a.text for a in of(new, actions.RaiseAlarm) if a.name == "run-failed"]
    assert "the relay relay-a1 of a trainer's host is given up" in told
    assert "no space in /dev/shm" in told
    driver.step_done()
    driver.saved()
    (end,) = driver.all(actions.FinishRun)
    assert (end.ok, driver.core.state.trainer.checkpoint) == (False, 2)


def test_the_relay_of_another_host_that_is_given_up_does_not_end_it():
    driver = filled("a1", "a2", "b1", relay_restarts_max=0)
    driver.lost("relay-b1")
    assert not driver.core.state.stopping


@pytest.mark.parametrize("lost", ["relay-0", "relay-1"])
def test_neither_can_the_relay_of_any_host_of_a_trainer_on_several_be_missed(lost: str):
    driver = RelayWorld(settings(relay_restarts_max=0), 0, hosts=3, trainer_hosts=2)
    driver._begin()
    driver.lost(lost)
    assert "no weights can be published" in driver.core.state.stopping


def test_it_is_skipped_when_the_trainer_has_gone_on():
    driver = filled("a1", "a2", batch_groups=1, buffer_groups_max=4)
    driver.join("r0", host="a2")
    driver.refreshed("r0")
    driver.complete_all("r0")
    driver.step_done()
    assert driver.core.state.trainer.running == 2
    new = driver.lost("relay-a1")
    assert not of(new, actions.PublishVersion)
    assert [a.name for a in of(new, actions.RaiseAlarm)] == ["worker-lost", "version-lost"][1:]
    assert versions.newest(driver.core.state).version == V0
    returns(driver, "a1")
    driver.step_done()
    assert driver.all(actions.PublishVersion)[-1].version == V2


def test_a_version_that_only_the_dead_master_held_is_published_again():
    driver = chained("a1", "a2")
    driver.ready(V0)
    driver.lost("relay-a1")
    assert versions.newest(driver.core.state) is None
    assert [a.version for a in of(returns(driver, "a1"), actions.PublishVersion)] == [V0]


def test_the_word_of_a_dead_master_about_its_last_version_comes_too_late():
    driver = chained("a1", "a2")
    driver.lost("relay-a1")
    late = events.VersionReady(worker=WorkerId("relay-a1"), version=V0, digest="dv0", num_bytes=1)
    assert driver.send(late) == []
    assert versions.newest(driver.core.state) is None


def test_the_trainers_relay_leads_again_once_it_holds_what_the_others_do():
    driver = filled("a1", "a2")
    driver.lost("relay-a1")
    driver.relay("relay-a1", 2, host="a1", rack="a")
    assert driver.core.state.chain.master == "relay-a2", "it holds nothing yet"
    driver.held("relay-a1", V0)
    assert order(driver) == ["a1", "a2"]


def test_a_master_is_not_changed_while_a_version_is_being_published_to_it():
    driver = filled("a1", "a2", batch_groups=1, buffer_groups_max=4)
    driver.join("r0", host="a2")
    driver.refreshed("r0")
    driver.lost("relay-a1")
    driver.relay("relay-a1", 2, host="a1", rack="a")
    driver.complete_all("r0")
    driver.step_done()
    driver.held("relay-a1", V0)
    assert driver.core.state.chain.master == "relay-a2"
    driver.ready(V1)
    driver.held("relay-a1", V1)
    assert driver.core.state.chain.master == "relay-a1"


# ---- what replicas pull ------------------------------------------------------------------------------------


def pulls(new: list[actions.AnyAction]) -> list[tuple[str, Version]]:
    return [(action.worker, action.version) for action in of(new, actions.PullWeights)]


def test_a_replica_pulls_a_version_only_when_its_own_hosts_relay_holds_it():
    driver = chained("a1", "a2")
    driver.join("r1", host="a1")
    driver.join("r2", host="a2")
    assert pulls(driver.ready(V0)) == [("r1", V0)]
    assert pulls(driver.held("relay-a2", V0)) == [("r2", V0)]


def test_a_host_without_a_relay_is_served_by_the_masters():
    driver = filled("a1")
    assert pulls(driver.join("r0", host="elsewhere")) == [("r0", V0)]


def test_a_host_whose_relay_is_away_pulls_nothing_until_that_is_refilled():
    driver = filled("a1", "a2")
    driver.lost("relay-a2")
    assert pulls(driver.join("r2", host="a2")) == []
    assert [a.worker for a in of(driver.send(events.TimerFired(), after=1.0), actions.StartWorker)] == ["relay-a2"]
    assert pulls(driver.relay("relay-a2", 2, host="a2", rack="a")) == []
    assert pulls(driver.held("relay-a2", V0)) == [("r2", V0)]


def test_a_replica_waits_for_a_version_under_way_until_it_has_reached_its_relay():
    driver = filled(
        "a1", "a2", batch_groups=1, buffer_groups_max=4, local_batch_groups=1, steps=9, await_publication_s=2.0
    )
    driver.join("r2", host="a2")
    driver.refreshed("r2")
    driver.complete_all("r2")
    driver.step_done()
    driver.complete_all("r2")
    assert driver.ready(V1) == []
    assert pulls(driver.held("relay-a2", V1)) == [("r2", V1)]


def test_a_replica_never_goes_back_to_what_a_refilled_relay_holds():
    driver = filled("a1", "a2", batch_groups=1, buffer_groups_max=8, local_batch_groups=1, steps=9)
    driver.join("r2", host="a2")
    driver.refreshed("r2")
    driver.complete_all("r2")
    driver.step_done()
    driver.ready(V1)
    driver.held("relay-a2", V1)
    driver.complete_all("r2")
    driver.refreshed("r2")
    driver.lost("relay-a2")
    driver.relay("relay-a2", 2, host="a2", rack="a")
    driver.complete_all("r2")
    assert pulls(driver.held("relay-a2", V0)) == []
    assert driver.generating("r2"), "it goes on with what it holds"


def test_without_any_relay_replicas_go_on_with_what_they_hold_and_the_next_relay_gets_the_present_weights():
    driver = filled("a1", batch_groups=1, buffer_groups_max=4, local_batch_groups=1, steps=9)
    driver.join("r0", host="a1")
    driver.refreshed("r0")
    driver.lost("relay-a1")
    assert not driver.core.state.stopping
    driver.complete_all("r0")
    assert driver.generating("r0"), "another local batch of the same version"
    driver.step_done()
    driver.send(events.TimerFired(), after=1.0)
    new = driver.relay("relay-a1", 2, host="a1", rack="a")
    assert [a.version for a in of(new, actions.PublishVersion)] == [V1] or driver.core.state.trainer.running


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_run_fails_only_when_no_relay_can_come_back(restarts):
    driver = filled("a1", relay_restarts_max=restarts)
    driver.join("r0", host="a1")
    driver.refreshed("r0")
    new = driver.lost("relay-a1")
    if restarts:
        assert not of(new, actions.FinishRun)
        driver.send(events.TimerFired(), after=1.0)
        new = driver.send(events.WorkerLost(worker=WorkerId("relay-a1"), incarnation=0, reason="no /dev/shm"))
    (end,) = of(new, actions.FinishRun)
    assert "the relay relay-a1 was lost" in end.reason


def test_an_older_relay_process_is_stopped_and_a_newer_one_takes_its_place_empty():
    driver = filled("a1")
    assert [(a.worker, a.incarnation) for a in of(driver.relay("relay-a1", 0), actions.StopWorker)] == [("relay-a1", 0)]
    new = driver.relay("relay-a1", 2, host="a1", rack="a")
    assert [(a.worker, a.incarnation) for a in of(new, actions.StopWorker)] == [("relay-a1", 1)]
    assert [a.version for a in of(new, actions.PublishVersion)] == [V0]
    assert len(of(new, actions.ArrangeChain)) == 1


def test_a_version_of_other_bytes_is_not_taken_for_the_same():
    driver = chained("a1", "a2")
    driver.ready(V0)
    driver.send(events.VersionHeld(worker=WorkerId("relay-a2"), version=V0, digest="other"))
    assert driver.core.state.relays["relay-a2"].held == []


# ---- many at random ----------------------------------------------------------------------------------------

CHANGE = st.tuples(
    st.sampled_from(["join", "lose", "broken", "slow", "held", "silent"]), st.integers(0, 5), st.integers(0, 5)
)


@hypothesis_settings(max_examples=150, deadline=None)
@given(changes=st.lists(CHANGE, max_size=40))
def test_whatever_joins_dies_and_breaks_the_chain_stays_one(changes):
    """The invariants after every event say: no duplicates, live relays only, the master first, racks together, slow ones last."""
    driver = chained("a0", relay_restarts_max=99)
    incarnations: dict[str, int] = {}
    masters: dict[int, str] = {}
    for kind, first, second in changes:
        name, peer = f"relay-{'abc'[first % 3]}{first}", f"relay-{'abc'[second % 3]}{second}"
        relay = driver.core.state.relays.get(WorkerId(name))
        if kind == "join" and relay is None:
            incarnations[name] = max(incarnations.get(name, 1), driver.core.state.fenced.get(WorkerId(name), 0)) + 1
            driver.relay(name, incarnations[name], host=name[6:], rack=name[6])
        elif relay is not None and kind == "lose":
            driver.lost(name)
        elif relay is not None and kind == "held":
            driver.ready(V0)
            driver.held(name, V0)
        elif relay is not None and kind == "silent":
            driver.send(events.WorkerDisconnected(worker=WorkerId(name), incarnation=relay.incarnation))
        elif kind in ("broken", "slow"):
            event = events.LinkBroken if kind == "broken" else events.LinkSlow
            driver.send(event(worker=WorkerId(name), peer=WorkerId(peer), epoch=driver.core.state.chain.epoch))
    for action in driver.all(actions.ArrangeChain):
        assert masters.setdefault(action.epoch, action.master) == action.master
        assert len(set(action.order)) == len(action.order)
    assert epochs(driver) == sorted(set(epochs(driver)))


@hypothesis_settings(deadline=None)
@given(num=st.integers(2, 8), links=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=5, max_size=20))
def test_of_more_broken_links_than_half_the_relays_at_least_one_loses_a_relay(num, links):
    hosts = [f"a{index}" for index in range(num)]
    driver = filled(*hosts)
    num_reports = 0
    for first, second in links:
        if first % num != second % num and not driver.all(actions.StopWorker):
            broken(driver, hosts[first % num], hosts[second % num])
            num_reports += 1
    assert num_reports <= num // 2 + 1
    assert driver.all(actions.StopWorker) or num_reports <= num // 2


TWO_HOSTS = "two_trainer_hosts"
RUNS = {
    TWO_HOSTS: {
        "relay_restarts_max": 50,
        "trainer_restarts_max": 50,
        "checkpoint_every": 1,
    },
    "plain": {"relay_restarts_max": 50},
    "no_restarts": {},
    "everything_restarts": {
        "relay_restarts_max": 50,
        "restarts_max": 50,
        "trainer_restarts_max": 50,
        "checkpoint_every": 1,
    },
    "checkpoint_pulls": {"relay_restarts_max": 50, "checkpoint_pulls": True, "checkpoint_every": 1},
    "continuous": {"relay_restarts_max": 50, "refresh_policy": "continuous"},
    "repack": {"relay_restarts_max": 50, "repack_interval_s": 0.3},
    "awaits_publications": {"relay_restarts_max": 50, "await_publication_s": 1.0, "evaluate": True},
    "bounded": {"relay_restarts_max": 50, "max_staleness": 1},
    "waits": {"relay_restarts_max": 50, "max_staleness": 2, "on_stale": "wait"},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("faults", [0.0, 0.1, 0.3])
def test_a_run_over_several_relays_ends_with_a_closed_ledger(name, faults):
    for seed in range(10):
        world = RelayWorld(
            settings(**({"steps": 5, "local_batch_groups": 1} | RUNS[name])),
            seed,
            faults,
            trainer_hosts=2 if name == TWO_HOSTS else 1,
        )
        world.run()
        check_end(world)
        if not faults:
            assert (world.core.state.finished, world.core.state.ok) == ("completed", True)


@pytest.mark.parametrize("name", RUNS)
def test_a_snapshot_at_any_time_carries_chain_and_failovers(name):
    for seed in range(4):
        runs = []
        for restore_each in (0, 7):
            world = RelayWorld(
                settings(**({"steps": 4, "local_batch_groups": 1} | RUNS[name])),
                seed,
                0.15,
                trainer_hosts=2 if name == TWO_HOSTS else 1,
            )
            world.restore_each = restore_each
            world.run()
            runs.append(world.log)
        assert runs[0] == runs[1]


# ---- bytes that change in memory ---------------------------------------------------------------------------


def test_a_relay_that_lost_the_newest_version_is_filled_again_by_its_neighbour():
    driver = filled("a", "b", "c")
    before = epochs(driver)[-1]
    driver.dropped(V0, "relay-c")
    assert epochs(driver)[-1] == before + 1
    assert order(driver) == ["a", "b", "c"]
    driver.dropped(V0, "relay-c")
    assert epochs(driver)[-1] == before + 1, "it has nothing more to lose"


def test_a_master_that_lost_the_newest_version_gives_way_to_one_that_holds_it():
    driver = filled("a", "b", "c")
    driver.dropped(V0, "relay-a")
    assert driver.core.state.chain.master == "relay-b"
    assert set(order(driver)) == {"a", "b", "c"}


def test_an_older_version_that_is_recycled_makes_no_new_epoch():
    driver = filled("a", "b")
    before = epochs(driver)
    driver.dropped(Version(7, 0), "relay-b")
    assert epochs(driver) == before
