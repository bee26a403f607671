"""Prompts and scores of reasoning-gym's procedural tasks, ``task.dataset = "reasoning_gym:<name>"``.

Invariants:
* The same task section gives the same prompts on every machine (reasoning-gym seeds each entry by seed + index). Three
  tasks also iterate over sets of text and so need the same PYTHONHASHSEED: isomorphic_strings, polynomial_multiplication
  and ransom_note.
* A held-out question never equals a training question.
* A response is scored against the entry that its prompt was made from. The entry travels as plain values in
  ``prompt.metadata["entry"]``; the few tasks whose scorer tells a tuple from a list (the ARC ones) get the entry made
  anew from ``seed``, ``size`` and ``index`` beside it.
"""

import difflib
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import structlog

from laminar.config import TaskConfig
from laminar.errors import ConfigError
from laminar.ids import PromptId
from laminar.tasks.plain import plain
from laminar.wire import Prompt

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

log = structlog.get_logger()

PREFIX = "reasoning_gym:"
HELD_OUT_TRIES = 4
"""Entries drawn per held-out prompt wanted; a task with few distinct questions then has fewer held-out prompts."""
SLOW_S = 5.0
"""Making entries for longer than this is said, with what remains: some puzzles take 0.1 s each."""
ENTRIES_KEPT = 1024
"""Remade entries kept by a scorer: the siblings of a group share one."""
UNREADABLE = (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError)
"""Raised by some scorers (prime_factorization, for one) for a response that they cannot parse: that is a wrong answer."""


def training_entries(task: TaskConfig) -> Iterator[dict[str, Any]]:
    """`metadata` of each training prompt, in order. Raises ConfigError."""
    return _entries(task, task.seed, task.size, range(task.size))


def held_out_entries(task: TaskConfig, known_questions: set[str]) -> Iterator[dict[str, Any]]:
    """`metadata` of up to `eval_prompts` prompts with distinct questions, none of them known."""
    # Entry i of seed s is entry i - 1 of seed s + 1 in most tasks, so the first new one has index `size`.
    size = task.size + HELD_OUT_TRIES * task.eval_prompts
    seen, wanted = set(known_questions), task.eval_prompts
    for metadata in _entries(task, task.seed + 1, size, range(task.size, size)) if wanted > 0 else ():
        question = metadata["entry"]["question"]
        if question in seen:
            continue
        seen.add(question)
        yield metadata
        wanted -= 1
        if wanted == 0:
            return


def to_prompt(number: int, metadata: dict[str, Any], text: str) -> Prompt:
    """The prompt of an entry, with its question already in the task's template."""
    answer = metadata["entry"]["answer"]
    return Prompt(prompt=PromptId(number), text=text, answer="" if answer is None else str(answer), metadata=metadata)


def scorer(task: TaskConfig) -> Callable[[Prompt, str], float]:
    """The task's own `score_answer`, between 0 and 1, against the entry in the prompt's metadata. Raises ConfigError."""
    generator = _generator(task, task.seed, 1)  # some tasks make all their entries at once; scoring needs none
    same = _scores_plain_entries(generator)

    @lru_cache(ENTRIES_KEPT)
    def remake(seed: int, size: int, index: int) -> Any:
        return _cached_generator(seed, size)[index]

    @lru_cache(2)  # one for training, one for held-out prompts
    def _cached_generator(seed: int, size: int) -> "ProceduralDataset":
        return _generator(task, seed, size)

    def score(prompt: Prompt, response: str) -> float:
        metadata = prompt.metadata
        entry = metadata["entry"] if same else remake(metadata["seed"], metadata["size"], metadata["index"])
        try:
            return float(generator.score_answer(response, entry))
        except UNREADABLE:
            return 0.0

    return score


def _scores_plain_entries(generator: "ProceduralDataset") -> bool:
    """Whether the right answer scores the same against an entry and against its plain copy."""
    entry = generator[0]
    if entry["answer"] is None:
        return True
    return bool(generator.score_answer(entry["answer"], entry) == generator.score_answer(entry["answer"], plain(entry)))


def _entries(task: TaskConfig, seed: int, size: int, indices: range) -> Iterator[dict[str, Any]]:
    generator = _generator(task, seed, size)
    began, told = time.monotonic(), False
    for done, index in enumerate(indices):
        yield {"entry": plain(generator[index]), "seed": seed, "size": size, "index": index}
        elapsed_s = time.monotonic() - began
        if elapsed_s > SLOW_S and not told:
            told = True
            log.warning(
                "slow_data_set",
                dataset=task.dataset,
                made=done + 1,
                size=len(indices),
                remaining_s=round(elapsed_s / (done + 1) * (len(indices) - done - 1)),
                hint="a smaller task.size starts sooner",
            )


def _generator(task: TaskConfig, seed: int, size: int) -> "ProceduralDataset":
    """reasoning-gym's data set. Raises ConfigError for an unknown name or options that it refuses."""
    try:
        # Imported here: it takes seconds and only runs with a procedural task need it.
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(
            f'task.dataset = "{task.dataset}" needs reasoning-gym, which cannot be imported ({error}); '
            "install it with `pip install 'laminar-rl[tasks]'`"
        ) from error
    name = task.dataset.removeprefix(PREFIX)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, list(DATASETS), 3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"there are {len(DATASETS)}, from {min(DATASETS)} to {max(DATASETS)}"
        )
        raise ConfigError(f'task.dataset = "{task.dataset}": reasoning-gym has no task {name!r}; {hint}')
    options = dict(task.options)
    _check_options(options, DATASETS[name][1], name)
    try:
        if name == "composite":
            options["datasets"] = [DatasetSpec(**spec) for spec in options.get("datasets", [])]
        return create_dataset(name, seed=seed, size=size, **options)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"task.options = {task.options}: reasoning-gym's {name} refuses them: {error}") from error


def _check_options(options: dict[str, Any], config_class: type, name: str) -> None:
    known = sorted(set(config_class.__dataclass_fields__) - {"seed", "size"})  # type: ignore[attr-defined]
    for key in options:
        if key in ("seed", "size"):
            raise ConfigError(f"task.options.{key}: set task.{key} instead")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            raise ConfigError(f"task.options.{key}: {name} has no such option; {hint}")
