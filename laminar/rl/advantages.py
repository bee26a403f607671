"""Group-relative advantages (GRPO, DeepSeekMath, arXiv:2402.03300, eq. in §4.1.2).

Pure arithmetic on the rewards of a batch; every rank computes the same numbers from the same rows.
"""

import math
from collections.abc import Sequence

STD_EPS = 1e-6  # the value of verl; keeps groups whose rewards differ by noise only from blowing up


def group_advantages(rewards: Sequence[float], groups: Sequence[int], *, divide_by_std: bool = True) -> list[float]:
    """Per row: (r - mean of its group) / (std of its group + 1e-6); without the division if `divide_by_std` is false.

    `groups[i]` is the group id of row i; siblings need not be adjacent. The standard deviation is the unbiased one (n - 1),
    as in verl and TRL. A group of equal rewards, or of one row, gets exactly 0. Raises ValueError for a non-finite reward.
    """
    members: dict[int, list[int]] = {}
    for row, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} of row {row} (group {group}) is not finite: fix the reward function")
        members.setdefault(group, []).append(row)
    advantages = [0.0] * len(rewards)
    for rows in members.values():
        for row, value in zip(rows, _advantages([rewards[row] for row in rows], divide_by_std), strict=True):
            advantages[row] = value
    return advantages


def _advantages(rewards: list[float], divide_by_std: bool) -> list[float]:
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    if not divide_by_std:
        return [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + STD_EPS) for reward in rewards]
