"""The live driver of the core: inbox → event log → core → effects, on one event loop.

    workers ──► Runtime.post(event) ──► log.append ──► Core.handle ──► actions ──► perform
                     ▲                                                    │ durable_first: wait for the disk
                     └────────── exactly one terminal event ◄─────────────┘

Invariants:
* Events are numbered and logged before the core sees them; an effect that posts an event never re-enters the core.
* Actions are performed in the order in which the core gave them, each once; those that wait for the disk later, in order.
* A core or an effect that raises dumps the state and ends the run, and no action is performed after that.
"""

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from laminar.controller import answers
from laminar.controller.eventlog import EventLog, Frame
from laminar.core import actions, events
from laminar.core.engine import Core
from laminar.errors import LaminarError

logger = structlog.get_logger(__name__)

LAG_INTERVAL_S = 0.1  # often enough to see a loop that blocks for the length of a flush
AWAY_S = 5.0  # a loop that was later than this did not hear what others said; below all time limits that people set


class Runtime:
    """Owns the core. `perform(action)` and `observe(event)` are given by the application."""

    def __init__(
        self, core: Core, log: EventLog, dump_directory: Path, *, began: float = 0.0, not_before: float = 0.0
    ) -> None:
        """`began`, `not_before`: run time of the first and last event of the controllers before this one; the clock may have been
        set back since."""
        self.core = core
        self.finished: asyncio.Future[actions.FinishRun] = asyncio.get_running_loop().create_future()
        self.lag_s_max = 0.0
        """Longest the loop was late since the last reading."""
        self.perform: Callable[[actions.AnyAction], None] = lambda action: None
        self.observe: Callable[[events.AnyEvent], None] = lambda event: None
        """Called between the core and the actions."""
        self.settled: Callable[[events.AnyEvent], None] = lambda event: None
        """Called after an event's actions."""
        self.failed: Callable[[str, BaseException], None] = lambda name, error: None
        """Called when a task that is owned has ended with an error; nobody waits for it."""
        self._log = log
        self._dump_directory = dump_directory
        self._inbox: deque[tuple[events.AnyEvent, Frame | None]] = deque()
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        """Run time for which the timer is set."""
        self._waiting: deque[actions.AnyAction] = deque()
        self._releasing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._wall = max(time.time(), not_before) - time.monotonic()
        self.began = began or self.now()
        """Run time of the first event, seconds since the epoch."""
        self._ticked = 0.0
        """When the loop came by last, by the monotonic clock; 0 = it is not measured yet."""

    def now(self) -> float:
        """Seconds since the epoch, by a clock that never jumps during a run."""
        return self._wall + time.monotonic()

    def start(self) -> None:
        """Begin to measure the loop's lag and to let durable-first actions through."""
        self.own(self._measure_lag(), "lag")

    def own(self, coroutine: "asyncio._CoroutineLike[None]", name: str) -> None:
        """Run it beside the others, until it ends or the runtime closes."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task.failed", task=task.get_name(), exc_info=error)
            self.failed(task.get_name(), error)

    async def close(self) -> None:
        """Stop timers and tasks."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reaches_disk(self, seq: int, timeout_s: float) -> bool:
        """Whether the event is on disk within that time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._log.when_durable(seq)
        except (
            OSError,
            sqlite3.Error,
            LaminarError,
        ):  # TimeoutError is an OSError; the run ends by itself if the log has failed
            return False
        return True

    async def let_through(self, timeout_s: float) -> None:
        """Perform what waits for the disk, if that takes it in time."""
        waiting = [task for task in self._tasks if task.get_name() == "durable"]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)

    @property
    def num_waiting(self) -> int:
        """Actions that wait for the disk."""
        return len(self._waiting)

    @property
    def seq(self) -> int:
        """Number of the last event."""
        return self.core.state.seq

    def post(self, event: events.AnyEvent, frame: Frame | None = None) -> int:
        """Take an event, and note the frame that it came in; the seq it got, or will get if called from an effect."""
        self._note_pause()
        self._inbox.append((event, frame))
        seq = self.core.state.seq + len(self._inbox)
        if not self._draining:
            self._drain()
        return seq

    def _drain(self) -> None:
        if self.crashed:
            self._inbox.clear()
            return
        self._draining = True
        try:
            while self._inbox:
                self._handle(*self._inbox.popleft())
        except Exception as error:  # noqa: BLE001 - whatever it is, the core's state is not to be trusted any more
            self.crash(error)
        finally:
            self._draining = False
        self._set_timer()

    def crash(self, error: Exception) -> None:
        """A broken controller does not limp: the state is dumped and the run ends with `error`."""
        self._inbox.clear()
        self._waiting.clear()
        if not self.finished.done():
            self.finished.set_exception(error)
        logger.error("controller.crashed", state=self._dump(), exc_info=error)

    def _dump(self) -> str:
        path = self._dump_directory / f"core-dump-{self.core.state.seq}.msgpack"
        try:
            path.write_bytes(self.core.snapshot())
        except (OSError, TypeError, ValueError) as error:  # a full disk, or a state that is no data any more
            return f"not written: {error}"
        return str(path)

    @property
    def crashed(self) -> bool:
        """Whether the run ended by an error of the controller itself."""
        return self.finished.done() and self.finished.exception() is not None

    def _handle(self, event: events.AnyEvent, frame: Frame | None) -> None:
        stamped = msgspec.structs.replace(event, seq=self.core.state.seq + 1, at=self.now())
        body = msgspec.msgpack.encode(stamped)
        with (
            self._log.together()
        ):  # a controller that takes over has an event with all rows that were made of it, or without any
            self._log.append(stamped.seq, stamped.at, type(stamped).__name__, body, frame)
            num_decisions = self.core.state.num_decisions
            new = self.core.handle(stamped)
            if answer := answers.answer(self.core.state, new, num_decisions):
                self._log.answered(stamped.seq, answer)
            self.observe(stamped)
            for action in new:
                self._dispatch(action)
            self.settled(stamped)

    # ---- effects -------------------------------------------------------------------------------------------

    def _dispatch(self, action: actions.AnyAction) -> None:
        if self.crashed:
            return
        if action.durable_first and (self._waiting or self._must_wait(action)):
            self._waiting.append(action)
            if not self._releasing:
                self._releasing = True
                self.own(self._release_waiting(), "durable")
        else:
            self._execute(action)

    def _must_wait(self, action: actions.AnyAction) -> bool:
        return action.cause > self._log.durable

    def _execute(self, action: actions.AnyAction) -> None:
        if not isinstance(action, actions.FinishRun):
            self.perform(action)
        elif not self.finished.done():
            self.finished.set_result(action)

    async def _release_waiting(self) -> None:
        """Let actions through as the disk allows; one leaves the queue when it is done, so that none overtakes it."""
        try:
            while self._waiting:
                if self._must_wait(self._waiting[0]):
                    await self._log.when_durable(self._waiting[0].cause)
                if self._waiting:
                    self._execute(self._waiting[0])
                if self._waiting:
                    self._waiting.popleft()
        except Exception as error:  # noqa: BLE001 - the log's failure or an effect's: nothing may follow it
            self.crash(error)
        finally:
            self._releasing = False

    # ---- time ----------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        deadline = self.core.next_deadline() if not self.core.state.finished else None
        if deadline == self._due:
            return  # after most events
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = deadline
        if deadline is not None:
            delay = max(0.0, deadline - self.now())
            self._timer = asyncio.get_running_loop().call_later(delay + 1e-3, self._fire)

    def _fire(self) -> None:
        self._timer = self._due = None
        self.post(events.TimerFired())

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            self._ticked = time.monotonic()
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lag_s_max = max(self.lag_s_max, loop.time() - before - LAG_INTERVAL_S)
            self._note_pause()

    def _note_pause(self) -> None:
        """If the loop comes by after a pause, the core hears of it before anything else: nobody's time is over because of it."""
        now = time.monotonic()
        away_s = now - self._ticked
        if self._ticked and away_s > AWAY_S:
            self._ticked = now
            self.post(events.ControllerPaused(away_s=away_s))

    def take_lag(self) -> float:
        """The longest lag since the last call, seconds."""
        lag, self.lag_s_max = self.lag_s_max, 0.0
        return lag
