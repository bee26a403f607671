"""The last screen, from real databases."""

import re
import sqlite3
from pathlib import Path

import pytest

from laminar.controller.eventlog import EventLog
from laminar.controller.summary import summarize
from laminar.core.records import Evaluation, State
from laminar.ids import Version

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory whose name needs quoting, with an empty database and a checkpoint."""
    run = tmp_path / "it's 50% done?"
    (run / "checkpoints" / "step-8").mkdir(parents=True)
    log = EventLog(run / "run.db", 0.01)
    log.begin_boot(1.0, 1, "here", 0)
    log.close()
    return run


def insert(run: Path, statement: str, *rows: tuple) -> None:
    database = sqlite3.connect(run / "run.db")
    with database:
        database.executemany(statement, rows)
    database.close()


def add_metric(run: Path, name: str, values: list[float]) -> None:
    insert(run, "INSERT INTO metrics VALUES (?, ?, ?)", *((step, name, value) for step, value in enumerate(values, 1)))


def finished_state() -> State:
    state = State(finished="completed")
    state.trainer.step = 8
    state.ledger.trajectories.total, state.ledger.trajectories.committed = 10, 7
    state.ledger.trajectories.dropped = {"reward_error": 2, "stopped": 1}
    state.ledger.tokens.total = state.ledger.tokens.committed = 500
    return state


def test_reward_accuracy_speed_staleness_ledger_and_what_to_do_next(run: Path) -> None:
    add_metric(run, "reward/mean", [0.1, 0.2, 0.3, 0.5, 0.5, 0.8, 0.8, 0.8])
    add_metric(run, "timing/wall_s", [9.0] + [1.0] * 7)
    add_metric(run, "perf/generation_tokens_per_s", [1000.0] * 8)
    add_metric(run, "perf/training_tokens_per_s", [500.0] * 8)
    add_metric(run, "perf/trainer_idle_ratio", [0.25] * 8)
    add_metric(run, "perf/rollout_idle_ratio", [0.5] * 8)
    add_metric(run, "perf/publication_stall_s", [0.02] * 8)
    add_metric(run, "perf/rollout_wait_s", [0.01] * 8)
    insert(
        run,
        "INSERT INTO trajectories (id, s_gen, residence, s_train, trained_at) VALUES (?, ?, ?, ?, ?)",
        (1, 0, 0, 0, 5.0),
        (2, 1, 0, 1, 5.0),
        (3, 1, 1, 2, 5.0),
        (4, 9, 9, 18, None),
    )
    insert(run, "INSERT INTO alarms VALUES (?, ?, ?)", (1.0, "sampler", "a"), (2.0, "sampler", "b"))
    state = finished_state()
    state.evaluations = [
        Evaluation(id=1, name="before", version=Version(0, 0), done=True, accuracy=0.25, score=0.5, num_prompts=64),
        Evaluation(id=2, name="after", version=Version(8, 0), done=True, accuracy=0.75, score=0.875, num_prompts=64),
    ]
    text = summarize(run, state, 60.0)
    for line in (
        "run completed at step 8",
        "0.200 → 0.800",
        "0.250 → 0.750  (on 64 held-out prompts)",
        "0.500 → 0.875",
        "1,000 tokens/s, training 500 tokens/s, 1.00 s per step",
        "trainer 25%, rollouts 50%; publication stall 20.0 ms per step, weight pull 10.0 ms",
        "s_gen            0: 1  1: 2\n",
        "s_train          0: 1  1: 1  2: 1\n",
        "sampler × 2: b",
        "10 drawn = 7 committed + 2 dropped (reward_error) + 1 dropped (stopped)  [closed]",
        "500 received = 500 committed  [closed]",
        "run.steps=16",
    ):
        assert line in text
    assert len(text.splitlines()) <= 24, "one screen"
    insert(run, "INSERT INTO gone VALUES ('trajectories', ?)", (77,))
    assert "steps behind, without 77 older ones, whose records have left (log.max_mib)\n" in summarize(run, state, 60.0)


def test_what_became_of_the_trajectories_of_lost_replicas(run: Path) -> None:
    state = finished_state()
    assert "lost replicas" not in summarize(run, state, 1.0)
    state.num_failovers.same_version, state.num_failovers.relay, state.num_failovers.restarted = 12, 3, 2
    assert (
        "lost replicas      their trajectories went on: 12 on another replica of their version,"
        " 3 under their version pulled from the relay, 2 from the beginning" in summarize(run, state, 1.0)
    )


def test_a_run_that_never_trained_says_so_without_numbers(run: Path) -> None:
    text = summarize(run, State(), 3.0)
    assert text.startswith("run not finished at step 0\n")
    assert "nan" not in text


def test_an_evaluation_that_was_not_repeated_leaves_a_dash(run: Path) -> None:
    state = State(finished="stopped")
    state.evaluations = [
        Evaluation(id=1, name="before", version=Version(0, 0), done=True, accuracy=0.25, num_prompts=6)
    ]
    assert "0.250 → –  (on 6 held-out prompts)" in summarize(run, state, 3.0)


def test_books_that_do_not_balance_are_called_so(run: Path) -> None:
    state = finished_state()
    state.ledger.trajectories.committed -= 1
    text = summarize(run, state, 3.0)
    assert text.count("[NOT CLOSED]") == 1


def test_the_commands_to_go_on_can_be_typed(run: Path) -> None:
    text = summarize(run, finished_state(), 3.0)
    quoted = "'" + str(run).replace("'", "'\"'\"'") + "'"
    assert f"--resume {quoted} run.steps=16" in text
    assert re.search(rf"sqlite3 {re.escape(quoted)}/run\.db ", text)


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_a_database_that_cannot_be_read_costs_its_part_only(run: Path, damage: str) -> None:
    (run / "run.db").unlink() if damage == "missing" else (run / "run.db").write_bytes(b"x" * 5000)
    text = summarize(run, finished_state(), 3.0)
    assert "cannot be read" in text
    assert "10 drawn = 7 committed" in text


def test_a_run_without_a_checkpoint_is_not_offered_for_resuming(run: Path) -> None:
    (run / "checkpoints" / "step-8").rmdir()
    assert "--resume" not in summarize(run, finished_state(), 3.0)
