"""The repack planner against its page, docs/policies/repack.md."""

import random

import naive_repack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.core.repack import Load, plan, refusal
from laminar.ids import Version, WorkerId


def load(
    name: str, used: int, num: int, *, previous: int = 10_000, step: int = 7, kv_max: int = 100, b: int = 16
) -> Load:
    return Load(
        worker=WorkerId(name),
        version=Version(step, 0),
        kv_used=used,
        kv_previous=previous,
        num_requests=num,
        kv_max=kv_max,
        requests_max=b,
    )


loads = st.lists(
    st.builds(
        lambda used, num, previous, step: (used, num, previous, step),
        st.integers(0, 120),
        st.integers(0, 20),
        st.integers(0, 120),
        st.integers(0, 2),
    ),
    max_size=12,
).map(lambda rows: [load(f"r{i}", u, n, previous=p, step=s) for i, (u, n, p, s) in enumerate(rows)])


def test_the_worked_example_of_the_page_comes_out() -> None:
    result = plan([load("r1", 12, 3), load("r2", 18, 4), load("r3", 25, 5), load("r4", 80, 7)])
    assert [(m.source, m.destination) for m in result.moves] == [("r1", "r4"), ("r2", "r3")]
    assert (result.moves[0].kv_after, result.moves[0].requests_after) == (92, 10)


def test_every_replica_gets_a_reason() -> None:
    fleet = [
        load("up", 50, 3, previous=40),
        load("idle", 0, 0),
        load("full", 100, 3),
        load("busy", 10, 16),
        load("alone", 9, 1, step=1),
    ]
    reasons = plan(fleet).reasons
    assert reasons["up"].startswith("not past its peak")
    assert reasons["idle"].startswith("idle")
    assert reasons["full"].startswith("full")
    assert reasons["busy"].startswith("compute-bound")
    assert "no other replica of its version" in reasons["alone"]


def test_replicas_of_different_versions_never_share() -> None:
    assert plan([load("a", 10, 1, step=1), load("b", 10, 1, step=2)]).moves == []


@settings(max_examples=300)
@given(loads)
def test_after_the_moves_every_destination_keeps_its_bounds_and_its_version(fleet: list[Load]) -> None:
    by_name = {entry.worker: entry for entry in fleet}
    kv = {entry.worker: entry.kv_used for entry in fleet}
    num = {entry.worker: entry.num_requests for entry in fleet}
    for move in plan(fleet).moves:
        source, destination = by_name[move.source], by_name[move.destination]
        assert source.version == destination.version
        kv[move.destination] += kv.pop(move.source)
        num[move.destination] += num.pop(move.source)
        assert kv[move.destination] == move.kv_after <= destination.kv_max
        assert num[move.destination] == move.requests_after <= destination.requests_max


@settings(max_examples=300)
@given(loads)
def test_nothing_moves_twice_and_only_candidates_take_part(fleet: list[Load]) -> None:
    moves = plan(fleet).moves
    sources = [move.source for move in moves]
    assert len(set(sources)) == len(sources)
    assert not set(sources) & {move.destination for move in moves}
    by_name = {entry.worker: entry for entry in fleet}
    for move in moves:
        assert refusal(by_name[move.source]) == refusal(by_name[move.destination]) == ""


@settings(max_examples=300)
@given(loads)
def test_a_replica_is_released_whenever_two_candidates_fit_together(fleet: list[Load]) -> None:
    able = [entry for entry in fleet if not refusal(entry)]
    fitting = any(
        a.worker != b.worker
        and a.version == b.version
        and a.kv_used + b.kv_used <= b.kv_max
        and a.num_requests + b.num_requests <= b.requests_max
        for a in able
        for b in able
    )
    result = plan(fleet)
    assert bool(result.moves) == fitting
    assert set(result.reasons) == {entry.worker for entry in fleet}


mixed_fleets = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 9),
        st.sampled_from([30, 1_000]),
        st.integers(0, 1),
        st.sampled_from([60, 61, 100]),
        st.sampled_from([1, 7, 8, 9]),
    ),
    max_size=24,
).map(
    lambda rows: [load(f"r{i}", u, n, previous=p, step=s, kv_max=c, b=b) for i, (u, n, p, s, c, b) in enumerate(rows)]
)


def is_best_fit(fleet: list[Load]) -> bool:
    """Moves, reasons and their order."""
    expected, result = naive_repack.plan(fleet), plan(fleet)
    return result == expected and list(result.reasons) == list(expected.reasons)


@settings(max_examples=500)
@given(mixed_fleets)
def test_the_plan_is_best_fit_to_the_letter_also_with_ties_and_unlike_replicas(fleet: list[Load]) -> None:
    assert is_best_fit(fleet)


@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_best_fit_to_the_letter_in_large_fleets(seed: int) -> None:
    draw = random.Random(seed)
    b = draw.choice([2, 16, 221, 256])
    kv_max = draw.choice([500, 20_000])
    fleet = [
        load(f"r{i}", draw.randrange(1 + kv_max // 2), draw.randrange(1 + b), kv_max=kv_max, b=b, previous=kv_max)
        for i in range(400)
    ]
    assert plan(fleet).moves
    assert is_best_fit(fleet)
