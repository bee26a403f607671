"""A virtual cluster: the real core in virtual time, stepped by hand (`--sim PRESET`, with the options of `python -m laminar.sim`).

A simulated world cannot be copied, but it can be made again: the same scenario with the same words of the operator in the same
places is the same run. `back` and `whatif` are made of that.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from laminar.console.answers import Answer, Cell
from laminar.console.commands import COMMANDS, held
from laminar.console.language import Function, Language, UsageError
from laminar.console.place import Reply, reply
from laminar.console.stepping import Stepper, Until, split_off_until
from laminar.console.subjects import nearest
from laminar.console.targets import compare
from laminar.console.view import Target, View
from laminar.core import events
from laminar.core.engine import Core
from laminar.errors import ConfigError, LaminarError
from laminar.ids import WorkerId
from laminar.sim import options
from laminar.sim.scenario import Scenario
from laminar.sim.world import SimulationError, World

STEPS = 100  # of a run that is stepped by hand, if nothing is said: it should not be over before one has looked around
NOTHING_DONE = "nothing is changed in the run itself; what an operator holds was let go in both copies"
IN_VAIN = ("--ablate", "--out", "--jobs", "--optimize-split", "--preset", "--warmup")


class SimulatedTrack:
    """A world, the moves that brought it where it is, and how to make it again."""

    began = 0.0

    def __init__(self, scenario: Scenario, world: World | None = None) -> None:
        """At its beginning, or wherever `world` is; that cannot be gone back from."""
        self.scenario = scenario
        self.world = world or scenario.world()
        if world is None:
            self.world.begin()
        self._seqs = [self.core.state.seq]
        """The last event after each move; the first entry is the beginning."""
        self._words: dict[int, Callable[[World], None]] = {}
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
        seq = self.core.state.seq + 1
        self._say(lambda world: world.send(event))
        return seq

    def join(self, worker: WorkerId) -> None:
        """One more replica."""
        self._say(lambda world: world.rollouts.join(worker, 1))

    @property
    def is_changed(self) -> bool:
        """Whether an operator has said anything to it."""
        return bool(self._words)

    def _say(self, word: Callable[[World], None]) -> None:
        self._words[len(self._seqs)] = word
        word(self.world)
        self._seqs.append(self.core.state.seq)

    def release(self) -> None:
        """Let it go on from where it is held."""
        for event in held.continuing(self.core.state):
            self.post(event)

    def rewind(self, seq: int) -> None:
        """The last moment at or before event `seq`, or the beginning. What an operator said after it is unsaid."""
        move = max(0, bisect_right(self._seqs, seq) - 1)
        self.world = self.made_again(move)
        del self._seqs[move + 1 :]
        self._words = {number: word for number, word in self._words.items() if number <= move}

    def copy(self) -> "SimulatedTrack":
        """Another one, in the same state: what is done to it is not done to this one."""
        return SimulatedTrack(self.scenario, self.made_again())

    def made_again(self, num_moves: int | None = None) -> World:
        """Another world in the state of this one, or of this one after so many moves."""
        world = self.scenario.world()
        world.begin()
        for move in range(1, len(self._seqs) if num_moves is None else num_moves + 1):
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
        own: dict[str, Function] = {"join": joining(self._track), "whatif": self._whatif}
        self._language = Language(COMMANDS, own | dict(Stepper(self._track, self.kind).functions()))

    def ask(self, line: str) -> Reply:
        """Raises LaminarError when the simulated run breaks an invariant."""
        try:
            answer = self._language.answer(self._view(), line, self._track.post)
        except SimulationError as error:
            text = f"the simulated run broke an invariant, which is a bug of Laminar: {error}; `back` goes to before it"
            raise LaminarError(text) from error
        return reply(self._view(), answer)

    def _whatif(self, view: View, words: list[str]) -> Answer:
        """Carry a change out on a copy, and let it and an unchanged copy go on for as long."""
        line, until = split_off_until(view, words)
        present, changed = self._track.copy(), self._track.copy()
        change = Language(COMMANDS, {"join": joining(changed)}).answer(_view_of(changed), line, changed.post)
        if change.error:
            raise UsageError(change.error)
        if not change.facts and not changed.is_changed:
            raise UsageError(f"`{line}` changes nothing; `help whatif` has examples")
        futures = [_future(track, until) for track in (present, changed)]
        headline = f"if from here on: {line}; on copies of the run, simulated forward"
        return Answer(headline=headline, tables=[compare.side_by_side(*futures)], lines=[NOTHING_DONE])

    def _view(self) -> View:
        return _view_of(self._track)

    def look(self) -> Reply:
        """Only where the run is."""
        return reply(self._view(), Answer())

    def close(self) -> None:
        """Nothing is held open."""


def _view_of(track: SimulatedTrack) -> View:
    return View(track.core, target="sim", now=track.now, began=track.began)


def joining(track: SimulatedTrack) -> Function:
    """The command `join`: one more replica, on a host of its own kind."""

    def join(view: View, words: list[str]) -> Answer:
        if words:
            raise UsageError("a simulated cluster has no hosts to choose from: write `join`")
        known = [name for name in [*view.state.replicas, *view.state.restarts] if name.startswith("rollout-")]
        name = WorkerId(f"rollout-{max((int(name.rpartition('-')[2]) for name in known), default=-1) + 1}")
        track.join(name)
        return Answer(lines=[f"{name} has joined; it pulls the newest weights and generates: `why {name}`"])

    return join


def _future(track: SimulatedTrack, until: Until) -> dict[str, Cell]:
    """What happens until then, with whatever is held let go."""
    before = compare.mark(track.world)
    while not until.is_reached(track.core, track.now):
        track.release()
        for name in list(track.core.state.holds):
            track.post(events.HoldChanged(pass_name=name, held=False))
        if not track.advance():
            break
    return compare.since(track.world, before)


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
