"""A whole run on two real vLLM servers: it trains, one server's engine is killed, and what it generated goes on at the other."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from e2e import MARK, Run, ledger_is_closed, vllm_hosts_file
from e2e_replay import Replay, keep_tokens, read_tokens
from vllm_world import PYTHON, needs_vllm

from laminar.core.records import Trajectory, TrajectoryState

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

START_S = 600.0  # two servers import vLLM on two busy cores
WAIT_S = 240.0
ENGINE = "VLLM::EngineCore"
STEPS = 4
OVERRIDES = (
    "run.steps=200",
    "controller.start_timeout_s=600",
    "rollout.temperature=0.8",  # vLLM's log-probs have to be those after temperature
    "rollout.length_floor_median=90",  # long enough to be found in the middle
    "rollout.length_floor_p99=99",
    "rollout.max_concurrent=16",
    # All groups that may be in flight make one batch: no new version comes before those of the killed replica went on
    "buffer.max_groups=8",
    "trainer.batch_prompts=8",
    "repack.enabled=false",  # so what moves, moves because of the kill
    "trainer.lr=1e-4",
)


def engine_of(run: Run, worker: str) -> psutil.Process:
    """The process of that replica's server in which the model runs."""
    for process in run.marked():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] == [ENGINE] and process.environ().get("LAMINAR_PROCESS") == worker:
                return process
    raise AssertionError(f"no {ENGINE} of {worker} among the processes with {MARK}\n{run.output}")


def in_flight(run: Run, worker: str) -> list[Trajectory]:
    """What the replica generates and has sent tokens of, by the log."""
    return [
        each
        for each in Replay(run).core.state.trajectories.values()
        if each.worker == worker and each.state is TrajectoryState.GENERATING and each.num_tokens
    ]


def until_the_next_event(run: Run) -> None:
    """Wait for one more event in the log."""
    query = "SELECT count(*) FROM events"
    before = run.query(query)
    run.until(lambda: run.query(query) > before, WAIT_S)


def kill_in_the_middle(run: Run, worker: str) -> None:
    """SIGKILL the engine while it certainly has unfinished trajectories: it is stopped first, and looked at."""
    while True:
        run.until(lambda: run.status()["replicas"].get(worker, {}).get("generating"), START_S)
        run.until(lambda: in_flight(run, worker), WAIT_S)
        engine = engine_of(run, worker)
        engine.suspend()
        until_the_next_event(run)
        if in_flight(run, worker):
            engine.kill()
            return
        engine.resume()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Replay, Path]:
    """The run, its events once more, and its tokens."""
    directory = tmp_path_factory.mktemp("vllm")
    hosts = vllm_hosts_file(directory, Path(os.path.abspath(PYTHON)), replicas=2)
    with Run.start(directory, hosts, *OVERRIDES, config="longtail.toml") as run:
        kept = keep_tokens(run)
        run.until((run.path / "url").exists)
        kill_in_the_middle(run, "rollout-1")
        run.until_said(r"^alarm: worker-lost: rollout-1 was lost: vLLM", WAIT_S)
        run.until_said(rf"^step {STEPS}/", WAIT_S)
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
