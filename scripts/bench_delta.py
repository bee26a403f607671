#!/usr/bin/env python
"""How small and how fast lossless deltas between versions of really trained weights are.

    OMP_NUM_THREADS=1 python scripts/bench_delta.py [--steps 20] [--lrs 1e-6,1e-5,5e-4] [--save DIR]

Two models: the quickstart's, trained with its own rewards (policy gradient, groups of 8), and a Qwen3 of 20 M parameters,
trained on the answers of the same task. AdamW as Laminar's trainer has it, float32 master weights, published in bf16. Every
version is encoded against the one before in chunks, as the chain does it, and rebuilt; encoding and applying are timed on one
core, in GB of the version per second. `--save` leaves the versions of the 20 M model at the first learning rate as raw files, for
`netns_relays.py --parts deltas --weights DIR/*.bin`. Exit status: 0 when every goal is met.
"""

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
import reasoning_gym  # noqa: E402
import torch  # noqa: E402
from make_tiny_model import TASK_SEED, make_batch, prompt_of  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from laminar.config import TrainerConfig  # noqa: E402
from laminar.workers.relay import delta  # noqa: E402
from laminar.workers.relay.manifest import BLOCK_BYTES  # noqa: E402

QUICKSTART = ROOT / "configs/quickstart/model"
PROMPTS, SIBLINGS = 8, 8
ROWS_20M = 16
WIRE_GOAL = 1 / 30
SPEED_GOAL = 1.0
PAD_ID = 0  # of the quickstart's tokenizer
HEADER_BYTES = 17  # of a frame


class Batch(NamedTuple):
    """Tokens [B, T]; labels [B, T], -100 where nothing is trained; weight of each row in the loss [B]."""

    inputs: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


class Found(NamedTuple):
    """Over all steps of one training."""

    changed: float
    """Share of the elements, from version to version."""
    wire: float
    """Bytes on the wire, of the whole."""
    encode_gb_s: float
    apply_gb_s: float


# ---- training ----------------------------------------------------------------------------------------------


class Quickstart:
    """The quickstart's model and its task, by policy gradient."""

    name = "quickstart, 0.3 M"

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
        self._task = reasoning_gym.create_dataset("spell_backward", seed=TASK_SEED, size=10_000)

    def batch(self, step: int) -> Batch:
        """Answers sampled from the model, weighted by their advantage in their group."""
        entries = [self._task[step * PROMPTS + row // SIBLINGS] for row in range(PROMPTS * SIBLINGS)]
        texts = [prompt_of(entry["metadata"]["word"]) for entry in entries]
        prompts = self._tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 16}
            output = self.model.generate(prompts.input_ids, attention_mask=prompts.attention_mask, **options)
        output = output.clone()
        answers = output[:, prompts.input_ids.shape[1] :]
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        scores = [self._task.score_answer(text, entry) for text, entry in zip(texts, entries, strict=True)]
        labels = output.clone()
        labels[:, : prompts.input_ids.shape[1]] = -100
        labels[labels == self._tokenizer.pad_token_id] = -100
        grouped = torch.tensor(scores).reshape(PROMPTS, SIBLINGS)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)
        return Batch(output, labels, advantages.flatten())


class Larger:
    """A model of 20 M parameters from its initial weights, on the answers of the same task."""

    name = "Qwen3, 20 M"

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
        sizes = {"hidden_size": 384, "intermediate_size": 1344, "num_hidden_layers": 10, "head_dim": 64}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
        self.model = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=len(self._tokenizer), tie_word_embeddings=True, **sizes, **heads)
        )
        self._words = [
            word for word in reasoning_gym.create_dataset("spell_backward", seed=TASK_SEED, size=1).words if word
        ]
        self._rng = random.Random(0)

    def batch(self, step: int) -> Batch:
        """Words and their answers."""
        inputs, labels = make_batch(self._words, self._tokenizer, self._rng)
        return Batch(inputs[:ROWS_20M], labels[:ROWS_20M], torch.ones(ROWS_20M))


def versions(training: Quickstart | Larger, steps: int, lr: float) -> list[np.ndarray]:
    """The weights before the first and after every step, in bf16."""
    config = TrainerConfig()
    decayed = [parameter for parameter in training.model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in training.model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=config.betas)
    out = [published(training.model)]
    for step in range(steps):
        inputs, labels, weights = training.batch(step)
        logits = training.model(inputs, attention_mask=(inputs != PAD_ID).long()).logits[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")
        (losses.sum(1) * weights).sum().div((labels != -100).sum()).backward()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out.append(published(training.model))
    return out


def published(model: torch.nn.Module) -> np.ndarray:
    """All weights, one tensor after another, each storage once."""
    flat = torch.cat([parameter.detach().bfloat16().flatten() for parameter in model.parameters()])
    items = flat.view(torch.int16).numpy().view(np.uint16)
    return np.pad(items, (0, -len(items) % 4))


# ---- deltas ------------------------------------------------------------------------------------------------


def measure(all_versions: list[np.ndarray]) -> Found:
    """Encode, rebuild and compare every version. AssertionError when one is not rebuilt bit for bit."""
    changed = wire = whole = 0
    encode_s = apply_s = encoded = applied = 0.0
    for base, new in itertools.pairwise(all_versions):
        changed += int(np.count_nonzero(base != new))
        whole += new.nbytes
        for start in range(0, new.nbytes, BLOCK_BYTES):
            part, old = (memoryview(items).cast("B")[start : start + BLOCK_BYTES] for items in (new, base))
            made, seconds, times = _timed(lambda: delta.encode(part, old, 2))  # noqa: B023
            encode_s, encoded = encode_s + seconds, encoded + times * part.nbytes
            wire += HEADER_BYTES + (part.nbytes if made is None else len(made))
            if made is not None:
                rebuilt, seconds, times = _timed(lambda: _rebuilt(made, old))  # noqa: B023
                apply_s, applied = apply_s + seconds, applied + times * part.nbytes
                assert rebuilt == part, "a version was not rebuilt bit for bit"
    gb_s = [count / seconds / 1e9 if seconds else 0.0 for count, seconds in ((encoded, encode_s), (applied, apply_s))]
    return Found(changed / (whole / 2), wire / whole, *gb_s)


def _rebuilt(made: bytes, old: memoryview) -> bytearray:
    place = bytearray(old)
    delta.apply(made, memoryview(place), 2)
    return place


def _timed(work):  # type: ignore[no-untyped-def]
    """(result, seconds, how often it ran in them): once for warm caches, then a few times."""
    result, times = work(), 3
    began = time.perf_counter()
    for _ in range(times):
        work()
    return result, time.perf_counter() - began, times


def main() -> int:
    options = _parse()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| model | lr | elements that change | on the wire, of the whole | encode, GB/s | apply, GB/s |")
    print("|---|---|---|---|---|---|", flush=True)
    met = True
    for kind in (Quickstart, Larger):
        for lr in options.lrs:
            torch.manual_seed(0)
            made = versions(kind(), options.steps, lr)
            found = measure(made)
            print(
                f"| {kind.name} | {lr:g} | {found.changed:.2%} | {found.wire:.4f} (1/{1 / found.wire:.0f}) "
                f"| {found.encode_gb_s:.2f} | {found.apply_gb_s:.2f} |",
                flush=True,
            )
            if lr == 1e-6:
                met &= found.wire <= WIRE_GOAL and min(found.encode_gb_s, found.apply_gb_s) >= SPEED_GOAL
            if kind is Larger and lr == options.lrs[0] and options.save:
                _save(options.save, made)
    print(f"at lr 1e-6 at most 1/30 on the wire, encode and apply at least 1 GB/s: {'met' if met else 'NOT met'}")
    return 0 if met else 1


def _save(directory: Path, made: list[np.ndarray]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for step, items in enumerate(made):
        items.tofile(directory / f"step-{step:02}.bin")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--lrs", type=lambda text: [float(part) for part in text.split(",")], default=[1e-6, 1e-5, 5e-4]
    )
    parser.add_argument("--save", type=Path, metavar="DIR")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
