"""Weights to the relay of this host: every rank casts its own rows into its part of the slot, without an all-gather.

Invariant: all ranks agree on the outcome; a version is written by all of them or not announced.
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from laminar import wire
from laminar.errors import LaminarError
from laminar.workers.canary import Canary
from laminar.workers.relay import ranges
from laminar.workers.relay.client import RelayClient
from laminar.workers.relay.manifest import Manifest, TensorSpec
from laminar.workers.trainer.collective import first_failure
from laminar.workers.trainer.model import LocalParameter

STAGING_BYTES = 64 << 20  # of pinned memory: large enough for full speed, and nothing beside the weights themselves
WROTE_BYTES = 32 << 20  # a rank says so often what it has written, for the relay to send on


class Publication(NamedTuple):
    """How a publication ended. `failure` is the same on every rank; seconds are of this one."""

    stall_s: float
    """How long it waited for it, all in all."""
    failure: str | None
    """Why the version was not published; None = written by all ranks."""
    cast_s: float
    """To the published dtype, on a GPU; a CPU casts while it copies."""
    device_copy_s: float
    """From a GPU to host memory."""
    host_copy_s: float
    """From host memory into the slot."""


class Piece(NamedTuple):
    """Rows of one tensor that this rank writes."""

    local: Tensor
    dtype: torch.dtype
    start: int
    """Byte in the version."""
    end: int


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


def own_pieces(parameters: list[LocalParameter], manifest: Manifest, rank: int) -> list[Piece]:
    """What this rank writes, in order of bytes. Plain (unsharded) tensors are rank 0's."""
    pieces = []
    for part, spec in zip(parameters, manifest.tensors, strict=True):
        is_sharded = isinstance(part.parameter.detach(), DTensor)
        if part.local.numel() and (is_sharded or rank == 0):
            pieces.append(_piece(part, spec))
    return pieces


def _piece(part: LocalParameter, spec: TensorSpec) -> Piece:
    dtype = getattr(torch, spec.dtype)
    row_bytes = spec.num_bytes // spec.shape[0] if spec.shape else spec.num_bytes
    start = spec.offset + part.first_row * row_bytes
    return Piece(part.local, dtype, start, start + part.local.numel() * dtype.itemsize)


class Publisher:
    """Writes versions; every rank has one and calls it. A relay that fails costs the version, never the trainer."""

    def __init__(self, parameters: list[LocalParameter], manifest: Manifest) -> None:
        self._manifest = manifest
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # torchrun tells how many ranks are on this host, and so write to its relay.
        self._num_here = int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size))
        self._pieces = own_pieces(parameters, manifest, self._rank)
        self._ranges = ranges.pack((piece.start, piece.end) for piece in self._pieces)
        self._staging: Tensor | None = None
        self._cast_s = self._device_copy_s = self._host_copy_s = 0.0

    def publish(self, order: wire.Publish, client: RelayClient, canary: Callable[[], Canary | None]) -> Publication:
        """One version. `canary` is called, on all ranks, only when all have a slot to write to."""
        started = time.perf_counter()
        self._cast_s = self._device_copy_s = self._host_copy_s = 0.0
        failure = self._publish(order, client, canary)
        stall_s = time.perf_counter() - started
        return Publication(stall_s, failure, self._cast_s, self._device_copy_s, self._host_copy_s)

    def _publish(self, order: wire.Publish, client: RelayClient, canary: Callable[[], Canary | None]) -> str | None:
        """Why it failed, the same on every rank. Ranks agree before they write, so that none commits what another cannot."""
        slot, failure = self._begin(order, client)
        if agreed := first_failure(failure):
            if slot is not None:
                with contextlib.suppress(OSError, LaminarError):
                    client.abandon(order.version, agreed)
            return agreed
        assert slot is not None
        seen = canary()
        try:
            self._write(order, client, slot)
            client.commit(order.version, seen if self._rank == 0 else None)
        except (OSError, LaminarError) as error:
            failure = f"the relay failed: {error}"
        return first_failure(failure)

    def _begin(self, order: wire.Publish, client: RelayClient) -> tuple[memoryview | None, str | None]:
        """The slot, or why there is none: on another host there may be one."""
        try:
            slot = client.begin(
                order.version,
                self._manifest,
                self._rank,
                self._world_size,
                ranges=self._ranges,
                publication=order.publication,
                num_here=self._num_here,
                collector=order.collector,
            )
        except (OSError, LaminarError) as error:
            return None, f"the relay failed: {error}"
        return slot, None if slot is not None else "superseded by a newer publication: no slot of the relay is free"

    def _write(self, order: wire.Publish, client: RelayClient, slot: memoryview) -> None:
        """All pieces; a relay that sends them on is told now and then how many there are."""
        num_bytes = 0
        for number, piece in enumerate(self._pieces, start=1):
            self._copy(piece, slot)
            num_bytes += piece.end - piece.start
            if order.collector is not None and num_bytes >= WROTE_BYTES:
                client.wrote(order.version, number)
                num_bytes = 0

    def _copy(self, piece: Piece, slot: memoryview) -> None:
        target = torch.frombuffer(slot, dtype=piece.dtype, count=piece.local.numel(), offset=piece.start)
        if piece.local.device.type == "cuda":
            self._copy_from_device(piece, target.view(torch.uint8))
            return
        began = time.perf_counter()
        target.view(piece.local.shape).copy_(piece.local)
        self._host_copy_s += time.perf_counter() - began

    def _copy_from_device(self, piece: Piece, target: Tensor) -> None:
        """Through pinned memory. Casting before the copy halves what crosses the bus."""
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        began = time.perf_counter()
        source = piece.local.to(piece.dtype).contiguous().view(-1).view(torch.uint8)
        torch.cuda.synchronize(piece.local.device)
        self._cast_s += time.perf_counter() - began
        for start in range(0, source.numel(), STAGING_BYTES):
            part = source[start : start + STAGING_BYTES]
            staged = self._staging[: part.numel()]
            began = time.perf_counter()
            staged.copy_(part)
            copied = time.perf_counter()
            target[start : start + part.numel()].copy_(staged)
            self._device_copy_s += copied - began
            self._host_copy_s += time.perf_counter() - copied
