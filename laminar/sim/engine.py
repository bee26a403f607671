"""A simulated worker process with its engine, as `laminar.sim.rollouts` keeps it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from laminar.sim.replica import Replica
from laminar.sim.request import Request


@dataclass(kw_only=True)
class Engine:
    """A worker process with its engine."""

    replica: Replica
    incarnation: int
    connected: bool = True
    given_up: bool = False
    """The core counts it as lost while it goes on behind a broken channel."""
    backlog: list[Callable[[], None]] = field(default_factory=list)
    """What it has to say while its channel is broken, in order."""
    unsent: list[Request] = field(default_factory=list)
    """What ended while its channel is broken."""
    wake: int = 0
    """Number of its valid wake-up; older ones in the heap are void."""
    reported: tuple[int, int, int] = (-1, -1, -1)
    hung_at: float = 0.0
    """Since when its engine hangs; 0 = it does not."""
