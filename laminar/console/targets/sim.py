"""A virtual cluster: the real core in virtual time, stepped by hand (`--sim PRESET`, with the options of `python -m laminar.sim`).

A simulated world cannot be copied, but it can be made again: the same scenario with the same words of the operator in the same
places is the same run. `back` and `whatif` are made of that.
"""

from bisect import bisect_right
from dataclasses import replace

from laminar.console.answers import Answer
from laminar.console.commands import COMMANDS
from laminar.console.language import Language
from laminar.console.place import Reply, reply
from laminar.console.stepping import Stepper
from laminar.console.subjects import nearest
from laminar.console.view import Target, View
from laminar.core import events
from laminar.core.engine import Core
from laminar.errors import ConfigError, LaminarError
from laminar.sim import options
from laminar.sim.scenario import Scenario
from laminar.sim.world import SimulationError, World

STEPS = 100  # of a run that is stepped by hand, if nothing is said: it should not be over before one has looked around
IN_VAIN = ("--ablate", "--out", "--jobs", "--optimize-split", "--preset", "--warmup")


class SimulatedTrack:
    """A world, the moves that brought it where it is, and how to make it again."""

    began = 0.0

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = scenario.world()
        self.world.begin()
        self._seqs = [self.core.state.seq]
        """The last event after each move; the first entry is the beginning."""
        self._words: dict[int, events.AnyEvent] = {}
        """Moves that an operator made; in the others the world went on by itself."""

    @property
    def core(self) -> Core:
        return self.world.core

    @property
    def now(self) -> float:
        return self.world.now

    def advance(self) -> bool:
        """To the next event; one moment may bring several. False when the run is over."""
        seq = self.core.state.seq
        while self.core.state.seq == seq:
            if self.core.state.finished:
                return False
            self.world.happen()
            self._seqs.append(self.core.state.seq)
        return True

    @property
    def end(self) -> str:
        return f"the run is over: {self.core.state.finished}"

    def post(self, event: events.AnyEvent) -> int:
        """An operator's word; its sequence number."""
        self._words[len(self._seqs)] = event
        seq = self.core.state.seq + 1
        self.world.send(event)
        self._seqs.append(self.core.state.seq)
        return seq

    def release(self) -> None:
        """Apply what is held."""
        for number in list(self.core.state.held):
            self.post(events.DecisionResolved(decision=number, verdict="apply"))

    def rewind(self, seq: int) -> None:
        """The last moment at or before event `seq`, or the beginning. What an operator said after it is unsaid."""
        move = max(0, bisect_right(self._seqs, seq) - 1)
        self.world = self.made_again(move)
        del self._seqs[move + 1 :]
        self._words = {number: event for number, event in self._words.items() if number <= move}

    def made_again(self, num_moves: int | None = None) -> World:
        """Another world in the state of this one, or of this one after so many moves."""
        world = self.scenario.world()
        world.begin()
        for move in range(1, len(self._seqs) if num_moves is None else num_moves + 1):
            if move in self._words:
                world.send(self._words[move])
            else:
                world.happen()
        return world


class Simulated:
    """The target."""

    kind: Target = "sim"

    def __init__(self, scenario: Scenario, title: str) -> None:
        self.title = title
        self._track = SimulatedTrack(scenario)
        self._language = Language(COMMANDS, Stepper(self._track, self.kind).functions())

    def ask(self, line: str) -> Reply:
        """Raises LaminarError when the simulated run breaks an invariant."""
        try:
            answer = self._language.answer(self._view(), line, self._track.post)
        except SimulationError as error:
            text = f"the simulated run broke an invariant, which is a bug of Laminar: {error}; `back` goes to before it"
            raise LaminarError(text) from error
        return reply(self._view(), answer)

    def _view(self) -> View:
        track = self._track
        return View(track.core, target=self.kind, now=track.now, began=track.began)

    def look(self) -> Reply:
        """Only where the run is."""
        return reply(self._view(), Answer())

    def close(self) -> None:
        """Nothing is held open."""


def opened(preset: str, arguments: list[str]) -> Simulated:
    """The run that a preset and the options of `python -m laminar.sim` describe, at its beginning. Raises ConfigError."""
    if preset not in options.PRESETS:
        near = nearest(preset, options.PRESETS)
        raise ConfigError(f"--sim {preset}: there is no such preset{near}; there are: {', '.join(options.PRESETS)}")
    if in_vain := [word for word in arguments if word.partition("=")[0] in IN_VAIN]:
        raise ConfigError(f"{in_vain[0]} has no effect here: it is for whole runs, `python -m laminar.sim`")
    chosen = options.scenario(options.parse(["--preset", preset, "--iterations", str(STEPS), *arguments]))
    return Simulated(replace(chosen, stops=False), preset)
