"""What a checkpoint costs the train loop: `python scripts/bench_checkpoint.py [--parameters-m 40] [--ranks 2] [--rounds 5]`.

Real ranks on this machine train a random model. In each round one checkpoint is waited for, as if training could not go on, and
one is written while steps go on. Prints the stall against the whole, and a step beside the writing against a step alone. Medians
of rank 0 over the rounds; the first round, in which buffers and files are new, is left out.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import trainer_ranks
from trainer_ranks import CPU, Batch, make_config, run_ranks
from transformers import Qwen3Config, Qwen3ForCausalLM

from laminar.workers.trainer.saver import Saved
from laminar.workers.trainer.trainer import Trainer

HIDDEN, VOCABULARY = 512, 4096
PARAMETERS_PER_LAYER = 12 * HIDDEN * HIDDEN
trainer_ranks.LIMIT_S = 3600.0  # large models take their time


def make_model(directory: Path, num_parameters: int) -> str:
    """About so many parameters."""
    layers = max(1, (num_parameters - HIDDEN * VOCABULARY) // PARAMETERS_PER_LAYER)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=8 * HIDDEN // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=HIDDEN // 8,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)


class Bench:
    """One rank."""

    def __init__(self, model: str, directory: Path) -> None:
        self.trainer = Trainer(make_config(model), device=CPU)
        self.directory, self.batch, self.number = directory, Batch(), 0

    def step(self) -> float:
        """Its seconds."""
        self.number += 1
        began = time.perf_counter()
        self.trainer.step(self.number, self.batch.rows, self.batch.fetch)
        return time.perf_counter() - began

    def begin(self) -> list[Saved]:
        ended: list[Saved] = []
        self.trainer.begin_save(self.directory / "step-1", step=1, data_state=b"", ended=ended.append)
        return ended

    def round(self) -> dict[str, float]:
        """Seconds."""
        alone = statistics.median(self.step() for _ in range(3))
        began = time.perf_counter()
        self.begin()
        self.trainer.await_save()
        blocking = time.perf_counter() - began
        ended = self.begin()
        beside = self.step()
        self.trainer.await_save()
        return {
            "blocking": blocking,
            "stall": ended[0].stall_s,
            "whole": ended[0].seconds,
            "alone": alone,
            "beside": beside,
        }


def run(model: str, directory: Path, rounds: int) -> list[dict[str, float]]:
    """All rounds of this rank but the first."""
    bench = Bench(model, directory)
    return [bench.round() for _ in range(rounds + 1)][1:]


def report(found: list[dict[str, float]], size: float) -> str:
    """For people."""
    median = {key: statistics.median(row[key] for row in found) for key in found[0]}
    return "\n".join(
        [
            f"{size / 2**20:,.0f} MiB on disk for each checkpoint, medians of {len(found)} rounds",
            f"training waits, if it has to wait for the disk: {median['blocking']:.3f} s",
            f"training waits, if it goes on:                  {median['stall']:.3f} s"
            f"  ({median['stall'] / median['blocking']:.3f} of it)",
            f"until it is on disk, then:                      {median['whole']:.3f} s",
            f"a step alone {median['alone']:.3f} s, the one beside the writing {median['beside']:.3f} s"
            f"  ({median['beside'] / median['alone']:.2f} times as long)",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters-m", type=int, default=40, help="millions of parameters")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = make_model(directory / "model", options.parameters_m * 1_000_000)
        results: list[Any] = run_ranks(run, options.ranks, directory, model, directory / "checkpoints", options.rounds)
        files = [file for file in (directory / "checkpoints" / "step-1").rglob("*") if file.is_file()]
        print(report(results[0], sum(file.stat().st_size for file in files)))


if __name__ == "__main__":
    main()
