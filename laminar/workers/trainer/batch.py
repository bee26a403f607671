"""Who trains what: from the rows of a batch to shares, micro-batches and tokens.

The plan follows from rows and configuration alone, so all ranks agree on it without talking.

Invariants:
* A group is in one mini-batch and on one rank.
* All ranks have the same number of micro-batches in each mini-batch (an empty one is a dummy pass): FSDP's collectives need it.
* A rank fetches the tokens of its own rows only, and refuses tokens that do not fit their row.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from laminar import wire
from laminar.config import TrainerConfig
from laminar.errors import LaminarError
from laminar.ids import TrajectoryId
from laminar.rl.packing import Lengths, Line, MicroBatchPlan, Tokens, line_tokens, plan_lines, plan_micro_batches

Fetch = Callable[[list[TrajectoryId]], list[wire.TokenRow]]
"""Blocking; answers in the order asked. Raises LaminarError or OSError."""

MODEL, NEW_CONTEXT = 0, 2  # sources, as in `wire.RolloutReport`


class BatchError(LaminarError):
    """Rows and tokens of a batch do not fit together."""


class MiniBatchPlan(NamedTuple):
    """One optimizer update: for each rank its micro-batches, all ranks the same number of them."""

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]


def plan_step(
    rows: Sequence[wire.BatchRow], config: TrainerConfig, *, world_size: int, positions_max: int = 0
) -> list[MiniBatchPlan]:
    """Mini-batches of the batch, groups in the order of `rows`. Row indices refer to `rows`.

    `positions_max`: see `plan_lines`. Raises BatchError for a row without a prompt.
    """
    lengths = [Lengths(row.num_prompt_tokens, row.num_tokens) for row in rows]
    for row in rows:
        if row.num_prompt_tokens < 1:
            raise BatchError(f"trajectory {row.trajectory} has no prompt token, so nothing predicts its first token")
    plans = []
    for groups in _split(_groups(rows), config.mini_batches):
        lines = [
            plan_lines(
                [group],
                lengths,
                pack=config.packing == "group",
                tokens_max=config.micro_batch_tokens,
                positions_max=positions_max,
            )
            for group in groups
        ]
        ranks = [
            plan_micro_batches(share, lengths, tokens_max=config.micro_batch_tokens)
            for share in _balance(lines, lengths, world_size)
        ]
        count = max(1, *(len(batches) for batches in ranks))
        plans.append(MiniBatchPlan(tuple(batches + ((),) * (count - len(batches)) for batches in ranks)))
    return plans


def _groups(rows: Sequence[wire.BatchRow]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    return list(groups.values())


def _split(groups: list[list[int]], num_parts: int) -> list[list[list[int]]]:
    """Consecutive parts whose sizes differ by at most one; fewer parts if there are not enough groups."""
    num_parts = min(num_parts, max(1, len(groups)))
    bounds = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    return [groups[start:end] for start, end in itertools.pairwise(bounds)]


def _balance(groups: list[list[Line]], lengths: list[Lengths], world_size: int) -> list[list[Line]]:
    """Longest group first to the rank with the fewest tokens (LPT: at most 4/3 of the best makespan)."""
    costs = [sum(line_tokens(line, lengths) for line in lines) for lines in groups]
    shares: list[list[Line]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for group in sorted(range(len(groups)), key=lambda group: (-costs[group], group)):
        rank = loads.index(min(loads))
        loads[rank] += costs[group]
        shares[rank] += groups[group]
    return shares


def rows_of(plans: Sequence[MiniBatchPlan], rank: int) -> list[int]:
    """Row indices that `rank` trains, in batch order."""
    return sorted(row for plan in plans for batch in plan.ranks[rank] for line in batch for row in line)


def fetch_tokens(rows: Sequence[wire.BatchRow], wanted: Sequence[int], fetch: Fetch) -> dict[int, Tokens]:
    """Tokens by row index. Raises BatchError when an answer does not fit its row; passes on what `fetch` raises."""
    answers = fetch([rows[index].trajectory for index in wanted]) if wanted else []
    if len(answers) != len(wanted):
        raise BatchError(f"asked for the tokens of {len(wanted)} trajectories, got {len(answers)}")
    return {index: _decode(rows[index], answer) for index, answer in zip(wanted, answers, strict=True)}


def check_window(rows: Sequence[wire.BatchRow], tokens: dict[int, Tokens], positions_max: int) -> None:
    """Raises BatchError for several contexts in a line that is longer than the model's attention window (0 = it has none)."""
    for index, own in tokens.items():
        if positions_max and own.begins is not None and len(own.prompt) + len(own.response) > positions_max:
            raise BatchError(
                f"trajectory {rows[index].trajectory} has several contexts and {len(own.prompt) + len(own.response)} tokens, "
                f'which the model\'s attention window of {positions_max} cannot keep apart: set task.on_rewrite = "refuse"'
            )


def _decode(row: wire.BatchRow, answer: wire.TokenRow) -> Tokens:
    expected = (row.trajectory, 4 * row.num_prompt_tokens, 4 * row.num_tokens, 4 * row.num_tokens)
    got = (answer.trajectory, len(answer.prompt_tokens), len(answer.tokens), len(answer.logprobs))
    if got != expected or len(answer.sources) not in (0, row.num_tokens):
        raise BatchError(
            f"the tokens of trajectory {row.trajectory} do not fit its row: (id, bytes of prompt, tokens, log-probs) are "
            f"{got} instead of {expected}, sources {len(answer.sources)} bytes; the token store and the batch disagree"
        )
    sources = np.frombuffer(answer.sources, np.uint8) if answer.sources else np.zeros(row.num_tokens, np.uint8)
    logprobs = np.frombuffer(answer.logprobs, np.float32)
    if not np.isfinite(logprobs).all():
        raise BatchError(f"trajectory {row.trajectory} has a behaviour log-prob that is not finite")
    begins = sources == NEW_CONTEXT
    return Tokens(
        prompt=np.frombuffer(answer.prompt_tokens, np.int32),
        response=np.frombuffer(answer.tokens, np.int32),
        logprobs=logprobs,
        trained=sources == MODEL,
        begins=begins if begins.any() else None,
    )
