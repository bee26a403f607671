"""Publication to a real relay and checkpoints, on real gloo ranks."""

import asyncio
import contextlib
import json
import os
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_ranks import CPU, LIMIT_S, Batch, assert_equal_weights, make_config, make_model, run_ranks, whole_weights
from transformers import AutoModelForCausalLM

from laminar.config import Config
from laminar.errors import StartError
from laminar.ids import Version
from laminar.wire import Neighbour, Publish, VersionDropped, VersionHeld, VersionLost, VersionReady
from laminar.workers.relay import paths
from laminar.workers.relay.chain import Place
from laminar.workers.relay.client import RelayClient
from laminar.workers.relay.daemon import RelayServer
from laminar.workers.relay.versions import Versions
from laminar.workers.trainer.model import load_model
from laminar.workers.trainer.saver import Saved
from laminar.workers.trainer.trainer import Trainer
from laminar.workers.transport import make_transport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


Told = VersionReady | VersionLost | VersionDropped

# ---- publication -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def relay(num_slots: int = 3) -> AsyncIterator[tuple[Path, "asyncio.Queue[Told]"]]:
    events: asyncio.Queue[Told] = asyncio.Queue()
    directory = paths.create(f"test-{uuid.uuid4().hex[:12]}", "")
    server = RelayServer(Versions(directory, num_slots, events.put_nowait))
    await server.start()
    try:
        yield directory, events
    finally:
        await server.close()
        paths.remove(directory)


def publish_once(config: Config, directory: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU, layer_parameters_min=0)
    with RelayClient(directory, 10.0) as client:
        publication = trainer.publish(Publish(version=Version(0, 0)), client)
    empty = sum(part.local.numel() == 0 for part in trainer.parameters)
    return {"failure": publication.failure, "stall_s": publication.stall_s, "empty": empty}


@pytest.mark.parametrize(("world_size", "dtype"), [(1, "float32"), (3, "bfloat16")])
async def test_ranks_publish_their_own_rows_and_a_reader_finds_the_whole_model(
    model: str, tmp_path: Path, world_size: int, dtype: str
) -> None:
    config = make_config(model)
    config = type(config)(
        model=config.model,
        trainer=config.trainer,
        relay=type(config.relay)(dtype=dtype),  # type: ignore[arg-type]
    )
    async with relay() as (directory, events):
        results = await asyncio.to_thread(run_ranks, publish_once, world_size, tmp_path, config, directory)
        assert [result["failure"] for result in results] == [None] * world_size
        assert (sum(result["empty"] for result in results) > 0) == (world_size == 3), "some shards are empty"
        ready = await asyncio.wait_for(events.get(), 10)
        assert isinstance(ready, VersionReady)
        await asyncio.to_thread(compare_published, directory, model, getattr(torch, dtype))


def compare_published(directory: Path, model: str, dtype: torch.dtype) -> None:
    expected = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    with RelayClient(directory, 10.0) as client, client.lease(Version(0, 0)) as lease:
        found = dict(lease.snapshot.tensors())
        assert found.keys() == expected.keys()
        assert "lm_head.weight" not in found
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name].detach().to(dtype)), name
        del found, tensor
        assert lease.canary is not None
        tokens = torch.tensor(lease.canary.tokens)
        with torch.no_grad():
            plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids=tokens[None]).logits[
                0, :-1
            ]
        logprobs = plain.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(lease.canary.logprobs), logprobs, atol=1e-4, rtol=0)


def publish_from_two_hosts(config: Config, directories: list[Path], collector: Neighbour) -> str | None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    trainer = Trainer(config, device=CPU, layer_parameters_min=0)
    order = Publish(version=Version(0, 0), publication=1, collector=collector)
    with RelayClient(directories[trainer.rank], 10.0) as client:
        failure = trainer.publish(order, client).failure
        client.lease(Version(0, 0), wait_s=60.0).release()
    return failure


async def test_ranks_of_two_hosts_publish_the_bytes_that_ranks_of_one_host_do(model: str, tmp_path: Path) -> None:
    config = make_config(model)
    async with relay() as (directory, events):
        await asyncio.to_thread(run_ranks, publish_once, 2, tmp_path, config, directory)
        alone = await asyncio.wait_for(events.get(), 10)
    async with two_relays() as (directories, collector, events):
        results = await asyncio.to_thread(
            run_ranks, publish_from_two_hosts, 2, tmp_path, config, directories, collector
        )
        assert results == [None, None]
        ready, held = [await asyncio.wait_for(events.get(), 10) for _ in range(2)]
    assert (type(ready), type(held)) == (VersionReady, VersionHeld)
    assert ready.digest == held.digest == alone.digest


@contextlib.asynccontextmanager
async def two_relays() -> AsyncIterator[tuple[list[Path], Neighbour, "asyncio.Queue[Any]"]]:
    """The directories of r0 → r1, where r0 can be reached, and what both tell."""
    events: asyncio.Queue[Any] = asyncio.Queue()
    directories = [paths.create(f"test-{uuid.uuid4().hex[:12]}", "") for _ in range(2)]
    servers = [RelayServer(Versions(directory, 3, events.put_nowait)) for directory in directories]
    ports = []
    try:
        for number, server in enumerate(servers):
            await server.start()
            place = Place(f"r{number}", "a token", make_transport("tcp", 10.0), "127.0.0.1")
            ports.append(server.join_chain(place, lambda peer, epoch: None, lambda peer, epoch: None))
        servers[1].arrange(1, "r0", None)
        servers[0].arrange(1, None, Neighbour(name="r1", host="127.0.0.1", port=ports[1]))
        yield directories, Neighbour(name="r0", host="127.0.0.1", port=ports[0]), events
    finally:
        for server, directory in zip(servers, directories, strict=True):
            await server.close()
            paths.remove(directory)


def publish_nowhere(config: Config, directory: Path) -> str | None:
    trainer = Trainer(config, device=CPU)
    client = RelayClient(directory, 0.2 if trainer.rank else 0.1)
    return trainer.publish(Publish(version=Version(0, 0)), client).failure


def test_a_missing_relay_costs_the_version_and_not_the_trainer(model: str, tmp_path: Path) -> None:
    failures = run_ranks(publish_nowhere, 2, tmp_path, make_config(model), tmp_path / "no-relay")
    assert failures[0] == failures[1]
    assert failures[0].startswith("rank 0: the relay failed: no relay listens at")


# ---- checkpoints -------------------------------------------------------------------------------------------


def begin_save(trainer: Trainer, path: Path, step: int, data_state: bytes = b"") -> list[Saved]:
    """What will be told of it: one word when it has ended."""
    ended: list[Saved] = []
    trainer.begin_save(path, step=step, data_state=data_state, ended=ended.append)
    return ended


def train_and_save(config: Config, path: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU, layer_parameters_min=0)
    batch = Batch()
    trainer.step(1, batch.rows, batch.fetch)
    saved = whole_weights(trainer)
    ends = [begin_save(trainer, path, 1, b"\x00\xffstate")]
    metrics = trainer.step(2, batch.rows, batch.fetch)
    ends += [begin_save(trainer, path.with_name("again"), 2, data_state) for data_state in (b"", b"second")]
    trainer.await_save(LIMIT_S)
    assert [[saved.failure for saved in end] for end in ends] == [[None]] * 3
    return {"saved": saved, "weights": whole_weights(trainer), "metrics": metrics, "random": torch.rand(3).tolist()}


def restore_and_train(config: Config, path: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    data_state = trainer.restore(path).data_state
    batch = Batch()
    step = trainer.step_done
    metrics = trainer.step(2, batch.rows, batch.fetch)
    return {
        "step": step,
        "data_state": data_state,
        "weights": whole_weights(trainer),
        "metrics": metrics,
        "random": torch.rand(3).tolist(),
    }


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened_on_any_number_of_ranks(
    model: str, tmp_path: Path
) -> None:
    config, path = make_config(model), tmp_path / "step-1"
    results = run_ranks(train_and_save, 2, tmp_path, config, path)
    for world_size in (1, 2):
        restored = run_ranks(restore_and_train, world_size, tmp_path, config, path)
        assert {result["step"] for result in restored} == {1}
        assert {result["data_state"] for result in restored} == {b"\x00\xffstate"}
        assert_equal_weights(restored[0]["weights"], results[0]["weights"])
        assert restored[0]["metrics"]["actor/lr"] == results[0]["metrics"]["actor/lr"]
        assert restored[0]["metrics"]["optim/updates"] == 2
    assert [result["random"] for result in restored] == [result["random"] for result in results]
    assert sorted(file.name for file in tmp_path.iterdir() if not file.name.startswith("store")) == ["again", "step-1"]
    assert (tmp_path / "again" / "data_state.bin").read_bytes() == b"second"
    exported = AutoModelForCausalLM.from_pretrained(path / "hf")
    assert type(exported).__name__ == "Qwen3ForCausalLM"
    assert_equal_weights(
        {name: value.detach().numpy() for name, value in exported.named_parameters()}, results[0]["saved"], atol=0
    )
    assert (path / "hf" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert json.loads((path / "hf" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def save_nowhere(config: Config, path: Path) -> str | None:
    trainer = Trainer(config, device=CPU)
    ended = begin_save(trainer, path, 1)
    trainer.await_save(LIMIT_S)
    return ended[0].failure


def test_a_checkpoint_that_cannot_be_written_fails_on_all_ranks(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    messages = run_ranks(save_nowhere, 2, tmp_path, make_config(model), tmp_path / "file" / "step-1")
    assert messages[0] == messages[1]
    assert "no checkpoint was written (rank 0:" in messages[0]


def save_half(config: Config, path: Path) -> str | None:
    trainer = Trainer(config, device=CPU)
    (Path(config.model.path) / "config.json").unlink(missing_ok=True)  # the export needs it
    ended = begin_save(trainer, path, 1)
    trainer.await_save(LIMIT_S)
    return ended[0].failure


def test_what_was_half_written_of_a_checkpoint_that_failed_is_gone(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model"))
    messages = run_ranks(save_half, 1, tmp_path, config, tmp_path / "checkpoints" / "step-1")
    assert "config.json" in messages[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def save_four(config: Config, directory: Path) -> list[dict[str, Any]]:
    """The weights after each step."""
    trainer, batch, weights = Trainer(config, device=CPU), Batch(), []
    for step in (1, 2, 3, 4):
        trainer.step(step, batch.rows, batch.fetch)
        begin_save(trainer, directory / f"step-{step}", step, str(step).encode())
        weights.append(whole_weights(trainer))
    trainer.await_save(LIMIT_S)
    return weights


def restore_newest(config: Config, path: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    restored = trainer.restore(path)
    return {"restored": restored, "weights": whole_weights(trainer)}


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_the_newest_checkpoint_whose_bytes_are_those_that_were_written_is_restored_on_all_ranks(
    model: str, tmp_path: Path
) -> None:
    config, directory = make_config(model), tmp_path / "checkpoints"
    weights = run_ranks(save_four, 2, tmp_path, config, directory)[0]
    flip_a_bit(directory / "step-1" / "hf" / "model.safetensors")
    (directory / "step-2" / "meta.json").unlink()
    flip_a_bit(directory / "step-3" / "data_state.bin")
    flip_a_bit(directory / "step-4" / "state" / "__1_0.distcp")
    (directory / "step-5.writing-0a0b0c0d" / "state").mkdir(parents=True)
    (directory / "step-0.deleted").mkdir()
    results = run_ranks(restore_newest, 2, tmp_path, config, directory / "step-4")
    for result in results:
        assert result["restored"].step == 1, "the export is not needed to go on"
        assert result["restored"].data_state == b"1"
        four, three, two = result["restored"].damaged
        assert re.fullmatch(r"step-4: rank [01]: state/__1_0\.distcp has other bytes than were written", four)
        assert re.fullmatch(r"step-3: rank [01]: data_state\.bin has other bytes than were written", three)
        assert re.fullmatch(r"step-2: rank [01]: meta\.json is missing", two)
        assert_equal_weights(result["weights"], weights[0], atol=0)
    assert sorted(path.name for path in directory.iterdir()) == [
        "step-1", "step-2.damaged", "step-3.damaged", "step-4.damaged"
    ]  # fmt: skip


def test_without_an_undamaged_checkpoint_nothing_is_restored_and_nothing_renamed(model: str, tmp_path: Path) -> None:
    config, directory = make_config(model), tmp_path / "checkpoints"
    run_ranks(save_four, 1, tmp_path, config, directory)
    for step in (1, 2, 3, 4):
        (directory / f"step-{step}" / "manifest.json").write_text("{}")
    (message,) = run_ranks(restore_nothing, 1, tmp_path, config, directory / "step-4")
    assert "no checkpoint there is undamaged: step-4: rank 0: manifest.json is no manifest: " in message
    assert "; step-1: rank 0: manifest.json is no manifest: " in message
    assert len(list(directory.glob("step-?"))) == 4


def restore_nothing(config: Config, path: Path) -> str:
    trainer = Trainer(config, device=CPU)
    with pytest.raises(StartError) as caught:
        trainer.restore(path)
    return str(caught.value)


def test_a_missing_checkpoint_or_model_is_named(model: str, tmp_path: Path) -> None:
    (message,) = run_ranks(restore_nothing, 1, tmp_path, make_config(model), tmp_path / "nothing")
    assert "cannot resume from" in message
    with pytest.raises(StartError, match=r"no config\.json there"):
        load_model(str(tmp_path))
