"""Replacing a model's parameters, in place, by those of a weight version.

Invariant: nothing is written before every name, shape and dtype of the version was checked against the model.
"""

import torch

from laminar.workers.engines.base import WeightsBroken
from laminar.workers.relay.manifest import Snapshot

NAMES_SHOWN = 3  # a wrong model mismatches everywhere; the first few names say which


def replace_weights(parameters: dict[str, torch.Tensor], snapshot: Snapshot) -> None:
    """Check, then copy. Raises ValueError as `checked_tensors` does, WeightsBroken when the copy fails half-way."""
    tensors = checked_tensors(parameters, snapshot)
    try:
        copy_weights(parameters, tensors)
    except Exception as error:
        raise WeightsBroken(
            f"the weights broke half-way ({type(error).__name__}: {error}): restart the worker"
        ) from error


def checked_tensors(parameters: dict[str, torch.Tensor], snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Views of all tensors of a version that fits the model, by name.

    Raises ValueError naming the tensors when the version does not have exactly these parameters, or too few bytes.
    """
    specs = {spec.name: spec for spec in snapshot.manifest.tensors}
    missing = [name for name in parameters if name not in specs]
    if missing:
        raise ValueError(f"the weight version lacks {_some(missing)}: it belongs to another model")
    unknown = [name for name in specs if name not in parameters]
    if unknown:
        raise ValueError(f"the model has no parameter {_some(unknown)}, which the weight version holds")
    for name, parameter in parameters.items():
        spec, dtype = specs[name], str(parameter.dtype).removeprefix("torch.")
        if tuple(spec.shape) != tuple(parameter.shape):
            raise ValueError(
                f"{name} has shape {tuple(spec.shape)} in the weight version, {tuple(parameter.shape)} here"
            )
        if spec.dtype != dtype:
            raise ValueError(
                f"{name} is {spec.dtype} in the weight version and {dtype} in this engine: "
                "start engine and publication with the same dtype"
            )
    try:
        return dict(snapshot.tensors())
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the weight version's buffer does not hold the tensors of its manifest: {error}") from error


@torch.no_grad()
def copy_weights(parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """Copy checked tensors into the parameters. Tied parameters are one tensor and need one entry."""
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def _some(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
