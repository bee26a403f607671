"""One real run as it is seen from outside: scraped while it goes on, traced, then shown by Perfetto and in a report."""

import http.client
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from e2e import END_S, Run, hosts_file, ledger_is_closed

from laminar.replay.recording import Recording
from laminar.report import facts
from laminar.report.__main__ import main as report
from laminar.trace.__main__ import main as trace
from tests.test_otel import Collector, attributes, spans_of
from tests.test_prometheus import Scrape
from tests.test_report import Page
from tests.test_trace import LANES
from tests.trace_processor import TraceProcessor

pytestmark = pytest.mark.timeout(400)

STEPS = 8


def scrape(run: Run) -> Scrape:
    """As Prometheus does."""
    connection = http.client.HTTPConnection(urlsplit((run.path / "url").read_text()).netloc, timeout=30)
    try:
        token = (run.path / "token").read_text()
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert answer.status == 200
        return Scrape(answer.read().decode())
    finally:
        connection.close()


def check_live(run: Run) -> None:
    """What a scrape says lies between what the status says before and after it."""
    before, found, after = run.status(), scrape(run), run.status()
    assert before["step"] <= found.one("laminar_trainer_step") <= after["step"]
    for account, name in (("trajectories", "trajectories_drawn"), ("tokens", "tokens_received")):
        totals = before["ledger"][account]["total"], after["ledger"][account]["total"]
        assert totals[0] <= found.one(f"laminar_{name}_total") <= totals[1]
    assert found.one("laminar_ledger_closed") == 1
    assert found.by("laminar_replica_version_step", "replica").keys() == {"rollout-0", "rollout-1"}
    assert sum(found.by("laminar_replica_generated_tokens_total", "replica").values()) > 0
    assert found.one("laminar_step_perf_generation_tokens_per_second") > 0
    assert found.one("laminar_run_info", run=run.name, run_id=run_id(run), version="0.1.0") == 1


def run_id(run: Run) -> str:
    [(found,)] = run.query("SELECT run_id FROM boots")
    return str(found)


def test_a_run_as_it_is_seen_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100000")
    overrides = (f"run.steps={STEPS}", "repack.interval_s=0.05", "log.trace_share=1")
    with Run.start(tmp_path, hosts_file(tmp_path, replicas=2), *overrides, config="longtail.toml") as run:
        run.until_said(r"^step 2/", END_S)
        check_live(run)
        assert run.wait() == 0, run.output
    collector.stop()
    assert ledger_is_closed(run.output)
    assert "traces-not-exported" not in run.output
    check_traces(run, collector)
    check_perfetto(run)
    check_report(run)
    assert "error" not in capsys.readouterr().err


def check_traces(run: Run, collector: Collector) -> None:
    counts = Counter(span.name for span in collector.spans)
    known = spans_of(run.path)
    assert {name: counts[name] for name in known} == dict(known)
    assert collector.resource()["laminar.run_id"] == run_id(run)
    pulls = [span for span in collector.named("pull") if attributes(span)["laminar.version"] != "v0"]
    publications = {span.span_id: attributes(span)["laminar.version"] for span in collector.named("publish")}
    assert pulls
    assert all(publications[span.parent_span_id] == attributes(span)["laminar.version"] for span in pulls)


def check_perfetto(run: Run) -> None:
    assert trace([str(run.path)]) == 0
    with TraceProcessor(run.path / "trace.json") as perfetto:
        assert perfetto.query("SELECT name, value FROM stats WHERE severity != 'info' AND value > 0") == []
        found = {(process, lane): (num, seconds) for process, lane, num, seconds in perfetto.query(LANES)}
        [(arrows,)] = perfetto.query("SELECT count(*) AS num FROM flow")
    [(step_s,)] = run.query("SELECT sum(value) FROM metrics WHERE name = 'timing/step_s'")
    assert found["trainer-0/0", "train"] == (STEPS, pytest.approx(step_s, abs=1e-4))
    [(num, wait_s)] = run.query("SELECT count(*), sum(busy_s) FROM spans WHERE kind = 'pull'")
    pulls = [value for (_, lane), value in found.items() if lane == "pull"]
    assert (sum(each[0] for each in pulls), sum(each[1] for each in pulls)) == (num, pytest.approx(wait_s, abs=1e-3))
    ways = run.query("SELECT DISTINCT source, destination, start FROM moves")
    assert arrows == len(ways)


def check_report(run: Run) -> None:
    assert report([str(run.path)]) == 0
    told = Page((run.path / "report.html").read_text()).rows()
    assert "completed" in told
    assert told.count("closed") == 2
    with Recording(run.path) as recording:
        found = facts.read(recording)
    assert found.state is not None
    assert (found.note, found.state.trainer.step) == ("", STEPS)
    [(moves,)] = run.query("SELECT count(*) FROM moves")
    assert found.state.repack.num_moves == moves
    assert found.levels
