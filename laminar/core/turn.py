"""What a handler or pass works with while one event is handled."""

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

from laminar.core.actions import AnyAction, RaiseAlarm
from laminar.core.decisions import AnyDecision
from laminar.core.records import Replica, State
from laminar.core.settings import Settings
from laminar.core.story import Story
from laminar.ids import Version, WorkerId


class Turn:
    """The state, the settings, and where actions and story rows of one event go."""

    def __init__(self, state: State, settings: Settings, story: Story) -> None:
        self.state = state
        self.settings = settings
        self.story = story
        self.witness: Callable[[Turn, AnyDecision], None] | None = None
        """Shown each decision before it is applied."""
        self.actions: list[AnyAction] = []
        self._candidates: list[tuple[int, int, WorkerId]] | None = None
        """Heap of what the present pass has not ruled out: (load, place among the dirty, replica); None = it has not begun."""

    def begin_pass(self) -> None:
        """Every dirty replica is a candidate again."""
        self._candidates = None

    def next_candidate(self, may: Callable[[Replica], bool], load: Callable[[Replica], int]) -> Replica | None:
        """Of the dirty replicas that may, the least loaded, the first among equals.

        One that may not is not asked again before `begin_pass`: pulls and new groups take room, they give none to others. So a
        pass over R replicas with D decisions asks R + D times, not R · D.
        """
        replicas = self.state.replicas
        if self._candidates is None:
            self._candidates = [
                (load(replicas[worker]), place, worker) for place, worker in enumerate(self.state.dirty)
            ]
            heapify(self._candidates)
        candidates = self._candidates
        while candidates:
            known, place, worker = candidates[0]
            replica = replicas[worker]
            if (present := load(replica)) != known:
                heapreplace(candidates, (present, place, worker))
            elif may(replica):
                return replica
            else:
                heappop(candidates)
        return None

    @property
    def at(self) -> float:
        """Run time of the event, seconds."""
        return self.state.at

    @property
    def cause(self) -> int:
        """Sequence number of the event."""
        return self.state.seq

    @property
    def trainer_version(self) -> Version:
        """What the trainer holds now."""
        trainer = self.state.trainer
        return Version(trainer.step, max(trainer.branch, 0))

    def look_again(self) -> None:
        """The passes look at every replica: what held one back may have gone."""
        self.state.dirty.update(dict.fromkeys(self.state.replicas))

    def emit(self, action: AnyAction) -> None:
        """Ask the shell for something."""
        self.actions.append(action)

    def refuse(self, what: str, reason: str) -> None:
        """An operator's wish (``settings``, ``hold`` …) cannot be met: nothing is changed, people are told."""
        self.emit(RaiseAlarm(cause=self.cause, name=f"{what}-refused", text=reason))

    def fail(self, reason: str) -> None:
        """The run cannot go on: save what can be saved and end with an error. The first reason stands."""
        if not (self.state.stopping or self.state.finished):
            self.state.stopping = reason
            self.state.ok = False
            self.emit(RaiseAlarm(cause=self.cause, name="run-failed", text=reason))

    def tell(self, text: str, *subjects: str) -> None:
        """Add a row to the story of the subjects (`story.group(id)` …)."""
        self.story.add(self.state.seq, self.state.at, text, subjects)
