"""What a handler or pass works with while one event is handled."""

from laminar.core.actions import AnyAction, RaiseAlarm
from laminar.core.records import State
from laminar.core.settings import Settings
from laminar.core.story import Story
from laminar.ids import Version, WorkerId


class Turn:
    """The state, the settings, and where actions and story rows of one event go."""

    def __init__(self, state: State, settings: Settings, story: Story) -> None:
        self.state = state
        self.settings = settings
        self.story = story
        self.actions: list[AnyAction] = []
        self.candidates: list[tuple[int, int, WorkerId]] | None = None
        """Heap of what the present pass has not ruled out: (load, place among the dirty, replica); None = it has not begun."""

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

    def emit(self, action: AnyAction) -> None:
        """Ask the shell for something."""
        self.actions.append(action)

    def fail(self, reason: str) -> None:
        """The run cannot go on: save what can be saved and end with an error. The first reason stands."""
        if not (self.state.stopping or self.state.finished):
            self.state.stopping = reason
            self.state.ok = False
            self.emit(RaiseAlarm(cause=self.cause, name="run-failed", text=reason))

    def tell(self, text: str, *subjects: str) -> None:
        """Add a row to the story of the subjects (`story.group(id)` …)."""
        self.story.add(self.state.seq, self.state.at, text, subjects)
