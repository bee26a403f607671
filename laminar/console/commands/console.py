"""Commands that the terminal answers itself; they are here for `help` and completion."""

from laminar.console.language import Command

ITSELF = "the console answers it itself"

COMMANDS = (
    Command(
        name="help",
        part="Console",
        usage="help [COMMAND]",
        summary="all commands, or one with examples",
        arguments=(0, 1),
        takes="COMMAND",
        elsewhere=ITSELF,
        examples=(("help", "all"), ("help edit", "one")),
    ),
    Command(
        name="watch",
        part="Console",
        usage="watch COMMAND …",
        summary="repeat a command every second until Ctrl-C",
        arguments=(1, 12),
        takes="COMMAND, SUBJECT",
        only=("live",),
        elsewhere="nothing changes in it but by your commands",
        examples=(("watch fleet", "the fleet as it changes"), ("watch story r3 10", "what happens to rollout-3")),
    ),
    Command(
        name="quit", part="Console", usage="quit", summary="leave; the run goes on (so does Ctrl-D)", elsewhere=ITSELF
    ),
)
