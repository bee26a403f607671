"""What the terminal shows of a run that an operator holds or has changed."""

import io
from types import SimpleNamespace
from typing import Any

from core_world import Driver, settings
from rich.console import Console

from laminar.controller.display import LiveDisplay, last_step
from laminar.core import events


def running() -> Driver:
    driver = Driver(settings(steps=9, evaluate=False))
    driver.start("r0", "r1")
    return driver


def shown(driver: Driver) -> str:
    telemetry: Any = SimpleNamespace(history=[], relays={}, seconds_per_step=lambda: 0.0)
    display = LiveDisplay(driver.core.state, telemetry, 9)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(display._render())
    display._live.stop()
    return console.export_text()


def test_a_held_run_is_said_to_be_held() -> None:
    driver = running()
    assert "step 0/9" in shown(driver)
    assert "generating" in shown(driver)
    driver.send(events.HoldChanged(pass_name="all", held=True))
    assert "held: refresh, repack, dispatch, sample" in shown(driver)


def test_the_last_step_is_the_one_that_an_operator_wants() -> None:
    driver = running()
    assert last_step(driver.core.state, 9) == 9
    driver.send(events.SettingsChanged(changes={"steps": 20}))
    assert last_step(driver.core.state, 9) == 20
    driver.send(events.StopAfterStep(step=4))
    assert last_step(driver.core.state, 9) == 4
    assert "step 0/4" in shown(driver)
