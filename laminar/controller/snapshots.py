"""When the state of the core is written to the log, so that a controller that takes over replays only what came after."""

import asyncio
from collections.abc import Callable

from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.core import events

EVENTS = 16_384  # in a long step: a take-over replays no more than about so many, some 60 µs each
REST_S = 0.25  # after the end of a step, whose rows have held up the loop: what came in meanwhile has its turn first


class Snapshots:
    """`body`: all of a controller that is to be kept, now."""

    def __init__(self, runtime: Runtime, log: EventLog, body: Callable[[], bytes]) -> None:
        self._runtime, self._log, self._body = runtime, log, body
        self._kept = 0
        """The last event of which there is a snapshot."""
        self._is_due = False

    def settled(self, event: events.AnyEvent) -> None:
        """Called after the actions of each event: see to a snapshot where one is due, at the first event without delay."""
        if isinstance(event, events.RunStarted | events.ControllerRestarted):
            self._write()
        elif not self._is_due and (isinstance(event, events.StepFinished) or event.seq - self._kept >= EVENTS):
            self._is_due = True
            self._runtime.own(self._write_rested(), "snapshot")

    async def _write_rested(self) -> None:
        await asyncio.sleep(REST_S)
        self._is_due = False
        self._write()

    def _write(self) -> None:
        if not self._runtime.crashed:
            self._kept = self._runtime.seq
            self._log.snapshot(self._kept, self._body())
