"""Each fault by name, and what it may cost (design: the last column of the table of faults); then many at once, by seeds."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_sim_world import SHORT, scenario

from laminar.core import bounds
from laminar.core.actions import AbortAttempts, StartTrainStep
from laminar.core.records import Replica, State
from laminar.core.versions import newest
from laminar.errors import ConfigError
from laminar.ids import WorkerId
from laminar.sim import sweep
from laminar.sim.faults import PER_CASE, PER_HOUR, FaultPlan, Injector, parse
from laminar.sim.world import SimulationError, World

LONG = replace(SHORT, median=400.0, tokens_max=4096)
R0 = WorkerId("rollout-0")
BATCH = 8 * 4
STEPS = 6


def run(fault: str = "", at: float = 20.0, worker: WorkerId = R0, cases: str = "", **changes) -> World:
    """A run on which `fault` strikes once, and on which `cases` spoil answers."""
    plan = replace(parse(cases), restart_s=20.0, replace_s=30.0, partition_s=40.0)
    world = scenario(**({"workload": LONG, "iterations": STEPS, "repack": False} | changes)).world()
    injector = Injector(world, plan, seed=1)
    if fault:
        world.at(at, lambda: injector.strike(fault, worker))
    world.run()
    return world


def decoded_since_flush(world: World) -> int:
    """Most tokens that one replica decodes in a flush period of 5 s: 64 requests at no less than the overhead per step."""
    return int(world.cluster.num_requests_max * world.flush_s / world.cluster.software.step_overhead_s)


def dropped(world: World) -> set[str]:
    books = world.core.state.ledger
    return (set(books.trajectories.dropped) | set(books.tokens.dropped)) - {"stopped"}


def is_whole(world: World, iterations: int = STEPS) -> bool:
    """Every step was trained on a full batch, and the run ended as asked."""
    state = world.core.state
    committed = state.ledger.trajectories.committed
    return state.ok and state.finished == "measured" and committed == iterations * BATCH


def test_without_faults_nothing_is_lost():
    world = run()
    assert is_whole(world)
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def test_engine_crash_loses_what_was_not_flushed_and_its_trajectories_go_on_elsewhere():
    world = run("engine_crash")
    assert is_whole(world)
    assert 0 < world.measures.num_tokens_lost <= decoded_since_flush(world)
    assert dropped(world) == set(), "no token that had been reported was lost"
    assert world.rollouts.engines[R0].incarnation == 2
    assert world.measures.recoveries_s == [20.0]


def test_engine_crash_right_after_a_flush_loses_almost_nothing():
    late, early = run("engine_crash", at=24.99), run("engine_crash", at=25.01)
    assert early.measures.num_tokens_lost < late.measures.num_tokens_lost / 20


def crash_the_only_holder(world: World, plan: FaultPlan, recycled: bool | None = None) -> None:
    """A run in which the last replica of an old version crashes when tokens of it were reported. `recycled`: only when no
    relay (True) or some relay (False) has that version."""
    injector = Injector(world, plan, seed=1)

    def alone(state: State) -> list[Replica]:
        held = [version for r in state.replicas.values() for version in (r.version, r.target)]
        return [r for r in state.replicas.values() if held.count(r.version) == 1 and r.version < newest(state).version]

    def crash_when_alone() -> None:
        state = world.core.state
        reported = [r for r in alone(state) if any(state.trajectories[t].num_tokens for t in r.attempts)]
        on_relays = [any(r.version in relay.held for relay in state.relays.values()) for r in reported]
        if reported and on_relays[0] != recycled:
            injector.strike("engine_crash", reported[0].id)
        else:
            world.after(0.5, crash_when_alone)

    world.after(10.0, crash_when_alone)
    world.run()
    assert is_whole(world)
    assert world.measures.faults["engine_crash"] == 1


def test_engine_crash_of_the_only_holder_of_a_version_loses_no_more_because_another_pulls_that_version():
    world = scenario(workload=LONG, iterations=STEPS, repack=False).world()
    crash_the_only_holder(world, FaultPlan(restart_s=20.0))
    assert dropped(world) == set()
    assert world.core.state.num_failovers.relay > 0


def hangs_for(world: World) -> float:
    """Longest from a hang to its loss: the last flush that carried tokens, two time limits, a quarter between looks."""
    return world.flush_s + 2.25 * world.core.settings.progress_timeout_s


@pytest.mark.parametrize("calls_max", [0, 4])
def test_engine_hang_is_found_in_time_and_costs_what_was_not_flushed(calls_max):
    workload = replace(LONG, calls_max=calls_max, call_tokens=8)
    world = run("engine_hang", flush_s=1.0, progress_timeout_s=5.0, workload=workload, iterations=12)
    assert is_whole(world, 12)
    assert world.measures.num_tokens_lost <= decoded_since_flush(world)
    assert dropped(world) == set(), "no token that had been reported was lost"
    (detected_s,) = world.measures.detections_s
    assert 2 * world.core.settings.progress_timeout_s <= detected_s <= hangs_for(world)
    assert world.measures.faults["alarm:replica-suspect"] == 1
    assert world.rollouts.engines[R0].incarnation == 2


def test_generation_goes_on_while_an_engine_hangs():
    world = scenario(workload=LONG, iterations=STEPS, flush_s=1.0, progress_timeout_s=5.0).world()
    injector = Injector(world, FaultPlan(restart_s=20.0), seed=1)
    finished = []
    finish = world.rollouts._finished
    world.rollouts._finished = lambda request: finished.append(world.now) or finish(request)
    world.at(20.0, lambda: injector.strike("engine_hang", R0))
    world.run()
    assert is_whole(world)
    (detected_s,) = world.measures.detections_s
    assert sum(20.0 < at < 20.0 + detected_s for at in finished) > 5


@pytest.mark.parametrize("calls_max", [0, 4])
def test_engine_slow_is_never_taken_for_a_hang(calls_max):
    plan = replace(LONG, calls_max=calls_max, call_tokens=8)
    world = run("engine_slow", at=10.0, flush_s=1.0, progress_timeout_s=5.0, workload=plan)
    assert world.measures.faults["engine_slow"] == 1
    assert world.measures.faults["alarm:replica-suspect"] == 0
    assert is_whole(world)
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())
    assert world.now > run(flush_s=1.0, workload=plan).now, "it was slow"


def test_an_engine_struck_twice_is_no_slower_and_recovers():
    world = scenario(workload=LONG, flush_s=1.0, progress_timeout_s=5.0).world()
    injector = Injector(world, FaultPlan(slow_s=30.0), seed=1)
    full = world.rollouts.engines
    for at in (5.0, 6.0, 7.0):
        world.at(at, lambda: injector.strike("engine_slow", R0))
    paces = []
    for at in (8.0, 40.0):
        world.at(at, lambda: paces.append(full[R0].replica.model.overhead_s / world.cluster.software.step_overhead_s))
    world.run()
    assert paces == [pytest.approx(10.0), pytest.approx(1.0)]
    assert world.measures.faults["alarm:replica-suspect"] == 0


def test_flushes_however_rare_are_never_taken_for_a_hang():
    world = run(flush_s=30.0, progress_timeout_s=1.0)
    assert is_whole(world)
    assert world.measures.faults["alarm:replica-suspect"] == 0


def test_host_lost_is_noticed_by_silence_and_costs_what_was_not_flushed():
    world = run("host_lost")
    assert is_whole(world)
    assert 0 < world.measures.num_tokens_lost <= 3 * decoded_since_flush(world)
    assert dropped(world) == set()
    again = [engine.incarnation for engine in world.rollouts.engines.values()]
    assert sorted(again) == [1, 2, 2, 2], "all of the host but the one that was spared"
    assert world.measures.recoveries_s == [30.0] * 3


def test_partition_fences_the_old_process_off_and_costs_what_was_not_flushed():
    world = run("partition")
    assert is_whole(world)
    grace = world.core.settings.reconnect_grace_s
    most = decoded_since_flush(world) * (1 + grace / world.flush_s)
    assert 0 < world.measures.num_tokens_lost <= most, "what it decoded while it was cut off is lost too"
    assert world.rollouts.engines[R0].incarnation == 2


def test_short_partition_loses_nothing():
    world = run("short_partition")
    assert is_whole(world)
    assert world.measures.faults["short_partition"] == 1
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())
    assert world.rollouts.engines[R0].incarnation == 1


def test_controller_crash_changes_nothing_at_all():
    world = run("controller_crash")
    assert world.measures.faults["controller_crash"] == 1
    assert world.trace.hexdigest() == run().trace.hexdigest()


def test_version_lost_is_published_again_and_loses_nothing():
    world = run(cases="version_lost=0.4")
    assert is_whole(world)
    assert world.measures.faults["version_lost"] > 0
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def test_publish_hang_costs_at_most_the_version():
    world = run(cases="publish_hang=0.4")
    assert world.measures.faults["publish_hang"] > 0
    assert is_whole(world)
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def test_pull_failed_is_tried_again_and_loses_nothing():
    world = run(cases="pull_failed=0.25")
    assert world.measures.faults["pull_failed"] > 0
    assert is_whole(world)
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def test_pull_hang_costs_the_replica_its_place_but_no_token():
    world = run(cases="pull_hang=0.1", iterations=10)
    assert world.measures.faults["pull_hang"] > 0
    assert is_whole(world, 10)
    assert world.measures.num_tokens_lost == 0
    assert dropped(world) == set()


def test_a_reward_that_fails_for_infrastructure_is_computed_again_and_nothing_is_dropped():
    world = run(cases="reward_infra=0.05")
    assert world.measures.faults["reward_infra"] > 0
    assert is_whole(world)
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def test_a_reward_that_fails_for_data_drops_its_group_under_its_name():
    world = run(cases="reward_data=0.02")
    assert is_whole(world)
    failures = world.measures.faults["reward_data"]
    books = world.core.state.ledger.trajectories.dropped
    assert failures > 0
    assert dropped(world) == {"reward_data", "incomplete_group"}
    assert books["reward_data"] + books["incomplete_group"] <= 4 * failures


def test_a_failed_checkpoint_commits_later_and_loses_nothing():
    world = run(cases="checkpoint_failed=0.4", iterations=8)
    assert world.measures.faults["alarm:checkpoint-failed"] > 0
    assert is_whole(world, 8)
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def test_a_reward_that_hangs_is_given_up_and_computed_again_and_nothing_is_dropped():
    world = run(cases="reward_hang=0.05")
    assert world.measures.faults["reward_hang"] > 0
    assert is_whole(world)
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def crash_trainer(checkpoint_every: int, steps_lost: int, **changes) -> tuple[World, list[tuple[int, int, list[int]]]]:
    """A rank dies in the middle of a step, so many steps after a checkpoint. The world, and (step, attempt, rows) as trained."""
    changes = {"workload": LONG, "iterations": STEPS, "repack": False, "checkpoint_every": checkpoint_every} | changes
    world = scenario(**changes).world()
    injector = Injector(world, FaultPlan(restart_s=20.0), seed=1)
    trained = []
    train = world._answers[StartTrainStep]

    def spy(action):
        trained.append((action.step, action.attempt, [row.trajectory for row in action.rows]))
        train(action)

    def crash() -> None:
        trainer = world.core.state.trainer
        if trainer.checkpoint > 0 and trainer.step == trainer.checkpoint + steps_lost and trainer.running:
            injector.strike("trainer_crash")
        else:
            world.after(0.05, crash)

    world._answers[StartTrainStep] = spy
    world.after(1.0, crash)
    world.run()
    return world, trained


@pytest.mark.parametrize(("checkpoint_every", "steps_lost"), [(1, 0), (3, 2)])
def test_trainer_crash_costs_the_steps_since_the_checkpoint_which_are_redone_while_generation_goes_on(
    checkpoint_every, steps_lost
):
    world, trained = crash_trainer(checkpoint_every, steps_lost)
    assert is_whole(world)
    assert world.measures.faults["trainer_crash"] == 1
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())
    first = {step: rows for step, attempt, rows in trained if attempt == 1}
    redone = {step: rows for step, attempt, rows in trained if attempt == 2}
    assert len(trained) == len(first) + len(redone)
    assert sorted(redone) == list(range(min(redone), min(redone) + steps_lost + 1)), (
        "all since the checkpoint, and the one that ran"
    )
    assert all(rows == first[step] for step, rows in redone.items())
    assert len({row for rows in first.values() for row in rows}) == STEPS * BATCH, "no trajectory belongs to two steps"
    (lost_at, before), (back_at, after) = world.measures.trainer_outages
    assert back_at - lost_at == pytest.approx(20.0 + world.core.settings.restart_backoff_s)
    assert after > before, "rollouts went on generating"


def test_trainer_crash_in_a_checkpoint_commits_nothing_of_it():
    world = scenario(workload=LONG, iterations=STEPS, repack=False, checkpoint_s=5.0).world()
    injector = Injector(world, FaultPlan(restart_s=20.0), seed=1)
    crashed_at = []

    def crash() -> None:
        if world.core.state.trainer.saving > 1:
            crashed_at.append(world.core.state.trainer.saving)
            injector.strike("trainer_crash")
            assert world.core.state.trainer.checkpoint == crashed_at[0] - 1
        else:
            world.after(0.5, crash)

    world.after(1.0, crash)
    world.run()
    assert crashed_at
    assert is_whole(world)
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())


def test_storage_full_stops_what_is_new_and_loses_nothing():
    world = scenario(workload=LONG, iterations=STEPS, repack=False).world()
    injector = Injector(world, FaultPlan(full_s=60.0), seed=1)
    generated = []
    world.at(20.0, lambda: injector.strike("storage_full"))
    for moment in (20.1, 79.9):
        world.at(moment, lambda: generated.append((world.rollouts.num_generated(), world.core.state.trainer.step)))
    world.run()
    assert is_whole(world)
    assert world.measures.faults["alarm:storage-failed"] == 1
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())
    (tokens, step), (tokens_after, step_after) = generated
    assert tokens_after > tokens, "what generates goes on"
    assert step_after <= step + 1, "the step that ran ended, and no other began"


def test_a_trajectory_that_finishes_before_it_moves_is_finished():
    world = scenario(workload=LONG, iterations=STEPS, answer_s=3.0).world()
    released = []
    abort = world.rollouts._on_abort_attempts

    def spy(action):
        released.extend(zip(action.trajectories, action.attempts, strict=True))
        abort(action)

    world._answers[AbortAttempts] = spy
    finished = []
    finish = world.rollouts._finished
    world.rollouts._finished = lambda request: finished.append((request.trajectory, request.attempt)) or finish(request)
    world.run()
    assert is_whole(world)
    assert set(released) & set(finished), "some finished although they had been told to move"
    assert world.core.state.repack.num_moves > 0


def test_every_fault_has_a_scenario_here():
    text = Path(__file__).read_text() + Path(__file__).with_name("test_sim_relays.py").read_text()
    for name in PER_HOUR + PER_CASE:
        assert f'"{name}' in text or f'="{name}=' in text, f"{name} has no test"


def test_every_row_of_the_table_of_faults_names_faults_and_tests_that_exist():
    here = Path(__file__).parent
    table = [line.split("|") for line in (here.parent / "docs/sim/faults.md").read_text().splitlines() if "| `" in line]
    defined = "".join((here / name).read_text() for name in ("test_sim_faults.py", "test_sim_relays.py"))
    assert len(table) > 10
    for _, _, simulated, _, tests, _ in table:
        assert set(re.findall(r"`(\w+)`", simulated)) <= {*PER_HOUR, *PER_CASE}
        names = re.findall(r"`(test_\w+)`", tests)
        assert names
        assert [name for name in names if f"def {name}(" not in defined] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine_crsh", "no fault 'engine_crsh'"),
        ("pull_hang=2", "not between 0 and 1"),
        ("pull_hang=x", "not a number"),
    ],
)
def test_a_fault_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_seeds_with_random_faults_break_no_invariant(first):
    for seed in range(first, first + 10):
        sweep.check(seed)


def test_a_run_that_is_stopped_while_its_disk_is_full_ends_unsaved_and_that_is_explained():
    assert "measured" in sweep.check(21224)


def test_a_seed_that_comes_to_a_standstill_prints_the_command_that_replays_it(monkeypatch):
    monkeypatch.setattr(bounds, "admits", lambda turn, version: False)
    calm = next(seed for seed in range(200) if not sweep.scenario(seed).faults.rates)
    with pytest.raises(
        SimulationError, match=rf"nothing has moved since.*\nreplay: .*sweep_seeds.py --first {calm} --count 1"
    ):
        sweep.check(calm)


def test_the_sweep_draws_all_settings_with_which_a_run_could_get_stuck():
    drawn = [dict(sweep.scenario(seed).core) for seed in range(300)]
    for name, values in {
        "max_staleness": {None, 0, 1, 2, 5}, "on_stale": {"drop", "wait"}, "on_incomplete": {"drop", "train"},
        "group_versions": {"regenerate", "mixed"}, "repack_policy": {"whole", "parts"},
        "num_retries": {0, 1, 3}, "checkpoint_every": {0, 1, 2, 3},
    }.items():  # fmt: skip
        assert {chosen[name] for chosen in drawn} == values
    tight = [s for s in map(sweep.scenario, range(300)) if dict(s.core)["buffer_groups_max"] == s.batch_groups]
    assert {s.policy for s in tight} == {"batch", "continuous", "rolling"}
    assert {getattr(s.sampler, "kind", "") for s in tight} == {"", "newest", "patient", "broken"}


def test_a_seed_that_fails_prints_the_command_that_replays_it(monkeypatch):
    monkeypatch.setattr(sweep, "EVENTS_MAX", 30)
    with pytest.raises(
        SimulationError, match=r"seed 3: the run does not end.*\nreplay: .*sweep_seeds.py --first 3 --count 1"
    ):
        sweep.check(3)


def test_a_drained_replica_loses_nothing_and_another_takes_its_place():
    world = run("replica_drained", at=20.0)
    assert is_whole(world)
    assert R0 not in world.rollouts.engines
    assert R0 not in world.core.state.replicas
    assert (world.measures.num_tokens_lost, dropped(world)) == (0, set())
    newcomer = max(world.rollouts.engines, key=lambda name: int(name.rpartition("-")[2]))
    assert world.measures.lanes[newcomer], "the newcomer has pulled weights"
    assert world.rollouts.engines[newcomer].replica.num_generated > 0
