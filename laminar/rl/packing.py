"""From trajectories to padded micro-batches, in two steps: a plan from lengths alone, then tensors.

A *line* is one row of a micro-batch: one trajectory, or the siblings of a group behind one copy of their prompt:

    unpacked   [prompt r1]  [prompt r2]        packed   [prompt r1 r2]
                                               position  0..P-1  P..  P..

In a packed line each response attends to the prompt and to itself, causally, and its positions go on after the prompt, so
its log-probs are those of the unpacked line. The last token of a response is never an input: nothing is predicted from it.

A response may hold several contexts (an agent that rewrites its history): from where one begins, nothing before it in the line is
attended to, the prompt neither, and positions begin again at 0.

Invariants: every trajectory with at least one response token is in exactly one line; a micro-batch holds at most
`tokens_max` input positions, padding included, unless a single line is longer; equal lengths give equal plans.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Lengths(NamedTuple):
    """Token counts of one trajectory."""

    num_prompt: int
    num_response: int


Line = tuple[int, ...]
"""Row indices that share one line; more than one are siblings with the same prompt."""
MicroBatchPlan = tuple[Line, ...]


def line_tokens(line: Line, lengths: Sequence[Lengths]) -> int:
    """Input positions of a line."""
    return lengths[line[0]].num_prompt + sum(lengths[row].num_response - 1 for row in line)


def plan_lines(
    groups: Iterable[Sequence[int]], lengths: Sequence[Lengths], *, pack: bool, tokens_max: int, positions_max: int = 0
) -> list[Line]:
    """One line per group if `pack`, else one per row. `groups` are row indices of siblings.

    A group stays unpacked if its line would exceed `tokens_max`, if its prompts differ in length, or if a sequence is longer
    than `positions_max` (the attention window of the model, 0 = none). Rows without response tokens get no line.
    """
    lines: list[Line] = []
    for group in groups:
        rows = tuple(row for row in group if lengths[row].num_response > 0)
        if not rows:
            continue
        prompts = {lengths[row].num_prompt for row in rows}
        longest = max(sum(lengths[row]) for row in rows)
        fits = line_tokens(rows, lengths) <= tokens_max and (not positions_max or longest <= positions_max)
        lines += [rows] if pack and fits and len(prompts) == 1 else [(row,) for row in rows]
    return lines


def plan_micro_batches(
    lines: Iterable[Line], lengths: Sequence[Lengths], *, tokens_max: int
) -> tuple[MicroBatchPlan, ...]:
    """Lines sorted by length, longest first, cut so that count x longest <= tokens_max (one over-long line stands alone)."""
    ordered = sorted(lines, key=lambda line: (-line_tokens(line, lengths), line))
    batches: list[list[Line]] = []
    width = 0
    for line in ordered:
        if not batches or (len(batches[-1]) + 1) * width > tokens_max:
            batches.append([])
            width = line_tokens(line, lengths)
        batches[-1].append(line)
    return tuple(tuple(batch) for batch in batches)


PADDING = -1
"""Segment of what is no input; further contexts have lower numbers, prompt and responses higher ones."""


class Tokens(NamedTuple):
    """One trajectory's arrays; P prompt and R response tokens."""

    prompt: np.ndarray
    """int32 (P,)"""
    response: np.ndarray
    """int32 (R,)"""
    logprobs: np.ndarray
    """float32 (R,), of the behaviour policy"""
    trained: np.ndarray
    """bool (R,): false for tokens that the environment wrote"""
    begins: np.ndarray | None = None
    """bool (R,): true for the first token of each further context, which the environment wrote; None = there is none"""


class MicroBatch(NamedTuple):
    """Inputs (B, T) and, for each of N response tokens, the flat input position that predicts it."""

    input_ids: Tensor
    """int64 (B, T), padded at the right with 0"""
    position_ids: Tensor | None
    """int64 (B, T); None = 0, 1, 2 … in every line"""
    attention_mask: Tensor | None
    """bool (B, 1, T, T), true = may attend; None = causal"""
    index: Tensor
    """int64 (N,) into the flattened (B * T) positions"""
    targets: Tensor
    """int64 (N,): the response tokens"""
    rows: Tensor
    """int64 (N,): the batch row of each token"""
    logprobs: Tensor
    """float32 (N,) of the behaviour policy"""
    trained: Tensor
    """float32 (N,): 1 = in the loss, 0 = environment token"""
    num_inputs: int
    """Positions that hold a token; the rest of B * T is padding"""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same batch with its tensors on `device`."""
        return MicroBatch(*(value.to(device) if isinstance(value, Tensor) else value for value in self))


def collate(plan: MicroBatchPlan, tokens: dict[int, Tokens]) -> MicroBatch:
    """Tensors of one planned micro-batch on the CPU; `tokens` by row index.

    An empty plan gives a dummy of one position and one token of weight 0 (row 0), so that its loss is 0 and a rank without work can
    take part in the collectives of a forward and backward pass. Raises ValueError when siblings of a line differ in their prompt.
    """
    if not plan:
        return _dummy()
    widths = [len(tokens[line[0]].prompt) + sum(len(tokens[row].response) - 1 for row in line) for line in plan]
    batch, width = len(plan), max(widths)
    inputs = np.zeros((batch, width), np.int64)
    packed = any(len(line) > 1 or tokens[line[0]].begins is not None for line in plan)
    positions = np.tile(np.arange(width), (batch, 1)) if packed else None
    segments = np.zeros((batch, width), np.int64) if packed else None
    index: list[np.ndarray] = []
    order = [row for line in plan for row in line]
    for at, line in enumerate(plan):
        _place(line, tokens, inputs[at], positions[at] if packed else None, segments[at] if packed else None)
        index += [at * width + part for part in _predictors(line, tokens)]
    counts = [len(tokens[row].response) for row in order]
    return MicroBatch(
        input_ids=torch.from_numpy(inputs),
        position_ids=torch.from_numpy(positions) if packed else None,
        attention_mask=_block_mask(torch.from_numpy(segments)) if packed else None,
        index=torch.from_numpy(np.concatenate(index)),
        targets=torch.from_numpy(np.concatenate([tokens[row].response for row in order]).astype(np.int64)),
        rows=torch.from_numpy(np.repeat(np.array(order, np.int64), counts)),
        logprobs=torch.from_numpy(np.concatenate([tokens[row].logprobs for row in order]).astype(np.float32)),
        trained=torch.from_numpy(np.concatenate([tokens[row].trained for row in order]).astype(np.float32)),
        num_inputs=sum(widths),
    )


def _dummy() -> MicroBatch:
    one = torch.zeros(1, dtype=torch.int64)
    zero = torch.zeros(1)
    return MicroBatch(one.view(1, 1), None, None, one, one, one, zero, zero, 0)


def _place(
    line: Line, tokens: dict[int, Tokens], inputs: np.ndarray, positions: np.ndarray | None, segments: np.ndarray | None
) -> None:
    """Write one line: prompt (segment 0), then each response but its last token (segments 1, 2 …; further contexts -2, -3 …)."""
    prompt = tokens[line[0]].prompt
    at = len(prompt)
    inputs[:at] = prompt
    context = PADDING
    for number, row in enumerate(line, start=1):
        if not np.array_equal(tokens[row].prompt, prompt):
            raise ValueError(f"rows {line[0]} and {row} are siblings of one group, but their prompts differ")
        shown = tokens[row].response[:-1]
        end = at + len(shown)
        inputs[at:end] = shown
        if positions is not None and segments is not None:
            positions[at:end] = np.arange(len(prompt), len(prompt) + len(shown))
            segments[at:end] = number
            for start in _context_starts(tokens[row]):
                context -= 1
                positions[at + start : end] = np.arange(len(shown) - start)
                segments[at + start : end] = context
        at = end
    if segments is not None and positions is not None:
        segments[at:] = PADDING
        positions[at:] = 0


def _context_starts(tokens: Tokens) -> list[int]:
    """Where further contexts begin, as indices into the response; one that would begin with its last token is no input."""
    return [] if tokens.begins is None else np.flatnonzero(tokens.begins[:-1]).tolist()


def _predictors(line: Line, tokens: dict[int, Tokens]) -> Iterable[np.ndarray]:
    """Per response the positions, within the line, of the inputs that predict its tokens: the prompt's end, then its own."""
    at = len(tokens[line[0]].prompt)
    for row in line:
        num_shown = len(tokens[row].response) - 1
        yield np.concatenate([[len(tokens[line[0]].prompt) - 1], np.arange(at, at + num_shown)]).astype(np.int64)
        at += num_shown


def _block_mask(segments_BT: Tensor) -> Tensor:
    """bool (B, 1, T, T): causal, and only within a segment or, from responses, to the prompt; every position sees itself (softmax
    needs one)."""
    query, key = segments_BT[:, :, None], segments_BT[:, None, :]
    causal = torch.ones(segments_BT.shape[1], segments_BT.shape[1], dtype=torch.bool).tril_()
    return (((query == key) | ((key == 0) & (query >= PADDING))) & causal)[:, None]
