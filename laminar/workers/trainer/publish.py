"""Weights to the relay: every rank casts its own rows into its part of the slot, without an all-gather (design §4.2).

Invariant: all ranks agree on the outcome; a version is written by all of them or not announced.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from laminar.errors import LaminarError
from laminar.ids import Version
from laminar.workers.canary import Canary
from laminar.workers.relay.client import RelayClient
from laminar.workers.relay.manifest import Manifest, TensorSpec
from laminar.workers.trainer.collective import first_failure
from laminar.workers.trainer.model import LocalParameter


class Publication(NamedTuple):
    """How a publication ended, the same on every rank but for `stall_s`."""

    stall_s: float
    """Seconds this rank waited for it."""
    failure: str | None
    """Why the version was not published; None = written by all ranks."""


def published_dtype(name: str, device: torch.device) -> torch.dtype:
    """dtype of `relay.dtype`: ``auto`` is float32 on a CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def plan_manifest(parameters: list[LocalParameter], dtype: torch.dtype) -> Manifest:
    """Layout of one version, each storage once: a tied output embedding is not in it."""
    name = str(dtype).removeprefix("torch.")
    return Manifest.plan(
        [
            (part.name, name, tuple(part.parameter.shape), torch.empty((), dtype=dtype).element_size())
            for part in parameters
        ]
    )


def write_rows(parameters: list[LocalParameter], manifest: Manifest, slot: memoryview, rank: int) -> int:
    """Cast and copy this rank's rows into `slot`; returns the bytes written. Plain (unsharded) tensors are rank 0's to write."""
    written = 0
    for part, spec in zip(parameters, manifest.tensors, strict=True):
        is_sharded = isinstance(part.parameter.detach(), DTensor)
        if part.local.numel() and (is_sharded or rank == 0):
            written += _write(part, spec, slot)
    return written


def _write(part: LocalParameter, spec: TensorSpec, slot: memoryview) -> int:
    dtype = getattr(torch, spec.dtype)
    row_bytes = spec.num_bytes // spec.shape[0] if spec.shape else spec.num_bytes
    view = torch.frombuffer(
        slot, dtype=dtype, count=part.local.numel(), offset=spec.offset + part.first_row * row_bytes
    ).view(part.local.shape)
    # Casting before the copy halves what crosses the PCIe bus; on a CPU the copy casts on the fly.
    view.copy_(part.local.to(dtype) if part.local.device.type == "cuda" else part.local)
    return view.numel() * view.element_size()


def publish(
    parameters: list[LocalParameter],
    manifest: Manifest,
    client: RelayClient,
    version: Version,
    canary: Callable[[], Canary | None],
) -> Publication:
    """Write one version; every rank calls it. A relay that fails costs the version, never the trainer.

    `canary` is called, on all ranks, only when there is a slot to write to.
    """
    started = time.perf_counter()
    failure = _write_version(parameters, manifest, client, version, canary)
    return Publication(time.perf_counter() - started, failure)


def _write_version(
    parameters: list[LocalParameter],
    manifest: Manifest,
    client: RelayClient,
    version: Version,
    canary: Callable[[], Canary | None],
) -> str | None:
    """Why it failed, the same on every rank. Ranks agree before they write, so that none commits what another cannot."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    slot, failure = None, None
    try:
        slot = client.begin(version, manifest, rank, world_size)
    except (OSError, LaminarError) as error:
        failure = f"the relay failed: {error}"
    if agreed := first_failure(failure):
        if slot is not None:
            client.abandon(version, agreed)
        return agreed
    if slot is None:
        return "superseded by a newer publication: no slot of the relay is free"
    seen = canary()
    try:
        write_rows(parameters, manifest, slot, rank)
        client.commit(version, seen if rank == 0 else None)
    except (OSError, LaminarError) as error:
        failure = f"the relay failed: {error}"
    return first_failure(failure)
