"""Filling a vLLM model with a weight version through vLLM's own loader, and asking that loader beforehand.

The model is asked with its parameters on torch's meta device, where a copy has a size and no bytes: `rehearse` runs the
model's `load_weights` and counts what it would read and write. So sharding, fused and renamed tensors are vLLM's to know.

`fill` uses vLLM's layer-by-layer reload: one layer at a time is loaded, processed (packed, quantised) as at the start,
and copied into the tensors that CUDA graphs know. Nothing larger than a layer exists twice.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_tensors,
    get_tensor_load_numel,
)

from laminar.workers.engines.vllm_plugin.slot import Refused

Tensors = Iterable[tuple[str, torch.Tensor]]


def rehearse(model: torch.nn.Module, tensors: Tensors) -> Counter[str]:
    """How many elements of each tensor this rank would read. Changes nothing.

    Raises Refused when vLLM's loader does not take a tensor, or would leave a parameter unfilled.
    """
    current, views = "", {}

    def fed() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for current, tensor in tensors:
            views[_storage(tensor)] = current, tensor
            yield current, tensor

    with _on_meta(model), _Traffic() as traffic:
        try:
            model.load_weights(fed())
        except Exception as error:  # loaders raise anything, and nothing has been touched
            reason = str(error) or f"{type(error).__name__} in its loader, as for a wrong shape"
            raise Refused(f"vLLM does not take {_describe(current, views)}: {reason}") from error
        _check_filled(model, traffic.written)
    return Counter({name: traffic.read[storage] for storage, (name, _) in views.items()})


def check_read(read: Counter[str], tensors: Tensors) -> None:
    """Raises Refused when all ranks together read less than the whole of a tensor: loaders cut what is too large."""
    for name, tensor in tensors:
        if read[name] < tensor.numel():
            raise Refused(
                f"vLLM would use {read[name]} of the {tensor.numel()} elements of {name} {list(tensor.shape)}: the "
                "weight version belongs to a model of another shape than the server's"
            )


@torch.no_grad()
def fill(model: torch.nn.Module, model_config: Any, tensors: Tensors) -> None:
    """Load a rehearsed version. If this raises, the weights are a mixture: `spoil` them."""
    tied = _tied_layers(model)
    initialize_layerwise_reload(model)
    model.load_weights(tensors)
    for layer in tied:
        _put_back(layer)
    finalize_layerwise_reload(model, model_config)
    for layer in tied:
        # vLLM processed the layer that owns the tensor; on a CPU this one holds a packed copy of the old one
        layer.quant_method.process_weights_after_loading(layer)


@torch.no_grad()
def spoil(model: torch.nn.Module) -> None:
    """Make weights that are a mixture unusable: whatever comes out of them is not a number, on every device."""
    for layer in model.modules():
        _put_back(layer)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))


def _check_filled(model: torch.nn.Module, written: Counter[int]) -> None:
    tied = _tied_layers(model)
    for prefix, layer in model.named_modules():
        if is_deferred_attention_layer(layer) or any(layer is other for other in tied):
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            found, wanted = written[_storage(parameter)], get_tensor_load_numel(parameter)
            if found < wanted:
                raise Refused(
                    f"the weight version lacks tensors: it would fill {found} of the {wanted} elements of vLLM's "
                    f"{prefix}.{name}"
                )


def _tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers whose parameters are all another, earlier layer's: a head that is tied to the embedding."""
    owners: dict[int, torch.nn.Module] = {}
    tied = []
    for layer in model.modules():
        owners_here = [owners.setdefault(id(parameter), layer) for parameter in _kernel_parameters(layer)]
        if owners_here and all(owner is not layer for owner in owners_here):
            tied.append(layer)
    return tied


def _kernel_parameters(layer: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters that the layer runs with, also while it is on the meta device."""
    aside = get_layerwise_info(layer).kernel_tensors
    return list((aside or get_layer_params_buffers(layer))[0].values())


@contextlib.contextmanager
def _on_meta(model: torch.nn.Module) -> Iterator[None]:
    """The model as its loader knows it, without bytes; afterwards it has its own tensors again, the very same."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, info)
        for tensor in get_layer_tensors(layer).values():
            tensor.weight_loader = _get_original_loader(tensor)  # a reload leaves its own loader on them
    try:
        yield
    finally:
        for layer in model.modules():
            _put_back(layer)


def _put_back(layer: torch.nn.Module) -> None:
    info = get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        _place_kernel_tensors(layer, info)
    info.reset()


class _Traffic(TorchDispatchMode):
    """Counts the elements that loaders copy, by storage; what a loader computes from a tensor counts as that tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[int] = Counter()
        self.written: Counter[int] = Counter()
        self._origin: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        """Keeps derived tensors alive: a storage that is freed gives its identity to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "fill_", "zero_"):
            self.written[_storage(args[0])] += args[0].numel()
            if name == "copy_":
                self.read[self._source(args[1])] += args[1].numel()
        elif isinstance(result, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            self._origin[_storage(result)] = self._source(args[0])
            self._kept.append(result)
        return result

    def _source(self, tensor: torch.Tensor) -> int:
        storage = _storage(tensor)
        return self._origin.get(storage, storage)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _describe(name: str, views: dict[int, tuple[str, torch.Tensor]]) -> str:
    shapes = {known: tuple(tensor.shape) for known, tensor in views.values()}
    return f"{name} {list(shapes.get(name, ()))}"
