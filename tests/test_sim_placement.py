"""The search for a placement: what its bound promises, and what it does not try."""

from dataclasses import replace

import pytest

from laminar.roofline import HARDWARE
from laminar.sim import placement
from laminar.sim.baselines import Job, partial_rollout, place
from laminar.sim.cluster import MODELS, Cluster
from laminar.sim.scenario import Scenario, searched, simulate
from laminar.sim.workload import WORKLOADS

FEW = {"batch_groups": 32, "warmup": 4, "num_measured": 4}


def job(model: str, train: int, rollout: int, workload: str) -> Job:
    cluster = Cluster(hardware=HARDWARE["H800"], model=MODELS[model], train_gpus=train, rollout_gpus=rollout)
    return Job(cluster=cluster, workload=WORKLOADS[workload], seed=0, **FEW)


@pytest.mark.parametrize("workload", ["math", "tool"])
@pytest.mark.parametrize(
    ("model", "train", "rollout"), [("7B", 4, 4), ("7B", 1, 7), ("32B", 8, 8), ("72B", 32, 8), ("72B", 8, 32)]
)
def test_no_system_that_never_pauses_is_faster_than_the_bound(model, train, rollout, workload):
    chosen = job(model, train, rollout, workload)
    asked = placement.demand(chosen.workload, 0)
    bound = placement.bound_tokens_per_s(chosen.cluster, asked, chosen.num_running_max)
    assert partial_rollout(chosen).tokens_per_s <= bound * 1.05, "short windows vary by some percent"


def test_the_bound_is_reached_by_the_trainer_where_generation_is_plentiful():
    cluster = replace(job("7B", 1, 7, "math").cluster, train_gpus=1)
    asked = placement.demand(WORKLOADS["math"], 0)
    assert placement.bound_tokens_per_s(cluster, asked, 256) == pytest.approx(1.0 / cluster.train_s(1))


def test_environment_tokens_are_not_decoded():
    math, tool = (placement.demand(WORKLOADS[name], 0) for name in ("math", "tool"))
    assert tool.num_tokens == pytest.approx(math.num_tokens, rel=0.01)
    assert tool.num_decoded < 0.95 * math.num_decoded


def tried(bounds: dict[placement.Split, float], rates: dict[placement.Split, float]) -> tuple[placement.Split, list]:
    order: list[placement.Split] = []

    def measure(split: placement.Split) -> float:
        order.append(split)
        return rates[split]

    return placement.best(bounds, measure, float)[0], order


def test_the_most_promising_is_tried_first_and_the_best_is_found():
    bounds = {(3, 1): 10.0, (2, 2): 30.0, (1, 3): 20.0}
    assert tried(bounds, {(3, 1): 9.0, (2, 2): 8.0, (1, 3): 15.0}) == ((1, 3), [(2, 2), (1, 3)])


def test_what_cannot_be_better_is_not_tried():
    bounds = {(3, 1): 10.0, (2, 2): 30.0, (1, 3): 20.0}
    assert tried(bounds, {(2, 2): 25.0}) == ((2, 2), [(2, 2)])


def test_of_equal_placements_the_more_promising_one_is_taken():
    assert tried({(2, 2): 30.0, (1, 3): 20.0}, {(2, 2): 15.0, (1, 3): 15.0})[0] == (2, 2)


def test_a_baseline_gets_the_placement_that_measuring_all_would_give():
    found = place("one-step", "7B", "H800", 16, WORKLOADS["math"], 0)
    alone = [place("one-step", "7B", "H800", 16, WORKLOADS["math"], 0, split=(16 - n, n)) for n in (4, 6, 8, 10, 12)]
    assert found == max(alone, key=lambda placed: placed.pace.tokens_per_s)


SMALL = Scenario(model="7B", gpus=16, workload=WORKLOADS["tool"], batch_groups=24, group_size=4, iterations=6, warmup=4)


def comparable(summary: dict) -> dict:
    return summary | {"elapsed_s": 0.0}


def test_a_search_finds_the_placement_that_short_runs_to_their_end_would_find():
    """A search stops when the last batch that it measures is leased: the end of its step is known by then."""
    splits = [(10, 6), (8, 8), (6, 10), (4, 12)]
    short = {split: simulate(replace(SMALL, split=split, warmup=2, iterations=4))[1] for split in splits}
    found = searched(SMALL)
    rates = {split: summary["throughput_tokens_per_s"] for split, summary in short.items()}
    assert found.scenario.split == max(rates, key=rates.__getitem__)
    assert found.tokens_per_s == max(rates.values())


def test_going_on_with_the_run_of_a_search_is_running_it_from_scratch():
    found = searched(SMALL)
    alone = simulate(replace(SMALL, split=found.scenario.split))[1]
    assert comparable(found.finish()[1]) == comparable(alone)


def test_a_run_shorter_than_a_search_is_placed_all_the_same():
    assert searched(replace(SMALL, iterations=2, warmup=1)).scenario.split == searched(SMALL).scenario.split


@pytest.mark.parametrize("split", [(512, 512), (320, 192), (40, 24)])
def test_as_many_groups_may_be_open_at_every_placement(split):
    chosen = Scenario(model="7B", gpus=sum(split), split=split, workload=WORKLOADS["math"])
    assert chosen.settings(chosen.cluster()).buffer_groups_max == 4 * 512
