"""What the dashboard costs: `python scripts/bench_dashboard.py [--replicas 256] [--trajectories 32] [--seconds 30]`.

A real controller on one core; on the other its simulated workers (`bench/fleet.py`), which report four times a second, pull, drain
and move, and a headless Chromium with the dashboard open. Looks for as long as asked without a page, then with one, in one run.

Prints how late the controller's event loop was (median / 99th percentile / longest), how much of a core it used, how long the page
took for an update, how old the newest event was that it showed, and its tasks of more than 50 ms. `--pictures DIR`: screenshots.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import structlog

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser import Page, browser, executable  # noqa: E402 - the repository need not be installed

from scripts.bench.controller_run import ControllerRun  # noqa: E402
from scripts.bench.fleet import Fleet, Load  # noqa: E402
from scripts.bench_controller import _spread, felt, patiently, percentile  # noqa: E402

GROUP_SIZE = 8
UPDATE_MAX_S, LAG_MAX_S = 0.1, 0.05  # what is aimed at: the page's 99th percentile, the controller's
WATCH_TASKS = """void (window.longTasks = [], new PerformanceObserver((list) =>
  window.longTasks.push(...list.getEntries().map((each) => each.duration))).observe({ type: 'longtask' }))"""
UPDATES = """performance.getEntriesByName('laminar:update').map((each) => [each.duration / 1000,
  (performance.timeOrigin + each.startTime + each.duration) / 1000 - each.detail.at])"""


@dataclass(frozen=True)
class Window:
    """What was seen in one interval, seconds."""

    lags_s: list[float]
    cpu_share: float
    updates_s: list[float]
    ages_s: list[float]
    long_tasks_s: list[float]


def main() -> int:
    """Measure and print Markdown; the exit code says whether the aims were met."""
    options = parse()
    if executable() is None or len(os.sched_getaffinity(0)) < 2:
        print("error: Chromium (apt-get install chromium) and two cores are needed", file=sys.stderr)
        return 2
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    without, with_page = asyncio.run(measure(options))
    print(
        "| page | loop late, ms | core used | update, ms | shown, ms old | tasks over 50 ms |\n|---|---|---|---|---|---|"
    )
    print(row("none", without))
    print(row("open", with_page))
    late_s, update_s = percentile(with_page.lags_s, 0.99), percentile(with_page.updates_s, 0.99)
    met = late_s < LAG_MAX_S and update_s < UPDATE_MAX_S
    print(
        f"\n99th percentiles: loop {late_s * 1e3:.1f} ms, update {update_s * 1e3:.1f} ms: {'as aimed' if met else 'TOO LATE'}"
    )
    return 0 if met else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--pictures", type=Path, help="directory for screenshots, light and dark")
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `simulated`, and how long is looked."""
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--trajectories", type=int, default=32, help="in flight per replica (default 32)")
    parser.add_argument("--mean-tokens", type=int, default=600, help="of a response (default 600: some 15 s)")
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds before the measurement (default 60)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each interval (default 30)")


def row(name: str, window: Window) -> str:
    """One line of the table; spreads: median / 99th percentile / longest."""
    cells = [name, _spread(window.lags_s), f"{window.cpu_share:.2f}", _spread(window.updates_s), _spread(window.ages_s)]
    tasks = f"{len(window.long_tasks_s)}, longest {max(window.long_tasks_s, default=0.0) * 1e3:.0f} ms"
    return f"| {' | '.join([*cells, tasks if window.updates_s else '–'])} |"


@contextlib.asynccontextmanager
async def simulated(options: argparse.Namespace) -> AsyncIterator[tuple[Fleet, ControllerRun]]:
    """A controller on one core and its fleet on the other, when they have warmed up."""
    load = Load(options.replicas, options.trajectories, mean_tokens=options.mean_tokens)
    cores = sorted(os.sched_getaffinity(0))
    local = max(1, options.trajectories // GROUP_SIZE)
    overrides = (f"rollout.local_batch_groups={local}", "repack.enabled=true", "repack.interval_s=2")
    with tempfile.TemporaryDirectory(prefix="bench-dashboard-") as directory:
        run = ControllerRun(Path(directory), load, cores[0], overrides)
        os.sched_setaffinity(0, {cores[1]})
        with run as controller:
            fleet = Fleet(controller.url, controller.token, load)
            await fleet.start()
            try:
                await patiently(fleet, controller, options.warm_up)
                yield fleet, controller
            finally:
                await fleet.close()


async def measure(options: argparse.Namespace) -> tuple[Window, Window]:
    """(without a page, with one)."""
    async with simulated(options) as (fleet, controller):
        without = await look(fleet, controller, options.seconds, None)
        async with browser(1440, 1000) as page:
            await page.open(f"{controller.url}#token={controller.token}")
            await page.until("document.getElementById('connection').innerText === 'live'")
            await page.ask(WATCH_TASKS)
            await patiently(fleet, controller, 5.0)
            with_page = await look(fleet, controller, options.seconds, page)
            if options.pictures:
                await take_pictures(page, options.pictures, f"{options.replicas}")
            if page.console:
                print("the page's console says:", *page.console, sep="\n  ", file=sys.stderr)
        return without, with_page


async def look(fleet: Fleet, controller: ControllerRun, seconds: float, page: Page | None) -> Window:
    """One interval."""
    if page is not None:
        await page.ask("void (performance.clearMeasures(), window.longTasks.length = 0)")
    began, cpu_s = time.time(), controller.cpu_s()
    await patiently(fleet, controller, seconds)
    ended, cpu_s = time.time(), controller.cpu_s() - cpu_s
    updates = await page.ask(UPDATES) if page is not None else []
    tasks = await page.ask("window.longTasks") if page is not None else []
    lags = [lag for at, lag in controller.probes()["lags"] if began <= at < ended]
    return Window(
        lags_s=felt(lags),
        cpu_share=cpu_s / (ended - began),
        updates_s=[update for update, _ in updates],
        ages_s=[age for _, age in updates],
        long_tasks_s=[task / 1000 for task in tasks],
    )


async def take_pictures(page: Page, directory: Path, name: str) -> None:
    """Of the whole page."""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        await page.prefer(scheme)
        await asyncio.sleep(1.5)  # until it is drawn anew
        await page.picture(directory / f"dashboard-{name}-{scheme}.png", whole=True)


if __name__ == "__main__":
    sys.exit(main())
