"""Checks that users run on their own code, outside a run: `check_sampler` on a custom sampler (see docs/samplers.md).

Each raises AssertionError with one message that says what was expected and what the code did.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from laminar.core.sampling import BufferView, GroupView, Sampler, problem
from laminar.ids import GroupId, Version, make_id

NUM_VIEWS = 24  # sizes from one batch to many; enough to meet ties, negative rewards and old versions
SPEED_GROUPS = 4096  # eight batches of 512: a buffer as large as runs have it
SPEED_BATCH = 512
SPEED_CALLS = 7
BUDGET_MS = 5.0  # default of buffer.sampler_budget_ms


def check_sampler(sampler_or_factory: Sampler | Callable[[], Sampler], budget_ms: float = BUDGET_MS) -> None:
    """Check a sampler class (or instance, which should be fresh) against the contract of `laminar.core.sampling.Sampler`.

    Buffers of several sizes, rewards and versions are shown to it. Checked: the ids and their number; that a new
    sampler with its state, once through msgpack, answers the same to the same view, each time; that the view is not
    changed; that the fastest of several calls on 4096 groups takes less than `budget_ms` milliseconds. Raises AssertionError.
    """
    make = type(sampler_or_factory) if _is_instance(sampler_or_factory) else sampler_or_factory
    first = sampler_or_factory if _is_instance(sampler_or_factory) else _make(make)
    for name in ("select", "state", "load_state"):
        assert callable(getattr(first, name, None)), f"{type(first).__name__} has no method {name}"
    source = random.Random(0)
    for num_groups, num_complete in _sizes(source):
        _check_answer(first, make, _view(source, num_complete), num_groups)
    _check_speed(first, source, budget_ms)


def _make(factory: Any) -> Any:
    try:
        return factory()
    except TypeError as error:
        raise AssertionError(f"a sampler is constructed without arguments: {error}") from error


def _is_instance(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "select")


def _sizes(source: random.Random) -> list[tuple[int, int]]:
    sizes = [(1, 1), (4, 4), (8, 9)]
    while len(sizes) < NUM_VIEWS:
        num = source.randint(1, 16)
        sizes.append((num, num + source.randint(0, 48)))
    return sizes


def _view(source: random.Random, num_complete: int) -> BufferView:
    newest = source.randint(1, 40)
    ages = sorted((source.uniform(0.0, 600.0) for _ in range(num_complete)), reverse=True)
    return BufferView(
        groups=tuple(_group(source, number, age, newest) for number, age in enumerate(ages)),
        step=newest + 1,
        version=Version(newest, 0),
    )


def _group(source: random.Random, number: int, age_s: float, newest: int) -> GroupView:
    size = source.choice((2, 8, 8, 8))  # groups that lost a sibling are smaller
    staleness = min(newest, source.choice((0, 0, 1, 1, 2, 5)))
    kind = source.choice(("equal", "binary", "real"))
    reward = {"equal": lambda: 1.0, "binary": lambda: float(source.random() < 0.5), "real": lambda: source.gauss(0, 2)}
    return GroupView(
        id=GroupId(make_id(1, number + 1)),
        prompt=source.randrange(1000),
        age_s=age_s,
        behavior_version=Version(newest - staleness, 0),
        staleness=staleness,
        rewards=tuple(reward[kind]() for _ in range(size)),
        lengths=tuple(source.randint(1, 16384) for _ in range(size)),
    )


def _select(sampler: Any, view: BufferView, num_groups: int) -> list[GroupId]:
    try:
        chosen = sampler.select(view, num_groups)
    except Exception as error:  # user code may raise anything; the message names it
        raise AssertionError(
            f"select raised {type(error).__name__}: {error} (batch of {num_groups} from {len(view.groups)} groups)"
        ) from error
    assert isinstance(chosen, list), f"select returned {type(chosen).__name__}, expected a list of group ids"
    return chosen


def _check_answer(sampler: Any, factory: Any, view: BufferView, num_groups: int) -> None:
    """`sampler` and a new one with its state must choose the same."""
    shown = msgspec.msgpack.encode(view)
    other = _make(factory)
    other.load_state(_round_trip(sampler))
    chosen = _select(sampler, view, num_groups)
    known: dict[GroupId, None] = {group.id: None for group in view.groups}
    fault = problem(chosen, known, num_groups)
    assert not fault, f"select {fault} (batch of {num_groups} from {len(view.groups)} groups)"
    again = _select(other, view, num_groups)
    assert chosen == again, (
        f"select chose {chosen[:4]}…, and {again[:4]}… in a new sampler after load_state(state()): the choice must depend"
        " on nothing but the view and what state() returns (no clock, no unseeded random numbers)"
    )
    assert msgspec.msgpack.encode(view) == shown, "select changed the view"


def _round_trip(sampler: Any) -> dict[str, Any]:
    state = sampler.state()
    assert isinstance(state, dict), f"state returned {type(state).__name__}, expected a dict"
    try:
        restored: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise AssertionError(f"state returned what msgpack cannot hold: {error}") from error
    assert restored == state, f"state() comes back from msgpack changed: {state!r} became {restored!r}"
    return restored


def _check_speed(sampler: Any, source: random.Random, budget_ms: float) -> None:
    view = _view(source, SPEED_GROUPS)
    times_ms = []
    for _ in range(SPEED_CALLS):
        start = time.perf_counter()
        _select(sampler, view, SPEED_BATCH)
        times_ms.append((time.perf_counter() - start) * 1000)
    fastest_ms = min(times_ms)  # a busy machine is not the sampler's fault
    assert fastest_ms < budget_ms, (
        f"select took {fastest_ms:.1f} ms at best ({SPEED_CALLS} calls) for {SPEED_GROUPS} groups, allowed are {budget_ms:g} ms"
    )
