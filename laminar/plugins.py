"""Load the user's own code by reference: ``pkg.mod:Name`` or ``path/file.py:Name``.

Invariants:
* Whatever is wrong with a reference or with the code behind it, the caller gets one ConfigError that says where.
* A file is executed once per process, however often it is loaded, unless it is to be `fresh`. Its directory (for a module:
  the working directory) is appended to ``sys.path``, so that user code may import its neighbours and never shadows an installed
  package.
"""

import ast
import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from laminar.errors import ConfigError

NUM_NAMES_MAX = 8  # names listed in a message: enough to find a typo, short enough for one line
_LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))


def load_object(reference: str, what: str, *, fresh: bool = False) -> Any:
    """The object that `reference` names. `what` says in messages what it is for, for example ``buffer.sampler``.

    Relative file paths are taken from the working directory. `fresh`: a file is executed again, as it is now. Raises ConfigError
    for a reference without a colon, a missing file, module or name, and for user code that fails while it is imported.
    """
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f'{what} = "{reference}": expected "pkg.mod:Name" or "path/file.py:Name"')
    heading = f'{what} = "{reference}"'
    module = _load_file(Path(place), heading, fresh) if is_file_reference(reference) else _load_module(place, heading)
    if not hasattr(module, name):
        raise ConfigError(f"{heading}: {place} has no {name}{_candidates(name, module)}")
    return getattr(module, name)


def check_file(reference: str, what: str) -> None:
    """For code that another process is to load: whether the file of a ``file.py:name`` is there, parses, and binds the name.
    Nothing of it runs. Raises ConfigError."""
    place, _, name = reference.rpartition(":")
    heading = f'{what} = "{reference}"'
    path = Path(place).expanduser().absolute()
    _require_file(path, heading)
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError, OSError, RecursionError) as error:
        raise _import_error(heading, place, error) from error
    bound = [bound for node in nodes for bound in _bound_by(node)]
    if name not in bound and "*" not in bound:
        near = difflib.get_close_matches(name, bound, 1)
        raise ConfigError(f"{heading}: {place} has no {name}" + (f"; did you mean {near[0]}?" if near else ""))


def _bound_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def is_file_reference(reference: str) -> bool:
    """Whether the part before the last colon is the path of a Python file."""
    return reference.rpartition(":")[0].endswith(".py")


def absolute(reference: str) -> str:
    """The same reference wherever it is loaded from."""
    if not is_file_reference(reference):
        return reference
    file, _, name = reference.rpartition(":")
    return f"{Path(os.path.expanduser(file)).absolute()}:{name}"  # unlike Path.expanduser, leaves an unknown user's ~


def _load_file(path: Path, heading: str, fresh: bool) -> ModuleType:
    path = path.expanduser().absolute()
    _require_file(path, heading)
    path = path.resolve()
    # The checksum keeps two files of the same name in different directories apart.
    name = f"laminar_user_{path.stem}_{crc32(str(path).encode()):08x}"
    if name in sys.modules and not fresh:
        return sys.modules[name]
    if fresh:  # compiled code counts as present if size and second of the file are what they were
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{heading}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    _append_path(path.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code may raise anything
        sys.modules.pop(name, None)
        raise _import_error(heading, str(path), error) from error
    return module


def _require_file(path: Path, heading: str) -> None:
    if not path.is_file():
        nearby = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"{heading}: no file {path}{_nearest(path.name, nearby)}")


def _load_module(name: str, heading: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{heading}: {name!r} is neither a module (pkg.mod) nor a Python file (path/file.py)")
    _append_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_error(heading, name, error) from error
        raise ConfigError(f"{heading}: no module {error.name}{_nearest(error.name, _siblings(error.name))}") from error
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise _import_error(heading, name, error) from error


def _append_path(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
        importlib.invalidate_caches()


def _siblings(name: str) -> list[str]:
    """Full names of the modules that lie where the missing module `name` was looked for."""
    parent, _, _ = name.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", []) if parent else None
    return [f"{parent}.{found.name}" if parent else found.name for found in pkgutil.iter_modules(paths)]


def _import_error(heading: str, place: str, error: BaseException) -> ConfigError:
    """One line: the error and the deepest line of the user's own code that led to it."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
        return ConfigError(f"{heading}: {place} does not parse: {error.msg} ({where})")
    frames = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith(("<frozen", *_LIBRARIES))
    ]
    where = f" ({frames[-1]})" if frames else ""
    return ConfigError(f"{heading}: importing {place} failed: {type(error).__name__}: {error}{where}")


def _candidates(name: str, module: ModuleType) -> str:
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    public = [key for key in own if not key.startswith("_")]
    near = difflib.get_close_matches(name, public, NUM_NAMES_MAX)
    listed = [*near, *sorted(set(public) - set(near))][:NUM_NAMES_MAX]
    return f"; it defines {', '.join(listed)}" if listed else "; it defines nothing that could be meant"


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else ""
