"""The contract check for users' samplers, on good and on bad ones, and the examples of docs/samplers.md."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from laminar.core import actions, events
from laminar.core.sampling import BufferView, fifo
from laminar.plugins import load_object
from laminar.testing import check_sampler
from tests.core_world import World, settings

DOCS = Path(__file__).parent.parent / "docs" / "samplers.md"
RELAXED_MS = 1000.0  # these tests are not about speed, and the machine may be busy


class Fifo:
    def select(self, view: BufferView, num_groups: int) -> list[Any]:
        return fifo(view, num_groups)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


class RoundRobin(Fifo):
    """Good, with state: alternates between the two ends of the buffer."""

    def __init__(self) -> None:
        self.turn = 0

    def select(self, view, num_groups):
        self.turn += 1
        groups = view.groups[:num_groups] if self.turn % 2 else view.groups[-num_groups:]
        return [group.id for group in groups]

    def state(self):
        return {"turn": self.turn}

    def load_state(self, state):
        self.turn = state["turn"]


class Waits(Fifo):
    def select(self, view, num_groups):
        return []


@pytest.mark.parametrize("good", [Fifo, Fifo(), RoundRobin, RoundRobin(), Waits, lambda: Fifo()])
def test_a_good_sampler_passes(good):
    check_sampler(good, RELAXED_MS)


class Unknown(Fifo):
    def select(self, view, num_groups):
        return [12345] * num_groups


class Short(Fifo):
    def select(self, view, num_groups):
        return fifo(view, num_groups)[1:] or [0]


class Twice(Fifo):
    def select(self, view, num_groups):
        return [view.groups[0].id] * max(2, num_groups)


class Tuple(Fifo):
    def select(self, view, num_groups):
        return tuple(fifo(view, num_groups))


class Raises(Fifo):
    def select(self, view, num_groups):
        return {}["reward"]


class Random(Fifo):
    def select(self, view, num_groups):
        return [group.id for group in random.sample(view.groups, num_groups)]


class HiddenState(RoundRobin):
    def state(self):
        return {"turn": 0}


class Forgets(RoundRobin):
    def load_state(self, state):
        pass


class BadState(Fifo):
    def state(self):
        return {"groups": object()}


class SetState(Fifo):
    def state(self):
        return {"seen": {1, 2}}


class NoState(Fifo):
    def state(self):
        return None


class Argument(Fifo):
    def __init__(self, weight):
        self.weight = weight


class Incomplete:
    def select(self, view, num_groups):
        return []


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Unknown, "not complete groups in the buffer, first: 12345"),
        (Short, "not complete groups|returned . groups, the batch needs"),
        (Twice, "the same group twice"),
        (Tuple, "returned tuple, expected a list"),
        (Raises, "select raised KeyError: 'reward'"),
        (Random, "must depend on nothing but the view and what state"),
        (HiddenState, "must depend on nothing but the view and what state"),
        (Forgets, "must depend on nothing but the view and what state"),
        (BadState, "msgpack cannot hold"),
        (SetState, "comes back from msgpack changed"),
        (NoState, "state returned NoneType, expected a dict"),
        (Argument, "constructed without arguments"),
        (Argument(1), "constructed without arguments"),
        (Incomplete, "has no method state"),
    ],
)
def test_a_bad_sampler_is_told_what_is_wrong(bad, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_sampler(bad, RELAXED_MS)


def test_a_sampler_over_its_budget_is_told_its_time():
    with pytest.raises(AssertionError, match=r"select took .* ms .* for 4096 groups, allowed are 0 ms"):
        check_sampler(Fifo, budget_ms=0.0)


# ---- the documentation -------------------------------------------------------------------------------------


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(blocks()[0])
    return path


class SamplerWorld(World):
    """A world whose questions are answered by a real sampler."""

    sampler: Any = None

    def _on_AskSampler(self, action: actions.AskSampler) -> None:
        chosen = self.sampler.select(action.view, action.num_groups)
        self.pending.append(lambda: self.send(events.SamplerAnswered(request=action.request, groups=chosen)))


@pytest.mark.parametrize("name", ["Freshest", "Spread"])
def test_the_documented_samplers_pass_the_check_and_finish_a_run(name, mine):
    kind = load_object(f"{mine}:{name}", "buffer.sampler")
    check_sampler(kind, RELAXED_MS)
    for seed in range(5):
        world = SamplerWorld(settings(custom_sampler=True, steps=6), seed)
        world.sampler = kind()
        world.run()
        assert world.core.state.finished == "completed"


def test_the_documented_check_runs_as_written(mine, monkeypatch):
    monkeypatch.setattr("laminar.testing.BUDGET_MS", RELAXED_MS)
    assert "check_sampler(Freshest)" in blocks()[1]
    relaxed = blocks()[1].replace(")\n", f", {RELAXED_MS})\n")
    exec(blocks()[0] + relaxed, {})


def test_the_documented_messages_are_those_of_the_core():
    text = DOCS.read_text()
    for message in re.findall(r"^the custom sampler .*$", text, re.MULTILINE):
        source = (DOCS.parent.parent / "laminar" / "core" / "choice.py").read_text()
        source += (DOCS.parent.parent / "laminar" / "core" / "sampling.py").read_text()
        source += (DOCS.parent.parent / "laminar" / "samplers.py").read_text().replace('"\n            "', "")
        words = re.findall(r"[a-z ]{12,}", message.removeprefix("the custom sampler "))
        assert all(word.strip() in source for word in words), message
