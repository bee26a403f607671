"""Why nothing happens: the core's wait-for graph (`laminar.core.waits`) with what the shell has under way, and stacks.

    GET /v1/why-stalled ──┐
    Stalled (the core) ───┴─► waits, cycles ─► tasks, channels, log of this process ─► workers' stacks, for ANSWER_S ─► report

A worker that does not answer in time (it is stopped, or its event loop is) is reported as just that.
"""

import asyncio
import contextlib
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec
import structlog

from laminar import stacks, wire
from laminar.controller import waitreport
from laminar.controller.channels import Channel, Channels
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.core import waits
from laminar.core.turn import Turn
from laminar.ids import WorkerId

logger = structlog.get_logger(__name__)

ANSWER_S = 2.0  # a link answers between two frames
ASKED_MAX = 64  # workers whose stacks are asked for; at 256 replicas one stack looks like the next
TASKS_SHOWN = 200
LOOK_S = 5.0  # how precisely the age of a task is known
REPORTS_MAX = 20  # per run: the first stalls tell most, and a directory must not fill with reports of the hundredth


class WhyStalled:
    """Makes reports; as files in `logs`."""

    def __init__(self, run: Path, runtime: Runtime, channels: Channels, log: EventLog, logs: Path) -> None:
        self._run, self._runtime, self._channels, self._log, self._logs = run, runtime, channels, log, logs
        self._first_seen: weakref.WeakKeyDictionary[asyncio.Task[Any], float] = weakref.WeakKeyDictionary()
        self._num_requests = self._num_reports = 0
        self._answers: dict[tuple[int, WorkerId], asyncio.Future[str]] = {}
        """What was asked and is still waited for: (number of the question, worker)."""

    async def watch_tasks(self) -> None:
        """For ever: note which tasks there are, so that their age is known."""
        while True:
            for task in asyncio.all_tasks():
                self._first_seen.setdefault(task, time.monotonic())
            await asyncio.sleep(LOOK_S)

    def on_stacks(self, channel: Channel, answer: wire.Stacks) -> None:
        """A worker's answer; one that comes too late is of no use."""
        waiting = self._answers.get((answer.request, channel.worker))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.text)

    async def write(self) -> None:
        """Write a report down as text. A disk that does not take it has its own alarm."""
        if self._num_reports >= REPORTS_MAX:
            return
        self._num_reports += 1
        path = self._logs / f"why-stalled-{self._runtime.seq}.txt"
        with contextlib.suppress(OSError):
            path.write_text(waitreport.text(await self.report()))
            logger.warning("run.stalled", report=str(path))

    async def report(self) -> dict[str, Any]:
        """The report as plain data; ages and what is left of a deadline in seconds."""
        core, now = self._runtime.core, self._runtime.now()
        found = waits.waits(Turn(core.state, core.settings, core.story))
        stall = core.state.stall
        return {
            "run": str(self._run),
            "at": now,
            "finished": core.state.finished,
            "stalled_for_s": now - stall.since if stall.told else None,
            "waits": [_row(wait, now) for wait in found],
            "cycles": waits.cycles(found),
            "controller": self._of_controller(),
            "channels": [_of_channel(channel) for channel in self._channels.all()],
            "workers": await self._of_workers(),
        }

    def _of_controller(self) -> dict[str, Any]:
        now = time.monotonic()
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        tasks = [
            {"name": task.get_name(), "age_s": now - self._first_seen.get(task, now), "stack": stacks.of_task(task)}
            for task in running
        ]
        tasks.sort(key=lambda row: -row["age_s"])  # type: ignore[operator]
        return {
            "tasks": tasks[:TASKS_SHOWN],
            "num_tasks": len(tasks),
            "threads": stacks.of_threads(),
            "events_not_on_disk": self._runtime.seq - self._log.durable,
            "actions_waiting_for_the_disk": self._runtime.num_waiting,
            "log_failure": str(self._log.failure or ""),
        }

    async def _of_workers(self) -> dict[str, dict[str, str]]:
        """Their stacks, or why there are none."""
        self._num_requests += 1
        number, loop = self._num_requests, asyncio.get_running_loop()
        asked = [channel for channel in self._channels.all() if channel.socket is not None][:ASKED_MAX]
        answers = {(number, channel.worker): loop.create_future() for channel in asked}
        self._answers |= answers
        for channel in asked:
            channel.put(channel.session.unreliable(wire.AskStacks(request=number)))
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=ANSWER_S)
        finally:
            for key in answers:
                del self._answers[key]
        return {worker: _answer(answer) for (_, worker), answer in answers.items()}


def _answer(answer: "asyncio.Future[str]") -> dict[str, str]:
    if answer.done():
        return {"stacks": answer.result()}
    return {"error": f"no answer within {ANSWER_S:g} s: the process is stopped, or its event loop is blocked"}


def _row(wait: waits.Wait, now: float) -> dict[str, Any]:
    row = msgspec.to_builtins(wait)
    return {
        **{key: row[key] for key in ("who", "what", "on", "ends")},
        "for_s": max(0.0, now - wait.since) if wait.since else None,
        "given_up_in_s": wait.deadline - now if wait.deadline else None,
    }


def _of_channel(channel: Channel) -> dict[str, Any]:
    return {
        "worker": channel.worker,
        "connected": channel.socket is not None,
        "not_acknowledged_frames": channel.session.num_pending,
        "not_acknowledged_bytes": channel.session.pending_bytes,
        "waiting_for_the_disk": len(channel.held),
        "not_yet_written": channel.outgoing.qsize(),
        "heard_and_not_on_disk": len(channel.undurable),
    }
