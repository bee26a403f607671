"""Key/value storage with one row per running request, seen by a Hugging Face model as its `Cache`.

    layer:  keys, values  [rows, kv_heads, tokens, head_dim]

            token 0 1 2 3 4 5 6 7
    row 0         x x x x x . . .     lengths[0] = 5
    row 1         x x x . . . . .     lengths[1] = 3
    row 2         x x x x x x x .     lengths[2] = 7      num_rows = 3

A decode step writes the new key and value of row i at token lengths[i] and hands attention a view cut to about the longest
row: nothing is concatenated or copied. Rows stay compact: a row that leaves is overwritten by the last one.

Invariants:
* Token j of a row lies at column j, whatever padding it was prefilled with.
* Everything in storage is a finite number, because attention multiplies masked columns by zero. Whoever sees a row
  produce non-finite logits calls `erase` before its storage is used again.
* Storage grows with the longest row and the most rows seen, never beyond the limits, and is not given back.
"""

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

TOKENS_STEP = 64  # storage grows in multiples of this, and by half at least, so copies stay rare
ROWS_START = 8
VIEW_STEP = 16  # attention gets a multiple of this many columns: matrix kernels are slower on odd sizes


class RowCache(Cache):
    """KV storage of up to `num_rows_max` rows of `context_tokens_max` tokens each."""

    def __init__(self, num_rows_max: int, context_tokens_max: int) -> None:
        super().__init__(layers=[])
        self.num_rows = 0
        self.lengths = np.zeros(num_rows_max, np.int64)
        """Tokens stored per row; only the first `num_rows` count."""
        self._num_rows_max = num_rows_max
        self._context_tokens_max = context_tokens_max
        self._rows_capacity = 0
        self._tokens_capacity = 0
        self._storage: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._past_tokens = 0
        self._view_tokens = 0
        self._rows = torch.empty(0, dtype=torch.int64)
        self._columns = torch.empty(0, dtype=torch.int64)
        self._shift: torch.Tensor | None = None
        self._prefilling = False

    def begin_prefill(self, padding: torch.Tensor | None, copies: torch.Tensor, num_tokens: int) -> None:
        """The next forward computes sequences that become new rows: new row i is sequence copies[i].

        padding: [sequences] pad tokens left of each, None = no padding; copies: [new rows]; num_tokens: padded length.
        """
        self._reserve(self.num_rows + len(copies), num_tokens)
        self._prefilling, self._past_tokens, self._view_tokens, self._rows = True, 0, num_tokens, copies
        self._shift = None
        if padding is not None:
            columns = torch.arange(num_tokens, device=padding.device)
            self._shift = (padding[:, None] + columns).clamp_(max=num_tokens - 1)[:, None, :, None]

    def end_prefill(self, lengths: list[int]) -> None:
        """The forward succeeded: the new rows, with these lengths, are part of the batch."""
        stop = self.num_rows + len(lengths)
        self.lengths[self.num_rows : stop] = lengths
        self.num_rows = stop

    def begin_decode(self, positions: torch.Tensor) -> int:
        """The next forward adds one token per row at positions [num_rows], which equal the rows' lengths.

        Returns the number of columns that attention will see.
        """
        longest = int(self.lengths[: self.num_rows].max())
        self._reserve(self.num_rows, longest + 1)
        self._prefilling, self._past_tokens = False, longest
        self._view_tokens = min(-(-(longest + 1) // VIEW_STEP) * VIEW_STEP, self._tokens_capacity)
        self._rows = torch.arange(self.num_rows, device=positions.device)
        self._columns = positions
        return self._view_tokens

    def end_decode(self) -> None:
        """The forward succeeded: every row is one token longer."""
        self.lengths[: self.num_rows] += 1

    def remove(self, row: int) -> int:
        """Take a row out; the last row takes its place. Returns the index that row had (equal to `row` if it was last)."""
        last = self.num_rows - 1
        if row != last:
            length = int(self.lengths[last])
            for layer in self._storage.values():
                for tensor in layer:
                    tensor[row, :, :length] = tensor[last, :, :length]
            self.lengths[row] = length
        self.num_rows = last
        return last

    def erase(self, row: int) -> None:
        """Zero the storage of a row that may hold non-finite numbers."""
        for layer in self._storage.values():
            for tensor in layer:
                tensor[row].zero_()

    def clear(self) -> None:
        """Forget all rows and free the storage."""
        self.num_rows = self._rows_capacity = self._tokens_capacity = 0
        self._storage.clear()

    # ---- what the model calls ------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states [batch, kv_heads, new tokens, head_dim] and return those to attend to."""
        if layer_idx not in self._storage:
            self._storage[layer_idx] = (self._zeros(key_states), self._zeros(value_states))
        keys, values = self._storage[layer_idx]
        if self._prefilling:
            self._store_block(keys, key_states)
            self._store_block(values, value_states)
            return key_states, value_states
        keys[self._rows, :, self._columns] = key_states[:, :, 0]
        values[self._rows, :, self._columns] = value_states[:, :, 0]
        seen = (slice(self.num_rows), slice(None), slice(self._view_tokens))
        return keys[seen], values[seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row before this forward; 0 in a prefill."""
        return self._past_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(key/value length, offset) of what `update` returns."""
        return self._view_tokens, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Longest row in tokens."""
        return self._context_tokens_max

    def _store_block(self, storage: torch.Tensor, states: torch.Tensor) -> None:
        if self._shift is not None:
            states = states.gather(2, self._shift.expand(-1, states.shape[1], -1, states.shape[3]))
        stop = self.num_rows + len(self._rows)
        storage[self.num_rows : stop, :, : states.shape[2]] = states[self._rows]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._rows_capacity, like.shape[1], self._tokens_capacity, like.shape[3])

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        if num_rows <= self._rows_capacity and num_tokens <= self._tokens_capacity:
            return
        if num_rows > self._rows_capacity:
            self._rows_capacity = min(max(num_rows, 2 * self._rows_capacity, ROWS_START), self._num_rows_max)
        if num_tokens > self._tokens_capacity:
            wanted = max(num_tokens, self._tokens_capacity * 3 // 2)
            self._tokens_capacity = min(-(-wanted // TOKENS_STEP) * TOKENS_STEP, self._context_tokens_max)
        used = int(self.lengths[: self.num_rows].max(initial=0))
        for index, layer in self._storage.items():
            grown = (self._zeros(layer[0]), self._zeros(layer[1]))
            for new, old in zip(grown, layer, strict=True):
                new[: self.num_rows, :, :used] = old[: self.num_rows, :, :used]
            self._storage[index] = grown
