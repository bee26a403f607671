"""A whole run on two real vLLM servers: it trains, one server's engine is killed, and what it generated goes on at the other."""

import os
import signal
from pathlib import Path

import pytest
from e2e import Run, ledger_is_closed, vllm_hosts_file
from e2e_replay import Replay, keep_tokens, read_tokens
from e2e_vllm import OVERRIDES, WAIT_S, suspend_in_the_middle
from vllm_world import PYTHON, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Replay, Path]:
    """The run, its events once more, and its tokens."""
    directory = tmp_path_factory.mktemp("vllm")
    hosts = vllm_hosts_file(directory, Path(os.path.abspath(PYTHON)), replicas=2)
    with Run.start(directory, hosts, *OVERRIDES, "run.steps=200", config="longtail.toml") as run:
        kept = keep_tokens(run)
        run.until((run.path / "url").exists)
        suspend_in_the_middle(run, "rollout-1").kill()
        run.until_said(r"^alarm: worker-lost: rollout-1 was lost: vLLM", WAIT_S)
        run.until_said(r"^rollout-1 is started again", WAIT_S)
        run.until(lambda: sum(run.status()["failovers"].values()), WAIT_S)
        # What went on belongs to the next batch, whatever step the kill came in
        run.until_said(rf"^step {max(STEPS, run.status()['step'] + 2)}/", WAIT_S)
        run.signal(signal.SIGINT)
        assert run.wait(WAIT_S) == 0, run.output
    return run, Replay(run), kept


def test_the_death_of_an_engine_is_told_with_the_servers_own_words(finished: tuple[Run, Replay, Path]) -> None:
    run, _, _ = finished
    assert "rollout-1.vllm.log" in run.output
    assert "EngineDeadError" in run.output
    assert run.until_said(r"^rollout-1 is started again")
    assert "rollout-0 was lost" not in run.output


def test_its_trajectories_go_on_elsewhere_from_the_tokens_that_had_come(finished: tuple[Run, Replay, Path]) -> None:
    run, replay, kept = finished
    tokens = read_tokens(kept)
    moves = [move for move in replay.moves if move.source == "rollout-1"]
    assert moves
    for move in moves:
        assert move.num_flushed > 0
        parts = tokens.responses[move.trajectory]
        before = sum(len(part.tokens) for part in parts if part.attempt < move.attempt)
        assert before == move.num_flushed
        after = [part for part in parts if part.attempt >= move.attempt]
        assert not after or after[0].start == before
    trained = {id for (id,) in run.query("SELECT id FROM trajectories WHERE trained_at IS NOT NULL")}
    assert trained & {move.trajectory for move in moves}


def test_nothing_is_lost_and_nothing_is_trained_twice(finished: tuple[Run, Replay, Path]) -> None:
    run, _, _ = finished
    assert ledger_is_closed(run.output)
    assert run.num_dropped().keys() <= {"stopped"}
    rows = run.query("SELECT step, count(*), count(DISTINCT id) FROM trajectories WHERE dropped IS NULL GROUP BY step")
    assert rows == [(step, 64, 64) for step in range(1, len(rows) + 1)]


def test_every_trajectory_is_of_the_version_that_it_was_begun_with(finished: tuple[Run, Replay, Path]) -> None:
    """An answer whose spans say otherwise fails its trajectory, and would be dropped or generated again."""
    run, _, _ = finished
    published = {(f"v{step}", digest) for step, digest in run.query("SELECT step, digest FROM versions")}
    found = run.query("SELECT DISTINCT behavior_version, digest FROM trajectories WHERE trained_at IS NOT NULL")
    assert len(found) > 2
    assert set(found) <= published
    assert "engine_error" not in run.output


def test_the_trainer_computes_the_same_log_probs(finished: tuple[Run, Replay, Path]) -> None:
    run, _, _ = finished
    for name in ("mismatch/logprob_abs_diff_mean", "canary/logprob_abs_diff/max"):
        values = [value for (value,) in run.query("SELECT value FROM metrics WHERE name = ?", name)]
        assert values
        assert max(values) < 1e-3


def test_replicas_refresh_at_their_own_times(finished: tuple[Run, Replay, Path]) -> None:
    run, _, _ = finished
    pulls = run.query("SELECT worker, start, version FROM spans WHERE kind = 'pull'")
    assert {worker for worker, _, _ in pulls} == {"rollout-0", "rollout-1"}
    assert len({start for _, start, _ in pulls}) == len(pulls)
