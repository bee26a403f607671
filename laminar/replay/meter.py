"""What a run came to, from its events: the same numbers of a recorded run and of a simulated one, so that they can be compared."""

from collections import Counter
from typing import NamedTuple

from laminar.core import versions
from laminar.core.actions import AnyAction, RecordTrajectories, StartTrainStep
from laminar.core.engine import Core
from laminar.core.events import AnyEvent, ReplicaReported, StepFinished
from laminar.errors import LaminarError
from laminar.ids import Version, WorkerId

WARMUP_SHARE = 5  # the first fifth of the steps, while the buffer and the fleet fill
STEPS_MIN = 3


class TooShort(LaminarError):
    """Too few train steps to measure anything."""


class Figures(NamedTuple):
    """Over the measured steps."""

    steps: int
    step_s: float
    """Between the ends of two train steps."""
    trained_tokens_per_s: float
    """Prompt and response tokens of the batches."""
    generated_tokens_per_s: float
    """Response tokens received."""
    trainer_busy: float
    """Share of the time in which a train step ran."""
    replicas_busy: float
    """Mean share of the replicas on which something generated."""
    buffered_groups: float
    staleness_mean: float
    """s_train of the trained trajectories: train steps."""
    staleness_max: int
    response_s: float
    """From a trajectory's first start to its last token."""
    moved: int
    """Trajectories moved by repacking."""
    dropped: int
    """Trajectories, for any reason."""


class _Mark(NamedTuple):
    """When a step had ended."""

    step: int
    at: float
    generated: int
    moved: int
    dropped: int
    trainer_s: float
    replicas_s: float
    buffered_s: float


class Meter:
    """Fed with every event, after the core has handled it."""

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self._batch_tokens: dict[int, int] = {}
        self._staleness: dict[int, Counter[int]] = {}
        self._responses: list[tuple[float, float]] = []
        self._at: float | None = None
        """Of the event before; None = there was none."""
        self._busy: dict[WorkerId, bool] = {}
        """Replicas -> whether something generates there."""
        self._present = (0.0, 0.0, 0.0)
        """Since that event: whether the trainer runs, share of busy replicas, complete groups in the buffer."""
        self._trainer_s = self._buffered_s = 0.0
        self.replicas_s = 0.0
        """Seconds in which something generated, mean of the replicas."""

    @property
    def num_steps(self) -> int:
        """Train steps that have ended."""
        return len(self._marks)

    def observe(self, core: Core, event: AnyEvent, actions: list[AnyAction]) -> None:
        """One event and what the core answered."""
        self._pass_time(core)
        self._look(core, event, actions)
        for action in actions:
            if isinstance(action, StartTrainStep):
                self._note_batch(core, action)
            elif isinstance(action, RecordTrajectories):
                for t in action.trajectories:
                    if t.timings.trained and t.timings.finished:
                        self._responses.append((t.timings.finished, t.timings.finished - t.timings.queued))
        if isinstance(event, StepFinished) and core.state.trainer.step == event.step:
            self._mark(core, event)

    def _pass_time(self, core: Core) -> None:
        """Everything was as the event before left it."""
        past = core.state.at - self._at if self._at is not None else 0.0
        trainer, replicas, buffered = self._present
        self._trainer_s += past * trainer
        self.replicas_s += past * replicas
        self._buffered_s += past * buffered
        self._at = core.state.at

    def _look(self, core: Core, event: AnyEvent, actions: list[AnyAction]) -> None:
        """A report, of which most events are, changes replicas that it or an action names; any other event may change all."""
        state = core.state
        if isinstance(event, ReplicaReported):
            for worker in [event.worker, *(action.worker for action in actions if hasattr(action, "worker"))]:
                replica = state.replicas.get(worker)
                if replica is None:
                    self._busy.pop(worker, None)
                else:
                    self._busy[worker] = replica.num_generating > 0
        else:
            self._busy = {worker: replica.num_generating > 0 for worker, replica in state.replicas.items()}
        share = sum(self._busy.values()) / max(1, len(self._busy))
        self._present = float(state.trainer.running > 0), share, float(len(state.buffer))

    def _note_batch(self, core: Core, action: StartTrainStep) -> None:
        state = core.state
        self._batch_tokens[action.step] = sum(row.num_prompt_tokens + row.num_tokens for row in action.rows)
        trainer = Version(state.trainer.step, max(state.trainer.branch, 0))
        ages = (versions.staleness(state.branches, trainer, row.behavior_version) for row in action.rows)
        self._staleness[action.step] = Counter(ages)

    def _mark(self, core: Core, event: StepFinished) -> None:
        state = core.state
        while self._marks and self._marks[-1].step >= event.step:
            self._marks.pop()  # done again after a restore
        dropped = sum(state.ledger.trajectories.dropped.values())
        totals = self._trainer_s, self.replicas_s, self._buffered_s
        self._marks.append(
            _Mark(event.step, state.at, state.ledger.tokens.total, state.repack.num_moves, dropped, *totals)
        )

    def figures(self, steps: int = 0) -> Figures:
        """Of the steps after the warm-up; of the first `steps` of all, if given. Raises TooShort."""
        marks = self._marks[: steps or None]
        if len(marks) < STEPS_MIN:
            raise TooShort(f"{len(marks)} train steps have ended, {STEPS_MIN} are needed to measure anything")
        begin, end = marks[max(1, len(marks) // WARMUP_SHARE) - 1], marks[-1]
        window = range(begin.step + 1, end.step + 1)
        seconds = max(1e-9, end.at - begin.at)
        staleness = sum((self._staleness[step] for step in window if step in self._staleness), Counter[int]())
        responses = [seconds_ for at, seconds_ in self._responses if begin.at < at <= end.at]
        return Figures(
            steps=len(window),
            step_s=seconds / len(window),
            trained_tokens_per_s=sum(self._batch_tokens.get(step, 0) for step in window) / seconds,
            generated_tokens_per_s=(end.generated - begin.generated) / seconds,
            trainer_busy=(end.trainer_s - begin.trainer_s) / seconds,
            replicas_busy=(end.replicas_s - begin.replicas_s) / seconds,
            buffered_groups=(end.buffered_s - begin.buffered_s) / seconds,
            staleness_mean=sum(age * num for age, num in staleness.items()) / max(1, staleness.total()),
            staleness_max=max(staleness, default=0),
            response_s=sum(responses) / max(1, len(responses)),
            moved=end.moved - begin.moved,
            dropped=end.dropped - begin.dropped,
        )
