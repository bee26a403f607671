"""The HTTP routes for people: what they may look at and ask for while a run goes on."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from laminar.controller.channels import Channels
from laminar.controller.runtime import Runtime
from laminar.core import events, fleet
from laminar.ids import WorkerId


class Operator:
    """Answers from the state of now; what is asked for becomes an event in the log."""

    def __init__(
        self,
        runtime: Runtime,
        channels: Channels,
        *,
        status: Callable[[], dict[str, Any]],
        why_stalled: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._runtime, self._channels = runtime, channels
        self._status_of, self._why_stalled_of = status, why_stalled

    def routes(self) -> list[web.RouteDef]:
        """For a server that lets only those pass who have the run's token."""
        return [
            web.get("/v1/status", self._status),
            web.get("/v1/why-stalled", self._why_stalled),
            web.post("/v1/drain/{worker}", self._drain),
        ]

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status_of())

    async def _why_stalled(self, request: web.Request) -> web.Response:
        return web.json_response(await self._why_stalled_of())

    async def _drain(self, request: web.Request) -> web.Response:
        """This replica finishes what it has and leaves."""
        worker = WorkerId(request.match_info["worker"])
        if worker not in self._channels.workers("rollout"):
            known = ", ".join(self._channels.workers("rollout")) or "none"
            return web.json_response({"error": f"there is no replica {worker!r}; there are: {known}"}, status=404)
        refusal = fleet.why_not_drained(self._runtime.core.state, worker)
        self._runtime.post(events.DrainRequested(worker=worker))
        if refusal:
            return web.json_response({"error": refusal}, status=409)
        return web.json_response({"draining": worker})
