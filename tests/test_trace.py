"""`python -m laminar.trace`: read by Perfetto's trace processor, its totals against the metrics; and the wrong thing typed."""

import contextlib
import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from laminar.controller import schema
from laminar.trace import chrome, records
from laminar.trace.__main__ import main
from laminar.trace.timeline import Arrow, Instant, Lane, Slice, Timeline, nested
from tests.recorded_world import EVENTFUL, START, eventful, recorded
from tests.trace_processor import TraceProcessor

pytestmark = pytest.mark.timeout(120)


def rows(directory: Path, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database:
        return database.execute(query, parameters).fetchall()


@pytest.fixture
async def quiet(tmp_path: Path) -> Path:
    """A run in which nothing went wrong, so that no step was done again."""
    async with recorded(tmp_path, EVENTFUL, seed=1) as world:
        world.run()
    return tmp_path


@pytest.fixture
async def busy(tmp_path: Path) -> Path:
    async with eventful(tmp_path):
        pass
    return tmp_path


# ---- what Perfetto makes of it -----------------------------------------------------------------------------

LANES = """SELECT process.name AS process, thread.name AS lane, count(*) AS num, sum(dur) / 1e9 AS seconds FROM slice
JOIN thread_track t ON slice.track_id = t.id JOIN thread USING (utid) JOIN process USING (upid) GROUP BY 1, 2"""


async def test_the_trace_processor_reads_it_whole_and_its_totals_are_those_of_the_metrics(
    quiet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(quiet)]) == 0
    assert "open it at https://ui.perfetto.dev" in capsys.readouterr().out
    with TraceProcessor(quiet / "trace.json") as perfetto:
        assert perfetto.query("SELECT name, value FROM stats WHERE severity != 'info' AND value > 0") == []
        found = {(process, lane): (num, seconds) for process, lane, num, seconds in perfetto.query(LANES)}
        rewards = perfetto.query("SELECT count(*) AS num FROM slice WHERE name = 'reward'")
        [(buffer,)] = perfetto.query(
            "SELECT max(value) AS most FROM counter c JOIN process_counter_track t ON c.track_id = t.id WHERE t.name LIKE 'buffer%'"
        )
    spans = rows(quiet, "SELECT worker, kind, count(*), sum(end - start) FROM spans GROUP BY 1, 2")
    for worker, kind, num, seconds in spans:
        assert found[worker, kind] == (num, pytest.approx(seconds, abs=2e-6 * num)), f"{kind} of {worker}"
    [(num_steps, step_s)] = rows(quiet, "SELECT count(*), sum(value) FROM metrics WHERE name = 'timing/step_s'")
    assert found["trainer-0/0", "train"] == (num_steps, pytest.approx(step_s, abs=1e-5))
    [(pulls, wait_s)] = rows(quiet, "SELECT count(*), sum(busy_s) FROM spans WHERE kind = 'pull'")
    of_pulls = [value for (_, lane), value in found.items() if lane == "pull"]
    assert sum(num for num, _ in of_pulls) == pulls
    assert sum(seconds for _, seconds in of_pulls) == pytest.approx(wait_s, abs=1e-4)
    assert rewards == rows(quiet, "SELECT count(*) FROM trajectories WHERE rewarded_at IS NOT NULL")
    assert buffer == rows(quiet, "SELECT max(buffer_groups) FROM levels")[0][0] > 0


SIDE = """JOIN slice s_{0} ON slice_{0} = s_{0}.id JOIN thread_track t_{0} ON s_{0}.track_id = t_{0}.id
JOIN thread h_{0} ON t_{0}.utid = h_{0}.utid JOIN process p_{0} ON h_{0}.upid = p_{0}.upid"""
ARROWS = f"""SELECT s_out.name AS a, p_out.name AS b, s_in.name AS c, p_in.name AS d FROM flow
{SIDE.format("out")} {SIDE.format("in")}"""


async def test_moves_are_arrows_between_the_replicas(busy: Path) -> None:
    assert main([str(busy), "-o", str(busy / "moves.json")]) == 0
    moves = rows(
        busy, "SELECT source, destination, count(*) FROM moves GROUP BY source, destination, start ORDER BY 1, 2, 3"
    )
    with TraceProcessor(busy / "moves.json") as perfetto:
        assert perfetto.query("SELECT name, value FROM stats WHERE severity != 'info' AND value > 0") == []
        arrows = perfetto.query(ARROWS)
        alarms = perfetto.query("SELECT slice.name AS n FROM slice JOIN thread_track t ON track_id = t.id "
                                "JOIN thread USING (utid) WHERE thread.name = 'alarms'")  # fmt: skip
    expected = [
        (f"{num} to {destination}", source, f"{num} from {source}", destination) for source, destination, num in moves
    ]
    assert sorted(arrows) == sorted(expected)
    assert arrows
    assert len(alarms) == rows(busy, "SELECT count(*) FROM alarms")[0][0] > 0


# ---- ranges ------------------------------------------------------------------------------------------------


def events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    found: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return found


def slices(path: Path, category: str) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["ph"] == "X" and event["cat"] == category]


async def test_a_range_of_steps_has_exactly_these(quiet: Path) -> None:
    out = quiet / "part.json.gz"
    assert main([str(quiet / "run.db"), "--steps", "3-5", "-o", str(out)]) == 0
    trained = slices(out, "train")
    assert [event["name"] for event in trained] == ["train step 3", "train step 4", "train step 5"]
    [(step_s,)] = rows(quiet, "SELECT sum(value) FROM metrics WHERE name = 'timing/step_s' AND step BETWEEN 3 AND 5")
    assert sum(event["dur"] for event in trained) == pytest.approx(1e6 * step_s, abs=10)
    assert main([str(quiet), "--steps", "3", "-o", str(out)]) == 0
    assert [event["name"] for event in slices(out, "train")] == ["train step 3"]


async def test_a_range_of_time_has_what_ended_in_it_also_by_the_epoch(quiet: Path) -> None:
    for begin, end in ((2, 4), (START + 2, START + 4)):
        assert main([str(quiet), "--from", str(begin), "--to", str(end), "-o", str(quiet / "t.json")]) == 0
        ends = [event["ts"] + event["dur"] for event in events(quiet / "t.json") if event["ph"] == "X"]
        assert ends
        assert all(2e6 < each <= 4e6 for each in ends)
        counted = rows(quiet, "SELECT count(*) FROM spans WHERE end > ? AND end <= ?", START + 2, START + 4)[0][0]
        assert len(ends) == counted
        times = [event["ts"] for event in events(quiet / "t.json") if event["ph"] in "Ci"]
        assert times
        assert all(2e6 < each <= 4e6 for each in times)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "5-3"], "--steps 5-3: the log has steps 1 to 8, and the first is not after the last"),
        (["--steps", "7-9"], "--steps 7-9: the log has steps 1 to 8"),
        (["--steps", "all"], "--steps all: a step, or the first and the last one, are expected: 12 or 10-20"),
        (["--steps", "1-2", "--from", "3"], "choose the range by --steps, or by --from and --to"),
        (["--from", "5", "--to", "4"], "--from 5 --to 4: the run is known from 0 to "),
        (["--from", "5000"], "--from 5000 --to "),
        (["-o", "/nowhere/trace.json"], "cannot write /nowhere/trace.json: No such file or directory"),
    ],
)
async def test_a_wrong_range_says_what_there_is(
    quiet: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main([str(quiet), *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not (quiet / "trace.json").exists()


async def test_too_much_for_one_trace_says_how_to_choose_a_part(
    quiet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RECORDS_MAX", 100)
    assert main([str(quiet)]) == 2
    assert (
        "a trace has room for 100: choose a part of it with --steps 10-20 or --from and --to" in capsys.readouterr().err
    )


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    (tmp_path / "run.db").write_bytes(b"not a database" * 100)
    assert main([str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "no such file; give a run's directory, or its run.db" in told
    assert "cannot read" in told


async def test_a_run_that_has_just_begun_and_one_without_the_newer_tables_give_a_trace(tmp_path: Path) -> None:
    async with recorded(tmp_path, EVENTFUL, seed=1) as world:
        world._begin()
    with contextlib.closing(sqlite3.connect(tmp_path / "run.db")) as database, database:
        database.execute("DROP TABLE moves")
        database.execute("DROP TABLE levels")
    assert main([str(tmp_path)]) == 0
    assert {event["name"] for event in events(tmp_path / "trace.json") if event["ph"] == "i"} >= {
        "RunStarted",
        "RelayJoined",
    }


def test_the_tables_that_are_read_exist() -> None:
    for table in ("spans", "moves", "levels", "alarms", "events"):
        assert f"CREATE TABLE IF NOT EXISTS {table} (" in schema.SCHEMA


# ---- the format --------------------------------------------------------------------------------------------


def test_slices_of_a_lane_nest_or_follow_one_another() -> None:
    assert list(nested([(0, 10), (10, 20)])) == [(0, 0, 10), (1, 10, 20)]
    assert list(nested([(2, 5), (0, 10)])) == [(1, 0, 10), (0, 2, 5)]
    assert list(nested([(0, 10), (8, 20)])) == [(0, 0, 10), (1, 10, 20)]
    assert list(nested([(0, 10), (4, 6), (5, 8)])) == [(0, 0, 10), (1, 4, 6), (2, 6, 8)]
    assert list(nested([(3, 3), (3, 9)])) == [(1, 3, 9), (0, 3, 4)]


def test_events_carry_what_the_format_asks_for() -> None:
    out, into = (Slice(Lane(name, "repack"), "x", 11.0, 12.5, {}) for name in ("rollout-10", "rollout-2"))
    timeline = Timeline(
        begin=10.0, end=13.0, slices=[out, into], arrows=[Arrow("move", out, into)],
        instants=[Instant(Lane("controller", "alarms"), "a", 11.0, {"text": "t"})],
    )  # fmt: skip
    found = list(chrome.Trace(timeline, 10.0).events())
    names = [e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == ["controller", "rollout-2", "rollout-10"]
    by_phase = {phase: [event for event in found if event["ph"] == phase] for phase in "Xsfi"}
    assert [(event["ts"], event["dur"]) for event in by_phase["X"]] == [(1_000_000, 1_500_000)] * 2
    [start], [end] = by_phase["s"], by_phase["f"]
    assert (start["id"], start["cat"], start["name"]) == (end["id"], end["cat"], end["name"]) == (1, "move", "move")
    assert end["bp"] == "e"
    assert start["tid"] != end["tid"]
    assert by_phase["i"][0]["s"] == "t"
    tids = {event["tid"]: event["pid"] for event in found if "tid" in event}
    assert len(tids) == 3
