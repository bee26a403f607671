"""One engine replica with continuous batching, in closed form: nothing happens between two turns but decoding.

    submit ──► waiting ──► running ──► (tool call) paused ──► running … ──► finished
                  ▲___________│ preempted when the KV cache is full; its KV is computed again later

Every running request gains one token per step, so a request's length is a difference of step counts and a whole batch advances
in one operation. Changes (joins, aborts, returns from a tool) take effect at the end of the step in progress, as in a real engine:
`turn`.
Invariants:
* `kv_tokens` is the sum of prompt + response tokens over running and paused requests, and at most the capacity unless a single
  request runs beside paused ones that fill it.
* A turn happens at a step's end; `wake_at` is the next one at which anything changes. Most turns end nothing (tool calls,
  admissions): these are made, each at its own time, when the replica is looked at next, so it need be woken only at `quiet_until`.
"""

import math
from collections import deque
from dataclasses import replace
from heapq import heappop, heappush

from laminar.ids import TrajectoryId
from laminar.sim.cluster import Cluster
from laminar.sim.request import NOTHING, Ends, Outcome, Request

KV_LOW = 0.95
"""Requests are admitted up to this share of the KV cache, and a full cache preempts down to it: what was preempted comes back when
something has finished, not at once."""
EPSILON_S = 1e-9  # rounding of sums of step times
SURE = 1.0 - 1e-6  # of a lower bound of many step times: far more than their sum is rounded by


class Replica:
    """The engine of one replica; times are virtual seconds."""

    def __init__(self, cluster: Cluster, now: float = 0.0) -> None:
        self.cluster = cluster
        self.model = cluster.decode_model
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
        self._change_s: float | None = None
        """How long the steps until then take; None = not known yet."""
        self._due: list[tuple[int, int, int, Request]] = []
        """Heap of (step count at which it finishes or pauses, trajectory, run, request)."""
        self._returns: list[tuple[float, int, int, Request]] = []
        """Heap of (when it comes back from a tool, trajectory, attempt, request)."""
        self._waiting: deque[Request] = deque()
        self._ends = Ends()
        self._tokens_max = 0
        """Prompt + response tokens of the largest request so far."""
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
        self.catch_up(now)
        older = self.requests.get(request.trajectory)
        if older is not None:
            self._release(older)
            self._waiting = deque(r for r in self._waiting if r is not older)
            self._joining = [r for r in self._joining if r is not older]
            self._look_ahead()
        self.requests[request.trajectory] = request
        self._joining.append(request)
        self._tokens_max = max(self._tokens_max, request.num_prompt_tokens + request.draw.num_tokens)
        self._ends.add(request, self.steps)
        self._wake_at_step_end(now)

    def abort(self, now: float, trajectory: TrajectoryId, attempt: int) -> None:
        """Stop an attempt at the end of the present step; unknown ones are ignored."""
        self.catch_up(now)
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
        """From now on nothing is computed, and nothing ends once the turn at `wake_at` has been made."""
        self.advance(now)
        self.hung = True

    def set_pace(self, now: float, factor: float) -> None:
        """From now on every decode step takes so many times as long as the model says."""
        self.advance(now)
        model = self.cluster.decode_model
        self.model = replace(
            model,
            weights_s=model.weights_s * factor,
            kv_s=model.kv_s * factor,
            flops_s=model.flops_s * factor,
            overhead_s=model.overhead_s * factor,
        )
        self._change_s = None
        self._set_wake(now)

    def length(self, request: Request) -> int:
        """Response tokens so far."""
        return request.length(self.steps)

    def advance(self, now: float) -> None:
        """Count the whole steps that are over at `now`."""
        self.catch_up(now)
        self._count_steps(now)

    def turn(self, now: float) -> Outcome:
        """Everything that changes at the ends of steps up to `now`; sets `wake_at`. Nothing may end before `now`."""
        self.catch_up(now)
        return self._turn(now) if self.wake_at <= now else NOTHING

    def catch_up(self, now: float) -> None:
        """Make the turns before `now`. They are known to end nothing: see `quiet_until`."""
        while self.wake_at < now and not self.hung:
            outcome = self._turn(self.wake_at)
            assert outcome is NOTHING, f"{len(outcome.finished)} finished and {len(outcome.aborted)} aborted unseen"

    def quiet_until(self) -> float:
        """No request ends before, unless something is done to the replica from outside; `wake_at` at the least.

        A turn for a pause, a return from a tool, an admission or a full cache ends nothing, and is made when the replica is
        looked at next. A request that has to decode m more tokens needs m steps, each of which reads the weights and at least
        as much KV as there is now, or as preemption leaves.
        """
        if self._aborting or self.hung or self._next_is_end():
            return self.wake_at
        first = self._ends.first(self.steps, self.requests)
        if first is None:
            return self.wake_at
        kv_tokens = max(0.0, min(self.kv_tokens, KV_LOW * self.capacity - self._tokens_max))
        step_s = self.model.weights_s + self.model.kv_s * kv_tokens + self.model.overhead_s
        return max(self.wake_at, self.boundary + SURE * (first - self.steps) * step_s - EPSILON_S)

    # ---- within ------------------------------------------------------------------------------------------------

    def _turn(self, now: float) -> Outcome:
        self._count_steps(now)
        if self._joining or self._aborting or (self._returns and self._returns[0][0] <= now + EPSILON_S):
            self._finish_step(now)
            if self.boundary > now + EPSILON_S:
                self.wake_at = self.boundary  # what joins, leaves or returns waits for the step's end
                return NOTHING
        outcome = self._change(now) if self.boundary <= now + EPSILON_S else NOTHING
        self._set_wake(now)
        return outcome

    def _count_steps(self, now: float) -> None:
        if self.hung:
            self._num_returned = sum(at <= now for at, *_ in self._returns)
            return
        num = self._next_change - self.steps
        if num <= 0 or now <= self.boundary or not self.num_running:
            return
        passed_s, seconds = now - self.boundary + EPSILON_S, self._until_change_s()
        if seconds > passed_s:
            num, seconds = self.model.steps_within(self.num_running, self.kv_tokens, passed_s, num - 1)
        if num:
            self._step(num, seconds)

    def _change(self, now: float) -> Outcome:
        """A step is over: what is due ends, what is to join joins."""
        if self.num_running == 0:
            self.boundary = max(self.boundary, now)
        finished = self._end_due() if self._due and self._due[0][0] <= self.steps else ()
        aborted = self._stop_aborted() if self._aborting else ()
        if self._returns and self._returns[0][0] <= now + EPSILON_S:
            self._return_due(now)
        if self._joining:
            self._waiting.extend(self._joining)
            self._joining.clear()
        if self.num_running > 1 and self.kv_tokens + self.num_running > self.capacity:
            self._preempt()
        if self._waiting:
            self._admit(now)
        self._look_ahead()
        return Outcome(finished, aborted) if finished or aborted else NOTHING

    def _step(self, num: int, seconds: float) -> None:
        self.boundary += seconds
        self.steps += num
        self._change_s = None
        grown = num * self.num_running
        self.kv_tokens += grown
        self.num_generated += grown

    def _finish_step(self, now: float) -> None:
        """Let the step in progress end before anything changes."""
        if self.num_running and self.boundary < now - EPSILON_S and self._next_change > self.steps:
            self._step(1, self.model.step_s(self.num_running, self.kv_tokens))

    def _look_ahead(self) -> None:
        """Find the next change, after something has joined or left."""
        queue, steps, num_running = self._due, self.steps, self.num_running
        while queue and queue[0][2] != queue[0][3].run:
            heappop(queue)
        change = queue[0][0] if queue else steps
        if num_running > 1 and (full := steps + (self.capacity - self.kv_tokens) // num_running) < change:
            change = full
        self._next_change, self._change_s = change, None

    def _until_change_s(self) -> float:
        seconds = self._change_s
        if seconds is None:
            num = self._next_change - self.steps
            seconds = self._change_s = self.model.steps_s(self.num_running, self.kv_tokens, num if num > 0 else 0)
        return seconds

    def _next_is_end(self) -> bool:
        """Whether the next to stop running has finished then, and does not pause."""
        if self._returns or not self._due:
            return False
        request = self._due[0][3]
        return request.next_pause == len(request.draw.pauses)

    def _wake_at_step_end(self, now: float) -> None:
        if self.hung or self._step_end() <= now + EPSILON_S:
            self._count_steps(now)
        end = self._step_end() if self.boundary < now else self.boundary
        self.wake_at = min(self.wake_at, max(now, end))

    def _step_end(self) -> float:
        """When the step that follows the last counted one is over; if there is none, when that was."""
        if self.num_running == 0 or self._next_change <= self.steps:
            return self.boundary
        return self.boundary + self.model.step_s(self.num_running, self.kv_tokens)

    def _set_wake(self, now: float) -> None:
        boundary = self.boundary
        wake = max(self._returns[0][0], boundary) if self._returns else math.inf
        if self._joining or self._aborting:
            wake = min(wake, max(now, boundary))
        if self.num_running and wake > boundary and (change := boundary + self._until_change_s()) < wake:
            wake = change
        self.wake_at = wake if wake > now else now

    def _begin(self, request: Request) -> None:
        self._num_runs += 1
        request.began_step, request.run = self.steps, self._num_runs
        draw = request.draw
        target = draw.pauses[request.next_pause].at if request.next_pause < len(draw.pauses) else draw.num_tokens
        left = target - request.num_tokens
        due = self.steps + left if left > 0 else self.steps
        heappush(self._due, (due, request.trajectory, self._num_runs, request))
        self.num_running += 1

    def _stop(self, request: Request) -> None:
        """It no longer runs; its KV stays."""
        if request.began_step >= 0:
            request.num_tokens += self.steps - request.began_step
            request.began_step, request.run = -1, 0
            self.num_running -= 1

    def _release(self, request: Request) -> None:
        resident = request.began_step >= 0 or request.paused
        self._stop(request)
        if resident:
            self.kv_tokens -= request.num_prompt_tokens + request.num_tokens
            request.paused = False

    def _end_due(self) -> list[Request]:
        """Requests whose last token, or last token before a tool call, has come. Those that have finished."""
        finished, queue, steps = [], self._due, self.steps
        while queue and queue[0][0] <= steps:
            _, _, run, request = heappop(queue)
            if run != request.run:
                continue
            pauses = request.draw.pauses
            if request.next_pause < len(pauses):
                self._stop(request)
                request.paused = True
                back_at = self.boundary + pauses[request.next_pause].latency_s
                heappush(self._returns, (back_at, request.trajectory, request.attempt, request))
            else:
                self._release(request)
                del self.requests[request.trajectory]
                self._aborting.pop(request.trajectory, None)
                finished.append(request)
        return finished

    def _stop_aborted(self) -> list[Request]:
        aborted = []
        for trajectory, attempt in self._aborting.items():
            request = self.requests.get(trajectory)
            if request is None or request.attempt != attempt:
                continue
            self._release(request)
            del self.requests[trajectory]
            aborted.append(request)
        self._aborting.clear()
        self._waiting = deque(r for r in self._waiting if r.trajectory in self.requests)
        self._joining = [r for r in self._joining if r.trajectory in self.requests]
        return aborted

    def _return_due(self, now: float) -> None:
        """The environment has answered: its tokens are prefilled, decoding goes on."""
        prefill, returns, latest = 0, self._returns, now + EPSILON_S
        while returns and returns[0][0] <= latest:
            request = heappop(returns)[3]
            if not request.paused:
                continue
            added = request.draw.pauses[request.next_pause].num_tokens
            request.next_pause += 1
            request.paused = False
            request.num_tokens += added
            request.tool_tokens -= added
            prefill += added
            self._begin(request)
        self.kv_tokens += prefill
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
