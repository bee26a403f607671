"""Whole runs of the real core in the simulated world."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.core.engine import Core
from laminar.errors import ConfigError
from laminar.sim.faults import parse
from laminar.sim.scenario import Scenario, simulate
from laminar.sim.workload import WORKLOADS, Workload
from laminar.sim.world import SimulationError, World

FAULTS = "engine_crash=400,partition=200,reward_infra=0.02,trainer_crash=200,storage_full=100,reward_hang=0.02"
ROOT = Path(__file__).parent.parent
SHORT = Workload(name="short", median=150.0, tokens_max=1024, prompt_tokens=50)


def scenario(**changes) -> Scenario:
    """Four replicas, batches of 8 groups of 4, every invariant checked often."""
    base = dict(
        model="7B", gpus=8, split=(4, 4), workload=SHORT, iterations=4, warmup=1, batch_groups=8, group_size=4,
        flush_s=5.0, traced=True, check_every=25,
    )  # fmt: skip
    return Scenario(**(base | changes))


def trace(**changes) -> str:
    return simulate(scenario(**changes))[1]["trace"]


@pytest.mark.parametrize("policy", ["batch", "continuous"])
@pytest.mark.parametrize("workload", [SHORT, replace(SHORT, calls_max=4, call_tokens=8)])
def test_a_run_makes_its_steps_and_accounts_for_everything(policy, workload):
    world, found = simulate(scenario(policy=policy, workload=workload))
    assert (found["finished"], found["ok"]) == ("measured", True)
    assert [i.step for i in world.measures.iterations] == [1, 2, 3, 4]
    books = world.core.state.ledger.trajectories
    assert books.committed == 4 * 8 * 4
    assert set(books.dropped) <= {"stopped"}
    assert found["tokens_lost"] == 0
    assert sum(world.measures.s_gen.values()) == 3 * 8 * 4


def test_a_train_step_that_takes_longer_than_anything_else_is_no_standstill():
    slow = dict(model="72B", gpus=9, split=(1, 8), batch_groups=64, group_size=16, iterations=2)
    world, found = simulate(scenario(**slow, stall_s=100.0))
    assert found["finished"] == "measured"
    first, second = (iteration.at for iteration in world.measures.iterations)
    assert second - first > 3 * 100.0


def test_groups_that_go_without_stragglers_account_for_them_and_train_on_shorter_answers():
    patient, _ = simulate(scenario(iterations=8))
    hasty, found = simulate(scenario(iterations=8, straggler_factor=2.0))
    assert (found["finished"], found["ok"]) == ("measured", True)
    books = hasty.core.state.ledger.trajectories
    assert books.dropped["straggler"] > 0
    assert set(books.dropped) <= {"straggler", "stopped"}
    assert 8 * 8 * 4 - books.dropped["straggler"] <= books.committed < 8 * 8 * 4
    lengths = [sum(i.num_tokens for i in world.measures.iterations) for world in (hasty, patient)]
    rows = [world.core.state.ledger.trajectories.committed for world in (hasty, patient)]
    assert lengths[0] / rows[0] < lengths[1] / rows[1], "the bias that the page states"


def test_the_measured_window_ends_with_the_last_iteration_asked_for():
    slow_trainer = scenario(iterations=6, split=(1, 7), workload=replace(SHORT, median=20.0))
    world, found = simulate(slow_trainer)
    last = world.measures.iterations[-1]
    assert last.step == 6
    assert found["throughput_tokens_per_s"] == pytest.approx(
        sum(i.num_tokens for i in world.measures.iterations[1:]) / (last.at - world.measures.iterations[0].at)
    )
    assert last.num_generated - world.measures.iterations[-2].num_generated > 0


def test_every_trained_trajectory_has_the_length_that_was_drawn():
    world = scenario().world()
    rows = []
    taken = world._answers.copy()

    def spy(kind):
        def answer(action):
            rows.extend(getattr(action, "rows", []))
            taken[kind](action)

        return answer

    world._answers = {kind: spy(kind) for kind in taken}
    world.run()
    records = {}
    for row in rows:
        records[row.trajectory] = row.num_tokens
    assert len(records) == 4 * 8 * 4
    assert max(records.values()) <= 1024
    assert len(set(records.values())) > 50


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    assert trace(seed=3) == trace(seed=3) != trace(seed=4)


def test_the_trace_does_not_depend_on_the_hash_seed():
    code = "from tests.test_sim_world import trace; from laminar.sim.faults import parse; "
    code += f"print(trace(faults=parse({FAULTS!r}), seed=5))"
    traces = set()
    for hash_seed in ("1", "4711"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        traces.add(run.stdout.strip())
    assert len(traces) == 1


class Restoring(World):
    """Replaces the core by one restored from its snapshot again and again."""

    def send(self, event):
        if self.core.state.seq % 7 == 3:
            self.core = Core.restore(self.core.settings, self.core.snapshot())
        super().send(event)


@pytest.mark.parametrize("faults", ["", FAULTS])
def test_the_trace_does_not_depend_on_snapshots_and_restores(faults):
    world = scenario(seed=3, faults=parse(faults)).world()
    world.__class__ = Restoring
    world.run()
    assert world.trace.hexdigest() == trace(seed=3, faults=parse(faults))
    struck = {name for name, count in world.measures.faults.items() if count}
    assert not faults or {"trainer_crash", "storage_full", "reward_hang"} <= struck


def test_a_run_in_which_nothing_moves_any_more_is_an_error_that_says_where_everything_is():
    world = scenario(stall_s=600.0).world()
    world.core.state.storage_failure = "never cleared"
    with pytest.raises(SimulationError, match=r"nothing has moved since \d.*trainer at 0, running 0.*rollout-0"):
        world.run()


def test_repacking_moves_tails_and_frees_replicas():
    long = replace(SHORT, median=400.0, tokens_max=4096)
    moving, found = simulate(scenario(workload=long, iterations=6))
    assert found["trajectories_moved"] > 0
    assert found["replicas_released"] > 0
    assert moving.core.state.ledger.trajectories.committed == 6 * 8 * 4
    assert simulate(scenario(workload=long, iterations=6, repack=False))[1]["trajectories_moved"] == 0


def test_kv_use_is_right_at_every_repack_check():
    world = scenario(workload=replace(SHORT, median=400.0, tokens_max=4096)).world()
    handle, seen = world.core.handle, []

    def checked(event):
        due = world.core.state.repack.next_at
        if due and world.now >= due:
            for worker, engine in world.rollouts.engines.items():
                if worker in world.core.state.replicas and type(event).__name__ == "TimerFired":
                    assert world.core.state.replicas[worker].kv_tokens == engine.replica.kv_tokens
                    seen.append(worker)
        return handle(event)

    world.core.handle = checked
    world.run()
    assert len(seen) > 4


def test_lengths_have_the_tail_that_is_stated():
    lengths = sorted(WORKLOADS["math"].draw(seed, 0).num_tokens for seed in range(20_000))
    assert lengths[10_000] == pytest.approx(2500, rel=0.05)
    uncapped = Workload(name="uncapped", median=1000, tokens_max=10**9)
    lengths = sorted(uncapped.draw(seed, 0).num_tokens for seed in range(20_000))
    assert lengths[19_800] / lengths[10_000] == pytest.approx(10, rel=0.12)
    assert WORKLOADS["math"].mean_tokens() == pytest.approx(
        sum(WORKLOADS["math"].draw(seed, 0).num_tokens for seed in range(20_000)) / 20_000, rel=0.03
    )


def test_tool_calls_are_at_most_eight_and_part_of_the_response():
    for seed in range(500):
        draw = WORKLOADS["tool"].draw(seed, 0)
        assert len(draw.pauses) <= 8
        before = 0
        for pause in draw.pauses:
            assert before <= pause.at
            before = pause.at + pause.num_tokens
        assert before <= draw.num_tokens


def test_lengths_grow_over_training():
    growing = replace(WORKLOADS["math"], growth_per_step=0.05)
    assert growing.mean_tokens(10) > 1.2 * growing.mean_tokens(0)
    assert growing.draw(7, 10).num_tokens >= growing.draw(7, 0).num_tokens


@pytest.mark.parametrize("gpus", [16, 128, 1024])
def test_the_balanced_split_uses_all_gpus_and_whole_replicas(gpus):
    train, rollout = Scenario(model="72B", gpus=gpus, workload=WORKLOADS["math"]).balanced_split()
    assert train + rollout == gpus
    assert rollout % 8 == 0


def test_a_split_without_a_replica_is_refused():
    with pytest.raises(ConfigError, match="at least 1 GPU and a 72B replica 8"):
        simulate(Scenario(model="72B", gpus=8, split=(4, 4), workload=SHORT))


def test_a_core_that_breaks_an_invariant_is_named_with_its_event():
    world = scenario().world()
    world.begin()
    world.core.state.ledger.tokens.total += 1
    with pytest.raises(SimulationError, match=r"event \d+ at .*ledger"):
        world.run()
