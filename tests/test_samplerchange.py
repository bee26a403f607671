"""The console's command `sampler`: loaded first, beside the event loop; what cannot be loaded changes nothing."""

import asyncio
from pathlib import Path
from typing import Any

from laminar.console.answers import Answer, Change
from laminar.controller.samplerchange import SamplerChange
from laminar.core import events
from laminar.samplers import Samplers

FILE = """
class Mine:
    def select(self, view, num_groups): return []
    def state(self): return {}
    def load_state(self, state): pass
"""


class Runtime:
    """What the command needs of one."""

    def __init__(self) -> None:
        self.posted: list[events.AnyEvent] = []
        self.tasks: list[asyncio.Task[None]] = []

    def own(self, coroutine: Any, name: str) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine, name=name))

    def post(self, event: events.AnyEvent) -> int:
        self.posted.append(event)
        return len(self.posted)


async def choose(reference: str) -> tuple[Runtime, list[tuple[str, str]], Answer | Change]:
    runtime, alarms = Runtime(), list[tuple[str, str]]()
    change = SamplerChange(runtime, Samplers(None), lambda name, text: alarms.append((name, text)))  # type: ignore[arg-type]
    answer = change.choose(None, [reference])  # type: ignore[arg-type]
    if runtime.tasks:
        assert "is being loaded" in change.choose(None, ["other.py:Mine"]).error  # type: ignore[arg-type, union-attr]
        assert "is being loaded" in change.choose(None, ["fifo"]).error, "or it would be overtaken"  # type: ignore[arg-type, union-attr]
    await asyncio.wait_for(asyncio.gather(*runtime.tasks), 60)
    return runtime, alarms, answer


async def test_a_sampler_is_changed_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    reference = f"{tmp_path}/mine.py:Mine"
    runtime, alarms, answer = await choose(reference)
    assert isinstance(answer, Answer)
    assert not answer.error
    assert runtime.posted == [events.SamplerChanged(reference=reference)]
    assert alarms == []


async def test_one_that_cannot_be_loaded_changes_nothing_and_says_why(tmp_path: Path) -> None:
    runtime, alarms, _ = await choose(f"{tmp_path}/gone.py:Mine")
    assert runtime.posted == []
    ((name, text),) = alarms
    assert name == "sampler-refused"
    assert "no file" in text
    assert text.endswith("nothing is changed")


async def test_the_built_in_one_needs_no_loading() -> None:
    runtime, _, answer = await choose("fifo")
    assert isinstance(answer, Change)
    assert answer.events == [events.SamplerChanged(reference="fifo")]
    assert not runtime.tasks
