"""B of the paper: the largest decode batch that is still memory-bound, from what a GPU is. Also the simulator's table of GPUs.

A decode step of n requests reads all weights once and does 2 N FLOPs per request, N being the parameters that a token uses. It is
memory-bound while the FLOPs take no longer than the reading:

    2 N n / (peak * flops share)  <=  bytes of the weights / (bandwidth * bandwidth share)

In a dense model the bytes are N times the bytes of a parameter, so N cancels out, and with it tensor parallelism, which multiplies
both rates: B is the GPU's. A mixture of experts uses fewer parameters per token than it reads, so its B is larger than this one.
"""

import re
from dataclasses import dataclass

BANDWIDTH_SHARE = 0.8  # of HBM bandwidth in decode: what well-tuned attention kernels reach
DECODE_FLOPS_SHARE = 0.6  # of peak in the decode GEMMs once they are compute-bound
BYTES_16_BIT = 2.0  # the peaks below are those of bf16 and fp16


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU and its share of a host of eight."""

    name: str
    peak_flops: float
    """Dense bf16."""
    hbm_bytes: float
    hbm_bandwidth: float
    pcie_bandwidth: float
    """Host to device, one GPU."""
    network_bandwidth: float
    """Out of one host, all its links together."""


# Vendor data sheets (SXM, dense bf16). H800 = H100 with NVLink cut to 400 GB/s; 8 x 400 Gbit/s per host as in the paper.
HARDWARE = {
    "H800": Hardware(
        name="H800", peak_flops=989e12, hbm_bytes=80e9, hbm_bandwidth=3.35e12, pcie_bandwidth=64e9,
        network_bandwidth=400e9,
    ),
    "H100": Hardware(
        name="H100", peak_flops=989e12, hbm_bytes=80e9, hbm_bandwidth=3.35e12, pcie_bandwidth=64e9,
        network_bandwidth=400e9,
    ),
    "H200": Hardware(
        name="H200", peak_flops=989e12, hbm_bytes=141e9, hbm_bandwidth=4.8e12, pcie_bandwidth=64e9,
        network_bandwidth=400e9,
    ),
    "A100": Hardware(
        name="A100", peak_flops=312e12, hbm_bytes=80e9, hbm_bandwidth=2.039e12, pcie_bandwidth=32e9,
        network_bandwidth=200e9,
    ),
}  # fmt: skip

OTHER_BOARDS = {"pcie", "nvl", "40gb", "mig"}
"""Words in the name of a device that has another bandwidth or peak than the table's SXM board of that generation."""


def known(device_name: str) -> Hardware | None:
    """The GPU of a name such as ``NVIDIA H100 80GB HBM3`` (`torch.cuda.get_device_name`); None = the table does not have it."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    if OTHER_BOARDS.intersection(words):
        return None
    return next((hardware for name, hardware in HARDWARE.items() if name.lower() in words), None)


def requests_memory_bound(
    hardware: Hardware,
    *,
    flops_share: float = DECODE_FLOPS_SHARE,
    bandwidth_share: float = BANDWIDTH_SHARE,
) -> int:
    """B of a dense model in 16 bits on this GPU; at least 1."""
    reading_s = BYTES_16_BIT / (hardware.hbm_bandwidth * bandwidth_share)  # per parameter
    computing_s = 2.0 / (hardware.peak_flops * flops_share)  # per parameter and request
    return max(1, int(reading_s / computing_s))
