"""The console's side of a live run: which controller is asked, and what is sent to it. (A real one: test_e2e_console.)"""

from pathlib import Path

import msgspec
import pytest

from laminar.console.answers import Answer
from laminar.console.place import Place, Reply
from laminar.console.targets.live import Live
from laminar.controller import asking
from laminar.controller.asking import Address
from laminar.controller.rundir import RunDirectory
from laminar.errors import ConfigError


class Controllers:
    """What is asked of which."""

    def __init__(self) -> None:
        self.url = "http://127.0.0.1:1"
        self.asked: list[tuple[str, str]] = []

    def ask(self, address: Address, method: str, path: str, body: bytes | None = None) -> bytes:
        line = msgspec.json.decode(body)["line"] if body else ""
        self.asked.append((address.url, line))
        if line == "ledger":
            return b'{"another": "version"}'
        return msgspec.json.encode(Reply(answer=Answer(), place=Place(target="live")))


@pytest.fixture
def controllers(monkeypatch: pytest.MonkeyPatch) -> Controllers:
    found = Controllers()
    monkeypatch.setattr(asking, "ask", found.ask)
    return found


def console(controllers: Controllers, directory: Path) -> Live:
    return Live(lambda: Address(controllers.url, "token", RunDirectory(directory)))


def test_a_controller_that_took_over_is_asked_where_it_is(controllers: Controllers, tmp_path: Path) -> None:
    target = console(controllers, tmp_path)
    target.ask("fleet")
    controllers.url = "http://127.0.0.1:2"
    target.ask("fleet")
    assert controllers.asked == [
        ("http://127.0.0.1:1", ""),
        ("http://127.0.0.1:1", "fleet"),
        ("http://127.0.0.1:2", "fleet"),
    ]


def test_a_sampler_that_lies_here_is_named_so_that_the_controller_finds_it(
    controllers: Controllers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my samplers.py").write_text("")
    target = console(controllers, tmp_path)
    for line in (
        "sampler 'my samplers.py:Mine'",
        "sampler gone.py:Mine",
        "sampler pkg.mod:Mine",
        "sam fifo",
        "sampler",
    ):
        target.ask(line)
    lines = [line for _, line in controllers.asked[1:]]
    there = f"sampler '{tmp_path}/my samplers.py:Mine'"
    assert lines == [there, "sampler gone.py:Mine", "sampler pkg.mod:Mine", "sampler fifo", "sampler"]


def test_what_is_no_command_is_refused_before_it_is_sent(controllers: Controllers, tmp_path: Path) -> None:
    target = console(controllers, tmp_path)
    with pytest.raises(ConfigError, match="did you mean fleet"):
        target.ask("fleat")
    with pytest.raises(ConfigError, match="usage: whatif"):
        target.ask("whatif")
    assert len(controllers.asked) == 1


def test_an_answer_of_another_version_says_what_to_do(controllers: Controllers, tmp_path: Path) -> None:
    target = console(controllers, tmp_path)
    with pytest.raises(ConfigError, match="use the console of the version of Laminar that the run was started with"):
        target.ask("ledger")
