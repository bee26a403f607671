"""A Hugging Face causal LM that prefills and decodes a compact batch of rows of different lengths.

Nothing here depends on one architecture: the model gets `position_ids`, a 4D attention mask and a `RowCache`. What
that cannot express (recurrent or chunked layers, ALiBi) is refused at load, by the layer types in the configuration
and by a self-check that compares a padded prefill and decode steps with plain forwards.
"""

import inspect
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from laminar import roofline
from laminar.errors import StartError
from laminar.workers.engines.kvcache import RowCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Mean absolute difference of log-probs in the self-check. Rounding gives ~1e-6 (float32) and ~1e-2 (16 bit).
CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
CHECK_LENGTHS = (9, 5)
CHECK_STEPS = 3


class CausalLM:
    """Model, device and KV rows. All methods run in one thread, under `torch.inference_mode`."""

    def __init__(self, model_path: str, num_rows_max: int, context_tokens_max: int, dtype: str) -> None:
        """Load from a directory; `context_tokens_max` 0 = what the model was made for. Raises StartError."""
        if dtype not in DTYPES:
            raise StartError(f"engine dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = _load(model_path, DTYPES[dtype]).to(self.device)
        config = self._model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.context_tokens_max = _context_limit(config, context_tokens_max, model_path)
        self.parameters = dict(self._model.named_parameters())
        """Each storage once, under the name a weight manifest uses."""
        self._windows = _attention_windows(config, model_path)
        self._dtype = DTYPES[dtype]
        arguments = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        if self._cache_argument not in arguments or "position_ids" not in arguments:
            raise StartError(_unsupported(model_path, "its forward takes no key/value cache or no position ids"))
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self.cache = RowCache(num_rows_max, self.context_tokens_max)
        with torch.inference_mode():
            self._check(model_path, CHECK_TOLERANCE[dtype])

    def num_requests_memory_bound(self) -> int:
        """B by the roofline of the device; 0 on a CPU, an unknown GPU, or with weights that are not 16 bits wide."""
        if self.device.type != "cuda" or self._dtype.itemsize != roofline.BYTES_16_BIT:
            return 0
        hardware = roofline.known(torch.cuda.get_device_name(self.device))
        return roofline.requests_memory_bound(hardware) if hardware else 0

    def prefill(self, sequences: list[list[int]], copies: list[int]) -> torch.Tensor:
        """Append rows to the batch: new row i holds sequences[copies[i]]. Returns next-token logits [new rows, V]."""
        lengths = [len(sequence) for sequence in sequences]
        longest = max(lengths)
        ids = np.zeros((len(sequences), longest), np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, longest - len(sequence) :] = sequence
        padding = longest - np.array(lengths)
        position_ids = np.maximum(np.arange(longest) - padding[:, None], 0)
        padding_t = self._tensor(padding) if padding.any() else None
        copies_t = self._tensor(np.array(copies))
        self.cache.begin_prefill(padding_t, copies_t, longest)
        mask = None if padding_t is None else self._masks(*_prefill_pattern(padding_t, longest))
        logits = self._forward(self._tensor(ids), self._tensor(position_ids), mask)
        self.cache.end_prefill([lengths[index] for index in copies])
        return logits[copies_t]

    def decode(self, tokens: list[int]) -> torch.Tensor:
        """Append one token to each row. Returns next-token logits [rows, V]."""
        positions = self._tensor(self.cache.lengths[: self.cache.num_rows].copy())
        num_columns = self.cache.begin_decode(positions)
        distance = (positions[:, None] - torch.arange(num_columns, device=self.device))[:, None]
        mask = self._masks(distance, distance >= 0)
        logits = self._forward(self._tensor(np.array(tokens)[:, None]), positions[:, None], mask)
        self.cache.end_decode()
        return logits

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of `tokens[1:]`, each given those before it, at temperature 1; uses no row."""
        ids = self._tensor(np.array([tokens]))
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()

    def _forward(
        self, ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | dict[str, torch.Tensor] | None
    ) -> torch.Tensor:
        outputs = self._model(
            input_ids=ids,
            position_ids=position_ids,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: self.cache},
            **self._last_only,
        )
        return outputs.logits[:, -1]

    def _masks(self, distance: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [batch, 1, query, key] from query - key distances and what is allowed, both [batch, query, key].

        One mask where all layers attend alike, else one per layer type, as models with mixed layers take them.
        """
        low = torch.finfo(self._dtype).min
        masks = {}
        for kind, window in self._windows.items():
            seen = allowed if window is None else allowed & (distance < window)
            masks[kind] = torch.zeros(seen.shape, dtype=self._dtype, device=self.device).masked_fill_(~seen, low)[
                :, None
            ]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _check(self, model_path: str, tolerance: float) -> None:
        """Compare this class's path with one plain forward per sequence. Raises StartError when they disagree."""
        random = np.random.default_rng(0)
        limit = self.context_tokens_max
        steps = min(CHECK_STEPS, limit - 2)
        if steps < 1 or len(self.cache.lengths) < 2:
            return
        lengths = [min(length, limit - steps) for length in CHECK_LENGTHS]
        sequences = [random.integers(0, self.vocab_size, length + steps).tolist() for length in lengths]
        heads = [sequence[:length] for sequence, length in zip(sequences, lengths, strict=True)]
        logits = [self.prefill(heads, [0, 1])]
        for step in range(steps):
            tokens = [sequence[length + step] for sequence, length in zip(sequences, lengths, strict=True)]
            logits.append(self.decode(tokens))
        self.cache.clear()
        ours = torch.stack(logits, dim=1).float().log_softmax(-1)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            plain = self._model(input_ids=self._tensor(np.array([sequence])), use_cache=False).logits
            expected = plain[0, length - 1 :].float().log_softmax(-1)
            difference = (ours[row] - expected).abs().mean().item()
            if not difference <= tolerance:
                reason = f"log-probs of a cached batch differ by {difference:.3g} from a plain forward"
                raise StartError(_unsupported(model_path, reason))


def _load(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    if not (Path(model_path) / "config.json").is_file():
        raise StartError(f"no config.json in {model_path!r}: give the directory of a Hugging Face causal LM")
    try:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise StartError(f"cannot load the model in {model_path!r}: {type(error).__name__}: {error}") from error
    return model.eval().requires_grad_(False)


def _context_limit(config: PretrainedConfig, wanted: int, model_path: str) -> int:
    """Longest prompt + response in tokens. Raises StartError when it is unknown or beyond the model."""
    limit = getattr(config, "max_position_embeddings", None)
    if wanted < 0 or (limit is None and wanted == 0):
        raise StartError(
            f"the model in {model_path!r} names no context length: set context_tokens_max to a positive number"
        )
    if limit is not None and wanted > limit:
        raise StartError(f"context_tokens_max is {wanted}, but the model in {model_path!r} has {limit} positions")
    return wanted or int(limit)


def _attention_windows(config: PretrainedConfig, model_path: str) -> dict[str, int | None]:
    """Per layer type of the model: its sliding window in tokens, None = full attention. Raises StartError for others."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other or (window is None and "sliding_attention" in kinds):
        raise StartError(_unsupported(model_path, f"it has layers of type {', '.join(other) or 'sliding_attention'}"))
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def _unsupported(model_path: str, reason: str) -> str:
    return f"the embedded engine cannot run the model in {model_path!r}: {reason}; use the vLLM engine"


def _prefill_pattern(padding: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(query - key distance [1, L, L], allowed [batch, L, L]) of left-padded causal attention.

    Pad tokens attend to themselves: with nothing to attend to, a mask that rounds to -inf in 16 bit gives NaN.
    """
    columns = torch.arange(num_tokens, device=padding.device)
    distance = (columns[:, None] - columns)[None]
    real = columns >= padding[:, None]
    return distance, ((distance >= 0) & real[:, None, :]) | (distance == 0)
