"""OpenTelemetry traces, received as a collector receives them: OTLP over HTTP."""

import asyncio
import contextlib
import http.server
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from laminar.controller import otel
from laminar.core.records import Timings, Trajectory
from laminar.ids import GroupId, PromptId, TrajectoryId, WorkerId
from tests.recorded_world import eventful

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parent.parent
TRAINER = WorkerId("trainer-0/0")
RUN = {"run": "my-run", "run_id": "my-run-1", "boot": 1}


class Collector:
    """What arrived at `/v1/traces`."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        requests = self.requests

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Nothing more is heard."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        found = [s for r in self.requests for of in r.resource_spans for scope in of.scope_spans for s in scope.spans]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def resource(self) -> dict[str, Any]:
        return attributes(self.requests[0].resource_spans[0].resource)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100000")
    yield collector
    collector.stop()


def start(share: float = 1.0, say: Callable[[str], None] = pytest.fail) -> otel.Traces:
    traces = otel.start(os.environ, share, say, **RUN)
    assert traces is not None
    return traces


def spans_of(directory: Path) -> Counter[str]:
    with contextlib.closing(sqlite3.connect(directory / "run.db")) as database:
        kinds = dict(database.execute("SELECT kind, count(*) FROM spans WHERE kind != 'decode' GROUP BY kind"))
        (moves,) = database.execute("SELECT count(*) FROM moves").fetchone()
        (trajectories,) = database.execute("SELECT count(*) FROM trajectories WHERE queued_at IS NOT NULL").fetchone()
    kinds["train_step"] = kinds.pop("train")
    return Counter(kinds, move=moves, trajectory=trajectories)


async def test_what_the_database_has_of_a_run_arrives_as_traces(tmp_path: Path, collector: Collector) -> None:
    traces = start()
    async with eventful(tmp_path, traces) as world:
        redone = len(world.telemetry.history) - world.core.settings.steps
    await traces.close()
    counts = Counter(span.name for span in collector.spans)
    known = spans_of(tmp_path)
    assert min(known.values()) > 0
    assert {name: counts[name] for name in known if name != "trajectory"} == known - Counter(
        trajectory=known["trajectory"]
    )
    assert counts["trajectory"] >= known["trajectory"], "a row is replaced when its step is done again, a trace is not"
    assert redone > 0
    assert collector.resource().items() >= {
        "service.name": "laminar", "laminar.run": "my-run", "laminar.boot": 1
    }.items()  # fmt: skip


async def test_a_step_its_publication_and_the_pulls_of_it_are_one_trace(collector: Collector) -> None:
    traces = start()
    traces.span(TRAINER, "train", 10.0, 12.5, "s3")
    traces.span(TRAINER, "publish", 12.5, 12.75, "v3.b1")
    traces.span(WorkerId("rollout-0"), "pull", 13.0, 13.1, "v3.b1")
    traces.span(TRAINER, "checkpoint", 12.6, 15.0, "s3")
    traces.span(WorkerId("rollout-0"), "pull", 13.0, 13.1, "v9")
    await traces.close()
    by_name = {
        span.name: span for span in collector.spans if span.trace_id == collector.named("train_step")[0].trace_id
    }
    assert by_name.keys() == {"train_step", "publish", "pull", "checkpoint"}
    assert by_name["publish"].parent_span_id == by_name["train_step"].span_id
    assert by_name["pull"].parent_span_id == by_name["publish"].span_id
    assert by_name["checkpoint"].parent_span_id == by_name["train_step"].span_id
    assert attributes(by_name["train_step"]) == {"laminar.worker": TRAINER, "laminar.step": 3}
    assert attributes(by_name["pull"])["laminar.version"] == "v3.b1"
    assert by_name["train_step"].end_time_unix_nano - by_name["train_step"].start_time_unix_nano == 2_500_000_000
    [orphan] = [span for span in collector.named("pull") if span is not by_name["pull"] and not span.parent_span_id]
    assert attributes(orphan)["laminar.version"] == "v9"


def trajectory(number: int, **times: float) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(number), group=GroupId(1), prompt=PromptId(4), sibling=0, seed=0, step=3, num_tokens=7,
        reward=0.5, finish_reason="stop", timings=Timings(**times),
    )  # fmt: skip


async def test_a_trajectory_is_a_trace_of_its_phases_and_points_to_its_step(collector: Collector) -> None:
    traces = start()
    traces.span(TRAINER, "train", 6.0, 8.0, "s3")
    done = trajectory(1, queued=1.0, first_token=1.5, finished=3.0, rewarded=4.0, sampled=6.0, trained=8.0)
    traces.trajectory(done, 8.0)
    await traces.close()
    [root] = collector.named("trajectory")
    phases = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert [(span.name, (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9) for span in phases] == [
        ("queue", 0.5), ("generate", 1.5), ("reward", 1.0), ("buffer", 2.0), ("train", 2.0)
    ]  # fmt: skip
    assert [link.span_id for link in root.links] == [collector.named("train_step")[0].span_id]
    assert attributes(root).items() >= {"laminar.trajectory": "t0.1", "laminar.reward": 0.5, "laminar.step": 3}.items()


async def test_a_dropped_trajectory_ends_when_it_is_dropped_and_one_that_never_began_is_none(
    collector: Collector,
) -> None:
    traces = start()
    dropped = trajectory(1, queued=1.0, first_token=2.0)
    dropped.dropped = "stale"
    traces.trajectory(dropped, 5.0)
    traces.trajectory(trajectory(2), 5.0)
    await traces.close()
    [root] = collector.named("trajectory")
    assert (root.end_time_unix_nano, attributes(root)["laminar.dropped"]) == (5_000_000_000, "stale")
    assert [span.name for span in collector.spans if span.parent_span_id] == ["queue"]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.25, 150, 350), (1.0, 1000, 1000)])
async def test_a_share_of_the_trajectories_is_exported_always_the_same(
    collector: Collector, share: float, least: int, most: int
) -> None:
    seen = []
    for _ in range(2):
        collector.requests.clear()
        traces = start(share)
        for number in range(1000):
            traces.trajectory(trajectory(number, queued=1.0), 2.0)
        await traces.close()
        seen.append({attributes(span)["laminar.trajectory"] for span in collector.spans})
    assert seen[0] == seen[1]
    assert least <= len(seen[0]) <= most


async def test_parents_are_forgotten_oldest_first(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "PARENTS_MAX", 3)
    traces = start()
    for step in range(10):
        traces.span(TRAINER, "train", 1.0, 2.0, f"s{step}")
    assert list(traces._parents) == ["s7", "s8", "s9"]
    await traces.close()


# ---- what can be wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "True"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_exported_unless_the_environment_asks_for_it(environ: dict[str, str]) -> None:
    assert otel.start(environ, 1.0, pytest.fail) is None


def test_a_controller_that_exports_nothing_imports_nothing_of_opentelemetry() -> None:
    code = "import sys, laminar.controller.app; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "grpc is asked for"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000000", "one of the OTEL_ variables cannot work: max_export_batch_size"),
    ],
)
def test_a_variable_that_cannot_work_is_said_and_the_run_goes_on_without(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(name, value)
    said: list[str] = []
    assert otel.start(os.environ, 1.0, said.append) is None
    assert len(said) == 1
    assert said[0].startswith("traces are not exported: ")
    assert told in said[0]


def test_a_missing_library_is_said(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    said: list[str] = []
    assert otel.start(os.environ, 1.0, said.append) is None
    assert said == [
        "traces are not exported: OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is missing: install laminar-rl[otel]"
    ]


async def test_an_endpoint_that_is_not_there_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    said, told = list[str](), asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    traces = start(say=say)
    traces.span(TRAINER, "train", 1.0, 2.0, "s1")
    await asyncio.wait_for(told.wait(), 30)
    traces.span(TRAINER, "train", 1.0, 2.0, "s2")
    await traces.close()
    assert len(said) == 1
    assert said[0].startswith("alarm: traces-not-exported: ")


async def test_an_endpoint_that_never_answers_holds_up_neither_spans_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel, "CLOSE_S", 0.2)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it listens, and accepts nothing
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        traces = start(say=said.append)
        for step in range(1000):
            traces.span(TRAINER, "train", 1.0, 2.0, f"s{step}")
        await traces.close()
        await asyncio.sleep(0)
    assert [text for text in said if "Queue full" in text] == said
    assert len(said) == 1
