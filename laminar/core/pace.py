"""How long a trajectory and a train step take now, for policies that look ahead: means with exponentially falling weights."""

import msgspec

GENERATION_DECAY = 1.0 - 1.0 / 4096  # the mean follows lengths that change over a few global batches
STEP_DECAY = 0.75  # about the last four steps


class Mean(msgspec.Struct, kw_only=True):
    """A weighted sum and the sum of its weights, which fall with age (`laminar.core.pace`)."""

    weight: float = 0.0
    total: float = 0.0


class Pace(msgspec.Struct, kw_only=True):
    """How long things take now."""

    generation_s: Mean = msgspec.field(default_factory=Mean)
    """From a trajectory's first start to its last token."""
    step_s: Mean = msgspec.field(default_factory=Mean)
    """Between the ends of train steps."""
    stepped_at: float = 0.0
    """When the last train step ended; 0 = none has."""


def generated(pace: Pace, seconds: float) -> None:
    """A trajectory has its last token, so long after its first start."""
    _add(pace.generation_s, seconds, GENERATION_DECAY)


def stepped(pace: Pace, at: float) -> None:
    """A train step is over, at run time `at`, seconds."""
    if pace.stepped_at:
        _add(pace.step_s, at - pace.stepped_at, STEP_DECAY)
    pace.stepped_at = at


def steps_per_trajectory(pace: Pace) -> float:
    """Train steps that end while one trajectory is generated, on average: what staleness costs at the least. 0 = not known yet."""
    if not (pace.generation_s.total and pace.step_s.total):
        return 0.0
    return _value(pace.generation_s) / _value(pace.step_s)


def seconds_per_step(pace: Pace) -> float:
    """Between the ends of train steps, on average; 0 = not known yet."""
    return _value(pace.step_s) if pace.step_s.weight else 0.0


def _add(mean: Mean, value: float, decay: float) -> None:
    mean.weight = mean.weight * decay + 1.0
    mean.total = mean.total * decay + value


def _value(mean: Mean) -> float:
    return mean.total / mean.weight
