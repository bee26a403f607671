"""Make the quickstart's model: a tiny Qwen3 with a character-level tokenizer, warm-started on `spell_backward`.

    OMP_NUM_THREADS=1 python scripts/make_tiny_model.py [--output configs/quickstart/model] [--steps 400]

The answers of the warm start are noisy on purpose (8 % of the characters are substituted, dropped or doubled), so the
model knows the task but is unsure of it, and GRPO has something to sharpen.

Invariants:
* Same arguments, machine and library versions give the same weights (everything is seeded).
* No word that the default task (seed 17) draws for training or held-out prompts occurs in the warm start.
"""

import argparse
import random
import string
import time
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

CONTEXT_TOKENS_MAX = 128
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
TASK_SEED = 17
NUM_RESERVED = 20_000  # draws of the default task kept out of the warm start: 10 x its default size, held-out included
NOISE = 0.08
BATCH = 64
LEARNING_RATE = 3e-3
WARMUP_STEPS = 50


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline; BPE without merges is exactly that."""
    characters = string.ascii_letters + string.digits + string.punctuation + " \n"
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=CONTEXT_TOKENS_MAX,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """About 340 k parameters, float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS_MAX,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        use_cache=True,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def warm_start_words(task) -> list[str]:
    """All words of the data set but those that `random.Random(seed + index)` draws for the default task."""
    reserved = {task[index]["metadata"]["word"] for index in range(NUM_RESERVED)}
    return [word for word in task.words if word not in reserved]


def add_noise(answer: str, rng: random.Random) -> str:
    """Substitute, drop or double each character with probability NOISE / 3 each."""
    noisy = []
    for character in answer:
        kind = rng.random() / NOISE * 3
        if kind < 1:
            noisy.append(rng.choice(string.ascii_lowercase))
        elif kind >= 2:
            noisy.append(character)
        if 2 <= kind < 3:
            noisy.append(character)
    return "".join(noisy)


def prompt_of(word: str) -> str:
    return f"Spell this word backward (example: sun -> nus): {word}\n"


def make_batch(words: list[str], tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[torch.Tensor, ...]:
    """(input ids [B, T], labels [B, T]) of random words; labels are -100 outside of the response."""
    inputs, labels = [], []
    for word in rng.choices(words, k=BATCH):
        prompt = tokenizer.encode(prompt_of(word))
        response = [*tokenizer.encode(add_noise(word[::-1], rng)), tokenizer.eos_token_id]
        inputs.append(torch.tensor(prompt + response))
        labels.append(torch.tensor([-100] * len(prompt) + response))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(inputs, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[str], steps: int) -> None:
    """Supervised training, `steps` batches, AdamW with linear warm-up and linear decay to 10 %."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.9 * step / steps)
    )
    began = time.monotonic()
    for step in range(1, steps + 1):
        inputs, labels = make_batch(words, tokenizer, rng)
        first = int((labels != -100).any(0).nonzero()[0])
        logits = model(inputs, logits_to_keep=inputs.shape[1] - first + 1).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, first:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)


@torch.inference_mode()
def mean_reward(model, tokenizer, task, entries: list[dict], greedy: bool) -> tuple[float, float]:
    """(mean of the task's own score, share of exact answers), sampled at temperature 1 or greedy."""
    prompts = tokenizer([prompt_of(entry["metadata"]["word"]) for entry in entries], padding=True, return_tensors="pt")
    options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(prompts.input_ids, attention_mask=prompts.attention_mask, max_new_tokens=16, **options)
    answers = tokenizer.batch_decode(output[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    scores = [task.score_answer(answer, entry) for answer, entry in zip(answers, entries, strict=True)]
    return sum(scores) / len(scores), sum(score == 1.0 for score in scores) / len(scores)


def main() -> None:
    """Build, warm-start, save and print how the model scores on words it never saw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("configs/quickstart/model"))
    parser.add_argument("--steps", type=int, default=400, help="batches of 64 words; about 2 minutes on one core")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    disable_progress_bar()
    task = reasoning_gym.create_dataset("spell_backward", seed=TASK_SEED, size=NUM_RESERVED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters, vocabulary {len(tokenizer)}")
    warm_start(model, tokenizer, warm_start_words(task), arguments.steps)
    model.eval()
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    entries = [task[index] for index in range(NUM_RESERVED - 512, NUM_RESERVED)]
    for name, greedy in (("sampled", False), ("greedy", True)):
        reward, exact = mean_reward(model, tokenizer, task, entries, greedy)
        print(f"held-out words, {name}: mean reward {reward:.3f}, exact {exact:.3f}")


if __name__ == "__main__":
    main()
