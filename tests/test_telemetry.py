"""Per-step metrics on a real log, and docs/metrics.md against what the code emits."""

import ast
import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from laminar import wire
from laminar.controller import telemetry
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.controller.telemetry import Telemetry
from laminar.core import events
from laminar.core.engine import Core
from laminar.core.records import Group, GroupState, Timings, Trajectory
from laminar.core.settings import Settings
from laminar.core.trainer_records import Step
from laminar.ids import GroupId, PromptId, TrajectoryId, Version, WorkerId
from laminar.workers.agents.session import Counted

pytestmark = pytest.mark.timeout(30)

ROOT = Path(__file__).parent.parent
SETTINGS = Settings(num_prompts=4, steps=9, group_size=2, batch_groups=2, local_batch_groups=1, buffer_groups_max=3)
ROLLOUT, TRAINER = WorkerId("rollout-0"), WorkerId("trainer-0/0")
NAME = re.compile(r"[a-z][a-z_]*(/[a-z_]+)+")

STALL = wire.ShardsWritten(version=Version(4, 0), stall_s=1.0, cast_s=0.125, device_copy_s=0.25, host_copy_s=0.5)


def trained(number: int, behavior: int, finish: int, sample: int, reason: str = "stop") -> Trajectory:
    return Trajectory(
        id=TrajectoryId(number),
        group=GroupId(1),
        prompt=PromptId(0),
        sibling=number,
        seed=0,
        behavior_version=Version(behavior, 0),
        finish_version=Version(finish, 0),
        sample_version=Version(sample, 0),
        finish_reason=reason,
        timings=Timings(queued=10.0, finished=10.0 + number, rewarded=12.0 + number, sampled=20.0, trained=21.0),
    )


class World:
    """Telemetry on a core whose trainer runs step 5 on two trajectories."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.core = Core(SETTINGS)
        state = self.core.state
        state.started = True
        state.trajectories = {t.id: t for t in (trained(1, 0, 1, 4), trained(2, 2, 4, 4, reason="length"))}
        members = list(state.trajectories)
        state.groups[GroupId(1)] = Group(
            id=GroupId(1), prompt=PromptId(0), trajectories=members, state=GroupState.LEASED, step=5
        )
        state.groups[GroupId(2)] = Group(
            id=GroupId(2), prompt=PromptId(1), trajectories=[], state=GroupState.BUFFERED, completed_at=1.0
        )
        state.buffer[GroupId(2)] = None
        state.steps[5] = Step(step=5, attempt=2, groups=[GroupId(1)])
        state.trainer.ranks, state.trainer.world_size, state.trainer.branch = {WorkerId("trainer-0/0"): 1}, 1, 0
        state.trainer.ready, state.trainer.step, state.trainer.running = True, 4, 5
        self.log = EventLog(directory / "run.db", 0.001)
        self.log.begin_boot(1.0, 1, "here", 0)
        self.runtime = Runtime(self.core, self.log, directory)
        self.telemetry = Telemetry(self.runtime, self.log, directory / "metrics.jsonl")
        self.runtime.observe = self.telemetry.observe

    def step_done(self, attempt: int = 2, **metrics: float) -> None:
        self.runtime.post(events.StepFinished(step=5, attempt=attempt, metrics=metrics))

    def lines(self) -> list[dict[str, float]]:
        text = (self.directory / "metrics.jsonl").read_text()
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]

    async def rows(self, query: str) -> list[tuple]:
        """From the database, once everything written so far is there: an event after it is durable only with it."""
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
    world.log.start(lambda seq: None)
    yield world
    await world.runtime.close()
    world.log.close()
    world.telemetry.close()


def report(num_tokens: int, busy_s: float, interval_s: float) -> wire.RolloutReport:
    return wire.RolloutReport(
        version=Version(4, 0),
        trajectories=b"",
        attempts=b"",
        num_tokens=b"",
        num_new=b"",
        tokens=bytes(4 * num_tokens),
        logprobs=bytes(4 * num_tokens),
        decode_busy_s=busy_s,
        interval_s=interval_s,
        since=100.0,
    )


async def test_a_step_gives_the_three_stalenesses_and_the_times_of_its_trajectories(world: World) -> None:
    world.step_done()
    [metrics] = world.telemetry.history
    expected = {
        "off_policy/s_gen/mean": 1.5,
        "off_policy/s_gen/max": 2.0,
        "off_policy/residence/mean": 1.5,
        "off_policy/residence/max": 3.0,
        "off_policy/s_train/mean": 3.0,
        "off_policy/s_train/max": 4.0,
        "is_truncated/mean": 0.5,
        "timing/trajectory_s/mean": 1.5,
        "timing/trajectory_s/max": 2.0,
        "timing/reward_s/mean": 2.0,
        "buffer/depth_groups": 1.0,
    }
    assert expected.items() <= metrics.items()
    assert metrics["buffer/age_s/max"] == world.core.state.at - 1.0


async def test_idle_ratios_and_rates_are_of_the_window(world: World) -> None:
    world.telemetry._window.started = world.runtime.now() - 10.0
    world.telemetry.on_message(ROLLOUT, report(300, busy_s=1.0, interval_s=4.0))
    world.telemetry.on_message(WorkerId("rollout-1"), report(100, busy_s=3.0, interval_s=4.0))
    for wait_s, canary in ((0.1, 0.02), (0.3, 0.04), (0.2, None)):
        pulled = wire.Refreshed(version=Version(4, 0), digest="d", wait_s=wait_s, canary_difference=canary)
        world.telemetry.on_message(ROLLOUT, pulled)
    world.telemetry.on_message(WorkerId("trainer-0/0"), STALL)
    world.step_done(**{"timing/step_s": 4.0, "num_tokens/trained": 50.0})
    [metrics] = world.telemetry.history
    assert metrics["timing/wall_s"] == pytest.approx(10.0, abs=5.0)
    wall_s = metrics["timing/wall_s"]
    assert metrics["perf/generation_tokens_per_s"] == pytest.approx(400 / wall_s)
    assert metrics["perf/training_tokens_per_s"] == pytest.approx(50 / wall_s)
    assert metrics["perf/trainer_idle_ratio"] == pytest.approx(1 - 5.0 / wall_s)
    assert metrics["perf/rollout_idle_ratio"] == pytest.approx(0.5)
    assert metrics["perf/rollout_wait_s"] == pytest.approx(0.2)
    assert metrics["canary/logprob_abs_diff/mean"] == pytest.approx(0.03)
    assert metrics["canary/logprob_abs_diff/max"] == 0.04
    assert (metrics["rollout/num_pulls"], metrics["perf/publication_stall_s"]) == (3.0, 1.0)
    parts = [metrics[f"perf/publication_{part}_s"] for part in ("cast", "device_copy", "host_copy")]
    assert parts == [0.125, 0.25, 0.5]
    assert world.telemetry._window.tokens_generated == 0, "a new window began"


async def test_a_step_without_reports_divides_by_nothing(world: World) -> None:
    world.telemetry._window.started = world.runtime.now() + 5.0
    world.step_done()
    [metrics] = world.telemetry.history
    assert metrics["perf/rollout_idle_ratio"] == 1.0
    assert metrics["timing/wall_s"] > 0


async def test_the_answer_of_an_old_attempt_and_a_second_answer_are_not_written(world: World) -> None:
    world.step_done(attempt=1)
    assert world.telemetry.history == []
    world.step_done()
    world.step_done()
    assert len(world.telemetry.history) == len(world.lines()) == 1
    assert world.telemetry.observe(events.StepFinished(step=5, attempt=1)) is None


async def test_a_step_that_a_restored_trainer_does_again_is_written_again(world: World) -> None:
    world.step_done(**{"reward/mean": 0.25})
    world.core.state.steps[5].attempt, world.core.state.steps[5].done = 3, False
    world.core.state.trainer.step, world.core.state.trainer.running = 4, 5
    world.step_done(attempt=3, **{"reward/mean": 0.5})
    assert [line["reward/mean"] for line in world.lines()] == [0.25, 0.5]
    assert await world.rows("SELECT value FROM metrics WHERE name = 'reward/mean'") == [(0.5,)]


async def test_of_a_long_run_the_last_steps_are_kept_and_all_are_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "HISTORY_STEPS", 2)
    for attempt in range(2, 12):
        world.core.state.steps[5].attempt, world.core.state.steps[5].done = attempt, False
        world.core.state.trainer.step, world.core.state.trainer.running = 4, 5
        world.step_done(attempt=attempt, **{"reward/mean": float(attempt)})
        assert world.telemetry.history[-1]["reward/mean"] == attempt
    assert world.telemetry.num_steps == 10
    assert [row["reward/mean"] for row in world.telemetry.history] == [8.0, 9.0, 10.0, 11.0]


async def test_the_file_and_the_database_hold_the_same_numbers(world: World) -> None:
    world.step_done(**{"reward/mean": 0.5})
    [line] = world.lines()
    step, at, finished_at = line.pop("step"), line.pop("at"), world.core.state.at
    rows = await world.rows("SELECT step, name, value FROM metrics")
    assert (step, {row[0] for row in rows}) == (5, {5})
    assert at == finished_at
    assert {name: value for _, name, value in rows} == line
    assert line["reward/mean"] == 0.5


async def test_a_metric_that_is_not_finite_is_null_in_json(world: World) -> None:
    world.step_done(**{"reward/mean": float("nan"), "actor/grad_norm": float("inf")})
    [line] = world.lines()
    assert line["reward/mean"] is None
    assert line["actor/grad_norm"] is None


async def test_spans_show_who_worked_when(world: World) -> None:
    world.telemetry.on_message(ROLLOUT, report(3, busy_s=0.5, interval_s=2.0))
    world.telemetry.on_message(ROLLOUT, report(0, busy_s=0.0, interval_s=2.0))
    world.telemetry.on_message(ROLLOUT, wire.Refreshed(version=Version(4, 0), digest="d", wait_s=0.25))
    world.telemetry.on_message(
        WorkerId("relay-0"), wire.VersionReady(version=Version(4, 0), digest="abc", num_bytes=12)
    )
    world.step_done()
    spans = await world.rows("SELECT worker, kind, round(end - start, 6), busy_s, version FROM spans")
    assert spans == [("rollout-0", "decode", 2.0, 0.5, "v4"), ("rollout-0", "pull", 0.25, 0.25, "v4")]
    assert await world.rows("SELECT step, branch, digest, num_bytes FROM versions") == [(4, 0, "abc", 12)]


async def test_a_checkpoint_stalls_training_for_less_than_it_takes(world: World) -> None:
    world.telemetry.on_message(TRAINER, wire.CheckpointSaved(step=4, path="", seconds=2.0, stall_s=0.25))
    world.step_done()
    row = world.telemetry.history[0]
    assert (row["perf/checkpoint_stall_s"], row["perf/checkpoint_s"]) == (0.25, 2.0)
    assert await world.rows("SELECT kind, round(end - start, 6), version FROM spans WHERE kind = 'checkpoint'") == [
        ("checkpoint", 2.0, "s4")
    ]


# ---- the documentation -------------------------------------------------------------------------------------


def documented() -> dict[str, tuple[str, str]]:
    """name -> (unit, definition) of docs/metrics.md."""
    table = re.findall(
        r"^\| `([^`]+)` \| ([^|]+) \| (.+) \|$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )
    names = [name for name, _, _ in table]
    assert len(names) == len(set(names)), "a metric is listed twice"
    return {name: (unit.strip(), text.strip()) for name, unit, text in table}


def trainers_names() -> set[str]:
    """Every text in the trainer's sources that looks like a metric's name: they are literals there."""
    found = set()
    for file in ("metrics.py", "step.py"):
        tree = ast.parse((ROOT / "laminar" / "workers" / "trainer" / file).read_text())
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found |= {text for text in texts if NAME.fullmatch(text)}
    return found


async def test_every_metric_is_documented_and_every_documented_one_exists(world: World) -> None:
    world.telemetry.on_message(
        ROLLOUT, wire.Refreshed(version=Version(4, 0), digest="d", wait_s=0.1, canary_difference=0.0)
    )
    agents = {name.value: 1 for name in Counted}
    world.telemetry.on_message(ROLLOUT, msgspec.structs.replace(report(5, 0.1, 0.1), agents=agents))
    world.telemetry.on_message(TRAINER, wire.CheckpointSaved(step=1, path="", seconds=1.0, stall_s=0.1))
    world.step_done()
    emitted = (set(world.telemetry.history[0]) - {"step"}) | trainers_names()
    assert len(trainers_names()) > 15
    assert set(documented()) == emitted
    assert all(unit and text for unit, text in documented().values())


def test_what_the_display_and_the_summary_read_exists() -> None:
    known = set(documented())
    for file in ("display.py", "summary.py"):
        tree = ast.parse((ROOT / "laminar" / "controller" / file).read_text())
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        used = {text for text in texts if NAME.fullmatch(text)}
        assert used
        assert used <= known


async def test_what_the_environment_wrote_is_no_generated_token_and_agents_calls_are_counted(world: World) -> None:
    message = msgspec.structs.replace(
        report(100, 0.5, 1.0), sources=bytes([0] * 60 + [2] + [1] * 39), agents={"num_calls": 3}
    )
    world.telemetry.on_message(ROLLOUT, message)
    world.telemetry.on_message(ROLLOUT, message)
    world.step_done()
    row = world.telemetry.history[0]
    assert row["perf/generation_tokens_per_s"] * row["timing/wall_s"] == pytest.approx(120)
    assert row["agent/num_calls"] == 6
