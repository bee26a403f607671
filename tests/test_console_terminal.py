"""The console on a terminal: how answers are drawn, what the prompt says, what is typed with line editing."""

import io
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import to_plain_text
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from laminar.console.answers import Answer, table
from laminar.console.place import Place, Reply
from laminar.console.terminal import prompt, render
from laminar.console.terminal.session import Session
from laminar.console.view import Target
from laminar.errors import ConfigError

pytestmark = pytest.mark.timeout(30)


class Parrot:
    """A target that says what it was asked; `gone` does not answer."""

    title = "here"

    def __init__(self, kind: Target = "sim") -> None:
        self.kind = kind
        self.asked: list[str] = []

    def ask(self, line: str) -> Reply:
        self.asked.append(line)
        if line == "gone":
            raise ConfigError("no controller answers")
        error = "no" if "refused" in line else ""
        return Reply(answer=Answer(lines=[line], error=error), place=self.place(), names={"replica": ["rollout-0"]})

    def place(self) -> Place:
        return Place(target=self.kind, step=3, steps=9, event=70, held=[4])

    def look(self) -> Reply:
        return Reply(answer=Answer(), place=self.place())

    def close(self) -> None:
        """Nothing."""


def sitting(target: Parrot, as_json: bool = False) -> tuple[Session, io.StringIO]:
    file = io.StringIO()
    return Session(target, Console(file=file, width=100), as_json=as_json), file


def text_of(answer: Answer) -> str:
    file = io.StringIO()
    Console(file=file, width=100).print(render.drawn(answer))
    return file.getvalue()


# ---- drawing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("age_s", 1234.56, "1,234.6"),
        ("kv_share", 0.4321, "43%"),
        ("kv_tokens", 12345, "12,345"),
        ("step", 12345, "12345"),
        ("reward_mean", 0.123456, "0.1235"),
        ("measure", 12345.6, "12,346"),
        ("is_so", True, "yes"),
        ("host", None, ""),
    ],
)
def test_values_are_formatted_by_the_unit_in_their_name(name: str, value: object, text: str) -> None:
    assert render.formatted(name, value) == text  # type: ignore[arg-type]


def test_headings_name_the_unit() -> None:
    assert [render.heading(name) for name in ("age_s", "kv_share", "waits_for")] == ["age (s)", "kv", "waits for"]


def test_columns_without_a_value_are_left_away_and_rows_left_off_are_counted() -> None:
    shown = text_of(Answer(tables=[table("", "replica note", [["r0", ""], ["r1", None]], left_off=3, note="`all`")]))
    assert "note" not in shown
    assert "… 3 more; `all`" in shown


def test_headings_of_numbers_give_way_to_sentences_where_room_is_short() -> None:
    rows: list[list[str | int]] = [["r0", 7, "because " * 12]]
    wide = text_of(Answer(tables=[table("", "replica tokens_at_the_last_check why", [["r0", 7, "because"]])]))
    narrow = text_of(Answer(tables=[table("", "replica tokens_at_the_last_check why", rows)]))
    assert "tokens at the last check" in wide
    assert "tokens at the last check" not in narrow
    assert "because because because because because because because because" in narrow


def test_what_is_written_by_others_is_no_markup() -> None:
    assert "[red]no[/red] :smile:" in text_of(Answer(lines=["[red]no[/red] :smile:"], error="[bold]"))


# ---- sitting -----------------------------------------------------------------------------------------------


def test_a_script_ends_at_the_first_line_that_is_refused_or_not_answered() -> None:
    for bad, said in (("refused", "error: no"), ("gone", "error: no controller answers")):
        target = Parrot()
        session, file = sitting(target)
        assert not session.run(["status", bad, "fleet"])
        assert target.asked == ["status", bad]
        assert said in file.getvalue()


def test_watch_repeats_until_it_is_refused() -> None:
    target = Parrot("live")
    session, _ = sitting(target)
    assert not session.take("watch groups 'refused now'")
    assert target.asked == ["groups 'refused now'"]


@pytest.mark.parametrize(
    ("kind", "line", "error"),
    [
        ("live", "watch join", "`join` is not repeated"),
        ("live", "watch stop", "`stop` is not repeated"),
        ("live", "watch continue", "`continue` is not repeated"),
        ("live", "watch", "usage: watch COMMAND"),
        ("live", "watch flet", "did you mean fleet?"),
        ("sim", "watch fleet", "`watch` is not for a simulated run: nothing changes in it but by your commands"),
    ],
)
def test_only_what_looks_is_repeated_and_only_where_something_changes(kind: Target, line: str, error: str) -> None:
    target = Parrot(kind)
    session, file = sitting(target)
    assert not session.take(line)
    assert error in file.getvalue()
    assert target.asked == []


def test_an_empty_line_and_a_remark_ask_nothing() -> None:
    target = Parrot()
    session, _ = sitting(target)
    assert session.run(["", "   ", "# a remark"])
    assert target.asked == []


# ---- prompt ------------------------------------------------------------------------------------------------


def test_the_prompt_says_what_is_looked_at_where_it_is_and_what_waits() -> None:
    session, _ = sitting(Parrot())
    session.take("status")
    assert to_plain_text(prompt.text(session)) == "sim here step 3/9 event 70 held 4 > "


def test_commands_and_names_complete_what_is_typed() -> None:
    session, _ = sitting(Parrot())
    session.take("status")
    words = prompt.Words(session)
    found = words.get_completions(Document("replica roll"), CompleteEvent())
    assert [(completion.text, completion.start_position) for completion in found] == [("rollout-0", -4)]


@pytest.mark.parametrize("kind", ["sim", "live"])
def test_lines_are_typed_until_the_end_of_input(kind: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    target = Parrot(kind)
    session, _ = sitting(target)
    with create_pipe_input() as typed, create_app_session(input=typed, output=DummyOutput()):
        typed.send_text("fleet\r\x03gone\rquit\r")
        prompt.talk(session)
    assert target.asked == ["fleet", "gone"]
    assert "+fleet" in (tmp_path / "laminar" / "console_history").read_text()


def test_a_history_that_cannot_be_kept_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert type(prompt._history()).__name__ == "InMemoryHistory"
