"""What things cost: the one table of model and software constants, and the formulas over them and `laminar.roofline`'s GPUs.

Nothing here is tuned per point of an evaluation. docs/sim/model.md derives the formulas and says what they leave out.
Units: seconds, bytes, tokens, FLOPs; bandwidths in bytes/s. A cluster is immutable.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from laminar.roofline import BANDWIDTH_SHARE, DECODE_FLOPS_SHARE, Hardware, requests_memory_bound
from laminar.sim.decode import DecodeModel


@dataclass(frozen=True, kw_only=True)
class Model:
    """A dense decoder in bf16."""

    name: str
    num_parameters: float
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel: int
    """GPUs of one rollout replica."""

    @property
    def weight_bytes(self) -> float:
        """bf16 weights."""
        return 2.0 * self.num_parameters

    @property
    def kv_bytes(self) -> float:
        """KV cache of one token over all layers, bf16: 2 (K and V) x layers x KV heads x head dim x 2 bytes."""
        return 4.0 * self.num_layers * self.num_kv_heads * self.head_dim


# config.json of Qwen2.5-{7B,32B,72B}; parameter counts from their model cards. TP: 4 at 32B is the paper's, the others ours.
MODELS = {
    "7B": Model(
        name="7B", num_parameters=7.62e9, num_layers=28, num_kv_heads=4, head_dim=128, tensor_parallel=1
    ),
    "32B": Model(
        name="32B", num_parameters=32.8e9, num_layers=64, num_kv_heads=8, head_dim=128, tensor_parallel=4
    ),
    "72B": Model(
        name="72B", num_parameters=72.7e9, num_layers=80, num_kv_heads=8, head_dim=128, tensor_parallel=8
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Software:
    """How much of the hardware the software gets, and what it adds."""

    bandwidth_share: float = BANDWIDTH_SHARE
    """Of HBM bandwidth in decode."""
    decode_flops_share: float = DECODE_FLOPS_SHARE
    """Of peak in the decode GEMMs once they are compute-bound."""
    prefill_flops_share: float = 0.5
    """Of peak in prefill."""
    step_overhead_s: float = 0.024
    """Per decode step: scheduler, sampling, launches, all-reduces. Calibrated once: the paper's 32B TP4 takes 828 s for 16 Ki
    tokens, 50 ms a step under load, of which weights and a full KV cache explain 26 ms."""
    mfu: float = 0.3
    """Of peak in training, 6 N FLOPs a token; usual for FSDP with sequence parallelism at long contexts."""
    forward_passes: int = 2
    """Experience preparation: log-probs of the reference and of the policy, 2 N FLOPs a token each. With the 6 N of the update
    that is 40 % of the trainer's time; the paper's shares (7.3 % beside at least 9.6 %) say 43 %."""
    memory_share: float = 0.9
    """Of HBM that the engine may use (vLLM's default)."""
    activation_bytes: float = 3e9
    """Per GPU, not available to the KV cache."""
    pcie_share: float = 0.8
    network_share: float = 0.7
    """Of line rate in a relay link: measured RDMA streams and host-memory copies reach about that."""
    message_s: float = 20e-6
    """T_start of one chunk on a link."""
    storage_bandwidth: float = 5e9
    """Shared storage, as one replica reads it; assumed, and used only when checkpoints serve old versions."""
    publish_bandwidth: float = 100e9
    """Device to relay memory on one trainer host; the paper's actor stall (0.64 s at 32B, 1.40 s at 72B) gives 102 GB/s."""
    global_sync_s: float = 2.0
    """Baselines: barrier, process-group set-up and cache reset around a global NCCL weight broadcast."""
    collective_bandwidth: float = 40e9
    """Baselines: global weight broadcast, per receiving replica's slowest link (one 400 Gbit/s port)."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A split of `train_gpus` + `rollout_gpus` with all costs. All methods are pure."""

    hardware: Hardware
    model: Model
    train_gpus: int
    rollout_gpus: int
    software: Software = Software()
    num_requests_max: int = 256
    """Concurrent requests of one replica (the paper's setting)."""
    gpus_per_host: int = 8
    decode: DecodeModel | None = None
    """Of a replica, as measured; None = by the formulas."""

    @property
    def num_replicas(self) -> int:
        """Rollout replicas that the split has room for."""
        return self.rollout_gpus // self.model.tensor_parallel

    @property
    def num_hosts(self) -> int:
        """Rollout hosts, one relay each."""
        return math.ceil(self.num_replicas / self.replicas_per_host)

    def host_of(self, replica: int) -> str:
        """Name of the host on which a replica with this number is."""
        return f"rollout-host-{replica // self.replicas_per_host}"

    @property
    def replicas_per_host(self) -> int:
        """Replicas that share a host."""
        return max(1, self.gpus_per_host // self.model.tensor_parallel)

    @property
    def kv_tokens_max(self) -> int:
        """KV capacity of one replica: what HBM is left after weights and activations."""
        tp, soft = self.model.tensor_parallel, self.software
        free = tp * (self.hardware.hbm_bytes * soft.memory_share - soft.activation_bytes) - self.model.weight_bytes
        return int(free / self.model.kv_bytes)

    @property
    def memory_bandwidth(self) -> float:
        """Effective HBM bandwidth of one replica."""
        return self.model.tensor_parallel * self.hardware.hbm_bandwidth * self.software.bandwidth_share

    @property
    def requests_memory_bound(self) -> int:
        """B of the paper, with the software's shares."""
        soft = self.software
        return requests_memory_bound(
            self.hardware, flops_share=soft.decode_flops_share, bandwidth_share=soft.bandwidth_share
        )

    @cached_property
    def decode_model(self) -> DecodeModel:
        """The coefficients of one replica."""
        if self.decode is not None:
            return self.decode
        flops = self.model.tensor_parallel * self.hardware.peak_flops * self.software.decode_flops_share
        return DecodeModel(
            weights_s=self.model.weight_bytes / self.memory_bandwidth,
            kv_s=self.model.kv_bytes / self.memory_bandwidth,
            flops_s=2.0 * self.model.num_parameters / flops,
            overhead_s=self.software.step_overhead_s,
        )

    def prefill_s(self, num_tokens: int) -> float:
        """Compute-bound prefill of `num_tokens`: 2 N FLOPs a token; attention's quadratic part is left out."""
        return 2.0 * self.model.num_parameters * num_tokens / self._prefill_flops

    @cached_property
    def _prefill_flops(self) -> float:
        return self.model.tensor_parallel * self.hardware.peak_flops * self.software.prefill_flops_share

    def pull_s(self) -> float:
        """A replica's TP ranks read their parts from the relay over PCIe, at once."""
        rate = self.model.tensor_parallel * self.hardware.pcie_bandwidth * self.software.pcie_share
        return self.model.weight_bytes / rate

    def checkpoint_pull_s(self) -> float:
        """A replica loads a checkpoint's weights."""
        return self.model.weight_bytes / self.software.storage_bandwidth

    def publish_stall_s(self) -> float:
        """How long the trainer waits while its shards go to the relay."""
        return self.model.weight_bytes / self.software.publish_bandwidth

    def link_byte_s(self) -> float:
        """T_byte of a link between two relays."""
        return 1.0 / (self.hardware.network_bandwidth * self.software.network_share)

    def broadcast_s(self) -> float:
        """Chain-pipelined broadcast to one relay per rollout host: T*(p) of the paper's section on relays."""
        return chain_s(self.model.weight_bytes, self.num_hosts + 1, self.link_byte_s(), self.software.message_s)

    def train_s(self, num_tokens: int, num_gpus: int | None = None) -> float:
        """One actor update over `num_tokens`, experience preparation included: (6 + 2 f) N T / (gpus x peak x MFU)."""
        gpus = self.train_gpus if num_gpus is None else num_gpus
        flops = (6.0 + 2.0 * self.software.forward_passes) * self.model.num_parameters * num_tokens
        return flops / (gpus * self.hardware.peak_flops * self.software.mfu)

    def global_sync_s(self) -> float:
        """Baselines: every rollout stops, receives the weights over NCCL and goes on."""
        return self.software.global_sync_s + self.model.weight_bytes / self.software.collective_bandwidth


def chain_s(num_bytes: float, num_relays: int, per_byte_s: float, per_message_s: float) -> float:
    """T*(p) = M b + (p - 2) a + 2 sqrt((p - 2) M b a): the pipelined chain at its best number of chunks."""
    links = max(0, num_relays - 2)
    line = num_bytes * per_byte_s
    return line + links * per_message_s + 2.0 * math.sqrt(links * line * per_message_s)
