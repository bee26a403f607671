"""The console's language: which command a line is, what is wrong with it, help and completion."""

import pytest
from core_world import Driver, settings

from laminar.console.answers import Answer
from laminar.console.commands import COMMANDS
from laminar.console.help import PARTS, completions, help_of
from laminar.console.language import TARGETS, Language, UsageError, commands_of, split
from laminar.console.view import View

LANGUAGE = Language(COMMANDS)


def view(target="sim") -> View:
    driver = Driver(settings())
    driver.start("rollout-0", "rollout-1", "rollout-2")
    return View(driver.core, target=target, now=driver.at, began=0.0)


def error_of(line: str, target="sim") -> str:
    found = LANGUAGE.answer(view(target), line, None)
    assert found.error, found
    return found.error


def test_a_command_is_known_by_a_beginning_that_only_it_has():
    assert LANGUAGE.find("ver").name == "versions"
    assert LANGUAGE.find("group").name == "group", "a whole name wins over a longer one that begins with it"
    with pytest.raises(UsageError, match="may be held, help"):
        LANGUAGE.find("he")


def test_what_is_no_command_is_answered_by_the_nearest():
    assert error_of("fleat") == "there is no command 'fleat'; did you mean fleet?; `help` lists all"
    assert error_of("qqq") == "there is no command 'qqq'; `help` lists all"


def test_too_few_or_many_words_are_answered_by_the_usage():
    assert error_of("replica") == "usage: replica NAME; `help replica` has examples"
    assert error_of("ledger please") == "usage: ledger; `help ledger` has examples"


def test_a_command_of_another_kind_of_run_says_what_to_do_here():
    assert "a live run" in error_of("step", "live")
    assert "`break` make it wait" in error_of("step", "live")


def test_a_recorded_run_refuses_to_be_changed():
    assert "a recorded one is what it was" in error_of("pause repack", "log")


def test_a_quote_that_does_not_end_is_said():
    with pytest.raises(UsageError, match="a quote is not closed"):
        split("timeline 'pulls")
    with pytest.raises(UsageError, match="a quote is not closed"):
        commands_of("fleet; timeline 'pulls")


def test_semicolons_separate_commands_but_not_in_quotes():
    assert commands_of("status; fleet v1;;  ledger ") == ["status", "fleet v1", "ledger"]
    assert commands_of("timeline 'a; b'; fleet") == ["timeline 'a; b'", "fleet"]
    assert commands_of(" ; ") == []


def test_every_command_can_be_explained_and_its_examples_are_lines_of_it():
    for command in COMMANDS:
        assert command.part in PARTS, command.name
        assert command.usage.startswith(command.name)
        for target in TARGETS:
            assert help_of(LANGUAGE, target, [command.name]).facts["usage"] == command.usage
        for line, _ in command.examples:
            words = split(line)
            assert LANGUAGE.find(words[0]) == LANGUAGE.commands[command.name], line
            assert command.arguments[0] <= len(words) - 1 <= command.arguments[1], line


def test_help_lists_every_command_that_means_something_here():
    for target in TARGETS:
        named = [str(row[0]).split()[0] for table in help_of(LANGUAGE, target, []).tables for row in table.rows]
        assert named == [c.name for part in PARTS for c in COMMANDS if c.part == part and target in c.only]


def words_after(before: str, **names: list[str]) -> list[str]:
    return [word for word, _ in completions(LANGUAGE, "sim", before, names)]


def test_commands_and_what_there_is_now_complete_a_line():
    assert words_after("fl") == ["fleet"]
    assert words_after("replica rollout-1", replica=["rollout-0", "rollout-1", "rollout-12"]) == [
        "rollout-1",
        "rollout-12",
    ]
    assert words_after("  pause s") == ["sample"]
    assert words_after("approve 3 ", held=["3", "4"]) == ["3", "4", "all"]
    assert words_after("break repack w") == ["when"]
    assert words_after("break repack when mo") == ["moves"]
    assert words_after("edit 3 s", held=["3"]) == ["send", "swap"]
    assert words_after("set rollout.max_concurrent=8 rollout-", replica=["rollout-0"]) == ["rollout-0"]
    assert words_after("run for 3 s") == ["seconds", "steps"]
    assert words_after("versions a") == ["all"]
    assert "status" in words_after("help ")
    assert words_after("nonsense r") == []


def test_no_line_is_answered_by_a_traceback():
    """Whatever is typed: every command with words that may mean nothing."""
    here = view()
    for command in COMMANDS:
        for words in (
            "",
            " x",
            " 0",
            " -1",
            " r9",
            " g1.1",
            " t",
            " v0",
            " 1 2",
            " é ''",
            " ²",
            " all",
            " 99999999999999999999",
        ):
            assert isinstance(LANGUAGE.answer(here, command.name + words, lambda event: 1), Answer)
