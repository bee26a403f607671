"""The controller of a real run is killed; another goes on where it was, with the same workers; nothing is lost or done twice."""

import json
import signal
from pathlib import Path

import pytest
from e2e import SMALL, Run, hosts_file, ledger_is_closed
from e2e_replay import events_of
from pyarrow import parquet

from laminar.core import events

pytestmark = pytest.mark.timeout(240)

STEPS = 24
OVERRIDES = (*SMALL, f"run.steps={STEPS}", "controller.orphan_timeout_s=90", "controller.heartbeat_timeout_s=60")


def killed(run: Run) -> None:
    run.signal(signal.SIGKILL)
    run.process.wait(10.0)


def check_steps(run: Run) -> None:
    """Every step was trained once, on trajectories of its own, and each prompt was drawn once."""
    done = [(event.step, event.attempt) for event in events_of(run) if isinstance(event, events.StepFinished)]
    assert done == [(step, 1) for step in range(1, STEPS + 1)]
    rows = "SELECT count(*), count(DISTINCT id) FROM trajectories WHERE trained_at IS NOT NULL GROUP BY step"
    assert run.query(rows) == [(16, 16)] * STEPS
    rows = "SELECT step, count(*) FROM metrics WHERE name IN ('reward/mean', 'timing/wall_s') GROUP BY step"
    assert run.query(rows) == [(step, 2) for step in range(1, STEPS + 1)]
    lines = [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, STEPS + 1))
    twice = "SELECT prompt FROM trajectories GROUP BY prompt HAVING count(DISTINCT group_id) > 1"
    assert run.query(twice) == []


def check_archive(run: Run) -> None:
    """It has each trained trajectory once, with the tokens that were counted, and nothing else is left of them."""
    table = parquet.ParquetDataset(run.path / "archive").read(["trajectory_id", "step", "response_tokens", "sources"])
    rows = sorted(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))
    query = "SELECT id, step, num_tokens FROM trajectories WHERE trained_at IS NOT NULL ORDER BY id"
    assert [(number, step, len(tokens)) for number, step, tokens, _ in rows] == run.query(query)
    assert all(len(tokens) == len(sources) for _, _, tokens, sources in rows)
    assert list((run.path / "tokens").iterdir()) == []


def test_a_run_whose_controller_is_killed_twice_goes_on_with_its_workers(tmp_path: Path) -> None:
    overrides = (*OVERRIDES, "trainer.checkpoint_every=4", "log.archive=parquet")
    with Run.start(tmp_path, hosts_file(tmp_path, ranks=2), *overrides) as first:
        first.until_said(r"^step 5/")
        workers = {process.pid for process in first.marked()} - {first.process.pid}
        killed(first)
        assert {process.pid for process in first.marked()} == workers, "workers live on without a controller"
        with Run.resume(first.path) as second:
            second.until_said(r"^goes on after a controller that died")
            second.until_said(r"^step 12/")
            killed(second)
            with Run.resume(first.path) as third:
                assert third.wait() == 0, third.output
        assert not first.marked(), "the last controller stopped them all"
        assert ledger_is_closed(third.output), third.output
        assert first.num_dropped().keys() <= {"run_complete"}, third.output
        check_steps(first)
        check_archive(first)
        kinds = [type(event) for event in events_of(first)]
        assert (kinds.count(events.RunStarted), kinds.count(events.ControllerRestarted)) == (1, 2)
        assert kinds.count(events.ReplicaJoined) == 1, "no replica had to join again"
        lost = [event for event in events_of(first) if isinstance(event, events.WorkerLost)]
        assert {event.reason for event in lost} <= {"said goodbye"}


def test_a_run_without_workers_redoes_what_was_not_saved_and_is_refused_changed_or_damaged_but_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    overrides = (*SMALL, f"run.steps={STEPS}", "trainer.checkpoint_every=4", "controller.orphan_timeout_s=1")
    overrides += ("trainer.restarts=1", "relay.restarts=1", "rollout.restarts=1")
    with Run.start(tmp_path, hosts_file(tmp_path), *overrides) as first:
        first.until_said(r"^step 6/")
        first.until(first.checkpoints)
        killed(first)
        first.until(lambda: not first.leftovers())  # orphans end and clean up
        _is_refused(first, "goes on as it was, without run.steps=5", "run.steps=5")
        with Run.resume(first.path) as second:
            assert second.wait() == 0, second.output
        _check_that_it_was_redone(first, second)
        (first.path / "run.db").write_bytes(b"damaged" * 1000)
        _is_refused(first, "run.db is damaged")
        last = first.checkpoints()[-1] + 2
        with Run.resume(first.path, "--from-checkpoint", f"run.steps={last}") as third:
            assert third.wait() == 0, third.output
        assert f"step {last}/{last}" in third.output
        assert f"it is kept as {first.path}/run.db.damaged-1" in third.output
        assert first.query("SELECT boot FROM boots") == [(3,)]


def _is_refused(run: Run, reason: str, *overrides: str) -> None:
    with Run.resume(run.path, *overrides) as refused:
        refused.replays = False  # the log may be what it is refused for
        assert refused.wait() == 2, refused.output
    assert reason in refused.output


def _check_that_it_was_redone(first: Run, second: Run) -> None:
    assert "its process ended while no controller watched it" in second.output
    assert ledger_is_closed(second.output), second.output
    assert "resume" not in first.num_dropped(), "what was buffered and leased is still there"
    done = {event.step: event.attempt for event in events_of(first) if isinstance(event, events.StepFinished)}
    assert sorted(done) == list(range(1, STEPS + 1))
    assert 2 in done.values()
