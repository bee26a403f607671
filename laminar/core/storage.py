"""When the disk is full, the log or the run's directory cannot be written, or no file can be opened: no new group, no train step
and no checkpoint begins, and people are told.

What generates goes on (its tokens wait in memory), retries and moves go on; a step that runs ends. Nothing is lost, unless the run
is stopped meanwhile: it waits `stop_grace_s` for the disk, then ends without the last checkpoint and says which steps are in none
(`training.finish`). A run that completes waits without end: its last checkpoint is what it was for, and a stop ends that too.
"""

from laminar.core import checkpointing
from laminar.core.actions import RaiseAlarm
from laminar.core.events import StorageFailed, StorageRecovered
from laminar.core.turn import Turn


def on_failed(turn: Turn, event: StorageFailed) -> None:
    """Begin nothing new; say so once."""
    if not turn.state.storage_failure:
        text = f"{event.reason}; no group, step or checkpoint begins until that is cleared"
        turn.emit(RaiseAlarm(cause=turn.cause, name="storage-failed", text=text))
        turn.state.storage_failed_at = turn.at
    turn.state.storage_failure = event.reason


def on_recovered(turn: Turn, event: StorageRecovered) -> None:
    """Go on where everything stopped."""
    turn.state.storage_failure = ""
    turn.look_again()
    checkpointing.save_overdue(turn)
