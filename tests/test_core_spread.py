"""Repack by parts: the planner against docs/policies/repack.md, and how the core carries a divided source out."""

from collections import Counter

import pytest
from core_world import Driver, World, of, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_core_fuzz import check_end

from laminar.core import actions, events, repack, spread
from laminar.core.decisions import Repack, Transfer
from laminar.core.repack import Load
from laminar.ids import Version, WorkerId

PERIOD = 5.0


def load(name: str, used: int, num: int, *, previous: int = 10_000, gains: bool = True, **changes: int) -> Load:
    version = Version(changes.get("step", 7), 0)
    return Load(
        worker=WorkerId(name), version=version, kv_used=used, kv_previous=previous, num_requests=num,
        kv_max=changes.get("kv_max", 100), requests_max=changes.get("b", 16), gains=gains,
    )  # fmt: skip


fleets = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 20), st.integers(0, 120), st.integers(0, 2), st.booleans()),
    max_size=14,
).map(lambda rows: [load(f"r{i}", u, n, previous=p, step=s, gains=g) for i, (u, n, p, s, g) in enumerate(rows)])


def test_the_worked_example_of_the_page_comes_out() -> None:
    fleet = [load("r1", 50, 5), load("r2", 60, 6), load("r3", 70, 7), load("r4", 80, 8)]
    assert repack.plan(fleet).moves == [], "no two of them fit together"
    moves = [(m.source, m.destination, m.num_requests, m.kv_after) for m in spread.plan(fleet).moves]
    assert moves == [("r1", "r4", 2, 100), ("r1", "r3", 3, 100)]


@hypothesis_settings(max_examples=400)
@given(fleets)
def test_after_the_moves_every_destination_keeps_its_bounds_and_its_version(fleet: list[Load]) -> None:
    by_name = {entry.worker: entry for entry in fleet}
    kv, num = Counter(), Counter()
    for move in spread.plan(fleet).moves:
        source, destination = by_name[move.source], by_name[move.destination]
        assert source.version == destination.version
        kv[move.destination] += move.num_requests * source.kv_used / source.num_requests
        num[move.destination] += move.num_requests
        assert destination.kv_used + kv[move.destination] <= move.kv_after <= destination.kv_max
        assert destination.num_requests + num[move.destination] == move.requests_after <= destination.requests_max


@hypothesis_settings(max_examples=400)
@given(fleets)
def test_a_source_is_emptied_whole_and_receives_nothing(fleet: list[Load]) -> None:
    by_name = {entry.worker: entry for entry in fleet}
    plan = spread.plan(fleet)
    moved = Counter()
    for move in plan.moves:
        assert move.num_requests > 0
        moved[move.source] += move.num_requests
    assert {name: by_name[name].num_requests for name in moved} == dict(moved)
    assert all(by_name[name].gains for name in moved)
    assert not set(moved) & {move.destination for move in plan.moves}
    for name in {*moved, *(move.destination for move in plan.moves)}:
        assert repack.refusal(by_name[name]) == ""
    assert set(plan.reasons) == set(by_name), "every replica gets a reason"


@hypothesis_settings(max_examples=400)
@given(fleets)
def test_the_emptiest_that_gains_is_emptied_whenever_the_fuller_ones_have_room_for_it(fleet: list[Load]) -> None:
    groups: dict[Version, list[Load]] = {}
    for entry in fleet:
        if not repack.refusal(entry):
            groups.setdefault(entry.version, []).append(entry)
    sources = {move.source for move in spread.plan(fleet).moves}
    for group in groups.values():
        order = sorted(group, key=lambda entry: entry.kv_used)
        first = next((i for i, entry in enumerate(order) if entry.gains), None)
        if first is None:
            continue
        source = order[first]
        each = max(1, -(-source.kv_used // source.num_requests))
        room = sum(
            max(0, min((o.kv_max - o.kv_used) // each, o.requests_max - o.num_requests)) for o in order[first + 1 :]
        )
        assert (source.worker in sources) == (room >= source.num_requests)


@hypothesis_settings(max_examples=200)
@given(fleets)
def test_what_is_moved_whole_can_also_be_moved_in_parts(fleet: list[Load]) -> None:
    """If the paper's plan releases anything of an emptiest source, so does this one."""
    gaining = [entry for entry in fleet if entry.gains]
    if repack.plan(gaining).moves:
        order = sorted((e for e in gaining if not repack.refusal(e)), key=lambda e: e.kv_used)
        emptiest = {entry.version: entry.worker for entry in reversed(order)}
        whole = {move.source for move in repack.plan(gaining).moves}
        parts = {move.source for move in spread.plan(gaining).moves}
        for worker in emptiest.values():
            fits = worker in whole
            divisible = any(e.worker == worker and e.kv_used % e.num_requests == 0 for e in gaining)
            assert not (fits and divisible) or worker in parts


# ---- carried out -------------------------------------------------------------------------------------------


def test_a_divided_source_stops_once_per_destination_and_refreshes_when_the_last_has_left() -> None:
    driver = Driver(
        settings(
            repack_interval_s=PERIOD,
            repack_policy="parts",
            refresh_policy="batch",
            group_size=4,
            batch_groups=4,
            local_batch_groups=1,
            buffer_groups_max=8,
            steps=9,
        )
    )  # fmt: skip
    driver.start("r0", "r1", "r2")
    here = {name: driver.generating(name) for name in ("r0", "r1", "r2")}
    assert {name: len(rows) for name, rows in here.items()} == {"r0": 4, "r1": 4, "r2": 4}
    for name, used in (("r0", 8000), ("r1", 8500), ("r2", 8600)):
        driver.report(name, kv_tokens=used)
    driver.send(events.TimerFired(), after=PERIOD)
    for name, used in (("r0", 4800), ("r1", 6000), ("r2", 6500)):
        driver.report(name, kv_tokens=used)
    aborts = of(driver.send(events.TimerFired(), after=PERIOD), actions.AbortAttempts)
    assert [(abort.worker, len(abort.trajectories)) for abort in aborts] == [("r0", 2), ("r0", 2)]
    assert {len(driver.core.state.replicas[WorkerId(name)].incoming) for name in ("r1", "r2")} == {2}
    assert driver.core.state.repack.num_released == 1
    first, second = (abort.trajectories for abort in aborts)
    out = driver.report("r0", {t: 5 for t in first}, aborted=list(first))
    assert {start.worker for start in of(out, actions.StartGroup)} == {"r2"}
    out = driver.report("r0", {t: 5 for t in second}, aborted=list(second))
    assert {start.worker for start in of(out, actions.StartGroup) if start.starts[0].resume} == {"r1"}
    assert driver.core.state.repack.num_moves == 4


def test_a_replica_with_the_newest_version_that_may_admit_is_not_emptied() -> None:
    driver = Driver(settings(repack_interval_s=PERIOD, repack_policy="parts", refresh_policy="continuous"))
    driver.start("r0", "r1")
    for used in (9000, 800):
        for name in ("r0", "r1"):
            driver.report(name, kv_tokens=used)
        driver.send(events.TimerFired(), after=PERIOD)
    reasons = driver.core.state.repack.reasons
    assert reasons[WorkerId("r0")] == spread.NO_USE
    assert driver.core.state.repack.num_moves == 0


def test_nothing_is_moved_while_new_groups_are_held_back() -> None:
    """Emptied replicas would stand idle, while what was moved goes on more slowly in a fuller one."""
    limits = {"local_batch_groups": 2, "repack_interval_s": PERIOD, "repack_policy": "parts"}
    for limit, moves in ((4, 0), (5, 2)):
        driver = Driver(settings(**limits, buffer_groups_max=limit))
        driver.start("r0", "r1")
        for name in ("r0", "r1"):
            first, second = driver.generating(name)[:2]
            driver.report(name, {first: 3, second: 3}, kv_tokens=800)
        driver.send(events.TimerFired(), after=PERIOD)
        for name in ("r0", "r1"):
            driver.report(name, kv_tokens=400)
        aborts = of(driver.send(events.TimerFired(), after=PERIOD), actions.AbortAttempts)
        assert sum(len(abort.trajectories) for abort in aborts) == moves * 2


def test_an_edited_decision_cannot_move_in_a_circle() -> None:
    driver = Driver(
        settings(repack_interval_s=PERIOD, repack_policy="parts", local_batch_groups=1, buffer_groups_max=4)
    )
    driver.start("r0", "r1")
    driver.send(events.HoldChanged(pass_name="repack", held=True))
    for used in (900, 100):
        for name in ("r0", "r1"):
            driver.report(name, kv_tokens=used)
        driver.send(events.TimerFired(), after=PERIOD)
    (number,) = driver.core.state.held
    (transfer,) = driver.core.state.held[number].decision.transfers  # type: ignore[union-attr]
    there, back = transfer.source, transfer.destination
    circle = [
        transfer,
        Transfer(source=there, destination=back, trajectories=transfer.trajectories),
        Transfer(source=back, destination=there, trajectories=driver.generating(back)),  # type: ignore[arg-type]
    ]
    out = driver.send(events.DecisionResolved(decision=number, verdict="apply", replacement=Repack(transfers=circle)))
    assert [abort.worker for abort in of(out, actions.AbortAttempts)] == [there]


@pytest.mark.parametrize("policy", ["batch", "continuous", "rolling"])
@pytest.mark.parametrize("faults", [0.03, 0.15])
def test_runs_that_repack_by_parts_end_with_a_closed_ledger(policy: str, faults: float) -> None:
    moved = 0
    for seed in range(6):
        chosen = settings(
            steps=8, group_size=4, batch_groups=12, local_batch_groups=4, buffer_groups_max=200, refresh_policy=policy,
            repack_policy="parts", repack_interval_s=0.4,
        )  # fmt: skip
        world = World(chosen, seed, faults, replicas=4)
        world.run()
        check_end(world)
        moved += world.core.state.repack.num_moves
    assert moved > 0
