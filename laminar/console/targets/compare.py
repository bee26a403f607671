"""Two simulated futures side by side: what each does in the same time, in the words of docs/metrics.md."""

from collections import Counter
from statistics import fmean
from typing import NamedTuple

from laminar.console.answers import Cell, Table, table
from laminar.sim.world import World


class Mark(NamedTuple):
    """What a world had counted at a moment."""

    at: float
    step: int
    num_trained: int
    """Prompt and response tokens of the batches so far."""
    num_generated: int
    num_moves: int
    num_emptied: int
    num_samples: int
    s_train: Counter[int]


def mark(world: World) -> Mark:
    """Now."""
    measures, state = world.measures, world.core.state
    return Mark(
        at=world.now,
        step=state.trainer.step,
        num_trained=sum(iteration.num_tokens for iteration in measures.iterations),
        num_generated=world.rollouts.num_generated(),
        num_moves=state.repack.num_moves,
        num_emptied=state.repack.num_released,
        num_samples=len(measures.kv_use),
        s_train=Counter(measures.s_train),
    )


def since(world: World, before: Mark) -> dict[str, Cell]:
    """What has happened since a moment of the same world."""
    now = mark(world)
    seconds = now.at - before.at
    trained = now.s_train - before.s_train
    num = sum(trained.values())
    kv_use = [share for _, share in world.measures.kv_use[before.num_samples :]]
    return {
        "seconds": round(seconds, 1),
        "train steps": now.step - before.step,
        "trained tokens/s": round((now.num_trained - before.num_trained) / seconds) if seconds else None,
        "generated tokens/s": round((now.num_generated - before.num_generated) / seconds) if seconds else None,
        "s_train mean": round(sum(age * count for age, count in trained.items()) / num, 3) if num else None,
        "s_train max": max(trained) if num else None,
        "KV use mean": round(fmean(kv_use), 3) if kv_use else None,
        "trajectories moved": now.num_moves - before.num_moves,
        "replicas emptied": now.num_emptied - before.num_emptied,
        "complete groups at the end": len(world.core.state.buffer),
    }


def side_by_side(present: dict[str, Cell], changed: dict[str, Cell]) -> Table:
    """A row per measure; `ratio` = changed / present."""
    rows: list[list[Cell]] = [
        [name, present[name], changed[name], _ratio(present[name], changed[name])] for name in present
    ]
    return table("", "measure present changed ratio", rows)


def _ratio(present: Cell, changed: Cell) -> Cell:
    numbers = [value for value in (present, changed) if isinstance(value, int | float)]
    return round(numbers[1] / numbers[0], 3) if len(numbers) == 2 and numbers[0] else None
