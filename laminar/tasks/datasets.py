"""The prompts of a run: reasoning-gym tasks, ``.jsonl`` and ``.parquet`` files.

A file's row is an object with a prompt (`task.prompt_key`: text, or chat messages with `role` and `content`) and an
answer (`task.answer_key`, else verl's ``reward_model.ground_truth``). Its other columns become the prompt's metadata;
an object in a column called ``metadata`` is spread into it. `task.prompt_template` wraps text prompts of all sources.

Invariants:
* All prompts are made by `load`: afterwards `PromptSet.prompt` costs nothing and cannot fail.
* Held-out prompts never repeat a training prompt; their ids follow those of the training prompts.
* A row that cannot be used is an error that names it, never skipped. No torch here: the controller imports this.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from laminar.config import TaskConfig
from laminar.errors import ConfigError
from laminar.ids import PromptId
from laminar.tasks import procedural
from laminar.tasks.plain import plain
from laminar.wire import Prompt

PROBLEMS_SHOWN = 5  # rows named in one message
PARQUET_ROWS = 4096  # decoded at a time: bounds memory beside the prompts themselves


class PromptSet:
    """Training prompts by position, and the held-out ones."""

    def __init__(self, prompts: list[Prompt], held_out: list[Prompt]) -> None:
        self._prompts = prompts
        self.held_out = held_out
        """At most `task.eval_prompts`; fewer where the source has no more."""

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        """Training prompt `index`, 0 <= index < len(self); IndexError otherwise."""
        if not 0 <= index < len(self._prompts):
            raise IndexError(f"prompt {index} of {len(self._prompts)}")
        return self._prompts[index]


def load(task: TaskConfig) -> PromptSet:
    """All prompts of a task. Raises ConfigError for anything about them that cannot work."""
    if "{prompt}" not in task.prompt_template:
        raise ConfigError(f"task.prompt_template = {task.prompt_template!r}: it has no {{prompt}}")
    if task.dataset.startswith(procedural.PREFIX):
        return _load_procedural(task)
    return _load_files(task)


def _load_procedural(task: TaskConfig) -> PromptSet:
    if task.size < 1:
        raise ConfigError(f"task.size = {task.size}: a procedural data set needs at least 1 prompt")
    if task.eval_dataset:
        raise ConfigError(
            f'task.eval_dataset is for data sets that are files; "{task.dataset}" makes its own held-out prompts'
        )
    training = list(procedural.training_entries(task))
    held_out = procedural.held_out_entries(task, {metadata["entry"]["question"] for metadata in training})
    prompts = [
        procedural.to_prompt(number, metadata, _templated(task, metadata["entry"]["question"]))
        for number, metadata in enumerate([*training, *held_out])
    ]
    return PromptSet(prompts[: task.size], prompts[task.size :])


def _load_files(task: TaskConfig) -> PromptSet:
    if task.options:
        raise ConfigError(f"task.options = {task.options}: only procedural data sets take options, not {task.dataset}")
    prompts = _load_file(task, Path(task.dataset))
    if not task.eval_dataset or task.eval_prompts < 1:
        return PromptSet(prompts, [])
    known = {_identity(prompt) for prompt in prompts}
    candidates = _load_file(task, Path(task.eval_dataset))
    fresh = [prompt for prompt in candidates if _identity(prompt) not in known]
    if not fresh:
        raise ConfigError(f"task.eval_dataset = {task.eval_dataset}: every prompt is also a training prompt")
    held_out = [_renumbered(prompt, len(prompts) + i) for i, prompt in enumerate(fresh[: task.eval_prompts])]
    return PromptSet(prompts, held_out)


def _load_file(task: TaskConfig, path: Path) -> list[Prompt]:
    """The prompts of one file, numbered from 0."""
    prompts: list[Prompt] = []
    problems: list[str] = []
    num_problems = 0
    for where, row in _read(path):
        if not prompts and not num_problems:
            _require_columns(row, task, path)
        try:
            prompts.append(_to_prompt(row, task, len(prompts)))
        except ValueError as error:
            num_problems += 1
            if num_problems <= PROBLEMS_SHOWN:
                problems.append(f"\n  {where}: {error}")
    if problems:
        rest = f"\n  and {num_problems - PROBLEMS_SHOWN} more" if num_problems > PROBLEMS_SHOWN else ""
        raise ConfigError(f"{path}: {num_problems} rows cannot be used:{''.join(problems)}{rest}")
    if not prompts:
        raise ConfigError(f"{path}: the data set is empty")
    return prompts


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, row) of each row. Raises ConfigError."""
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ConfigError(f'{path}: expected a .jsonl or .parquet file, or "{procedural.PREFIX}<name>"')
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (relative paths count from {Path.cwd()})")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the data set: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig").strip())
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{number}: not valid JSON: {_what(error)}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
            yield f"line {number}", row


def _what(error: Exception) -> str:
    """Of a line, without its own count of lines."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return f"byte {error.start} is no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} needs pyarrow, which cannot be imported ({error}); install it with `pip install 'laminar-rl[tasks]'`"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: not a readable Parquet file: {error}") from error


def _require_columns(row: dict[str, Any], task: TaskConfig, path: Path) -> None:
    """The first row shows which columns the file has."""
    columns = ", ".join(map(str, row)) or "none"
    if task.prompt_key not in row:
        raise ConfigError(f"{path}: no column {task.prompt_key!r} (task.prompt_key); there are {columns}")
    if _answer(row, task) is None and not task.reward:
        raise ConfigError(
            f"{path}: no answer in column {task.answer_key!r} (task.answer_key) nor in reward_model.ground_truth; "
            f"there are {columns}. Name the column, or a task.reward that needs no answer"
        )


def _to_prompt(row: dict[str, Any], task: TaskConfig, number: int) -> Prompt:
    """Raises ValueError saying why the row cannot be used."""
    value = row.get(task.prompt_key)
    text, messages = "", []
    if isinstance(value, list):
        messages = [_message(message, position) for position, message in enumerate(value)]
    elif isinstance(value, str):
        text = _templated(task, plain(value)) if value else ""
    elif value is None:
        raise ValueError(f"{task.prompt_key} is missing")
    else:
        raise ValueError(f"{task.prompt_key} is {type(value).__name__}, expected text or a list of chat messages")
    if not text and not messages:
        raise ValueError(f"{task.prompt_key} is empty")
    answer = _answer(row, task)
    if answer is None and not task.reward:
        raise ValueError(f"no answer in {task.answer_key} nor in reward_model.ground_truth")
    return Prompt(
        prompt=PromptId(number), text=text, messages=messages, answer=_as_text(answer), metadata=_metadata(row, task)
    )


def _message(value: Any, position: int) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in ("role", "content")):
        raise ValueError(f"message {position} is not an object with role and content as text")
    return {"role": plain(value["role"]), "content": plain(value["content"])}


def _answer(row: dict[str, Any], task: TaskConfig) -> Any:
    answer = row.get(task.answer_key)
    if answer is None and isinstance(row.get("reward_model"), dict):
        answer = row["reward_model"].get("ground_truth")
    return answer


def _as_text(answer: Any) -> str:
    answer = plain(answer)
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _metadata(row: dict[str, Any], task: TaskConfig) -> dict[str, Any]:
    columns = {key: value for key, value in row.items() if key not in (task.prompt_key, task.answer_key)}
    spread = columns.pop("metadata", None)
    if isinstance(spread, dict):
        columns = spread | columns
    elif spread is not None:
        columns["metadata"] = spread
    return dict(plain(columns))


def _templated(task: TaskConfig, text: str) -> str:
    return task.prompt_template.replace("{prompt}", text)


def _identity(prompt: Prompt) -> tuple[str, str]:
    return prompt.text, json.dumps(prompt.messages)


def _renumbered(prompt: Prompt, number: int) -> Prompt:
    return msgspec.structs.replace(prompt, prompt=PromptId(number))
