"""The commands of the language: functions `(view, words) -> Answer | Change`, pure, over the core's state, story and reasons."""

from laminar.console.commands import ask, breaks, change, console, edit, fleet, groups, held, run, steps, stories
from laminar.console.language import Command

COMMANDS: tuple[Command, ...] = (
    *run.COMMANDS,
    *fleet.COMMANDS,
    *groups.COMMANDS,
    *stories.COMMANDS,
    *ask.COMMANDS,
    *breaks.COMMANDS,
    *held.COMMANDS,
    *edit.COMMANDS,
    *steps.COMMANDS,
    *change.COMMANDS,
    *console.COMMANDS,
)
