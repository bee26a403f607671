"""The configuration file: what is read, what is written back, and that every mistake is named."""

import ast
import datetime
import inspect
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar import config as declared
from laminar.config import Config
from laminar.configfile import dumps, load
from laminar.errors import ConfigError


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """A working directory with a model in it."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def write(text: str, name: str = "run.toml") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def file_message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(text), ["model.path=model"])
    return str(caught.value)


def override_message(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, ["model.path=model", override])
    return str(caught.value)


def test_without_a_file_the_defaults_hold(model):
    assert load(None, ["model.path=model"]) == msgspec.structs.replace(
        Config(), model=msgspec.structs.replace(Config().model, path=str(model))
    )


def test_a_file_and_overrides_are_merged_and_the_last_one_wins(model):
    path = write(
        '[model]\npath = "model"\n[trainer]\nlr = 1e-4\nbetas = [0.9, 0]\nbatch_prompts = 8\n[task.options]\na = 1\n'
    )
    config = load(path, ["trainer.lr=1e-5", "trainer.lr = 2e-5", "task.options.b=[1, 2]", "task.options.c.d=word"])
    assert (config.trainer.lr, config.trainer.betas, config.trainer.batch_prompts) == (2e-5, (0.9, 0.0), 8)
    assert config.task.options == {"a": 1, "b": [1, 2], "c": {"d": "word"}}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.name=my-run", "my-run"),
        ("run.name=2024", "2024"),
        ("run.name=true", "true"),
        ("run.name='quoted'", "quoted"),
        ('run.name="a\\nb"', "a\nb"),
        ("run.name=", ""),
        ("run.name=a=b # c", "a=b # c"),
        ("run.name=1\nsteps = 2", "1\nsteps = 2"),
    ],
)
def test_text_keys_take_bare_words_and_toml_strings(model, override, value):
    assert load(None, ["model.path=model", override]).run.name == value


def test_other_keys_take_toml_values(model):
    config = load(None, ["model.path=model", "task.shuffle=false", "buffer.on_incomplete=train", "trainer.grad_clip=2"])
    assert (config.task.shuffle, config.buffer.on_incomplete, config.trainer.grad_clip) == (False, "train", 2.0)
    assert isinstance(config.trainer.grad_clip, float)


def test_relative_paths_are_found_beside_the_file_first_then_in_the_working_directory(model):
    for name in ("configs/model/config.json", "configs/mine.py", "data.jsonl", "configs/data2.jsonl", "other.py"):
        write("{}", name)
    path = write(
        '[model]\npath = "model"\n[task]\ndataset = "data.jsonl"\neval_dataset = "data2.jsonl"\nreward = "mine.py:f"\n'
        '[buffer]\nsampler = "other.py:S"\n',
        "configs/run.toml",
    )
    config = load(path, [])
    here = Path.cwd()
    assert config.model.path == f"{here}/configs/model"
    assert config.task.dataset == f"{here}/data.jsonl"
    assert config.task.eval_dataset == f"{here}/configs/data2.jsonl"
    assert config.task.reward == f"{here}/configs/mine.py:f"
    assert config.buffer.sampler == f"{here}/other.py:S"


def test_every_key_is_documented_where_it_is_declared():
    sections = [node for node in ast.parse(inspect.getsource(declared)).body if isinstance(node, ast.ClassDef)]
    for section in sections:
        for key, after in pairwise([*section.body, None]):
            if isinstance(key, ast.AnnAssign) and section.name != "Config":
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert is_text, f"{section.name}.{key.target.id} has no docstring"


def test_what_is_no_path_stays_as_it_is(model):
    config = load(
        None, ["model.path=model", "task.dataset=reasoning_gym:gcd", "task.reward=pkg.mod:f", "buffer.sampler=fifo"]
    )
    assert (config.task.dataset, config.task.reward, config.buffer.sampler) == (
        "reasoning_gym:gcd",
        "pkg.mod:f",
        "fifo",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[trainr]\n", "run.toml: section trainr is unknown; did you mean trainer?"),
        ("[xyzzy]\n", "section xyzzy is unknown; there are run, model, task"),
        ("lr = 1e-5\n", "run.toml: lr = 1e-05 stands in no section; it belongs below [trainer]"),
        ("xyzzy = 1\n", "run.toml: xyzzy = 1 stands in no section; there are [run], [model], [task]"),
        ("[trainer]\nlearning = 1\nlrr = 1\n", "key trainer.learning is unknown"),
        ("[trainer]\nlrr = 1\n", "run.toml: key trainer.lrr is unknown; did you mean trainer.lr?"),
        ("[trainer]\ngroup_size = 8\n", "key trainer.group_size is unknown; did you mean rollout.group_size?"),
        ("trainer = 3\n", "trainer = 3: expected a section [trainer] with keys"),
        ('[trainer]\nlr = "fast"\n', 'run.toml: trainer.lr = "fast": expected a number'),
        ("[trainer]\nlr = nan\n", "trainer.lr = nan: expected a number; numbers must be finite"),
        ("[trainer]\nbatch_prompts = 1.5\n", "trainer.batch_prompts = 1.5: expected a whole number"),
        ("[trainer]\nbatch_prompts = true\n", "trainer.batch_prompts = true: expected a whole number"),
        ("[trainer]\nbetas = [0.9]\n", "trainer.betas = [0.9]: expected a list of 2 numbers"),
        ("[run]\nseed = 9223372036854775808\n", "fit in 64 bits"),
        ("[run]\nname = 5\n", "run.name = 5: expected text"),
        ("[task]\nshuffle = 1\n", "task.shuffle = 1: expected true or false"),
        ("[task]\nagent = 5\n", "task.agent = 5: expected text or a list of texts"),
        ("[task]\nagent_env = 'X'\n", 'task.agent_env = "X": expected a list of texts'),
        ("[task]\noptions = 1\n", "task.options = 1: expected a table"),
        ("[task]\nshuffle = 1979-05-27\n", "task.shuffle = 1979-05-27: expected true or false"),
        ('[buffer]\non_stales = "drop"\n', "key buffer.on_stales is unknown"),
        (
            '[buffer]\non_incomplete = "drp"\n',
            'on_incomplete = "drp": expected one of "drop", "train"; did you mean drop?',
        ),
        ("[trainer\n", "run.toml: not valid TOML: "),
        ("[run]\nsteps = " + "9" * 5000 + "\n", "run.toml: not valid TOML: "),
        ("[run]\nsteps = 0\n", "run.steps = 0: at least one step"),
        (f'[task]\nshuffle = "{"x" * 500}"\n', "x…: expected true or false"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_key(model, text, expected):
    assert expected in file_message(text)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.lr", "override 'trainer.lr': expected section.key=value"),
        ("lr=1", "override 'lr=1': expected section.key=value"),
        ("trainer.=1", "expected section.key=value"),
        ("=1", "expected section.key=value"),
        ("trianer.lr=1", "section trianer is unknown; did you mean trainer?"),
        ("trainer.rl=1", "key trainer.rl is unknown"),
        ("trainer.lr=fast", "override 'trainer.lr=fast': trainer.lr = \"fast\": expected a number"),
        ("trainer.lr=[0.9,", 'trainer.lr = "[0.9,": expected a number'),
        ("trainer.lr=" + "9" * 5000, "expected a number"),
        ("trainer.lr.x=1", "trainer.lr is not a table; expected trainer.lr=value"),
        ("task.options.a=inf", "numbers must be finite"),
        ("run.name=\udcff", "text must be Unicode"),
    ],
)
def test_a_mistake_in_an_override_is_named(model, override, expected):
    assert expected in override_message(override)


def test_an_override_below_a_value_that_is_no_table_is_refused(model):
    with pytest.raises(ConfigError, match="a = 1 is not a table"):
        load(None, ["model.path=model", "task.options.a=1", "task.options.a.b=2"])


def test_a_missing_or_wrong_model_directory_is_a_config_error(model):
    Path("empty").mkdir()
    for override, expected in [
        ("model.path=none", "no such directory"),
        ("model.path=Org/Model-1B", "`hf download ORG/NAME --local-dir DIR` makes one"),
        ("model.path=~nobody-of-this-name/model", "no such directory"),
        ("model.path=empty", "has no config.json"),
        ("model.path=", "model.path is empty"),
    ]:
        assert expected in override_message(override)


def test_a_file_that_cannot_be_read_is_a_config_error(model):
    Path("binary.toml").write_bytes(b"\xff")
    for name, expected in [("none.toml", "No such file"), ("model", "Is a directory"), ("binary.toml", "not UTF-8")]:
        with pytest.raises(ConfigError, match=expected):
            load(Path(name), [])


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_leaves = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    _text,
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.just(datetime.UTC)),
)
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3), max_leaves=8
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=st.dictionaries(_text, _values, max_size=4),
    texts=st.tuples(_text, _text, _text),
    lr=st.floats(0, 1e300),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    seed=st.integers(-(2**63), 2**63 - 1),
    shuffle=st.booleans(),
)
def test_what_is_written_is_read_back_equal(model, options, texts, lr, betas, seed, shuffle):
    replace = msgspec.structs.replace
    default = load(None, ["model.path=model"])
    config = replace(
        default,
        run=replace(default.run, name=texts[0], seed=seed),
        task=replace(default.task, options=options, shuffle=shuffle, prompt_template=texts[1], answer_key=texts[2]),
        trainer=replace(default.trainer, lr=lr, betas=betas),
    )
    path = Path("round.toml")
    path.write_bytes(dumps(config).encode())
    assert load(path, []) == config


def test_a_resolved_configuration_means_the_same_in_another_directory(model, monkeypatch):
    write("", "configs/mine.py")
    config = load(
        write('[task]\nreward = "mine.py:f"\n', "configs/run.toml"), ["model.path=model", "task.dataset=x.jsonl"]
    )
    path = write(dumps(config), "runs/one/config.toml").absolute()
    monkeypatch.chdir(path.parent)
    assert load(path, []) == config


def test_what_toml_cannot_hold_is_refused():
    config = Config()
    with pytest.raises(ConfigError, match="None of type NoneType"):
        dumps(msgspec.structs.replace(config, task=msgspec.structs.replace(config.task, options={"a": None})))


def test_reading_a_configuration_loads_neither_torch_nor_numpy():
    code = (
        "import sys, laminar.configfile, laminar.hosts, laminar.plugins\nprint({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "set()"


def test_files_beside_the_configuration_in_an_agents_command_become_absolute(model):
    (model.parent / "conf").mkdir()
    for name in ("agent.py", "python"):
        (model.parent / "conf" / name).write_text("")
    path = write(
        "[model]\npath = 'model'\n[task]\nagent = 'python agent.py --task {prompt} other.py'", name="conf/run.toml"
    )
    directory = path.parent.absolute()
    assert load(path, []).task.agent == ["python", str(directory / "agent.py"), "--task", "{prompt}", "other.py"]
    assert load(path, ["task.agent=./python x"]).task.agent == [str(directory / "python"), "x"]
    assert load(path, ["task.agent=python x"]).task.agent == "python x"
    assert load(None, ["model.path=model", 'task.agent=["python", "agent.py"]']).task.agent == ["python", "agent.py"]
