"""A headless Chromium for tests and scripts, over its DevTools protocol: open a page, ask it, press keys, take pictures.

Invariants: everything that the page's console says, exceptions and broken content security policy included, is in `Page.console`;
no process and no file is left, whatever happens; every wait is bounded.
"""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0
ANSWER_S = 60.0  # a page on a machine with other things to do
UNTIL_S = 60.0
LOOK_S = 0.05
SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio", "--hide-scrollbars",
    "--remote-debugging-port=0",
)  # fmt: skip
"""No sandbox: the tests run as root in containers, and load pages of this machine only."""


def executable() -> str | None:
    """Where Chromium is; None = it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.console: list[str] = []
        """Errors and warnings."""
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read(), name="browser")

    async def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, ANSWER_S)

    async def start(self) -> None:
        """Listen to its console."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def size(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Of the window, CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    async def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        """Go there."""
        await self.call("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. RuntimeError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = UNTIL_S) -> None:
        """Wait until it is true. AssertionError with what the page says if the time is over first."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(RuntimeError):  # the page is being loaded
                if await self.ask(f"Boolean({expression})"):  # an element itself would come as an empty object
                    return
            if time.monotonic() > deadline:
                text = await self.ask("document.body.innerText")
                raise AssertionError(f"not within {timeout_s:g} s: {expression}\n{text}\n{self.console}")
            await asyncio.sleep(LOOK_S)

    async def text(self, selector: str) -> str:
        """What an element says, as it is shown; empty if there is none."""
        return str(await self.ask(f"document.querySelector({selector!r})?.innerText ?? ''"))

    async def click(self, selector: str) -> None:
        """As a user would, where it is."""
        box = await self.ask(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
            await self.call("Input.dispatchMouseEvent", type=kind, **where)

    async def key(self, name: str, *, code: int = 0, text: str = "") -> None:
        """Press and release a key, for example ``Tab`` (code 9), ``Enter`` (13, text ``\\r``), ``Escape`` (27)."""
        named = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answer(told)
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] in (
                "error",
                "warning",
                "assert",
            ):
                words = [str(each.get("value", each.get("description"))) for each in told["params"]["args"]]
                self.console.append(" ".join(words))
            elif told["method"] == "Runtime.exceptionThrown":
                details = told["params"]["exceptionDetails"]
                self.console.append(str(details.get("exception", details).get("description", details)))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] in ("error", "warning"):
                entry = told["params"]["entry"]
                self.console.append(f"{entry['text']} {entry.get('url', '')}")

    def _answer(self, told: dict[str, Any]) -> None:
        answer = self._answers.pop(told["id"])
        if answer.done():
            return
        if "error" in told:
            answer.set_exception(RuntimeError(str(told["error"])))
        else:
            answer.set_result(told["result"])

    async def close(self) -> None:
        """Hear no more."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@contextlib.asynccontextmanager
async def browser(width: int = 1440, height: int = 900) -> AsyncIterator[Page]:
    """An empty page in a browser of its own, with nothing remembered. RuntimeError if there is no Chromium or it does not start."""
    path = executable()
    if path is None:
        raise RuntimeError("Chromium is not installed")
    with tempfile.TemporaryDirectory(prefix="laminar-browser-", ignore_cleanup_errors=True) as profile:
        arguments = [*SWITCHES, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        process = await asyncio.create_subprocess_exec(
            path, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session, _page(session, port) as page:
                await page.size(width, height)
                yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    """Where it listens for commands, which it writes down."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.returncode is None:
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int((await asyncio.to_thread(file.read_text)).splitlines()[0])
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"Chromium did not start within {START_S:g} s (exit status {process.returncode})")


@contextlib.asynccontextmanager
async def _page(session: aiohttp.ClientSession, port: int) -> AsyncIterator[Page]:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
    async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
        page = Page(socket)
        try:
            await page.start()
            yield page
        finally:
            await page.close()
