"""Whole runs that are stopped or killed: nothing is left behind, and what a checkpoint holds goes on."""

import json
import signal
import socket
from pathlib import Path

import pytest
from e2e import SMALL, Run, hosts_file, ledger_is_closed

from laminar.core.prompts import draw
from laminar.core.records import PromptPool
from laminar.core.settings import Settings

pytestmark = pytest.mark.timeout(180)

STOPPED_S = 60.0  # a clean stop takes one or two seconds on an idle machine; one beside a dead relay up to 8 more
LONG = "run.steps=500"


def test_an_interrupt_while_the_workers_start_ends_the_run_at_once(tmp_path: Path) -> None:
    with Run.start(tmp_path, hosts_file(tmp_path), *SMALL, LONG) as run:
        run.until_said(r"^run ")
        run.signal(signal.SIGINT)
        assert run.wait(STOPPED_S) == 0, run.output
    assert ledger_is_closed(run.output)
    assert "resume             not possible" in run.output


def test_a_second_interrupt_is_immediate_and_leaves_nothing(tmp_path: Path) -> None:
    with Run.start(tmp_path, hosts_file(tmp_path), *SMALL, LONG) as run:
        run.until(run.shm)
        run.signal(signal.SIGSTOP)  # both signals wait; two at once would be one
        run.signal(signal.SIGINT)
        run.signal(signal.SIGTERM)
        run.signal(signal.SIGCONT)
        assert run.wait(STOPPED_S) == 130, run.output
        run.until(lambda: not run.leftovers(), STOPPED_S)
        assert run.query("SELECT outcome FROM boots") == [("stopped at once",)], "nobody is to take it over"
    assert "stopped at once; no checkpoint was made" in run.output


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    with Run.start(tmp_path, hosts_file(tmp_path), *SMALL, LONG) as first:
        first.until_said(r"^step 2/")
        first.signal(signal.SIGINT)
        assert first.wait(STOPPED_S) == 0, first.output
    (step,) = first.checkpoints()
    assert step >= 2
    last = step + 4
    with Run.resume(first.path, f"run.steps={last}") as second:
        assert second.wait() == 0, second.output
    assert ledger_is_closed(first.output)
    assert ledger_is_closed(second.output)
    metrics = (first.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, last + 1))
    digests = first.query("SELECT branch, digest FROM versions WHERE step = ? ORDER BY branch", step)
    assert [branch for branch, _ in digests] == [0, 1]
    assert digests[0][1] == digests[1][1]  # the same weights, to the bit
    meta = json.loads((first.path / "checkpoints" / f"step-{last}" / "meta.json").read_text())
    assert (meta["step"], meta["num_updates"]) == (last, last)
    _check_prompts(first, last)


def _check_prompts(run: Run, steps: int) -> None:
    """Both runs together trained on the prompts of an uninterrupted one, each once."""
    settings = Settings(
        num_prompts=400, steps=steps, group_size=4, batch_groups=4, local_batch_groups=2, buffer_groups_max=12
    )
    pool = PromptPool()
    wanted = sorted(draw(pool, settings) for _ in range(4 * steps))
    trained = run.query("SELECT DISTINCT group_id, prompt FROM trajectories WHERE trained_at IS NOT NULL")
    assert sorted(prompt for _, prompt in trained) == wanted


def test_the_next_start_sweeps_what_a_killed_controller_and_relay_left(tmp_path: Path) -> None:
    hosts = hosts_file(tmp_path)
    with socket.socket() as taken, Run.start(tmp_path, hosts, *SMALL, LONG) as run:
        run.until(run.shm)
        run.signal(signal.SIGKILL)
        run.kill_worker("laminar.workers.relay")
        run.wait()
        (left,) = run.shm()
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Run.start(tmp_path, hosts, *SMALL, f"controller.port={taken.getsockname()[1]}") as following:
            assert following.wait() == 2, following.output
        assert f"removed {left}, left behind by a run that was killed" in following.lines
        assert "choose another with controller.port" in following.output
        assert not run.shm()
        for process in run.marked():
            process.kill()
        run.until(lambda: not run.marked(), STOPPED_S)


def test_a_killed_trainer_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    hosts = hosts_file(tmp_path, ranks=2)
    with Run.start(tmp_path, hosts, *SMALL, LONG, "trainer.checkpoint_every=1") as run:
        run.until(run.checkpoints)
        pid = run.kill_worker("laminar.workers.trainer")
        assert run.wait(STOPPED_S) == 1, run.output
    assert run.until_said(rf"^the run failed: the trainer was lost .* because rank \d ended by signal 9 \(pid {pid}\)")
    assert run.checkpoints()
    assert ledger_is_closed(run.output)
    assert f"--resume {run.path}" in run.output


def test_without_restarts_a_killed_relay_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with Run.start(tmp_path, hosts_file(tmp_path), *SMALL, "relay.restarts=0", LONG) as run:
        run.until_said(r"^step 2/")
        run.kill_worker("laminar.workers.relay")
        assert run.wait(STOPPED_S) == 1, run.output
    assert "the run failed: the relay relay-0 was lost: ended by signal 9" in run.output
    assert run.checkpoints()  # what was trained is kept
    assert ledger_is_closed(run.output)
