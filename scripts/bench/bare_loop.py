"""GRPO as one loop in one process: transformers' `generate`, the reward, one AdamW update. `bare_loop.py PROBLEM OUT`

One forward and one backward pass per batch at the weights that sampled it, so the importance ratio is 1 and the clip never
acts; fused AdamW; logits at response positions only. Every sibling repeats its prompt, as in any loop written this way.
"""

import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from scripts.bench.common import Problem, Recorder, Scorer


def main() -> None:
    """Train until the target, or the limits, are reached."""
    problem = Problem.load(Path(sys.argv[1]))
    torch.manual_seed(problem.seed)
    model = AutoModelForCausalLM.from_pretrained(problem.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(problem.model, padding_side="left")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=problem.lr, betas=problem.betas, weight_decay=problem.weight_decay, fused=True
    )
    scorer, recorder = Scorer(problem), Recorder(problem, Path(sys.argv[2]))
    for batch in batches(problem):
        recorder.begin()
        began = time.perf_counter()
        inputs, sequences = generate(model, tokenizer, [text for text, _ in batch], problem)
        generated = time.perf_counter()
        rewards = score(scorer, tokenizer, batch, sequences[:, inputs.shape[1] :], problem.group_size)
        scored = time.perf_counter()
        update(model, optimizer, sequences, inputs, rewards, tokenizer, problem)
        recorder.spent("generate_s", generated - began)
        recorder.spent("reward_s", scored - generated)
        recorder.spent("update_s", time.perf_counter() - scored)
        recorder.step(rewards.mean().item())
        if recorder.finished:
            break


def batches(problem: Problem) -> Iterator[list[tuple[str, str]]]:
    """Prompts without end, in a new order every epoch."""
    order = random.Random(problem.seed)
    for _ in itertools.count():
        prompts = order.sample(problem.prompts, len(problem.prompts))
        for start in range(0, len(prompts) - problem.batch_prompts + 1, problem.batch_prompts):
            yield prompts[start : start + problem.batch_prompts]


@torch.inference_mode()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], problem: Problem
) -> tuple[Tensor, Tensor]:
    """Prompts (B, P), left-padded, and prompts with responses (B, P + R); B = prompts x group size, siblings adjacent."""
    encoded = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    sequences = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        do_sample=True,
        temperature=problem.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=problem.max_tokens,
        num_return_sequences=problem.group_size,
        pad_token_id=tokenizer.pad_token_id,
    )
    return encoded["input_ids"].repeat_interleave(problem.group_size, 0), sequences


def score(
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[tuple[str, str]],
    responses: Tensor,
    group_size: int,
) -> Tensor:
    """Rewards (B,)."""
    texts, answers = zip(*(row for row in batch for _ in range(group_size)), strict=True)
    return torch.tensor(
        scorer.score(list(texts), list(answers), tokenizer.batch_decode(responses, skip_special_tokens=True))
    )


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    sequences: Tensor,
    inputs: Tensor,
    rewards: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    problem: Problem,
) -> None:
    """One clipped policy-gradient update, token-mean, advantages by group."""
    sequences = sequences.clone()  # made in inference mode, which autograd does not accept
    groups = rewards.view(-1, problem.group_size)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    responses = sequences[:, inputs.shape[1] :]
    ended = (responses == tokenizer.eos_token_id).int()
    trained = (ended.cumsum(1) - ended == 0).float()  # up to and with the end token
    attention = torch.cat([(inputs != tokenizer.pad_token_id).float(), trained], 1)
    positions = (attention.cumsum(1).long() - 1).clamp_(min=0)
    logits = model(
        input_ids=sequences,
        attention_mask=attention.long(),
        position_ids=positions,
        use_cache=False,
        logits_to_keep=responses.shape[1] + 1,
    ).logits[:, :-1]
    logprobs = torch.log_softmax(logits / problem.temperature, -1).gather(2, responses[:, :, None])[:, :, 0]
    ratio = (logprobs - logprobs.detach()).exp()
    clipped = ratio.clamp(1 - problem.clip_low, 1 + problem.clip_high)
    loss = (torch.maximum(-advantages * ratio, -advantages * clipped) * trained).sum() / trained.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), problem.grad_clip)
    optimizer.step()


if __name__ == "__main__":
    main()
