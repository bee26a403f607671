"""One attempt in a simulated engine, and which of an engine's attempts can finish first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import msgspec

from laminar.ids import GroupId, TrajectoryId, Version
from laminar.sim.workload import Draw


class Request(msgspec.Struct, kw_only=True):
    """One attempt in the engine."""

    trajectory: TrajectoryId
    attempt: int
    group: GroupId
    version: Version
    draw: Draw
    num_prompt_tokens: int
    num_tokens: int
    """Response tokens when it last began to run."""
    submitted_at: float
    prefill_tokens: int
    """To compute when it is admitted."""
    next_pause: int = 0
    began_step: int = -1
    """Step count when it last began to run; -1 = it does not run."""
    run: int = 0
    """Number of its present run in this engine, 0 = it does not run; what was planned for another run is void."""
    first_run_at: float = -1.0
    paused: bool = False
    tool_tokens: int = 0
    """Tokens that tools will still add."""

    def length(self, step: int) -> int:
        """Response tokens at the engine's step count `step`."""
        return self.num_tokens if self.began_step < 0 else self.num_tokens + step - self.began_step

    def first_end(self, step: int) -> int:
        """Step count before which it cannot finish: it makes a token a step, but for those that tools will add."""
        since = step if self.began_step < 0 else self.began_step
        return since + self.draw.num_tokens - self.num_tokens - self.tool_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ended at a turn."""

    finished: Sequence[Request] = ()
    aborted: Sequence[Request] = ()


NOTHING = Outcome()


class Ends:
    """A heap of `first_end`, each as of when it was last looked at: it only grows, because a request that pauses or waits makes
    no token."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []

    def add(self, request: Request, step: int) -> None:
        """One more request, at the engine's step count `step`."""
        request.tool_tokens = sum([pause.num_tokens for pause in request.draw.pauses[request.next_pause :]])
        heappush(self._heap, (request.first_end(step), request.trajectory, request.attempt, request))

    def first(self, step: int, present: Mapping[TrajectoryId, Request]) -> int | None:
        """The least `first_end` of the requests that are still there; None if none is."""
        heap = self._heap
        while heap:
            known, trajectory, attempt, request = heap[0]
            if present.get(request.trajectory) is not request:
                heappop(heap)
            elif (end := request.first_end(step)) > known:
                heapreplace(heap, (end, trajectory, attempt, request))
            else:
                return end
        return None
