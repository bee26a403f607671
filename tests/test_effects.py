"""Effects on a real server with real links, a real log and a real token store; user samplers of every bad kind."""

import asyncio
import itertools
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from laminar import wire
from laminar.config import Config, ControllerConfig
from laminar.controller.channels import Channel, Channels
from laminar.controller.effects import Effects
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.controller.server import Server
from laminar.controller.tokens import TokenStore
from laminar.controller.trajectoryrows import Stalenesses
from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.core.records import Timings, Trajectory
from laminar.core.sampling import BufferView, GroupView, Sampler
from laminar.core.settings import Settings
from laminar.core.trainer_records import Branch
from laminar.ids import GroupId, PromptId, TrajectoryId, Version, WorkerId
from laminar.samplers import GuardedSampler, Samplers
from laminar.tasks.datasets import PromptSet
from laminar.workers.link import Link

pytestmark = pytest.mark.timeout(30)

SETTINGS = Settings(num_prompts=4, steps=2, group_size=2, batch_groups=1, local_batch_groups=1, buffer_groups_max=3)
CONFIG = Config(controller=ControllerConfig(heartbeat_s=0.05, heartbeat_timeout_s=5.0, orphan_timeout_s=5.0))
PROMPTS = PromptSet(
    [wire.Prompt(prompt=PromptId(n), text=f"question {n}") for n in range(4)],
    [wire.Prompt(prompt=PromptId(4), text="held")],
)
ROLLOUT, RANK = WorkerId("rollout-0"), WorkerId("trainer-0/0")
VERSION = Version(3, 0)
GROUP, A, B = GroupId(7), TrajectoryId(1), TrajectoryId(2)


class ListeningCore(Core):
    """The real state; keeps the events and decides nothing."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.heard: list[events.AnyEvent] = []

    def handle(self, event: events.AnyEvent) -> list[actions.AnyAction]:
        self.state.seq = event.seq
        self.heard.append(event)
        return []


class World:
    """Everything around the effects, for real."""

    def __init__(self, directory: Path, sampler: Sampler | None = None, keep_last: int = 2) -> None:
        self.directory = directory
        self.core = ListeningCore()
        self.log = EventLog(directory / "run.db", 0.001)
        self.log.begin_boot(1.0, 1, "here", 0)
        self.tokens = TokenStore(directory / "tokens", 1)
        self.runtime = Runtime(self.core, self.log, directory)
        self.channels = Channels(1)
        self.server = Server(
            self.channels, token="t", run_id="test", config=wire.encode(CONFIG), heartbeat_s=0.05, timeout_s=5.0
        )
        self.stopped: list[str] = []
        self.restarted: list[str] = []
        self.alarms: list[tuple[str, str]] = []
        self.effects = Effects(
            runtime=self.runtime,
            channels=self.channels,
            log=self.log,
            tokens=self.tokens,
            prompts=PROMPTS,
            checkpoints_at=directory / "checkpoints",
            keep_last=keep_last,
            sampler=sampler,
            stop_process=self.stopped.append,
            start_process=self.restarted.append,
            alarm=lambda name, text: self.alarms.append((name, text)),
        )
        self.links: dict[str, Link] = {}

    async def open(self) -> None:
        self.log.start(lambda seq: None)
        self.channels.acknowledge(1)  # what the tests' actions name as their cause is on disk
        self.core.state.trainer.ranks = {RANK: 1, WorkerId("trainer-0/1"): 1}
        self.server.on_message = lambda channel, message, number: 0
        await self.server.start("127.0.0.1", 0)
        for name, role in ((ROLLOUT, "rollout"), (RANK, "trainer"), (WorkerId("trainer-0/1"), "trainer")):
            link = Link(f"http://127.0.0.1:{self.server.port}", worker=name, role=role, token="t")
            await asyncio.wait_for(link.connect(), 10)
            self.links[name] = link

    async def received(self, worker: str) -> wire.Message:
        return await asyncio.wait_for(self.links[worker].receive(), 10)

    async def close(self) -> None:
        for link in self.links.values():
            await link.close()
        await self.server.close()
        await self.runtime.close()
        self.log.close()
        self.tokens.close()

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        """From the database, once everything written so far is there."""
        seq = self.runtime.post(events.TimerFired())
        await asyncio.wait_for(self.log.when_durable(seq), 10)
        database = sqlite3.connect(self.directory / "run.db")
        try:
            return database.execute(query).fetchall()
        finally:
            database.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.open()
    yield world
    await world.close()


def start(trajectory: TrajectoryId, attempt: int = 1, resume: bool = False) -> actions.Start:
    return actions.Start(trajectory, attempt, seed=9, resume=resume, score_only=False)


def start_group(*starts: actions.Start) -> actions.StartGroup:
    return actions.StartGroup(
        cause=1, worker=ROLLOUT, group=GROUP, version=VERSION, prompt=PromptId(2), starts=list(starts)
    )


def put(world: World, attempt: int, total: int, ids: list[int]) -> None:
    report = wire.RolloutReport(
        version=None,
        trajectories=wire.pack_i64([A]),
        attempts=wire.pack_i32([attempt]),
        num_tokens=wire.pack_i32([total]),
        num_new=wire.pack_i32([len(ids)]),
        tokens=wire.pack_i32(ids),
        logprobs=wire.pack_f32([-1.0] * len(ids)),
    )
    world.tokens.take(report)


# ---- each kind of action -----------------------------------------------------------------------------------


async def test_every_kind_of_action_has_its_effect(world: World) -> None:
    kinds = set(get_args(actions.AnyAction)) - {actions.FinishRun}  # which the runtime performs itself
    assert set(world.effects._table) == kinds


async def test_a_group_is_sent_with_its_prompt_and_nothing_of_void_attempts(world: World) -> None:
    world.effects.perform(start_group(start(A), start(B)))
    put(world, 1, 2, [1, 2])
    world.effects.perform(start_group(start(A, attempt=2)))
    first, second = await world.received(ROLLOUT), await world.received(ROLLOUT)
    assert isinstance(first, wire.AssignGroup)
    assert isinstance(second, wire.AssignGroup)
    assert (first.group, first.version, first.prompt) == (GROUP, VERSION, PROMPTS.prompt(2))
    assert [(s.trajectory, s.attempt, s.seed, s.prefix_tokens) for s in first.starts] == [
        (A, 1, 9, b""),
        (B, 1, 9, b""),
    ]
    assert [(s.attempt, s.prefix_tokens) for s in second.starts] == [(2, b"")]
    assert world.tokens.prefix(A) == (b"", b"")


async def test_an_attempt_that_resumes_gets_what_earlier_ones_delivered(world: World) -> None:
    world.effects.perform(start_group(start(A)))
    put(world, 1, 2, [1, 2])
    world.effects.perform(start_group(start(A, attempt=2, resume=True)))
    put(world, 1, 3, [9])  # the old attempt's last words
    put(world, 2, 3, [3])
    await world.received(ROLLOUT)
    message = await world.received(ROLLOUT)
    assert isinstance(message, wire.AssignGroup)
    assert message.starts[0].prefix_tokens == wire.pack_i32([1, 2])
    assert message.starts[0].prefix_logprobs == wire.pack_f32([-1.0, -1.0])
    assert world.tokens.prefix(A)[0] == wire.pack_i32([1, 2, 3])


async def test_orders_to_a_replica_arrive_as_they_are(world: World) -> None:
    perform = world.effects.perform
    perform(actions.AbortAttempts(cause=1, worker=ROLLOUT, trajectories=[A], attempts=[2]))
    perform(actions.PullWeights(cause=1, worker=ROLLOUT, version=VERSION, digest="d"))
    perform(actions.RunEvaluation(cause=1, worker=ROLLOUT, evaluation=1, version=VERSION))
    assert [await world.received(ROLLOUT) for _ in range(3)] == [
        wire.Abort(trajectories=[A], attempts=[2]),
        wire.Refresh(version=VERSION, digest="d"),
        wire.Evaluate(evaluation=1, version=VERSION, prompts=PROMPTS.held_out),
    ]


async def test_relays_that_listen_are_told_their_neighbours(world: World) -> None:
    first, second = WorkerId("relay-0"), WorkerId("relay-1")
    for name in (first, second):
        link = Link(f"http://127.0.0.1:{world.server.port}", worker=name, role="relay", token="t")
        await asyncio.wait_for(link.connect(), 10)
        world.links[name] = link
    neighbour = wire.Neighbour(name=second, host="here", port=7)
    world.effects.relay_addresses = {first: wire.Neighbour(name=first, host="here", port=6), second: neighbour}
    world.effects.perform(actions.ArrangeChain(cause=1, epoch=3, order=[first, second], master=first))
    assert await world.received(first) == wire.ArrangeChain(epoch=3, upstream=None, downstream=neighbour, num_relays=2)
    assert await world.received(second) == wire.ArrangeChain(epoch=3, upstream=first, downstream=None, num_relays=2)


async def test_ranks_of_several_hosts_are_told_where_the_relay_is_that_collects_their_shards(world: World) -> None:
    collector = wire.Neighbour(name="relay-1", host="here", port=7)
    world.effects.relay_addresses = {WorkerId("relay-1"): collector}
    order = actions.PublishVersion(cause=1, version=VERSION, publication=3, relay=WorkerId("relay-1"))
    world.effects.perform(order)
    for rank in (RANK, "trainer-0/1"):
        assert await world.received(rank) == wire.Publish(version=VERSION, publication=3, collector=collector)


async def test_every_rank_of_the_trainer_gets_the_same_orders(world: World) -> None:
    row = actions.BatchRow(A, GROUP, VERSION, 3, 4, 0.5)
    for action in (
        actions.StartTrainStep(cause=1, step=4, attempt=1, rows=[row]),
        actions.PublishVersion(cause=1, version=VERSION),
        actions.SaveCheckpoint(cause=1, step=4, data_state=b"data"),
    ):
        world.effects.perform(action)
    path = world.directory / "checkpoints" / "step-4"
    for rank in (RANK, "trainer-0/1"):
        assert [await world.received(rank) for _ in range(3)] == [
            wire.StartStep(
                step=4,
                attempt=1,
                rows=[
                    wire.BatchRow(
                        trajectory=A,
                        group=GROUP,
                        behavior_version=VERSION,
                        num_prompt_tokens=3,
                        num_tokens=4,
                        reward=0.5,
                    )
                ],
            ),
            wire.Publish(version=VERSION),
            wire.SaveCheckpoint(step=4, path=str(path), data_state=b"data"),
        ]
    assert await world.rows("SELECT step, path, data_state, saved_at FROM checkpoints") == [
        (4, str(path), b"data", None)
    ]


async def test_forgotten_tokens_are_gone(world: World) -> None:
    world.effects.perform(start_group(start(A)))
    put(world, 1, 1, [1])
    world.effects.perform(actions.ForgetTokens(cause=1, trajectories=[A]))
    assert world.tokens.prefix(A) == (b"", b"")


async def test_a_worker_that_is_given_up_is_fenced_and_its_process_stopped(world: World) -> None:
    channel: Channel = next(c for c in world.channels.all() if c.worker == ROLLOUT)
    world.effects.perform(
        actions.StopWorker(cause=1, worker=ROLLOUT, incarnation=channel.incarnation, reason="it hung")
    )
    assert await world.received(ROLLOUT) == wire.Stop(reason="it hung")
    assert world.stopped == [ROLLOUT]
    assert world.channels.workers("rollout") == []


async def test_a_drained_worker_is_fenced_and_ends_by_itself(world: World) -> None:
    channel: Channel = next(c for c in world.channels.all() if c.worker == ROLLOUT)
    world.effects.perform(
        actions.StopWorker(cause=1, worker=ROLLOUT, incarnation=channel.incarnation, reason="drained", lost=False)
    )
    assert await world.received(ROLLOUT) == wire.Stop(reason="drained")
    assert world.channels.workers("rollout") == []
    assert (world.stopped, world.alarms) == ([], [])


async def test_an_alarm_is_shown_and_kept(world: World) -> None:
    world.effects.perform(actions.RaiseAlarm(cause=1, name="sampler", text="it chose nothing"))
    assert world.alarms == [("sampler", "it chose nothing")]
    assert await world.rows("SELECT name, text FROM alarms") == [("sampler", "it chose nothing")]


async def test_a_record_has_every_column_and_its_stalenesses(world: World) -> None:
    trajectory = Trajectory(
        id=A,
        group=GROUP,
        prompt=PromptId(2),
        sibling=1,
        seed=9,
        attempt=2,
        behavior_version=Version(1, 0),
        finish_version=Version(2, 0),
        sample_version=Version(4, 0),
        digest="d",
        num_prompt_tokens=5,
        num_tokens=6,
        finish_reason="stop",
        reward=0.0,
        reward_parts={"format": 1.0},
        step=5,
        timings=Timings(queued=1.0, first_token=2.0, finished=3.0, rewarded=4.0, sampled=5.0, trained=6.0),
    )
    world.effects.perform(actions.RecordTrajectories(cause=1, trajectories=[trajectory]))
    unfinished = Trajectory(id=B, group=GROUP, prompt=PromptId(2), sibling=0, seed=9, dropped="stopped")
    world.effects.perform(actions.RecordTrajectories(cause=1, trajectories=[unfinished, trajectory]))
    rows = await world.rows("SELECT * FROM trajectories ORDER BY id")
    assert rows[0] == (
        A, 2, GROUP, 1, 2, "v1", "v2", "v4", "d", 5, 6, 0.0, '{"format":1.0}', "stop",
        5, None, 1, 2, 3, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0,
    )  # fmt: skip
    assert rows[1] == (B, 2, GROUP, 0, 1, None, None, None, "", 0, 0, None, "{}", "", None, "stopped", *[None] * 9)


def test_staleness_across_a_restore_counts_from_the_common_step() -> None:
    trajectory = Trajectory(id=A, group=GROUP, prompt=PromptId(0), sibling=0, seed=0)
    assert Stalenesses([]).of(trajectory) == (None, None, None)
    trajectory.behavior_version, trajectory.finish_version = Version(5, 0), Version(5, 1)
    trajectory.sample_version = Version(6, 1)
    assert Stalenesses([Branch(branch=1, fork_step=3)]).of(trajectory) == (2, 1, 3)


# ---- checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "left"),
    [(1, ["step-30"]), (2, ["step-4", "step-30"]), (9, ["step-2", "step-3", "step-4", "step-30"])],
)
async def test_old_checkpoints_are_deleted_and_the_last_few_kept(
    tmp_path: Path, keep_last: int, left: list[str]
) -> None:
    await check_pruning(tmp_path, keep_last, left)


@pytest.mark.parametrize("keep_last", [0, -1, -5])
async def test_the_newest_checkpoint_is_never_deleted(tmp_path: Path, keep_last: int) -> None:
    await check_pruning(tmp_path, keep_last, ["step-30"])


async def check_pruning(tmp_path: Path, keep_last: int, left: list[str]) -> None:
    world = World(tmp_path, keep_last=keep_last)
    world.log.start(lambda seq: None)
    checkpoints = tmp_path / "checkpoints"
    for name in ("step-2", "step-3", "step-4", "step-30", "step-31.partial", "notes"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "data").write_text("x")
    world.effects.perform(actions.SaveCheckpoint(cause=1, step=30, data_state=b""))
    world.effects.on_checkpoint_saved(30)
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 10)
    assert {path.name for path in checkpoints.iterdir()} == {*left, "step-31.partial", "notes"}
    [(saved_at,)] = await world.rows("SELECT saved_at FROM checkpoints")
    assert saved_at > 0
    await world.close()


# ---- samplers ----------------------------------------------------------------------------------------------


class Fifo:
    """A good one, with state."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.loaded: list[dict[str, Any]] = []

    def select(self, view: BufferView, num_groups: int) -> Any:
        self.num_calls += 1
        return [group.id for group in view.groups[:num_groups]]

    def state(self) -> Any:
        return {"num_calls": self.num_calls}

    def load_state(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        self.num_calls = state["num_calls"]


def bad(method: str, answer: Any) -> Fifo:
    """A sampler whose `method` answers so: a value, or what calling it gives."""
    sampler = Fifo()
    setattr(sampler, method, lambda *_: answer() if callable(answer) else answer)
    return sampler


def ask(state: bytes = b"", request: int = 5) -> actions.AskSampler:
    groups = tuple(
        GroupView(
            id=GroupId(number),
            prompt=0,
            age_s=1.0,
            behavior_version=VERSION,
            staleness=0,
            rewards=(0.0, 1.0),
            lengths=(3, 4),
        )
        for number in (11, 12, 13)
    )
    view = BufferView(groups=groups, step=4, version=VERSION)
    return actions.AskSampler(cause=1, request=request, num_groups=2, view=view, state=state)


def answer_of(directory: Path, sampler: Any, *asked: actions.AskSampler) -> list[events.SamplerAnswered]:
    async def run() -> list[events.SamplerAnswered]:
        world = World(directory, sampler=sampler)
        for action in asked or (ask(),):
            world.effects.perform(action)
        await world.close()
        return [event for event in world.core.heard if isinstance(event, events.SamplerAnswered)]

    return asyncio.run(run())


def test_a_samplers_choice_is_the_answer_with_its_state(tmp_path: Path) -> None:
    [event] = answer_of(tmp_path, Fifo())
    assert (event.request, event.groups, event.error) == (5, [11, 12], "")
    assert msgspec.msgpack.decode(event.state) == {"num_calls": 1}
    assert event.elapsed_ms >= 0


def test_a_samplers_saved_state_is_loaded_once_before_its_first_choice(tmp_path: Path) -> None:
    sampler = Fifo()
    saved = msgspec.msgpack.encode({"num_calls": 41})
    first, second = answer_of(tmp_path, sampler, ask(saved), ask(saved, request=6))
    assert sampler.loaded == [{"num_calls": 41}]
    assert msgspec.msgpack.decode(first.state) == {"num_calls": 42}
    assert msgspec.msgpack.decode(second.state) == {"num_calls": 43}


def raise_error() -> None:
    raise LookupError("no such thing")


@pytest.mark.parametrize("method", ["select", "state"])
@pytest.mark.parametrize("kind", [raise_error, lambda: sys.exit(3), lambda: 1 / 0])
def test_a_sampler_that_raises_is_named_with_the_method_and_the_error(tmp_path: Path, method: str, kind: Any) -> None:
    [event] = answer_of(tmp_path, bad(method, kind))
    assert event.error.startswith(f"Fifo.{method} raised ")
    assert event.groups == []


def test_a_sampler_that_cannot_take_its_state_back_is_named(tmp_path: Path) -> None:
    [event] = answer_of(tmp_path, Fifo(), ask(msgspec.msgpack.encode({"other": 1})))
    assert event.error == "Fifo.load_state raised KeyError: 'num_calls'"


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        3,
        "ab",
        b"ab",
        {11: 1},
        {11, 12},
        [1.5],
        ["a"],
        [None],
        [[11]],
        [True],
        itertools.count(),
        [1 << 80],
        object(),
    ],
    ids=lambda garbage: type(garbage).__name__,
)
def test_a_choice_of_the_wrong_type_is_an_error_that_says_what_it_is(tmp_path: Path, garbage: Any) -> None:
    [event] = answer_of(tmp_path, bad("select", garbage))
    assert event.error.startswith(f"Fifo.select returned a {type(garbage).__name__}")
    assert event.error.endswith("expected a list of group ids")


def test_a_state_that_msgpack_cannot_hold_is_an_error(tmp_path: Path) -> None:
    [event] = answer_of(tmp_path, bad("state", {"x": object()}))
    assert event.error.startswith("Fifo.state raised TypeError")


def test_a_slow_choice_says_how_long_it_took(tmp_path: Path) -> None:
    [event] = answer_of(tmp_path, bad("select", lambda: time.sleep(0.03) or [11, 12]))
    assert event.groups == [11, 12]
    assert event.elapsed_ms >= 30


def test_the_time_to_load_and_save_state_is_not_the_choices(tmp_path: Path) -> None:
    [event] = answer_of(tmp_path, bad("state", lambda: time.sleep(0.5) or {}))
    assert event.elapsed_ms < 500


def test_a_choice_that_does_not_come_is_not_waited_for_and_asked_again_once_it_has_come() -> None:
    entered, released, calls = threading.Event(), threading.Event(), []

    def hang_once(*_: Any) -> list[int]:
        calls.append(1)
        if len(calls) == 1:
            entered.set()
            released.wait(60.0)
        return [11, 12]

    sampler = Fifo()
    sampler.select = hang_once  # type: ignore[method-assign]
    guarded = GuardedSampler(sampler, limit_s=0.2)
    first = guarded.ask(ask())
    assert first.request == 5
    assert first.error.startswith("hangs: Fifo.")
    assert entered.wait(60.0)
    second = guarded.ask(ask(request=6))
    assert second.request == 6
    assert second.error.startswith("hangs: Fifo.select (")
    assert "has not returned for" in second.error
    assert "hang_once" in second.error
    assert "buffer.sampler=fifo" in second.error
    assert len(calls) == 1
    released.set()
    guarded._limit_s = 60.0
    while (third := guarded.ask(ask(request=7))).error:
        time.sleep(0.01)  # until the first choice has come, which nobody waits for any more
    assert (third.request, third.groups) == (7, [11, 12])


def sampler_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sampler"]


def test_a_sampler_that_is_replaced_or_that_nobody_knows_any_more_leaves_no_thread() -> None:
    before = sampler_threads()
    samplers, forgotten = Samplers(Fifo()), GuardedSampler(Fifo())
    assert samplers.ask(ask()).groups == forgotten.ask(ask()).groups == [11, 12]
    threads = [thread for thread in sampler_threads() if thread not in before]
    assert len(threads) == 2
    samplers.use("fifo")
    del forgotten
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


def test_a_sampler_that_hangs_does_not_hold_up_the_end_of_a_run_and_its_thread_ends_once_it_returns() -> None:
    before, released = sampler_threads(), threading.Event()
    sampler = Fifo()
    sampler.select = lambda *_: released.wait(60.0)  # type: ignore[method-assign,assignment,return-value]
    guarded = GuardedSampler(sampler, limit_s=0.1)
    assert guarded.ask(ask()).error.startswith("hangs")
    (thread,) = [thread for thread in sampler_threads() if thread not in before]
    guarded.close()
    assert guarded.ask(ask()).error == "is not asked any more"
    released.set()
    thread.join(20.0)
    assert not thread.is_alive()


async def test_no_sampler_is_asked_once_the_effects_are_closed(world: World) -> None:
    before = sampler_threads()
    world.effects.samplers = Samplers(Fifo())
    assert world.effects.samplers.ask(ask()).groups == [11, 12]
    (thread,) = [thread for thread in sampler_threads() if thread not in before]
    world.effects.close()
    assert world.effects.samplers.ask(ask()).error == "the run is over"
    await asyncio.to_thread(thread.join, 20.0)
    assert not thread.is_alive()


# ---- an operator's word ------------------------------------------------------------------------------------


async def test_a_replica_is_told_its_flush_interval(world: World) -> None:
    world.effects.perform(actions.ReconfigureReplica(cause=1, worker=ROLLOUT, flush_interval_s=2.0))
    assert await world.received(ROLLOUT) == wire.Reconfigure(flush_interval_s=2.0)


async def test_a_breakpoint_that_is_hit_is_told_and_recorded_like_an_alarm_but_not_again_by_a_take_over(
    world: World,
) -> None:
    hit = actions.BreakpointHit(cause=1, breakpoint=2, where="repack when moves > 2", text="trajectories move")
    world.effects.perform(hit)
    world.effects.replay(hit)
    text = "2 (repack when moves > 2): trajectories move; the run is held until an operator lets it go"
    assert world.alarms == [("breakpoint", text)]


SAMPLER_FILE = """
class Newest:
    def select(self, view, num_groups):
        return [group.id for group in reversed(view.groups)][:num_groups]
    def state(self):
        return {}
    def load_state(self, state):
        pass
"""


def test_a_sampler_is_loaded_from_its_file_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    reference = f"{file}:Newest"
    file.write_text(SAMPLER_FILE)
    samplers = Samplers(None)
    samplers.prepare(reference)
    samplers.use(reference)
    assert samplers.ask(ask()).groups == [13, 12]
    file.write_text(SAMPLER_FILE.replace("reversed(view.groups)", "view.groups"))
    samplers.use(reference)
    assert samplers.ask(ask(request=6)).groups == [11, 12]


def test_a_sampler_that_cannot_be_loaded_any_more_says_so_whenever_it_is_asked(tmp_path: Path) -> None:
    samplers = Samplers(Fifo())
    samplers.use(f"{tmp_path}/gone.py:Newest")
    answer = samplers.ask(ask())
    assert answer.request == 5
    assert "cannot be loaded" in answer.error
    assert "no file" in answer.error
    samplers.use("fifo")
    assert samplers.ask(ask()).error == "there is none"
