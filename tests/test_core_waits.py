"""Who waits for whom, read from the core's state."""

import msgspec
import pytest
from core_world import Driver, World, settings
from test_core_fuzz import SETTINGS

from laminar.core import events, waits
from laminar.core.turn import Turn
from laminar.core.waits import Wait
from laminar.ids import WorkerId


def found(driver: Driver) -> dict[str, Wait]:
    core = driver.core
    return {wait.who: wait for wait in waits.waits(Turn(core.state, core.settings, core.story))}


def running(**changes) -> Driver:
    driver = Driver(settings(**({"progress_timeout_s": 10.0} | changes)))
    driver.start("r0", "r1")
    return driver


def test_before_anything_joined_the_trainer_waits_for_its_ranks():
    driver = Driver(settings())
    driver.send(events.RunStarted(boot=1))
    assert found(driver)["trainer"].what == "all its ranks: none are ready"


def test_an_idle_trainer_waits_for_groups_and_these_for_the_replicas_that_generate_them():
    driver = running()
    told = found(driver)
    assert told["trainer"].what == "complete groups: 0 of 2 are buffered"
    assert told["trainer"].on == ["groups in flight"]
    assert told["groups in flight"].on == ["r0", "r1"]
    assert told["r0"].deadline == driver.at + 20.0
    assert "its engine" in told["r0"].what


def test_a_trainer_at_a_step_waits_for_its_ranks_until_the_time_limit():
    driver = running(step_timeout_s=100.0)
    driver.fill("r0")
    told = found(driver)["trainer"]
    assert (told.what, told.since, told.deadline) == (
        "its ranks, which work on step 1 (attempt 1)", driver.at, driver.at + 100.0
    )  # fmt: skip


def test_a_replica_that_pulls_or_is_silent_has_the_deadline_of_that():
    driver = Driver(settings(refresh_timeout_s=30.0, reconnect_grace_s=20.0))
    driver.start("r0")
    driver.join("r1")
    told = found(driver)["r1"]
    assert (told.what, told.since, told.deadline) == ("its pull of v0", driver.at, driver.at + 30.0)
    driver.send(events.WorkerDisconnected(worker=WorkerId("r0"), incarnation=1))
    assert found(driver)["r0"].deadline == driver.at + 20.0


def test_a_publication_waits_for_the_trainer_and_then_for_the_relay_that_collects_it():
    driver = running()
    driver.fill("r0")
    driver.step_done()
    (version,) = [record.version for record in driver.core.state.versions if not record.ready]
    assert found(driver)[f"publication of {version}"].what == "the ranks, which write their shards"
    driver.send(events.ShardsWritten(version=version, stall_s=0.0))
    assert found(driver)[f"publication of {version}"].on == ["relay-0"]


def test_a_full_buffer_makes_new_groups_wait_for_the_trainer():
    driver = running(buffer_groups_max=4)
    driver.send(events.HoldChanged(pass_name="sample", held=True))
    driver.fill("r0", "r1")
    told = found(driver)
    assert told["new groups"].on == ["trainer"]
    assert told["trainer"].on == ["decision 1"]
    assert told["decision 1"].on == ["operator"]
    assert told["pass sample"].what == "the pass sample is held by an operator, decision 1 waits for a word"
    assert told["r0"].on == ["new groups"] or told["r0"].what.startswith("a newer version")


def test_what_a_pause_holds_back_waits_for_the_pass():
    driver = running()
    driver.send(events.HoldChanged(pass_name="all", held=True, mode="pause"))
    driver.fill("r0")
    driver.join("r2")
    told = found(driver)
    assert told["trainer"].on == ["pass sample"]
    assert told["r0"].on == ["pass dispatch"]
    assert (told["r2"].what, told["r2"].on) == ("its pull, which is held", ["pass refresh"])
    assert told["pass refresh"].what == "the pass refresh is paused by an operator"


def test_what_the_disk_holds_up_waits_for_the_disk():
    driver = running()
    driver.send(events.StorageFailed(reason="no space"), after=5.0)
    driver.fill("r0")
    told = found(driver)
    assert (told["disk"].what, told["disk"].since) == ("no space", driver.at)
    assert told["trainer"].on == told["new groups"].on == ["disk"]


def test_queued_siblings_wait_for_the_silent_replica_that_holds_their_version():
    driver = running(restarts_max=1)
    driver.fill("r0")
    driver.send(events.WorkerDisconnected(worker=WorkerId("r1"), incarnation=1))
    driver.lost("r0")
    queued = [who for who in found(driver) if who.startswith("g1")]
    assert all(found(driver)[who].on == ["r1"] for who in queued)
    assert found(driver)["r0"].what.startswith("its restart, after: killed")


def test_a_ring_of_waits_is_found_once_and_named_from_its_first_node_on():
    edges = {"a": ["b", "x"], "b": ["c"], "c": ["a"], "d": ["c"], "e": ["e"]}
    graph = [Wait(who=who, what="", on=on) for who, on in edges.items()]
    assert waits.cycles(graph) == [["a", "b", "c"], ["e"]]
    assert waits.cycles([Wait(who=f"n{i}", what="", on=[f"n{i + 1}"]) for i in range(5000)]) == []


class Watched(World):
    """Looks at the graph after every event."""

    def send(self, event, after=0.0):
        new = super().send(event, after)
        told = waits.waits(Turn(self.core.state, self.core.settings, self.core.story))
        msgspec.json.encode(told)
        assert waits.cycles(told) == [], told
        return new


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_goes_on_has_no_ring_at_any_time_with_and_without_faults(name):
    for faults in (0.0, 0.15):
        Watched(settings(**SETTINGS[name]), 3, faults).run()
