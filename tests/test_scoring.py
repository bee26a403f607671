"""Which function scores a response, and what it says."""

import asyncio

import msgspec
import pytest

from laminar import wire
from laminar.config import TaskConfig
from laminar.errors import ConfigError
from laminar.tasks.datasets import load
from laminar.tasks.scoring import scorer


def prompts_of(task: TaskConfig) -> list[wire.Prompt]:
    """All prompts of a task as a reward process gets them: over the wire."""
    prompts = load(task)
    every = [*(prompts.prompt(i) for i in range(len(prompts))), *prompts.held_out]
    return [msgspec.msgpack.decode(wire.encode(prompt), type=wire.Prompt) for prompt in every]


def test_spell_backward_gives_part_of_the_reward_for_each_letter_in_its_place():
    task = TaskConfig(size=4, eval_prompts=1)
    score = scorer(task)
    prompt = next(prompt for prompt in prompts_of(task) if len(prompt.answer) > 3)
    answer = prompt.answer
    assert score(prompt, answer) == score(prompt, answer.upper()) == 1.0
    assert score(prompt, "#" + answer[1:]) == pytest.approx(1 - 1 / len(answer))
    assert score(prompt, answer[:2]) == pytest.approx(2 / len(answer))
    assert score(prompt, "") == score(prompt, "#" * 20) == 0.0


@pytest.mark.parametrize("name", ["rearc", "knights_knaves", "gsm_symbolic", "word_ladder", "countdown", "sudoku"])
def test_the_right_answer_is_right_for_training_and_held_out_prompts(name):
    task = TaskConfig(dataset=f"reasoning_gym:{name}", size=3, eval_prompts=2)
    score = scorer(task)
    prompts = prompts_of(task)
    assert [score(prompt, prompt.answer) for prompt in prompts] == [1.0] * len(prompts)
    assert all(score(prompt, "certainly wrong") < 0.5 for prompt in prompts)


def test_a_response_that_the_scorer_cannot_parse_is_a_wrong_answer():
    task = TaskConfig(dataset="reasoning_gym:prime_factorization", size=1, eval_prompts=0)
    assert scorer(task)(prompts_of(task)[0], "two times three") == 0.0


def test_a_file_data_set_is_scored_by_exact_match_aside_from_white_space():
    score = scorer(TaskConfig(dataset="data.jsonl"))
    prompt = wire.Prompt(prompt=0, answer="42")
    assert [score(prompt, response) for response in ("42", " 42\n", "42.0", "")] == [1.0, 1.0, 0.0, 0.0]


def test_the_users_function_is_used_as_it_is_sync_or_async(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def parts(prompt, response):\n    return {'reward': float(response == prompt.answer), 'length': len(response)}\n"
        "async def judge(prompt, response):\n    return 0.25\n"
    )
    prompt = wire.Prompt(prompt=0, answer="a")
    assert scorer(TaskConfig(reward=f"{path}:parts"))(prompt, "a") == {"reward": 1.0, "length": 1}
    assert asyncio.run(scorer(TaskConfig(reward=f"{path}:judge"))(prompt, "a")) == 0.25


def test_a_reward_that_is_no_function_is_refused(tmp_path):
    path = tmp_path / "no_function.py"
    path.write_text("value = 3\nclass Reward: pass\n")
    for name, expected in [("value", "is of type int"), ("Reward", "is a class"), ("rewrd", "it defines Reward")]:
        with pytest.raises(ConfigError, match=expected):
            scorer(TaskConfig(reward=f"{path}:{name}"))


def test_an_unknown_procedural_task_is_refused():
    with pytest.raises(ConfigError, match="did you mean spell_backward"):
        scorer(TaskConfig(dataset="reasoning_gym:spell_backwards"))
