"""A controller that reads the log of one that died arrives at its state, and has said the same to every worker."""

import asyncio
import contextlib
import shutil
import sqlite3
from array import array
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from laminar import wire
from laminar.controller import recovery, schema, upkeep
from laminar.controller.channels import Channels
from laminar.controller.effects import Effects
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.controller.segments import Past
from laminar.controller.tokens import TokenStore
from laminar.core import actions, events
from laminar.core.engine import Core
from tests.core_world import World, settings
from tests.test_tokens import report

pytestmark = pytest.mark.timeout(60)

JOINS = tuple(recovery.ROLES)
COMMIT_EVERY = 5  # events
SNAPSHOT_EVENTS = 64  # besides those of steps, wherever they may come
BEGAN = 1000.0  # run time of the first event
RICH = {
    "checkpoint_every": 2,
    "steps": 5,
    "group_size": 3,
    "trainer_restarts_max": 3,
    "restarts_max": 3,
    "progress_timeout_s": 1.0,
}


class Prompts:
    held_out: ClassVar[list[wire.Prompt]] = []

    def prompt(self, index: int) -> wire.Prompt:
        return wire.Prompt(prompt=index, text=f"prompt {index}")  # type: ignore[arg-type]


class Shell:
    """A controller without sockets, over a directory. Its workers have a channel each and never acknowledge anything."""

    def __init__(self, directory: Path, core: Core, *, continues: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.log = EventLog(directory / "run.db", 0.001, lambda: self.tokens.sync(), lambda: self.tokens.committed())
        self.boot = self.log.begin_boot(1.0, 1, "here", 0, continues=continues)
        self.past = Past(directory / "tokens")
        self.tokens = TokenStore(directory / "tokens", self.boot)
        self.runtime = Runtime(core, self.log, directory)
        self.channels = Channels(self.boot, self.log.continues if continues else 0)
        self.effects = Effects(
            runtime=self.runtime,
            channels=self.channels,
            log=self.log,
            tokens=self.tokens,
            prompts=Prompts(),
            checkpoints_at=directory / "checkpoints",
            keep_last=2,
            sampler=None,
            stop_process=lambda worker: None,
            start_process=lambda worker: None,
            alarm=lambda name, text: None,
        )

    def said(self) -> dict[str, list[wire.Message]]:
        """To each worker, all that its process was ever to hear."""
        return {
            channel.worker: [wire.decode_from_controller(frame).message for _, frame in channel.session.kept]
            for channel in self.channels.all()
        }

    def close(self) -> None:
        self.tokens.close()
        self.log.close()


class Picture(msgspec.Struct):
    """A controller at one moment."""

    state: bytes
    said: dict[str, list[Any]]
    tokens: dict[int, tuple[bytes, bytes]]


class Recorded(World):
    """The fuzz world, whose core is driven by a real runtime, log and token store. `pictures`: after which events to take one."""

    def __init__(self, directory: Path, seed: int, pictures: set[int]) -> None:
        super().__init__(settings(**RICH), seed, faults=0.1)
        self.at = BEGAN
        self.operator = True
        self.shell = Shell(directory, self.core)
        self.shell.runtime.now = lambda: self.at  # type: ignore[method-assign]
        self.shell.runtime.perform = self._perform
        self.shell.tokens.forget = lambda trajectories: None  # type: ignore[method-assign] - the segments stay for all the cuts
        self.shell.runtime.observe = self._observe
        self.shell.runtime.settled = self._settled
        self.new: list[actions.AnyAction] = []
        self.heard: dict[str, tuple[int, int]] = {}
        self.wanted, self.pictures = pictures, dict[int, Picture]()
        self.database: sqlite3.Connection | None = None
        """To which the log is committed here and now."""

    def send(self, event: events.AnyEvent, after: float = 0.0) -> list[actions.AnyAction]:
        self.at += after
        self.seq += 1
        self.new = []
        if isinstance(event, JOINS):
            self._greet(event)
        if isinstance(event, events.ReplicaReported):
            self._take_tokens(event)
        self.shell.runtime.post(event, self._frame(event))
        self.actions += self.new
        if self.seq % COMMIT_EVERY == 0:
            self.commit()
        return self.new

    def commit(self) -> None:
        if self.database is not None:
            self.shell.log._commit(self.database)

    def _greet(self, event: Any) -> None:
        hello = wire.Hello(
            protocol=wire.PROTOCOL, worker=event.worker, role=recovery.ROLES[type(event)], incarnation=event.incarnation,
            host=event.host, boot=0,
        )  # fmt: skip
        if not self.shell.channels.reason_to_refuse(hello):
            self.shell.channels.greet(hello)

    def _frame(self, event: Any) -> tuple[str, int, int] | None:
        worker, incarnation = getattr(event, "worker", None), getattr(event, "incarnation", 0)
        if not (worker and incarnation) or isinstance(event, events.WorkerLost):
            return None
        known, number = self.heard.get(worker, (0, 0))
        number = number + 1 if known == incarnation else 1
        self.heard[worker] = (incarnation, number)
        return worker, incarnation, number

    def _take_tokens(self, event: events.ReplicaReported) -> None:
        store = self.shell.tokens
        for finished in event.finished:
            prompt = wire.pack_i32([7] * finished.num_prompt_tokens)
            store.put_prompt(self.core.state.trajectories[finished.trajectory].group, prompt)
        totals = zip(
            array("q", event.trajectories), array("i", event.attempts), array("i", event.num_tokens), strict=True
        )
        for trajectory, attempt, total in totals:
            response = store._responses.get(trajectory)
            num_held = len(response.tokens) // 4 if response is not None else total
            if response is not None and response.attempt == attempt and total > num_held:
                new = [1000 * attempt + at for at in range(num_held, total)]
                store.take(report([(trajectory, attempt, total, new)], logprobs=wire.pack_f32([-1.0] * len(new))))

    def _perform(self, action: actions.AnyAction) -> None:
        self.new.append(action)
        self.shell.effects.perform(action)

    def _observe(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.RelayJoined):
            self.shell.effects.on_relay_joined(event)

    def _settled(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.RunStarted | events.StepFinished) or event.seq % SNAPSHOT_EVENTS == 0:
            shell = self.shell
            shell.log.snapshot(event.seq, recovery.snapshot(self.core, shell.channels, shell.effects))
        if event.seq in self.wanted:
            self.pictures[event.seq] = picture(self.shell)


def picture(shell: Shell) -> Picture:
    core = shell.runtime.core
    known = [t for t in core.state.trajectories if t in shell.tokens._responses]
    return Picture(
        core.snapshot(),
        shell.said(),
        {t: shell.tokens.prefix(t) for t in known if core.state.trajectories[t].num_tokens},
    )


def cut(directory: Path, at: int, into: Path) -> None:
    """A copy of the run as the disk had it after event `at`, but for tokens, of which it may have more."""
    shutil.copytree(directory, into)
    database = sqlite3.connect(into / "run.db")
    with database:
        for table in ("events", "snapshots"):
            database.execute(f"DELETE FROM {table} WHERE seq > ?", (at,))
        database.execute("UPDATE ends SET seq = ?, crc = ?", (at, schema.end_checksum(1, at)))
    database.close()


def recovered(directory: Path) -> Shell:
    history = recovery.read(directory / "run.db")
    shell = Shell(directory, Core.restore(settings(**RICH), history.snapshot.core), continues=True)
    shell.past.check(history.segments)
    recovery.replay(history, shell.runtime.core, shell.channels, shell.effects, shell.past)
    shell.tokens.adopt(shell.past, shell.runtime.core.state.trajectories.values())
    return shell


async def record(directory: Path, seed: int) -> Recorded:
    world = Recorded(directory, seed, set(range(3, 4000, 7)))
    world.shell.log.start(lambda seq: None)
    world.run()
    await asyncio.wait_for(world.shell.log.when_durable(world.seq), 30)
    await world.shell.runtime.close()
    world.shell.close()
    return world


async def record_killed(directory: Path, seed: int, killed: Path) -> None:
    """`killed`: gets what the directory has of a whole run while its log is still open. Every COMMIT_EVERY events make a commit."""
    world = Recorded(directory, seed, set())
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database:
        schema.prepare(database)
        world.database = database
        world.run()
        world.commit()
        shutil.copytree(directory, killed)
    await world.shell.runtime.close()
    world.shell.close()


@pytest.mark.parametrize("seed", range(4))
async def test_at_any_moment_the_log_gives_the_state_what_was_said_and_the_tokens(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SNAPSHOTS_KEPT", 1000)  # for all the cuts
    world = await record(tmp_path / "run", seed)
    assert len(world.pictures) > 10
    assert max(len(p.tokens) for p in world.pictures.values()) > 3
    for at, live in world.pictures.items():
        cut(tmp_path / "run", at, tmp_path / f"cut-{at}")
        history = recovery.read(tmp_path / f"cut-{at}" / "run.db")
        assert (history.began, history.died_at >= BEGAN) == (BEGAN, True), "people count seconds from the first event"
        shell = recovered(tmp_path / f"cut-{at}")
        found = picture(shell)
        assert found.state == live.state, f"event {at}"
        assert found.said == live.said, f"event {at}"
        assert found.tokens == live.tokens, f"event {at}"
        await shell.runtime.close()
        shell.close()
        shutil.rmtree(tmp_path / f"cut-{at}")
    assert any(live.said for live in world.pictures.values())


async def test_what_a_checkpoint_carries_leaves_the_database_with_it(tmp_path: Path) -> None:
    shell = Shell(tmp_path, Core(settings(**RICH)))
    shell.log.start(lambda seq: None)
    for step in (1, 2, 3):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        shell.log.write("INSERT INTO checkpoints VALUES (?, '', ?, NULL)", (step, b"state"))
        shell.effects.on_checkpoint_saved(step)
    await shell.runtime.close()
    shell.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "run.db")) as database:
        rows = database.execute("SELECT step, data_state, saved_at > 0 FROM checkpoints ORDER BY step").fetchall()
    assert rows == [(1, None, 1), (2, b"state", 1), (3, b"state", 1)]
