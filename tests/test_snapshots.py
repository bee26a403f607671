"""When snapshots are written: at once at a start, after a rest at the end of a step, one for all that falls into the rest."""

import asyncio
from collections.abc import Callable, Coroutine

import msgspec
import pytest

from laminar.controller import snapshots
from laminar.controller.snapshots import Snapshots
from laminar.core import events

pytestmark = pytest.mark.timeout(30)


class Surroundings:
    """What a runtime and a log are to snapshots: the number of the last event, tasks, and what was written."""

    def __init__(self) -> None:
        self.seq, self.crashed = 0, False
        self.tasks: list[asyncio.Task[None]] = []
        self.written: list[tuple[int, bytes]] = []
        self.settled: Callable[[events.AnyEvent], None] = Snapshots(self, self, lambda: b"%d" % self.seq).settled  # type: ignore[arg-type]

    def own(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine, name=name))

    def snapshot(self, seq: int, body: bytes) -> None:
        self.written.append((seq, body))

    def take(self, event: events.AnyEvent, seq: int) -> None:
        self.seq = seq
        self.settled(msgspec.structs.replace(event, seq=seq))


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "REST_S", 0.0)


def step(number: int = 1) -> events.StepFinished:
    return events.StepFinished(step=number, attempt=1)


async def test_the_first_event_is_followed_by_a_snapshot_at_once() -> None:
    around = Surroundings()
    around.take(events.RunStarted(boot=1), 1)
    assert around.written == [(1, b"1")]
    assert not around.tasks


async def test_the_end_of_a_step_is_followed_by_one_snapshot_of_the_state_after_the_rest() -> None:
    around = Surroundings()
    around.take(step(1), 7)
    around.take(step(2), 8)
    around.take(events.TimerFired(), 9)
    assert not around.written, "it is written on top of the step's rows"
    await asyncio.gather(*around.tasks)
    assert around.written == [(9, b"9")]
    around.take(step(3), 12)
    await asyncio.gather(*around.tasks)
    assert around.written[1:] == [(12, b"12")]


async def test_many_events_without_a_step_are_followed_by_one() -> None:
    around = Surroundings()
    around.take(events.TimerFired(), snapshots.EVENTS - 1)
    assert not around.tasks
    around.take(events.TimerFired(), snapshots.EVENTS)
    await asyncio.gather(*around.tasks)
    assert around.written == [(snapshots.EVENTS, b"%d" % snapshots.EVENTS)]


async def test_a_crash_during_the_rest_leaves_the_state_unwritten() -> None:
    around = Surroundings()
    around.take(step(), 3)
    around.crashed = True
    await asyncio.gather(*around.tasks)
    assert not around.written, "a state that is not to be trusted was kept"
