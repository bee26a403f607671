"""The policy: any Hugging Face causal LM, sharded with FSDP2, that gives log-probs of response tokens.

Invariants:
* Master weights are float32; with precision bf16 the computation is bfloat16 and gradients are reduced in float32.
* Logits exist at response positions only: a hook in front of the output embedding picks the hidden states, so that whatever
  the model does to its logits (soft-capping, scaling) still happens.
* A parameter is a contiguous range of rows per rank (`Shard(0)`), possibly empty; `LocalParameter` names that range.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from laminar.errors import ConfigError, StartError
from laminar.rl.losses import token_logprobs
from laminar.rl.packing import Lengths, MicroBatch, Tokens, collate, plan_lines
from laminar.workers.canary import Canary, canary_tokens

LAYER_PARAMETERS_MIN = 1 << 20
"""Smaller layers stay in the root's FSDP unit: their all-gathers would be latency only."""
DEFER_REDUCTION_PARAMETERS_MAX = 1 << 29
"""Up to this size gradients are reduced once per update; above, unsharded float32 gradients (2 GB here) would not be kept."""
PACKING_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest log-prob difference between packed and unpacked that rounding explains; a wrong mask gives more."""


class LocalParameter(NamedTuple):
    """This rank's rows of one parameter."""

    name: str
    """Hugging Face's name."""
    parameter: nn.Parameter
    """DTensor (Shard(0)) under FSDP, else a plain tensor."""
    local: Tensor
    """float32 rows of this rank, sharing memory with `parameter`; may be empty."""
    first_row: int
    """Of `local` in the whole parameter."""


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """dtype of `trainer.precision` on this device."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def load_model(path: str, *, activation_checkpointing: bool = False) -> PreTrainedModel:
    """The model at `path` on the CPU in float32, without dropout. Raises StartError when there is none.

    Attention is transformers' default: sdpa, or eager for the few models that cannot (those cannot be packed either).
    """
    if not (Path(path) / "config.json").is_file():
        raise StartError(f"model.path = {path!r}: no config.json there; name a directory with a Hugging Face causal LM")
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = _without_dropout(AutoConfig.from_pretrained(path))
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise StartError(f"model.path = {path!r} cannot be loaded as a causal LM: {error}") from error
    model.config.use_cache = False
    if activation_checkpointing:
        # transformers 5.24 renamed it and warns about the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train()  # checkpointing is off in eval mode; without dropout the modes are otherwise equal


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """The log-probs of a step must be those of its weights, not of a random sub-network."""
    for key, value in vars(config).items():
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and ("dropout" in key or key.endswith("pdrop"))
        ):
            setattr(config, key, 0.0)
    return config


def shard_model(
    model: PreTrainedModel,
    *,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    layer_parameters_min: int = LAYER_PARAMETERS_MIN,
) -> None:
    """Shard in place over all ranks, layer by layer and the rest, and move to `device`.

    One rank computing in float32 needs neither shards nor casts and keeps the plain model. Needs the process group otherwise.
    """
    if world_size == 1 and dtype is torch.float32:
        model.to(device)
        return
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (world_size,))}
    if dtype is not torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layer_names = set(model._no_split_modules or ())
    for module in list(model.modules()):
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        if type(module).__name__ in layer_names and num_parameters >= layer_parameters_min:
            fully_shard(module, **options)
    fully_shard(model, **options)
    model.to(device)


def local_parameters(model: nn.Module) -> list[LocalParameter]:
    """This rank's part of every parameter, each storage once (a tied output embedding is its input embedding)."""
    return [_local(name, parameter) for name, parameter in model.named_parameters()]


def _local(name: str, parameter: nn.Parameter) -> LocalParameter:
    data = parameter.detach()
    if not isinstance(data, DTensor):
        return LocalParameter(name, parameter, data, 0)
    _, offset = compute_local_shape_and_global_offset(data.shape, data.device_mesh, data.placements)
    local = data.to_local()
    return LocalParameter(name, parameter, local, offset[0] if local.numel() else 0)


class Policy:
    """Log-probs of a model that `shard_model` has placed."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, device: torch.device) -> None:
        self.model = model
        self._temperature = temperature
        self._device = device
        self._index: Tensor | None = None
        self._fsdp = hasattr(model, "set_requires_gradient_sync")
        self._defer = sum(parameter.numel() for parameter in model.parameters()) <= DEFER_REDUCTION_PARAMETERS_MAX
        head = model.get_output_embeddings()
        if head is None:
            raise StartError(
                f"{type(model).__name__} has no output embedding: it is not a causal LM that can be trained"
            )
        head.register_forward_pre_hook(self._select)

    def _select(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        assert self._index is not None, "call the policy, not the model"
        return (inputs[0].flatten(0, 1).index_select(0, self._index),)

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding, as its configuration says."""
        return int(self.model.config.get_text_config().vocab_size)

    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """(log-probs with gradient, entropies without), float32 (N,) for the N response tokens of `batch`, on the device.

        `temperature` None: that of the rollouts.
        """
        self._index = batch.index
        output = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
        )
        self._index = None
        return token_logprobs(output.logits, batch.targets, self._temperature if temperature is None else temperature)

    @torch.no_grad()
    def frozen_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs (N,) without a graph."""
        return self.logprobs(batch)[0]

    @torch.no_grad()
    def canary(self) -> Canary:
        """What the present weights say of the fixed sequence; every rank must call it."""
        tokens = canary_tokens(self.vocab_size)
        row = Tokens(
            np.array(tokens[:1], np.int32),
            np.array(tokens[1:], np.int32),
            np.zeros(len(tokens) - 1, np.float32),
            np.ones(len(tokens) - 1, bool),
        )
        batch = collate(((0,),), {0: row}).to(self._device)
        logprobs, _ = self.logprobs(batch, temperature=1.0)
        self.drop_gathered()
        return Canary(tokens, logprobs.tolist())

    def drop_gathered(self) -> None:
        """Forget weights gathered by forward passes that no backward pass followed; the shards may change after this."""
        if self._fsdp:
            self.model.reshard()

    def reduce_gradients(self, is_last: bool) -> None:
        """Say before a backward pass whether it is the last one of an update."""
        if self._fsdp and self._defer:
            self.model.set_requires_gradient_sync(is_last)

    def check_packing(self, dtype: torch.dtype, remedy: str) -> None:
        """Raises ConfigError, naming the remedy, if parts of a line see one another in this model (recurrent layers, own masks).

        Compares two siblings packed and unpacked; every rank must call it.
        """
        tokens = {0: _sample_tokens([1, 2, 3], [4, 5, 6]), 1: _sample_tokens([1, 2, 3], [7, 8])}
        lengths = [Lengths(3, 3), Lengths(3, 2)]
        values = []
        for pack in (True, False):
            lines = tuple(plan_lines([[0, 1]], lengths, pack=pack, tokens_max=64))
            values.append(self.frozen_logprobs(collate(lines, tokens).to(self._device)))
        self.drop_gathered()
        difference = (values[0] - values[1]).abs().max().item()
        if not difference <= PACKING_TOLERANCE[dtype]:
            raise ConfigError(
                f"{type(self.model).__name__} gives other log-probs where siblings or contexts share a line (difference "
                f"{difference:.3g}): set {remedy} for this model"
            )

    def attention_window(self) -> int:
        """Longest sequence that the model attends to as a whole, tokens; 0 = no limit."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or 0)


def _sample_tokens(prompt: list[int], response: list[int]) -> Tokens:
    count = len(response)
    return Tokens(
        np.array(prompt, np.int32), np.array(response, np.int32), np.zeros(count, np.float32), np.ones(count, bool)
    )
