"""The parts of the quickstart benchmark that decide what its numbers mean."""

import json
import math
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import bench_quickstart
from scripts.bench import laminar_run
from scripts.bench.common import Curve, Problem, Recorder, Scorer

ROOT = Path(__file__).resolve().parent.parent


def problem(**changes) -> Problem:
    values = {
        "model": "", "reward": f"{ROOT}/configs/quickstart/reward.py:reward", "prompts": [("spell ab\n", "ba")], "batch_prompts": 1,
        "group_size": 2, "max_tokens": 4, "temperature": 1.0, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0,
        "grad_clip": 1.0, "clip_low": 0.2, "clip_high": 0.28, "delay_median_s": 0.0, "delay_p99_s": 0.0, "seed": 0, "target": 0.85,
        "steps_max": 150, "seconds_max": 100.0,
    }  # fmt: skip
    return Problem(**(values | changes))


def test_the_target_counts_as_reached_by_the_mean_of_the_last_five_steps():
    curve = Curve(0.8)
    for step, reward in enumerate([1.0, 1.0, 1.0, 0.0, 0.9, 0.9, 1.0, 1.0, 1.0]):
        assert curve.reached_step is None
        curve.add(float(step), reward)
    assert curve.reached_step == 9


def test_fewer_than_five_steps_never_reach_the_target():
    assert Curve(0.5, [1.0] * 4, [1.0] * 4).reached_step is None


def test_a_run_that_ends_names_no_step():
    assert Curve(0.85, [float(i) for i in range(50)], [0.84] * 50).reached_step is None


def test_a_problem_survives_its_file(tmp_path):
    problem(seed=3).save(tmp_path / "problem.json")
    loaded = Problem.load(tmp_path / "problem.json")
    assert (loaded.seed, loaded.lr, [tuple(row) for row in loaded.prompts]) == (3, 1e-3, [("spell ab\n", "ba")])


def test_the_scorer_gives_the_quickstarts_reward():
    rewards = Scorer(problem()).score(["p"] * 3, ["abcd"] * 3, ["abcd", "abxx", "abcdefgh"])
    assert rewards == [1.0, 0.5, 0.5]


def test_a_batch_waits_once_for_its_slowest_answer(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("scripts.bench.common.time.sleep", slept.append)
    scorer = Scorer(problem(delay_median_s=0.5, delay_p99_s=5.0))
    for _ in range(400):
        scorer.score(["p"] * 256, ["a"] * 256, ["a"] * 256)
    assert len(slept) == 400
    # the median of the largest of 256 normal numbers lies where the distribution function is 2^(-1/256)
    expected = 0.5 * math.exp(math.log(10) / 2.3263 * 2.782)
    assert sorted(slept)[200] == pytest.approx(expected, rel=0.1)


def test_the_recorder_stops_at_the_target_and_at_the_last_step(tmp_path):
    reached, spent = Recorder(problem(), tmp_path / "a"), Recorder(problem(steps_max=3), tmp_path / "b")
    reached.begin()
    spent.begin()
    finished = []
    for _ in range(5):
        reached.step(0.9)
        finished.append(reached.finished)
    for _ in range(3):
        spent.step(random.Random(0).random() / 2)
    assert finished == [False] * 4 + [True]
    assert spent.finished
    assert [json.loads(line)["reward"] for line in (tmp_path / "a").read_text().splitlines()] == [0.9] * 5


def test_times_of_a_run_count_from_its_start_and_skip_a_half_written_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": i, "at": 100.0 + i, "reward/mean": 0.1 * i, "timing/update_s": float(i)} for i in (1, 2, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "at')
    curve, medians = laminar_run.read_metrics(path, 100.5, 0.85)
    assert curve.times_s == [0.5, 1.5, 2.5]
    assert medians["timing/update_s"] == 2.0


def test_processor_time_counts_between_start_and_end_and_by_role():
    samples = [(float(at), {1: ("controller", 0.5 + 0.1 * at), 2: ("rollouts", 2.0 * at)}) for at in range(10)]
    samples[8][1][3] = ("rollouts", 1.5)
    totals = laminar_run._by_role(samples, began=3.2, ended=8.1)
    assert totals == pytest.approx({"controller": 0.5, "rollouts": 11.5})


def test_processes_are_told_apart_by_their_command():
    python = ["python", "-m"]
    assert laminar_run.role([*python, "torch.distributed.run", "-m", "laminar.workers.trainer"], False) == "torchrun"
    assert laminar_run.role([*python, "laminar.workers.trainer"], False) == "trainer ranks"
    assert laminar_run.role([*python, "laminar.workers.rollout"], False) == "rollouts"
    assert laminar_run.role([*python, "laminar.tasks.reward_worker"], False) == "rewards"
    assert laminar_run.role([*python, "laminar.controller"], True) == "controller"


def result(system: str, seconds: float, reached: bool) -> bench_quickstart.Result:
    return bench_quickstart.Result(
        setting="i", system=system, seed=0, reached=reached, seconds=seconds, steps=50, step_s=0.5, cpu_s_per_step={"a": 1.0},
        parts={}, start_up_s=None, load_before=0.0, threads=None, times_s=[], rewards=[],
    )  # fmt: skip


def test_a_run_that_does_not_reach_the_target_gives_no_ratio():
    text = bench_quickstart.report(
        [result("laminar", 10.0, True), result("trl", 40.0, True), result("bare", 99.0, False)]
    )
    assert "Laminar / trl = 0.25" in text
    assert "Laminar / bare" not in text
    assert "inf (> 99.0)" in text
    assert "0/1" in text
