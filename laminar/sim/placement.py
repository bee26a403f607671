"""The best of a few placements: the most promising is tried first, and none whose bound is below what another has reached.

The bound is what neither the trainer nor the decoding of all rollout replicas can exceed for long, by the cost formulas alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from laminar.ids import derive_seed
from laminar.sim.cluster import Cluster
from laminar.sim.workload import Workload

DEMAND_STREAM = 83
DRAWS = 4096  # the mean of so many responses is within 1.5 % of the distribution's

Split = tuple[int, int]
"""(train, rollout) GPUs."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a trajectory asks of a replica, on average."""

    num_tokens: float
    """Prompt and response."""
    num_decoded: float
    """Response tokens that are not an environment's."""
    kv_token_steps: float
    """KV tokens that its decode steps find resident, summed over its steps: p d + d^2 / 2 for a prompt p and d steps."""


def demand(workload: Workload, seed: int) -> Demand:
    """The means over some draws."""
    prompt = workload.prompt_tokens
    draws = [workload.draw(derive_seed(seed, DEMAND_STREAM, number), 0) for number in range(DRAWS)]
    decoded = [draw.num_tokens - sum(pause.num_tokens for pause in draw.pauses) for draw in draws]
    return Demand(
        num_tokens=prompt + fmean(draw.num_tokens for draw in draws),
        num_decoded=fmean(decoded),
        kv_token_steps=fmean(prompt * num + num * num / 2 for num in decoded),
    )


def bound_tokens_per_s(cluster: Cluster, asked: Demand, num_running: int) -> float:
    """Throughput that `cluster` cannot exceed for long with at most `num_running` requests decoding on a replica.

    A step makes one token for each of them and finds at most a full cache, so a trajectory takes the larger of
    `num_decoded / num_running` and `kv_token_steps / capacity` whole steps' weights and overhead, and the reading of its own KV.
    """
    model = cluster.decode_model
    steps = max(asked.num_decoded / num_running, asked.kv_token_steps / cluster.kv_tokens_max)
    replica_s = steps * (model.weights_s + model.overhead_s) + asked.kv_token_steps * model.kv_s
    return min(1.0 / cluster.train_s(1), cluster.num_replicas * asked.num_tokens / replica_s)


def best(
    bounds: Mapping[Split, float], measure: Callable[[Split], Result], rate: Callable[[Result], float]
) -> tuple[Split, Result]:
    """The placement of the highest rate, and what was measured there; of equal ones the one tried first. `bounds` is not empty."""
    found: tuple[Split, Result] | None = None
    for split in sorted(bounds, key=bounds.__getitem__, reverse=True):
        if found is not None and bounds[split] <= rate(found[1]):
            break
        result = measure(split)
        if found is None or rate(result) > rate(found[1]):
            found = split, result
    assert found is not None
    return found
