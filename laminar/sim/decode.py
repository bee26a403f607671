"""Time of decode steps, in closed form over many steps at once.

With n running requests and K resident KV tokens, step j (0-based; each step adds n KV tokens) takes

    t_j = max(weights + kv (K + n j), flops n) + overhead

(roofline: bytes read over effective bandwidth, or FLOPs over effective peak). The first arm grows linearly in j and the second is
constant, so a sum over m steps is two arithmetic series.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeModel:
    """The coefficients for one replica, seconds."""

    weights_s: float
    """To read all weights once."""
    kv_s: float
    """To read one token's KV."""
    flops_s: float
    """Of one request's forward pass at effective peak."""
    overhead_s: float

    def step_s(self, num_running: int, kv_tokens: int) -> float:
        """The next step's time."""
        return max(self.weights_s + self.kv_s * kv_tokens, self.flops_s * num_running) + self.overhead_s

    def steps_s(self, num_running: int, kv_tokens: int, num_steps: int) -> float:
        """The next `num_steps` steps' time."""
        first = self.weights_s + self.kv_s * kv_tokens
        growth = self.kv_s * num_running
        bound = self.flops_s * num_running
        if first >= bound:
            return num_steps * first + growth * (num_steps * (num_steps - 1) / 2) + num_steps * self.overhead_s
        if growth <= 0.0 or first + growth * (num_steps - 1) < bound:
            compute = num_steps
        else:
            compute = min(num_steps, int((bound - first) / growth) + 1)
        memory = num_steps - compute
        series = (num_steps * (num_steps - 1) - compute * (compute - 1)) / 2
        return compute * bound + memory * first + growth * series + num_steps * self.overhead_s

    def steps_within(self, num_running: int, kv_tokens: int, seconds: float, num_steps_max: int) -> tuple[int, float]:
        """How many whole steps, at most `num_steps_max`, are over after `seconds`, and how long they took."""
        if seconds < 0.0 or num_steps_max <= 0:
            return 0, 0.0
        if seconds < self.weights_s + self.overhead_s:
            return 0, 0.0
        guess = self._steps_memory_bound(num_running, kv_tokens, seconds)
        found = int(guess) if guess < num_steps_max else num_steps_max
        found_s = self.steps_s(num_running, kv_tokens, found)
        while found and found_s > seconds:
            found -= 1
            found_s = self.steps_s(num_running, kv_tokens, found)
        while found < num_steps_max and (next_s := self.steps_s(num_running, kv_tokens, found + 1)) <= seconds:
            found, found_s = found + 1, next_s
        return found, found_s

    def _steps_memory_bound(self, num_running: int, kv_tokens: int, seconds: float) -> float:
        """As many as would be over if no step were compute-bound: the root of g m^2 / 2 + b m = seconds."""
        growth = self.kv_s * num_running
        step_s = self.weights_s + self.kv_s * kv_tokens + self.overhead_s - growth / 2
        divisor = step_s + math.sqrt(step_s * step_s + 2.0 * growth * seconds)
        return 2.0 * seconds / divisor if divisor > 0.0 else math.inf
