"""Who may ask the controller, over real HTTP: the token, the cookie of a browser, other origins."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from laminar import wire
from laminar.config import Config
from laminar.controller.channels import Channels
from laminar.controller.server import Server
from laminar.controller.web.pages import Pages

pytestmark = pytest.mark.timeout(60)

TOKEN = "token-of-this-run"


async def _secret(request: web.Request) -> web.StreamResponse:
    if "Upgrade" not in request.headers:
        return web.json_response({"secret": 7})
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.send_str("secret")
    return socket


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server(
        Channels(1), token=TOKEN, run_id="test", config=wire.encode(Config()), heartbeat_s=1.0, timeout_s=5.0
    )
    server.routes = [web.get("/v1/secret", _secret), web.post("/v1/secret", _secret)]
    server.open_routes = Pages(server.access).routes()
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


@pytest.fixture
async def browser(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    """Keeps cookies; its pages are of this server."""
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", cookie_jar=jar) as session:
        yield session


async def enter(browser: aiohttp.ClientSession, token: str = TOKEN, **headers: str) -> int:
    async with browser.post("/login", json={"token": token}, headers=headers) as answer:
        return answer.status


async def status(browser: aiohttp.ClientSession, method: str, path: str, **headers: str) -> int:
    async with browser.request(method, path, headers=headers) as answer:
        return answer.status


async def test_only_pages_without_data_are_there_without_the_token(browser: aiohttp.ClientSession) -> None:
    assert await status(browser, "GET", "/") == 200
    assert await status(browser, "GET", "/static/main.js") == 200
    for path in ("/v1/secret", "/v1/nothing", "/v1/channel", "/nothing"):
        assert await status(browser, "GET", path) == 401, path
    assert await status(browser, "GET", "/v1/secret", Authorization=f"Bearer {TOKEN}") == 200
    assert await status(browser, "GET", "/v1/secret", Authorization="Bearer other") == 401


async def test_the_token_gives_a_browser_a_cookie_that_is_not_the_token_and_that_no_script_can_read(
    browser: aiohttp.ClientSession, server: Server
) -> None:
    async with browser.post("/login", json={"token": f" {TOKEN}\n"}) as answer:
        cookie = answer.cookies[server.access.cookie]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
    assert TOKEN not in cookie.value
    assert len(cookie.value) == 64
    assert await status(browser, "GET", "/v1/secret") == 200
    async with browser.get("/session") as answer:
        assert await answer.json() == {"open": True}


async def test_a_wrong_token_gives_nothing(browser: aiohttp.ClientSession) -> None:
    assert await enter(browser, "other") == 401
    assert await enter(browser, "\ud800") in (400, 401)
    assert await status(browser, "GET", "/v1/secret") == 401
    browser.cookie_jar.update_cookies({"laminar-0": "x"})
    assert await status(browser, "GET", "/v1/secret") == 401
    async with browser.get("/session") as answer:
        assert await answer.json() == {"open": False}


async def test_who_logs_out_is_out(browser: aiohttp.ClientSession) -> None:
    assert await enter(browser) == 200
    assert await status(browser, "POST", "/logout") == 200
    assert await status(browser, "GET", "/v1/secret") == 401


async def test_a_page_of_another_origin_changes_nothing_with_the_cookie(
    browser: aiohttp.ClientSession, server: Server
) -> None:
    assert await enter(browser, Origin="http://evil.example") == 403
    assert await enter(browser, Origin=f"http://127.0.0.1:{server.port}") == 200
    neighbour = "http://127.0.0.1:1"  # the same site, to a browser: ports do not count
    assert await status(browser, "POST", "/v1/secret", Origin=neighbour) == 403
    assert await status(browser, "POST", "/v1/secret", Origin="null") == 403
    assert await status(browser, "POST", "/v1/secret", Origin=f"http://127.0.0.1:{server.port}") == 200
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await browser.ws_connect("/v1/secret", headers={"Origin": neighbour})
    assert refused.value.status == 403
    async with browser.ws_connect("/v1/secret", headers={"Origin": f"http://127.0.0.1:{server.port}"}) as socket:
        assert await socket.receive_str() == "secret"


async def test_the_cookie_opens_no_route_of_workers(browser: aiohttp.ClientSession) -> None:
    assert await enter(browser) == 200
    assert await status(browser, "GET", "/v1/channel") == 401
    assert await status(browser, "POST", "/v1/tokens") == 401


@pytest.mark.parametrize("body", [b"", b"token", b"[]", b'{"token": 7}', b'{"token": "' + b"x" * 100_000 + b'"}'])
async def test_a_login_that_is_none_is_refused_before_much_of_it_is_read(
    browser: aiohttp.ClientSession, body: bytes
) -> None:
    async with browser.post("/login", data=body) as answer:
        assert answer.status == 400
        assert "token" in (await answer.json())["error"]


async def test_a_login_that_comes_in_pieces_is_read_whole(server: Server) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"token": '
        await asyncio.sleep(0.05)  # so that the first is read alone
        yield f'"{TOKEN}"}}'.encode()

    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
        session.post("/login", data=pieces()) as answer,
    ):
        assert answer.status == 200
