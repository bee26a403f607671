"""Who may ask the controller: whoever has the run's token, and a browser whose user had it.

    Authorization: Bearer TOKEN ──────────────────────────────► everything
    browser ── POST /login {"token": …} ──► cookie ───────────► the routes for people

The cookie holds a value derived from the token, not the token. It is for scripts out of reach (HttpOnly) and stays with this site
(SameSite=Strict). But a site is a host with all its ports: a request with a cookie that can change anything, or opens a WebSocket,
has to come from a page of this very origin.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOGIN_BYTES_MAX = 4096  # whoever sends it has shown no token yet
LOGIN_TIMEOUT_S = 10.0
READING = ("GET", "HEAD")
NEEDED = "the run's token is needed: Authorization: Bearer <token>"


class Login(msgspec.Struct):
    """What the login page sends."""

    token: str


class Access:
    """Of one controller process. `port` is known once it listens."""

    def __init__(self, token: str) -> None:
        self.port = 0
        self._token = token.encode()
        self._derived = hmac.digest(self._token, b"laminar dashboard", hashlib.sha256).hex()

    @property
    def cookie(self) -> str:
        """Its name: cookies of one host are shared by all its ports, and so by the runs on them."""
        return f"laminar-{self.port}"

    def refusal(self, request: web.Request, *, of_people: bool) -> web.Response | None:
        """Why the request is not answered; None = it is. `of_people`: its route is one for which the cookie will do."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(errors="surrogateescape"), self._token):
            return None
        if not (of_people and self._is_derived(request.cookies.get(self.cookie, ""))):
            return web.json_response({"error": NEEDED}, status=401)
        if _only_reads(request) or _same_origin(request):
            return None
        return web.json_response({"error": "a page of another origin may not ask this with the cookie"}, status=403)

    async def login(self, request: web.Request) -> web.Response:
        """Give the cookie to whoever has the token."""
        if not _same_origin(request):
            return web.json_response({"error": "a page of another origin may not log in here"}, status=403)
        try:
            async with asyncio.timeout(LOGIN_TIMEOUT_S):
                body = await _beginning(request)
            token = msgspec.json.decode(body, type=Login).token
        except TimeoutError:
            return web.json_response({"error": f"the token did not come within {LOGIN_TIMEOUT_S:g} s"}, status=408)
        except msgspec.MsgspecError:
            return web.json_response({"error": 'a JSON object {"token": "…"} is expected'}, status=400)
        if not hmac.compare_digest(token.strip().encode(errors="replace"), self._token):
            return web.json_response({"error": "this is not the token of this run"}, status=401)
        response = web.json_response({})
        response.set_cookie(
            self.cookie, self._derived, path="/", httponly=True, samesite="Strict", secure=request.secure
        )
        return response

    async def session(self, request: web.Request) -> web.Response:
        """Whether this browser is in: a page that asks elsewhere first would fail, which browsers show as an error."""
        return web.json_response({"open": self._is_derived(request.cookies.get(self.cookie, ""))})

    async def logout(self, request: web.Request) -> web.Response:
        """Take the cookie back from this browser."""
        response = web.json_response({})
        response.del_cookie(self.cookie, path="/", httponly=True, samesite="Strict")
        return response

    def _is_derived(self, value: str) -> bool:
        return hmac.compare_digest(value.encode(errors="surrogateescape"), self._derived.encode())


async def _beginning(request: web.Request) -> bytes:
    """The body, or about LOGIN_BYTES_MAX of it: one read gives what has come so far."""
    body = b""
    async for chunk in request.content.iter_chunked(LOGIN_BYTES_MAX):
        body += chunk
        if len(body) > LOGIN_BYTES_MAX:
            break
    return body


def _only_reads(request: web.Request) -> bool:
    return request.method in READING and "Upgrade" not in request.headers


def _same_origin(request: web.Request) -> bool:
    """Whether a page of this origin asks; a client that is no browser sends no origin and no cookie of ours."""
    origin = request.headers.get("Origin")
    return origin is None or origin in (f"http://{request.host}", f"https://{request.host}")
