"""The few collectives that the trainer itself needs, over whatever process group torchrun set up."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVE_TIMEOUT_S = 900.0
"""A rank may wait while another fetches tokens or writes a checkpoint; a dead rank is noticed at once by its socket."""
REASON_BYTES_MAX = 512


def local_device() -> torch.device:
    """This rank's GPU (LOCAL_RANK of torchrun), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def use_own_interface(host: str, num_nodes: int) -> None:
    """Between several nodes gloo and NCCL use the interface at whose address other hosts reach this one, unless told another.

    By itself gloo takes the address that the host's own name stands for, which is a loopback one on many systems.
    """
    name = interface_of(host) if num_nodes > 1 and host else None
    if name is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def interface_of(host: str) -> str | None:
    """The interface of this machine that has the host's address; None for a loopback address or one that it does not have."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = [info[4][0] for info in found if not ipaddress.ip_address(info[4][0]).is_loopback]
    for name, own in psutil.net_if_addrs().items():
        if any(address.address in addresses for address in own):
            return name
    return None


@contextmanager
def process_group(device: torch.device, **options: object) -> Iterator[tuple[int, int]]:
    """(rank, world size) of the group that torchrun's environment (or `options`: store, rank, world_size) describes."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), **options)  # type: ignore[arg-type]
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` summed in place over all ranks."""
    dist.all_reduce(values)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """Element-wise maximum in place over all ranks."""
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def first_failure(reason: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """What the lowest failing rank gave as its reason, on every rank; None when all gave None."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    failing = torch.tensor(world_size if reason is None else rank)
    dist.all_reduce(failing, dist.ReduceOp.MIN, group=group)
    source = int(failing)
    if source == world_size:
        return None
    text = (reason or "").encode()[:REASON_BYTES_MAX].ljust(REASON_BYTES_MAX, b"\0")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(data, source, group=group)
    return f"rank {source}: " + bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")


def gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """What every rank gave, by rank, on every rank; a few kilobytes of each. `group` has all ranks and a CPU backend."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    length = max(1, *(int(size) for size in sizes))
    own = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    parts = [torch.empty(length, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, own, group=group)
    return [bytes(part.tolist())[: int(size)] for part, size in zip(parts, sizes, strict=True)]
