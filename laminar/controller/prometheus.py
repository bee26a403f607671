"""`GET /metrics`: the run as Prometheus scrapes it; docs/observability.md has every name.

    state, totals, last step ──► METRICS (a table) ──► families, on the loop ──► text, in a thread

Invariants:
* Read at the scrape: nothing is counted for Prometheus alone, and what is not scraped costs nothing.
* Labels are bounded: replicas and relays that the core knows, enumerations, and at most NAMES_MAX reasons. No label has a version
  (each step would begin new series for ever); versions are values.
* No global registry: another library in this process, or a second run in a test, exports nothing here.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from aiohttp import web
from prometheus_client import exposition, metrics_core

from laminar import __version__
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.controller.telemetry import Telemetry
from laminar.controller.totals import Histogram, Totals, bounded
from laminar.controller.upkeep import MIB
from laminar.core import health, versions
from laminar.core.ledger import is_closed
from laminar.core.records import Account, State
from laminar.core.turn import Turn
from laminar.wire import RelayReport

PREFIX = "laminar_"
STEP_PREFIX = f"{PREFIX}step_"
Family = metrics_core.Metric
Value = float | Histogram
Sample = tuple[tuple[str, ...], Value]
"""Values of the labels, and the value."""


class View(NamedTuple):
    """What a scrape looks at."""

    run: str
    runtime: Runtime
    telemetry: Telemetry
    log: EventLog
    health: Mapping[str, health.Status]

    @property
    def state(self) -> State:
        return self.runtime.core.state

    @property
    def totals(self) -> Totals:
        return self.telemetry.totals


class Metric(NamedTuple):
    """One family. `samples(view)` gives a value per combination of labels."""

    name: str
    """Without PREFIX, and, of a counter, without ``_total``."""
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    help: str
    samples: Callable[[View], Iterable[Sample]]

    @property
    def exported(self) -> str:
        """The name as Prometheus shows it."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    def family(self, view: View) -> Family:
        """With its samples as of now."""
        family: Any = _FAMILIES[self.kind](PREFIX + self.name, self.help, labels=self.labels)
        for labels, value in self.samples(view):
            if isinstance(value, Histogram):
                buckets = [(exposition.floatToGoString(bound), num) for bound, num in value.cumulative()]
                family.add_metric(labels, buckets, value.sum)
            else:
                family.add_metric(labels, value)
        return family


_FAMILIES: dict[str, type[Family]] = {
    "gauge": metrics_core.GaugeMetricFamily,
    "counter": metrics_core.CounterMetricFamily,
    "histogram": metrics_core.HistogramMetricFamily,
}


# ---- what is read ------------------------------------------------------------------------------------------


def _one(read: Callable[[View], float | Histogram | None]) -> Callable[[View], Iterable[Sample]]:
    """A family without labels; nothing while there is no value."""

    def samples(view: View) -> Iterator[Sample]:
        value = read(view)
        if value is not None:
            yield (), value

    return samples


def _each(read: Callable[[View], Iterable[tuple[str, float]]]) -> Callable[[View], Iterable[Sample]]:
    """A family with one label."""
    return lambda view: (((name,), value) for name, value in read(view))


def _place(account: Callable[[State], Account]) -> Callable[[View], Iterable[Sample]]:
    places = ("in_flight", "buffered", "leased", "committed")
    return _each(lambda v: [(place, getattr(account(v.state), place)) for place in places])


def _dropped(account: Callable[[State], Account]) -> Callable[[View], Iterable[Sample]]:
    return _each(lambda v: bounded(account(v.state).dropped.items()).items())


def _trajectories(state: State) -> Account:
    return state.ledger.trajectories


def _tokens(state: State) -> Account:
    return state.ledger.tokens


def _in_states(view: View) -> dict[str, float]:
    counts = dict.fromkeys((state.value for state in health.Health), 0.0)
    for status in view.health.values():
        counts[status.health.value] += 1
    return counts


def _ages(view: View) -> list[float]:
    state = view.state
    return [state.at - state.groups[group].completed_at for group in state.buffer]


def _newest_step(view: View) -> float | None:
    newest = versions.newest(view.state)
    return newest.version.step if newest else None


def _of_replicas(totals: Callable[[Totals], Mapping[Any, float]]) -> Callable[[View], Iterable[Sample]]:
    return _each(lambda v: [(name, totals(v.totals).get(name, 0.0)) for name in v.state.replicas])


def _of_relays(read: Callable[[RelayReport], float]) -> Callable[[View], Iterable[Sample]]:
    return _each(
        lambda v: [(relay, read(v.telemetry.relays[relay])) for relay in v.state.relays if relay in v.telemetry.relays]
    )


METRICS: tuple[Metric, ...] = (
    Metric("run_info", "gauge", ("run", "run_id", "version"), "1; the run, and the version of Laminar", lambda v: [
        ((v.run, v.log.run_id, __version__), 1.0)]),
    Metric("controller_boot", "gauge", (), "Number of this controller process among those of the run", _one(
        lambda v: v.state.boot)),
    Metric("events", "counter", (), "Events that the core has taken", _one(lambda v: v.state.seq)),
    Metric("event_loop_lag_max_seconds", "gauge", (), "Longest delay of the event loop since the last finished step", _one(
        lambda v: v.runtime.lag_s_max)),
    Metric("stalled_seconds", "gauge", (), "How long nothing useful has happened, if that has raised an alarm; else 0", _one(
        lambda v: v.state.at - v.state.stall.since if v.state.stall.told else 0.0)),
    Metric("storage_failed", "gauge", (), "1 while nothing can be written", _one(lambda v: bool(v.state.storage_failure))),
    Metric("file_bytes", "gauge", ("file",), "Size of run.db, its write-ahead log, tokens/ and archive/", _each(
        lambda v: v.log.upkeep.sizes._asdict().items())),
    Metric("alarms", "counter", ("name",), "Alarms raised", _each(lambda v: v.totals.alarms.items())),
    Metric("trainer_step", "gauge", (), "Last step whose updates are applied; goes back when the trainer is restored", _one(
        lambda v: v.state.trainer.step)),
    Metric("trainer_steps_planned", "gauge", (), "Steps of the whole run", _one(lambda v: v.runtime.core.settings.steps)),
    Metric("trainer_ready", "gauge", (), "1 while all ranks are there", _one(lambda v: v.state.trainer.ready)),
    Metric("trainer_busy_seconds", "counter", ("activity",), "Time in which the trainer trained, or stood still to publish or to "
           "save; the rest is idle", _each(lambda v: v.totals.trainer_s.items())),
    Metric("train_steps", "counter", (), "Finished train steps", _one(lambda v: v.totals.steps)),
    Metric("trained_tokens", "counter", (), "Trained tokens, counted once per use in an update", _one(
        lambda v: v.totals.trained_tokens)),
    Metric("checkpoint_step", "gauge", (), "Step of the newest complete checkpoint", _one(
        lambda v: v.state.trainer.checkpoint if v.state.trainer.checkpoint >= 0 else None)),
    Metric("version_newest_step", "gauge", (), "Trainer step of the newest weight version that replicas can pull", _one(
        _newest_step)),
    Metric("publications", "counter", (), "Orders to the trainer to publish its weights", _one(
        lambda v: v.state.num_publications)),
    Metric("replicas", "gauge", ("state",), "Replicas by what they do", _each(lambda v: _in_states(v).items())),
    Metric("replica_version_step", "gauge", ("replica",), "Trainer step of the weight version that the replica holds", _each(
        lambda v: [(r.id, r.version.step) for r in v.state.replicas.values() if r.version])),
    Metric("replica_generating_trajectories", "gauge", ("replica",), "Trajectories that the replica generates", _each(
        lambda v: [(r.id, r.num_generating) for r in v.state.replicas.values()])),
    Metric("replica_kv_use_ratio", "gauge", ("replica",), "Share of the replica's KV cache in use", _each(
        lambda v: [(r.id, r.kv_tokens / max(1, r.kv_tokens_max)) for r in v.state.replicas.values()])),
    Metric("replica_busy_seconds", "counter", ("replica",), "Time in which the replica's engine prefilled or decoded",
           _of_replicas(lambda totals: totals.busy_s)),
    Metric("replica_generated_tokens", "counter", ("replica",), "Response tokens that the replica's model generated",
           _of_replicas(lambda totals: totals.generated_tokens)),
    Metric("worker_restarts", "counter", ("worker",), "How often a lost worker was started again", _each(
        lambda v: v.totals.restarts.items())),
    Metric("weight_pull_wait_seconds", "histogram", (), "How long a replica did not decode because of one weight pull", _one(
        lambda v: v.totals.pull_wait_s)),
    Metric("attempts_failed", "counter", (), "Attempts that replicas reported as failed, data and infrastructure", _one(
        lambda v: v.totals.num_failed)),
    Metric("agent_actions", "counter", ("what",), "What agents did: the counts `agent/…` of docs/metrics.md", _each(
        lambda v: v.totals.agents.items())),
    Metric("buffer_depth_groups", "gauge", (), "Complete groups in the experience buffer", _one(lambda v: len(v.state.buffer))),
    Metric("buffer_age_max_seconds", "gauge", (), "Age of the longest waiting complete group; 0 = there is none", _one(
        lambda v: max(_ages(v), default=0.0))),
    Metric("trajectories_drawn", "counter", (), "Trajectories drawn since the run began", _one(
        lambda v: _trajectories(v.state).total)),
    Metric("trajectories", "gauge", ("place",), "Drawn trajectories by where they are; `in_flight`: not in a complete group yet",
           _place(_trajectories)),
    Metric("trajectories_dropped", "counter", ("reason",), "Drawn trajectories that were dropped", _dropped(_trajectories)),
    Metric("tokens_received", "counter", (), "Response tokens received since the run began", _one(
        lambda v: _tokens(v.state).total)),
    Metric("tokens", "gauge", ("place",), "Received response tokens by where they are now", _place(_tokens)),
    Metric("tokens_dropped", "counter", ("reason",), "Received response tokens that were dropped", _dropped(_tokens)),
    Metric("ledger_closed", "gauge", (), "1 while the ledger of trajectories and that of tokens add up", _one(
        lambda v: is_closed(_trajectories(v.state)) and is_closed(_tokens(v.state)))),
    *(Metric(f"trajectory_{name}_steps", "histogram", (), text, _one(lambda v, name=name: v.totals.staleness[name]))
      for name, text in (
          ("s_gen", "Finish version - behaviour version of trained trajectories"),
          ("residence", "Sample version - finish version of trained trajectories"),
          ("s_train", "The sum of both: how old the weights were that generated what was trained"))),
    Metric("trajectory_seconds", "histogram", (), "From the draw of a trained trajectory to its last token", _one(
        lambda v: v.totals.trajectory_s)),
    Metric("reward_seconds", "histogram", (), "From a trained trajectory's last token to its reward", _one(
        lambda v: v.totals.reward_s)),
    Metric("repack_checks", "counter", (), "Repack checks", _one(lambda v: v.state.repack.num_checks)),
    Metric("repack_moves", "counter", (), "Trajectories moved", _one(lambda v: v.state.repack.num_moves)),
    Metric("repack_moved_tokens", "counter", (), "Response tokens that destinations prefilled again", _one(
        lambda v: v.state.repack.num_moved_tokens)),
    Metric("repack_released_replicas", "counter", (), "Replicas emptied by moves", _one(
        lambda v: v.state.repack.num_released)),
    Metric("failovers", "counter", ("way",), "Trajectories that went on after their replica was lost, and how", _each(
        lambda v: [(way, getattr(v.state.num_failovers, way)) for way in v.state.num_failovers.__struct_fields__])),
    Metric("relay_chain_epoch", "gauge", (), "Grows with every change of the relay chain", _one(lambda v: v.state.chain.epoch)),
    Metric("relay_held_versions", "gauge", ("relay",), "Versions that the relay holds completely", _each(
        lambda v: [(relay.id, len(relay.held)) for relay in v.state.relays.values()])),
    Metric("relay_kept_bytes", "gauge", ("relay",), "Memory of old versions kept as deltas", _of_relays(lambda r: r.kept_bytes)),
    Metric("relay_sent_bytes", "counter", ("relay",), "Bytes of versions that the relay has passed on", _of_relays(
        lambda r: r.sent_bytes)),
    Metric("relay_wire_bytes", "counter", ("relay",), "What went over the wire for these; less, where deltas were sent",
           _of_relays(lambda r: r.wire_bytes)),
)  # fmt: skip
"""Everything but the last step's metrics."""


# ---- the last step -----------------------------------------------------------------------------------------


def of_step(name: str) -> tuple[str, float]:
    """(Prometheus name, factor to its base unit) of a metric of docs/metrics.md: `timing/trajectory_s/max` is
    `laminar_step_timing_trajectory_max_seconds`.
    """
    base, _, statistic = name.rpartition("/") if name.endswith(("/mean", "/max", "/std")) else (name, "", "")
    unit, factor = "", 1.0
    for ending, (its_unit, its_factor) in _UNITS.items():
        if base.endswith(ending):
            base, unit, factor = base.removesuffix(ending), its_unit, its_factor
            break
    unit = unit or ("_steps" if base.startswith("off_policy/") else "_seconds" if base == "event_loop_lag" else "")
    stem = base.removeprefix("laminar/").replace("/", "_")
    return STEP_PREFIX + stem + (f"_{statistic}" if statistic else "") + unit, factor


_UNITS = {"_per_s": ("_per_second", 1.0), "_s": ("_seconds", 1.0), "_mib": ("_bytes", float(MIB))}


def _last_step(history: list[dict[str, float]]) -> Iterator[Family]:
    for name, value in history[-1].items() if history else ():
        exported, factor = of_step(name) if name != "step" else (f"{PREFIX}step", 1.0)
        text = f"{name} of the last finished step (docs/metrics.md)" if name != "step" else "The last finished step"
        yield metrics_core.GaugeMetricFamily(exported, text, value=factor * value)


# ---- the route ---------------------------------------------------------------------------------------------


class Families:
    """A collector of what was read already."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        """As prometheus_client wants it."""
        return self._families


class Prometheus:
    """Of the run called `run`."""

    def __init__(self, run: str, runtime: Runtime, telemetry: Telemetry, log: EventLog) -> None:
        self._run, self._runtime, self._telemetry, self._log = run, runtime, telemetry, log

    def routes(self) -> list[web.RouteDef]:
        """For a server that lets only those pass who have the run's token."""
        return [web.get("/metrics", self._metrics)]

    def families(self) -> Families:
        """Everything, as of now."""
        core = self._runtime.core
        overview = health.overview(Turn(core.state, core.settings, core.story))
        view = View(self._run, self._runtime, self._telemetry, self._log, overview)
        return Families([*(metric.family(view) for metric in METRICS), *_last_step(self._telemetry.history)])

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
        body = await asyncio.to_thread(encode, self.families())
        return web.Response(body=body, headers={"Content-Type": content_type})
