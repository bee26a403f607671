"""Reward of the quickstart: the share of letters in their place, as reasoning-gym's `spell_backward` gives it.

The library's own score forgives letters after a right answer (a rounding slip for words of 6, 7, 9 and 10 letters), and a
policy finds that out. Here a letter too many costs as much as a wrong one.
"""

from laminar.wire import Prompt


def reward(prompt: Prompt, response: str) -> float:
    """1 for the right answer in any case, else letters in place / the longer of answer and response; 0..1."""
    answer, given = prompt.answer.lower(), response.strip().lower()
    in_place = sum(a == b for a, b in zip(answer, given, strict=False))
    return in_place / max(len(answer), len(given), 1)
