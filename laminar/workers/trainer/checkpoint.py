"""Checkpoints: everything to go on exactly, and a Hugging Face model beside it. `laminar.checkpoints` has the directory's rules.

    <path>/meta.json         step and counters
    <path>/data_state.bin    the controller's bytes, as given
    <path>/state/            torch.distributed.checkpoint: weights, AdamW moments, RNG state per rank
    <path>/hf/               config, tokenizer, model.safetensors: `from_pretrained` loads it
    <path>/manifest.json     size and digest of every other file

Invariants:
* Every rank digests the files that it wrote, read again from the disk's cache; rank 0 names the directory when all have.
* Weights and moments load into any number of ranks; RNG states into the ranks that wrote them.
* All ranks agree on which checkpoint they restore: the newest whose bytes are those that were written.
* Laminar pickles nothing; torch.distributed.checkpoint keeps its own index as a pickle (`state/.metadata`), so restore from
  directories that you trust.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from laminar import checkpoints
from laminar.checkpoints import DATA_STATE, EXPORT, META, FileDigest, UnreadableError
from laminar.errors import LaminarError, StartError
from laminar.workers.trainer.collective import first_failure, gather_bytes
from laminar.workers.trainer.model import LocalParameter
from laminar.workers.trainer.optimizer import Optimizer

STATE = "state"
EXPORT_BYTES = 4 << 30  # of float32 weights read back at once
_TOKENIZER_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}

T = TypeVar("T")


class CheckpointError(LaminarError):
    """A checkpoint could not be written; nothing usable was left."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """meta.json"""

    format: int = checkpoints.FORMAT
    step: int
    num_updates: int
    num_skipped: int
    world_size: int


class Groups(NamedTuple):
    """gloo groups of those who write checkpoints, apart from training's: both talk at the same time."""

    all: dist.ProcessGroup
    first: dist.ProcessGroup
    """Rank 0 alone."""


class Source(NamedTuple):
    """What the export is made of besides weights."""

    model: PreTrainedModel
    """Only looked at for names and configuration: its weights change meanwhile."""
    directory: Path
    """Where the model and its tokenizer came from."""
    shapes: dict[str, torch.Size]


class Restored(NamedTuple):
    """What was restored besides weights, moments and RNG."""

    step: int
    data_state: bytes
    damaged: list[str]
    """Newer checkpoints that were passed over, each with what is wrong with it."""


# ---- writing -----------------------------------------------------------------------------------------------


def write(
    path: Path, staging: Path, state: dict[str, Any], meta: Meta, data_state: bytes, source: Source, groups: Groups
) -> None:
    """Write a checkpoint by way of `staging`; all ranks call it, with what no longer changes.

    An older checkpoint of the same name is replaced. Raises CheckpointError on every rank when one failed; then nothing is left.
    """
    try:
        _write(path, staging, state, meta, data_state, source, groups)
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)  # the disk may be full
        raise


def _write(
    path: Path, staging: Path, state: dict[str, Any], meta: Meta, data_state: bytes, source: Source, groups: Groups
) -> None:
    rank, group = dist.get_rank(), groups.all
    _agree(lambda: _make_room(staging) if rank == 0 else None, group)
    _agree(lambda: dcp.save(state, checkpoint_id=staging / STATE, process_group=group), group)
    if rank == 0:
        files = _agree(lambda: _write_rest(staging, meta, data_state, source, groups.first), group)
    else:
        files = _agree(lambda: _digests(staging, (staging / STATE).glob(f"__{rank}_*")), group)
    parts = gather_bytes(msgspec.json.encode(files), group)
    _agree(lambda: _complete(staging, path, parts) if rank == 0 else None, group)


def _make_room(staging: Path) -> None:
    checkpoints.sweep(staging.parent)
    staging.mkdir(parents=True)


def _write_rest(
    staging: Path, meta: Meta, data_state: bytes, source: Source, first: dist.ProcessGroup
) -> dict[str, FileDigest]:
    """Rank 0's files; the digests of these and of its part of the state."""
    _export(staging, source, first)
    (staging / DATA_STATE).write_bytes(data_state)
    (staging / META).write_bytes(msgspec.json.encode(meta))
    own = [file for file in staging.rglob("*") if file.is_file() and not _is_of_another_rank(file)]
    return _digests(staging, own)


def _is_of_another_rank(file: Path) -> bool:
    return file.parent.name == STATE and file.name.startswith("__") and not file.name.startswith("__0_")


def _digests(staging: Path, files: Iterator[Path] | list[Path]) -> dict[str, FileDigest]:
    return {file.relative_to(staging).as_posix(): checkpoints.digest(file) for file in files}


def _complete(staging: Path, path: Path, parts: list[bytes]) -> None:
    """All is written: make it last, then give it its name."""
    files: dict[str, FileDigest] = {}
    for part in parts:
        files |= msgspec.json.decode(part, type=dict[str, FileDigest])
    checkpoints.write_manifest(staging, files)
    for file in staging.rglob("*"):
        checkpoints.sync(file)
    checkpoints.sync(staging)
    checkpoints.publish(staging, path)


def _export(staging: Path, source: Source, first: dist.ProcessGroup) -> None:
    """A Hugging Face model from the state on disk: no rank has to send its weights, and training does not wait."""
    hf = staging / EXPORT
    weights = _read_weights(staging / STATE, source, first)
    source.model.save_pretrained(hf, state_dict=weights)
    _fix_config(hf / "config.json", source.directory)
    for file in sorted(source.directory.iterdir()):
        if (
            file.suffix in _TOKENIZER_SUFFIXES
            and not file.name.endswith(".index.json")
            and not (hf / file.name).exists()
        ):
            shutil.copyfile(file, hf / file.name)


def _read_weights(state: Path, source: Source, first: dist.ProcessGroup) -> dict[str, Tensor]:
    """Whole weights in the dtype of the source model, some at a time."""
    dtype = _source_dtype(source.directory)
    weights: dict[str, Tensor] = {}
    for names in _in_parts(source.shapes):
        part: dict[str, Any] = {f"model.{name}": torch.empty(source.shapes[name]) for name in names}
        dcp.load(part, checkpoint_id=state, process_group=first)
        weights |= {name: part[f"model.{name}"].to(dtype) for name in names}
    return weights


def _in_parts(shapes: dict[str, torch.Size]) -> Iterator[list[str]]:
    part, num_bytes = [], 0
    for name, shape in shapes.items():
        part.append(name)
        num_bytes += 4 * shape.numel()
        if num_bytes >= EXPORT_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _source_dtype(directory: Path) -> torch.dtype:
    config = json.loads((directory / "config.json").read_text())
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), torch.float32)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _fix_config(path: Path, directory: Path) -> None:
    """`save_pretrained` describes the trainer's model (float32, no cache); the export is the source's model with new weights."""
    original = (directory / "config.json").read_text()
    json.loads(original)
    path.write_text(original)


def _agree(part: Callable[[], T], group: dist.ProcessGroup) -> T:
    """This rank's part; raises CheckpointError on all ranks when it failed on one."""
    result, reason = None, None
    try:
        result = part()
    except (OSError, CheckpointException, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    if failure := first_failure(reason, group):
        raise CheckpointError(f"no checkpoint was written ({failure})")
    return result  # type: ignore[return-value]


# ---- restoring ---------------------------------------------------------------------------------------------


def restore(path: Path, *, parameters: list[LocalParameter], optimizer: Optimizer) -> Restored:
    """Load weights, moments, counters and this rank's RNG in place: of `path`, or of the newest undamaged checkpoint before it.

    Damaged ones get another name. Raises StartError, on all ranks, when there is none that can be loaded.
    """
    if dist.get_rank() == 0:
        checkpoints.sweep(path.parent)
    passed: dict[Path, str] = {}
    for candidate in checkpoints.until(path):
        what = _damage(candidate)
        if what is None:
            meta = _load(candidate, parameters, optimizer)
            if dist.get_rank() == 0:
                _set_aside(list(passed))
            damaged = [f"{other.name}: {what}" for other, what in passed.items()]
            return Restored(meta.step, (candidate / DATA_STATE).read_bytes(), damaged)
        passed[candidate] = what
    told = "; ".join(f"{other.name}: {what}" for other, what in passed.items())
    raise StartError(f"cannot resume from {path}: no checkpoint there is undamaged: {told}")


def _damage(path: Path) -> str | None:
    """What is wrong with it, the same on all ranks; None = nothing. Each rank looks at its share of the files."""
    damage, unreadable = "", ""
    try:
        manifest = checkpoints.read_manifest(path)
        if isinstance(manifest, str):
            damage = manifest
        else:
            needed = sorted(name for name in manifest.files if not name.startswith(f"{EXPORT}/"))
            damage = checkpoints.damage(path, needed[dist.get_rank() :: dist.get_world_size()], manifest)
    except UnreadableError as error:
        unreadable = str(error)
    if failure := first_failure(unreadable or None):
        raise StartError(f"cannot resume from {path}: {failure}")
    return first_failure(damage or None)


def _load(path: Path, parameters: list[LocalParameter], optimizer: Optimizer) -> Meta:
    try:
        meta = msgspec.json.decode((path / META).read_bytes(), type=Meta)
        state = state_of(parameters, optimizer)
        known = dcp.FileSystemReader(path / STATE).read_metadata().state_dict_metadata
        for key in [key for key in state if key.startswith("rng.") and key not in known]:
            del state[key]
        dcp.load(state, checkpoint_id=path / STATE)
    except (OSError, msgspec.MsgspecError, CheckpointException, RuntimeError, ValueError) as error:
        raise StartError(f"cannot resume from {path}: {error}; name a complete checkpoint of the same model") from error
    optimizer.restore_counts(meta.num_updates, meta.num_skipped)
    _set_rng(state)
    return meta


def _set_aside(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            checkpoints.set_aside(path)


def state_of(parameters: list[LocalParameter], optimizer: Optimizer) -> dict[str, Any]:
    """What is saved, by its name there, sharing memory with what is trained."""
    state: dict[str, Any] = {f"model.{part.name}": _like(part, part.local) for part in parameters}
    for part in optimizer.trained:
        first, second = optimizer.moments(part)
        state[f"exp_avg.{part.name}"] = _like(part, first)
        state[f"exp_avg_sq.{part.name}"] = _like(part, second)
    return state | rng_state()


def rng_state() -> dict[str, Tensor]:
    """This rank's."""
    rank = dist.get_rank()
    state = {f"rng.cpu.{rank}": torch.get_rng_state()}
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
