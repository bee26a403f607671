"""The rollout side of the simulated world: workers with their engines, and what they report.

A replica reports when something of it finishes and at a coarse flush period; before every repack check it reports its KV use, so
that the check sees what is. Invariants, checked at every start: an attempt is handed out once; a trajectory keeps one version and
goes on from exactly the tokens that were reported; weights are pulled under no running request.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from laminar.core import actions, events, health
from laminar.ids import TrajectoryId, Version, WorkerId
from laminar.sim.engine import Engine
from laminar.sim.replica import Replica
from laminar.sim.request import NOTHING, Outcome, Request

if TYPE_CHECKING:
    from laminar.sim.world import World


class Rollouts:
    """All rollout workers, and the token store that their reports fill."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.engines: dict[WorkerId, Engine] = {}
        self.stored: dict[TrajectoryId, int] = {}
        """Response tokens that the token store has; entries leave with ForgetTokens."""
        self.answer_s = 0.0
        """From the word to stop for a move until the source's engine hears it."""
        self.restart_s = 60.0
        """From a process's end to the join of the one that the launcher starts in its place."""
        self.reward_timeout_s = 30.0
        self.versions: dict[TrajectoryId, Version] = {}
        """Which generate them."""
        self.attempts: dict[TrajectoryId, int] = {}
        """The last that was begun of each."""
        self._num_generated_before = 0
        self.answers: dict[type, Callable[..., None]] = {
            actions.StartGroup: self._on_start_group,
            actions.AbortAttempts: self._on_abort_attempts,
            actions.PullWeights: self._on_pull_weights,
            actions.ForgetTokens: self._on_forget_tokens,
        }

    def begin(self) -> None:
        """All replicas join; flushes begin."""
        for index in range(self.world.cluster.num_replicas):
            self.join(WorkerId(f"rollout-{index}"), 1)
        self.world.after(self.world.flush_s, self.flush)

    def flush(self) -> None:
        """Every replica tells all lengths, now and at the flush interval."""
        self.report_kv(lengths=True)
        self.world.after(self.world.flush_s, self.flush)

    def num_generated(self) -> int:
        """Response tokens decoded by all engines so far, also by those that are gone."""
        for engine in self.engines.values():
            engine.replica.advance(self.world.now)
        return self._num_generated_before + sum(engine.replica.num_generated for engine in self.engines.values())

    def catch_up(self) -> None:
        """All engines are as they are now."""
        for engine in self.engines.values():
            engine.replica.catch_up(self.world.now)

    def join(self, worker: WorkerId, incarnation: int) -> None:
        """A new process with an empty engine."""
        engine = Engine(replica=Replica(self.world.cluster, self.world.now), incarnation=incarnation)
        self.engines[worker] = engine
        host = self.world.cluster.host_of(int(worker.rpartition("-")[2]))
        self.world.send(
            events.ReplicaJoined(
                worker=worker,
                incarnation=incarnation,
                host=host,
                num_requests_max=self.world.cluster.num_requests_max,
                kv_tokens_max=self.world.cluster.kv_tokens_max,
                num_requests_memory_bound=self.world.cluster.requests_memory_bound,
            )
        )

    def kill(self, worker: WorkerId) -> Engine | None:
        """The process is gone with everything in it that was not reported. The core does not know yet."""
        engine = self.engines.pop(worker, None)
        if engine is not None:
            engine.replica.advance(self.world.now)
            self._num_generated_before += engine.replica.num_generated
            held = [*engine.replica.requests.values(), *engine.unsent]
            self.world.measures.num_tokens_lost += sum(
                max(0, engine.replica.length(r) - self.stored.get(r.trajectory, 0)) for r in held
            )
            engine.wake += 1
        return engine

    def rejoin(self, worker: WorkerId, incarnation: int, seconds: float) -> None:
        """The launcher starts the process anew; it joins after `seconds`."""
        lost_at = self.world.now

        def join() -> None:
            if not self.world.core.state.finished and worker not in self.engines:
                self.world.measures.recoveries_s.append(self.world.now - lost_at)
                self.join(worker, incarnation + 1)

        self.world.after(seconds, join)

    def schedule(self, worker: WorkerId, engine: Engine) -> None:
        """Wake the engine when something may end in it; a hung one is not woken."""
        self._wake(worker, engine, math.inf if engine.replica.hung else engine.replica.quiet_until())

    def hang(self, worker: WorkerId) -> None:
        """The engine computes nothing more, but for the turn that it was about to make; its worker answers."""
        engine = self.engines[worker]
        engine.replica.hang(self.world.now)
        engine.hung_at = self.world.now
        self._wake(worker, engine, engine.replica.wake_at)

    def _wake(self, worker: WorkerId, engine: Engine, moment: float) -> None:
        engine.wake += 1
        number = engine.wake
        if moment != math.inf:
            self.world.at(moment, lambda: self._turn(worker, engine, number))

    def _turn(self, worker: WorkerId, engine: Engine, number: int) -> None:
        if engine.wake != number:
            return
        outcome = engine.replica.turn(self.world.now)
        self.schedule(worker, engine)
        if outcome.finished or outcome.aborted:
            self.deliver(worker, engine, outcome)

    def deliver(self, worker: WorkerId, engine: Engine, outcome: Outcome) -> None:
        """Report what ended, now or when the channel is back."""
        if not engine.connected:
            engine.backlog.append(lambda: self.deliver(worker, engine, outcome))
            engine.unsent += [*outcome.finished, *outcome.aborted]
        elif self.engines.get(worker) is engine:
            self.report(worker, engine, outcome)

    def report(self, worker: WorkerId, engine: Engine, outcome: Outcome, lengths: bool = False) -> None:
        """One frame: what ended, KV use, and on a flush the lengths of everything in the engine."""
        replica = engine.replica
        replica.catch_up(self.world.now)
        failed = [failure for r in outcome.finished if (failure := self.failure(r)) is not None]
        fallen = [failure.trajectory for failure in failed]
        finished = [r for r in outcome.finished if r.trajectory not in fallen] if fallen else outcome.finished
        known = [*(r for r in outcome.finished if r.trajectory in fallen), *outcome.aborted]
        if lengths:
            known += replica.requests.values()
        num_tokens = [replica.length(r) for r in known]
        if known:
            self._store(known, num_tokens)
        self._store(finished, [r.num_tokens for r in finished])
        engine.reported = (replica.kv_tokens, replica.num_running, replica.num_waiting)
        self.world.send(
            events.ReplicaReported(
                worker=worker,
                incarnation=engine.incarnation,
                trajectories=array("q", [r.trajectory for r in known]).tobytes() if known else b"",
                attempts=array("i", [r.attempt for r in known]).tobytes() if known else b"",
                num_tokens=array("i", num_tokens).tobytes() if known else b"",
                finished=[self._finished(r) for r in finished],
                rewarded=[
                    events.RewardedAttempt(trajectory=r.trajectory, attempt=r.attempt, reward=1.0, parts={})
                    for r in finished
                    if not (r.draw.reward_s or self._hangs(worker, engine, r))
                ],
                failed=failed,
                aborted=[events.AbortedAttempt(trajectory=r.trajectory, attempt=r.attempt) for r in outcome.aborted],
                num_running=replica.num_running,
                num_waiting=replica.num_waiting,
                kv_tokens=replica.kv_tokens,
            )
        )
        for request in finished:
            if request.draw.reward_s and not self._hangs(worker, engine, request):
                self._reward_later(worker, engine, request)

    def _reward_later(self, worker: WorkerId, engine: Engine, request: Request) -> None:
        rewarded = events.RewardedAttempt(trajectory=request.trajectory, attempt=request.attempt, reward=1.0, parts={})
        self.world.after(request.draw.reward_s, partial(self.say, worker, engine, rewarded=[rewarded]))

    def _store(self, requests: Sequence[Request], num_tokens: list[int]) -> None:
        """The token store has so many tokens of them, unless they go on elsewhere by now."""
        for request, num in zip(requests, num_tokens, strict=True):
            if self.attempts.get(request.trajectory) == request.attempt:
                self.stored[request.trajectory] = num

    def failure(self, request: Request) -> events.FailedAttempt | None:
        """How a finished attempt fails in place of being rewarded, if a fault says so."""
        for reason, kind in (("reward_infra", "infra"), ("reward_data", "data")):
            if self.world.intercept(reason, request):
                return events.FailedAttempt(
                    trajectory=request.trajectory, attempt=request.attempt, kind=kind, reason=reason
                )
        return None

    def _hangs(self, worker: WorkerId, engine: Engine, request: Request) -> bool:
        """Whether its reward never comes; the worker says so after the time limit."""
        hangs = self.world.intercept("reward_hang", request)
        if hangs:
            failed = events.FailedAttempt(
                trajectory=request.trajectory, attempt=request.attempt, kind="infra", reason="reward_timeout"
            )
            self.world.after(self.reward_timeout_s, lambda: self.say(worker, engine, failed=[failed]))
        return hangs

    def say(self, worker: WorkerId, engine: Engine, **words: Any) -> None:
        """What a worker reports without its engine, now or when its channel is back."""
        if not engine.connected:
            engine.backlog.append(lambda: self.say(worker, engine, **words))
        elif self.engines.get(worker) is engine:
            empty = array("q").tobytes()
            replica = engine.replica
            replica.catch_up(self.world.now)
            event = events.ReplicaReported(
                worker=worker, incarnation=engine.incarnation, trajectories=empty, attempts=empty, num_tokens=empty,
                num_running=replica.num_running, num_waiting=replica.num_waiting, kv_tokens=replica.kv_tokens, **words,
            )  # fmt: skip
            self.world.send(event)

    def _finished(self, request: Request) -> events.FinishedAttempt:
        return events.FinishedAttempt(
            trajectory=request.trajectory,
            attempt=request.attempt,
            finish_reason="length" if request.num_tokens >= self.world.workload.tokens_max else "stop",
            num_prompt_tokens=request.num_prompt_tokens,
            num_tokens=request.num_tokens,
            queued_s=max(0.0, request.first_run_at - request.submitted_at),
            decode_s=self.world.now - request.first_run_at,
        )

    def report_kv(self, lengths: bool = False) -> None:
        """Every connected replica says what it holds, if that has changed."""
        for worker, engine in list(self.engines.items()):
            replica = engine.replica
            if not engine.connected:
                continue
            replica.advance(self.world.now)
            present = (replica.kv_tokens, replica.num_running, replica.num_waiting)
            if lengths:
                self.report(worker, engine, NOTHING, lengths)
            elif present != engine.reported:
                self._report_load(worker, engine, present)

    def _report_load(self, worker: WorkerId, engine: Engine, present: tuple[int, int, int]) -> None:
        """A frame in which nothing ended: most events of a run are these."""
        engine.reported = present
        kv_tokens, num_running, num_waiting = present
        self.world.send(
            events.ReplicaReported(
                worker=worker, incarnation=engine.incarnation, trajectories=b"", attempts=b"", num_tokens=b"",
                num_running=num_running, num_waiting=num_waiting, kv_tokens=kv_tokens,
            )
        )  # fmt: skip

    # ---- what the core asks for --------------------------------------------------------------------------------

    def _on_start_group(self, action: actions.StartGroup) -> None:
        engine = self.engines[action.worker]
        core = self.world.core.state
        assert health.is_healthy(core, core.replicas[action.worker]), (
            f"{action.worker} is given work and is not healthy"
        )
        self._check_room(action)
        prefilled = False
        for start in action.starts:
            self._check_start(action, start)
            request = self._request(action, start, shared=prefilled)
            prefilled = prefilled or not start.resume
            if start.score_only:
                self._rescore(action.worker, engine, request)
            else:
                engine.replica.submit(self.world.now, request)
        self.schedule(action.worker, engine)

    def _check_room(self, action: actions.StartGroup) -> None:
        """New groups keep to the limit (one larger than it runs alone); what was interrupted elsewhere may exceed it."""
        size, replica = len(action.starts), self.world.core.state.replicas[action.worker]
        is_new = all(start.attempt == 1 for start in action.starts)
        assert not is_new or replica.num_generating <= max(replica.num_requests_max, size), f"{replica.id} is overfull"

    def _check_start(self, action: actions.StartGroup, start: actions.Start) -> None:
        before = self.attempts.get(start.trajectory, 0)
        assert before or not self.world.training.full, f"{start.trajectory} is drawn while nothing can be written"
        assert start.attempt > before, f"attempt {start.attempt} of {start.trajectory} after {before}"
        self.attempts[start.trajectory] = start.attempt
        if start.resume:
            record = self.world.core.state.trajectories[start.trajectory]
            stored = self.stored.get(start.trajectory, 0)
            assert record.num_tokens == stored, f"{start.trajectory}: books {record.num_tokens}, store {stored} tokens"
            version = self.versions[start.trajectory]
            assert start.score_only or version == action.version, (
                f"{start.trajectory} mixes {version}, {action.version}"
            )
        else:
            self.stored[start.trajectory] = 0
            self.versions[start.trajectory] = action.version

    def _request(self, action: actions.StartGroup, start: actions.Start, shared: bool) -> Request:
        """Siblings that begin together compute their prompt once (prefix cache)."""
        draw = self.world.workload.draw(start.seed, action.version.step)
        done, prompt = self.stored[start.trajectory], self.world.workload.prompt_tokens
        return Request(
            trajectory=start.trajectory,
            attempt=start.attempt,
            group=action.group,
            version=action.version,
            draw=draw,
            num_prompt_tokens=prompt,
            num_tokens=done,
            submitted_at=self.world.now,
            prefill_tokens=done + (0 if shared else prompt),
            next_pause=sum(pause.at < done for pause in draw.pauses),
        )

    def _rescore(self, worker: WorkerId, engine: Engine, request: Request) -> None:
        """The tokens are complete, only the reward is missing: the worker answers without its engine."""
        if not self._hangs(worker, engine, request):
            self._reward_later(worker, engine, request)

    def _on_abort_attempts(self, action: actions.AbortAttempts) -> None:
        """What the core has voided ends at once; what is to move goes on until the source has taken notice."""
        engine = self.engines.get(action.worker)
        if engine is None:
            return
        records, pairs = self.world.core.state.trajectories, zip(action.trajectories, action.attempts, strict=True)
        for trajectory, attempt in pairs:
            record = records.get(trajectory)
            if self.answer_s and record and record.moving_to and record.attempt == attempt:
                self.world.after(self.answer_s, partial(self._let_go, action.worker, engine, trajectory, attempt))
            else:
                engine.replica.abort(self.world.now, trajectory, attempt)
        self.schedule(action.worker, engine)

    def _let_go(self, worker: WorkerId, engine: Engine, trajectory: TrajectoryId, attempt: int) -> None:
        if self.engines.get(worker) is engine:
            engine.replica.abort(self.world.now, trajectory, attempt)
            self.schedule(worker, engine)

    def _on_pull_weights(self, action: actions.PullWeights) -> None:
        engine = self.engines.get(action.worker)
        if engine is None or engine.replica.hung or self.world.intercept("pull_hang", action):
            return
        running = [r for r in engine.replica.requests.values() if r.trajectory not in engine.replica.stopping]
        assert not running, f"{action.worker} pulls under {len(running)} running requests"
        wait_s = self.world.relays.pull_s(action)
        event: events.AnyEvent = events.ReplicaRefreshed(
            worker=action.worker, incarnation=engine.incarnation, version=action.version, digest=action.digest,
            wait_s=wait_s,
        )  # fmt: skip
        if self.world.intercept("pull_failed", action):
            event = events.ReplicaRefreshFailed(
                worker=action.worker, incarnation=engine.incarnation, version=action.version, reason="injected"
            )
        self.world.after(wait_s, lambda: self._pulled(action, engine, event))

    def _pulled(self, action: actions.PullWeights, engine: Engine, event: events.AnyEvent) -> None:
        if self.engines.get(action.worker) is not engine or engine.replica.hung:
            return
        if not engine.connected:
            engine.backlog.append(lambda: self._pulled(action, engine, event))
            return
        if isinstance(event, events.ReplicaRefreshed):
            self.world.measures.waits_s.append(event.wait_s)
            self.world.measures.lanes.setdefault(action.worker, []).append((self.world.now, action.version.step))
        self.world.send(event)

    def _on_forget_tokens(self, action: actions.ForgetTokens) -> None:
        for trajectory in action.trajectories:
            self.stored.pop(trajectory, None)
            self.versions.pop(trajectory, None)

    def stop(self, worker: WorkerId, incarnation: int, lost: bool) -> None:
        """It is to end. If the core has given it up, the launcher starts another in its place."""
        engine = self.engines.get(worker)
        if engine is not None and engine.incarnation == incarnation:
            self.kill(worker)
            if engine.hung_at:
                self.world.measures.detections_s.append(self.world.now - engine.hung_at)
            engine.given_up = not engine.connected
            if lost and engine.connected and not self.world.core.state.finished:
                self.rejoin(worker, incarnation, self.restart_s)
