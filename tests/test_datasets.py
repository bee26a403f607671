"""Data sets: what becomes a prompt, what survives the wire, and that every unusable row is named."""

import datetime
import decimal
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pyarrow
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from laminar import wire
from laminar.config import TaskConfig
from laminar.errors import ConfigError
from laminar.tasks import procedural
from laminar.tasks.datasets import load
from laminar.tasks.plain import plain


def rows(tmp_path: Path, *values: object, name: str = "data.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def message(**task: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(TaskConfig(**task))
    return str(caught.value)


def spell(**task: object) -> TaskConfig:
    return TaskConfig(**({"dataset": "reasoning_gym:spell_backward", "size": 50, "eval_prompts": 20} | task))


# ---- reasoning-gym -----------------------------------------------------------------------------------------


def test_a_procedural_task_gives_numbered_prompts_in_its_template():
    prompts = load(spell(prompt_template="{prompt}\n{{x}}", options={"min_word_len": 4}))
    assert len(prompts) == 50
    prompt = prompts.prompt(7)
    entry = prompt.metadata["entry"]
    assert prompt.prompt == 7
    assert prompt.text == entry["question"] + "\n{{x}}"
    assert prompt.answer == entry["metadata"]["word"][::-1]
    assert all(len(prompts.prompt(i).answer) >= 4 for i in range(50))


def test_held_out_prompts_never_repeat_a_training_prompt_and_number_on():
    prompts = load(spell())
    held_out = prompts.held_out
    questions = {prompts.prompt(i).text for i in range(50)}
    assert len(held_out) == len({prompt.text for prompt in held_out}) == 20
    assert not questions & {prompt.text for prompt in held_out}
    assert [prompt.prompt for prompt in held_out] == list(range(50, 70))


def test_a_task_with_few_questions_has_fewer_held_out_prompts():
    options = {"min_word_len": 3, "max_word_len": 3, "data_file": "words3to10.txt"}
    few = load(spell(size=1000, eval_prompts=1000, options=options))
    assert 0 < len(few.held_out) < 1000


def test_the_same_task_gives_the_same_prompts_and_another_seed_others():
    def texts(prompts):
        return [prompts.prompt(i).text for i in range(len(prompts))]

    assert texts(load(spell())) == texts(load(spell()))
    assert texts(load(spell())) != texts(load(spell(seed=18)))


def test_no_held_out_prompts_are_made_when_none_are_wanted():
    assert load(spell(eval_prompts=0)).held_out == []


@pytest.mark.parametrize("name", ["knights_knaves", "graph_color", "rearc", "gsm_symbolic", "word_ladder", "boxnet"])
def test_prompts_of_tasks_with_unusual_entries_survive_the_wire(name):
    prompts = load(TaskConfig(dataset=f"reasoning_gym:{name}", size=3, eval_prompts=2))
    for prompt in [prompts.prompt(0), *prompts.held_out]:
        assert msgspec.msgpack.decode(wire.encode(prompt), type=wire.Prompt) == prompt
        assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata
    assert len(prompts.held_out) == 2


def test_a_composite_of_tasks_is_understood():
    specs = [{"name": "gcd", "weight": 1, "config": {}}, {"name": "lcm", "weight": 2, "config": {}}]
    prompts = load(TaskConfig(dataset="reasoning_gym:composite", size=20, eval_prompts=0, options={"datasets": specs}))
    assert {prompts.prompt(i).metadata["entry"]["metadata"]["source_dataset"] for i in range(20)} == {"gcd", "lcm"}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"dataset": "reasoning_gym:spel_backward"}, "has no task 'spel_backward'; did you mean spell_backward"),
        ({"dataset": "reasoning_gym:"}, "has no task ''; there are 1"),
        ({"options": {"min_word_length": 3}}, "spell_backward has no such option; did you mean min_word_len?"),
        ({"options": {"xyz": 3}}, "it has data_file, max_word_len, min_word_len"),
        ({"options": {"size": 3}}, "set task.size instead"),
        ({"options": {"min_word_len": 5, "max_word_len": 4}}, "refuses them: max_word_len must be >="),
        ({"options": {"min_word_len": "three"}}, "refuses them: "),
        ({"size": 0}, "task.size = 0"),
        ({"eval_dataset": "x.jsonl"}, "task.eval_dataset is for data sets that are files"),
        ({"prompt_template": "no place"}, "has no {prompt}"),
    ],
)
def test_a_wrong_procedural_task_is_refused(task, expected):
    assert expected in message(**({"dataset": "reasoning_gym:spell_backward"} | task))


# ---- files -------------------------------------------------------------------------------------------------


def test_a_jsonl_file_becomes_prompts_with_the_other_columns_as_metadata(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"q": "1+{x}?", "a": 3, "level": 2, "metadata": {"level": 1, "id": "p1"}}\n\n{"q": "é", "a": "e"}\n'
    )
    prompts = load(TaskConfig(dataset=str(path), prompt_key="q", answer_key="a", prompt_template="Q: {prompt}\n"))
    first, second = prompts.prompt(0), prompts.prompt(1)
    assert (first.text, first.answer, first.metadata) == ("Q: 1+{x}?\n", "3", {"level": 2, "id": "p1"})
    assert (second.text, second.prompt, prompts.held_out) == ("Q: é\n", 1, [])


def test_chat_messages_are_kept_and_not_templated(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompts = load(
        TaskConfig(dataset=rows(tmp_path, {"prompt": messages, "answer": True}), prompt_template="x{prompt}")
    )
    assert prompts.prompt(0).messages == messages
    assert (prompts.prompt(0).text, prompts.prompt(0).answer) == ("", "true")


def test_verl_columns_of_a_parquet_file_are_understood(tmp_path):
    path = tmp_path / "train.parquet"
    table = pyarrow.table(
        {
            "data_source": ["gsm8k"] * 2,
            "prompt": [[{"role": "user", "content": f"question {i}"}] for i in range(2)],
            "reward_model": [{"style": "rule", "ground_truth": str(i)} for i in range(2)],
            "extra_info": [{"index": i, "split": "train"} for i in range(2)],
            "when": [datetime.datetime(2026, 1, 2)] * 2,
            "blob": [b"\xff"] * 2,
        }
    )
    parquet.write_table(table, path)
    prompts = load(TaskConfig(dataset=str(path)))
    prompt = prompts.prompt(1)
    assert (prompt.messages, prompt.answer) == ([{"role": "user", "content": "question 1"}], "1")
    assert prompt.metadata["data_source"] == "gsm8k"
    assert prompt.metadata["extra_info"] == {"index": 1, "split": "train"}
    assert (prompt.metadata["when"], prompt.metadata["blob"]) == ("2026-01-02T00:00:00", "ff")
    assert wire.encode(prompt)


def test_held_out_prompts_of_a_file_come_from_its_own_file_without_training_prompts(tmp_path):
    train = rows(tmp_path, *({"prompt": f"p{i}", "answer": i} for i in range(3)))
    evaluation = rows(tmp_path, *({"prompt": f"p{i}", "answer": i} for i in range(1, 9)), name="eval.jsonl")
    prompts = load(TaskConfig(dataset=train, eval_dataset=evaluation, eval_prompts=4))
    assert [(prompt.prompt, prompt.text) for prompt in prompts.held_out] == [(3, "p3"), (4, "p4"), (5, "p5"), (6, "p6")]
    assert "every prompt is also a training prompt" in message(dataset=train, eval_dataset=train)


def test_an_answer_is_not_needed_when_a_reward_function_is_named(tmp_path):
    assert load(TaskConfig(dataset=rows(tmp_path, {"prompt": "p"}), reward="x.py:f")).prompt(0).answer == ""


def test_an_index_outside_of_the_set_is_refused(tmp_path):
    prompts = load(TaskConfig(dataset=rows(tmp_path, {"prompt": "p", "answer": "a"})))
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"prompt {index} of 1"):
            prompts.prompt(index)


def test_a_wrong_column_is_named_with_the_columns_there_are(tmp_path):
    path = rows(tmp_path, {"question": "q", "solution": "s"})
    assert "no column 'prompt' (task.prompt_key); there are question, solution" in message(dataset=path)
    text = message(dataset=path, prompt_key="question")
    assert "no answer in column 'answer'" in text
    assert "there are question, solution" in text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": 5, "answer": "a"}, "line 2: prompt is int, expected text or a list of chat messages"),
        ({"answer": "a"}, "line 2: prompt is missing"),
        ({"prompt": "", "answer": "a"}, "line 2: prompt is empty"),
        ({"prompt": [], "answer": "a"}, "line 2: prompt is empty"),
        ({"prompt": ["hi"], "answer": "a"}, "line 2: message 0 is not an object with role and content"),
        ({"prompt": [{"role": "user", "content": [{"image": 1}]}], "answer": "a"}, "line 2: message 0"),
        ({"prompt": "p"}, "line 2: no answer in answer"),
        ({"prompt": "p", "answer": None}, "line 2: no answer in answer"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, expected):
    path = rows(tmp_path, {"prompt": "p", "answer": "a"}, row, {"prompt": "p", "answer": "a"})
    text = message(dataset=path)
    assert "1 rows cannot be used" in text
    assert expected in text


def test_many_unusable_rows_are_counted_and_the_first_ones_named(tmp_path):
    text = message(dataset=rows(tmp_path, *[{"prompt": "", "answer": "a"}] * 9))
    assert "9 rows cannot be used" in text
    assert "line 5" in text
    assert "line 6" not in text
    assert text.endswith("and 4 more")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"prompt": "p", "answer": "a"}\n{"prompt": \n', ":2: not valid JSON: Expecting value at column 11"),
        (b'{"prompt": "\xff"}\n', ":1: not valid JSON: byte 12 is no UTF-8"),
        (b"[1]\n", ":1: expected a JSON object, got list"),
        (b"[" * 100_000, ":1: not valid JSON"),
        (b"", "the data set is empty"),
        (b"\n\n", "the data set is empty"),
    ],
)
def test_a_broken_jsonl_file_is_named_with_its_line(tmp_path, content, expected):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    assert f"{path}" in message(dataset=str(path))
    assert expected in message(dataset=str(path))


def test_a_broken_or_missing_file_is_refused(tmp_path):
    broken = tmp_path / "data.parquet"
    broken.write_bytes(b"PAR1 this is not one")
    assert "not a readable Parquet file" in message(dataset=str(broken))
    assert "no such file" in message(dataset=str(tmp_path / "none.jsonl"))
    assert "expected a .jsonl or .parquet file" in message(dataset="prompts.csv")
    assert "only procedural data sets take options" in message(dataset="prompts.jsonl", options={"a": 1})


# ---- plain values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, {2}), [1, [2]]),
        ({1: datetime.date(2026, 1, 2), "t": datetime.time(3)}, {"1": "2026-01-02", "t": "03:00:00"}),
        (np.array([[1.5, 2]]), [[1.5, 2.0]]),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.float64(0.5), 0.5),
        (b"text", "text"),
        (2**64, str(2**64)),
        (decimal.Decimal("1.10"), "1.10"),
        ("a\ud800", "a?"),
        ({"b", "a"}, ["a", "b"]),
    ],
)
def test_values_become_plain(value, expected):
    found = plain(value)
    assert found == expected
    assert type(found) is type(expected)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(_values)
def test_plain_values_survive_msgpack_and_stay_as_they_are(value):
    found = plain(value)
    assert plain(found) == found
    prompt = wire.Prompt(prompt=0, metadata={"value": found})
    assert msgspec.msgpack.decode(wire.encode(prompt), type=wire.Prompt) == prompt


def test_loading_prompts_does_not_load_torch():
    code = (
        "import sys\nfrom laminar.config import TaskConfig\nfrom laminar.tasks.datasets import load\n"
        "assert 'reasoning_gym' not in sys.modules\nload(TaskConfig(size=2, eval_prompts=1))\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_a_data_set_that_takes_long_to_make_says_what_remains(monkeypatch):
    monkeypatch.setattr(procedural, "SLOW_S", -1.0)
    with structlog.testing.capture_logs() as logs:
        load(spell(size=10, eval_prompts=0))
    (entry,) = logs
    assert (entry["event"], entry["made"], entry["size"]) == ("slow_data_set", 1, 10)
    assert entry["remaining_s"] >= 0
