"""The prompt pool: in which order prompts are drawn, and what a resumed run draws first."""

from functools import lru_cache
from random import Random

from laminar.core.records import PromptPool
from laminar.core.settings import Settings
from laminar.ids import PromptId, derive_seed

SHUFFLE_STREAM = 1  # keeps the seed of the order apart from those of trajectories


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_prompts: int) -> tuple[int, ...]:
    order = list(range(num_prompts))
    Random(derive_seed(seed, SHUFFLE_STREAM, epoch)).shuffle(order)
    return tuple(order)


def draw(pool: PromptPool, settings: Settings) -> PromptId:
    """The next prompt: first those that a stop interrupted, then the epoch's order, then the next epoch's."""
    if pool.returned:
        return pool.returned.pop(0)
    if pool.position >= settings.num_prompts:
        pool.epoch += 1
        pool.position = 0
    index = pool.position
    pool.position += 1
    if settings.shuffle:
        index = _order(settings.seed, pool.epoch, settings.num_prompts)[index]
    return PromptId(index)
