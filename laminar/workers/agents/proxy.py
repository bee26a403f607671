"""The HTTP side: OpenAI's chat completions and completions on a loopback port, a key per trajectory.

Every request is answered: 401 without a key that is in use, 400, 404, 409 or 413 with OpenAI's error body for what cannot be
done, 5xx when the trajectory is over or has failed. A client that goes away aborts its call.
"""

import hmac
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from laminar.errors import StartError
from laminar.workers.agents import answers
from laminar.workers.agents.answers import Answer, Head
from laminar.workers.agents.calls import CallError, parse
from laminar.workers.agents.running import Running
from laminar.workers.agents.session import Session

BODY_BYTES_MAX = 16 << 20  # a context of a million tokens is about 4 MB of text
SHUTDOWN_S = 2.0  # agents are dead by then

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """Serves the sessions in `sessions`, by key. `model` is the only name it answers to."""

    def __init__(self, model: str) -> None:
        self.sessions: dict[str, Session] = {}
        self._model = model
        self._num_calls = 0
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """OPENAI_BASE_URL of this proxy."""
        return f"http://127.0.0.1:{self._port}/v1"

    async def start(self) -> None:
        """Listen on a free loopback port. Raises StartError."""
        app = web.Application(middlewares=[_as_openai_does], client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._plain)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        except OSError as error:
            raise StartError(f"no loopback port for agents: {error}") from error
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections. Safe to call twice."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ---- routes --------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "laminar"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _plain(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        session = self._session(request)
        call = parse(await request.read(), chat=chat, model=self._model)
        self._num_calls += 1
        head = Head(number=self._num_calls, created=int(time.time()), model=self._model, fingerprint=session.version)
        async with session.call(call) as running:
            num_prompt_tokens = session.num_context_tokens
            if call.stream:
                return await self._stream(request, head, running, num_prompt_tokens)
            await running.done()
            return web.json_response(answers.whole(head, call, _answer(running, num_prompt_tokens)))

    async def _stream(
        self, request: web.Request, head: Head, running: Running, num_prompt_tokens: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            first = True
            while not running.finish_reason or first:
                await running.more()
                text, said = running.fresh(), running.said()
                if text or said or running.finish_reason:
                    await response.write(answers.piece(head, running.call, text, first=first, said=said))
                    first = False
            await response.write(answers.last_pieces(head, running.call, _answer(running, num_prompt_tokens)))
        except CallError as error:  # the status has been sent
            await response.write(answers.event(error.body()) + answers.STREAM_END)
        await response.write_eof()
        return response

    def _session(self, request: web.Request) -> Session:
        """Whose key it is. Raises CallError."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            for key, session in self.sessions.items():
                if hmac.compare_digest(key.encode(), given.strip().encode(errors="replace")):
                    return session
        raise CallError(401, "invalid_api_key", "no trajectory has this key: use OPENAI_API_KEY as it was given")


def _answer(running: Running, num_prompt_tokens: int) -> Answer:
    return Answer(
        text=running.text,
        finish_reason=running.finish_reason,
        said=running.said(),
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=len(running.tokens),
    )


@web.middleware
async def _as_openai_does(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's form."""
    try:
        return await handler(request)
    except CallError as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPException as error:
        shown = CallError(error.status, error.reason.lower().replace(" ", "_"), error.text or error.reason)
        return web.json_response(shown.body(), status=error.status)
