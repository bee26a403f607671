"""Relays in the simulated world: how weights flow, and what each fault of a relay may cost (docs/policies/relays.md)."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from test_sim_faults import BATCH, LONG, STEPS, crash_the_only_holder, decoded_since_flush, dropped, is_whole
from test_sim_world import scenario

from laminar.core import actions
from laminar.ids import Version, WorkerId
from laminar.sim import relays
from laminar.sim.cluster import chain_s
from laminar.sim.faults import FaultPlan, Injector
from laminar.sim.world import World

PLAN = FaultPlan(restart_s=20.0, replace_s=30.0, partition_s=40.0, slow_s=60.0)
V2 = Version(2, 0)


def hosts(**changes) -> World:
    """Four replicas on four hosts: a chain of five relays."""
    base = {"workload": LONG, "iterations": STEPS, "repack": False, "gpus_per_host": 1}
    return scenario(**(base | changes)).world()


def around_v2(world: World, after_s: float, happen: Callable[[], object]) -> None:
    """Let something happen so many seconds after the trainer's shards of v2 are with the master."""
    publication = world.relays.publication

    def spy(version: Version) -> Callable[[], None]:
        if version == V2 and not spied:
            spied.append(version)
            world.at(world.training.free_at + after_s, happen)
        return publication(version)

    spied: list[Version] = []
    world.relays.publication = spy


def struck(
    name: str, worker: str | None, after_s: float, checks: Callable[[World], None] = lambda world: None
) -> World:
    """A run in which a relay fault strikes around the publication of v2; `checks` look at the world a second later."""
    world = hosts()
    injector = Injector(world, PLAN, seed=1)
    around_v2(world, after_s, lambda: injector.strike(name, WorkerId(worker) if worker else None))
    around_v2(world, after_s + 1.0, lambda: checks(world))
    world.run()
    assert world.measures.faults[name] == 1
    return world


def loses_nothing(world: World) -> bool:
    """No step, no token; no replica noticed, and none waited for weights longer than its own pull."""
    unharmed = all(engine.incarnation == 1 for engine in world.rollouts.engines.values())
    pulls = set(world.measures.waits_s) == {world.cluster.pull_s()}
    return is_whole(world) and unharmed and pulls and (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def unpublished(world: World) -> list[int]:
    """Steps whose version never got through."""
    return [record.version.step for record in world.core.state.versions[:-1] if not record.published_at]


def survivors_hold_v2(world: World) -> None:
    assert world.relays.daemons
    for daemon in world.relays.daemons.values():
        if daemon.connected:
            assert V2 in daemon.held, f"{daemon.worker} has {daemon.held}"


# ---- without faults ----------------------------------------------------------------------------------------


def test_every_relay_is_complete_after_the_time_of_the_pipelined_chain():
    world = hosts()
    held: dict[str, float] = {}
    complete = world.relays._complete

    def spy(daemon, version):
        if version == V2:
            held[daemon.worker] = world.now
        complete(daemon, version)

    world.relays._complete = spy
    written: list[float] = []
    around_v2(world, 0.0, lambda: written.append(world.now))
    world.run()
    cluster = world.cluster
    expected = [
        chain_s(cluster.model.weight_bytes, distance + 1, cluster.link_byte_s(), cluster.software.message_s)
        for distance in range(1, 5)
    ]
    assert [held[f"relay-{i}"] - written[0] for i in range(1, 5)] == pytest.approx(expected)
    assert held["relay-4"] - written[0] == pytest.approx(cluster.broadcast_s())


def test_a_relay_keeps_the_last_three_versions():
    world = hosts(iterations=8)
    world.run()
    assert all(len(daemon.held) <= relays.SLOTS for daemon in world.relays.daemons.values())
    assert [relay.held for relay in world.core.state.relays.values()] == [
        daemon.held for daemon in world.relays.daemons.values()
    ]


def test_every_replica_pulls_when_its_own_relay_is_complete():
    world = hosts(workload=replace(LONG, median=20.0))
    world.run()
    first_pulls = {worker: lane[0][0] for worker, lane in world.measures.lanes.items()}
    assert sorted(first_pulls, key=first_pulls.__getitem__) == [f"rollout-{i}" for i in range(4)]


# ---- one fault ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["relay-1", "relay-2", "relay-4"])
@pytest.mark.parametrize("after_s", [0.02, 3.0])
def test_relay_crash_loses_nothing_and_the_chain_is_rewired_within_a_second(worker, after_s):
    world = struck("relay_crash", worker, after_s, survivors_hold_v2)
    assert loses_nothing(world)
    assert unpublished(world) == []
    assert world.relays.daemons[WorkerId(worker)].incarnation == 2
    assert world.core.state.relays[WorkerId(worker)].held, "it was refilled"


def test_a_survivor_goes_on_from_the_byte_that_it_has():
    world = hosts()
    injector = Injector(world, PLAN, seed=1)
    seen: list[float] = []
    schedule = world.relays._schedule

    def spy(daemon, *rest):
        if (
            daemon.worker == "relay-4"
            and daemon.receiving.version == V2
            and daemon.receiving.epoch != world.relays._epoch
        ):
            seen.append(daemon.receiving.num_bytes)
        return schedule(daemon, *rest)

    world.relays._schedule = spy
    around_v2(world, 0.04, lambda: injector.strike("relay_crash", WorkerId("relay-2")))
    world.run()
    assert seen[0] == 0.0
    assert 0.3 * world.cluster.model.weight_bytes < seen[1] < world.cluster.model.weight_bytes


def test_master_crash_costs_at_most_the_version_being_published():
    world = struck("master_crash", None, -0.01)
    assert loses_nothing(world)
    assert unpublished(world) in ([], [2])


@pytest.mark.parametrize("after_s", [0.02, 3.0])
def test_master_crash_after_its_publication_costs_at_most_a_version_that_nobody_else_held(after_s):
    world = struck("master_crash", None, after_s)
    assert loses_nothing(world)
    assert unpublished(world) == []


def test_another_complete_holder_leads_until_the_trainers_relay_is_back_and_refilled():
    world = hosts()
    injector = Injector(world, PLAN, seed=1)
    masters: list[str] = []
    arrange = world._answers[actions.ArrangeChain]
    world._answers[actions.ArrangeChain] = lambda action: masters.append(action.master) or arrange(action)
    around_v2(world, 3.0, lambda: injector.strike("master_crash"))
    world.run()
    assert list(dict.fromkeys(masters)) == ["relay-0", "relay-1"]
    assert masters[-1] == "relay-0"
    assert loses_nothing(world)


def test_link_slow_moves_the_relay_to_the_tail_and_costs_nothing():
    world = struck("link_slow", "relay-1", 0.01)
    assert loses_nothing(world)
    assert world.core.state.chain.order[-1] == "relay-1"
    assert world.relays.daemons[WorkerId("relay-1")].incarnation == 1


@pytest.mark.parametrize("worker", ["relay-0", "relay-2"])
@pytest.mark.parametrize("after_s", [0.02, 3.0])
def test_relay_partition_fences_the_old_process_off_and_loses_nothing(worker, after_s):
    world = struck("relay_partition", worker, after_s)
    assert loses_nothing(world)
    assert unpublished(world) in ([], [2])
    assert world.relays.daemons[WorkerId(worker)].incarnation == 2


def test_host_lost_takes_its_relay_and_both_come_back():
    world = hosts()
    injector = Injector(world, PLAN, seed=1)
    around_v2(world, 0.02, lambda: injector.strike("host_lost", WorkerId("rollout-1")))
    around_v2(world, 2.0, lambda: survivors_hold_v2(world))
    world.run()
    assert is_whole(world)
    assert 0 < world.measures.num_tokens_lost <= decoded_since_flush(world)
    assert (world.rollouts.engines[WorkerId("rollout-1")].incarnation, dropped(world)) == (2, set())
    assert world.relays.daemons[WorkerId("relay-2")].incarnation == 2


def test_the_loss_of_all_relays_holds_up_weights_but_not_generation():
    world = hosts()
    injector = Injector(world, PLAN, seed=1)

    def all_of_them() -> None:
        for worker in list(world.relays.daemons):
            injector.strike("relay_crash", worker)
        injector.strike("master_crash")
        generated.append(world.rollouts.num_generated())

    generated: list[int] = []
    around_v2(world, 1.0, all_of_them)
    around_v2(world, 15.0, lambda: generated.append(world.rollouts.num_generated()))
    world.run()
    assert world.measures.faults["relay_crash"] + world.measures.faults["master_crash"] == 5
    assert generated[1] > generated[0]
    assert world.core.state.trainer.step == STEPS
    assert world.core.state.ledger.trajectories.committed == STEPS * BATCH
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


# ---- old versions ------------------------------------------------------------------------------------------


def test_a_replica_that_pulls_the_old_version_continues_what_the_last_of_that_version_left():
    world = hosts()
    crash_the_only_holder(world, PLAN, recycled=False)
    counts = world.core.state.num_failovers
    assert (counts.relay > 0, counts.restarted, dropped(world)) == (True, 0, set())


def test_with_two_slots_it_is_continued_from_a_delta(monkeypatch):
    monkeypatch.setattr(relays, "SLOTS", 2)
    world = hosts()
    crash_the_only_holder(world, PLAN, recycled=False)
    counts = world.core.state.num_failovers
    assert (counts.relay > 0, counts.restarted, dropped(world)) == (True, 0, set())


def test_what_no_relay_holds_any_more_starts_again_and_says_so(monkeypatch):
    monkeypatch.setattr(relays, "SLOTS", 2)
    monkeypatch.setattr(relays, "DELTAS_MAX", 0)
    world = hosts()
    crash_the_only_holder(world, PLAN, recycled=True)
    counts = world.core.state.num_failovers
    assert (counts.relay, counts.restarted > 0, dropped(world)) == (0, True, {"version_gone"})
    assert world.core.state.ledger.tokens.dropped["version_gone"] > 0
