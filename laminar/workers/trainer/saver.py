"""Checkpoints while training goes on: a copy in host memory, and a thread that writes it.

    train loop:  begin ── copy (the stall) ──► next step …
    writer:               └─► state, export, digests ──► on disk ──► final name ──► `ended`

Invariants:
* What is written is the copy: training may change everything as soon as `begin` returns.
* One at a time: `begin` waits for the one before (the core does not ask for two at once).
* `ended` is called exactly once for each `begin`, on every rank, whatever happens.
* The writers of all ranks talk in process groups of their own, so that their messages never mix with training's.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laminar.workers.trainer.checkpoint import Groups, Meta, Source, rng_state, write
from laminar.workers.trainer.collective import COLLECTIVE_TIMEOUT_S, gather_bytes
from laminar.workers.trainer.model import LocalParameter
from laminar.workers.trainer.optimizer import Optimizer


class Saved(NamedTuple):
    """How a checkpoint ended. `failure` is the same on every rank, unless one went away; seconds are of this one."""

    failure: str | None
    """Why there is none; None = it is complete on disk."""
    stall_s: float
    """How long training waited for it."""
    seconds: float
    """From the order until it was on disk."""


class HostCopy:
    """This rank's weights and moments in host memory (pinned beside a GPU), 12 bytes for each of its parameters; made once."""

    def __init__(self, parameters: list[LocalParameter], optimizer: Optimizer, group: dist.ProcessGroup) -> None:
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._mesh = DeviceMesh.from_group(group, "cpu")
        self._state: dict[str, Any] = {}
        self._is_on_gpu = parameters[0].local.device.type == "cuda"
        for part in parameters:
            self._add(f"model.{part.name}", part, part.local)
        for part in optimizer.trained:
            first, second = optimizer.moments(part)
            self._add(f"exp_avg.{part.name}", part, first)
            self._add(f"exp_avg_sq.{part.name}", part, second)

    def _add(self, name: str, part: LocalParameter, source: Tensor) -> None:
        target = torch.empty(source.shape, dtype=source.dtype).fill_(0)  # touched now: first touch is slow
        if self._is_on_gpu and target.numel():
            _pin(target)
        self._sources.append(source)
        self._targets.append(target)
        whole = part.parameter.detach()
        is_sharded = isinstance(whole, DTensor)
        self._state[name] = self._shard(target, whole) if is_sharded else target

    def _shard(self, target: Tensor, whole: DTensor) -> DTensor:
        return DTensor.from_local(
            target, self._mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    @torch.no_grad()
    def take(self) -> dict[str, Any]:
        """The state of now, by its names in a checkpoint; the one taken before is overwritten."""
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source, non_blocking=self._is_on_gpu)
        if self._is_on_gpu:
            torch.cuda.synchronize()
        return self._state | rng_state()


def _pin(target: Tensor) -> None:
    """Just these bytes: `pin_memory` takes up to twice as many. What cannot be pinned is copied more slowly, no more."""
    portable = 1  # cudaHostRegisterPortable
    torch.cuda.cudart().cudaHostRegister(target.data_ptr(), target.numel() * target.element_size(), portable)


class Saver:
    """Writes checkpoints; every rank has one and calls it with the same arguments."""

    def __init__(self, source: Source, parameters: list[LocalParameter], optimizer: Optimizer) -> None:
        """Collective: makes the groups."""
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        self._groups = Groups(
            all=dist.new_group(backend="gloo", timeout=timeout),
            first=dist.new_group([0], backend="gloo", timeout=timeout),
        )
        self._source, self._optimizer = source, optimizer
        self._copy = HostCopy(parameters, optimizer, self._groups.all)
        self._launch = gather_bytes(os.urandom(4), self._groups.all)[0].hex()
        self._writer: threading.Thread | None = None

    def begin(self, path: Path, *, step: int, data_state: bytes, ended: Callable[[Saved], None]) -> None:
        """Copy the present state, have it written, and return. `ended` is called from the thread that writes."""
        began = time.perf_counter()
        self.wait()
        meta = Meta(
            step=step,
            num_updates=self._optimizer.num_updates,
            num_skipped=self._optimizer.num_skipped,
            world_size=dist.get_world_size(),
        )
        state = self._copy.take()
        stall_s = time.perf_counter() - began
        # Named after this launch: one that was given up, but lives, writes elsewhere.
        staging = path.with_name(f"{path.name}.writing-{self._launch}")

        def run() -> None:
            failure = None
            try:
                write(path, staging, state, meta, data_state, self._source, self._groups)
            except Exception as error:  # noqa: BLE001 - whatever it is, this checkpoint has ended and has to be answered for
                failure = str(error) or type(error).__name__
            ended(Saved(failure, stall_s, time.perf_counter() - began))

        self._writer = threading.Thread(target=run, name=f"checkpoint of step {step}", daemon=True)
        self._writer.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the checkpoint under way, if any, has ended, or the time is over."""
        if self._writer is not None:
            self._writer.join(timeout_s)
