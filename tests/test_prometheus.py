"""`GET /metrics`: parsed by Prometheus' own parser and compared with `/v1/status`, `run.db` and the documentation."""

import contextlib
import json
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from laminar import wire
from laminar.controller import prometheus, totals
from laminar.controller.channels import Channels
from laminar.controller.prometheus import METRICS, Prometheus, of_step
from laminar.controller.server import Server
from laminar.controller.status import status_of
from laminar.controller.totals import Histogram
from laminar.ids import WorkerId
from tests.recorded_world import EVENTFUL, RecordedWorld, eventful, recorded
from tests.test_telemetry import documented

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parent.parent
Labels = tuple[tuple[str, str], ...]


class Scrape(dict[tuple[str, Labels], float]):
    """(name, labels) -> value, as Prometheus' parser reads the text."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        for family in self.families.values():
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in self, f"{key} is exported twice"
                self[key] = sample.value

    def one(self, name: str, **labels: str) -> float:
        return self[name, tuple(sorted(labels.items()))]

    def by(self, name: str, label: str) -> dict[str, float]:
        """Value by the one label of a family."""
        return {dict(labels)[label]: value for (found, labels), value in self.items() if found == name}


def scrape(world: RecordedWorld) -> Scrape:
    exporter = Prometheus("my-run", world.runtime, world.telemetry, world.log_file)
    return Scrape(generate_latest(exporter.families()).decode())


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RecordedWorld]:
    async with eventful(tmp_path) as world:
        yield world


async def test_a_scrape_agrees_with_the_status(world: RecordedWorld) -> None:
    found = scrape(world)
    status = json.loads(json.dumps(status_of(world.core, world.telemetry.relays)))
    assert found.one("laminar_trainer_step") == status["step"] == EVENTFUL.steps
    assert found.one("laminar_trainer_steps_planned") == status["steps"]
    assert found.one("laminar_buffer_depth_groups") == status["buffer_groups"]
    for account, drawn in (("trajectories", "trajectories_drawn"), ("tokens", "tokens_received")):
        books = status["ledger"][account]
        assert found.one(f"laminar_{drawn}_total") == books["total"] > 0
        assert found.by(f"laminar_{account}_dropped_total", "reason") == books["dropped"]
        places = found.by(f"laminar_{account}", "place")
        assert places == {place: books[place] for place in ("in_flight", "buffered", "leased", "committed")}
    assert status["ledger"]["trajectories"]["dropped"], "this seed drops something"
    assert found.by("laminar_failovers_total", "way") == status["failovers"]
    states = [replica["state"] for replica in status["replicas"].values()]
    assert {s: n for s, n in found.by("laminar_replicas", "state").items() if n} == {s: states.count(s) for s in states}
    held = {name: replica["version"] for name, replica in status["replicas"].items() if replica["version"]}
    steps = {name: float(version[1:].partition(".")[0]) for name, version in held.items()}
    assert found.by("laminar_replica_version_step", "replica") == steps


async def test_a_scrape_agrees_with_the_database(tmp_path: Path) -> None:
    async with recorded(tmp_path, EVENTFUL, seed=1) as world:
        world.run()
        found = scrape(world)
    with contextlib.closing(sqlite3.connect(tmp_path / "run.db")) as database:
        check_last_step(found, database)
        check_sums(found, database)


def check_last_step(found: Scrape, database: sqlite3.Connection) -> None:
    rows = dict(database.execute("SELECT name, value FROM metrics WHERE step = ?", (EVENTFUL.steps,)))
    assert rows.keys() >= {"reward/mean", "timing/step_s", "off_policy/s_train/max", "perf/trainer_idle_ratio"}
    for name, value in rows.items():
        exported, factor = of_step(name)
        assert found.one(exported) == pytest.approx(factor * value), name


def check_sums(found: Scrape, database: sqlite3.Connection) -> None:
    for name in ("s_gen", "residence", "s_train"):
        counted = f"SELECT {name} FROM trajectories WHERE trained_at IS NOT NULL"
        values = [row[0] for row in database.execute(counted)]
        assert found.one(f"laminar_trajectory_{name}_steps_count") == len(values) > 0
        assert found.one(f"laminar_trajectory_{name}_steps_sum") == sum(values)
        assert found.one(f"laminar_trajectory_{name}_steps_bucket", le="1.0") == sum(value <= 1 for value in values)
    sums = dict(database.execute("SELECT kind, sum(busy_s) FROM spans GROUP BY kind"))
    assert found.one("laminar_weight_pull_wait_seconds_sum") == pytest.approx(sums["pull"])
    assert sum(found.by("laminar_replica_busy_seconds_total", "replica").values()) == pytest.approx(sums["decode"])
    trainer = found.by("laminar_trainer_busy_seconds_total", "activity")
    assert trainer["train"] == pytest.approx(sums["train"])
    assert trainer["publish"] == pytest.approx(sums["publish"])


async def test_steps_that_are_done_again_and_alarms_are_counted(world: RecordedWorld) -> None:
    found = scrape(world)
    assert found.one("laminar_train_steps_total") == len(world.telemetry.history) > EVENTFUL.steps
    names = world.alarms
    assert found.by("laminar_alarms_total", "name") == {name: names.count(name) for name in names}
    assert found.one("laminar_repack_moves_total") == world.core.state.repack.num_moves > 0
    assert found.by("laminar_worker_restarts_total", "worker")["trainer-0"] > 0


OF_THE_RUN = {
    "events", "publications", "trajectories_drawn", "trajectories_dropped", "tokens_received", "tokens_dropped", "repack_checks",
    "repack_moves", "repack_moved_tokens", "repack_released_replicas", "failovers",
}  # fmt: skip
"""Counters that go on after a take-over, as docs/observability.md says; the others begin anew."""


async def test_after_a_take_over_a_counter_goes_on_or_begins_anew(world: RecordedWorld) -> None:
    before = scrape(world)
    world.telemetry.totals = totals.Totals()  # of the new process; the state is restored
    after = scrape(world)
    for metric in (metric for metric in METRICS if metric.kind == "counter"):
        values = {key: value for key, value in before.items() if key[0] == metric.exported}
        kept = {key: after.get(key, 0.0) for key in values}
        assert kept == (values if metric.name in OF_THE_RUN else dict.fromkeys(values, 0.0)), metric.name


async def test_every_exported_family_is_in_the_table_or_a_metric_of_the_last_step(world: RecordedWorld) -> None:
    relay = WorkerId("relay-0")
    world.telemetry.on_message(relay, wire.RelayReport(sent_bytes=7, wire_bytes=3, kept_bytes=2))
    found = scrape(world)
    of_table = {metric.exported.removesuffix("_total"): metric for metric in METRICS}
    of_last = {of_step(name)[0] for name in world.telemetry.history[-1] if name != "step"} | {"laminar_step"}
    assert found.families.keys() == of_table.keys() | of_last
    for name, metric in of_table.items():
        assert found.families[name].type == metric.kind
        labels = {label for sample in found.families[name].samples for label in sample.labels} - {"le"}
        assert labels <= set(metric.labels)
    assert found.one("laminar_relay_wire_bytes_total", relay=relay) == 3


async def test_labels_are_bounded(world: RecordedWorld) -> None:
    for number in range(1000):
        world.core.state.ledger.tokens.dropped[f"reason{number}"] = 1
        world.telemetry.totals.on_alarm(f"alarm{number}")
    found = scrape(world)
    reasons = found.by("laminar_tokens_dropped_total", "reason")
    assert len(reasons) == totals.NAMES_MAX + 1
    assert sum(reasons.values()) == sum(world.core.state.ledger.tokens.dropped.values())
    assert len(found.by("laminar_alarms_total", "name")) == totals.NAMES_MAX + 1
    for metric in METRICS:
        assert not {"version", "step", "group", "trajectory"} & set(metric.labels) or metric.name == "run_info"


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    histogram = Histogram((0.0, 1.0, 4.0))
    histogram.observe_all([0, 1, 1, 2, 4, 5])
    assert histogram.cumulative() == [(0.0, 1), (1.0, 3), (4.0, 5), (float("inf"), 6)]
    assert histogram.sum == 13


async def test_a_run_that_has_not_begun_can_be_scraped(tmp_path: Path) -> None:
    async with recorded(tmp_path, EVENTFUL, seed=1) as world:
        found = scrape(world)
    assert found.one("laminar_trainer_ready") == 0
    assert ("laminar_checkpoint_step", ()) not in found
    assert ("laminar_step", ()) not in found


# ---- names -------------------------------------------------------------------------------------------------

UNITS = {"s": "_seconds", "MiB": "_bytes", "tokens/s": "_tokens_per_second", "trainer steps": "_steps"}


def test_names_of_the_last_step_end_with_the_unit_that_is_documented() -> None:
    names = {name: of_step(name)[0] for name in documented()}
    assert len(set(names.values())) == len(names)
    for name, exported in names.items():
        assert re.fullmatch("laminar_step_[a-z_]+", exported)
        unit = documented()[name][0]
        assert exported.endswith(UNITS.get(unit, "")), f"{name} [{unit}] is exported as {exported}"


def test_the_page_lists_every_family_with_its_kind_labels_and_meaning() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    rows = re.findall(r"^\| `(laminar_\w+)` \| (\w+) \| ([^|]+) \| (.+) \|$", page, re.MULTILINE)
    expected = [
        (metric.exported, metric.kind, ", ".join(f"`{label}`" for label in metric.labels) or "–", metric.help)
        for metric in METRICS
    ]
    assert rows == expected


# ---- the route ---------------------------------------------------------------------------------------------


@pytest.fixture
async def url(world: RecordedWorld) -> AsyncIterator[str]:
    server = Server(Channels(1), token="secret", run_id="r", config=b"", heartbeat_s=1.0, timeout_s=5.0)
    server.routes = Prometheus("my-run", world.runtime, world.telemetry, world.log_file).routes()
    await server.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}/metrics"
    await server.close()


async def get(url: str, **headers: str) -> tuple[int, str, str]:
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, headers=headers) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.text()


async def test_the_route_needs_the_token(url: str) -> None:
    status, _, text = await get(url)
    assert status == 401
    assert "laminar_trainer_step" not in text


async def test_the_route_speaks_prometheus_and_openmetrics(url: str) -> None:
    status, kind, text = await get(url, Authorization="Bearer secret")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert Scrape(text).one("laminar_trainer_step") == 8
    accept = "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"
    status, kind, text = await get(url, Authorization="Bearer secret", Accept=accept)
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(text)}
    assert {"laminar_trainer_step", "laminar_train_steps", "laminar_trajectory_s_train_steps"} <= names


def test_nothing_is_exported_by_the_library_for_itself() -> None:
    assert not [name for name in REGISTRY._names_to_collectors if name.startswith("laminar")]
    assert not hasattr(prometheus, "REGISTRY")
