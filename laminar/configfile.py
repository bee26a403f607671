"""Read a run's configuration: a TOML file, then ``section.key=value`` overrides, into `laminar.config.Config`.

Relative paths (`model.path`, `task.dataset`, `task.eval_dataset` and files in `task.reward` and `buffer.sampler`) are
taken from the configuration file's directory if they exist there, else from the working directory, and become absolute:
the resolved configuration means the same on every worker of a host and in a later run. So do files beside the configuration that
are named in `task.agent`.

Invariants: nothing is silently ignored; every ConfigError names the file or override, the key, what was given and what
was expected; ``load(file with dumps(config)) == config``.
"""

import datetime
import difflib
import json
import math
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from laminar.config import Config, Section, TaskConfig
from laminar.configrules import check
from laminar.errors import ConfigError
from laminar.plugins import is_file_reference

INT_BITS = 63  # what msgpack and SQLite take
SHOWN_CHARACTERS_MAX = 80  # of a wrong value in a message

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

_SECTIONS: dict[str, type[Section]] = get_type_hints(Config)
_KEYS: dict[str, dict[str, Any]] = {name: get_type_hints(section) for name, section in _SECTIONS.items()}
_PATHS = (("model", "path"), ("task", "dataset"), ("task", "eval_dataset"))
_REFERENCES = (("task", "reward"), ("buffer", "sampler"))


def load(path: Path | None, overrides: list[str]) -> Config:
    """The checked configuration of a file (None = all defaults) with overrides like ``trainer.lr=1e-5``, the last one winning.

    An override's value is TOML; what is not TOML, and anything given for a text key, is taken as text. Raises ConfigError.
    """
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    if path is not None:
        _merge_file(sections, path)
    for override in overrides:
        _merge_override(sections, override)
    _resolve_paths(sections, path.parent if path is not None else None)
    built: dict[str, Any] = {name: _SECTIONS[name](**values) for name, values in sections.items()}
    config = check(Config(**built))
    _require_model(config.model.path)
    return config


def dumps(config: Config) -> str:
    """`config` as TOML with every key, also the defaults."""
    lines: list[str] = []
    for name in _SECTIONS:
        lines += [f"[{name}]", *(f"{key} = {_toml(getattr(getattr(config, name), key))}" for key in _KEYS[name]), ""]
    return "\n".join(lines)


def flat(config: Config) -> dict[str, str]:
    """`section.key` -> its value as TOML, of every key."""
    return {f"{name}.{key}": _toml(getattr(getattr(config, name), key)) for name in _SECTIONS for key in _KEYS[name]}


def changed(config: Config) -> list[tuple[str, str, str]]:
    """(`section.key`, value, default), as TOML, of the keys that are not at their defaults."""
    default = flat(Config())
    return [(key, value, default[key]) for key, value in flat(config).items() if value != default[key]]


def _merge_file(sections: dict[str, dict[str, Any]], path: Path) -> None:
    for section, table in _read(path).items():
        if section not in _SECTIONS and not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} = {_show(table)} stands in no section{_homes(section)}")
        _require_section(section, str(path))
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} = {_show(table)}: expected a section [{section}] with keys")
        for key, value in table.items():
            _require_key(section, key, str(path))
            sections[section][key] = _convert(value, _KEYS[section][key], f"{path}: {section}.{key}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the configuration is not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _merge_override(sections: dict[str, dict[str, Any]], override: str) -> None:
    """Set one key of `sections`, or, below a table such as `task.options`, one key of that table."""
    dotted, equals, text = override.partition("=")
    section, *keys = (part.strip() for part in dotted.split("."))
    where = f"override {override!r}"
    if not equals or not keys or not all([section, *keys]):
        raise ConfigError(f"{where}: expected section.key=value, for example trainer.lr=1e-5")
    _require_section(section, where)
    key, *inner = keys
    _require_key(section, key, where)
    annotation = _KEYS[section][key]
    if not inner:
        sections[section][key] = _convert(_parse_value(text, annotation), annotation, f"{where}: {section}.{key}")
    elif get_origin(annotation) is dict:
        value = _convert(_parse_value(text, Any), Any, f"{where}: {dotted}")
        sections[section][key] = _with_inner(sections[section].get(key, {}), inner, value, where)
    else:
        raise ConfigError(f"{where}: {section}.{key} is not a table; expected {section}.{key}=value")


def _with_inner(table: dict[str, Any], keys: list[str], value: Any, where: str) -> dict[str, Any]:
    """A copy of `table` with the value at the path `keys` replaced."""
    if len(keys) == 1:
        return table | {keys[0]: value}
    inner = table.get(keys[0], {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{where}: {keys[0]} = {_show(inner)} is not a table")
    return table | {keys[0]: _with_inner(inner, keys[1:], value, where)}


def _parse_value(text: str, annotation: Any) -> Any:
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if list(parsed) != ["value"]:  # a line break and a second key inside the text
        return text
    is_text = annotation is str or get_origin(annotation) is Literal
    return text if is_text and not isinstance(parsed["value"], str) else parsed["value"]


def _require_section(name: str, where: str) -> None:
    if name not in _SECTIONS:
        near = difflib.get_close_matches(name, _SECTIONS, 1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_SECTIONS)}"
        raise ConfigError(f"{where}: section {name} is unknown; {hint}")


def _homes(key: str) -> str:
    """Where a key that stands alone belongs."""
    homes = [section for section, keys in _KEYS.items() if key in keys]
    return f"; it belongs below [{'] or ['.join(homes)}]" if homes else f"; there are [{'], ['.join(_SECTIONS)}]"


def _require_key(section: str, name: str, where: str) -> None:
    keys = _KEYS[section]
    if name in keys:
        return
    near = [f"{section}.{key}" for key in difflib.get_close_matches(name, keys, 1, cutoff=0.5)]
    near += [f"{other}.{name}" for other in _KEYS if name in _KEYS[other]]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(keys)}"
    raise ConfigError(f"{where}: key {section}.{name} is unknown; {hint}")


def _convert(value: Any, annotation: Any, where: str) -> Any:
    """`value` as the type of its key. Raises ConfigError."""
    problem = f"{where} = {_show(value)}: expected {_expected(annotation)}"
    try:
        converted = msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        near = difflib.get_close_matches(str(value), choices, 1)
        raise ConfigError(problem + (f"; did you mean {near[0]}?" if near else "")) from error
    if not _is_plain(converted):
        raise ConfigError(f"{problem}; numbers must be finite and fit in {INT_BITS + 1} bits, text must be Unicode")
    return converted


def _is_plain(value: Any) -> bool:
    """Whether every number and text in the value can be written to a file and sent to a worker."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)  # bytes of argv that are not UTF-8
    return not isinstance(value, int) or -(1 << INT_BITS) <= value < 1 << INT_BITS


def _expected(annotation: Any) -> str:
    """A type in words."""
    names: dict[Any, str] = {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        Any: "a value",
    }
    names |= {list[str]: "a list of texts", str | list[str]: "text or a list of texts"}
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in arguments)
    if get_origin(annotation) is tuple:
        return f"a list of {len(arguments)} numbers"
    if get_origin(annotation) is dict:
        return "a table"
    return names.get(annotation, str(annotation))


def _resolve_paths(sections: dict[str, dict[str, Any]], directory: Path | None) -> None:
    """Make the paths and ``file.py:name`` references that were given absolute."""
    for section, key in _PATHS:
        value = sections[section].get(key, "")
        if value and not value.startswith("reasoning_gym:"):
            sections[section][key] = _absolute(value, directory)
    for section, key in _REFERENCES:
        value = sections[section].get(key, "")
        if is_file_reference(value):
            file, _, name = value.rpartition(":")
            sections[section][key] = f"{_absolute(file, directory)}:{name}"
    _resolve_agent(sections["task"], directory)


def _resolve_agent(task: dict[str, Any], directory: Path | None) -> None:
    """Agents run in directories of their own: parts of the command that name files beside the configuration become absolute."""
    agent = task.get("agent")
    if not agent or directory is None:
        return
    try:
        command = TaskConfig(agent=agent).agent_command
    except ValueError:
        return  # `check` says so
    beside = [part for at, part in enumerate(command) if (directory / part).is_file() and (at or "/" in part)]
    if beside:
        task["agent"] = [_absolute(part, directory) if part in beside else part for part in command]


def _absolute(text: str, directory: Path | None) -> str:
    path = Path(os.path.expanduser(text))  # unlike Path.expanduser, leaves an unknown user's ~ as it is
    if directory is not None and (directory / path).exists():
        path = directory / path
    return str(path.absolute())


def _require_model(path: str) -> None:
    if not Path(path).is_dir():
        raise ConfigError(
            f"model.path = {path!r}: no such directory; name one with a Hugging Face model"
            " (`hf download ORG/NAME --local-dir DIR` makes one)"
        )
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path = {path!r}: the directory has no config.json, so it is no Hugging Face model")


def _toml(value: Any) -> str:
    """One TOML value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's but for DEL
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{key if _BARE_KEY.fullmatch(key) else _toml(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    raise ConfigError(f"{value!r} of type {type(value).__name__} cannot be written as TOML")


def _show(value: Any) -> str:
    """A value as the user wrote it, shortened for a message."""
    text = _toml(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "…"
