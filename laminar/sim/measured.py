"""A cluster whose costs were measured in a real run, in place of the formulas over models and GPUs."""

from dataclasses import dataclass

from laminar.roofline import HARDWARE
from laminar.sim.cluster import Cluster, Model
from laminar.sim.decode import DecodeModel

NO_TIME_S = 1e-15  # a byte's, where nothing is sent to another host


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, as measured; they include everything that the machines did meanwhile."""

    decode: DecodeModel
    """Of a replica; prefill is in it."""
    step_s: float
    """Of a train step, whatever its batch."""
    token_s: float
    """Of one prompt or response token of a batch, besides."""
    publish_s: float
    """How long the trainer is busy with handing a version over."""
    pull_s: float
    """From the word to pull until the replica holds the version."""
    spread_s: float = 0.0
    """From the master's relay to those of other hosts."""
    version_bytes: int = 1


@dataclass(frozen=True, kw_only=True)
class MeasuredCluster(Cluster):
    """Replicas as they joined, with these costs."""

    costs: Costs
    replicas: int
    hosts: int
    kv_tokens: int
    """Capacity of one replica."""
    memory_bound: int
    """B of its GPU; 0 = unknown."""
    host_names: tuple[str, ...] = ()
    """As they are in the recorded run; none = those of the simulator."""

    def host_of(self, replica: int) -> str:
        if not self.host_names:
            return super().host_of(replica)
        return self.host_names[min(replica // self.replicas_per_host, len(self.host_names) - 1)]

    @property
    def num_replicas(self) -> int:
        return self.replicas

    @property
    def num_hosts(self) -> int:
        return self.hosts

    @property
    def replicas_per_host(self) -> int:
        return -(-self.replicas // self.hosts)

    @property
    def kv_tokens_max(self) -> int:
        return self.kv_tokens

    @property
    def requests_memory_bound(self) -> int:
        return self.memory_bound

    def prefill_s(self, num_tokens: int) -> float:
        return 0.0  # in the decode steps

    def pull_s(self) -> float:
        return self.costs.pull_s

    def checkpoint_pull_s(self) -> float:
        return self.costs.pull_s

    def publish_stall_s(self) -> float:
        return self.costs.publish_s

    def link_byte_s(self) -> float:
        return max(NO_TIME_S, self.costs.spread_s / self.costs.version_bytes)

    def train_s(self, num_tokens: int, num_gpus: int | None = None) -> float:
        return self.costs.step_s + self.costs.token_s * num_tokens


def measured(
    costs: Costs,
    *,
    replicas: int,
    hosts: int,
    num_requests_max: int,
    kv_tokens_max: int,
    memory_bound: int,
    host_names: tuple[str, ...] = (),
) -> MeasuredCluster:
    """GPUs and model only give it a name and a version's size."""
    model = Model(
        name="recorded", num_parameters=costs.version_bytes / 2, num_layers=1, num_kv_heads=1, head_dim=1,
        tensor_parallel=1,
    )  # fmt: skip
    return MeasuredCluster(
        hardware=HARDWARE["H800"], model=model, train_gpus=1, rollout_gpus=replicas, num_requests_max=num_requests_max,
        decode=costs.decode, costs=costs, replicas=replicas, hosts=hosts, kv_tokens=kv_tokens_max,
        memory_bound=memory_bound, host_names=host_names,
    )  # fmt: skip
