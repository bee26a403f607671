"""The dashboard's files: what the browser is told about them, and that they keep to it."""

import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from laminar.controller.access import Access
from laminar.controller.web.board import CURVES
from laminar.controller.web.lanes import Activity
from laminar.controller.web.pages import POLICY, STATIC, Pages

pytestmark = pytest.mark.timeout(60)

Client = TestClient[web.Request, web.Application]
OWN = sorted(path for path in STATIC.rglob("*") if path.is_file() and "vendor" not in path.parts)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    app = web.Application()
    app.add_routes(Pages(Access("token")).routes())
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_every_file_comes_with_a_policy_that_lets_nothing_else_run(client: Client) -> None:
    for path in ("/", *(f"/static/{each.relative_to(STATIC).as_posix()}" for each in OWN)):
        answer = await client.get(path)
        assert answer.status == 200, path
        assert answer.headers["Content-Security-Policy"] == POLICY
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    for directive in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for"):
        assert directive in POLICY
    assert "unsafe" not in POLICY


async def test_a_file_that_has_not_changed_is_not_sent_again(client: Client) -> None:
    first = await client.get("/static/main.js")
    again = await client.get("/static/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, await again.read()) == (304, b"")


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2fpages.py", "%2e%2e/pages.py", "/etc/passwd", "vendor/uPlot.LICENSE"]
)
async def test_nothing_but_these_files_is_served(client: Client, name: str) -> None:
    assert (await client.get(f"/static/{name}")).status == 404


def test_the_pages_need_nothing_from_elsewhere_and_nothing_inline() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\ssrc=)", page) == []
    assert re.findall(r"\son\w+=|\sstyle=|javascript:", page) == []
    for path in OWN:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://", text), path


def test_text_never_becomes_markup() -> None:
    for path in STATIC.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", path.read_text()
        )


def test_modules_import_what_is_there() -> None:
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "(\./[^"]+)"', path.read_text()):
            assert (STATIC / name).is_file(), f"{path.name} imports {name}"


def test_files_stay_readable_and_what_is_not_ours_has_its_licence() -> None:
    for path in OWN:
        assert path.read_text().count("\n") < 400, path
    assert "MIT" in (STATIC / "vendor" / "uPlot.LICENSE").read_text()


def test_an_installed_package_has_the_files() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["laminar.controller.web"] == ["static/**/*"]


def test_every_metric_that_pages_are_sent_is_drawn_and_no_other() -> None:
    drawn = re.findall(r'\["([a-z_]+/[a-z_/]+)", "[^"]+", "(?:ink|second)"', (STATIC / "curves.js").read_text())
    assert sorted(drawn) == sorted(CURVES)


def test_pages_call_the_activities_of_lanes_by_their_numbers() -> None:
    numbers = dict(re.findall(r"\b([A-Z]+) = (\d+)", (STATIC / "model.js").read_text()))
    assert {name: int(number) for name, number in numbers.items()} == {each.name: each.value for each in Activity}
