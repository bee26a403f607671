"""Whole runs that go well, or well enough: the quickstart, bad prompts and bad rewards."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from e2e import QUICKSTART, ROOT, SMALL, Run, hosts_file, ledger_is_closed

pytestmark = pytest.mark.timeout(180)

STEPS = 6
METRICS = {
    "reward/mean", "actor/entropy", "actor/pg_clipfrac", "actor/grad_norm", "actor/ppo_kl", "mismatch_kl/mean",
    "off_policy/s_gen/mean", "off_policy/residence/mean", "off_policy/s_train/max", "perf/trainer_idle_ratio",
    "perf/rollout_idle_ratio", "perf/publication_stall_s", "perf/rollout_wait_s", "perf/generation_tokens_per_s",
    "perf/training_tokens_per_s", "buffer/depth_groups", "buffer/age_s/mean", "event_loop_lag/max",
}  # fmt: skip

REWARD = """
import time

def reward(prompt, response):
    kind = prompt.metadata["kind"]
    if kind == "raises":
        raise ValueError("the judge is out")
    if kind == "hangs":
        time.sleep(3600)
    return float("nan") if kind == "nan" else len(response) / 16
"""


def test_the_quickstart_learns_asynchronously_and_its_books_balance(tmp_path: Path) -> None:
    with Run.start(tmp_path, QUICKSTART / "hosts.txt", f"run.steps={STEPS}", "task.eval_prompts=16") as run:
        assert run.wait() == 0, run.output
    assert ledger_is_closed(run.output)
    steps = [line for line in run.lines if re.match(r"step \d+/6 \| reward 0\.\d+ \| .* rollout-\d@v\d", line)]
    assert len(steps) == STEPS, run.output
    assert set(re.findall(r"(rollout-\d)@v\d", steps[-1])) == {"rollout-0", "rollout-1"}
    assert len(run.lines) < STEPS + 25, run.output  # one line per step, and one screen at the end
    assert sorted(path.name for path in run.path.iterdir() if path.name != "run.lock") == [
        "checkpoints", "config.toml", "hosts.txt", "logs", "metrics.jsonl", "run.db", "tokens", "url",
    ]  # fmt: skip
    _check_metrics(run)
    _check_records(run)
    _check_export(run.path / "checkpoints" / f"step-{STEPS}" / "hf")


def _check_metrics(run: Run) -> None:
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert METRICS - rows[0].keys() == set()
    # Behaviour and trainer log-probs of the same weights, computed by two programs.
    assert 0 < rows[0]["mismatch/logprob_abs_diff_max"] < 1e-3
    assert rows[0]["mismatch_kl/max"] < 1e-6
    assert run.query("SELECT count(DISTINCT step) FROM metrics WHERE name = 'reward/mean'") == [(STEPS,)]


def _check_records(run: Run) -> None:
    trained = run.query("SELECT step, count(*), count(DISTINCT id) FROM trajectories GROUP BY step ORDER BY step")
    assert trained == [(step, 256, 256) for step in range(1, STEPS + 1)]
    script = [sys.executable, str(ROOT / "scripts" / "asynchrony.py"), str(run.path), "--json"]
    figures = json.loads(subprocess.run(script, capture_output=True, check=True, timeout=30).stdout)
    assert figures["mixed_trajectories"] == 0
    assert 0 < figures["overlap"] <= 1
    versions = run.query("SELECT step, branch, digest FROM versions ORDER BY step")
    assert [(step, branch) for step, branch, _ in versions] == [(step, 0) for step in range(STEPS + 1)]
    assert len({digest for _, _, digest in versions}) == STEPS + 1


def _check_export(path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("Spell this word backward (example: sun -> nus): house\n", return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0]
    assert len(tokens) > prompt["input_ids"].shape[1]
    assert tokenizer.decode(tokens[prompt["input_ids"].shape[1] :]).strip()


def test_bad_prompts_and_rewards_are_counted_by_name_and_never_trained(tmp_path: Path) -> None:
    kinds = ("raises", "nan", "hangs", "long", "fine", "fine")
    with (tmp_path / "words.jsonl").open("w") as file:
        for number, kind in enumerate([*kinds, *["fine"] * 18]):
            prompt = (
                "x" * 5000 if kind == "long" else f"Spell this word backward (example: sun -> nus): {'ab' * number}c"
            )
            file.write(json.dumps({"prompt": prompt, "answer": "", "kind": kind}) + "\n")
    (tmp_path / "reward.py").write_text(REWARD)
    overrides = [
        *SMALL, "run.steps=4", "task.eval_prompts=0", "task.shuffle=false", "task.reward_timeout_s=0.3",
        f"task.dataset={tmp_path / 'words.jsonl'}", f"task.reward={tmp_path / 'reward.py'}:reward",
    ]  # fmt: skip
    with Run.start(tmp_path, hosts_file(tmp_path), *overrides) as run:
        assert run.wait() == 0, run.output
    dropped = {"reward_error": 4, "reward_nan": 4, "reward_timeout": 4, "prompt_too_long": 4}
    assert run.num_dropped() == dropped, run.output
    assert run.query("SELECT count(*) FROM trajectories WHERE dropped IS NOT NULL AND reward IS NOT NULL") == [(0,)]
    assert run.query("SELECT min(prompt), count(*) FROM trajectories WHERE trained_at IS NOT NULL") == [(4, 64)]
    assert ledger_is_closed(run.output)
    for reason in dropped:
        assert f"4 dropped ({reason})" in run.output
        assert run.until_said(rf"^alarm: {reason}: a trajectory will not be trained on")
    assert "ValueError: the judge is out" in run.output
