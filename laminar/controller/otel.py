"""OpenTelemetry traces of a run, by OTLP over HTTP to where the standard environment variables say; docs/observability.md.

    train_step ──► publish ──► pull (each replica)          trajectory (a share) ──► queue, generate, reward, buffer, train
              └──► checkpoint                               move

Invariants:
* Off, and nothing of OpenTelemetry imported, unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set.
* Never in the run's way: spans go through the SDK's bounded queue to a thread of its own; a full queue drops, an endpoint that does
  not answer is told of once, and nothing but CLOSE_S at the end of the run waits for it.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

import structlog

from laminar import __version__
from laminar.core.records import Trajectory
from laminar.ids import Version, WorkerId, format_id

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanContext

logger = structlog.get_logger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CLOSE_S = 5.0  # for the last spans; an endpoint that is there takes them in milliseconds
PARENTS_MAX = 1024  # steps and publications that a later span may belong to
PHASES = (
    ("queue", "queued", "first_token"),
    ("generate", "first_token", "finished"),
    ("reward", "finished", "rewarded"),
    ("buffer", "rewarded", "sampled"),
    ("train", "sampled", "trained"),
)
"""(span, the times of a trajectory between which it lies)."""


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for traces."""
    off = (
        environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    )
    return not off and any(environ.get(name) for name in ENDPOINTS)


class Traces:
    """What `laminar.controller.telemetry` tells of, as spans. `share` of the trajectories: 0..1."""

    def __init__(self, processor: "SpanProcessor", share: float, **attributes: str | int) -> None:
        """`attributes` of the resource beside `service.name`, which is OTEL_SERVICE_NAME or laminar. Raises ValueError for a
        sampler or a limit in the environment that the SDK does not take."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        named = {f"laminar.{name}": value for name, value in attributes.items()}
        resource = Resource.create(named)
        if str(resource.attributes.get("service.name")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "laminar"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("laminar", __version__)
        self._share = share
        self.failures: _Failures | None = None
        """Hears what the SDK complains of, until the end."""
        self._parents: dict[str, SpanContext] = {}
        """`s12`: the train step; `v12`: the publication of what it made."""

    def span(self, worker: WorkerId, kind: str, start: float, end: float, what: str) -> None:
        """A worker did something. `what`: `s12` of train steps and checkpoints, else a version."""
        name, parent, own = _PLACES[kind]
        attributes = {"laminar.worker": worker, "laminar.step" if what[0] == "s" else "laminar.version": _number(what)}
        context = self._span(name, start, end, attributes, self._parents.get(parent(what)))
        if own:
            self._parents.pop(what, None)
            self._parents[what] = context
            if len(self._parents) > PARENTS_MAX:
                del self._parents[next(iter(self._parents))]

    def move(
        self, trajectory: int, source: WorkerId, destination: WorkerId, start: float, end: float, tokens: int
    ) -> None:
        """A trajectory went from one replica to another."""
        attributes = {
            "laminar.trajectory": f"t{format_id(trajectory)}", "laminar.source": source, "laminar.destination": destination,
            "laminar.num_tokens": tokens,
        }  # fmt: skip
        self._span("move", start, end, attributes)

    def trajectory(self, t: Trajectory, at: float) -> None:
        """One is over: trained or dropped. `at`: now."""
        times = t.timings
        if not times.queued or crc32(t.id.to_bytes(8, "big")) >= self._share * (1 << 32):
            return
        end = times.trained or at
        step = self._parents.get(f"s{t.step}")
        root = self._span("trajectory", times.queued, end, _of_trajectory(t), links=[step] if step else [])
        for name, begins, ends in PHASES:
            start, stop = getattr(times, begins), getattr(times, ends)
            if start and stop:
                self._span(name, start, stop, {}, root)

    def _span(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Mapping[str, str | int | float],
        parent: "SpanContext | None" = None,
        links: "list[SpanContext] | None" = None,
    ) -> "SpanContext":
        from opentelemetry import trace

        context = trace.set_span_in_context(trace.NonRecordingSpan(parent)) if parent else None
        span = self._tracer.start_span(
            name,
            context=context,
            attributes=attributes,
            links=[trace.Link(link) for link in links or ()],
            start_time=_ns(start),
        )
        span.end(end_time=_ns(end))
        return span.get_span_context()

    async def close(self) -> None:
        """Send what is queued, for at most CLOSE_S."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def shutdown() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shutdown, name="traces-close", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), CLOSE_S)
        except TimeoutError:
            logger.warning("traces.lost", reason=f"the endpoint did not take the last spans within {CLOSE_S:g} s")
        if self.failures is not None:
            self.failures.stop()


def start(
    environ: Mapping[str, str], share: float, say: Callable[[str], None], **attributes: str | int
) -> Traces | None:
    """Traces to where the environment says, if it does. What is wrong with that is said; the run goes on without."""
    if not is_wanted(environ):
        return None
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        say(
            f"traces are not exported: {protocol} is asked for ({PROTOCOLS[1]}), http/protobuf is there (port 4318 by custom)"
        )
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        traces = Traces(BatchSpanProcessor(OTLPSpanExporter()), share, **attributes)
    except ImportError:
        name = next(name for name in ENDPOINTS if environ.get(name))
        say(f"traces are not exported: {name} is set, but OpenTelemetry is missing: install laminar-rl[otel]")
        return None
    except ValueError as error:
        say(f"traces are not exported: one of the OTEL_ variables cannot work: {error}")
        return None
    traces.failures = _Failures(say)
    return traces


class _Failures(logging.Handler):
    """What the SDK's threads complain of: all of it to the controller's log, the first failure to people."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say, self._told = say, False
        self._loop = asyncio.get_running_loop()
        self._library = logging.getLogger("opentelemetry")
        self._library.addHandler(self)
        self._library.propagate = False  # the terminal belongs to the display

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        logger.warning("traces.failed", reason=text)
        if not self._told and (record.levelno >= logging.ERROR or text.startswith("Queue full")):
            self._told = True
            told = f"alarm: traces-not-exported: {text} (told once; logs/controller.log has more)"
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there any more
                self._loop.call_soon_threadsafe(self._say, told)

    def stop(self) -> None:
        """Hear no more."""
        self._library.removeHandler(self)
        self._library.propagate = True


_PLACES: dict[str, tuple[str, Callable[[str], str], bool]] = {
    "train": ("train_step", lambda what: "", True),
    "publish": ("publish", lambda what: f"s{Version.parse(what).step}", True),
    "pull": ("pull", lambda what: what, False),
    "checkpoint": ("checkpoint", lambda what: what, False),
}
"""Kind -> (name of the span, what it belongs to, whether others may belong to it)."""


def _number(what: str) -> str | int:
    return int(what[1:]) if what[0] == "s" else what


def _of_trajectory(t: Trajectory) -> dict[str, str | int | float]:
    known: dict[str, Any] = {
        "trajectory": f"t{format_id(t.id)}",
        "group": f"g{format_id(t.group)}",
        "prompt": t.prompt,
        "attempts": t.attempt,
        "version": t.behavior_version and str(t.behavior_version),
        "num_prompt_tokens": t.num_prompt_tokens,
        "num_tokens": t.num_tokens,
        "finish_reason": t.finish_reason,
        "reward": t.reward if t.timings.rewarded else None,
        "step": t.step or None,
        "dropped": t.dropped,
    }
    return {f"laminar.{name}": value for name, value in known.items() if value not in (None, "")}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
