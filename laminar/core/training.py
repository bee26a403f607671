"""The trainer: leasing batches, steps, publication. (Checkpoints and commits: `laminar.core.checkpointing`.)

    absent ──► ready(step, branch) ──► running(step + 1) ──► ready …
                                           └ saving meanwhile ──► committed up to the checkpoint

Invariants:
* A batch is leased to exactly one step and leaves the state only when a checkpoint that is complete on disk commits it.
* After a restore the steps since the checkpoint are redone from the same groups in the same order (attempt + 1).
* A lost trainer is started again from its newest checkpoint, `trainer_restarts_max` times without a checkpoint in between.
"""

from laminar.core import (
    bounds,
    checkpointing,
    evaluation,
    groups,
    ledger,
    pace,
    recovery,
    relays,
    rollback,
    story,
    versions,
)
from laminar.core.actions import (
    BatchRow,
    FinishRun,
    RaiseAlarm,
    RecordTrajectories,
    StartTrainStep,
    StopWorker,
)
from laminar.core.decisions import TakeBatch
from laminar.core.events import StepFailed, StepFinished, TrainerRankReady
from laminar.core.records import GroupState, State, Trajectory
from laminar.core.trainer_records import Branch, Step
from laminar.core.turn import Turn
from laminar.ids import GroupId, WorkerId


def on_rank_ready(turn: Turn, event: TrainerRankReady) -> None:
    """When all ranks of a launch are there, the trainer is ready; a restore starts a new branch."""
    trainer = turn.state.trainer
    is_old = turn.state.fenced.get(event.worker, 0) >= event.incarnation
    if is_old or recovery.is_waiting(turn, launch_of(turn.state, event.worker)):
        reason = "this launch of the trainer was given up"
        turn.emit(StopWorker(cause=turn.cause, worker=event.worker, incarnation=event.incarnation, reason=reason))
        return
    if trainer.ready and event.incarnation > trainer.ranks.get(event.worker, 0):
        lose(turn, event.worker, "replaced by a new process")
    if trainer.ready:
        return
    trainer.launch = trainer.launch or launch_of(turn.state, event.worker)
    trainer.ranks[event.worker] = event.incarnation
    trainer.hosts[event.worker] = event.host
    trainer.world_size = event.world_size
    if len(trainer.ranks) < trainer.world_size:
        return
    if event.step >= trainer.checkpoint:
        rollback.tell(turn, event)
    elif not rollback.go_back(turn, event):
        turn.fail(f"the trainer restored step {event.step}, but step {trainer.checkpoint} is already committed")
        return
    recovery.joined(turn, trainer.launch)
    trainer.ready, trainer.running, trainer.saving = True, 0, -1
    evaluation.supersede(turn, event.step)
    _begin_branch(turn, event.step)
    for step in turn.state.steps.values():
        if step.step > event.step:
            step.done, step.attempt = False, step.attempt + 1
    turn.tell(f"trainer ready at step {event.step} with {trainer.world_size} ranks", story.step(event.step))
    relays.arrange(turn)
    versions.made(turn)


def _begin_branch(turn: Turn, step: int) -> None:
    trainer, floor = turn.state.trainer, turn.state.branch_floor
    fresh = trainer.branch < 0 and floor == 0
    trainer.branch = 0 if fresh else max(trainer.branch + 1, floor)
    trainer.step = trainer.save_began = step
    if trainer.branch > 0:
        turn.state.branches.append(Branch(branch=trainer.branch, fork_step=step))
        turn.state.may_have_aged = True
    if fresh:
        trainer.checkpoint = step


def launch_of(state: State, worker: WorkerId) -> WorkerId:
    """What is started again as a whole: the trainer with all its nodes (``trainer-0`` of ``trainer-1/3``); a replica is its own."""
    process, trainer = process_of(worker), state.trainer
    is_trainers = trainer.launch is not None and any(process_of(rank) == process for rank in trainer.hosts)
    return trainer.launch if is_trainers and trainer.launch else process


def process_of(worker: WorkerId) -> WorkerId:
    """What the worker ends with: a node's ``trainer-1`` of its rank ``trainer-1/3``; a replica is its own."""
    return WorkerId(worker.partition("/")[0])


def lose(turn: Turn, worker: WorkerId, reason: str) -> None:
    """A rank is gone, so the trainer is: its leases stay, its unsaved steps are to be redone by the next launch."""
    turn.tell(f"trainer lost: {worker}: {reason}", story.step(turn.state.trainer.step + 1))
    _abandon(turn, f"the trainer was lost ({worker}: {reason})")


def _abandon(turn: Turn, why: str) -> None:
    """Expect nothing more of this launch; the next one has to bring all its ranks. Without a next one the run has failed."""
    trainer = turn.state.trainer
    for rank, incarnation in trainer.ranks.items():
        turn.state.fenced[rank] = max(turn.state.fenced.get(rank, 0), incarnation)
        turn.state.silent.pop(rank, None)
    ranks, trainer.ranks, trainer.ready, trainer.running, trainer.saving = trainer.ranks, {}, False, 0, -1
    versions.abandon(turn, why)
    assert trainer.launch is not None
    if not recovery.plan(turn, trainer.launch, why, "trainer"):
        turn.fail(why)
        return
    since = (
        f"its checkpoint of step {trainer.checkpoint}"
        if trainer.checkpoint > 0
        else "the beginning, without a checkpoint"
    )
    turn.emit(RaiseAlarm(cause=turn.cause, name="trainer-lost", text=f"{why}; it is started again from {since}"))
    for rank, incarnation in ranks.items():
        turn.emit(StopWorker(cause=turn.cause, worker=rank, incarnation=incarnation, reason=why, lost=False))


# ---- steps -------------------------------------------------------------------------------------------------


def why_no_batch_wanted(turn: Turn) -> str:
    """Why the trainer waits for no batch now; empty = it does."""
    state, trainer = turn.state, turn.state.trainer
    if trainer.running:
        return f"it works on step {trainer.running}"
    if not trainer.ready:
        return "not all of its ranks are ready"
    if state.stopping:
        return f"the run is stopping: {state.stopping}"
    if state.storage_failure:
        return f"no step begins while nothing can be written: {state.storage_failure}"
    if trainer.step >= turn.settings.steps:
        return "the steps of the run are done"
    return "its next step has its batch already" if trainer.step + 1 in state.steps else ""


def why_no_batch(turn: Turn) -> str:
    """Why no batch is taken from the buffer now; empty = one is."""
    state, num_groups = turn.state, turn.settings.batch_groups
    if reason := why_no_batch_wanted(turn):
        return reason
    if len(state.buffer) < num_groups:
        return f"{len(state.buffer)} of {num_groups} groups are complete and in the buffer"
    if turn.settings.custom_sampler:
        return "" if state.sampler_answer else "the custom sampler has not chosen"
    return bounds.refusal(turn, bounds.oldest_first(turn)[:num_groups])


def propose_batch(turn: Turn) -> TakeBatch | None:
    """FIFO, or the custom sampler's answer."""
    state = turn.state
    if why_no_batch(turn):
        return None
    chosen = state.sampler_answer if turn.settings.custom_sampler else bounds.oldest_first(turn)
    return TakeBatch(step=state.trainer.step + 1, groups=chosen[: turn.settings.batch_groups])


def apply_batch(turn: Turn, decision: TakeBatch) -> str:
    """Lease the groups and start the step. Why the decision is void (it was held for long, or edited); empty = it is done."""
    state = turn.state
    state.sampler_answer = []
    if reason := _why_no_lease(turn, decision):
        return reason
    for group_id in decision.groups:
        _lease(turn, group_id, decision.step)
    state.steps[decision.step] = Step(
        step=decision.step, attempt=state.trainer.attempt_floor + 1, groups=list(decision.groups)
    )
    turn.look_again()
    turn.tell(f"batch of {len(decision.groups)} groups leased", story.step(decision.step))
    return ""


def _why_no_lease(turn: Turn, decision: TakeBatch) -> str:
    """Why these groups cannot be leased to this step; empty = they can."""
    state = turn.state
    if reason := why_no_batch_wanted(turn):
        return f"the trainer wants no batch: {reason}"
    if decision.step != state.trainer.step + 1:
        return f"the next step is {state.trainer.step + 1}, not {decision.step}"
    if not decision.groups:
        return "a batch needs groups"
    if missing := [group for group in decision.groups if group not in state.buffer]:
        return f"{story.group(missing[0])} is not in the buffer"
    if len(set(decision.groups)) < len(decision.groups):
        return "a group is in it twice"
    return bounds.refusal(turn, decision.groups)


def _lease(turn: Turn, group_id: GroupId, step: int) -> None:
    group = turn.state.groups[group_id]
    del turn.state.buffer[group_id]
    members = groups.members(turn.state, [group_id])
    ledger.move(turn.state, members, "buffered", "leased")
    group.state, group.step = GroupState.LEASED, step
    for trajectory in members:
        trajectory.sample_version = turn.trainer_version
        trajectory.step = step
        trajectory.timings.sampled = turn.at


def start_leased(turn: Turn) -> bool:
    """Start the next leased step that is not done: a new one, or one to be redone after a restore."""
    trainer = turn.state.trainer
    step = turn.state.steps.get(trainer.step + 1)
    if step is None or step.done or not trainer.ready or trainer.running:
        return False
    if turn.state.stopping or turn.state.storage_failure:
        return False
    trainer.running, trainer.running_since = step.step, turn.at
    rows = [row(trajectory) for trajectory in groups.members(turn.state, step.groups)]
    turn.emit(StartTrainStep(cause=turn.cause, step=step.step, attempt=step.attempt, rows=rows))
    turn.tell(f"train step started, attempt {step.attempt}, {len(rows)} trajectories", story.step(step.step))
    return True


def row(t: Trajectory) -> BatchRow:
    """What the trainer is told of a trajectory of its batch."""
    assert t.behavior_version is not None
    return BatchRow(t.id, t.group, t.behavior_version, t.num_prompt_tokens, t.num_tokens, t.reward)


def on_step_finished(turn: Turn, event: StepFinished) -> None:
    """A new version exists."""
    trainer = turn.state.trainer
    step = turn.state.steps.get(event.step)
    if step is None or trainer.running != event.step or step.attempt != event.attempt:
        turn.tell(f"answer of old attempt {event.attempt} ignored", story.step(event.step))
        return
    step.done = True
    trainer.step, trainer.running = event.step, 0
    pace.stepped(turn.state.pace, turn.at)
    members = groups.members(turn.state, step.groups)
    for trajectory in members:
        trajectory.timings.trained = turn.at
    turn.emit(RecordTrajectories(cause=turn.cause, trajectories=members))
    turn.tell("train step finished", story.step(event.step))
    versions.made(turn)
    checkpointing.on_step_finished(turn)
    if 0 < turn.state.stop_after <= trainer.step and not turn.state.stopping:
        turn.state.stopping = f"stopped after step {trainer.step}, as an operator wanted"


def on_step_failed(turn: Turn, event: StepFailed) -> None:
    """The ranks may differ now: only a restart from the checkpoint helps."""
    step = turn.state.steps.get(event.step)
    if step is not None and turn.state.trainer.running == event.step and step.attempt == event.attempt:
        _abandon(turn, f"train step {event.step} failed: {event.reason}")


def check(turn: Turn) -> None:
    """Give up a trainer whose step or checkpoint has lasted too long: its heartbeats say that it lives, not that it works."""
    due = deadline(turn.state, turn.settings.step_timeout_s)
    if due and due <= turn.at:
        trainer = turn.state.trainer
        what = f"train step {trainer.running}" if trainer.running else f"the checkpoint of step {trainer.saving}"
        limit = f"trainer.step_timeout_s = {turn.settings.step_timeout_s:g}"
        _abandon(turn, f"{what} did not end within {limit}")


def deadline(state: State, timeout_s: float) -> float:
    """When what the trainer works on has lasted too long; 0 = it works on nothing, or may take for ever."""
    trainer = state.trainer
    since = [trainer.running_since] * (trainer.running > 0) + [trainer.saving_since] * (trainer.saving >= 0)
    return min(since) + timeout_s if since and timeout_s else 0.0


# ---- the end -----------------------------------------------------------------------------------------------


def finish(turn: Turn) -> bool:
    """Save what is to be saved; when nothing is left to do, the run is over. True if it made replicas free.

    A run that ends with trained steps that no checkpoint holds has failed, whatever it was stopped for.
    """
    state, trainer = turn.state, turn.state.trainer
    completed = trainer.ready and trainer.step >= turn.settings.steps
    if state.finished or not (completed or state.stopping) or trainer.running:
        return False
    if trainer.ready and trainer.checkpoint < trainer.step and trainer.num_failed_saves < checkpointing.SAVE_TRIES_MAX:
        checkpointing.save(turn)
        if not _gives_up_saving(turn):
            return False
    if trainer.saving >= 0 and trainer.ready:
        return False
    freed = _drop_unleased(turn, "stopped" if state.stopping else "run_complete")
    if completed and not state.stopping and evaluation.is_pending(turn):
        return freed
    state.finished = state.stopping or "completed"
    if trainer.step > max(trainer.checkpoint, 0):
        state.ok = False
        _tell_unsaved(turn)
    turn.emit(FinishRun(cause=turn.cause, reason=state.finished, ok=state.ok))
    return False


def _gives_up_saving(turn: Turn) -> bool:
    """Whether a stopped run has waited long enough for a disk that takes nothing. Its first wait sets the end of all."""
    state = turn.state
    if not (state.stopping and state.storage_failure):
        return False
    state.stop_by = state.stop_by or turn.at + turn.settings.stop_grace_s
    return turn.at >= state.stop_by


def _tell_unsaved(turn: Turn) -> None:
    last, first = turn.state.trainer.step, max(turn.state.trainer.checkpoint, 0) + 1
    steps = f"step {last} is" if first == last else f"steps {first} to {last} are"
    why = f": {turn.state.storage_failure}" if turn.state.storage_failure else ""
    text = f"{steps} in no checkpoint{why}; a resumed run trains from step {first} on again"
    turn.emit(RaiseAlarm(cause=turn.cause, name="not-saved", text=text))


def _drop_unleased(turn: Turn, reason: str) -> bool:
    """The run ends: everything that no step has leased is dropped. True if there was anything."""
    unleased = [group for group in turn.state.groups.values() if group.step == 0]
    for group in unleased:
        groups.drop_group(turn, group, reason)
    return bool(unleased)
