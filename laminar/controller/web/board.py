"""What every page is told: sections, of which the latest counts, and logs, of which each row is told once.

A page has a `Cursor`: what it knows. `frame` gives it what it does not know yet. A section is encoded once for all pages, and sent
if it has changed; of a log a page that was away gets what is still kept.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from laminar.controller import status
from laminar.controller.telemetry import Telemetry
from laminar.controller.totals import STALENESSES
from laminar.controller.web import sections
from laminar.controller.web.journal import Journal
from laminar.controller.web.lanes import Kept, Lanes
from laminar.core.engine import Core
from laminar.ids import WorkerId

LANES_AT_ONCE = 64  # looked at in one turn of the event loop: about a millisecond
ROWS_AT_ONCE = 4_000  # of a log in one frame: some 150 kB, encoded in about a millisecond
STEPS_KEPT = 2_000
CURVES = (
    "reward/mean", "reward/std", "response_length/mean", "actor/entropy", "actor/grad_norm", "actor/pg_loss", "actor/pg_clipfrac",
    "actor/ppo_kl", "actor/lr", "mismatch_kl/mean", "importance_ratio/mean", "importance_ratio/max", "advantage/zero_fraction",
    "is_truncated/mean", "off_policy/s_train/mean", "off_policy/s_train/max", "perf/generation_tokens_per_s",
    "perf/training_tokens_per_s", "perf/trainer_idle_ratio", "perf/rollout_idle_ratio", "perf/publication_stall_s",
    "perf/rollout_wait_s", "timing/wall_s", "timing/step_s", "timing/trajectory_s/mean", "timing/trajectory_s/max",
    "buffer/depth_groups", "event_loop_lag/max",
)  # fmt: skip
"""Metrics of each step (docs/metrics.md) that the page has."""

Step = tuple[int, list[float | None]]
"""Step and its values in the order of `CURVES`."""


class Cursor:
    """What one page knows."""

    def __init__(self) -> None:
        self.change = 0
        """Sections that changed later are new to it."""
        self.rows: dict[str, int] = {}
        """Log -> number of the row that it is to be told next."""


class Board:
    """Of one run. `busy`: share of the time in which each replica computes."""

    def __init__(
        self, core: Core, telemetry: Telemetry, lanes: Lanes, journal: Journal, busy: Mapping[WorkerId, float]
    ) -> None:
        self._core, self._telemetry, self._lanes, self._busy = core, telemetry, lanes, busy
        self.tokens_per_s = 0.0
        self._sections: dict[str, tuple[int, bytes]] = {}
        """Name -> (number of its last change, JSON)."""
        self._num_changes = 0
        """Of all sections: a page may be told of some before others are looked at."""
        self.steps: Kept[Step] = Kept(STEPS_KEPT)
        self._num_steps = 0
        """Steps of the telemetry that are taken."""
        self._samples_of: tuple[int, ...] = ()
        """What the section `samples` was made of."""
        self._logs: dict[str, Kept[Any]] = {
            "segments": lanes.segments, "moves": lanes.moves, "marks": lanes.marks, "trains": lanes.trains,
            "journal": journal.entries, "routine": journal.routine, "steps": self.steps,
        }  # fmt: skip
        self.put("metric_names", CURVES)
        self.put("age_edges_s", sections.AGE_EDGES_S)

    def put(self, name: str, value: Any) -> None:
        """A section as it is now."""
        data = msgspec.json.encode(value)
        known = self._sections.get(name)
        if known is None or known[1] != data:
            self._num_changes += 1
            self._sections[name] = (self._num_changes, data)

    async def refresh(self) -> None:
        """Look at everything, a little in each turn of the event loop."""
        for part in (self._refresh_progress, self._refresh_buffer, self._refresh_fleet, self._refresh_rest):
            await part()
            await asyncio.sleep(0)

    def frame(self, cursor: Cursor, at: float) -> tuple[bytes, bool]:
        """(JSON of what a page with this cursor does not know, whether there is more); the cursor moves on. `at`: run time."""
        logs, more = {}, False
        for name, log in self._logs.items():
            first, rows = log.since(cursor.rows.get(name, 0), ROWS_AT_ONCE)
            if rows:
                logs[name] = rows
            cursor.rows[name] = first + len(rows)
            more |= cursor.rows[name] < log.end
        changed = {name: msgspec.Raw(data) for name, (change, data) in self._sections.items() if change > cursor.change}
        cursor.change = self._num_changes
        return msgspec.json.encode({"at": round(at, 3), "sections": changed, "logs": logs}), more

    # ---- parts ---------------------------------------------------------------------------------------------

    async def _refresh_progress(self) -> None:
        history = self._telemetry.history
        remaining = max(0, self._core.settings.steps - self._core.state.trainer.step)
        eta_s = round(self._telemetry.seconds_per_step() * remaining, 1)
        self.put("progress", sections.progress(self._core, eta_s, round(self.tokens_per_s)))
        self.put("verdict", sections.verdict_of(self._core, history))
        num_new = self._telemetry.num_steps - self._num_steps
        for row in history[-num_new:] if num_new else ():
            self.steps.add((int(row["step"]), [row.get(name) for name in CURVES]))
        if num_new:
            self._num_steps += num_new
            self.put("metrics", history[-1])
            self.put("staleness", staleness(self._telemetry))

    async def _refresh_buffer(self) -> None:
        ages = sections.Ages(self._core)
        for some in ages.parts():
            ages.count(some)
            await asyncio.sleep(0)
        self.put("buffer", sections.buffer(self._core, ages))
        state = self._core.state
        seen = (len(state.groups), len(state.buffer), state.trainer.step, next(reversed(state.buffer), 0))
        if seen != self._samples_of:
            self._samples_of = seen
            self.put("samples", sections.samples(state))

    async def _refresh_fleet(self) -> None:
        fleet = sections.Fleet(self._core, self._lanes)
        for begin in range(0, len(self._lanes.names), LANES_AT_ONCE):
            fleet.look(begin, begin + LANES_AT_ONCE, self._busy)
            await asyncio.sleep(0)
        self.put("lanes", fleet.fixed)
        self.put("fleet", {**fleet.columns, "reasons": fleet.reasons})

    async def _refresh_rest(self) -> None:
        self.put("ledger", sections.books(self._core))
        self.put("relays", sections.relays(self._core, self._telemetry.relays))
        self.put("repack", sections.repack(self._core.state))
        self.put("operator", status.operator(self._core.state))


def staleness(telemetry: Telemetry) -> dict[str, Any]:
    """The three histograms of the last steps together: [[trainer steps, trajectories], …]."""
    sums: dict[str, dict[int, int]] = {name: {} for name in STALENESSES}
    for step in telemetry.staleness:
        for name, counts in step.items():
            for value, num in counts.items():
                sums[name][value] = sums[name].get(value, 0) + num
    return {"steps": len(telemetry.staleness), **{name: sorted(counts.items()) for name, counts in sums.items()}}
