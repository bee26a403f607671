"""`python -m laminar.sim`: what it prints, writes and refuses; and the grid's file."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from laminar.controller.schema import SCHEMA
from laminar.core.settings import Settings
from laminar.sim import grid
from laminar.sim.__main__ import main
from laminar.sim.options import OF_SCENARIO, OWN_OPTIONS, UNUSED, parse, scenario

SMALL = ["--preset", "small", "--split", "2/2", "--median", "60", "--warmup", "1", "--iterations", "1"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main([*SMALL, *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_an_ablation_prints_both_runs_as_json_and_writes_figures(capsys, tmp_path):
    arguments = ("--ablate", "repack", "--set", "repack_interval_s=4", "--json", "--out", str(tmp_path))
    code, out, _ = run(capsys, *arguments)
    found = json.loads(out)
    assert code == 0
    assert found["with repack"]["repack_checks"] > 0 == found["without repack"]["repack_checks"]
    assert json.loads((tmp_path / "result.json").read_text()) == found
    for name in ("with-repack", "without-repack"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


def test_a_run_prints_a_table(capsys):
    code, out, _ = run(capsys, "--policy", "continuous", "--workload", "tool")
    assert code == 0
    assert "throughput_tokens_per_s" in out
    assert "2/2" in out


def test_a_custom_sampler_chooses_the_batches(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Freshest:\n"
        "    calls = 0\n"
        "    def select(self, view, num_groups):\n"
        "        Freshest.calls += 1\n"
        "        return [group.id for group in view.groups[-num_groups:]]\n"
        "    def state(self):\n        return {}\n"
        "    def load_state(self, state):\n        pass\n"
    )
    code, out, err = run(capsys, "--sampler", f"{file}:Freshest", "--json")
    assert code == 0, err
    assert json.loads(out)["run"]["ok"]


@pytest.mark.parametrize(
    "arguments",
    [["--preset", "paper", "--workload", "nope"], ["--set", "x=1"], ["--preset", "policies", "--gpus", "3"]],
)
def test_what_is_refused_leaves_no_directory(capsys, tmp_path, arguments):
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_faults_are_counted(capsys):
    code, out, _ = run(capsys, "--faults", "reward_infra=0.02", "--json")
    assert code == 0
    assert json.loads(out)["run"]["faults"]["reward_infra"] > 0


def test_lengths_can_come_from_a_real_run(capsys, tmp_path):
    import contextlib
    import sqlite3

    path = tmp_path / "run.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(SCHEMA)
        for number in range(1, 31):
            database.execute(
                "INSERT INTO trajectories (id, num_tokens, num_prompt_tokens, finish_reason) VALUES (?, ?, 12, 'stop')",
                (number, number),
            )
        database.commit()
    code = main(
        ["--preset", "small", "--split", "2/2", "--warmup", "1", "--iterations", "1", "--workload", str(path), "--json"]
    )
    found = json.loads(capsys.readouterr().out)["run"]
    assert code == 0
    assert found["median_tokens"] == 16
    assert found["latency_max_s"] < 30 * 0.06


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "9"], "makes 4 GPUs, --gpus says 9"),
        (["--workload", "nowhere.db"], "no such file"),
        (["--faults", "gremlins"], "no fault 'gremlins'"),
        (["--sampler", "nowhere:X"], "nowhere"),
        (["--sampler", "json:loads"], "making one without arguments failed: TypeError"),
        (["--sampler", "collections:Counter"], "has no method select, state, load_state"),
        (["--model", "72B"], "a 72B replica 8"),
        (["--split", "8/1000000"], "1000000 replicas of 7B; at most 8192"),
        (["--iterations", "9999"], "make 10000 steps; at most 5000"),
        (["--out", "/dev/null"], "--out /dev/null: cannot write there: File exists"),
        (["--set", "max_staleness"], "expected NAME=VALUE"),
        (["--set", "max_stalenes=2"], "no setting 'max_stalenes'; did you mean max_staleness?"),
        (["--set", "max_staleness=two"], "--set max_staleness=two: expected a whole number"),
        (["--set", "on_stale=never"], "--set on_stale=never: expected one of drop, wait"),
        (["--set", "repack_interval_s=nan"], "--set repack_interval_s=nan: 0 or more"),
        (["--set", "refresh_policy=rolling"], "use --policy"),
        (["--set", "evaluate=true"], "has no effect in the simulator"),
        (["--set", "ready_groups_max=63"], "a batch of batch_groups = 64 would never fill"),
        (["--set", "buffer_groups_max=63"], "a batch of batch_groups = 64 would never fill"),
        (["--set", "on_stale=wait"], "on_stale means nothing without --set max_staleness=…"),
        (["--set", "straggler_factor=2"], "straggler_factor means nothing without --set stragglers=drop"),
        (["--set", "staleness_budget=1"], "staleness_budget means nothing without --policy rolling"),
        (["--set", "repack_kv_share=0.5", "--repack", "off"], "repack_kv_share means nothing with --repack off"),
        (["--set", "group_size=0"], "group_size = 0: at least 1"),
        (["--set", "draining_share=2", "--policy", "continuous"], "draining_share = 2.0: between 0 (excluded) and 1"),
    ],
)
def test_wrong_arguments_are_answered_with_what_to_do(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "smal"], "'smal' is none of paper, policies, 32B-128, 72B-1024, small; did you mean small?"),
        (["--policy", "continous"], "did you mean continuous?"),
        (["--gpus", "many"], "argument --gpus: 'many' is not a whole number"),
        (["--gpus", "0"], "0 is not at least 1"),
        (["--split", "64-64"], "'64-64' is not TRAIN/ROLLOUT, for example 64/64"),
        (["--growth", "nan"], "nan is not between"),
        (["--seed", "9" * 20], "does not fit 64 bits"),
        (["--jobs", "2"], "--jobs has no effect here: one run takes one process"),
        (["--preset", "paper", "--faults", "engine_crash"], "--faults has no effect here: --preset paper runs fixed"),
        (["--preset", "paper", "--policy", "batch"], "--policy has no effect here"),
        (["--ablate", "repack", "--repack", "off"], "compares nothing"),
        (["--optimize-split", "--split", "8/8"], "leave one away"),
        (["small"], "unrecognized arguments: small"),
    ],
)
def test_what_is_not_understood_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_any_setting_of_the_core_can_be_chosen():
    chosen = scenario(parse([
        *SMALL, "--policy", "rolling", "--repack", "parts", "--set", "staleness_budget=1.5", "--set", "group_size=4",
        "--set", "max_staleness=3", "--set", "on_stale=wait", "--set", "max_staleness=2",
    ]))  # fmt: skip
    core = chosen.settings(chosen.cluster())
    assert (core.refresh_policy, core.repack_policy, core.staleness_budget) == ("rolling", "parts", 1.5)
    assert (core.max_staleness, core.on_stale, core.group_size, chosen.group_size) == (2, "wait", 4, 4)


def test_stragglers_can_be_dropped(capsys):
    code, out, err = run(capsys, "--set", "stragglers=drop", "--set", "straggler_factor=1.5", "--json")
    assert code == 0, err
    assert json.loads(out)["run"]["trajectories_dropped"]["straggler"] > 0


def test_every_setting_of_the_core_is_taken_or_refused_for_a_reason():
    for name in (*OWN_OPTIONS, *UNUSED, *OF_SCENARIO):
        assert name in Settings.__struct_fields__


def test_repacking_can_be_off(capsys):
    code, out, _ = run(capsys, "--repack", "off", "--json")
    assert code == 0
    assert json.loads(out)["run"]["repack_checks"] == 0


@pytest.mark.parametrize(
    ("body", "alarm"),
    [
        ("raise RuntimeError('boom')", "Mine.select raised RuntimeError: boom; this batch is FIFO"),
        ("return 'abc'", "Mine.select returned a str, expected a list of group ids; this batch is FIFO"),
    ],
)
def test_a_sampler_that_fails_is_named_and_the_run_goes_on(capsys, tmp_path, body, alarm):
    file = tmp_path / f"mine{len(body)}.py"
    file.write_text(
        f"class Mine:\n    def select(self, view, num_groups):\n        {body}\n"
        "    def state(self):\n        return {}\n    def load_state(self, state):\n        pass\n"
    )
    code, out, err = run(capsys, "--sampler", f"{file}:Mine")
    assert code == 0
    assert alarm in err
    assert "faults: alarm:sampler" in out


def test_a_run_that_fails_says_why_on_stderr(capsys):
    code, _, err = run(capsys, "--faults", "pull_failed=1")
    assert code == 1
    assert err.startswith("error: run: the simulated training failed: no rollout replica is left")
    assert err.count("\n") == 1


def test_a_run_that_measures_too_little_says_so(capsys):
    _, _, err = run(capsys)
    assert err.startswith("note: run: the measured iterations took 48 s, and replicas report every 60 s")


def test_a_database_without_trajectories_is_refused(capsys, tmp_path):
    path = tmp_path / "run.db"
    path.write_text("not a database, but long enough to be taken for one" * 30)
    code, _, err = run(capsys, "--workload", str(path))
    assert code == 2
    assert "cannot read its trajectories" in err


@pytest.fixture
def one_point():
    return [grid.Point(system="sync", model="7B", gpus=64, workload="math")]


def test_a_grid_goes_on_where_it_was(tmp_path, one_point, capsys):
    path = tmp_path / "points.jsonl"
    first = grid.run(one_point, path, "H800", 0)
    assert "[1/1" in capsys.readouterr().err
    with path.open("a") as file:
        file.write('{"key": "cut off')
    assert grid.run(one_point, path, "H800", 0) == first
    assert capsys.readouterr().err == "", "nothing was run again"


def test_what_shares_work_is_one_task_and_the_longest_come_first_but_for_one_of_each_kind():
    points = grid.points(["7B"], [64, 128, 256], ["math"])
    searches = [point.search for point in points if point.system == "laminar"]
    tasks = grid.tasks_of([*searches, *points])
    assert sorted(point.key for task in tasks for point in task) == sorted(p.key for p in [*searches, *points])
    kinds = {tuple(point.system for point in task) for task in tasks}
    assert {("placement", "laminar"), ("one-step", "stream")} < kinds
    first, rest = tasks[: len(kinds)], tasks[len(kinds) :]
    assert {task[0].gpus for task in first} == {64}, "an error of any system shows early"
    costs = [sum(point.cost for point in task) for task in rest]
    assert costs == sorted(costs, reverse=True)


def test_a_point_waits_for_its_search_and_nothing_else():
    searched, follows = (grid.points(["7B"], [gpus], ["math"])[-1] for gpus in (64, 128))
    assert searched.search is not None
    assert follows.search is not None
    tasks = [(follows,), (follows.search,), (searched,)]
    rows = {searched.search.key: {"split": "16/48"}}
    take = partial(grid._take, tasks, rows)
    assert take() == (follows.search,)
    assert take() == (replace(searched, split=(16, 48)),)
    assert take() is None, "its search is not done"
    rows[follows.search.key] = {"split": "64/64"}
    assert take() == (replace(follows, split=(64, 64)),)
    assert take() is None
    assert not tasks


def test_two_processes_make_the_same_rows_as_one(tmp_path, capsys):
    wanted = grid.points(["72B"], [64], ["math"])[:3]
    alone = grid.run(wanted, tmp_path / "alone.jsonl", "H800", 0)
    together = grid.run(wanted, tmp_path / "together.jsonl", "H800", 0, jobs=2)
    assert together == alone
    assert "[3/3" in capsys.readouterr().err
    assert not multiprocessing.active_children()


def _heed_interrupts():
    """What a shell starts with `&`, these tests for example, inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("stop", [lambda pid: os.killpg(pid, signal.SIGINT), lambda pid: os.kill(pid, signal.SIGTERM)])
def test_a_stopped_grid_leaves_whole_lines_and_no_processes(tmp_path, stop):
    command = [
        sys.executable,
        "-m",
        "laminar.sim",
        "--preset",
        "paper",
        "--model",
        "72B",
        "--gpus",
        "64",
        "--jobs",
        "2",
    ]
    command += ["--out", str(tmp_path)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, process_group=0, preexec_fn=_heed_interrupts
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("[1/14"), "a first point is done, others are on the way"
        stop(process.pid)
        process.communicate(timeout=100)  # ends when nobody holds its stderr: no child is left
    assert process.returncode == 130
    rows = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert 1 <= len(rows) < 14


def test_the_grids_figures_and_rows_are_written(tmp_path, capsys):
    rows = [
        {"key": point.key, "fingerprint": grid.fingerprint("H800", 0), "model": point.model, "gpus": point.gpus,
         "workload": point.workload, "system": point.system, "throughput_tokens_per_s": 1e4 * (1 + number),
         "fresh_tokens_per_s": 1e4, "s_train_mean": 1.0, "s_train_max": 2, "split": "32/32"}
        for number, point in enumerate(grid.points(["7B"], [64], ["math", "tool"]))
    ]  # fmt: skip
    (tmp_path / "points.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--preset", "paper", "--model", "7B", "--gpus", "64", "--out", str(tmp_path)]) == 0
    assert "mean speedup, tool, over the baselines" in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text()) == rows
    for name in ("throughput", "speedup"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


def test_a_representative_run_is_drawn_where_it_is_made(tmp_path, monkeypatch):
    small = scenario(parse(SMALL))
    monkeypatch.setattr(grid, "_scenario", lambda point, hardware, seed: small)
    point = grid.Point(system="laminar", model="32B", gpus=128, workload="math", split=(64, 64))
    row = grid._measure((point,), "H800", 0, drawn=tmp_path)[0]
    found = json.loads((tmp_path / "32B-128.json").read_text())
    assert found["queue"]["series"]
    assert found["throughput_tokens_per_s"] == row["throughput_tokens_per_s"]
    assert (tmp_path / "32B-128.png").stat().st_size > 10_000
    grid._measure((replace(point, system="laminar-parts"), replace(point, workload="tool")), "H800", 0, drawn=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_grid_is_printed_beside_the_papers_speedups():
    rows = [
        {"key": f"{system}/72B/1024/math", "model": "72B", "gpus": 1024, "workload": "math", "system": system,
         "throughput_tokens_per_s": rate, "fresh_tokens_per_s": rate / (1 + staleness), "s_train_mean": staleness,
         "s_train_max": staleness, "split": "768/256"}
        for system, rate, staleness in zip(
            grid.SYSTEMS, (8e4, 1e5, 2e4, 4e4, 5e4, 8e4), (1, 2, 0, 1, 0, 4), strict=True
        )
    ]  # fmt: skip
    text = grid.table(rows)
    assert "mean speedup, math sync: 4.00x, largest 4.00x; paper 2.56x" in text
    assert "mean speedup, math partial: 1.00x, largest 1.00x; paper 1.39x" in text
    assert "speedup over sync, math 72B 1024: 4.00x; paper 5.48x" in text
    _, fresh, staleness = text.split("\n\n")
    assert "16.0 (2.50x)" in fresh, "partial: 80 k tokens/s, a fifth of them fresh"
    assert "paper" not in fresh
    assert "4.0/4 768/256" in staleness


def test_a_grid_of_other_constants_is_not_mixed_in(tmp_path, one_point):
    path = tmp_path / "points.jsonl"
    path.write_text(json.dumps({"key": one_point[0].key, "fingerprint": "other"}) + "\n")
    with pytest.raises(grid.ConfigError, match="other constants"):
        grid.run(one_point, path, "H800", 0)
