"""A recorded run simulated again: as it was it comes to what it came to; a change has the effect that it must have."""

import json
import shutil
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.controller import answers, schema
from laminar.controller.eventlog import EventLog
from laminar.core import actions, events
from laminar.errors import ConfigError, LaminarError
from laminar.replay import changes
from laminar.replay.__main__ import main
from laminar.replay.changes import Changes
from laminar.replay.meter import Meter, TooShort
from laminar.replay.playback import Playback
from laminar.replay.rates import fitted
from laminar.replay.recording import Recording
from laminar.replay.whatif import Comparison, Recorded, record, simulated, whatif
from laminar.sim.faults import FaultPlan, inject
from laminar.sim.measure import Measures
from laminar.sim.scenario import Scenario
from laminar.sim.workload import WORKLOADS, Draw, Workload
from laminar.sim.world import World
from tests.core_world import settings
from tests.replay_world import RecordedWorld

pytestmark = pytest.mark.timeout(120)

EPOCH_S = 1.8e9  # what a real run's clock shows: its smallest step is 0.2 µs

SMALL: dict[str, Any] = {
    "model": "7B", "gpus": 8, "split": (4, 4), "batch_groups": 12, "group_size": 4, "flush_s": 5.0, "iterations": 10,
    "workload": replace(WORKLOADS["math"], median=600.0),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RewardedLater(Workload):
    """Rewards take a while."""

    reward_s: float

    def draw(self, seed: int, step: int) -> Draw:
        return Draw(super().draw(seed, step).num_tokens, reward_s=self.reward_s)


class LoggedWorld(World):
    """A simulated run whose events are kept as a real one's are: its costs, unlike those, are known."""

    log: list[tuple[Any, ...]]

    def _handle(self, event: events.AnyEvent) -> list[actions.AnyAction]:
        at = EPOCH_S + event.at
        body = msgspec.msgpack.encode(msgspec.structs.replace(event, at=at))
        self.log.append((1, event.seq, at, type(event).__name__, body, schema.checksum(event.seq, body)))
        return super()._handle(event)


def run(directory: Path, reward_s: float = 0.0, **choices: Any) -> None:
    """A recorded run in `directory`; each reward comes so long after its response."""
    scenario = Scenario(warmup=1, stops=False, **{**SMALL, **choices})
    workload = scenario.workload if not reward_s else RewardedLater(**vars(scenario.workload), reward_s=reward_s)
    world = LoggedWorld(
        settings=scenario.settings(scenario.cluster()), cluster=scenario.cluster(), workload=workload,
        measures=Measures(warmup=1), flush_s=scenario.flush_s,
    )  # fmt: skip
    world.log = []
    inject(world, scenario.faults, 1)
    world.run()
    directory.mkdir(exist_ok=True)
    keep(directory, world)


def keep(directory: Path, world: LoggedWorld) -> None:
    log = EventLog(directory / "run.db", 0.01)
    boot = log.begin_boot(1.0, 1, "here", 0)
    log.close()
    with sqlite3.connect(directory / "run.db") as database:
        database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", world.log)
        database.execute(*answers.beginning(boot, world.core.configured, b""))
    database.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    run(directory)
    return directory


@pytest.fixture(scope="module")
def recorded(plain: Path) -> Recorded:
    with Recording(plain) as recording:
        return record(recording)


def test_a_run_simulated_as_it_was_comes_to_what_it_came_to(tmp_path: Path) -> None:
    run(tmp_path, iterations=40)  # of eight, one group that completes later changes a figure by a tenth
    with Recording(tmp_path) as recording:
        recorded = record(recording)
    again, real = simulated(recorded, Changes()), recorded.real
    assert again.steps == real.steps
    for name in ("step_s", "trained_tokens_per_s", "generated_tokens_per_s"):
        assert getattr(again, name) == pytest.approx(getattr(real, name), rel=0.1), name
    assert again.trainer_busy == pytest.approx(real.trainer_busy, abs=0.02)
    assert again.replicas_busy == pytest.approx(real.replicas_busy, abs=0.03)
    assert again.staleness_mean == pytest.approx(real.staleness_mean, abs=0.25)


def test_costs_that_are_known_are_found_in_the_log(recorded: Recorded) -> None:
    cluster = Scenario(**SMALL).cluster()
    known, found = cluster.decode_model, recorded.costs
    assert found.decode.overhead_s == pytest.approx(known.weights_s + known.overhead_s, rel=0.01)
    assert found.step_s + 1000 * found.token_s == pytest.approx(cluster.train_s(1000), rel=0.01)
    assert found.pull_s == pytest.approx(cluster.pull_s())
    assert found.publish_s == pytest.approx(cluster.publish_stall_s())


def test_rewards_come_as_late_as_they_came(tmp_path: Path) -> None:
    run(tmp_path, reward_s=120.0)
    with Recording(tmp_path) as recording:
        recorded = record(recording)
    again = simulated(recorded, Changes())
    assert again.step_s == pytest.approx(recorded.real.step_s, rel=0.15)
    assert again.staleness_mean == pytest.approx(recorded.real.staleness_mean, abs=0.5)


def test_what_is_averaged_over_time_is_averaged_over_all_of_it(plain: Path) -> None:
    with Recording(plain) as recording:
        playback, meter = Playback(recording), Meter()
        busy_s = before = at = 0.0
        while (step := playback.step()) is not None:
            replicas = playback.core.state.replicas.values()
            busy_s += before * (playback.core.state.at - at)
            at, before = playback.core.state.at, sum(r.num_generating > 0 for r in replicas) / max(1, len(replicas))
            meter.observe(playback.core, step.event, step.actions)
            assert meter.replicas_s == pytest.approx(busy_s)


def test_trajectories_have_their_recorded_lengths(recorded: Recorded) -> None:
    again, real = simulated(recorded, Changes()), recorded.real
    tokens = [figures.trained_tokens_per_s * figures.step_s for figures in (again, real)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.05), "the same batches, or nearly so"


@pytest.mark.parametrize(
    ("words", "better"),
    [
        (["speed.rollout=2"], lambda new, old: new.step_s < 0.75 * old.step_s),
        (["speed.rollout=0.5"], lambda new, old: new.step_s > 1.5 * old.step_s),
        (["speed.trainer=0.02"], lambda new, old: new.trainer_busy > 0.8 and new.step_s > 1.5 * old.step_s),
        (["replicas=8"], lambda new, old: new.replicas_busy < old.replicas_busy and new.step_s < old.step_s),
        (["buffer.max_groups=12", "buffer.max_staleness=none"], lambda new, old: new.staleness_max < old.staleness_max),
        (["repack.enabled=false"], lambda new, old: new.moved == 0 and old.moved > 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_change_has_the_effect_that_it_must_have(recorded: Recorded, words: list[str], better: Any) -> None:
    old, new = simulated(recorded, Changes()), simulated(recorded, changes.parse(words))
    assert better(new, old), (old, new)


def test_recorded_faults_happen_again_unless_they_are_left_out(tmp_path: Path) -> None:
    plan = FaultPlan(rates=(("engine_crash", 30.0), ("trainer_crash", 4.0)), restart_s=40.0)
    run(tmp_path, faults=plan, iterations=8, core=(("restarts_max", 100),))
    with Recording(tmp_path) as recording:
        recorded = record(recording)
    kinds = [fault.kind for fault in recorded.rates.faults]
    assert kinds.count("lost") > 2
    assert all(39.0 < fault.seconds < 45.0 for fault in recorded.rates.faults if fault.kind == "lost" and fault.seconds)
    again = simulated(recorded, Changes())
    assert again.step_s == pytest.approx(recorded.real.step_s, rel=0.25)
    assert simulated(recorded, changes.parse(["faults=none"])).step_s < again.step_s


def test_a_comparison_is_printed_with_its_error_and_what_it_cannot_tell(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(plain), "--whatif", "speed.trainer=2"]) == 0
    out = capsys.readouterr().out
    assert "error" in out.splitlines()[0]
    assert "It cannot tell what other batches would have taught" in " ".join(out.split())
    assert main([str(plain), "--json", "--whatif", "speed.trainer=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"real", "again", "changed", "error", "notes", "tells"}
    assert abs(found["error"]["step_s"]) < 0.15


def test_the_comparison_is_of_the_run_the_simulated_run_and_the_changed_one(plain: Path) -> None:
    with Recording(plain) as recording:
        found: Comparison = whatif(recording, changes.parse(["speed.rollout=2"]))
    assert found.real != found.again != found.changed
    assert found.notes == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.refresh_policy", "expected key=value"),
        ("rollout.refresh_polcy=continuous", "did you mean rollout.refresh_policy?"),
        ("rollout.refresh_policy=sometimes", "rollout.refresh_policy=sometimes: invalid enum value"),
        ("seed=3", "has no effect in a re-simulation"),
        ("replicas=0", "a number from 1 to 8192 is expected"),
        ("speed.trainer=fast", "a number from 0.001 to 1000 is expected"),
        ("faults=some", "none or recorded is expected"),
        ("repack.enabled=true", "to begin with it, give repack.interval_s"),
        ("faults=recorded", "changes nothing"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_what_would_do(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changes.parse([word])
    assert message in str(caught.value)


def test_settings_that_cannot_work_are_refused(recorded: Recorded) -> None:
    with pytest.raises(LaminarError, match="these settings cannot work"):
        simulated(recorded, changes.parse(["buffer.max_groups=2"]))


async def test_the_trainers_share_of_the_time_is_that_of_its_steps_however_short(tmp_path: Path) -> None:
    world = RecordedWorld(tmp_path, settings(steps=12), 3)
    world.run()
    await world.close()
    meter, starts, ends = Meter(), {}, {}
    with Recording(tmp_path) as recording:
        playback = Playback(recording)
        for step in playback.steps():
            meter.observe(playback.core, step.event, step.actions)
            starts |= {a.step: step.event.at for a in step.actions if isinstance(a, actions.StartTrainStep)}
            if isinstance(step.event, events.StepFinished):
                ends[step.event.step] = step.event.at
    found = meter.figures()
    window = range(13 - found.steps, 13)
    busy_s = sum(ends[step] - starts[step] for step in window)
    assert found.trainer_busy == pytest.approx(busy_s / (ends[12] - ends[window[0] - 1]))


def test_what_of_the_recording_is_damaged_is_left_out_and_told(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "run.db") as database:
        (last,) = database.execute("SELECT max(seq) FROM events WHERE kind = 'StepFinished'").fetchone()
        database.execute("UPDATE events SET crc = 0 WHERE seq = ?", (last,))
    database.close()
    with Recording(tmp_path / "run") as recording:
        found = whatif(recording, changes.parse(["speed.rollout=2"]))
    assert found.notes == [f"event {last} is damaged: what follows is left out"]


async def test_a_run_of_too_few_steps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = RecordedWorld(tmp_path, settings(), 1)
    world.start("r0")
    await world.close()
    with Recording(tmp_path) as recording, pytest.raises(TooShort, match="0 train steps have ended, 3 are needed"):
        whatif(recording, changes.parse(["replicas=2"]))
    assert main([str(tmp_path), "--whatif", "replicas=2"]) == 2
    assert "run.db: 0 train steps have ended" in capsys.readouterr().err
    EventLog(tmp_path / "run.db", 0.01).begin_boot(1.0, 1, "here", 0)
    assert main([str(tmp_path), "--whatif", "replicas=2"]) == 2
    assert "boot 2 recorded nothing: it has just begun, or was killed as it began" in capsys.readouterr().err
    assert main([str(tmp_path), "--whatif", "replicas=2", "--boot", "1"]) == 2
    assert capsys.readouterr().err.endswith("; --boot N takes another part of the run\n")
    with pytest.raises(SystemExit):
        main(["--whatif", "replicas=2", str(tmp_path)])


def test_costs_are_fitted_without_negative_parts() -> None:
    first, second = [1.0, 2.0, 3.0, 5.0], [10.0, 5.0, 20.0, 1.0]
    exact = [0.5 * x + 0.25 * y for x, y in zip(first, second, strict=True)]
    assert fitted(first, second, exact) == pytest.approx((0.5, 0.25))
    falling = [3.0 - 0.1 * y for y in second]
    a, b = fitted([1.0] * 4, second, falling)
    assert a >= 0.0
    assert b == 0.0
    assert fitted([1.0, 1.0], [2.0, 2.0], [4.0, 4.0])[0] * 2 == pytest.approx(8.0)
