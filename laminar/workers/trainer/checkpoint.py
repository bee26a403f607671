"""Checkpoints: everything to go on exactly, and a Hugging Face model beside it.

    <path>/meta.json         step and counters
    <path>/data_state.bin    the controller's bytes, as given
    <path>/state/            torch.distributed.checkpoint: weights, AdamW moments, RNG state per rank
    <path>/hf/               config, tokenizer, model.safetensors: `from_pretrained` loads it

Invariants:
* A directory under its final name is complete: all is written to `<path>.tmp` and renamed after every rank has finished.
* Weights and moments load into any number of ranks; RNG states into the ranks that wrote them.
* Laminar pickles nothing; torch.distributed.checkpoint keeps its own index as a pickle (`state/.metadata`), so restore from
  directories that you trust.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from laminar.errors import LaminarError, StartError
from laminar.workers.trainer.collective import first_failure
from laminar.workers.trainer.model import LocalParameter
from laminar.workers.trainer.optimizer import Optimizer

FORMAT = 1
_TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


class CheckpointError(LaminarError):
    """A checkpoint could not be written; nothing usable was left."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """meta.json"""

    format: int = FORMAT
    step: int
    num_updates: int
    num_skipped: int
    world_size: int


def save(
    path: Path, *, step: int, model: PreTrainedModel, source: Path, parameters: list[LocalParameter], optimizer: Optimizer,
    data_state: bytes,
) -> None:  # fmt: skip
    """Write a checkpoint; every rank calls it. `source`: the directory the model and its tokenizer came from.

    An older checkpoint of the same name is replaced. Raises CheckpointError on every rank when one failed.
    """
    rank, staging = dist.get_rank(), path.with_name(path.name + ".tmp")
    _agree(lambda: _make_empty(staging) if rank == 0 else None)
    meta = Meta(
        step=step,
        num_updates=optimizer.num_updates,
        num_skipped=optimizer.num_skipped,
        world_size=dist.get_world_size(),
    )
    _agree(lambda: dcp.save(_state(parameters, optimizer), checkpoint_id=staging / "state"))
    weights = _gather_weights(parameters, model, source)
    _agree(lambda: _write_rest(staging, meta, data_state, model, source, weights) if rank == 0 else None)
    _agree(lambda: _publish_directory(staging, path) if rank == 0 else None)


def restore(path: Path, *, parameters: list[LocalParameter], optimizer: Optimizer) -> tuple[int, bytes]:
    """Load weights, moments, counters and this rank's RNG in place; (step, data_state). Raises StartError."""
    try:
        meta = msgspec.json.decode((path / "meta.json").read_bytes(), type=Meta)
        data_state = (path / "data_state.bin").read_bytes()
        state = _state(parameters, optimizer)
        known = dcp.FileSystemReader(path / "state").read_metadata().state_dict_metadata
        own_rng = [key for key in state if key.startswith("rng.")]
        for key in own_rng:
            if key not in known:
                del state[key]
        dcp.load(state, checkpoint_id=path / "state")
    except (OSError, msgspec.MsgspecError, CheckpointException, RuntimeError, ValueError) as error:
        raise StartError(f"cannot resume from {path}: {error}; name a complete checkpoint of the same model") from error
    if meta.format != FORMAT:
        raise StartError(f"{path} has checkpoint format {meta.format}, this Laminar reads {FORMAT}")
    optimizer.restore_counts(meta.num_updates, meta.num_skipped)
    _set_rng(state)
    return meta.step, data_state


def _state(parameters: list[LocalParameter], optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{part.name}": _like(part, part.local) for part in parameters}
    for part in optimizer.trained:
        first, second = optimizer.moments(part)
        state[f"exp_avg.{part.name}"] = _like(part, first)
        state[f"exp_avg_sq.{part.name}"] = _like(part, second)
    rank = dist.get_rank()
    state[f"rng.cpu.{rank}"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return state


def _like(part: LocalParameter, local: Tensor) -> Tensor:
    """`local` rows, sharded as the parameter is, sharing memory."""
    whole = part.parameter.detach()
    if not isinstance(whole, DTensor):
        return local
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _set_rng(state: dict[str, Any]) -> None:
    for key, value in state.items():
        if key.startswith("rng.cpu."):
            torch.set_rng_state(value)
        elif key.startswith("rng.cuda.") and torch.cuda.is_available():
            torch.cuda.set_rng_state(value)


def _gather_weights(parameters: list[LocalParameter], model: PreTrainedModel, source: Path) -> dict[str, Tensor]:
    """Whole weights on rank 0, in the dtype of the source model, one parameter at a time; nothing on the others."""
    dtype = _source_dtype(source)
    weights: dict[str, Tensor] = {}
    for part in parameters:
        data = part.parameter.detach()
        whole = data.full_tensor() if isinstance(data, DTensor) else data
        if dist.get_rank() == 0:
            weights[part.name] = whole.to("cpu", dtype, copy=True)
    return weights


def _source_dtype(source: Path) -> torch.dtype:
    config = json.loads((source / "config.json").read_text())
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), torch.float32)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _write_rest(
    staging: Path, meta: Meta, data_state: bytes, model: PreTrainedModel, source: Path, weights: dict[str, Tensor]
) -> None:
    hf = staging / "hf"
    model.save_pretrained(hf, state_dict=weights)
    _fix_config(hf / "config.json", source)
    for file in sorted(source.iterdir()):
        if (
            file.suffix in _TOKENIZER_SUFFIXES
            and not file.name.endswith(".index.json")
            and not (hf / file.name).exists()
        ):
            shutil.copyfile(file, hf / file.name)
    (staging / "data_state.bin").write_bytes(data_state)
    (staging / "meta.json").write_bytes(msgspec.json.encode(meta))


def _fix_config(path: Path, source: Path) -> None:
    """`save_pretrained` describes the trainer's model (float32, no cache); the export is the source's model with new weights."""
    original = (source / "config.json").read_text()
    json.loads(original)
    path.write_text(original)


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _publish_directory(staging: Path, path: Path) -> None:
    for file in staging.rglob("*"):
        _sync(file)
    _sync(staging)
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    staging.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _agree(part: Any) -> None:
    """Run this rank's part; raises CheckpointError on all ranks when it failed on one."""
    reason: str | None = None
    try:
        part()
    except (OSError, CheckpointException, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    if failure := first_failure(reason):
        raise CheckpointError(f"no checkpoint was written ({failure})")
