"""A virtual cluster: the real core in virtual time, stepped by hand (`--sim PRESET`, with the options of `python -m laminar.sim`).

A simulated world cannot be copied, but it can be made again: the same scenario with the same words of the operator in the same
places is the same run. `back` and `whatif` are made of that.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from laminar.console.answers import Answer
from laminar.console.commands import COMMANDS
from laminar.console.language import Language
from laminar.console.place import Reply, reply
from laminar.console.stepping import Stepper
from laminar.console.subjects import nearest
from laminar.console.targets import futures
from laminar.console.targets.futures import WorldTrack
from laminar.console.view import Target, View
from laminar.core.engine import Core
from laminar.errors import ConfigError, LaminarError
from laminar.sim import options
from laminar.sim.scenario import Scenario
from laminar.sim.world import SimulationError, World

STEPS = 100  # of a run that is stepped by hand, if nothing is said: it should not be over before one has looked around
IN_VAIN = ("--ablate", "--out", "--jobs", "--optimize-split", "--preset", "--warmup")


class SimulatedTrack(WorldTrack):
    """A world, the moves that brought it where it is, and how to make it again."""

    def __init__(self, scenario: Scenario) -> None:
        """At its beginning."""
        super().__init__(scenario.world())
        self._scenario = scenario
        self.world.begin()
        self._seqs = [self.core.state.seq]
        """The last event after each move; the first entry is the beginning."""
        self._words: dict[int, Callable[[World], None]] = {}
        """Moves that an operator made; in the others the world went on by itself."""

    def happen(self) -> None:
        super().happen()
        self._seqs.append(self.core.state.seq)

    def say(self, word: Callable[[World], None]) -> None:
        self._words[len(self._seqs)] = word
        super().say(word)
        self._seqs.append(self.core.state.seq)

    def rewind(self, seq: int) -> None:
        """The last moment at or before event `seq`, or the beginning. What an operator said after it is unsaid."""
        move = max(0, bisect_right(self._seqs, seq) - 1)
        self.world.close()
        self.world = self._made_again(move)
        del self._seqs[move + 1 :]
        self._words = {number: word for number, word in self._words.items() if number <= move}

    def copy(self) -> WorldTrack:
        """Another one, in the same state: what is done to it is not done to this one. It cannot be gone back along."""
        return WorldTrack(self._made_again(len(self._seqs) - 1))

    def _made_again(self, num_moves: int) -> World:
        """Another world in the state of this one after so many moves."""
        world = self._scenario.world()
        world.begin()
        for move in range(1, num_moves + 1):
            if move in self._words:
                self._words[move](world)
            else:
                world.happen()
        return world


class Simulated:
    """The target."""

    kind: Target = "sim"

    def __init__(self, scenario: Scenario, title: str) -> None:
        self.title = title
        self._track = SimulatedTrack(scenario)
        own = futures.functions(self._track) | {"whatif": self._whatif}
        self._language = Language(COMMANDS, own | dict(Stepper(self._track, self.kind).functions()))

    @property
    def core(self) -> Core:
        """As of the event that was gone to."""
        return self._track.core

    def ask(self, line: str) -> Reply:
        """Raises LaminarError when the simulated run breaks an invariant."""
        try:
            answer = self._language.answer(self._track.view, line, self._track.post)
        except SimulationError as error:
            text = f"the simulated run broke an invariant, which is a bug of Laminar: {error}; `back` goes to before it"
            raise LaminarError(text) from error
        return reply(self._track.view, answer)

    def _whatif(self, view: View, words: list[str]) -> Answer:
        return futures.whatif(view, words, self._track.copy)

    def look(self) -> Reply:
        """Only where the run is."""
        return reply(self._track.view, Answer())

    def close(self) -> None:
        """No thread is left."""
        self._track.world.close()


def opened(preset: str, arguments: list[str]) -> Simulated:
    """The run that a preset and the options of `python -m laminar.sim` describe, at its beginning. Raises ConfigError."""
    if preset not in options.PRESETS:
        near = nearest(preset, options.PRESETS)
        raise ConfigError(f"--sim {preset}: there is no such preset{near}; there are: {', '.join(options.PRESETS)}")
    if in_vain := [word for word in arguments if word.partition("=")[0] in IN_VAIN]:
        raise ConfigError(f"{in_vain[0]} has no effect here: it is for whole runs, `python -m laminar.sim`")
    chosen = options.scenario(options.parse(["--preset", preset, "--iterations", str(STEPS), *arguments]))
    steps = chosen.iterations - chosen.warmup
    return Simulated(replace(chosen, stops=False, warmup=0, iterations=steps), preset)
