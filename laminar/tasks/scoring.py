"""Which function scores a response: the user's, the data set's own, or exact match.

A user's reward function is ``reward(prompt: wire.Prompt, response: str) -> float | dict[str, float]``, sync or async;
of a dict, "reward" is what trains and the other keys are recorded as its parts. It runs in a reward process.
"""

from collections.abc import Awaitable, Callable

from laminar.config import TaskConfig
from laminar.errors import ConfigError
from laminar.plugins import load_object
from laminar.tasks import procedural
from laminar.wire import Prompt

Score = float | dict[str, float]
Scorer = Callable[[Prompt, str], Score | Awaitable[Score]]


def scorer(task: TaskConfig) -> Scorer:
    """The scorer of a task; an async user function is returned as it is. Raises ConfigError when there is none."""
    if task.reward:
        function = load_object(task.reward, "task.reward")
        if not callable(function) or isinstance(function, type):
            kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
            raise ConfigError(f'task.reward = "{task.reward}" is {kind}; expected a function reward(prompt, response)')
        return function  # type: ignore[no-any-return]
    if task.dataset.startswith(procedural.PREFIX):
        return procedural.scorer(task)
    return exact_match


def exact_match(prompt: Prompt, response: str) -> float:
    """1.0 if the response equals the reference answer, white space at both ends aside, else 0.0."""
    return float(response.strip() == prompt.answer.strip())
