"""The files of the dashboard: the same for every run, so they need no token. They are read once, when the controller starts.

The browser is told to run nothing that is not one of these files: no inline script, no other host.
"""

import hashlib
from pathlib import Path

from aiohttp import web

from laminar.controller.access import Access

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked again every time, and answered with 304: another Laminar may listen here next
}


class Pages:
    """All files under `static/`."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._files = {
            path.relative_to(STATIC).as_posix(): path.read_bytes()
            for path in sorted(STATIC.rglob("*"))
            if path.suffix in TYPES
        }
        self._tags = {name: hashlib.sha256(body).hexdigest()[:16] for name, body in self._files.items()}

    def routes(self) -> list[web.RouteDef]:
        """For a server that lets everybody pass."""
        return [
            web.get("/", self._index),
            web.get("/static/{name:.+}", self._static),
            web.get("/session", self._access.session),
            web.post("/login", self._access.login),
            web.post("/logout", self._access.logout),
        ]

    async def _index(self, request: web.Request) -> web.Response:
        return self._file(request, "index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return self._file(request, request.match_info["name"])

    def _file(self, request: web.Request, name: str) -> web.Response:
        body = self._files.get(name)
        if body is None:
            return web.Response(status=404, text="there is no such file\n", headers=HEADERS)
        headers = {**HEADERS, "ETag": f'"{self._tags[name]}"'}
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=TYPES[Path(name).suffix], charset="utf-8", headers=headers)
