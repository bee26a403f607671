"""The dashboard of one controller: hears what happens, keeps what pages need, answers them."""

import asyncio
import contextlib
import socket
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, Self

from aiohttp import web

from laminar import __version__, configfile
from laminar.config import Config
from laminar.controller.access import Access
from laminar.controller.effects import Prompts
from laminar.controller.rundir import RunDirectory
from laminar.controller.runtime import Runtime
from laminar.controller.telemetry import Telemetry
from laminar.controller.web.board import CURVES, LANES_AT_ONCE, STEPS_KEPT, Board
from laminar.controller.web.detail import Detail, Rows
from laminar.controller.web.journal import Journal
from laminar.controller.web.lanes import Lanes
from laminar.controller.web.pages import Pages
from laminar.controller.web.records import Records
from laminar.controller.web.stream import Stream
from laminar.controller.web.text import Pieces
from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.ids import WorkerId

BUSY_S = 10.0
RATE_TICKS = 10  # over so many looks the rate of tokens is one


class Dashboard:
    """Called on the event loop."""

    def __init__(
        self,
        core: Core,
        telemetry: Telemetry,
        *,
        fixed: Mapping[str, Any],
        now: Callable[[], float],
        detail: Detail,
        records: Records,
    ) -> None:
        """`fixed`: sections that stay as they are, `run` and `settings`; `now`: run time, seconds."""
        self._core, self._now, self._detail, self._records = core, now, detail, records
        self._lanes, self._journal = Lanes(), Journal()
        self._busy: dict[WorkerId, float] = {}
        self._totals = telemetry.totals
        self._told: dict[WorkerId, tuple[float, float]] = {}
        """Replica -> (seconds of which it had told, of which it was busy) at the last look."""
        self._received: list[tuple[float, int]] = []
        """(when, tokens received by then) of the last looks."""
        self._board = Board(core, telemetry, self._lanes, self._journal, self._busy)
        for name, value in fixed.items():
            self._board.put(name, value)
        self._stream = Stream(self._board, now)

    @classmethod
    def of_run(
        cls,
        run: RunDirectory,
        config: Config,
        runtime: Runtime,
        telemetry: Telemetry,
        prompts: Prompts,
        rows: Rows,
    ) -> Self:
        """With the run's database, the `rows` of its token store, and the tokenizer of its model."""
        core, records = runtime.core, Records(run.database)
        detail = Detail(core, prompts, rows, Pieces(config.model.path), records)
        about = {
            "name": run.name,
            "path": str(run.path.absolute()),
            "host": socket.gethostname(),
            "laminar": __version__,
        }
        fixed = {"run": about, "settings": configfile.changed(config)}
        return cls(core, telemetry, fixed=fixed, now=runtime.now, detail=detail, records=records)

    @staticmethod
    def open_routes(access: Access) -> list[web.RouteDef]:
        """The empty pages, and the way in."""
        return Pages(access).routes()

    def routes(self) -> list[web.RouteDef]:
        """For a server that lets only those pass who have the run's token, or its cookie."""
        return [web.get("/v1/dashboard", self._stream.handle), *self._detail.routes()]

    def observe(self, event: events.AnyEvent) -> None:
        """After the core took an event."""
        self._lanes.observe(self._core, event)

    def on_action(self, action: actions.AnyAction) -> None:
        """Before it is performed."""
        if isinstance(action, actions.AbortAttempts):
            self._lanes.on_abort(self._core, action)

    def alarm(self, name: str, text: str) -> None:
        """People are told."""
        self._journal.alarm(self._now(), name, text)

    async def run(self) -> None:
        """For ever: notice what no event says, and tell open pages."""
        await self._load_past()
        while True:
            await self._stream.pause()
            await self._look()
            if self._stream.is_watched:
                await self._board.refresh()
                self._stream.tick()

    async def close(self) -> None:
        """Pages see the end, then are hung up on."""
        await self._look()
        await self._board.refresh()
        await self._stream.close()

    async def _load_past(self) -> None:
        """What the processes before this one left."""
        with contextlib.suppress(sqlite3.Error):  # the page has less, then; whatever it is, the log has its own alarm
            before = self._core.state.trainer.step + 1
            for step in await asyncio.to_thread(self._records.steps, CURVES, before, STEPS_KEPT // 2):
                self._board.steps.add(step)
            for alarm in await asyncio.to_thread(self._records.alarms):
                self._journal.alarm(*alarm)
            self._board.put("began", await asyncio.to_thread(self._records.began))

    async def _look(self) -> None:
        for begin in range(0, len(self._lanes.names) + 1, LANES_AT_ONCE):
            self._lanes.look(self._core, begin, LANES_AT_ONCE)
            await asyncio.sleep(0)
        at = self._now()
        self._lanes.forget(at)
        self._note_busy()
        self._journal.look(self._core.story, self._core.state.seq)
        self._received = [*self._received[1 - RATE_TICKS :], (at, self._core.state.ledger.tokens.total)]
        (first_at, first), (last_at, last) = self._received[0], self._received[-1]
        self._board.tokens_per_s = (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def _note_busy(self) -> None:
        """A replica's share is a mean over about the last BUSY_S of which it has told."""
        for worker, reported_s in self._totals.reported_s.items():
            busy_s = self._totals.busy_s[worker]
            known_s, known_busy_s = self._told.get(worker, (0.0, 0.0))
            if (passed_s := reported_s - known_s) > 0:
                share, weight = (busy_s - known_busy_s) / passed_s, min(1.0, passed_s / BUSY_S)
                self._busy[worker] = (1 - weight) * self._busy.get(worker, share) + weight * share
                self._told[worker] = reported_s, busy_s
