"""The HTTP routes for people: what they may look at and ask for while a run goes on."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from msgspec import structs

from laminar.console.language import Function
from laminar.console.place import Reply
from laminar.controller.channels import Channels
from laminar.controller.console import Console
from laminar.controller.runtime import Runtime
from laminar.core import events, fleet
from laminar.ids import WorkerId

DISK_S = 2.0  # twenty times the longest that a commit is put off; people wait for the answer
NOT_ON_DISK = "it is done, but not on disk yet: a controller that took over now would not know of it (`status`: is the disk full?)"


class Line(msgspec.Struct, frozen=True):
    """What is asked of `/v1/console`."""

    line: str


class Operator:
    """Answers from the state of now; what is asked for becomes an event in the log."""

    def __init__(
        self,
        runtime: Runtime,
        channels: Channels,
        *,
        status: Callable[[], dict[str, Any]],
        why_stalled: Callable[[], Awaitable[dict[str, Any]]],
        commands: Mapping[str, Function] | None = None,
    ) -> None:
        """`commands`: of the console, by name, that need more than the core."""
        self._runtime, self._channels = runtime, channels
        self._console = Console(runtime, commands or {})
        self._status_of, self._why_stalled_of = status, why_stalled

    def routes(self) -> list[web.RouteDef]:
        """For a server that lets only those pass who have the run's token."""
        return [
            web.get("/v1/status", self._status),
            web.get("/v1/why-stalled", self._why_stalled),
            web.post("/v1/drain/{worker}", self._drain),
            web.get("/v1/console", self._look),
            web.post("/v1/console", self._line),
        ]

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status_of())

    async def _why_stalled(self, request: web.Request) -> web.Response:
        return web.json_response(await self._why_stalled_of())

    async def _look(self, request: web.Request) -> web.Response:
        return _json(self._console.look())

    async def _line(self, request: web.Request) -> web.Response:
        """`{"line": "fleet"}`: a command of the console."""
        try:
            asked = msgspec.json.decode(await request.read(), type=Line)
        except msgspec.DecodeError as error:
            return web.json_response({"error": f'{error}: write {{"line": "status"}}'}, status=400)
        before = self._runtime.seq
        reply = self._console.answer(asked.line)
        if self._runtime.seq > before and not await self._runtime.reaches_disk(self._runtime.seq, DISK_S):
            reply = structs.replace(
                reply, answer=structs.replace(reply.answer, lines=[*reply.answer.lines, NOT_ON_DISK])
            )
        return _json(reply)

    async def _drain(self, request: web.Request) -> web.Response:
        """This replica finishes what it has and leaves."""
        worker = WorkerId(request.match_info["worker"])
        if worker not in self._channels.workers("rollout"):
            known = ", ".join(self._channels.workers("rollout")) or "none"
            return web.json_response({"error": f"there is no replica {worker!r}; there are: {known}"}, status=404)
        refusal = fleet.why_not_drained(self._runtime.core.state, worker)
        seq = self._runtime.post(events.DrainRequested(worker=worker))
        if refusal:
            return web.json_response({"error": refusal}, status=409)
        await self._runtime.reaches_disk(seq, DISK_S)
        return web.json_response({"draining": worker})


def _json(reply: Reply) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")
