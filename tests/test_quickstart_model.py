"""The committed quickstart model: small, complete, and fair to its own held-out words."""

import importlib.util
import string
from pathlib import Path

import pytest
import reasoning_gym
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from laminar.configfile import load as load_config
from laminar.tasks.datasets import load as load_prompts

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "configs/quickstart/model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


def test_the_model_is_small_and_in_the_dtype_that_log_probs_are_compared_in():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 1_500_000
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118 - no mapping
    config = AutoConfig.from_pretrained(MODEL, local_files_only=True)
    assert (config.architectures, config.max_position_embeddings) == (["Qwen3ForCausalLM"], 128)


def test_every_printable_character_is_one_token_and_comes_back(tokenizer):
    text = string.ascii_letters + string.digits + string.punctuation + " \n a  b , c ."
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_the_end_token_is_known_to_tokenizer_and_model_and_not_shown(tokenizer):
    config = AutoConfig.from_pretrained(MODEL, local_files_only=True)
    assert tokenizer.eos_token_id == config.eos_token_id == 1
    assert tokenizer.decode([*tokenizer.encode("nus"), tokenizer.eos_token_id], skip_special_tokens=True) == "nus"


def test_the_warm_start_saw_no_word_of_the_quickstart_and_its_prompts_fit(tokenizer):
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "scripts/make_tiny_model.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    source = reasoning_gym.create_dataset("spell_backward", seed=script.TASK_SEED, size=script.NUM_RESERVED)
    seen = set(script.warm_start_words(source))
    config = load_config(ROOT / "configs/quickstart/config.toml", [])
    prompts = load_prompts(config.task)
    every = [*(prompts.prompt(i) for i in range(len(prompts))), *prompts.held_out]
    words = {prompt.metadata["entry"]["metadata"]["word"] for prompt in every}
    assert len(seen) > 100_000
    assert not words & seen
    assert every[0].text == script.prompt_of(every[0].metadata["entry"]["metadata"]["word"])
    assert max(len(tokenizer.encode(prompt.text)) for prompt in every) + config.rollout.max_tokens <= 128
