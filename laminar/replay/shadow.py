"""What another sampler would have chosen, at every batch that a recorded run took, from the buffer as the core had it.

It is asked once per batch and its choice has no effect: the next batch finds the buffer as the real choices left it. So this tells
how two samplers differ on the same buffers, not what the run would have become (`laminar.replay.whatif`, or another run).
"""

from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from laminar import samplers
from laminar.core import bounds, choice
from laminar.core.actions import AnyAction, AskSampler
from laminar.core.amend import FIFO
from laminar.core.decisions import AnyDecision, TakeBatch
from laminar.core.records import State
from laminar.core.sampling import BufferView, GroupView, problem
from laminar.core.turn import Turn
from laminar.errors import LaminarError
from laminar.ids import GroupId
from laminar.replay.playback import Playback
from laminar.replay.recording import Life, Recording
from laminar.samplers import GuardedSampler


class Choice(NamedTuple):
    """Of one batch."""

    boot: int
    seq: int
    """Event at which the batch was taken."""
    step: int
    num_buffered: int
    real: list[GroupId]
    shadow: list[GroupId]
    """Empty = it would have waited, or failed."""
    error: str
    """How it failed."""

    @property
    def agreement(self) -> float:
        """Share of the batch that both chose."""
        inside = set(self.real)
        return sum(group in inside for group in self.shadow) / len(self.real)


class Statistics(NamedTuple):
    """Of the groups of all batches that one of the two chose. Means over groups."""

    num_groups: int
    staleness_mean: float
    """Train steps from the weights that generated a group to those that its batch was for."""
    staleness_max: int
    staleness: dict[int, int]
    """Staleness -> groups."""
    reward_mean: float
    reward_spread_mean: float
    """Largest less smallest reward of the siblings."""
    no_advantage_share: float
    """Groups whose siblings have equal rewards: they teach GRPO nothing."""
    length_mean: float
    """Response tokens of a trajectory."""
    length_max: int
    age_mean_s: float
    """In the buffer."""


class Shadowing(NamedTuple):
    """All batches of a recording, and both samplers' choices in numbers."""

    sampler: str
    choices: list[Choice]
    real: Statistics
    shadow: Statistics
    agreement: float
    """Mean share of a batch that both chose; 0 for one where the shadow waited or failed."""
    num_same: int
    """Batches of the same groups in the same order."""
    num_waits: int
    num_errors: int
    notes: list[str]
    """What of the recording was left out, for people."""


def shadow(recording: Recording, lives: list[Life], reference: str) -> Shadowing:
    """`reference`: ``fifo``, ``file.py:Class`` or ``pkg.mod:Class``. Of several lives, those that cannot be replayed are left out.

    Raises ConfigError for a sampler that cannot be loaded, RecordingError and ReplayError for a log that cannot be replayed.
    """
    asked = None if reference == FIFO else GuardedSampler(samplers.load(reference, "--shadow"))
    witness, notes = _Witness(asked), [recording.left_out] if recording.left_out else []
    try:
        for life in lives:
            try:
                playback = Playback(recording, life)
            except LaminarError as error:
                if len(lives) == 1:
                    raise
                notes.append(f"{life.name}: left out: {error}")
            else:
                notes += [f"{life.name}: {text}" for text in _watch(playback, witness)]
    finally:
        if asked is not None:
            asked.close()
    return witness.result(reference, notes)


def _watch(playback: Playback, witness: "_Witness") -> list[str]:
    """What of the life is not replayed."""
    playback.core.witness = witness.look
    for step in playback.steps():
        witness.note(step.actions, playback.core.state)
    return playback.not_replayed()


class _Batch(NamedTuple):
    """One that was about to be taken."""

    choice: Choice
    real: list[GroupView]
    shadow: list[GroupView]


class _Witness:
    """Looks at batches as they are taken."""

    def __init__(self, sampler: GuardedSampler | None) -> None:
        self._sampler = sampler
        self._asked: AskSampler | None = None
        """The last question to the run's own custom sampler."""
        self._seen: list[_Batch] = []
        """During the present event."""
        self._taken: list[_Batch] = []

    def note(self, actions: list[AnyAction], state: State) -> None:
        """After an event: which batches were taken (one that an operator had edited may have been void), and what the run's own
        sampler was asked."""
        for batch in self._seen:
            step = state.steps.get(batch.choice.step)
            if step is not None and step.groups == batch.choice.real:
                self._taken.append(batch)
        self._seen.clear()
        for action in actions:
            if isinstance(action, AskSampler):
                self._asked = action

    def look(self, turn: Turn, decision: AnyDecision) -> None:
        """Of the decisions, those that would take a batch."""
        if not isinstance(decision, TakeBatch):
            return
        now, num_groups = choice.view(turn), len(decision.groups)
        view = self._view(turn, now)
        chosen, error = self._choose(turn, view, num_groups)
        known = {group.id: group for group in (*now.groups, *view.groups)}
        place = turn.state.boot, turn.cause, decision.step
        found = Choice(*place, len(view.groups), decision.groups, chosen, error)
        real = [known[group] for group in decision.groups if group in known]
        self._seen.append(_Batch(found, real, [known[group] for group in chosen]))

    def _view(self, turn: Turn, now: BufferView) -> BufferView:
        """What the run's own sampler saw, if it has one; else the buffer as the batch is taken from it."""
        asked = self._asked
        if turn.settings.custom_sampler and asked is not None and asked.view.step == now.step:
            return asked.view
        return now

    def _choose(self, turn: Turn, view: BufferView, num_groups: int) -> tuple[list[GroupId], str]:
        if self._sampler is None:
            return bounds.oldest_first(turn)[:num_groups], ""
        question = AskSampler(cause=turn.cause, request=len(self._taken), num_groups=num_groups, view=view, state=b"")
        answer = self._sampler.ask(question)
        fault = answer.error or problem(answer.groups, {group.id: None for group in view.groups}, num_groups)
        return ([], fault) if fault else (answer.groups, "")

    def result(self, reference: str, notes: list[str]) -> Shadowing:
        """Of all batches."""
        choices = [batch.choice for batch in self._taken]
        return Shadowing(
            sampler=reference,
            choices=choices,
            real=_statistics([group for batch in self._taken for group in batch.real]),
            shadow=_statistics([group for batch in self._taken for group in batch.shadow]),
            agreement=_mean(choice.agreement for choice in choices),
            num_same=sum(choice.real == choice.shadow for choice in choices),
            num_waits=sum(not choice.shadow and not choice.error for choice in choices),
            num_errors=sum(bool(choice.error) for choice in choices),
            notes=notes,
        )


def _statistics(groups: list[GroupView]) -> Statistics:
    staleness = Counter(group.staleness for group in groups)
    spreads = [max(group.rewards, default=0.0) - min(group.rewards, default=0.0) for group in groups]
    lengths = [length for group in groups for length in group.lengths]
    return Statistics(
        num_groups=len(groups),
        staleness_mean=_mean(group.staleness for group in groups),
        staleness_max=max(staleness, default=0),
        staleness=dict(sorted(staleness.items())),
        reward_mean=_mean(fmean(group.rewards) for group in groups if group.rewards),
        reward_spread_mean=_mean(spreads),
        no_advantage_share=_mean(float(spread == 0.0) for spread in spreads),
        length_mean=_mean(lengths),
        length_max=max(lengths, default=0),
        age_mean_s=_mean(group.age_s for group in groups),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
