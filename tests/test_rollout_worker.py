"""The rollout worker with the real engine, relay and reward processes, against the controller end of the channel."""

import asyncio
import contextlib
import os
import signal
import string
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from controller_end import TOKEN, ControllerEnd, controller_end
from relay_world import Daemon, running_daemon
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from laminar import wire
from laminar.config import Config, ControllerConfig, ModelConfig, RolloutConfig, TaskConfig
from laminar.ids import GroupId, PromptId, TrajectoryId, Version
from laminar.workers.canary import Canary, CanaryError, canary_tokens
from laminar.workers.engines.causal_lm import CausalLM
from laminar.workers.link import Link
from laminar.workers.relay.manifest import Manifest
from laminar.workers.rollout import replica as replica_module
from laminar.workers.rollout.text import PromptError, TextCodec
from laminar.workers.rollout.worker import RolloutWorker

pytestmark = pytest.mark.timeout(240)

CONTEXT = 1024
V0, BROKEN = Version(0, 0), Version(1, 0)
TIMINGS = ControllerConfig(heartbeat_s=0.2, heartbeat_timeout_s=20.0, orphan_timeout_s=15.0)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ raise_exception('no') if not messages[0].content }}"
REWARD = """
def reward(prompt, response):
    if prompt.answer == "boom":
        raise KeyError("boom")
    return {"reward": len(response) / 1000, "letters": float(response.isalpha())}
"""


# ---- the world ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with one token per character; token 1 ends a response."""
    path = tmp_path_factory.mktemp("model")
    disable_progress_bar()
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *string.printable[:95]])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE
    )
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def relay(model: Path) -> Iterator[Daemon]:
    """Holds V0, the model's own weights, and BROKEN, whose weights are NaN."""
    with running_daemon() as daemon:
        parameters = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
        publish(daemon, V0, {name: each.detach() for name, each in parameters.items()})
        publish(daemon, BROKEN, {name: torch.full_like(each, torch.nan) for name, each in parameters.items()})
        yield daemon


def publish(daemon: Daemon, version: Version, tensors: dict[str, torch.Tensor], canary: Canary | None = None) -> None:
    layout = [(name, "float32", tuple(tensor.shape), 4) for name, tensor in tensors.items()]
    manifest = Manifest.plan(layout)
    with daemon.client() as client:
        buffer = client.begin(version, manifest, 0, 1)
        assert buffer is not None
        for spec, tensor in zip(manifest.tensors, tensors.values(), strict=True):
            buffer[spec.offset : spec.offset + spec.num_bytes] = tensor.contiguous().numpy().tobytes()
        client.commit(version, canary)


def canary_of(model: torch.nn.Module) -> Canary:
    tokens = torch.tensor(canary_tokens(97))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1]
    logprobs = logits.float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return Canary(tokens.tolist(), logprobs.tolist())


def digest_of(daemon: Daemon, version: Version) -> str:
    with daemon.client() as client, client.lease(version, wait_s=10.0) as lease:
        return lease.digest


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    file = tmp_path / "user_reward.py"
    file.write_text(REWARD)
    return Config(
        model=ModelConfig(path=str(model)),
        task=TaskConfig(reward=f"{file}:reward"),
        rollout=RolloutConfig(max_tokens=40, max_concurrent=16, flush_interval_s=0.05),
        controller=TIMINGS,
    )


class Bench:
    """A worker in this process, its controller, and what the reports add up to."""

    def __init__(self, end: ControllerEnd, relay: Daemon) -> None:
        self.end, self.relay = end, relay

    async def hold(self, version: Version = V0) -> None:
        await self.end.send(wire.Refresh(version=version, digest=digest_of(self.relay, version)))
        await self.end.until(lambda: any(done.version == version for done in self.end.of(wire.Refreshed)))

    async def assign(
        self, starts: list[wire.TrajectoryStart], version: Version = V0, group: int = 1, **prompt: Any
    ) -> None:
        row = wire.Prompt(prompt=PromptId(0), **{"text": "spell this", **prompt})
        await self.end.send(wire.AssignGroup(group=GroupId(group), version=version, prompt=row, starts=starts))

    @property
    def reports(self) -> list[wire.RolloutReport]:
        return self.end.of(wire.RolloutReport)

    def all_of(self, name: str) -> list[Any]:
        """`prompts`, `finished`, `rewarded` or `failed` of all reports."""
        return [each for report in self.reports for each in getattr(report, name)]

    async def until(self, name: str, count: int) -> list[Any]:
        await self.end.until(lambda: len(self.all_of(name)) >= count)
        return self.all_of(name)

    def tokens(self) -> dict[tuple[int, int], list[int]]:
        """New tokens by (trajectory, attempt), checked against the reported lengths."""
        found: dict[tuple[int, int], list[int]] = {}
        first: dict[tuple[int, int], int] = {}
        for report in self.reports:
            tokens, logprobs = wire.unpack_i32(report.tokens), wire.unpack_f32(report.logprobs)
            assert len(tokens) == len(logprobs)
            for trajectory, attempt, total, new in zip(
                wire.unpack_i64(report.trajectories),
                wire.unpack_i32(report.attempts),
                wire.unpack_i32(report.num_tokens),
                wire.unpack_i32(report.num_new),
                strict=True,
            ):
                key = (trajectory, attempt)
                first.setdefault(key, total - new)
                found.setdefault(key, []).extend(tokens[:new])
                assert total == first[key] + len(found[key])
                tokens = tokens[new:]
            assert tokens == []
        return found

    def is_generating(self) -> bool:
        return any(report.num_running for report in self.reports[-1:])


@contextlib.asynccontextmanager
async def running(config: Config, relay: Daemon) -> AsyncIterator[Bench]:
    async with controller_end(config) as end:
        link = Link(end.url, worker="rollout-0", role="rollout", token=TOKEN)
        worker = RolloutWorker(link, relay_directory=relay.directory)
        life = asyncio.create_task(worker.run())
        try:
            await end.until(lambda: bool(end.of(wire.RolloutReady)) or life.done(), 90.0)
            yield Bench(end, relay)
            await end.send(wire.Stop(reason="test over"))
            async with asyncio.timeout(60):
                assert await life == "test over"
            assert end.messages[-1] == wire.Goodbye()
        finally:
            worker.stop("test failed")
            await asyncio.wait([life])


def start(trajectory: int, attempt: int = 0, prefix: list[int] | None = None, **more: Any) -> wire.TrajectoryStart:
    more.setdefault("prefix_tokens", wire.pack_i32(prefix or []))
    return wire.TrajectoryStart(trajectory=TrajectoryId(trajectory), attempt=attempt, seed=trajectory, **more)


# ---- generation --------------------------------------------------------------------------------------------


async def test_a_group_is_generated_reported_and_rewarded_once(config: Config, relay: Daemon, model: Path) -> None:
    codec = TextCodec(str(model))
    async with running(config, relay) as bench:
        (ready,) = bench.end.of(wire.RolloutReady)
        assert (ready.num_requests_max, ready.context_tokens_max) == (16, CONTEXT)
        assert ready.num_requests_memory_bound == 0, "nothing is known of a CPU"
        await bench.hold()
        await bench.assign([start(number) for number in range(1, 9)])
        rewarded = await bench.until("rewarded", 8)
        finished = {each.trajectory: each for each in bench.all_of("finished")}
        tokens = bench.tokens()
        assert sorted(finished) == [each.trajectory for each in sorted(rewarded, key=lambda each: each.trajectory)]
        assert len(set(map(tuple, tokens.values()))) > 1
        for each in rewarded:
            response = tokens[each.trajectory, 0]
            end = finished[each.trajectory]
            assert (end.num_tokens, end.num_prompt_tokens) == (len(response), len("spell this"))
            assert end.finish_reason == ("stop" if response[-1] == 1 else "length")
            assert each.reward == pytest.approx(len(codec.decode(response)) / 1000)
            assert each.parts.keys() == {"letters"}
        (prompt,) = bench.all_of("prompts")
        assert codec.decode(wire.unpack_i32(prompt.tokens)) == "spell this"
        assert {report.version for report in bench.reports} == {V0}
        assert sum(report.decode_busy_s for report in bench.reports) > 0
        assert all(report.decode_busy_s <= report.interval_s + 0.5 for report in bench.reports)
        assert not bench.is_generating()
        assert bench.all_of("failed") == []


async def test_a_retry_goes_on_after_its_prefix_and_gives_the_same_response(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        await bench.assign([start(5)])
        await bench.until("rewarded", 1)
        whole = bench.tokens()[5, 0]
        await bench.assign([start(5, attempt=1, prefix=whole[:7])])
        finished = (await bench.until("finished", 2))[-1]
        assert bench.tokens()[5, 1] == whole[7:]
        assert finished.num_tokens == len(whole)
        await bench.until("rewarded", 2)
        assert bench.all_of("rewarded")[0].reward == bench.all_of("rewarded")[1].reward


async def test_an_operator_may_have_tokens_flushed_more_often(config: Config, relay: Daemon) -> None:
    """As configured, nothing would be heard of these attempts before they end."""
    rollout = msgspec.structs.replace(config.rollout, flush_interval_s=600.0, max_tokens=900, length_floor_median=900)
    async with running(msgspec.structs.replace(config, rollout=rollout), relay) as bench:
        await bench.hold()
        await bench.assign([start(number) for number in range(1, 5)])
        await bench.end.send(wire.Reconfigure(flush_interval_s=0.05))
        await bench.end.until(bench.is_generating)
        assert not bench.all_of("finished")
        await bench.end.send(wire.Abort(trajectories=[TrajectoryId(n) for n in range(1, 5)], attempts=[0] * 4))
        await bench.until("aborted", 4)


async def test_complete_responses_are_only_finished_or_only_scored(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        starts = [start(1, prefix=[20] * 40), start(2, prefix=[20, 1]), start(3, prefix=[20] * 3, score_only=True)]
        await bench.assign(starts)
        rewarded = await bench.until("rewarded", 3)
        assert {each.trajectory: each.reward for each in rewarded} == {1: 0.04, 2: 0.001, 3: 0.003}
        assert {each.trajectory: each.finish_reason for each in bench.all_of("finished")} == {1: "length", 2: "stop"}
        assert bench.tokens() == {}


async def test_a_request_of_another_version_fails_and_scoring_needs_none(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.assign([start(1), start(2, prefix=[20], score_only=True)])
        (failure,) = await bench.until("failed", 1)
        assert (failure.trajectory, failure.kind, failure.reason) == (1, "infra", "wrong_version")
        assert "no version yet" in failure.detail
        assert (await bench.until("rewarded", 1))[0].trajectory == 2


async def test_prompts_that_fill_the_context_fail_and_others_are_cut_to_it(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        await bench.assign([start(1), start(2)], text="x" * CONTEXT)
        failures = await bench.until("failed", 2)
        assert {(each.kind, each.reason) for each in failures} == {("data", "prompt_too_long")}
        await bench.assign([start(3)], group=2, text="x" * (CONTEXT - 2))
        (finished,) = await bench.until("finished", 1)
        assert finished.num_tokens <= 2


async def test_prompts_that_cannot_be_encoded_fail_as_data(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        await bench.assign([start(1)], messages=[{"role": "user", "content": ""}])
        await bench.assign([start(2)], group=2, text="")
        failures = await bench.until("failed", 2)
        assert [(each.kind, each.reason) for each in failures] == [("data", "prompt_error")] * 2


async def test_reward_code_that_raises_is_recorded_as_the_datas_fault(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        await bench.assign([start(1), start(2)], answer="boom")
        failures = await bench.until("failed", 2)
        assert {(each.kind, each.reason) for each in failures} == {("data", "reward_error")}
        assert len(bench.all_of("finished")) == 2


async def test_aborted_attempts_flush_their_tokens_and_are_silent_then(
    config: Config, relay: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, decode = threading.Event(), CausalLM.decode

    def stand_still(model: CausalLM, tokens: list[int]) -> torch.Tensor:
        assert go_on.wait(60.0)
        return decode(model, tokens)

    digest = digest_of(relay, V0)
    long = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, max_tokens=CONTEXT))
    async with running(long, relay) as bench:
        await bench.hold()
        monkeypatch.setattr(CausalLM, "decode", stand_still)  # else all might end before anybody looks
        await bench.assign([start(number) for number in range(6)])
        await bench.end.until(bench.is_generating)
        await bench.end.send(wire.Refresh(version=V0, digest=digest))
        await bench.end.until(lambda: bool(bench.end.of(wire.RefreshFailed)))
        assert "still generate" in bench.end.of(wire.RefreshFailed)[0].reason
        numbers = [TrajectoryId(number) for number in range(6)]
        await bench.end.send(wire.Abort(trajectories=numbers, attempts=[0] * 6))
        await bench.end.until(lambda: bench.end.session.num_pending == 0)
        go_on.set()
        refreshed = len(bench.end.of(wire.Refreshed))
        await bench.hold()
        await bench.end.until(lambda: len(bench.end.of(wire.Refreshed)) > refreshed)
        spoken = {each.trajectory for each in bench.all_of("finished")}
        assert Counter(each.trajectory for each in bench.all_of("rewarded")).keys() <= spoken
        assert len(spoken) < 6
        assert not bench.reports[-1].trajectories or bench.reports[-1].num_running == 0
        assert sum(map(len, bench.tokens().values())) > 0


async def test_an_engine_error_is_an_infrastructure_failure(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold(BROKEN)
        await bench.assign([start(1)], version=BROKEN)
        (failure,) = await bench.until("failed", 1)
        assert (failure.kind, failure.reason) == ("infra", "engine_error")
        await bench.hold(V0)
        await bench.assign([start(1, attempt=1)])
        assert (await bench.until("rewarded", 1))[0].attempt == 1


async def test_a_refresh_with_another_digest_keeps_the_held_version(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        await bench.end.send(wire.Refresh(version=BROKEN, digest="0" * 16))
        await bench.end.until(lambda: bool(bench.end.of(wire.RefreshFailed)))
        assert "digest" in bench.end.of(wire.RefreshFailed)[0].reason
        await bench.assign([start(1)])
        await bench.until("rewarded", 1)


async def test_an_evaluation_beside_other_work_is_greedy_and_scored(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        prompts = [wire.Prompt(prompt=PromptId(number), text=f"word {number}") for number in range(5)]
        prompts.append(wire.Prompt(prompt=PromptId(5), text="x", answer="boom"))
        prompts.append(wire.Prompt(prompt=PromptId(6), text="x" * CONTEXT))
        await bench.assign([start(1), start(2)])
        for number in (1, 2):
            await bench.end.send(wire.Evaluate(evaluation=number, version=V0, prompts=prompts))
        await bench.end.send(wire.Evaluate(evaluation=3, version=BROKEN, prompts=prompts))
        await bench.end.until(lambda: len(bench.end.of(wire.EvaluationDone)) == 2)
        first, second = bench.end.of(wire.EvaluationDone)
        assert (first.score, first.accuracy) == (second.score, 0.0)
        assert 0 < first.score <= 0.04
        assert first.num_prompts == 5  # those that can be scored
        await bench.end.until(lambda: bool(bench.end.of(wire.EvaluationFailed)))
        (failed,) = bench.end.of(wire.EvaluationFailed)
        assert (failed.evaluation, "holds v0" in failed.reason) == (3, True)
        await bench.until("rewarded", 2)


async def test_an_engine_that_stands_still_in_an_evaluation_is_reported_with_its_load(
    config: Config, relay: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, prefill = threading.Event(), CausalLM.prefill

    def stand_still(*arguments: Any) -> Any:
        assert go_on.wait(60.0)
        return prefill(*arguments)

    async with running(config, relay) as bench:
        await bench.hold()
        monkeypatch.setattr(CausalLM, "prefill", stand_still)
        prompts = [wire.Prompt(prompt=PromptId(number), text=f"word {number}") for number in range(5)]
        await bench.end.send(wire.Evaluate(evaluation=1, version=V0, prompts=prompts))
        await bench.end.until(lambda: sum(report.num_running == 5 for report in bench.reports) >= 3)
        standing = [report for report in bench.reports if report.num_running == 5]
        assert all(report.decode_busy_s == 0.0 for report in standing[1:])
        go_on.set()
        await bench.end.until(lambda: len(bench.end.of(wire.EvaluationDone)) == 1)
        await bench.end.until(lambda: bench.reports[-1].num_running == 0)


async def test_dropped_connections_lose_no_token_and_repeat_none(config: Config, relay: Daemon) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        for number in range(8):
            await bench.assign([start(2 * number), start(2 * number + 1)])
        dropped = []
        bench.end.on_frame = lambda number: number % 3 != 0 or number in dropped or bool(dropped.append(number))
        rewarded = await bench.until("rewarded", 16)
        assert Counter(each.trajectory for each in rewarded) == dict.fromkeys(range(16), 1)
        tokens = bench.tokens()
        assert {each.trajectory: each.num_tokens for each in bench.all_of("finished")} == {
            trajectory: len(found) for (trajectory, _), found in tokens.items()
        }
        assert dropped
        bench.end.on_frame = lambda number: True


async def test_new_groups_wait_while_too_much_is_unacknowledged(
    config: Config, relay: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        monkeypatch.setattr(replica_module, "PENDING_BYTES_MAX", -1)
        await bench.assign([start(1), start(2)])
        await bench.end.until(lambda: bench.end.session.num_pending == 0)
        beats = bench.end.heartbeats
        await bench.end.until(lambda: bench.end.heartbeats > beats + 1)
        assert bench.all_of("prompts") == []
        await bench.end.send(wire.Abort(trajectories=[TrajectoryId(1)], attempts=[0]))
        await bench.end.until(lambda: bench.end.session.num_pending == 0)
        monkeypatch.setattr(replica_module, "PENDING_BYTES_MAX", 1 << 20)
        rewarded = await bench.until("rewarded", 1)
        assert [each.trajectory for each in rewarded] == [2]


def test_chat_messages_are_rendered_with_the_models_template(model: Path) -> None:
    codec = TextCodec(str(model))
    assert codec.stop_ids == (1,)
    tokens = codec.encode(wire.Prompt(prompt=PromptId(0), messages=[{"role": "user", "content": "hi"}]))
    assert codec.decode(tokens) == "[user]hi"
    with pytest.raises(PromptError, match="prompt 3"):
        codec.encode(wire.Prompt(prompt=PromptId(3), messages=[{"role": "user", "content": ""}]))


# ---- the process -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def worker_process(end: ControllerEnd, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "laminar.workers.rollout", "--controller", end.url, "--name", "rollout-0", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "LAMINAR_TOKEN": TOKEN},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """(exit status, stderr)"""
    async with asyncio.timeout(90):
        _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


def ready(end: ControllerEnd) -> Callable[[], bool]:
    return lambda: bool(end.of(wire.RolloutReady))


async def test_the_process_works_and_exits_0_when_told_to_stop(config: Config, relay: Daemon) -> None:
    async with controller_end(config) as end:
        arguments = ("--relay", str(relay.directory), "--max-concurrent", "3")
        async with worker_process(end, *arguments) as process:
            await end.until(ready(end), 90)
            assert end.of(wire.RolloutReady)[0].num_requests_max == 3
            bench = Bench(end, relay)
            await bench.hold()
            await bench.assign([start(number) for number in range(8)])
            await bench.until("rewarded", 8)
            await end.send(wire.Stop(reason="the run is complete"))
            status, errors = await ended(process)
    assert (status, "stopped: the run is complete" in errors) == (0, True), errors
    assert end.messages[-1] == wire.Goodbye()


async def test_sigterm_ends_the_process_cleanly_while_it_starts(config: Config, relay: Daemon) -> None:
    async with controller_end(config) as end, worker_process(end, "--relay", str(relay.directory)) as process:
        await end.until(lambda: bool(end.heartbeats), 90)
        process.send_signal(signal.SIGTERM)
        status, errors = await ended(process)
        assert (status, "Traceback" in errors) == (0, False), errors
        assert end.messages[-1] == wire.Goodbye()


async def test_an_orphaned_process_exits_3(config: Config, relay: Daemon) -> None:
    timings = ControllerConfig(heartbeat_s=0.2, heartbeat_timeout_s=5.0, orphan_timeout_s=0.5)
    orphaning = msgspec.structs.replace(config, controller=timings)
    async with controller_end(orphaning) as end, worker_process(end, "--relay", str(relay.directory)) as process:
        await end.until(ready(end), 90)
        await end.stop()
        status, errors = await ended(process)
    assert (status, "no controller" in errors) == (3, True), errors


async def test_a_missing_model_is_one_clear_line_and_exit_1(config: Config, tmp_path: Path) -> None:
    missing = msgspec.structs.replace(config, model=ModelConfig(path=str(tmp_path / "nothing")))
    async with controller_end(missing) as end, worker_process(end) as process:
        status, errors = await ended(process)
    assert status == 1
    assert [line for line in errors.splitlines() if "model.path" in line and "is no directory" in line]
    assert "Traceback" not in errors
    (failure,) = end.of(wire.WorkerFailed)
    assert "is no directory" in failure.reason
    assert not end.of(wire.Goodbye)


async def test_reward_code_that_cannot_be_imported_fails_the_start(config: Config, tmp_path: Path) -> None:
    broken = msgspec.structs.replace(config, task=TaskConfig(reward=f"{tmp_path / 'none.py'}:reward"))
    async with controller_end(broken) as end:
        link = Link(end.url, worker="rollout-0", role="rollout", token=TOKEN)
        with pytest.raises(Exception, match=r"none\.py"):
            await RolloutWorker(link).run()
        assert "none.py" in end.of(wire.WorkerFailed)[0].reason


async def test_what_began_under_an_old_version_goes_on_under_it_when_the_replica_pulls_that_again(
    config: Config, relay: Daemon
) -> None:
    async with running(config, relay) as bench:
        await bench.hold(V0)
        await bench.assign([start(1)])
        await bench.until("rewarded", 1)
        whole = bench.tokens()[1, 0]
        await bench.hold(BROKEN)
        await bench.end.send(wire.Refresh(version=V0, digest=digest_of(relay, V0)))
        await bench.end.until(lambda: [done.version for done in bench.end.of(wire.Refreshed)] == [V0, BROKEN, V0])
        await bench.assign([start(1, attempt=1, prefix=whole[:3])])
        await bench.until("rewarded", 2)
        assert len(bench.all_of("finished")) == 2
        assert bench.all_of("failed") == []


async def test_a_pull_whose_canary_agrees_with_the_trainer_says_by_how_much(config: Config, model: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model)
    with running_daemon() as daemon:
        tensors = {name: each.detach() for name, each in plain.named_parameters()}
        publish(daemon, V0, tensors, canary_of(plain))
        async with running(config, daemon) as bench:
            await bench.hold()
            (refreshed,) = bench.end.of(wire.Refreshed)
    assert refreshed.canary_difference is not None
    assert refreshed.canary_difference < 1e-4


async def test_weights_that_are_not_those_of_their_version_end_the_worker(config: Config, model: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model)
    tensors = {name: each.detach() for name, each in plain.named_parameters()}
    with running_daemon() as daemon:
        # one layer's weights of this version are those of another model
        wrong = {name: each * 0 if "layers.1" in name and "norm" in name else each for name, each in tensors.items()}
        publish(daemon, V0, wrong, canary_of(plain))
        async with controller_end(config) as end:
            link = Link(end.url, worker="rollout-0", role="rollout", token=TOKEN)
            life = asyncio.create_task(RolloutWorker(link, relay_directory=daemon.directory).run())
            await end.until(lambda: bool(end.of(wire.RolloutReady)), 90.0)
            await end.send(wire.Refresh(version=V0, digest=digest_of(daemon, V0)))
            async with asyncio.timeout(90):
                with pytest.raises(CanaryError, match=r"differ by .* nats a token from the trainer's"):
                    await life
            assert not end.of(wire.Refreshed)
            assert "canary" in end.of(wire.WorkerFailed)[0].reason


async def test_a_version_that_the_relay_does_not_hold_is_refused_and_the_held_one_kept(
    config: Config, relay: Daemon
) -> None:
    async with running(config, relay) as bench:
        await bench.hold()
        await bench.end.send(wire.Refresh(version=Version(77, 0), digest="0" * 16))
        await bench.end.until(lambda: bool(bench.end.of(wire.RefreshFailed)), 20.0)
        assert "not ready in this relay" in bench.end.of(wire.RefreshFailed)[0].reason
        await bench.assign([start(1)])
        await bench.until("rewarded", 1)
