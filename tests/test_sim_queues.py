"""The buffer's accounting against queues laid out by hand."""

import pytest

from laminar.sim.queues import Group, Record, Sample, account, trend


def steady(seconds: int = 80, residence_s: float = 5.0) -> Record:
    """Two groups arrive every second, at its middle, and leave `residence_s` later; a sample every second. Then the run ends."""
    groups = [
        Group(
            complete_at=at + 0.5,
            sampled_at=at + 0.5 + residence_s,
            step=1 + int((at + 0.5 + residence_s) // 10),
            s_train=1.5,
        )
        for at in range(seconds)
        for _ in range(2)
    ]
    samples = [
        Sample(
            at=float(at),
            buffered=sum(g.complete_at < at <= g.sampled_at for g in groups),
            in_flight=7,
            held_back=at % 4 == 0,
        )
        for at in range(seconds + 1)
    ]  # fmt: skip
    groups = [group for group in groups if group.sampled_at <= seconds]
    return Record(groups=groups, samples=samples, busy=[(at * 10.0, at * 10.0 + 8.0) for at in range(10)])


STEPS = [(step, step * 10.0) for step in range(2, 9)]


def test_a_steady_queue_obeys_littles_law():
    found = account(steady(), STEPS, {"stopped": 3})
    assert found["arrivals_groups_per_s"] == pytest.approx(2.0)
    assert found["consumption_groups_per_s"] == pytest.approx(2.0)
    assert found["residence_s"] == pytest.approx({"mean": 5.0, "p50": 5.0, "p99": 5.0, "max": 5.0})
    assert found["depth_groups"]["mean"] == pytest.approx(10.0)
    assert found["little_ratio"] == pytest.approx(1.0)
    assert found["in_flight_groups_mean"] == 7
    assert found["dropped_trajectories"] == {"stopped": 3}
    assert not found["trend_depth"]["is_trend"]


def test_waiting_and_holding_back_are_shares_of_time():
    found = account(steady(), STEPS, {})
    assert found["trainer_waits_share"] == pytest.approx(0.2)
    assert found["held_back_share"] == pytest.approx(0.25)


def test_depth_that_was_not_there_breaks_littles_ratio():
    record = steady()
    double = [Sample(at=s.at, buffered=2 * s.buffered, in_flight=0, held_back=False) for s in record.samples]
    record.samples = [*double[:-1], record.samples[-1]]
    assert account(record, STEPS, {})["little_ratio"] == pytest.approx(2.0, rel=0.02)


def test_the_series_has_a_row_for_each_step_but_the_first():
    rows = account(steady(), STEPS, {})["series"]
    assert [row["step"] for row in rows] == [3, 4, 5, 6, 7, 8]
    assert all(row["depth_groups"] == pytest.approx(10.0) for row in rows)
    assert all(row["residence_s"] == pytest.approx(5.0) for row in rows)
    assert all(row["s_train"] == pytest.approx(1.5) for row in rows)


def test_one_step_is_too_little():
    with pytest.raises(ValueError, match="between two of them"):
        account(steady(), STEPS[:1], {})


def test_a_queue_that_grows_has_a_trend_and_noise_has_none():
    growing = trend([float(i) for i in range(40)])
    assert growing == {"slope_per_step": pytest.approx(1.0), "drift": pytest.approx(19.0), "is_trend": True}
    noise = [10.0 + (1.0 if i * 7 % 5 < 2 else -1.0) for i in range(40)]
    assert not trend(noise)["is_trend"]
    assert not trend([0.0] * 40)["is_trend"]


def test_only_the_second_half_counts():
    assert not trend([float(i) for i in range(20)] + [20.0] * 20)["is_trend"]
