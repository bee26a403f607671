"""What watches a run from beside its core: obstacles, its event loop, who waits for whom when nothing happens, useless steps."""

from collections.abc import Callable, Mapping
from functools import partial

from laminar.controller import damage
from laminar.controller.channels import Channels
from laminar.controller.eventlog import EventLog
from laminar.controller.loopwatch import LoopWatch
from laminar.controller.obstacles import Obstacles
from laminar.controller.rundir import RunDirectory
from laminar.controller.runtime import Runtime
from laminar.controller.whystalled import WhyStalled
from laminar.core import events

NO_SIGNAL_STEPS = 3  # one batch may have only easy prompts; so many in a row are a reward that says nothing


class LearningSignal:
    """`alarm(name, text)` is called once when steps in a row had nothing to learn from."""

    def __init__(self, alarm: Callable[[str, str], None]) -> None:
        self._alarm, self._num_without = alarm, 0

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """The figures of a step that has ended."""
        has_signal = metrics.get("advantage/zero_fraction", 0.0) < 1.0
        self._num_without = 0 if has_signal else self._num_without + 1
        if self._num_without == NO_SIGNAL_STEPS:
            text = (
                f"in {NO_SIGNAL_STEPS} steps in a row all answers to a prompt had the same reward, for every prompt (mean "
                f"{metrics['reward/mean']:.3f}): GRPO learns nothing from them; look at task.reward, and whether all prompts are "
                "too easy or too hard"
            )
            self._alarm("no-learning-signal", text)


class Watches:
    """`alarm(name, text)` and `say(text)` tell people."""

    def __init__(
        self,
        run: RunDirectory,
        runtime: Runtime,
        channels: Channels,
        log: EventLog,
        alarm: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        self.why_stalled = WhyStalled(run.path, runtime, channels, log, run.logs)
        self._runtime, self._alarm, self._say, self._database = runtime, alarm, say, run.database
        self._loop = LoopWatch(run.logs, self._on_blocked)
        runtime.failed = self._on_failed
        self._obstacles = Obstacles(
            [run.path, run.checkpoints, run.tokens, run.logs],
            failed=lambda reason: runtime.post(events.StorageFailed(reason=reason)),
            recovered=self._on_cleared,
        )

    def start(self, *, check_database: bool) -> None:
        """Watch until the runtime closes. `check_database`: it was opened as it was found."""
        if check_database:
            self._runtime.own(damage.look(self._database, self._alarm), "check-database")
        self._runtime.own(self.why_stalled.watch_tasks(), "watch-tasks")
        self._runtime.own(self._loop.run(), "watch-loop")
        self._runtime.own(self._obstacles.watch(), "watch-obstacles")

    def on_stalled(self) -> None:
        """Nothing useful happens: write down who waits for whom."""
        self._runtime.own(self.why_stalled.write(), "why-stalled")

    def writer(self, source: str) -> Callable[[str | None], None]:
        """For one that waits for the disk: call it with why, and with None once it has written everything."""
        return partial(self._on_unwritable, source)

    def close(self) -> None:
        """The loop is watched no longer."""
        self._loop.close()

    def _on_unwritable(self, source: str, reason: str | None) -> None:
        self._obstacles.set(source, f"nothing can be written: {reason}" if reason else "")

    def _on_cleared(self) -> None:
        self._say("the disk takes everything again")
        self._runtime.post(events.StorageRecovered())

    def _on_failed(self, task: str, error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}"
        self._alarm(
            "task-failed",
            f"{task} of the controller ended with {why}; the run goes on without it, logs/controller.log says where",
        )

    def _on_blocked(self, seconds: float) -> None:
        text = f"the controller's event loop stood still for {seconds:.0f} s; {self._loop.path} says in what"
        self._alarm("controller-blocked", text)
