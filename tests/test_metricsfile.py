"""metrics.jsonl after a controller that was killed: one line for each step that the table has."""

import json
import sqlite3
from pathlib import Path

import pytest

from laminar.controller import metricsfile, schema

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory whose table has steps 1 to 3."""
    database = sqlite3.connect(tmp_path / "run.db")
    schema.prepare(database)
    with database:
        for step in (1, 2, 3):
            for name, value in (("reward/mean", step / 10), ("actor/grad_norm", float("nan"))):
                database.execute("INSERT INTO metrics VALUES (?, ?, ?)", (step, name, value))
            database.execute(
                "INSERT INTO trajectories (id, step, trained_at) VALUES (?, ?, ?)", (step, step, 100.0 + step)
            )
    database.close()
    return tmp_path


def line(step: int, reward: float) -> str:
    return json.dumps({"step": step, "at": 1.5, "reward/mean": reward}) + "\n"


def agreed(run: Path, text: str, resumed_step: int = 0) -> list[dict[str, float]]:
    (run / "metrics.jsonl").write_text(text)
    metricsfile.agree(run / "metrics.jsonl", run / "run.db", resumed_step)
    return [json.loads(each) for each in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_file_that_says_the_same_is_left_alone(run: Path) -> None:
    text = line(1, 0.1) + line(2, 0.2) + line(3, 0.3)
    (run / "metrics.jsonl").write_text(text)
    before = (run / "metrics.jsonl").stat().st_ino
    agreed(run, text)
    assert (run / "metrics.jsonl").stat().st_ino == before


def test_a_step_that_the_log_does_not_know_is_taken_out_because_it_will_be_written_again(run: Path) -> None:
    assert [row["step"] for row in agreed(run, line(1, 0.1) + line(2, 0.2) + line(3, 0.3) + line(4, 0.4))] == [1, 2, 3]


def test_a_step_without_a_line_gets_that_of_the_table(run: Path) -> None:
    rows = agreed(run, line(1, 0.1) + line(2, 0.2)[:-9])
    assert rows[1:] == [
        {"step": step, "at": 100.0 + step, "reward/mean": step / 10, "actor/grad_norm": None} for step in (2, 3)
    ]


def test_of_a_step_that_was_done_again_the_last_line_counts(run: Path) -> None:
    rows = agreed(run, line(1, 0.1) + line(2, 0.9) + line(2, 0.2) + line(3, 0.3) + "no json\n[]\n")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_lines_of_steps_in_the_checkpoint_stay_though_a_new_table_does_not_have_them(run: Path) -> None:
    database = sqlite3.connect(run / "run.db")
    with database:
        database.execute("DELETE FROM metrics")
    database.close()
    text = "".join(line(step, 0.1) for step in range(1, 6))
    assert [row["step"] for row in agreed(run, text, resumed_step=3)] == [1, 2, 3]


def test_a_new_run_has_no_file_yet(tmp_path: Path) -> None:
    schema.prepare(sqlite3.connect(tmp_path / "run.db"))
    metricsfile.agree(tmp_path / "metrics.jsonl", tmp_path / "run.db", 0)
    assert not (tmp_path / "metrics.jsonl").exists()
