"""`python -m laminar.report`: one file that needs nothing, tells what the database has, at any moment of a run's life."""

import asyncio
import contextlib
import html.parser
import math
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from laminar.controller import rundir
from laminar.controller.summary import summarize
from laminar.core import ledger
from laminar.replay.recording import Recording
from laminar.report import charts, facts
from laminar.report.__main__ import main
from laminar.report.markup import Html, element, joined
from laminar.report.words import duration
from tests.recorded_world import EVENTFUL, RecordedWorld, eventful, recorded

pytestmark = pytest.mark.timeout(60)

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart" / "config.toml"
VOID = {"meta", "br", "line", "rect", "circle", "polyline", "polygon"}


class Page(html.parser.HTMLParser):
    """The elements of a report, which are closed in order, and their texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID or not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def rows(self) -> list[str]:
        """What is written, without spaces around."""
        return [text.strip() for text in self.texts if text.strip()]


def write(directory: Path) -> tuple[str, Page]:
    assert main([str(directory)]) == 0
    text = (directory / "report.html").read_text()
    return text, Page(text)


def rows(directory: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database:
        return database.execute(query).fetchall()


@pytest.fixture
async def busy(tmp_path: Path) -> tuple[Path, RecordedWorld]:
    (tmp_path / "config.toml").write_text(QUICKSTART.read_text())
    async with eventful(tmp_path) as world:
        pass
    return tmp_path, world


async def test_the_report_tells_what_the_run_did(busy: tuple[Path, RecordedWorld]) -> None:
    directory, world = busy
    _, found = write(directory)
    told, state = found.rows(), world.core.state
    assert "completed" in told
    assert "0.500 → 0.750" in told, "rewards of the first and last three steps"
    for name in ("trajectories", "tokens"):
        account = getattr(state.ledger, name)
        assert f"{account.total:,}" in told
        assert f"{account.committed:,}" in told
    for reason, num in state.ledger.trajectories.dropped.items():
        assert told[told.index(f"dropped: {reason}") + 1] == str(num)
    assert told.count("closed") == 2
    for name in ("s_gen", "residence", "s_train"):
        [(mean, most)] = rows(
            directory, f"SELECT avg({name}), max({name}) FROM trajectories WHERE trained_at IS NOT NULL"
        )
        at = told.index(name)
        assert told[at + 1 : at + 3] == [f"{mean:.3f}", str(most)]
    [(slowest,)] = rows(directory, "SELECT max(rewarded_at - queued_at) FROM trajectories")
    assert f"{slowest:,.2f}" in told
    assert any(f"Repack: {state.repack.num_moves} moves" in text for text in told)
    assert world.alarms
    assert all(name in told for name in world.alarms)


async def test_the_file_needs_nothing_else(busy: tuple[Path, RecordedWorld]) -> None:
    text, found = write(busy[0])
    assert text.startswith("<!DOCTYPE html>")
    assert not {tag for tag, _, _ in found.attributes} & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert all(value.startswith("#") for _, name, value in found.attributes if name in ("href", "src"))
    assert not re.search(r"@import|url\(", text)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    assert "prefers-color-scheme: dark" in text
    targets = {value for _, name, value in found.attributes if name == "id"}
    assert {value[1:] for _, name, value in found.attributes if name == "href"} <= targets


async def test_what_others_wrote_is_escaped(busy: tuple[Path, RecordedWorld]) -> None:
    directory, _ = busy
    evil = '</pre><script>alert("x")</script> & \u2028 <!--'
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database, database:
        database.execute("INSERT INTO alarms VALUES (1800000001.0, ?, ?)", (evil, evil))
        database.execute("UPDATE trajectories SET finish_reason = ?, dropped = ?", (evil, evil))
        database.execute("UPDATE spans SET worker = ?", (evil,))
        database.execute("UPDATE boots SET outcome = ?, host = ?", (evil, evil))
    (directory / "hosts.txt").write_text(evil)
    text, found = write(directory)
    assert "<script" not in text
    assert "<!--" not in text
    assert any(evil in told for told in found.texts)


async def test_a_run_that_was_killed_is_reported_as_of_its_last_event(tmp_path: Path) -> None:
    async with recorded(tmp_path, EVENTFUL, seed=1) as world:
        while world.seq < 60:
            world._take(world._begin() if not world.seq else world._next())
            world.at += world.random.random() * 0.1
        state = world.core.state
        assert not state.finished
    _, found = write(tmp_path)
    assert "ended without a word: killed, or its machine died" in found.rows()
    with Recording(tmp_path) as recording:
        told = facts.read(recording)
    assert told.state is not None
    assert told.note == ""
    assert (told.state.seq, told.state.ledger) == (state.seq, state.ledger)
    assert ledger.is_closed(told.state.ledger.trajectories)
    assert told.state.ledger.trajectories.in_flight > 0


async def test_a_run_that_goes_on_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with recorded(tmp_path, EVENTFUL, seed=1) as world:
        world._begin()
        await asyncio.wait_for(world.log_file.when_durable(world.seq), 30)
        monkeypatch.setattr(facts.time, "time", lambda: world.at + 3.0)
        _, found = write(tmp_path)
    assert "going on while this was written" in found.rows()


async def test_a_run_of_which_nothing_is_known_but_that_it_began(tmp_path: Path) -> None:
    async with recorded(tmp_path, EVENTFUL, seed=1):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "run.db")) as database, database:
        for table in ("moves", "levels", "cores", "answers"):
            database.execute(f"DROP TABLE IF EXISTS {table}")
    _, found = write(tmp_path)
    told = found.rows()
    assert "no step has ended" in told
    assert "no replica has pulled weights" in told
    assert any("config.toml beside run.db cannot be read" in text for text in told)


async def test_a_snapshot_that_cannot_be_read_leaves_the_rest(busy: tuple[Path, RecordedWorld]) -> None:
    directory, _ = busy
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database, database:
        database.execute("UPDATE snapshots SET body = x'00'")
    _, found = write(directory)
    told = found.rows()
    assert any("the ledger is not known" in text for text in told)
    assert "0.500 → 0.750" in told


async def test_an_event_that_the_core_refuses_ends_what_is_told(
    busy: tuple[Path, RecordedWorld], monkeypatch: Any
) -> None:
    directory, _ = busy
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database, database:
        last = database.execute("SELECT max(seq) FROM events").fetchone()[0]
        database.execute("UPDATE events SET crc = 0 WHERE seq = ?", (last,))
    _, found = write(directory)
    assert any(text.startswith(f"as of event {last - 1}: event {last} is damaged") for text in found.rows())


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such file; give a run's directory, or its run.db" in capsys.readouterr().err


async def test_a_file_that_cannot_be_written_is_said(
    busy: tuple[Path, RecordedWorld], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(busy[0]), "-o", "/nowhere/report.html"]) == 2
    assert "cannot write /nowhere/report.html: No such file or directory" in capsys.readouterr().err


async def test_without_a_run_the_latest_is_taken(
    busy: tuple[Path, RecordedWorld], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rundir, "latest", lambda directory: busy[0])
    assert main([]) == 0
    assert str(busy[0] / "report.html") in capsys.readouterr().out


# ---- pieces ------------------------------------------------------------------------------------------------


def test_text_is_escaped_and_markup_is_not() -> None:
    inner = element("b", "a < b", title='"')
    assert inner == '<b title="&quot;">a &lt; b</b>'
    assert joined(inner, "<i>", None, 3) == f"{inner}&lt;i&gt;3"
    assert element("rect", x=1.5, stroke_width=2, class_=None) == '<rect x="1.5" stroke-width="2"/>'
    assert isinstance(inner, Html)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 0.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 7310.0, [0.0, 2000.0, 4000.0, 6000.0, 8000.0]),
        (-3.0, 4.0, [-4.0, -2.0, 0.0, 2.0, 4.0]),
    ],
)
def test_axes_have_round_numbers_around_all_values(low: float, high: float, ticks: list[float]) -> None:
    lowest, highest, found = charts.axis(low, high)
    assert found == pytest.approx(ticks)
    assert lowest <= low
    assert highest >= high


def test_long_lines_keep_their_extremes() -> None:
    points = [(float(x), math.sin(x / 50)) for x in range(20_000)]
    points[7777] = (7777.0, 9.0)
    points[12345] = (12345.0, -9.0)
    found = charts.thinned(points)
    assert len(found) <= charts.POINTS_MAX
    assert {(7777.0, 9.0), (12345.0, -9.0)} <= set(found)
    assert found == sorted(found)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    series = charts.Series("x", [(1.0, float("nan")), (2.0, 3.0), (3.0, float("inf"))])
    drawn = charts.lines([series], "train step", band=[(1.0, float("nan"), 2.0)])
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_many_replicas_get_thin_lanes_without_names() -> None:
    rows_ = [(f"rollout-{number}", [charts.Span(0.0, 10.0, number, "v1")]) for number in range(256)]
    drawn = charts.lanes(rows_, 0.0, 10.0, "s")
    height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', drawn)[1])  # type: ignore[index]
    assert height < charts.LANES_HEIGHT_MAX + 50
    assert ">rollout-7<" not in drawn


def test_every_picture_says_what_it_shows() -> None:
    series = charts.Series("reward/mean", [(1.0, 0.25), (9.0, 0.75)])
    assert 'aria-label="reward/mean: 0.25 at 1, 0.75 at 9"' in charts.lines([series], "train step")
    assert 'aria-label="0: 7, 1: 3"' in charts.bars([("0", 7), ("1", 3)], "steps")
    assert 'aria-label="waits: 1.00, generates: 2.50"' in charts.parts([("waits", 1.0), ("generates", 2.5)], 4.0)
    assert 'aria-label="1 lanes over s, from 0 to 10"' in charts.lanes([("a", [])], 0.0, 10.0, "s")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (119.7, "2 min 0 s"),
        (3599.6, "1 h 0 min"),
        (7500.0, "2 h 5 min"),
    ],
)
def test_times_are_rounded_before_they_are_split(seconds: float, words: str) -> None:
    assert duration(seconds) == words


async def test_a_step_is_as_long_as_the_runs_last_screen_says(busy: tuple[Path, RecordedWorld]) -> None:
    directory, world = busy
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database, database:
        database.execute("UPDATE metrics SET value = 99.0 WHERE name = 'timing/wall_s' AND step = 1")
    screen = summarize(directory, world.core.state, 1.0)
    seconds = re.search(r"([\d.]+) s per step", screen)
    assert seconds is not None
    _, found = write(directory)
    told = found.rows()
    assert told[told.index("a step") + 1] == seconds[1]


async def test_records_that_have_left_the_log_are_missed_aloud(busy: tuple[Path, RecordedWorld]) -> None:
    directory, _ = busy
    assert "have left the log" not in write(directory)[0]
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database, database:
        database.execute("INSERT INTO gone VALUES ('trajectories', 12345)")
    words = "Without 12,345 older trajectories, whose records have left the log (log.max_mib)."
    assert write(directory)[1].rows().count(words) == 2
