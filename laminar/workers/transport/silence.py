"""How long a peer has been silent, counted only while this process could have heard it.

A wait is cut into looks. One that took much longer than it should shows that this process, or the whole machine, stood still
meanwhile; then the peer may have as well, and the look counts for nothing.

Invariant: it ends, after `STRETCH` limits at the latest, however starved this process is.
"""

import time
from collections.abc import Callable

LOOKS = 5
LATE = 1.5  # a look that takes so many times its length was not on time
STRETCH = 4.0


class Silence:
    """Of one wait for a peer, which is over `limit_s` after it began."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._total_s = 0.0
        self._num_looks = 0

    @staticmethod
    def look_s(limit_s: float) -> float:
        """How long to wait at a time."""
        return limit_s / LOOKS

    def looked(self, seconds: float) -> bool:
        """One more look brought nothing; it took so long. True when the peer has been silent for too long."""
        self._total_s += seconds
        self._num_looks += seconds <= LATE * self.look_s(self._limit_s)
        return self._num_looks >= LOOKS or self._total_s >= STRETCH * self._limit_s


class Watch:
    """The same for one who polls: it takes the time itself, and begins anew whenever something has moved."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self.moved()

    def moved(self) -> None:
        """The peer lives."""
        self._silence, self._looked_at = Silence(self._limit_s), self._clock()

    def is_over(self) -> bool:
        """Whether the peer has been silent for too long; to be asked several times per look."""
        seconds = self._clock() - self._looked_at
        if seconds < Silence.look_s(self._limit_s):
            return False
        self._looked_at += seconds
        return self._silence.looked(seconds)
