"""One engine replica with continuous batching, in closed form: nothing happens between two turns but decoding.

    submit ──► waiting ──► running ──► (tool call) paused ──► running … ──► finished
                  ▲___________│ preempted when the KV cache is full; its KV is computed again later

Every running request gains one token per step, so a request's length is a difference of step counts and a whole batch advances
in one operation. Changes (joins, aborts, returns from a tool) take effect at the end of the step in progress, as in a real engine:
`turn`.
Invariants:
* `kv_tokens` is the sum of prompt + response tokens over running and paused requests, and at most the capacity unless a single
  request runs beside paused ones that fill it.
* A turn happens at a step's end; `wake_at` is the next one at which anything changes.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from laminar.ids import GroupId, TrajectoryId, Version
from laminar.sim.cluster import Cluster
from laminar.sim.decode import decode_model
from laminar.sim.workload import Draw

KV_LOW = 0.95
"""Requests are admitted up to this share of the KV cache, and a full cache preempts down to it: what was preempted comes back when
something has finished, not at once."""
EPSILON_S = 1e-9  # rounding of sums of step times


@dataclass(slots=True, kw_only=True)
class Request:
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
    run: int = -1
    """Number of its present run in this engine; what was planned for another run is void."""
    first_run_at: float = -1.0
    paused: bool = False


@dataclass(slots=True)
class Outcome:
    """What ended at a turn."""

    finished: list[Request] = field(default_factory=list)
    aborted: list[Request] = field(default_factory=list)


class Replica:
    """The engine of one replica; times are virtual seconds."""

    def __init__(self, cluster: Cluster, now: float = 0.0) -> None:
        self.cluster = cluster
        self.model = decode_model(cluster)
        self.capacity = cluster.kv_tokens_max
        self.steps = 0
        self.boundary = now
        """When the last counted step ended; after prefill, when the next may begin."""
        self.kv_tokens = 0
        self.requests: dict[TrajectoryId, Request] = {}
        self.num_running = 0
        self.num_generated = 0
        """Tokens decoded since the beginning."""
        self.num_prefilled = 0
        self.num_preemptions = 0
        self.prefill_s = 0.0
        self.hung = False
        """It answers, and computes nothing any more."""
        self.wake_at = math.inf
        self._num_returned = 0
        """Requests that came back from a tool to a hung engine."""
        self._num_runs = 0
        self._next_change = 0
        """Step count at which a request finishes or pauses, or the cache is full, unless something joins or leaves before."""
        self._waiting: deque[Request] = deque()
        self._due: list[tuple[int, int, int]] = []
        self._returns: list[tuple[float, int, int]] = []
        self._joining: list[Request] = []
        self._aborting: dict[TrajectoryId, int] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that have no KV yet, or that a hung engine does not take back."""
        return len(self._waiting) + len(self._joining) + self._num_returned

    @property
    def stopping(self) -> dict[TrajectoryId, int]:
        """Attempts that end with the present step because they were aborted."""
        return self._aborting

    # ---- from outside ------------------------------------------------------------------------------------------

    def submit(self, now: float, request: Request) -> None:
        """Take a request; it runs from the end of the present step on, if there is room. An older attempt of it ends now."""
        older = self.requests.get(request.trajectory)
        if older is not None:
            self._release(older)
            self._waiting = deque(r for r in self._waiting if r is not older)
            self._joining = [r for r in self._joining if r is not older]
            self._look_ahead()
        self.requests[request.trajectory] = request
        self._joining.append(request)
        self._wake_at_step_end(now)

    def abort(self, now: float, trajectory: TrajectoryId, attempt: int) -> None:
        """Stop an attempt at the end of the present step; unknown ones are ignored."""
        request = self.requests.get(trajectory)
        if request is not None and request.attempt == attempt:
            self._aborting[trajectory] = attempt
            self._wake_at_step_end(now)

    def rebuild(self, now: float, wait_s: float) -> None:
        """Interrupted for new weights: wait, then compute the KV cache of everything resident again (partial rollout)."""
        self.advance(now)
        self._finish_step(now)
        self.boundary = max(self.boundary, now) + wait_s
        self._prefill(self.kv_tokens)
        self._set_wake(now)

    def hang(self, now: float) -> None:
        """From now on nothing is computed, and nothing ends."""
        self.advance(now)
        self.hung = True

    def set_pace(self, now: float, factor: float) -> None:
        """From now on every decode step takes so many times as long as the model says."""
        self.advance(now)
        model = decode_model(self.cluster)
        self.model = replace(
            model,
            weights_s=model.weights_s * factor,
            kv_s=model.kv_s * factor,
            flops_s=model.flops_s * factor,
            overhead_s=model.overhead_s * factor,
        )
        self._set_wake(now)

    def length(self, request: Request) -> int:
        """Response tokens so far."""
        if request.began_step < 0:
            return request.num_tokens
        return request.num_tokens + self.steps - request.began_step

    def advance(self, now: float) -> None:
        """Count the whole steps that are over at `now`."""
        if self.hung:
            self._num_returned = sum(at <= now for at, _, _ in self._returns)
        if self.hung or self.num_running == 0:
            return
        limit = self._next_change - self.steps
        if limit <= 0 or now < self.boundary:
            return
        passed_s = now - self.boundary + EPSILON_S
        seconds = self.model.steps_s(self.num_running, self.kv_tokens, limit)
        if seconds > passed_s:
            limit = self.model.steps_within(self.num_running, self.kv_tokens, passed_s, limit - 1)
            seconds = self.model.steps_s(self.num_running, self.kv_tokens, limit)
        self._step(limit, seconds)

    def turn(self, now: float) -> Outcome:
        """Everything that changes at the end of a step; sets `wake_at`."""
        outcome = Outcome()
        self.advance(now)
        if self._joining or self._aborting or (self._returns and self._returns_due(now)):
            self._finish_step(now)
        if self.boundary <= now + EPSILON_S:
            if self.num_running == 0:
                self.boundary = max(self.boundary, now)
            self._end_due(outcome)
            if self._aborting:
                self._stop_aborted(outcome)
            if self._returns:
                self._return_due(now)
            if self._joining:
                self._waiting.extend(self._joining)
                self._joining.clear()
            self._preempt()
            if self._waiting:
                self._admit(now)
            self._look_ahead()
        self._set_wake(now)
        return outcome

    # ---- within ------------------------------------------------------------------------------------------------

    def _step(self, num: int, seconds: float) -> None:
        self.boundary += seconds
        self.steps += num
        grown = num * self.num_running
        self.kv_tokens += grown
        self.num_generated += grown

    def _finish_step(self, now: float) -> None:
        """Let the step in progress end before anything changes."""
        if self.num_running and self.boundary < now - EPSILON_S and self._next_change > self.steps:
            self._step(1, self.model.step_s(self.num_running, self.kv_tokens))

    def _look_ahead(self) -> None:
        """Find the next change, after something has joined or left."""
        queue = self._due
        while queue and self._is_void(queue[0]):
            heappop(queue)
        self._next_change = queue[0][0] if queue else self.steps
        if self.num_running > 1:
            full = self.steps + (self.capacity - self.kv_tokens) // self.num_running
            self._next_change = min(self._next_change, full)

    def _is_void(self, entry: tuple[int, int, int]) -> bool:
        request = self.requests.get(TrajectoryId(entry[1]))
        return request is None or request.run != entry[2] or request.began_step < 0

    def _returns_due(self, now: float) -> bool:
        return bool(self._returns) and self._returns[0][0] <= now + EPSILON_S

    def _wake_at_step_end(self, now: float) -> None:
        self.advance(now)
        end = self.boundary
        if self.num_running and self.boundary < now and self._next_change > self.steps:
            end = self.boundary + self.model.step_s(self.num_running, self.kv_tokens)
        self.wake_at = min(self.wake_at, max(now, end))

    def _set_wake(self, now: float) -> None:
        wake = max(self._returns[0][0], self.boundary) if self._returns else math.inf
        if self._joining or self._aborting:
            wake = min(wake, max(now, self.boundary))
        if self.num_running:
            steps = max(0, self._next_change - self.steps)
            wake = min(wake, self.boundary + self.model.steps_s(self.num_running, self.kv_tokens, steps))
        self.wake_at = max(now, wake)

    def _begin(self, request: Request) -> None:
        self._num_runs += 1
        request.began_step, request.run = self.steps, self._num_runs
        pauses = request.draw.pauses
        target = pauses[request.next_pause].at if request.next_pause < len(pauses) else request.draw.num_tokens
        heappush(self._due, (self.steps + max(0, target - request.num_tokens), request.trajectory, request.run))
        self.num_running += 1

    def _stop(self, request: Request) -> None:
        """It no longer runs; its KV stays."""
        if request.began_step >= 0:
            request.num_tokens = self.length(request)
            request.began_step = -1
            self.num_running -= 1

    def _release(self, request: Request) -> None:
        resident = request.began_step >= 0 or request.paused
        self._stop(request)
        if resident:
            self.kv_tokens -= request.num_prompt_tokens + request.num_tokens
            request.paused = False

    def _end_due(self, outcome: Outcome) -> None:
        """Requests whose last token, or last token before a tool call, has come."""
        while self._due and (self._due[0][0] <= self.steps or self._is_void(self._due[0])):
            entry = heappop(self._due)
            if self._is_void(entry):
                continue
            request = self.requests[TrajectoryId(entry[1])]
            if request.next_pause < len(request.draw.pauses):
                self._stop(request)
                request.paused = True
                pause = request.draw.pauses[request.next_pause]
                heappush(self._returns, (self.boundary + pause.latency_s, request.trajectory, request.attempt))
            else:
                self._release(request)
                del self.requests[request.trajectory]
                self._aborting.pop(request.trajectory, None)
                outcome.finished.append(request)

    def _stop_aborted(self, outcome: Outcome) -> None:
        for trajectory, attempt in self._aborting.items():
            request = self.requests.get(trajectory)
            if request is None or request.attempt != attempt:
                continue
            self._release(request)
            del self.requests[trajectory]
            outcome.aborted.append(request)
        self._aborting.clear()
        self._waiting = deque(r for r in self._waiting if r.trajectory in self.requests)
        self._joining = [r for r in self._joining if r.trajectory in self.requests]

    def _return_due(self, now: float) -> None:
        """The environment has answered: its tokens are prefilled, decoding goes on."""
        prefill = 0
        while self._returns_due(now):
            _, trajectory, attempt = heappop(self._returns)
            request = self.requests.get(TrajectoryId(trajectory))
            if request is None or request.attempt != attempt or not request.paused:
                continue
            added = request.draw.pauses[request.next_pause].num_tokens
            request.next_pause += 1
            request.paused = False
            request.num_tokens += added
            self.kv_tokens += added
            prefill += added
            self._begin(request)
        self._prefill(prefill)

    def _prefill(self, num_tokens: int) -> None:
        """Decoding of all waits for it."""
        if num_tokens:
            seconds = self.cluster.prefill_s(num_tokens)
            self.boundary += seconds
            self.prefill_s += seconds
            self.num_prefilled += num_tokens

    def _preempt(self) -> None:
        """When not one more step fits, the youngest give their place back until there is some room."""
        if self.num_running <= 1 or self.kv_tokens + self.num_running <= self.capacity:
            return
        running = [r for r in self.requests.values() if r.began_step >= 0]
        running.sort(key=lambda r: (r.first_run_at, r.trajectory))
        while len(running) > 1 and self.kv_tokens > KV_LOW * self.capacity:
            request = running.pop()
            self._release(request)
            request.prefill_tokens = request.num_prompt_tokens + request.num_tokens
            self._waiting.appendleft(request)
            self.num_preemptions += 1

    def _admit(self, now: float) -> None:
        limit = KV_LOW * self.capacity
        prefill, resident = 0, len(self.requests) - len(self._waiting)
        while self._waiting and resident < self.cluster.num_requests_max:
            request = self._waiting[0]
            size = request.num_prompt_tokens + request.num_tokens
            if self.kv_tokens + size > limit and resident:
                break
            self._waiting.popleft()
            resident += 1
            self.kv_tokens += size
            prefill += request.prefill_tokens
            if request.first_run_at < 0:
                request.first_run_at = now
            self._begin(request)
        self._prefill(prefill)
