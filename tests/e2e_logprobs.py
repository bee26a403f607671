"""Log-probs of what a run generated, by the trainer's own program."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from laminar.rl import packing
from laminar.workers.trainer.model import Policy, load_model


def row(prompt: list[int], response: list[int], logprobs: list[float]) -> packing.Tokens:
    """A trajectory, all of whose response the model wrote."""
    return packing.Tokens(
        np.array(prompt, np.int32),
        np.array(response, np.int32),
        np.array(logprobs, np.float32),
        np.ones(len(response), bool),
    )


def largest_difference(weights: Path, rows: Sequence[packing.Tokens]) -> float:
    """Between the rollouts' log-probs and the trainer's under these weights (a Hugging Face directory), in nats."""
    numbered = dict(enumerate(rows))
    policy = Policy(load_model(str(weights)), temperature=1.0, device=torch.device("cpu"))
    batch = packing.collate(tuple((number,) for number in numbered), numbered)
    return float((policy.frozen_logprobs(batch) - batch.logprobs).abs().max())
