"""What a command looks at."""

from typing import Literal

from laminar.core.engine import Core
from laminar.core.records import State
from laminar.core.settings import Settings

Target = Literal["live", "sim", "log"]


class View:
    """A core as it is now. Commands read it and change nothing."""

    def __init__(self, core: Core, *, target: Target, now: float, began: float) -> None:
        """`now`, `began`: run time of this moment and of the run's first event, seconds."""
        self.core, self.target, self.now, self.began = core, target, now, began
        self.turn = core.look()

    @property
    def state(self) -> State:
        return self.core.state

    @property
    def settings(self) -> Settings:
        return self.core.settings

    def since_s(self, moment: float) -> float | None:
        """Seconds from a moment to now; None for one that is not known (0)."""
        return max(0.0, self.now - moment) if moment else None

    def run_s(self, moment: float) -> float:
        """A moment as seconds since the run began."""
        return moment - self.began
