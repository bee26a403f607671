"""What re-simulations of a recorded run are made of: the core's settings, machines with the run's costs, its lengths.

As it was, each trajectory has its recorded length: groups are numbered and drawn in the same order. What the run had not generated
has lengths drawn from those that it had.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from laminar.core.settings import Settings
from laminar.errors import LaminarError
from laminar.replay.changes import Changes
from laminar.replay.rates import Rates, Response
from laminar.sim.decode import DecodeModel
from laminar.sim.measured import Costs, MeasuredCluster, measured
from laminar.sim.workload import Draw, Workload

FLUSHES_PER_TIMEOUT = 3  # tokens are heard of once a flush, which must not be taken for a hang


class NotSimulated(LaminarError):
    """A recorded run, or a moment of it, of which no simulation can be made."""


def costs_of(rates: Rates, path: Path) -> Costs:
    """Raises NotSimulated; `path` of the recording, for people."""
    costs = rates.costs()
    if costs is None or not rates.replicas or not rates.responses:
        raise NotSimulated(
            f"{path}: no replica reported tokens while it generated, or no train step was seen whole: the speed of its "
            "machines is not known"
        )
    return costs


def settings_of(recorded: Settings, flush_s: float, *, custom_sampler: bool) -> Settings:
    """Those of the run, without what a simulation has not: evaluations, stalls, agent programs."""
    return msgspec.structs.replace(
        recorded,
        num_prompts=max(1, recorded.num_prompts),
        evaluate=False,
        custom_sampler=custom_sampler,
        stall_after_s=0.0,
        pinned=False,
        progress_timeout_s=recorded.progress_timeout_s
        and max(recorded.progress_timeout_s, FLUSHES_PER_TIMEOUT * flush_s),
    )


def cluster_of(
    rates: Rates, costs: Costs, changes: Changes, num_replicas: int, host_names: tuple[str, ...] = ()
) -> MeasuredCluster:
    """So many replicas like those of the run, on its hosts or as many as it takes."""
    joined = list(rates.replicas.values())
    decode, slower, trains = costs.decode, 1.0 / changes.rollout_speed, 1.0 / changes.trainer_speed
    costs = replace(
        costs,
        decode=DecodeModel(
            weights_s=decode.weights_s * slower,
            kv_s=decode.kv_s * slower,
            flops_s=decode.flops_s * slower,
            overhead_s=decode.overhead_s * slower,
        ),
        step_s=costs.step_s * trains,
        token_s=costs.token_s * trains,
    )
    hosts = max(1, len({event.host for event in joined}))
    return measured(
        costs,
        replicas=num_replicas,
        hosts=len(host_names) or max(1, round(hosts * num_replicas / len(joined))),
        num_requests_max=joined[0].num_requests_max,
        kv_tokens_max=joined[0].kv_tokens_max,
        memory_bound=joined[0].num_requests_memory_bound,
        host_names=host_names,
    )


@dataclass(frozen=True, kw_only=True)
class RecordedWorkload(Workload):
    """Each trajectory's own recorded length and time to its reward; others are drawn."""

    by_seed: dict[int, Response] = field(default_factory=dict, repr=False)
    """Sampling seed of the simulated trajectory -> the recorded response."""
    rewards_s: tuple[float, ...] = field(default=(), repr=False)
    """Observed, sorted as `lengths` are: of the response with that length."""

    def draw(self, seed: int, step: int) -> Draw:
        """As in the recorded run, if that had it."""
        own = self.by_seed.get(seed)
        if own is not None:
            return Draw(own.num_tokens, reward_s=own.reward_s)
        return self._with_reward(super().draw(seed, step).num_tokens)

    def rest(self, seed: int, step: int, num_tokens: int) -> Draw:
        """Of a response that has so many tokens and goes on: its own, or one of those that were longer."""
        draw = self.draw(seed, step)
        if draw.num_tokens < num_tokens or (draw.num_tokens == num_tokens and seed not in self.by_seed):
            longer = self.lengths[bisect_left(self.lengths, num_tokens + 1) :]
            draw = self._with_reward(longer[seed % len(longer)] if longer else num_tokens + 1)
        self.by_seed[seed] = Response(seed, draw.num_tokens, draw.reward_s)  # also if it has to begin again
        return draw

    def _with_reward(self, num_tokens: int) -> Draw:
        place = min(bisect_left(self.lengths, num_tokens), len(self.rewards_s) - 1)
        return Draw(num_tokens, reward_s=self.rewards_s[place] if self.rewards_s else 0.0)


def workload_of(rates: Rates, by_seed: Mapping[int, Response]) -> RecordedWorkload:
    """`by_seed`: the responses that are known of trajectories that are to be simulated."""
    seen = sorted((each.num_tokens, each.reward_s) for each in rates.responses.values() if each.num_tokens > 0)
    lengths, rewards_s = tuple(length for length, _ in seen), tuple(seconds for _, seconds in seen)
    prompts = rates.prompt_tokens or [1]
    return RecordedWorkload(
        name="recorded",
        lengths=lengths,
        rewards_s=rewards_s,
        median=float(lengths[len(lengths) // 2]),
        tokens_max=lengths[-1],
        prompt_tokens=max(1, round(sum(prompts) / len(prompts))),
        by_seed={seed: each for seed, each in by_seed.items() if each.num_tokens > 0},
    )
