"""The import table of the architecture, the purity of the core, and its tables against its code; all by reading the source."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from laminar.core import actions, decisions, engine, events, ledger, passes, records

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "laminar"

CORE_MAY_IMPORT = ("laminar.core", "laminar.ids", "laminar.errors", "msgspec")
# fmt: off
CORE_STANDARD_LIBRARY = {"array", "bisect", "collections", "enum", "functools", "heapq", "itertools", "random", "typing"}
# fmt: on
"""A core that needs more of the standard library says so here; a clock, a thread, a socket or the environment never."""
CONTROLLER_NEVER_IMPORTS = ("torch", "vllm", "transformers", "numpy")


def sources(part: str) -> list[Path]:
    return sorted((PACKAGE / part).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, also inside functions; `from a import b` counts as a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_the_core_imports_only_what_its_purity_allows():
    for path in sources("core"):
        for name in imported(path):
            allowed = any(is_of(name, package) for package in CORE_MAY_IMPORT)
            assert allowed or name.split(".")[0] in CORE_STANDARD_LIBRARY, f"{path.name} imports {name}"


def test_the_core_uses_only_the_seeded_generator_of_random():
    for path in sources("core"):
        for name in imported(path):
            assert name.split(".")[0] != "random" or name == "random.Random", f"{path.name} imports {name}"


ROOMS = {
    "controller": ("core", "tasks", "console", "workers.relay.paths"),
    "workers": ("rl", "tasks"),
    "rl": (),
    "tasks": (),
    "chaos": ("core", "controller", "tasks", "workers.relay"),
    "console": ("core", "controller", "sim", "replay"),
    "replay": ("core", "controller", "sim", "tasks"),
    "report": ("core", "controller", "replay"),
    "trace": ("core", "controller", "replay"),
    "sim": ("core",),
    "wire": (),
}
"""Room -> other rooms that it may import, as the architecture page says; the modules beside the rooms, and `wire`, all may."""


@pytest.mark.parametrize("part", ROOMS)
def test_a_room_imports_no_others_than_the_architecture_page_says(part):
    assert sources(part)
    for path in sources(part):
        for name in imported(path):
            room = name.split(".")[1] if is_of(name, "laminar") and "." in name else part
            if room in (part, "wire") or not (PACKAGE / room).is_dir():
                continue
            assert any(is_of(name, f"laminar.{other}") for other in ROOMS[part]), f"{path} imports {name}"


def test_every_room_but_the_core_says_what_it_may_import():
    assert sorted([*ROOMS, "core"]) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_commands_of_the_console_import_the_core_and_nothing_that_draws_or_drives():
    """The controller answers lines with them."""
    rooms = ("answers", "help", "language", "place", "subjects", "view")
    paths = [*sources("console/commands"), *(PACKAGE / "console" / f"{room}.py" for room in rooms)]
    for path in paths:
        for name in (name for name in imported(path) if is_of(name, "laminar")):
            draws = is_of(name, "laminar.console.terminal") or is_of(name, "laminar.console.targets")
            own = is_of(name, "laminar.console") and not draws
            assert own or any(is_of(name, package) for package in CORE_MAY_IMPORT), f"{path} imports {name}"


def test_a_replay_needs_neither_workers_nor_array_libraries():
    assert sources("replay")
    for path in sources("replay"):
        for name in imported(path):
            assert not is_of(name, "laminar.workers"), f"{path} imports {name}"
            assert name.split(".")[0] not in CONTROLLER_NEVER_IMPORTS, f"{path} imports {name}"


def test_the_controller_names_no_array_library():
    assert sources("controller")
    for path in sources("controller"):
        for name in imported(path):
            assert name.split(".")[0] not in CONTROLLER_NEVER_IMPORTS, f"{path} imports {name}"


@pytest.mark.parametrize("module", ["laminar.core.engine", "laminar.controller.__main__", "laminar.testing"])
def test_no_array_library_is_imported_behind_the_back_of(module):
    code = f"import sys, {module}; print([m for m in {CONTROLLER_NEVER_IMPORTS!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


# ---- no unordered iteration --------------------------------------------------------------------------------


def makes_set(node: ast.AST, known: set[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Name):
        return node.id in known
    if isinstance(node, ast.BinOp):
        return makes_set(node.left, known) or makes_set(node.right, known)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")


def iterated(tree: ast.AST) -> list[ast.expr]:
    """What is looped over, and what is turned into something ordered."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            found.append(node.iter)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("list", "tuple", "iter", "next", "min", "max", "enumerate", "dict", "map", "zip"):
                found += node.args
        elif isinstance(node, ast.Starred):
            found.append(node.value)
    return found


def unordered(source: str) -> list[int]:
    """Line numbers at which a set is iterated."""
    lines = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.Module):
            continue
        known = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and makes_set(node.value, set())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        lines += [node.lineno for node in iterated(function) if makes_set(node, known)]
    return sorted(set(lines))


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("for x in {1, 2}: pass", [1]),
        ("def f(a):\n    s = set(a)\n    return [x for x in s]", [3]),
        ("list(set(a) - b)", [1]),
        ("len(set(a)); x in {1, 2}; sorted(set(a))", []),
    ],
)
def test_the_check_for_unordered_iteration_finds_it(source, lines):
    assert unordered(source) == lines


def test_the_core_iterates_no_set():
    for path in sources("core"):
        assert unordered(path.read_text()) == [], path


def test_no_record_of_the_state_holds_a_set():
    for name, kind in inspect.getmembers(records, inspect.isclass):
        for field, annotation in getattr(kind, "__annotations__", {}).items():
            assert "set[" not in str(annotation), f"{name}.{field}"


# ---- the tables --------------------------------------------------------------------------------------------


def documented() -> dict[str, str]:
    """Action -> what ends it, from the table in the docstring of `laminar.core.actions`."""
    rows = re.findall(r"^\| (\w+) \| (.+) \|$", actions.__doc__ or "", re.MULTILINE)
    return {name: text for name, text in rows if name not in ("action",)}


def test_every_event_has_exactly_one_handler():
    kinds = set(get_args(events.AnyEvent))
    assert kinds == set(engine._HANDLERS)
    assert kinds == {kind for kind in events.Event.__subclasses__() if kind.__module__ == events.__name__}


def test_every_action_kind_is_in_the_union():
    assert set(get_args(actions.AnyAction)) == set(actions.Action.__subclasses__())


def test_every_terminal_event_in_the_table_of_actions_is_handled():
    handled = {kind.__name__ for kind in engine._HANDLERS}
    names = {kind.__name__ for kind in get_args(actions.AnyAction)}
    assert documented().keys() <= names
    for action, text in documented().items():
        ends = [word for word in re.findall(r"\b[A-Z]\w+\b", text)]
        assert ends, action
        assert set(ends) <= handled, f"{action} ends in {set(ends) - handled}, which nothing handles"


def test_every_action_is_either_in_the_table_or_done_when_handed_over():
    """An action that starts a procedure of the shell and is missing in the table would never be known to have ended."""
    at_once = {"AbortAttempts", "RecordTrajectories", "ForgetTokens", "StopWorker", "RaiseAlarm", "FinishRun"}
    at_once |= {"ArrangeChain", "RetainVersions", "RecordLostSteps", "Stalled"}
    at_once |= {"BreakpointHit", "UseSampler", "ReconfigureReplica"}
    names = {kind.__name__ for kind in get_args(actions.AnyAction)}
    assert documented().keys() == names - at_once


def test_every_decision_kind_belongs_to_one_pass():
    kinds = [kind for of_pass in passes.KINDS.values() for kind in of_pass]
    assert sorted(map(repr, kinds)) == sorted(map(repr, get_args(decisions.AnyDecision)))
    assert passes.KINDS.keys() == passes.PASSES.keys()


def test_the_ledger_places_are_the_group_states():
    assert [place.value for place in records.GroupState] == ["in_flight", "buffered", "leased"]
    assert ledger.recount(records.State()).keys() == {"in_flight", "buffered", "leased"}


def named_in(heading: str) -> list[str]:
    """What the table of the architecture page with this heading names."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition(heading)[2]
    return re.findall(r"`([\w/.]+)`", table.partition("\n\n")[0])


def modules(part: str) -> list[str]:
    """Its own modules, and its packages as `name/`."""
    found = [path.stem for path in (PACKAGE / part).glob("*.py") if not path.stem.startswith("__")]
    return sorted(found + [f"{path.parent.name}/" for path in (PACKAGE / part).glob("*/__init__.py")])


@pytest.mark.parametrize("part", ["core", "controller"])
def test_the_architecture_page_has_one_place_for_every_module_of(part):
    assert sorted(named_in(f"| about | modules of `laminar/{part}` |")) == modules(part)


def test_the_architecture_page_has_one_place_for_every_room_of_the_workers():
    assert sorted(named_in("| about | rooms of `laminar/workers` |")) == modules("workers")


def test_the_architecture_page_has_one_place_for_every_room():
    rooms = {name.removeprefix("laminar/").removesuffix(".py") for name in named_in("| where | what | may import |")}
    assert [name for name in modules("") if name not in rooms] == []


# ---- size --------------------------------------------------------------------------------------------------


def test_files_and_functions_of_the_core_stay_readable():
    for path in sources("core"):
        source = path.read_text()
        assert source.count("\n") < 400, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 70, f"{path.name}: {node.name}"
