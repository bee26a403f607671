"""A recorded run simulated on from one of its moments: as it is it comes to what was recorded then; no moment breaks a rule."""

from pathlib import Path

import pytest

from laminar.core.engine import Core
from laminar.replay import forecast
from laminar.replay.forecast import Fit
from laminar.replay.model import NotSimulated
from laminar.replay.playback import Playback
from laminar.replay.recording import Recording
from laminar.sim.faults import FaultPlan
from laminar.sim.world import World
from tests.test_replay_whatif import run

pytestmark = pytest.mark.timeout(120)

PLAN = FaultPlan(
    rates=(
        ("engine_crash", 30.0), ("short_partition", 20.0), ("relay_crash", 20.0), ("trainer_crash", 10.0), ("pull_failed", 0.1),
        ("version_lost", 0.2),
    ),
    restart_s=40.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faulty")
    run(directory, faults=PLAN, iterations=8, core=(("restarts_max", 3), ("stall_after_s", 30.0)))
    return directory


def cores(directory: Path, every: int) -> tuple[list[Core], Fit]:
    """Copies of the core, each so many events apart, and the run's rates."""
    with Recording(directory) as recording:
        playback, found = Playback(recording), []
        while playback.step():
            if playback.seq % every == 0:
                found.append(Core.restore(playback.core.configured, playback.core.snapshot()))
        return found, forecast.fit(Playback(recording))


def test_from_any_moment_of_a_run_with_faults_it_goes_on_to_its_end_and_breaks_no_rule(faulty: Path) -> None:
    found, fitted = cores(faulty, every=97)
    begun = [core for core in found if core.state.replicas and core.state.trainer.branch >= 0]
    for core in begun:
        if not core.state.finished:
            world = forecast.world(core, fitted)
            world.run()
            assert world.core.state.finished == "completed", f"from event {core.state.seq}"
    assert len(begun) > 10


def test_the_core_that_it_begins_with_is_not_touched(faulty: Path) -> None:
    found, fitted = cores(faulty, every=500)
    core = found[1]
    before = core.snapshot()
    forecast.world(core, fitted).run(until=lambda: False)
    assert core.snapshot() == before


def test_what_is_under_way_ends_when_it_did(tmp_path: Path) -> None:
    run(tmp_path)
    with Recording(tmp_path) as recording:
        fitted, playback = forecast.fit(Playback(recording)), Playback(recording)
        while playback.core.state.trainer.running != 4:
            playback.step()
        world = forecast.world(playback.core, fitted)
        world.run(until=lambda: world.core.state.trainer.step == 4)
        while playback.core.state.trainer.step != 4:
            playback.step()
        assert world.base + world.now == pytest.approx(playback.core.state.at, rel=0.01)
        steps = later(world, playback, step=7)
        assert steps[0] == pytest.approx(steps[1], rel=0.2)


def later(world: World, playback: Playback, step: int) -> tuple[float, float]:
    """When both have done a step: simulated, recorded."""
    world.run(until=lambda: world.core.state.trainer.step >= step)
    while playback.core.state.trainer.step < step:
        playback.step()
    return world.base + world.now, playback.core.state.at


def test_a_moment_before_the_beginning_or_after_the_end_is_refused(faulty: Path) -> None:
    with Recording(faulty) as recording:
        playback, fitted = Playback(recording), forecast.fit(Playback(recording))
        with pytest.raises(NotSimulated, match="the run has not begun"):
            forecast.world(playback.core, fitted)
        playback.seek(playback.last_seq)
        with pytest.raises(NotSimulated, match="the run is over"):
            forecast.world(playback.core, fitted)


def test_a_response_that_is_not_over_in_the_log_is_drawn_among_those_that_were_longer(tmp_path: Path) -> None:
    run(tmp_path)
    with Recording(tmp_path) as recording:
        fitted = forecast.fit(Playback(recording))
        known = sorted(each.num_tokens for each in fitted.rates.responses.values())
        fitted.rates.responses.clear()
        fitted.rates.responses[0, 0] = forecast.model.Response(1, known[0], 0.0)
        fitted.rates.responses[0, 1] = forecast.model.Response(2, known[-1], 0.0)
        playback = Playback(recording)
        while playback.core.state.trainer.step < 3:
            playback.step()
        world = forecast.world(playback.core, fitted)
    under_way = [request for engine in world.rollouts.engines.values() for request in engine.replica.requests.values()]
    assert under_way
    assert all(r.draw.num_tokens in (known[0], known[-1], r.num_tokens + 1) for r in under_way)
    assert all(r.draw.num_tokens > r.num_tokens for r in under_way)
