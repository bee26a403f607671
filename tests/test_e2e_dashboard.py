"""The dashboard in a real browser: what it shows is what the controller says, whatever a model writes; keys; the end."""

import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from browser import Page, browser, executable
from e2e import QUICKSTART, SMALL, Run
from web_world import TOKEN, World, served

from laminar.core import events
from laminar.ids import TrajectoryId, Version, WorkerId, format_id

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(executable() is None, reason="Chromium is not installed (apt-get install chromium)"),
]

MARKUP = "<script>window.broken=1</script><img src=x onerror='window.broken=1'><b>bold</b>"
UNSEEN = "\u202eturned\x00"

LATE_ANSWER = """(address) => {
  const ask = window.fetch;
  history.replaceState(null, '', address);  // as in the moment before the page hears of it
  window.fetch = async (path, options) => {
    const answer = await ask(path, options);
    if (!path.includes('/replica/')) return answer;
    dispatchEvent(new HashChangeEvent('hashchange'));
    while (!document.getElementById('detail').innerText.includes('Siblings')) await new Promise(requestAnimationFrame);
    setTimeout(() => { window.wasLate = true; }, 200);
    return answer;
  };
}"""
"""What was asked of a replica is answered when a group has been opened since."""

SHOWN = """JSON.stringify({
  step: document.querySelector('[data-figure="step"]').innerText,
  buffer: document.querySelector('[data-figure="buffer"]').innerText.split(' /')[0],
  totals: [...document.querySelectorAll('[data-place="total"]')].map((each) => each.innerText),
  committed: [...document.querySelectorAll('[data-place="committed"]')].map((each) => each.firstChild.data),
  replicas: Object.fromEntries([...document.querySelectorAll('.fleet tbody tr')].map(
    ({cells}) => [cells[0].innerText, [cells[1].innerText === "pulls weights" ? "" : cells[2].innerText, cells[4].innerText]])),
})"""


def said(status: dict[str, Any]) -> dict[str, Any]:
    """The same of `/v1/status`."""

    def replica(told: dict[str, Any]) -> list[str]:
        version = "" if told["state"] == "syncing" else told["version"] or "–"  # the page has what it pulls
        return [version, f"{told['generating']:,}"]

    accounts = [status["ledger"][name] for name in ("trajectories", "tokens")]
    return {
        "step": f"step {status['step']:,}",
        "buffer": f"{status['buffer_groups']:,}",
        "totals": [f"{account['total']:,}" for account in accounts],
        "committed": [f"{account['committed']:,}" for account in accounts],
        "replicas": {name: replica(told) for name, told in sorted(status["replicas"].items())},
    }


async def shown(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await page.ask(SHOWN))
    return found


async def log_in(page: Page, url: str, token: str) -> None:
    """As a person would."""
    await page.open(url)
    await page.until("!document.getElementById('login').hidden")
    await page.click("#token")
    await page.type(token)
    await page.key("Enter", code=13, text="\r")
    await page.until("document.getElementById('connection').innerText === 'live'")


@contextlib.asynccontextmanager
async def opened(world: World) -> AsyncIterator[Page]:
    async with served(world), browser() as page:
        await log_in(page, world.url, TOKEN)
        yield page


async def test_it_shows_what_the_core_has_as_it_changes_and_text_as_text(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.prompts.text = MARKUP + UNSEEN
    async with opened(world) as page:
        await page.until("document.body.innerText.includes('No replica has joined yet.')")
        assert "No train step has finished yet." in await page.text("#curves")
        world.start("r0", "r1")
        await page.until("document.querySelectorAll('.fleet tbody tr').length === 2")
        world.complete_all("r0")
        world.step_with(reward__mean=0.625)
        world.ready(Version(1, 0))
        world.dashboard.alarm("test", MARKUP)
        await page.until("document.querySelector('[data-figure=\"reward\"]').innerText === '0.625'")
        status = await page.ask("fetch('/v1/status').then((answer) => answer.json())")
        assert status["step"] == 1
        assert await shown(page) == said(status)
        assert MARKUP in await page.text("#journal")
        group = next(group for group in world.core.state.groups.values() if group.completed_at)
        world.write(group.id, [5, 6], {group.trajectories[0]: [7, 8, 1]})
        await page.ask(f"location.hash = '#group/g{format_id(group.id)}'")
        await page.until("document.getElementById('detail').innerText.includes('onerror')")
        assert f"{MARKUP}‹U+202E›turned‹U+0000›" in await page.text("#detail pre")
        await page.ask(f"location.hash = '#trajectory/t{format_id(group.trajectories[0])}'")
        await page.until("document.querySelector('#detail .tokens')?.innerText === 'ef<eos>'")
        assert await page.ask("document.querySelector('#detail .tokens span').className") == "p1"
        await page.ask("location.hash = '#replica/r1'")
        await page.until("document.getElementById('detail').innerText.includes('What it has')")
        await page.ask(f"void ({LATE_ANSWER})('#group/g{format_id(group.id)}')")
        await page.until("window.wasLate")
        assert "Siblings" in await page.text("#detail")
        assert await page.ask("window.broken ?? 0") == 0
        assert page.console == []


async def test_keys_lead_through_it_and_it_says_when_the_run_is_over(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.start("r0", "r1")
    async with opened(world) as page:
        await page.until("!document.querySelector('.lanes-box').hidden")
        await page.ask("document.querySelector('.lanes-plot').focus()")
        for _ in range(2):
            await page.key("ArrowDown", code=40)
        assert (await page.text(".tip")).startswith("r1 on h")
        await page.key("Enter", code=13, text="\r")
        await page.until("document.querySelector('#detail h3')")
        assert await page.text("#detail-title") == "r1"
        assert await page.ask("document.activeElement.id") == "detail"
        await page.key("Escape", code=27)
        assert await page.ask("[document.getElementById('detail').hidden, document.activeElement.className, location.hash]") == [
            True, "lanes-plot", "",
        ]  # fmt: skip
        for theme in ("light", "dark"):
            await page.click("#theme")
            assert await page.ask("document.documentElement.dataset.theme") == theme
        await page.ask("window.isOld = true; location.reload()")
        await page.until("!window.isOld && document.getElementById('connection').innerText === 'live'")
        assert await page.ask("document.documentElement.dataset.theme") == "dark"
        world.send(events.WorkerLost(worker=WorkerId("trainer-0/0"), incarnation=1, reason="killed"))
        await page.until("document.getElementById('verdict-headline').innerText === 'The run failed'")
        assert page.console == []
        await world.dashboard.close()
        await world.server.close()
        await page.until("document.getElementById('connection').innerText.startsWith('the controller has ended')")


async def test_it_goes_on_with_the_controller_that_takes_over_and_asks_for_the_token_when_it_is_needed(
    tmp_path: Path,
) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    before, after = World(tmp_path / "before"), World(tmp_path / "after")
    before.start("r0", "r1", "r2")
    after.start("r1")
    async with browser() as page:
        async with served(before):
            port = before.server.port
            await log_in(page, before.url, TOKEN)
            await page.until("document.querySelectorAll('.fleet tbody tr').length === 3")
        await page.until("document.getElementById('connection').innerText.startsWith('connection lost')")
        async with served(after, port):
            await page.until("document.getElementById('connection').innerText === 'live'")
            await page.until("document.querySelector('.fleet tbody').innerText.startsWith('r1')")
            assert await page.ask("document.querySelectorAll('.fleet tbody tr').length") == 1
            assert [line for line in page.console if "ERR_CONNECTION_REFUSED" not in line] == []
            await page.call("Network.clearBrowserCookies")
            await page.ask("location.hash = '#replica/%'")
            await page.until("!document.getElementById('login').hidden")
            for token, said_ in ((f"{TOKEN}x", "this is not the token of this run"), (TOKEN, "")):
                await page.ask("document.getElementById('token').value = ''")
                await page.type(token)
                await page.key("Enter", code=13, text="\r")
                await page.until(f"document.getElementById('login-error').innerText === {said_!r}")
            await page.until("!document.getElementById('page').hidden")
            await page.until("document.getElementById('detail').innerText.includes('there is no replica')")


PLOT = (
    "import('/static/vendor/uPlot.esm.js').then((module) => { window.plot = module.default.sync('steps').plots[0]; })"
)

POINT_AT_TRAINER = """(() => { const axis = document.querySelector('.lanes-axis'), box = axis.getBoundingClientRect();
  axis.dispatchEvent(new PointerEvent('pointermove', { clientX: box.right - 110, clientY: box.top + 40 })); })()"""


async def test_what_somebody_looks_at_stays_while_the_run_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path, steps=20)
    world.start("r0")
    async with opened(world) as page:
        for number in range(4):
            make_step(world, number)
        await page.until("document.querySelector('.curve')")
        await page.ask(PLOT)
        await page.until("plot.data[0].length === 4")
        await page.ask("plot.setScale('x', { min: 2, max: 3 })")
        world.dashboard.alarm("first", "what happened\nand more of it")
        await page.until("document.querySelector('#journal details')")
        await page.click("#journal summary")
        make_step(world, 4)
        world.dashboard.alarm("second", "again")
        await page.until("document.getElementById('journal').innerText.includes('again')")
        await page.until("plot.data[0].length === 5")
        assert await page.ask("[plot.scales.x.min, plot.scales.x.max]") == [2, 3]
        assert "and more of it" in await page.text("#journal")
        await page.ask(POINT_AT_TRAINER)
        await page.until("/trainer (step 5 for|idle at)/.test(document.querySelector('.tip').innerText)")
        await page.click("#curves-tools button:nth-child(2)")
        await page.until("plot.data[1][4] === 2")
        label = await page.ask("document.querySelector('.curve-box').getAttribute('aria-label')")
        assert label == "Reward: mean 0 at step 1, 2 at step 5; spread not measured"
        assert page.console == []


def make_step(world: World, reward: float) -> None:
    """One more; its weights are pulled where that is due."""
    state = world.core.state
    while not state.trainer.running:
        world.complete_all("r0")
        if state.replicas[WorkerId("r0")].target:
            world.refreshed("r0")
    world.step_with(reward__mean=reward)
    world.ready(Version(state.trainer.step, 0))


async def test_a_long_text_is_read_in_parts_from_its_beginning_or_its_end(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.start("r0")
    one = TrajectoryId(world.generating("r0")[0])
    world.report("r0", {one: 5000})
    world.write(world.core.state.trajectories[one].group, [5], {one: [7] * 4999 + [8]})
    async with opened(world) as page:
        await page.ask(f"location.hash = '#trajectory/t{format_id(one)}'")
        await page.until("document.querySelector('.pages')?.innerText.includes('tokens 1 to 2,048 of 5,000')")
        for button, shown_ in ((4, "4,097 to 5,000"), (2, "2,049 to 4,096"), (1, "1 to 2,048")):
            await page.click(f".pages button:nth-of-type({button})")
            await page.until(f"document.querySelector('.pages').innerText.includes('tokens {shown_} of')")
            assert await page.ask("document.activeElement.id") == "detail"
        assert page.console == []


async def test_a_run_is_shown_as_its_controller_says_and_its_end_is_too(tmp_path: Path) -> None:
    overrides = (*SMALL, "run.steps=200", "controller.heartbeat_timeout_s=120")
    with Run.start(tmp_path, QUICKSTART / "hosts.txt", *overrides) as run:
        url = run.until_said(r"^dashboard: (\S+) ")[1]
        token = (run.path / "token").read_text()
        async with browser() as page:
            await page.open(f"{url}#token={token}")
            await page.until("document.getElementById('connection').innerText === 'live'")
            assert await page.ask("location.href") == url
            await page.until("Number(document.querySelector('[data-figure=\"step\"]').innerText.slice(5)) >= 3", 120)
            with _stopped(run):
                run.until(lambda: run.status() == run.status())
                status = run.status()
                expected = said(status)
                await page.until(
                    f"({SHOWN}) === {json.dumps(json.dumps(expected, separators=(',', ':'), ensure_ascii=False))}"
                )
                mean = status["metrics"]["reward/mean"]
                assert await page.text('[data-figure="reward"]') == f"{mean:.3f}"
                await page.click("#samples a")
                await page.until("document.querySelector('#detail table a')")
                await page.ask("document.querySelector('#detail table a').click()")
                await page.until("document.querySelector('#detail .tokens')?.innerText.length > 0")
            assert page.console == []
            run.signal(signal.SIGINT)
            await page.until(
                "document.getElementById('connection').innerText.startsWith('the controller has ended')", 120
            )
            assert (await page.text("#verdict-headline")) == "The run is over"
        assert run.wait() == 0, run.output
        assert token not in run.output + "".join(path.read_text() for path in (run.path / "logs").glob("*.log"))


@contextlib.contextmanager
def _stopped(run: Run) -> Any:
    """All its processes but the controller stand still inside."""
    workers = [process for process in run.marked() if process.pid != run.process.pid]
    for process in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
