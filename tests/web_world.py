"""A dashboard over a core that a test drives, served over real HTTP as the application does it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from core_world import Driver, settings

from laminar import wire
from laminar.config import Config
from laminar.controller.channels import Channels
from laminar.controller.eventlog import EventLog
from laminar.controller.runtime import Runtime
from laminar.controller.server import Server
from laminar.controller.status import status_of
from laminar.controller.telemetry import Telemetry
from laminar.controller.tokens import TokenStore
from laminar.controller.web.dashboard import Dashboard
from laminar.controller.web.detail import Detail
from laminar.controller.web.records import Records
from laminar.controller.web.text import Pieces
from laminar.core import actions, events
from laminar.ids import GroupId, TrajectoryId

TOKEN = "token-of-this-run"
MODEL = Path(__file__).resolve().parent.parent / "configs" / "quickstart" / "model"


class Prompts:
    """A data set that the test writes."""

    def __init__(self) -> None:
        self.text = "spell: abc"
        self.held_out: list[wire.Prompt] = []

    def prompt(self, index: int) -> wire.Prompt:
        return wire.Prompt(prompt=index, text=f"{self.text} #{index}", answer="cba")  # type: ignore[arg-type]


class World(Driver):
    """Its events are heard by a telemetry and a dashboard, and its tokens are held."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        super().__init__(settings(**changes))
        self.log_ = EventLog(directory / "run.db", 0.001)
        self.log_.begin_boot(1.0, 1, "here", 0)
        self.runtime = Runtime(self.core, self.log_, directory)
        self.runtime.now = lambda: self.at  # type: ignore[method-assign]
        self.telemetry = Telemetry(self.runtime, self.log_, directory / "metrics.jsonl")
        self.tokens = TokenStore(directory / "tokens", 1)
        self.prompts = Prompts()
        records = Records(directory / "run.db")
        self.detail = Detail(self.core, self.prompts, self.tokens.rows, Pieces(str(MODEL)), records)
        self.dashboard = Dashboard(
            self.core,
            self.telemetry,
            fixed={"run": {"name": "spelling"}, "settings": [("trainer.lr", "1e-05", "1e-06")]},
            now=lambda: self.at,
            detail=self.detail,
            records=records,
        )
        self.server = Server(
            Channels(1), token=TOKEN, run_id="test", config=wire.encode(Config()), heartbeat_s=1.0, timeout_s=5.0
        )
        self.server.routes = [*self.dashboard.routes(), web.get("/v1/status", self._status)]
        self.server.open_routes = self.dashboard.open_routes(self.server.access)

    async def _status(self, request: web.Request) -> web.Response:
        metrics = self.telemetry.history[-1] if self.telemetry.history else {}
        return web.json_response({**status_of(self.core, self.telemetry.relays), "metrics": metrics})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def send(self, event: events.AnyEvent, after: float = 0.1) -> list[actions.AnyAction]:
        new = super().send(event, after)
        stamped = msgspec.structs.replace(event, seq=self.seq, at=self.at)
        self.telemetry.observe(stamped)
        self.dashboard.observe(stamped)
        for action in new:
            self.dashboard.on_action(action)
            if isinstance(action, actions.StartGroup):
                self._hold(action)
        return new

    def _hold(self, action: actions.StartGroup) -> None:
        for start in action.starts:
            self.tokens.start(start.trajectory, start.attempt, action.group, start.resume)

    def write(
        self, group: GroupId, prompt: list[int], texts: dict[TrajectoryId, list[int]], logprob: float = -0.5
    ) -> None:
        """Tokens of a group's prompt and of its trajectories come in."""
        self.tokens.put_prompt(group, wire.pack_i32(prompt))
        for trajectory, tokens in texts.items():
            attempt = self.core.state.trajectories[trajectory].attempt
            num = wire.pack_i32([len(tokens)])
            report = wire.RolloutReport(
                version=None, trajectories=wire.pack_i64([trajectory]), attempts=wire.pack_i32([attempt]), num_tokens=num,
                num_new=num, tokens=wire.pack_i32(tokens), logprobs=wire.pack_f32([logprob] * len(tokens)),
            )  # fmt: skip
            self.tokens.take(report)

    def step_with(self, **metrics: float) -> None:
        """The running step is finished."""
        running = self.all(actions.StartTrainStep)[-1]
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        self.send(events.StepFinished(step=running.step, attempt=running.attempt, metrics=named))


@contextlib.asynccontextmanager
async def served(world: World, port: int = 0) -> AsyncIterator[World]:
    """It listens, and looks at itself as in a run."""
    world.log_.start(lambda seq: None)
    await world.server.start("127.0.0.1", port)
    looking = asyncio.create_task(world.dashboard.run())
    try:
        yield world
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await world.dashboard.close()
        await world.server.close()
        await world.runtime.close()
        world.log_.close()
        world.telemetry.close()
        world.tokens.finish()
        world.tokens.close()


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait for something that other tasks bring about; its value."""
    async with asyncio.timeout(timeout_s):
        while not (value := condition()):  # noqa: ASYNC110 - of many kinds, for which there is no event
            await asyncio.sleep(0.01)
        return value
