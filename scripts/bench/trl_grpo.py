"""The same problem with TRL's GRPOTrainer, in TRL's own environment: `trl_grpo.py PROBLEM OUT`

One process, plain transformers generation (no vLLM), everything at TRL's defaults except what the problem fixes and:
gradient checkpointing off (it would only cost time at this size), no bf16 (a CPU), no logging to files, no checkpoints.
`bnpo` is the loss that divides by the number of tokens of the batch; with one batch per update `dapo` equals it.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerControl
from trl import GRPOConfig, GRPOTrainer

from scripts.bench.common import Problem, Recorder, Scorer


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that tells the recorder how long it generated."""

    recorder: Recorder

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self.recorder.spent("generate_s", time.perf_counter() - began)
        return result


class Progress(TrainerCallback):
    """Begins and ends the recorder's steps."""

    def __init__(self, recorder: Recorder, rewards: list[float]) -> None:
        self._recorder, self._rewards = recorder, rewards
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._recorder.begin()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._recorder.spent("step_s", time.perf_counter() - self._began)
        self._recorder.step(self._rewards[-1])
        if self._recorder.finished:
            control.should_training_stop = True


def main() -> None:
    """Train until the target, or the limits, are reached."""
    problem = Problem.load(Path(sys.argv[1]))
    scorer, recorder = Scorer(problem), Recorder(problem, Path(sys.argv[2]))
    means: list[float] = []

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        began = time.perf_counter()
        rewards = scorer.score(prompts, answer, completions)
        recorder.spent("reward_s", time.perf_counter() - began)
        means.append(sum(rewards) / len(rewards))
        return rewards

    rows = [{"prompt": text, "answer": answer} for text, answer in problem.prompts]
    with tempfile.TemporaryDirectory() as directory:
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(problem.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(problem.model, padding_side="left"),
            reward_funcs=reward,
            args=settings(problem, directory),
            train_dataset=datasets.Dataset.from_list(rows),
            callbacks=[Progress(recorder, means)],
        )
        trainer.recorder = recorder
        trainer.train()


def settings(problem: Problem, directory: str) -> GRPOConfig:
    """One update per batch of prompts x group size."""
    return GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=problem.seed,
        max_steps=problem.steps_max,
        per_device_train_batch_size=problem.batch_prompts * problem.group_size,
        gradient_accumulation_steps=1,
        num_generations=problem.group_size,
        num_iterations=1,
        max_completion_length=problem.max_tokens,
        temperature=problem.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=problem.clip_low,
        epsilon_high=problem.clip_high,
        loss_type="bnpo",
        scale_rewards="group",
        learning_rate=problem.lr,
        lr_scheduler_type="constant",
        weight_decay=problem.weight_decay,
        adam_beta1=problem.betas[0],
        adam_beta2=problem.betas[1],
        max_grad_norm=problem.grad_clip,
        report_to=[],
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
