"""References to user code: found, cached, and every mistake named with its place."""

import re
import sys
from pathlib import Path

import pytest

from laminar.errors import ConfigError
from laminar.plugins import check_file, is_file_reference, load_object


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message(reference: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_object(reference, "task.reward")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_in_an_installed_module_is_loaded():
    assert load_object("laminar.errors:ConfigError", "x") is ConfigError


def test_a_name_in_a_file_is_loaded_relative_to_the_working_directory():
    write("code/mine.py", "def reward(prompt, response):\n    return 0.5\n")
    assert load_object("code/mine.py:reward", "task.reward")(None, "") == 0.5


def test_a_file_runs_once_however_it_is_named():
    write("mine.py", "class Sampler: pass\n")
    assert load_object("mine.py:Sampler", "x") is load_object(f"{Path.cwd()}/mine.py:Sampler", "x")


def test_two_files_of_one_name_are_two_modules():
    write("a/mine.py", "value = 1\n")
    write("b/mine.py", "value = 2\n")
    assert [load_object(f"{directory}/mine.py:value", "x") for directory in "ab"] == [1, 2]


def test_a_file_can_define_dataclasses_and_import_its_neighbour():
    write("code/neighbour_of_mine.py", "half = 0.5\n")
    write(
        "code/mine.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour_of_mine import half\n"
        "@dataclass\nclass Reward:\n    value: float = half\n",
    )
    assert load_object("code/mine.py:Reward", "x")().value == 0.5


def test_a_package_in_the_working_directory_is_found():
    write("my_own_package/__init__.py", "")
    write("my_own_package/rewards.py", "good = 1.0\n")
    assert load_object("my_own_package.rewards:good", "x") == 1.0


@pytest.mark.parametrize("reference", ["", "mine.py", "pkg.mod", ":name", "mine.py:", ":"])
def test_a_reference_without_both_parts_says_what_it_should_be(reference):
    assert message(reference) == f'task.reward = "{reference}": expected "pkg.mod:Name" or "path/file.py:Name"'


def test_a_missing_file_names_the_full_path_and_the_nearest_file():
    write("rewards.py", "")
    text = message("reward.py:score")
    assert f"no file {Path.cwd()}/reward.py; did you mean rewards.py?" in text
    assert "no file" in message("no/such/directory/reward.py:score")


def test_a_missing_module_names_the_nearest_one():
    assert "no module laminar.errors_; did you mean laminar.errors?" in message("laminar.errors_:ConfigError")
    assert "no module laminarr; did you mean laminar?" in message("laminarr.errors:ConfigError")


def test_a_path_that_is_neither_module_nor_python_file_is_refused():
    assert "neither a module" in message("dir/mine.txt:name")


def test_a_missing_name_lists_what_the_module_defines_nearest_first():
    write("mine.py", "import os\ndef alpha(): pass\ndef rewards(): pass\ndef _hidden(): pass\n")
    assert message("mine.py:reward").endswith("mine.py has no reward; it defines rewards, alpha")
    write("empty.py", "")
    assert message("empty.py:reward").endswith("it defines nothing that could be meant")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 1\ny = undefined\n", "NameError: name 'undefined' is not defined ({}/broken.py:2)"),
        ("import sys\n\nsys.exit(3)\n", "SystemExit: 3 ({}/broken.py:3)"),
        ("import json\njson.loads('{')\n", "broken.py:2)"),
        ("import no_such_module_anywhere\n", "No module named 'no_such_module_anywhere' ({}/broken.py:1)"),
        ("def f(:\n", "does not parse: invalid syntax ({}/broken.py:1)"),
    ],
)
@pytest.mark.parametrize("reference", ["broken.py:name", "broken:name"])
def test_user_code_that_fails_on_import_is_shown_with_its_own_line(code, expected, reference):
    write("broken.py", code)
    assert message(reference).endswith(expected.format(Path.cwd()))


def test_a_file_that_failed_is_run_again_after_it_was_corrected():
    write("mine.py", "raise ValueError('not yet')\n")
    message("mine.py:value")
    write("mine.py", "value = 'now it is longer than before'\n")
    assert load_object("mine.py:value", "x").startswith("now")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no file"),
        ("def rewrad(p, r): ...\n", "has no reward; did you mean rewrad?"),
        ("def reward(p, r)\n", "does not parse: expected ':' "),
        ("raise SystemExit\nif True:\n    reward = len\n", ""),
        ("from elsewhere import score as reward\n", ""),
        ("from elsewhere import *\n", ""),
        ("async def reward(p, r): ...\n", ""),
    ],
)
def test_a_file_is_checked_without_being_run(workplace, text, expected):
    if text is not None:
        (workplace / "judge.py").write_text(text)
    if not expected:
        return check_file("judge.py:reward", "task.reward")
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        check_file("judge.py:reward", "task.reward")
    assert str(caught.value).startswith('task.reward = "judge.py:reward": ')


def test_file_references_are_told_from_modules():
    assert is_file_reference("a/b.py:C")
    assert not is_file_reference("a.b:C")


def test_a_file_is_executed_again_only_if_it_is_to_be_fresh(workplace):
    write("mine.py", "NUMBER = 1\n")
    assert load_object("mine.py:NUMBER", "x") == 1
    write("mine.py", "NUMBER = 2\n")
    assert load_object("mine.py:NUMBER", "x") == 1
    assert load_object("mine.py:NUMBER", "x", fresh=True) == 2
    write("mine.py", "NUMBER = 1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_object("mine.py:NUMBER", "x", fresh=True)
