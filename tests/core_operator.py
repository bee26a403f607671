"""What an operator may wish for in the middle of a run of a seeded world: sensible and foolish things alike."""

from collections.abc import Callable
from random import Random
from typing import Any

from laminar.core import amend, events
from laminar.core.breakpoints import FIELDS
from laminar.core.engine import Core
from laminar.core.operator_records import Condition
from laminar.ids import WorkerId

PASSES = ["refresh", "dispatch", "repack", "sample", "all"]

VALUES: dict[str, list[Any]] = {
    "steps": [1, 2, 3, 5, 8],
    "buffer_groups_max": [1, 2, 6, 12],
    "ready_groups_max": [0, 1, 2, 4],
    "max_staleness": [None, 0, 1, 3],
    "on_stale": ["drop", "wait"],
    "on_incomplete": ["drop", "train"],
    "min_group_size": [1, 2],
    "stragglers": ["wait", "drop"],
    "straggler_factor": [0.5, 2.0],
    "on_sampler_error": ["fifo", "stop"],
    "sampler_budget_ms": [1.0, 5.0],
    "num_retries": [0, 3],
    "local_batch_groups": [1, 2, 4],
    "refresh_policy": ["batch", "continuous", "rolling"],
    "draining_share": [0.2, 0.5, 1.0],
    "staleness_budget": [0.0, 0.5, 2.0],
    "await_publication_s": [0.0, 0.5],
    "progress_timeout_s": [1.0, 4.0],
    "restarts_max": [0, 2, 50],
    "trainer_restarts_max": [0, 2, 50],
    "relay_restarts_max": [0, 2, 50],
    "checkpoint_every": [0, 1, 2],
    "repack_interval_s": [0.0, 0.3],
    "repack_policy": ["whole", "parts"],
    "repack_kv_share": [0.3, 0.9],
    "repack_requests_max": [0, 4],
    "stall_after_s": [0.0, 60.0],
}
assert VALUES.keys() == amend.CHANGEABLE.keys()


def wish(core: Core, random: Random) -> events.AnyEvent:
    """Any event that an operator may send."""
    return random.choice(WISHES)(core, random)


def _drain(core: Core, random: Random) -> events.AnyEvent:
    return events.DrainRequested(worker=random.choice(list(core.state.replicas)))


def _hold(core: Core, random: Random) -> events.AnyEvent:
    mode = random.choice(["step", "pause"])
    return events.HoldChanged(pass_name=random.choice(PASSES), held=random.random() < 0.5, mode=mode)  # type: ignore[arg-type]


def _settings(core: Core, random: Random) -> events.AnyEvent:
    names = random.sample(sorted(VALUES), random.choice([1, 1, 2, 4]))
    return events.SettingsChanged(changes={name: random.choice(VALUES[name]) for name in names})


def _sampler(core: Core, random: Random) -> events.AnyEvent:
    return events.SamplerChanged(reference=random.choice(["fifo", "mine.py:Sampler"]))


def _replica(core: Core, random: Random) -> events.AnyEvent:
    return events.ReplicaSettingsChanged(
        worker=random.choice([WorkerId(""), *core.state.replicas]),
        flush_interval_s=random.choice([None, 0.0, 0.1, 5.0]),
        num_requests_max=random.choice([None, 0, 1, 3, 64, 99]),
    )


def _checkpoint(core: Core, random: Random) -> events.AnyEvent:
    return events.CheckpointRequested()


def _stop_after(core: Core, random: Random) -> events.AnyEvent:
    return events.StopAfterStep(step=random.choice([0, 0, core.state.trainer.step + random.randint(-1, 3)]))


def _break(core: Core, random: Random) -> events.AnyEvent:
    if core.state.breakpoints and random.random() < 0.5:
        return events.BreakpointCleared(breakpoint=random.choice([0, *core.state.breakpoints]))
    where = random.choice(list(FIELDS))
    fields = list(FIELDS[where].items())
    conditions = []
    if fields and random.random() < 0.5:
        field, kind = random.choice(fields)
        value: int | str = "r1" if kind is str else random.randint(0, 3)
        conditions = [Condition(field, random.choice(["==", "!=", "<", ">"]), value)]  # type: ignore[arg-type]
    return events.BreakpointSet(where=where, conditions=conditions)


WISHES: list[Callable[[Core, Random], events.AnyEvent]] = [
    _drain, _hold, _hold, _settings, _settings, _settings, _sampler, _replica, _checkpoint, _stop_after, _break
]  # fmt: skip
