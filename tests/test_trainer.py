"""Training steps on real gloo ranks: equal to a plain loop, whatever the sharding, packing and accumulation."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from trainer_ranks import CPU, Batch, assert_equal_weights, make_config, make_model, run_ranks, whole_weights
from transformers import AutoModelForCausalLM

from laminar import wire
from laminar.config import Config, TrainerConfig
from laminar.ids import Version
from laminar.rl.advantages import group_advantages
from laminar.workers.trainer.batch import BatchError, check_window, fetch_tokens, plan_step, rows_of
from laminar.workers.trainer.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


# ---- plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["group", "none"])
def test_every_group_is_on_one_rank_of_one_mini_batch_and_ranks_have_equal_numbers_of_passes(packing: str) -> None:
    batch = Batch(num_groups=11)
    config = TrainerConfig(mini_batches=3, micro_batch_tokens=40, packing=packing)  # type: ignore[arg-type]
    plans = plan_step(batch.rows, config, world_size=3)
    assert plans == plan_step(list(batch.rows), config, world_size=3)
    places: dict[int, set] = {}
    for number, plan in enumerate(plans):
        assert len({len(batches) for batches in plan.ranks}) == 1
        for rank in range(3):
            for row in rows_of([plan], rank):
                places.setdefault(batch.rows[row].group, set()).add((number, rank))
    assert len(places) == 11
    assert all(len(place) == 1 for place in places.values())
    order = [group for number in range(3) for group, place in places.items() if (number in {n for n, _ in place})]
    assert sorted(order[:3]) == [0, 1, 2]


def test_shares_are_balanced_by_length() -> None:
    batch = Batch(num_groups=64)
    (plan,) = plan_step(batch.rows, TrainerConfig(), world_size=4)
    loads = [
        sum(batch.rows[row].num_prompt_tokens + batch.rows[row].num_tokens for row in rows_of([plan], rank))
        for rank in range(4)
    ]
    assert max(loads) - min(loads) < 0.02 * sum(loads)


def test_tokens_that_do_not_fit_their_row_are_refused() -> None:
    batch = Batch()
    with pytest.raises(BatchError, match="the tokens of trajectory 0 do not fit its row"):
        fetch_tokens(batch.rows, [0], lambda wanted: [batch.store[1]])
    with pytest.raises(BatchError, match="asked for the tokens of 1 trajectories, got 0"):
        fetch_tokens(batch.rows, [0], lambda wanted: [])


def test_sources_say_what_is_trained_and_where_a_context_begins() -> None:
    batch = Batch()
    size = batch.rows[0].num_tokens
    for last, begins in ((0, None), (1, None), (2, [False] * (size - 1) + [True])):
        own = wire.TokenRow(*msgspec.structs.astuple(batch.store[0])[:4], bytes(size - 1) + bytes([last]))
        tokens = fetch_tokens(batch.rows, [0], lambda wanted, own=own: [own])[0]
        assert tokens.trained.tolist() == [True] * (size - 1) + [last == 0]
        assert (tokens.begins if begins is None else tokens.begins.tolist()) == begins
    check_window(batch.rows, {0: tokens}, 0)
    check_window(batch.rows, {0: tokens}, 1000)
    with pytest.raises(BatchError, match=r"attention window of 3 cannot keep apart: set task.on_rewrite"):
        check_window(batch.rows, {0: tokens}, 3)


# ---- updates -----------------------------------------------------------------------------------------------


def train(config: Config, num_steps: int, layer_parameters_min: int = 1 << 20) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU, layer_parameters_min=layer_parameters_min)
    batch = Batch()
    trainer.version = Version(0, 0)
    metrics = [trainer.step(number + 1, batch.rows, batch.fetch) for number in range(num_steps)]
    return {"metrics": metrics, "weights": whole_weights(trainer), "asked": batch.asked}


def reference_weights(path: str, num_steps: int, aggregation: str) -> dict[str, np.ndarray]:
    """The same steps as a plain loop over single sequences, written from the formulas."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch = Batch()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    advantages = group_advantages([row.reward for row in batch.rows], [row.group for row in batch.rows])
    for step in range(num_steps):
        terms = []
        for row, advantage in zip(batch.rows, advantages, strict=True):
            own = batch.store[row.trajectory]
            prompt = np.frombuffer(own.prompt_tokens, np.int32).tolist()
            response = np.frombuffer(own.tokens, np.int32).tolist()
            mask = torch.tensor([source == 0 for source in own.sources], dtype=torch.float32)
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.9
            logprobs = torch.log_softmax(logits, -1)[range(len(response)), response]
            ratio = (logprobs - logprobs.detach()).exp()
            terms.append((-(advantage * ratio * mask).sum(), mask.sum()))
        if aggregation == "token-mean":
            loss = sum(term for term, _ in terms) / sum(count for _, count in terms)
        else:
            means = [term / count for term, count in terms if count > 0]
            loss = sum(means) / len(means)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "options", "layer_parameters_min"),
    [
        (1, {"loss_aggregation": "sequence-mean", "packing": "group"}, 0),
        (2, {}, 0),
        (2, {"packing": "group"}, 1 << 20),
        (2, {"loss_aggregation": "sequence-mean", "micro_batch_tokens": 25, "activation_checkpointing": True}, 0),
        (3, {"packing": "group", "micro_batch_tokens": 1000}, 0),
    ],
)
def test_updates_equal_a_plain_loop(
    model: str, tmp_path: Path, world_size: int, options: dict[str, Any], layer_parameters_min: int
) -> None:
    config = make_config(model, **options)
    results = run_ranks(train, world_size, tmp_path, config, 3, layer_parameters_min)
    aggregation = options.get("loss_aggregation", "token-mean")
    assert_equal_weights(results[0]["weights"], reference_weights(model, 3, aggregation))
    asked = sorted(trajectory for result in results for trajectory in result["asked"])
    assert asked == sorted(3 * list(Batch().store)), "every token is fetched by exactly one rank"
    first = results[0]["metrics"][0]
    assert first["importance_ratio/max"] > first["importance_ratio/mean"] > 0.5
    assert first["mismatch_kl/max"] >= first["mismatch_kl/mean"] > 0
    assert "mismatch_kl/mean" not in results[0]["metrics"][1], "the second step starts from an unpublished version"
    assert first["actor/ppo_kl"] == first["actor/pg_clipfrac"] == 0.0
    assert first["num_tokens/trained"] == sum(own.sources.count(0) for own in Batch().store.values())


@pytest.mark.parametrize("old_logprobs", ["recompute", "behavior"])
def test_mini_batches_give_the_same_weights_on_one_and_two_ranks_also_with_idle_ranks(
    model: str, tmp_path: Path, old_logprobs: str
) -> None:
    config = make_config(model, old_logprobs=old_logprobs, mini_batches=5, packing="group", lr=3e-2)
    (one,) = run_ranks(train, 1, tmp_path, config, 2)
    two, _ = run_ranks(train, 2, tmp_path, config, 2)  # one group per mini-batch: a rank idles in each
    assert_equal_weights(two["weights"], one["weights"], atol=2e-4)
    for alone, together in zip(one["metrics"], two["metrics"], strict=True):
        same = [key for key in alone if not key.startswith(("timing/", "num_tokens/"))]
        assert {key: together[key] for key in same} == pytest.approx({key: alone[key] for key in same}, abs=2e-3)
        assert alone["optim/updates"] in (5, 10)
        assert alone["actor/ppo_kl"] != 0.0


def poisoned(config: Config) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    batch = Batch()
    trainer.step(1, batch.rows, batch.fetch)
    embedding = next(part for part in trainer.parameters if "embed" in part.name)
    if trainer.rank == 0:
        kept = embedding.local[3].clone()
        embedding.local[3] = float("inf")
    before = whole_weights(trainer)
    metrics = trainer.step(2, batch.rows, batch.fetch)
    unchanged = all(np.array_equal(value, before[name]) for name, value in whole_weights(trainer).items())
    if trainer.rank == 0:
        embedding.local[3] = kept
    healed = trainer.step(3, batch.rows, batch.fetch)
    return {"skipped": metrics["optim/skipped_updates"], "unchanged": unchanged, "healed": healed}


def test_an_update_with_a_loss_that_is_not_finite_is_skipped_on_all_ranks_and_counted(
    model: str, tmp_path: Path
) -> None:
    for result in run_ranks(poisoned, 2, tmp_path, make_config(model)):
        assert result["skipped"] == 1
        assert result["unchanged"]
        assert result["healed"]["optim/updates"] == 2
        assert np.isfinite(result["healed"]["actor/grad_norm"])
