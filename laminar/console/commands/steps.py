"""The commands that go along a run that is not live; `laminar.console.stepping` carries them out."""

from laminar.console.commands import held
from laminar.console.language import Command

UNTIL = "until step N | until time S | until event N | for S seconds | for N events | for N steps"
PLACES = "until for, step time event, seconds events steps"
LIVE = "it goes on by itself; `hold`, `pause` or `break` make it wait for you"

COMMANDS = (
    Command(
        name="step",
        part="Step",
        usage="step [N]",
        summary="to the next event, N times",
        arguments=(0, 1),
        only=("sim", "log"),
        elsewhere=LIVE,
        examples=(("step", "the next event"), ("step 20", "the next twenty")),
        details="In a simulation one moment may bring several events, which are then taken together.",
    ),
    Command(
        name="run",
        part="Step",
        usage=f"run [{UNTIL}]",
        summary="go on until there, or until a decision is held, or to the end",
        arguments=(0, 3),
        takes=PLACES,
        only=("sim", "log"),
        elsewhere=LIVE,
        examples=(
            ("run until step 3", "until three train steps are done"),
            ("run for 60", "sixty seconds of the run"),
            ("run for 1000 events", "a thousand events"),
            ("run", "to the end, unless something is held; Ctrl-C stops"),
        ),
    ),
    Command(
        name="back",
        part="Step",
        usage="back [N]",
        summary="to N events before this one",
        arguments=(0, 1),
        only=("sim", "log"),
        elsewhere="what has happened has happened; `--log run.db` steps through what is recorded of it",
        examples=(("back", "the event before"), ("back 100", "a hundred before")),
        details="A simulation is made again up to there; what you changed after that moment is unsaid.",
    ),
    Command(
        name="goto",
        part="Step",
        usage="goto event N | time S | step N | end",
        summary="to an event, a moment (seconds of the run), or the end of a train step",
        arguments=(1, 2),
        takes="event time step end",
        only=("sim", "log"),
        elsewhere=LIVE,
        examples=(
            ("goto event 1200", "as of event 1200"),
            ("goto step 3", "when step 3 was done"),
            ("goto end", "to the last event"),
        ),
    ),
    Command(
        name="continue",
        part="Step",
        usage="continue [as run]",
        summary="let go what a breakpoint holds, apply what `hold` shows; not live: and run on",
        arguments=(0, 3),
        takes=PLACES,
        function=held.go_on,
        examples=(
            ("continue", "on to the next decision that is held"),
            ("continue until step 5", "not live: no further than step 5"),
        ),
    ),
)
