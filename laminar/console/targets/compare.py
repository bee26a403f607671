"""Two futures side by side: what each does in the same time, in the words of docs/metrics.md; beside them what was recorded."""

from collections import Counter
from typing import NamedTuple

from laminar.console.answers import Cell, Table, table
from laminar.core import groups, versions
from laminar.core.actions import AnyAction, RecordTrajectories, StartTrainStep
from laminar.core.engine import Core
from laminar.core.events import AnyEvent, StepFinished
from laminar.sim.world import World


class Mark(NamedTuple):
    """What a run had counted at a moment."""

    at: float
    step: int
    num_trained: int
    """Prompt and response tokens of the batches so far."""
    num_generated: int
    num_moves: int
    num_emptied: int
    kv_share: float
    """Sum over samples, or seconds, of the share of the KV capacity in use."""
    kv_weight: float
    """How many of those."""
    s_train: Counter[int]
    num_buffered: int


def mark(world: World) -> Mark:
    """Of a simulated run, now."""
    measures, state = world.measures, world.core.state
    return Mark(
        at=world.now,
        step=state.trainer.step,
        num_trained=sum(iteration.num_tokens for iteration in measures.iterations),
        num_generated=world.rollouts.num_generated(),
        num_moves=state.repack.num_moves,
        num_emptied=state.repack.num_released,
        kv_share=sum(share for _, share in measures.kv_use),
        kv_weight=len(measures.kv_use),
        s_train=Counter(measures.s_train),
        num_buffered=len(state.buffer),
    )


class Tally:
    """Counts along a recorded run: shown every event, after the core has handled it."""

    def __init__(self, core: Core) -> None:
        state = core.state
        running = state.steps.get(state.trainer.running)
        members = groups.members(state, running.groups) if running else []
        self._batch_tokens = {state.trainer.running: sum(t.num_prompt_tokens + t.num_tokens for t in members)}
        self._at, self._num_trained, self._s_train = state.at, 0, Counter[int]()
        self._kv_now, self._kv_share, self._kv_weight = _kv_share(core), 0.0, 0.0

    def observe(self, core: Core, event: AnyEvent, actions: list[AnyAction]) -> None:
        """One event and what the core answered."""
        state = core.state
        self._kv_share += self._kv_now * (state.at - self._at)
        self._kv_weight += state.at - self._at
        self._at, self._kv_now = state.at, _kv_share(core)
        for action in actions:
            if isinstance(action, StartTrainStep):
                self._batch_tokens[action.step] = sum(row.num_prompt_tokens + row.num_tokens for row in action.rows)
            elif isinstance(action, RecordTrajectories):
                trained = [t for t in action.trajectories if t.timings.trained and not t.dropped]
                pairs = [(t.sample_version, t.behavior_version) for t in trained]
                self._s_train.update(versions.staleness(state.branches, new, old) for new, old in pairs if new and old)
        if isinstance(event, StepFinished):
            self._num_trained += self._batch_tokens.pop(event.step, 0)

    def mark(self, core: Core) -> Mark:
        """After the last event that was shown."""
        state = core.state
        return Mark(
            at=state.at,
            step=state.trainer.step,
            num_trained=self._num_trained,
            num_generated=state.ledger.tokens.total,
            num_moves=state.repack.num_moves,
            num_emptied=state.repack.num_released,
            kv_share=self._kv_share,
            kv_weight=self._kv_weight,
            s_train=Counter(self._s_train),
            num_buffered=len(state.buffer),
        )


def _kv_share(core: Core) -> float:
    replicas = core.state.replicas.values()
    return sum(each.kv_tokens for each in replicas) / max(1, sum(each.kv_tokens_max for each in replicas))


def between(before: Mark, now: Mark) -> dict[str, Cell]:
    """What has happened from one moment of a run to another."""
    seconds = now.at - before.at
    trained = now.s_train - before.s_train
    num, kv_weight = sum(trained.values()), now.kv_weight - before.kv_weight
    return {
        "seconds": round(seconds, 1),
        "train steps": now.step - before.step,
        "trained tokens/s": round((now.num_trained - before.num_trained) / seconds) if seconds else None,
        "generated tokens/s": round((now.num_generated - before.num_generated) / seconds) if seconds else None,
        "s_train mean": round(sum(age * count for age, count in trained.items()) / num, 3) if num else None,
        "s_train max": max(trained) if num else None,
        "KV use mean": round((now.kv_share - before.kv_share) / kv_weight, 3) if kv_weight else None,
        "trajectories moved": now.num_moves - before.num_moves,
        "replicas emptied": now.num_emptied - before.num_emptied,
        "complete groups at the end": now.num_buffered,
    }


def side_by_side(present: dict[str, Cell], changed: dict[str, Cell], recorded: dict[str, Cell] | None = None) -> Table:
    """A row per measure; `ratio` = changed / present."""
    rows: list[list[Cell]] = [
        [
            name,
            *([recorded[name]] if recorded else []),
            present[name],
            changed[name],
            _ratio(present[name], changed[name]),
        ]
        for name in present
    ]
    return table("", f"measure {'recorded ' if recorded else ''}present changed ratio", rows)


def _ratio(present: Cell, changed: Cell) -> Cell:
    numbers = [value for value in (present, changed) if isinstance(value, int | float)]
    return round(numbers[1] / numbers[0], 3) if len(numbers) == 2 and numbers[0] else None
