"""The baselines against what their definitions give by hand."""

from dataclasses import replace

import pytest

from laminar.errors import ConfigError
from laminar.roofline import HARDWARE
from laminar.sim.baselines import Job, one_step, partial_rollout, place, stream, synchronous
from laminar.sim.cluster import MODELS, Cluster, Software
from laminar.sim.replica import Replica
from laminar.sim.workload import Workload

CLUSTER = Cluster(hardware=HARDWARE["H800"], model=MODELS["7B"], train_gpus=2, rollout_gpus=2)
SAME = Workload(name="same", lengths=(200,), tokens_max=200, prompt_tokens=20)
TAILED = Workload(name="tailed", median=100.0, tokens_max=2000, prompt_tokens=20)
BATCH_TOKENS = 64 * 220


def job(workload: Workload = SAME, cluster: Cluster = CLUSTER, **changes) -> Job:
    return Job(cluster=cluster, workload=workload, batch_groups=16, group_size=4, **changes)


def generation_s() -> float:
    """32 equal requests on each of two replicas: eight prompts, then 200 steps together."""
    return CLUSTER.prefill_s(8 * 20) + CLUSTER.decode_model.steps_s(32, 32 * 20, 200)


def test_synchronous_generates_then_trains_on_all_gpus():
    seconds = generation_s() + CLUSTER.train_s(BATCH_TOKENS, 4) + CLUSTER.global_sync_s()
    assert synchronous(job()).tokens_per_s == pytest.approx(BATCH_TOKENS / seconds)


def test_one_step_takes_the_longer_of_generation_and_training():
    fast = BATCH_TOKENS / (generation_s() + CLUSTER.global_sync_s())
    assert one_step(job()).tokens_per_s == pytest.approx(fast)
    slow = replace(CLUSTER, software=Software(mfu=1e-3))
    assert slow.train_s(BATCH_TOKENS) > generation_s()
    assert one_step(job(cluster=slow)).tokens_per_s == pytest.approx(
        BATCH_TOKENS / (slow.train_s(BATCH_TOKENS) + slow.global_sync_s())
    )


def test_stream_hides_training_behind_generation_but_for_the_last_mini_batch():
    rate = stream(job(TAILED, num_batches=1)).tokens_per_s
    tokens = sum(job(TAILED).tokens(job(TAILED).request(n, 0.0)) for n in range(64))
    seconds = tokens / rate
    serial = tokens / one_step(job(TAILED, num_batches=1)).tokens_per_s + CLUSTER.train_s(tokens)
    assert seconds < serial
    assert seconds > tokens / one_step(job(TAILED, num_batches=1)).tokens_per_s


def test_a_tail_costs_the_batch_systems_and_not_partial_rollout():
    same, tailed = replace(SAME, lengths=(163,)), TAILED  # about the same mean length
    batch_systems = [
        system(job(tailed)).tokens_per_s / system(job(same)).tokens_per_s for system in (synchronous, one_step, stream)
    ]
    assert max(batch_systems) < 0.5
    assert partial_rollout(job(tailed)).tokens_per_s / partial_rollout(job(same)).tokens_per_s > 0.8


def test_partial_rollout_pays_for_every_update_with_a_rebuilt_cache():
    cheap = partial_rollout(job(TAILED)).tokens_per_s
    slow_prefill = replace(CLUSTER, software=Software(prefill_flops_share=0.0005))
    assert partial_rollout(job(TAILED, cluster=slow_prefill)).tokens_per_s < 0.9 * cheap


def test_a_rebuild_computes_all_resident_tokens_and_loses_none():
    replica = Replica(CLUSTER)
    for number in range(4):
        replica.submit(0.0, job().request(number, 0.0))
    replica.turn(0.0)
    replica.advance(2.0)
    held, prefilled = replica.kv_tokens, replica.num_prefilled
    replica.rebuild(2.0, wait_s=3.0)
    assert 0 <= replica.num_prefilled - prefilled - held <= 4, "at most the step in progress more"
    assert replica.boundary == pytest.approx(5.0 + CLUSTER.prefill_s(held), abs=0.1)
    while replica.requests:
        replica.turn(replica.wake_at)
    assert replica.num_generated == 4 * 200


def test_batchwise_systems_train_what_their_rule_says():
    found = {system: dict(system(job(TAILED)).staleness) for system in (synchronous, one_step, stream)}
    assert found == {synchronous: {0: 128}, one_step: {1: 128}, stream: {0: 128}}


def test_a_partial_rollout_is_as_stale_as_its_tokens():
    """Equal lengths run in lockstep: all 64 begin under version 0 and end at once, so the first batch is fresh; the 64 that follow
    are cut by the update that it makes, and the part before the cut is one version old."""
    found = partial_rollout(job(warmup=1, num_measured=1))
    assert set(found.staleness) == {0, 1}
    assert sum(found.staleness.values()) == pytest.approx(64)
    cut = CLUSTER.train_s(BATCH_TOKENS) / generation_s()
    assert 0.1 < cut < 0.5
    assert found.staleness[1] / 64 == pytest.approx(cut, abs=0.02)


def test_partial_rollout_trains_no_faster_than_it_generates():
    """Also not because the long responses that began during the warm-up end after it."""
    wide = replace(job(TAILED), batch_groups=128)
    running, mean = wide.batch / CLUSTER.num_replicas, TAILED.mean_tokens(num=1000)
    generated = CLUSTER.num_replicas * running / CLUSTER.decode_model.step_s(int(running), int(running * mean / 2))
    assert partial_rollout(wide).tokens_per_s < generated * (mean + 20) / mean


def test_every_system_gets_its_best_split():
    found = place("one-step", "7B", "H800", 16, TAILED, 0)
    train, rollout = map(int, found.split.split("/"))
    assert train + rollout == 16
    other = Cluster(hardware=HARDWARE["H800"], model=MODELS["7B"], train_gpus=12, rollout_gpus=4)
    assert found.pace.tokens_per_s >= one_step(Job(cluster=other, workload=TAILED)).tokens_per_s
    assert place("sync", "7B", "H800", 16, TAILED, 0).split == "colocated"


def test_a_stated_split_is_not_searched():
    assert place("one-step", "7B", "H800", 16, TAILED, 0, split=(12, 4)).split == "12/4"


def test_a_machine_too_small_for_a_split_is_refused():
    with pytest.raises(ConfigError, match="no split leaves"):
        place("one-step", "72B", "H800", 8, TAILED, 0)
