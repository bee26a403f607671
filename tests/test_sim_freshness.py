"""The staleness penalty against hand-made histograms."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.sim.freshness import HALF_LIVES, Pace, break_even, pace_of

histograms = st.dictionaries(st.integers(0, 12), st.floats(0.01, 1e4), min_size=1)
rates = st.floats(1.0, 1e6)


def pace(rate: float, staleness: dict[int, float]) -> Pace:
    return Pace(tokens_per_s=rate, staleness=staleness)


def relative_time(a: Pace, b: Pace, half_life: float) -> float:
    """Of `a`, for as many fresh tokens as `b` trains in 1."""
    return b.fresh_tokens_per_s(half_life) / a.fresh_tokens_per_s(half_life)


def test_a_trajectory_one_half_life_old_counts_half():
    assert pace(100.0, {8: 5}).fresh_tokens_per_s(8.0) == pytest.approx(50.0)
    assert pace(100.0, {0: 3, 4: 1}).fresh_tokens_per_s(4.0) == pytest.approx(87.5)
    assert pace(100.0, {0: 9}).fresh_tokens_per_s(0.1) == pytest.approx(100.0)


@given(rates, histograms)
def test_staleness_never_gains_and_a_longer_half_life_never_loses(rate, staleness):
    found = [pace(rate, staleness).fresh_tokens_per_s(h) for h in HALF_LIVES]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(found))
    assert found[-1] == pytest.approx(rate)


def test_twice_as_fast_and_one_half_life_staler_is_even():
    fast, fresh = pace(200.0, {6: 1}), pace(100.0, {0: 1})
    assert break_even(fast, fresh) == pytest.approx(6.0)
    assert break_even(fresh, fast) == pytest.approx(6.0)
    assert relative_time(fast, fresh, 6.0) == pytest.approx(1.0)
    assert relative_time(fast, fresh, math.inf) == pytest.approx(0.5)


def test_there_is_no_break_even_with_a_run_that_is_faster_and_fresher():
    assert break_even(pace(200.0, {0: 3, 1: 1}), pace(100.0, {1: 2, 2: 2})) is None


@given(rates, histograms, rates, histograms)
def test_at_the_break_even_both_are_equal_and_above_it_the_lead_does_not_change(rate_a, a, rate_b, b):
    first, second = pace(rate_a, a), pace(rate_b, b)
    half_life = break_even(first, second)
    if half_life is None:
        return
    assert relative_time(first, second, half_life) == pytest.approx(1.0, rel=1e-6)
    above = [relative_time(first, second, min(1e4, factor * half_life)) for factor in (1.5, 4.0, 1e6)]
    assert all(time > 1.0 - 1e-9 for time in above) or all(time < 1.0 + 1e-9 for time in above)


def test_a_report_can_be_read_back():
    run = pace(120.5, {0: 4, 3: 1.5})
    row = run.report() | {"throughput_tokens_per_s": run.tokens_per_s}
    assert pace_of(row) == run
    assert row["s_per_million_fresh_tokens"] == pytest.approx(1e6 / run.fresh_tokens_per_s())
    assert row["s_train_max"] == 3


def test_nothing_trained_has_no_weight():
    with pytest.raises(ValueError, match="must be positive"):
        pace(1.0, {}).mean_weight()
