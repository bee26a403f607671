"""Runs of the fuzz world whose core is driven by a real runtime and log, so that there is a run.db to replay."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from laminar.controller import answers, recovery
from laminar.controller.channels import Kept
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.core.settings import Settings
from tests.core_world import World

SNAPSHOT_EVENTS = 64  # besides those of steps


class RecordedWorld(World):
    """`controller_crashes`: another boot goes on from the log each time. `data_state`: of the checkpoint that it goes on from."""

    BEGAN = 0.0
    """Run time before the first event."""

    def __init__(
        self, directory: Path, settings_: Settings, seed: int, data_state: bytes = b"", **options: Any
    ) -> None:
        super().__init__(settings_, seed, **options)
        directory.mkdir(exist_ok=True)
        self.directory, self.data_state = directory, data_state
        if data_state:
            self.core = Core.resumed(settings_, data_state)
        self.at = self.core.state.at or self.BEGAN
        self.new: list[actions.AnyAction] = []
        self.logs: list[EventLog] = []
        self.runtimes: list[Runtime] = []
        self.boot(continues=False)

    def boot(self, *, continues: bool) -> None:
        """A controller process."""
        if self.logs:
            self.logs[-1].close()
        log = EventLog(self.directory / "run.db", 0.001)
        number = log.begin_boot(self.at, 1, "here", self.core.state.trainer.step, continues=continues)
        log.start(lambda seq: None)
        if continues:
            self.core = Core.restore(self.core.settings, self.core.snapshot())
        runtime = Runtime(self.core, log, self.directory)
        runtime.now = lambda: self.at  # type: ignore[method-assign]
        runtime.perform = self.new.append
        runtime.settled = self._settled
        log.write(*answers.beginning(number, self.core.settings, b"" if continues else self.data_state))
        self.logs.append(log)
        self.runtimes.append(runtime)

    def send(self, event: events.AnyEvent, after: float = 0.0) -> list[actions.AnyAction]:
        self.at += after
        self.seq += 1
        if isinstance(event, events.ControllerRestarted):
            self.boot(continues=True)
        self.new.clear()
        self.runtimes[-1]._must_wait = lambda action: False  # type: ignore[method-assign] - the world answers at once
        self.runtimes[-1].post(event)
        self.actions += self.new
        return list(self.new)

    def _settled(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.RunStarted | events.StepFinished) or event.seq % SNAPSHOT_EVENTS == 0:
            body = recovery.Snapshot(core=msgspec.Raw(self.core.snapshot()), channels=Kept(), relay_addresses={})
            self.logs[-1].snapshot(event.seq, msgspec.msgpack.encode(body))

    async def close(self, outcome: str = "the end") -> None:
        """The log is on disk."""
        for runtime in self.runtimes:
            await runtime.close()
        await asyncio.to_thread(self.logs[-1].close, outcome=outcome)
