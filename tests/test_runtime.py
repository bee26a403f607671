"""The live driver with a real event log: numbering, order of actions, durability first, crashes, timers."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from laminar.controller import runtime as runtime_module
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.core.settings import Settings
from laminar.ids import TrajectoryId, Version, WorkerId

pytestmark = pytest.mark.timeout(30)

SETTINGS = Settings(num_prompts=8, steps=2, group_size=2, batch_groups=1, local_batch_groups=1, buffer_groups_max=3)


class ScriptedCore(Core):
    """The real core's state and numbering, with the actions that a test wants: those filed under a FailureReported's reason."""

    def __init__(self, script: dict[str, Callable[[int], list[actions.AnyAction]]]) -> None:
        super().__init__(SETTINGS)
        self.script = script
        self.deadline: float | None = None
        self.handled: list[events.AnyEvent] = []

    def handle(self, event: events.AnyEvent) -> list[actions.AnyAction]:
        assert event.seq == self.state.seq + 1
        self.state.seq = event.seq
        self.handled.append(event)
        return self.script[event.reason](event.seq) if isinstance(event, events.FailureReported) else []

    def next_deadline(self) -> float | None:
        return self.deadline


def alarm(cause: int, text: str) -> actions.RaiseAlarm:
    return actions.RaiseAlarm(cause=cause, name="a", text=text)


def forget(cause: int, number: int) -> actions.ForgetTokens:
    return actions.ForgetTokens(cause=cause, trajectories=[TrajectoryId(number)])


def say(reason: str) -> events.FailureReported:
    return events.FailureReported(reason=reason)


def shown(action: actions.AnyAction) -> object:
    return action.text if isinstance(action, actions.RaiseAlarm) else type(action).__name__


class World:
    """A runtime on a real log; `done` holds what was performed, `gate` holds back the disk while it is cleared."""

    def __init__(self, directory: Path, core: Core) -> None:
        self.directory = directory
        self.log = EventLog(directory / "run.db", 0.001)
        self.log.begin_boot(1.0, 1, "here", 0)
        self.runtime = Runtime(core, self.log, directory)
        self.done: list[object] = []
        self.runtime.perform = lambda action: self.done.append(shown(action))

    def start(self) -> None:
        self.log.start(lambda seq: None)
        self.runtime.start()

    async def until_durable(self) -> None:
        await asyncio.wait_for(self.log.when_durable(self.runtime.seq), 10)
        await asyncio.sleep(0)

    async def finished(self) -> actions.FinishRun:
        return await asyncio.wait_for(asyncio.shield(self.runtime.finished), 10)

    def logged(self) -> list[tuple[int, str]]:
        database = sqlite3.connect(self.directory / "run.db")
        try:
            return database.execute("SELECT seq, kind FROM events").fetchall()
        finally:
            database.close()


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., World]]:
    worlds: list[World] = []

    def build(
        script: dict[str, Callable[[int], list[actions.AnyAction]]] | None = None, core: Core | None = None
    ) -> World:
        worlds.append(World(tmp_path, core or ScriptedCore(script or {})))
        return worlds[-1]

    yield build
    for world in worlds:
        await world.runtime.close()
        world.log.close()


async def test_events_are_numbered_stamped_and_logged_before_the_core_sees_them(make) -> None:
    world = make({"x": lambda seq: []})
    world.start()
    assert [world.runtime.post(say("x")), world.runtime.post(events.TimerFired())] == [1, 2]
    await world.until_durable()
    assert world.logged() == [(1, "FailureReported"), (2, "TimerFired")]
    stamps = [event.at for event in world.runtime.core.handled]
    assert stamps == sorted(stamps)
    assert all(stamps)


async def test_the_log_holds_what_the_core_was_given(make, tmp_path: Path) -> None:
    world = make({"x": lambda seq: []})
    world.start()
    world.runtime.post(say("x"))
    await world.until_durable()
    database = sqlite3.connect(tmp_path / "run.db")
    body = database.execute("SELECT body FROM events").fetchone()[0]
    database.close()
    assert msgspec.msgpack.decode(body, type=events.AnyEvent) == world.runtime.core.handled[0]


async def test_an_effect_that_posts_does_not_re_enter_the_core_and_learns_its_number(make) -> None:
    world = make({"first": lambda seq: [alarm(seq, "a"), alarm(seq, "b")], "second": lambda seq: [alarm(seq, "c")]})
    world.start()
    numbers: list[int] = []

    def perform(action: actions.AnyAction) -> None:
        world.done.append(shown(action))
        if shown(action) == "a":
            numbers.append(world.runtime.post(say("second")))
            assert world.runtime.seq == 1, "the core was entered from within an effect"

    world.runtime.perform = perform
    assert world.runtime.post(say("first")) == 1
    assert numbers == [2]
    assert world.done == ["a", "b", "c"]


async def test_an_observer_that_posts_learns_the_number_too(make) -> None:
    world = make({"x": lambda seq: []})
    world.start()
    numbers: list[int] = []

    def observe(event: events.AnyEvent) -> None:
        if isinstance(event, events.FailureReported):
            numbers.append(world.runtime.post(events.TimerFired()))

    world.runtime.observe = observe
    world.runtime.post(say("x"))
    assert numbers == [2]
    assert [event.seq for event in world.runtime.core.handled] == [1, 2]


async def test_an_irreversible_action_waits_for_the_disk_and_holds_up_nothing_else(make) -> None:
    world = make(
        {
            "x": lambda seq: [alarm(seq, "before"), forget(seq, 1), alarm(seq, "after")],
            "y": lambda seq: [alarm(seq, "y")],
        }
    )
    world.runtime.start()
    world.runtime.post(say("x"))
    world.runtime.post(say("y"))
    await asyncio.sleep(0)
    assert world.done == ["before", "after", "y"]
    world.log.start(lambda seq: None)  # only now the disk answers
    await world.until_durable()
    assert world.done == ["before", "after", "y", "ForgetTokens"]


async def test_an_event_is_handed_to_the_disk_together_with_the_rows_that_were_made_of_it(make) -> None:
    world = make({"x": lambda seq: [alarm(seq, "row")]})

    def perform(action: actions.AnyAction) -> None:
        assert world.log._pending == [], "a crash here would leave the event without its row"
        world.log.write("INSERT INTO alarms VALUES (?, ?, ?)", (1.0, "name", "text"))

    world.runtime.perform = perform
    world.runtime.post(say("x"))
    assert [statement.split()[2] for statement, _ in world.log._pending] == ["events", "answers", "alarms"]


async def test_actions_that_wait_are_performed_once_and_in_order_also_if_an_effect_led_to_them(make) -> None:
    script = {
        "x": lambda seq: [forget(seq, 1), alarm(seq, "ask")],
        "answer": lambda seq: [forget(seq, 2), alarm(seq, "last")],
        "y": lambda seq: [forget(seq, 3)],
    }
    world = make(script)
    entered, permits = threading.Semaphore(0), threading.Semaphore(0)

    def before_commit() -> tuple[()]:
        entered.release()
        assert permits.acquire(timeout=10)
        return ()

    def perform(action: actions.AnyAction) -> None:
        world.done.append(shown(action) if isinstance(action, actions.RaiseAlarm) else action.trajectories[0])
        if shown(action) == "ask":
            world.runtime.post(say("answer"))

    world.log._before_commit, world.runtime.perform = before_commit, perform
    world.start()
    world.runtime.post(say("x"))
    permits.release()
    await asyncio.to_thread(entered.acquire, timeout=10)
    await asyncio.to_thread(entered.acquire, timeout=10)  # the commit of the answer has begun
    world.runtime.post(say("y"))
    permits.release(2)
    await world.until_durable()
    assert world.done == ["ask", "last", 1, 2, 3]


async def test_the_end_of_the_run_comes_after_its_records_and_waits_for_no_disk(make) -> None:
    finish = actions.FinishRun(cause=1, reason="completed", ok=True)
    world = make({"x": lambda seq: [forget(seq, 1), alarm(seq, "record"), finish]})
    world.runtime.start()
    world.runtime.post(say("x"))
    assert await world.finished() == finish
    assert world.done == ["record"]


async def test_the_first_end_of_a_run_stands(make) -> None:
    script = {"x": lambda seq: [actions.FinishRun(cause=seq, reason=f"{seq}", ok=True)]}
    world = make(script)
    world.start()
    world.runtime.post(say("x"))
    world.runtime.post(say("x"))
    assert (await world.finished()).reason == "1"


async def test_a_core_that_raises_dumps_its_state_and_ends_the_run(make, tmp_path: Path) -> None:
    world = make({"x": lambda seq: [alarm(seq, "a")]})
    world.start()
    world.runtime.post(say("x"))
    world.runtime.post(say("not in the script"))
    world.runtime.post(say("x"))
    with pytest.raises(KeyError):
        await world.finished()
    assert world.done == ["a"]
    assert len(world.runtime.core.handled) == 2
    dump = tmp_path / "core-dump-2.msgpack"
    assert Core.restore(SETTINGS, dump.read_bytes()).state.seq == 2


async def test_an_effect_that_raises_ends_the_run_and_nothing_follows_it(make) -> None:
    world = make({"x": lambda seq: [alarm(seq, "a"), alarm(seq, "b")]})
    world.start()

    def perform(action: actions.AnyAction) -> None:
        world.done.append(shown(action))
        raise LookupError("no such prompt")

    world.runtime.perform = perform
    world.runtime.post(say("x"))
    with pytest.raises(LookupError, match="no such prompt"):
        await world.finished()
    assert world.done == ["a"]


async def test_an_effect_that_raises_after_it_waited_for_the_disk_ends_the_run_too(make) -> None:
    world = make({"x": lambda seq: [forget(seq, 1), forget(seq, 2)]})
    world.start()

    def perform(action: actions.AnyAction) -> None:
        world.done.append(shown(action))
        raise LookupError("no such trajectory")

    world.runtime.perform = perform
    world.runtime.post(say("x"))
    with pytest.raises(LookupError, match="no such trajectory"):
        await world.finished()
    assert world.done == ["ForgetTokens"]


async def test_a_log_that_cannot_be_written_ends_the_run_and_nothing_irreversible_is_done(make) -> None:
    world = make({"x": lambda seq: [forget(seq, 1)]})
    world.log._before_commit = lambda: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    world.start()
    world.runtime.post(say("x"))
    with pytest.raises(OSError, match="Input/output"):
        await world.finished()
    assert world.done == []


async def test_whether_an_event_reaches_the_disk_is_known_in_bounded_time(make) -> None:
    world = make({"x": lambda seq: []})
    seq = world.runtime.post(say("x"))
    assert not await world.runtime.reaches_disk(seq, 0.01), "nobody writes"
    world.start()
    assert await world.runtime.reaches_disk(seq, 10.0)
    world.log._before_commit = lambda: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    assert not await world.runtime.reaches_disk(world.runtime.post(say("x")), 10.0), "the log has failed"


async def test_a_dump_that_cannot_be_written_does_not_keep_the_run_from_ending(make, tmp_path: Path) -> None:
    world = make({})
    world.start()
    world.runtime._dump_directory = tmp_path / "nowhere"
    world.runtime.post(say("unknown"))
    with pytest.raises(KeyError):
        await world.finished()


async def test_a_deadline_of_the_core_fires_a_timer_and_none_is_left_when_it_has_none(make) -> None:
    world = make({"x": lambda seq: []})
    world.start()
    core = world.runtime.core
    fired: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def observe(event: events.AnyEvent) -> None:
        if isinstance(event, events.TimerFired):
            core.deadline = None
            fired.set_result(None)

    world.runtime.observe = observe
    core.deadline = world.runtime.now() + 0.01
    due = core.deadline
    world.runtime.post(say("x"))
    await asyncio.wait_for(fired, 10)
    assert core.handled[-1].at >= due
    assert world.runtime._timer is None


async def test_a_run_that_is_over_sets_no_timers(make) -> None:
    world = make({"x": lambda seq: []})
    world.start()
    world.runtime.core.deadline = world.runtime.now()
    world.runtime.core.state.finished = "completed"
    world.runtime.post(say("x"))
    assert world.runtime._timer is None


async def test_a_loop_that_was_blocked_shows_in_the_lag_and_only_once(make) -> None:
    world = make()
    world.start()
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 - blocks the loop, as a slow sampler does
    async with asyncio.timeout(10):
        while world.runtime.lag_s_max < 0.1:  # noqa: ASYNC110 - the measuring task has no event
            await asyncio.sleep(0)
    assert world.runtime.take_lag() >= 0.1
    assert world.runtime.lag_s_max == 0.0


async def test_the_real_core_runs_behind_it(make) -> None:
    world = make(core=Core(SETTINGS))
    world.start()
    world.runtime.post(events.RunStarted(boot=1))
    world.runtime.post(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
    world.runtime.post(
        events.TrainerRankReady(worker=WorkerId("trainer-0/0"), incarnation=1, rank=0, world_size=1, step=0)
    )
    version = Version(0, 0)
    world.runtime.post(
        events.ReplicaJoined(
            worker=WorkerId("rollout-0"), incarnation=1, host="here", num_requests_max=8, kv_tokens_max=1000
        )
    )
    world.runtime.post(events.VersionReady(version=version, digest="d", num_bytes=1))
    assert world.done == ["ArrangeChain", "PublishVersion", "PullWeights"]
    world.runtime.post(
        events.ReplicaRefreshed(worker=WorkerId("rollout-0"), incarnation=1, version=version, digest="d", wait_s=0.0)
    )
    assert "RunEvaluation" in world.done
    world.runtime.post(events.StopRequested(reason="enough"))
    assert (await world.finished()).reason == "enough"


# ---- clocks ------------------------------------------------------------------------------------------------


async def test_the_first_event_after_the_loop_stood_still_says_for_how_long(make, monkeypatch) -> None:
    monkeypatch.setattr(runtime_module, "AWAY_S", 0.3)
    world = make({"x": lambda seq: []})
    world.start()
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - that is the point
    world.runtime.post(say("x"))
    first, second = world.runtime.core.handled[:2]
    assert isinstance(first, events.ControllerPaused)
    assert first.away_s >= 0.5
    assert isinstance(second, events.FailureReported)


async def test_run_time_goes_on_after_the_last_event_of_the_controller_before_though_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    log = EventLog(tmp_path / "run.db", 0.001)
    log.begin_boot(1.0, 1, "here", 0)
    tomorrow = time.time() + 86_400.0
    runtime = Runtime(ScriptedCore({}), log, tmp_path, not_before=tomorrow)
    assert tomorrow <= runtime.now() <= tomorrow + 60.0
    assert Runtime(ScriptedCore({}), log, tmp_path, not_before=1.0).now() < tomorrow
    log.close()


async def test_a_task_that_breaks_is_told_by_name_and_ends_nothing_else(make) -> None:
    world, told = make(), asyncio.Queue[str]()
    world.start()
    world.runtime.failed = lambda name, error: told.put_nowait(f"{name}: {error}")

    async def breaks() -> None:
        raise OSError("no such device")

    world.runtime.own(breaks(), "watch")
    assert await asyncio.wait_for(told.get(), 10) == "watch: no such device"
    assert not world.runtime.finished.done()
