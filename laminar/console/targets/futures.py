"""`whatif`: a change carried out on a copy of the run as it is here, and simulated forward beside an unchanged copy.

copy ──► CHANGE, by the commands of the console ──► forward ──┐
copy ───────────────────────────────────────────► forward ────┴──► side by side, with what was recorded since, if anything was
"""

from collections.abc import Callable

import msgspec

from laminar.console.answers import Answer, Cell, Change
from laminar.console.commands import COMMANDS, change, held
from laminar.console.language import Function, Language, UsageError, require_going_on
from laminar.console.stepping import Until, split_off_until
from laminar.console.targets import compare
from laminar.console.view import View
from laminar.core import events
from laminar.core.engine import Core
from laminar.errors import LaminarError
from laminar.ids import WorkerId
from laminar.sim.world import SimulationError, World

NOTHING_DONE = "nothing is changed in the run itself; what an operator holds was let go in both copies"


class WorldTrack:
    """A simulated world that is gone along, and told what an operator says."""

    def __init__(self, world: World, began: float = 0.0) -> None:
        self.world, self.began = world, began
        self.is_changed = False
        """Whether an operator has said anything to it."""

    @property
    def core(self) -> Core:
        return self.world.core

    @property
    def now(self) -> float:
        return self.world.base + self.world.now

    @property
    def view(self) -> View:
        """As it is now."""
        return View(self.core, target="sim", now=self.now, began=self.began)

    def advance(self) -> bool:
        """To the next event; one moment may bring several. False when the run is over."""
        seq = self.core.state.seq
        while self.core.state.seq == seq:
            if self.core.state.finished:
                return False
            self.happen()
        return True

    def happen(self) -> None:
        """Let the next thing happen, of which no event may come."""
        self.world.happen()

    @property
    def end(self) -> str:
        return f"the run is over: {self.core.state.finished}"

    def say(self, word: Callable[[World], None]) -> None:
        """An operator's doing."""
        self.is_changed = True
        word(self.world)

    def post(self, event: events.AnyEvent) -> int:
        """An operator's word; its sequence number."""
        seq = self.core.state.seq + 1
        self.say(lambda world: world.send(event))
        return seq

    def release(self) -> None:
        """Let it go on from where it is held."""
        for event in held.continuing(self.core.state):
            self.post(event)


def functions(track: WorldTrack) -> dict[str, Function]:
    """Commands that a simulated run has of its own."""
    return {"join": _joining(track), "sampler": _sampling(track)}


def _joining(track: WorldTrack) -> Function:
    """`join`: one more replica, on a host of its own kind."""

    def join(view: View, words: list[str]) -> Answer:
        if words:
            raise UsageError("a simulated cluster has no hosts to choose from: write `join`")
        require_going_on(view)
        known = [name for name in [*view.state.replicas, *view.state.restarts] if name.startswith("rollout-")]
        name = WorkerId(f"rollout-{max((int(name.rpartition('-')[2]) for name in known), default=-1) + 1}")
        track.say(lambda world: world.rollouts.join(name, 1))
        return Answer(lines=[f"{name} has joined; it pulls the newest weights and generates: `why {name}`"])

    return join


def _sampling(track: WorldTrack) -> Function:
    """`sampler [REFERENCE]`: loaded first, so that one that cannot be is refused. Every new reward is 1."""

    def choose(view: View, words: list[str]) -> Answer | Change:
        if words:
            track.world.samplers.prepare(words[0])
        said = change.sampler(view, words)
        return msgspec.structs.replace(said, lines=[*said.lines, "simulated rewards are all 1"])

    return choose


def whatif(
    view: View,
    words: list[str],
    copy: Callable[[], WorldTrack],
    recorded: Callable[[Until], dict[str, Cell] | None] = lambda until: None,
) -> Answer:
    """`whatif CHANGE [for …]`. `copy` gives tracks in the state of now; `recorded` what happened from here on until then."""
    line, until = split_off_until(view, words)
    command, _ = Language(COMMANDS).understood(line)
    if command.part != "Change":
        raise UsageError(f"`{command.name}` changes nothing that could be compared; `help whatif` has examples")
    require_going_on(view)
    present, changed = copy(), copy()
    try:
        said = Language(COMMANDS, functions(changed)).answer(changed.view, line, changed.post)
        if said.error:
            raise UsageError(said.error)
        if not changed.is_changed:
            raise UsageError(f"`{line}` changes nothing; `help whatif` has examples")
        as_it_is, otherwise = _future(present, until), _future(changed, until)
    except SimulationError as error:
        raise LaminarError(f"the simulated future broke an invariant, which is a bug of Laminar: {error}") from error
    finally:
        for track in (present, changed):
            track.world.close()
    headline = f"if from here on: {line}; on copies of the run, simulated forward"
    return Answer(
        headline=headline, tables=[compare.side_by_side(as_it_is, otherwise, recorded(until))], lines=[NOTHING_DONE]
    )


def _future(track: WorldTrack, until: Until) -> dict[str, Cell]:
    """What happens until then, with whatever is held let go."""
    before = compare.mark(track.world)
    while not until.is_reached(track.core, track.now):
        track.release()
        for name in list(track.core.state.holds):
            track.post(events.HoldChanged(pass_name=name, held=False))
        if not track.advance():
            break
    return compare.between(before, compare.mark(track.world))
