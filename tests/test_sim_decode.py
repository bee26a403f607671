"""The closed forms of the simulator's costs against loops over single steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.roofline import HARDWARE
from laminar.sim.cluster import MODELS, Cluster, chain_s
from laminar.sim.decode import DecodeModel


def cluster(model: str = "32B", train: int = 64, rollout: int = 64, hardware: str = "H800") -> Cluster:
    return Cluster(hardware=HARDWARE[hardware], model=MODELS[model], train_gpus=train, rollout_gpus=rollout)


def loop_s(model: DecodeModel, num: int, kv: int, steps: int) -> float:
    """Step by step."""
    return sum(model.step_s(num, kv + num * j) for j in range(steps))


models = st.builds(
    DecodeModel,
    weights_s=st.floats(0, 0.05),
    kv_s=st.floats(0, 1e-6),
    flops_s=st.floats(0, 1e-3),
    overhead_s=st.floats(0, 0.03),
)


@settings(max_examples=150, deadline=None)
@given(models, st.integers(1, 300), st.integers(0, 500_000), st.integers(0, 300))
def test_many_steps_take_as_long_as_the_single_ones(model, num, kv, steps):
    assert model.steps_s(num, kv, steps) == pytest.approx(loop_s(model, num, kv, steps), rel=1e-9, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(models, st.integers(1, 300), st.integers(0, 500_000), st.floats(-5, 20), st.integers(0, 300))
def test_the_steps_within_a_time_are_the_most_that_fit(model, num, kv, seconds, limit):
    steps, passed_s = model.steps_within(num, kv, seconds, limit)
    assert 0 <= steps <= limit
    assert passed_s == model.steps_s(num, kv, steps)
    assert steps == 0 or model.steps_s(num, kv, steps) <= seconds
    assert steps == limit or model.steps_s(num, kv, steps + 1) > seconds


def test_a_crossing_from_compute_bound_to_memory_bound_is_summed_in_both_arms():
    model = DecodeModel(weights_s=0.001, kv_s=1e-6, flops_s=1e-4, overhead_s=0.0)
    assert model.step_s(100, 0) == pytest.approx(0.01)
    assert model.step_s(100, 20_000) == pytest.approx(0.021)
    assert model.steps_s(100, 0, 200) == pytest.approx(loop_s(model, 100, 0, 200))


def test_the_papers_32b_replica_decodes_a_full_cache_at_about_fifty_milliseconds_a_step():
    paper = cluster()
    model = paper.decode_model
    assert 0.045 < model.step_s(256, paper.kv_tokens_max) < 0.055
    assert 16_384 * model.step_s(256, paper.kv_tokens_max) == pytest.approx(828, rel=0.02)


def test_kv_capacity_is_what_weights_and_activations_leave():
    found = cluster()
    used = found.kv_tokens_max * 4 * 64 * 8 * 128 + 2 * 32.8e9 + 4 * 3e9
    assert used == pytest.approx(4 * 80e9 * 0.9, rel=1e-5)


def test_the_memory_bound_batch_is_where_flops_take_as_long_as_weights():
    found = cluster()
    model = found.decode_model
    batch = found.requests_memory_bound
    assert model.flops_s * batch <= model.weights_s < model.flops_s * (batch + 1)


def test_the_chain_is_the_formula_at_its_best_number_of_chunks():
    size, relays, per_byte, start = 1e9, 10, 1e-10, 1e-4

    def at(chunks: float) -> float:
        return (relays + chunks - 2) * (size / chunks * per_byte + start)

    best = ((relays - 2) * size * per_byte / start) ** 0.5
    assert chain_s(size, relays, per_byte, start) == pytest.approx(at(best))
    assert at(best) <= min(at(best * 0.9), at(best * 1.1))


def test_a_broadcast_grows_little_with_the_number_of_relays():
    few, many = cluster("72B", 64, 64), cluster("72B", 64, 1016)
    assert many.num_hosts == 127
    assert many.broadcast_s() < 1.6  # the paper's figure for 127 relays
    assert many.broadcast_s() < 1.5 * few.broadcast_s()


def test_publication_stalls_are_the_papers():
    assert cluster("32B").publish_stall_s() == pytest.approx(0.64, rel=0.05)
    assert cluster("72B").publish_stall_s() == pytest.approx(1.40, rel=0.05)


def test_twice_the_trainers_gpus_halve_the_step():
    assert cluster(train=64).train_s(10_000) == pytest.approx(2 * cluster(train=128).train_s(10_000))
