"""Checkpoints of the trainer, and what they commit.

    due (every so many steps, or asked for) ──► SaveCheckpoint ──► saved: its steps are committed, their tokens forgotten
                                                              └─► failed: told, tried again with the next one due

A batch leaves the state only when a checkpoint that is complete on disk commits it.
"""

from laminar.core import groups, ledger, recovery, story
from laminar.core.actions import ForgetTokens, RaiseAlarm, SaveCheckpoint
from laminar.core.events import CheckpointFailed, CheckpointSaved
from laminar.core.resume import data_state
from laminar.core.turn import Turn
from laminar.ids import Version

SAVE_TRIES_MAX = 3  # a disk that refused three checkpoints needs a person


def _last_due(turn: Turn) -> int:
    """The last step up to now of which a checkpoint is due; 0 = none is."""
    every, step = turn.settings.checkpoint_every, turn.state.trainer.step
    return step // every * every if every else 0


def on_step_finished(turn: Turn) -> None:
    """Save what is due now, or what an operator asked for meanwhile; while the disk is full, `save_overdue` catches up."""
    trainer = turn.state.trainer
    if trainer.save_wanted or _last_due(turn) > max(trainer.save_began, trainer.checkpoint):
        save(turn)


def save(turn: Turn) -> None:
    """Save the trainer as it is now, unless that is done or under way, or the disk takes nothing.

    Training goes on while a checkpoint is written, one at a time: what becomes due meanwhile is saved after the next step that ends
    when it is complete. One that failed is not tried again before the next is due.
    """
    trainer = turn.state.trainer
    if trainer.saving >= 0 or trainer.checkpoint >= trainer.step or turn.state.storage_failure:
        return
    trainer.saving, trainer.saving_since = trainer.step, turn.at
    trainer.save_began, trainer.save_wanted = trainer.step, False
    turn.emit(SaveCheckpoint(cause=turn.cause, step=trainer.step, data_state=data_state(turn.state, trainer.step)))
    turn.tell("checkpoint started", story.step(trainer.step))


def save_overdue(turn: Turn) -> None:
    """The disk takes writes again: save what became due meanwhile, before the next step begins."""
    trainer = turn.state.trainer
    if trainer.ready and not trainer.running and _last_due(turn) > trainer.checkpoint:
        save(turn)
    save_wanted(turn)


def save_wanted(turn: Turn) -> None:
    """What an operator asked for, as soon as nothing keeps it from being made."""
    trainer = turn.state.trainer
    if trainer.save_wanted and trainer.ready and not trainer.running:
        trainer.save_wanted = trainer.checkpoint < trainer.step
        save(turn)


def on_checkpoint_saved(turn: Turn, event: CheckpointSaved) -> None:
    """Commit the steps that it contains."""
    state, trainer = turn.state, turn.state.trainer
    if trainer.saving != event.step:
        return
    trainer.saving, trainer.num_failed_saves = -1, 0
    trainer.checkpoint = max(trainer.checkpoint, event.step)
    recovery.forgive(turn, trainer.launch)
    trainer.checkpoint_version = Version(event.step, max(trainer.branch, 0))
    for number in [step for step in state.steps if step <= event.step]:
        step = state.steps.pop(number)
        members = groups.members(state, step.groups)
        ledger.move(state, members, "leased", "committed")
        for trajectory in members:
            del state.trajectories[trajectory.id]
        for group in step.groups:
            del state.groups[group]
        ids = [trajectory.id for trajectory in members]
        turn.emit(ForgetTokens(cause=turn.cause, trajectories=ids, step=number))
    turn.tell("checkpoint saved", story.step(event.step))
    save_wanted(turn)


def on_checkpoint_failed(turn: Turn, event: CheckpointFailed) -> None:
    """Nothing is committed; it is tried again with the next one due, at the end a few times."""
    trainer = turn.state.trainer
    if trainer.saving != event.step:
        return
    trainer.saving = -1
    trainer.num_failed_saves += not turn.state.storage_failure  # what is wrong is known, and waited for
    text = f"the checkpoint of step {event.step} failed: {event.reason}"
    turn.emit(RaiseAlarm(cause=turn.cause, name="checkpoint-failed", text=text))
    turn.tell(text, story.step(event.step))
    if trainer.num_failed_saves >= SAVE_TRIES_MAX:
        turn.fail(f"the checkpoint of step {event.step} could not be written: {event.reason}")
    save_wanted(turn)
