"""When a committed checkpoint turns out damaged: the trainer goes on from an earlier one, and the ledger says what that costs.

    committed 1 … 8 │ leased 9, 10         step 8 is damaged, the trainer restored step 4
    committed 1 … 4 │ leased 5, 6          dropped{checkpoint_lost}: what steps 5 to 8 had trained

Tokens of committed groups are forgotten, so these steps cannot be redone: other groups are trained in their place, the leased ones
first, in their order, under new step numbers. Attempts of these steps are numbered from above all attempts so far, so that no
(step, attempt) is issued twice.
"""

import msgspec

from laminar.core import ledger, story
from laminar.core.actions import RaiseAlarm, RecordLostSteps
from laminar.core.events import TrainerRankReady
from laminar.core.records import State
from laminar.core.resume import DataState, decode
from laminar.core.trainer_records import Step
from laminar.core.turn import Turn
from laminar.ids import Version

LOST = "checkpoint_lost"


def go_back(turn: Turn, event: TrainerRankReady) -> bool:
    """Take back what was committed after `event.step`. False if that is no checkpoint of this run: nothing is changed."""
    trainer = turn.state.trainer
    saved = _saved(event)
    if saved is None:
        return False
    last, trainer.checkpoint = trainer.checkpoint, event.step
    trainer.checkpoint_version = Version(saved.step, max(saved.branch, 0))
    trainer.attempt_floor = trainer.branch + 1  # each attempt of a step but the first began with a branch
    trajectories = ledger.lose(turn.state.ledger.trajectories, saved.ledger.trajectories.committed, LOST)
    tokens = ledger.lose(turn.state.ledger.tokens, saved.ledger.tokens.committed, LOST)
    _renumber(turn.state, last - event.step)
    turn.look_again()
    turn.emit(RecordLostSteps(cause=turn.cause, first=event.step + 1, last=last, reason=LOST))
    turn.tell(f"steps {event.step + 1} to {last} are lost with their checkpoints", story.step(event.step))
    cost = f"what steps {event.step + 1} to {last} had trained is lost: {trajectories} trajectories, {tokens} tokens"
    _tell(turn, event, cost)
    return True


def tell(turn: Turn, event: TrainerRankReady) -> None:
    """Say that checkpoints were passed over of which nothing had been committed."""
    if event.damaged:
        _tell(turn, event, "nothing that was committed is lost")


def _tell(turn: Turn, event: TrainerRankReady, cost: str) -> None:
    text = f"{'; '.join(event.damaged)}; the trainer goes on from step {event.step}; {cost}"
    turn.emit(RaiseAlarm(cause=turn.cause, name="checkpoint-damaged", text=text))


def _saved(event: TrainerRankReady) -> DataState | None:
    try:
        saved = decode(event.data_state)
    except msgspec.MsgspecError:
        return None
    return saved if event.damaged and saved.step == event.step else None


def _renumber(state: State, by: int) -> None:
    """The leased steps follow the restored one."""
    steps, state.steps = state.steps, {}
    for step in steps.values():
        number = step.step - by
        state.steps[number] = Step(
            step=number, attempt=max(step.attempt, state.trainer.attempt_floor), groups=step.groups, done=step.done
        )
        for group_id in step.groups:
            group = state.groups[group_id]
            group.step = number
            for trajectory in group.trajectories:
                state.trajectories[trajectory].step = number
