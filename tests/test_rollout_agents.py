"""Agent programs on a rollout worker: real processes, real HTTP, the real engine, against the controller end of the channel."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
import torch
from controller_end import controller_end
from relay_world import Daemon
from test_rollout_worker import (
    BROKEN,
    CONTEXT,
    V0,
    Bench,
    config,
    digest_of,
    model,
    ready,
    relay,
    running,
    start,
    worker_process,
)  # fmt: skip
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar import wire
from laminar.config import Config, ModelConfig, TaskConfig
from laminar.errors import StartError
from laminar.ids import TrajectoryId
from laminar.workers.agents.program import LAUNCHER
from laminar.workers.agents.transcript import ENVIRONMENT, MODEL, NEW_CONTEXT
from laminar.workers.link import Link
from laminar.workers.rollout.text import TextCodec
from laminar.workers.rollout.worker import RolloutWorker

pytestmark = pytest.mark.timeout(120)
__all__ = ("config", "model", "relay")  # fixtures

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
REWARD = """
def reward(prompt, response):
    return {"reward": float(len(response)), "asked": float(response.startswith(prompt.text))}
"""
PREAMBLE = """
import http.client, json, os, sys, threading, time, urllib.error, urllib.request
KEY, BASE = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]
def post(path, body, key=KEY):
    data = body if isinstance(body, bytes) else json.dumps({"model": "policy", **body}).encode()
    return urllib.request.urlopen(urllib.request.Request(BASE + path, data, {"Authorization": "Bearer " + key}), timeout=60)
def chat(messages, **more):
    return json.load(post("/chat/completions", {"messages": messages, "max_tokens": 8, **more}))["choices"][0]
def status(path, body, key=KEY):
    try:
        return post(path, body, key).status
    except urllib.error.HTTPError as error:
        assert json.load(error)["error"]["message"]
        return error.code
task = json.load(sys.stdin)
messages = task["messages"]
"""
TWO_CALLS = """
for question in ("more", "and"):
    messages.append({"role": "assistant", "content": chat(messages)["message"]["content"]})
    messages.append({"role": "user", "content": question})
chat(messages)
"""


class Trajectory(NamedTuple):
    """One attempt as the controller has it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    sources: bytes

    def contexts(self) -> list[tuple[list[int], list[float], bytes]]:
        """(tokens, log-probs, sources) of each context, prompts as the environment's."""
        size = len(self.prompt)
        found = [(list(self.prompt), [0.0] * size, bytearray([ENVIRONMENT] * size))]
        for token, logprob, source in zip(self.tokens, self.logprobs, self.sources, strict=True):
            if source == NEW_CONTEXT:
                found.append(([], [], bytearray()))
            found[-1][0].append(token)
            found[-1][1].append(logprob)
            found[-1][2].append(source)
        return [(tokens, logprobs, bytes(sources)) for tokens, logprobs, sources in found]


def trajectory_of(bench: Bench, number: int, attempt: int = 0) -> Trajectory:
    tokens, logprobs, sources = [], [], b""
    prompts = [p for p in bench.all_of("prompts") if (p.trajectory, p.attempt) == (number, attempt)]
    for report in bench.reports:
        at = 0
        attempts, news = wire.unpack_i32(report.attempts), wire.unpack_i32(report.num_new)
        for trajectory, of_attempt, num in zip(wire.unpack_i64(report.trajectories), attempts, news, strict=True):
            if (trajectory, of_attempt) == (number, attempt):
                tokens += wire.unpack_i32(report.tokens)[at : at + num]
                logprobs += wire.unpack_f32(report.logprobs)[at : at + num]
                sources += report.sources[at : at + num] or bytes(num)
            at += num
    (prompt,) = prompts
    return Trajectory(wire.unpack_i32(prompt.tokens), tokens, logprobs, sources)


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Qwen3 with a template that ends every turn with a token, as real ones do."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


class Setup:
    """Configurations of agents."""

    def __init__(self, config: Config, chat_model: Path, directory: Path) -> None:
        reward = directory / "agent_reward.py"
        reward.write_text(REWARD)
        self._directory = directory
        task = TaskConfig(reward=f"{reward}:reward", agent_timeout_s=60.0)
        self._config = msgspec.structs.replace(config, model=ModelConfig(path=str(chat_model)), task=task)

    def __call__(self, program: str, max_tokens: int = 400, **task: Any) -> Config:
        file = self._directory / "agent.py"
        file.write_text(PREAMBLE + program)
        agent = {"agent": [sys.executable, str(file)], **task}
        return msgspec.structs.replace(
            self._config,
            task=msgspec.structs.replace(self._config.task, **agent),
            rollout=msgspec.structs.replace(self._config.rollout, max_tokens=max_tokens),
        )


@pytest.fixture
def setup(config: Config, chat_model: Path, tmp_path: Path) -> Setup:
    return Setup(config, chat_model, tmp_path)


async def one(bench: Bench, **prompt: Any) -> Trajectory:
    """Trajectory 1, once it is rewarded."""
    await bench.hold()
    await bench.assign([start(1)], **{"text": "hi", **prompt})
    await bench.until("rewarded", 1)
    return trajectory_of(bench, 1)


async def failure(bench: Bench) -> wire.Failed:
    await bench.hold()
    await bench.assign([start(1)], text="hi")
    (failed,) = await bench.until("failed", 1)
    await bench.end.until(lambda: bench.reports[-1].num_running == 0)
    return failed


# ---- assembly ----------------------------------------------------------------------------------------------


async def test_the_calls_of_an_agent_are_one_trajectory(setup: Setup, relay: Daemon, chat_model: Path) -> None:
    codec = TextCodec(str(chat_model))
    async with running(setup(TWO_CALLS), relay) as bench:
        got = await one(bench)
        (finished,) = bench.all_of("finished")
    assert codec.decode_all(got.prompt) == "[user]hi<eos>[assistant]"
    assert (finished.num_prompt_tokens, finished.num_tokens) == (len(got.prompt), len(got.tokens))
    assert finished.finish_reason == "env"
    text = codec.decode_all(got.prompt + got.tokens)
    assert text.count("[user]more<eos>[assistant]") == text.count("[user]and<eos>[assistant]") == 1
    added = codec.decode_all([t for t, source in zip(got.tokens, got.sources, strict=True) if source == ENVIRONMENT])
    assert added.replace("<eos>", "") == "[user]more[assistant][user]and[assistant]"
    assert NEW_CONTEXT not in got.sources
    assert 3 <= got.sources.count(MODEL) <= 24


def check_logprobs(got: Trajectory, chat_model: Path) -> None:
    """The recorded log-probs are those of the plain model in the context that each token is recorded in."""
    plain = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    for tokens, logprobs, sources in got.contexts():
        with torch.no_grad():
            logits = plain(torch.tensor([tokens])).logits[0].log_softmax(-1)
        for at, source in enumerate(sources):
            if source == MODEL:
                assert logits[at - 1, tokens[at]].item() == pytest.approx(logprobs[at], abs=1e-4)
            else:
                assert logprobs[at] == 0.0


async def test_recorded_log_probs_are_those_of_the_recorded_context(
    setup: Setup, relay: Daemon, chat_model: Path
) -> None:
    async with running(setup(TWO_CALLS), relay) as bench:
        check_logprobs(await one(bench), chat_model)


REWRITES = """
first = chat(messages)["message"]["content"]
chat([{"role": "user", "content": "sum up"}])
messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
chat(messages)
"""


async def test_a_rewritten_history_is_another_context_of_the_same_trajectory(
    setup: Setup, relay: Daemon, chat_model: Path
) -> None:
    async with running(setup(REWRITES), relay) as bench:
        got = await one(bench)
        counts = [report.agents for report in bench.reports if report.agents]
    codec = TextCodec(str(chat_model))
    first, second, third = [codec.decode_all(tokens) for tokens, _, _ in got.contexts()]
    assert second.startswith("[user]sum up<eos>[assistant]")
    assert third.startswith(first)
    check_logprobs(got, chat_model)
    assert sum(each.get("num_calls", 0) for each in counts) == 3
    assert sum(each.get("num_rewrites", 0) for each in counts) == 2


async def test_a_rewritten_history_can_be_refused(setup: Setup, relay: Daemon) -> None:
    program = (
        'chat(messages)\nassert status("/chat/completions", {"messages": [{"role": "user", "content": "x"}]}) == 409\n'
    )
    async with running(setup(program + "time.sleep(100)", on_rewrite="refuse"), relay) as bench:
        failed = await failure(bench)
    assert (failed.kind, failed.reason) == ("data", "history_rewritten")


async def test_siblings_have_prompts_of_their_own_and_differ(setup: Setup, relay: Daemon, chat_model: Path) -> None:
    program = 'messages[0]["content"] += KEY[:5].replace("_", "-")\nchat(messages)\n'
    async with running(setup(program), relay) as bench:
        await bench.hold()
        await bench.assign([start(1), start(2), start(3)], text="hi")
        await bench.until("rewarded", 3)
        got = [trajectory_of(bench, number) for number in (1, 2, 3)]
    assert len({tuple(each.prompt) for each in got}) == 3
    assert len({tuple(each.tokens) for each in got}) == 3


async def test_a_retry_makes_the_same_calls_again(setup: Setup, relay: Daemon) -> None:
    async with running(setup(TWO_CALLS), relay) as bench:
        first = await one(bench)
        await bench.assign([wire.TrajectoryStart(trajectory=TrajectoryId(1), attempt=1, seed=1)], text="hi")
        await bench.until("rewarded", 2)
        again = trajectory_of(bench, 1, attempt=1)
    assert (again.prompt, again.tokens, again.sources) == (first.prompt, first.tokens, first.sources)


# ---- what is scored ----------------------------------------------------------------------------------------


async def test_what_the_agent_prints_is_its_answer(setup: Setup, relay: Daemon) -> None:
    program = 'chat(messages)\nprint(task["prompt"], sorted(task), task["metadata"])\n'
    async with running(setup(program, agent_metadata=["level"]), relay) as bench:
        await one(bench, answer="secret", metadata={"level": 3, "solution": "secret"})
        (rewarded,) = bench.all_of("rewarded")
    answer = "hi ['id', 'messages', 'metadata', 'prompt'] {'level': 3}"
    assert (rewarded.reward, rewarded.parts) == (len(answer), {"asked": 1.0})


async def test_the_last_message_of_a_silent_agent_is_its_answer(setup: Setup, relay: Daemon, chat_model: Path) -> None:
    async with running(setup(TWO_CALLS), relay) as bench:
        got = await one(bench)
        (rewarded,) = bench.all_of("rewarded")
    last = got.tokens[got.sources.rindex(bytes([ENVIRONMENT])) + 1 :]
    assert rewarded.reward == len(TextCodec(str(chat_model)).decode(last))


async def test_an_evaluation_runs_the_agent_greedily_and_records_nothing(setup: Setup, relay: Daemon) -> None:
    prompts = [wire.Prompt(prompt=number, text=f"word {number % 2}") for number in range(4)]
    async with running(setup(TWO_CALLS + 'print(task["prompt"])'), relay) as bench:
        await bench.hold()
        await bench.end.send(wire.Evaluate(evaluation=1, version=V0, prompts=prompts))
        await bench.end.until(lambda: bool(bench.end.of(wire.EvaluationDone)), 60.0)
        (done,) = bench.end.of(wire.EvaluationDone)
    assert (done.score, done.num_prompts, done.accuracy) == (6.0, 4, 1.0)
    assert bench.all_of("prompts") == bench.all_of("finished") == []
    assert bench.tokens() == {}


# ---- how a run of an agent can end -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "kind", "reason", "detail"),
    [
        ("chat(messages)\nraise KeyError('boom')", "data", "agent_failed", "KeyError: 'boom'"),
        ("pass", "data", "agent_made_no_call", "without a call"),
        ("chat(messages)\nos.kill(os.getpid(), 9)", "infra", "agent_killed", "signal 9"),
        ("x = bytearray(1 << 33)", "data", "agent_failed", "MemoryError"),
        ("print('x' * 5_000_000)\nsys.exit(3)", "data", "agent_failed", "exit status 3"),
    ],
)
async def test_an_agent_that_fails_fails_its_trajectory_with_the_reason(
    setup: Setup, relay: Daemon, program: str, kind: str, reason: str, detail: str
) -> None:
    async with running(setup(program, agent_memory_mb=4096), relay) as bench:
        failed = await failure(bench)
    assert (failed.kind, failed.reason) == (kind, reason)
    assert detail in failed.detail


async def test_an_agent_that_never_ends_is_killed_with_all_that_it_started(setup: Setup, relay: Daemon) -> None:
    program = "import subprocess\nsubprocess.Popen(['sleep', '987654'], start_new_session=True)\ntime.sleep(1000)"
    async with running(setup(program, agent_timeout_s=1.5), relay) as bench:
        failed = await failure(bench)
        assert (failed.kind, failed.reason) == ("data", "agent_timeout")
        assert not alive("987654")


async def test_what_an_agent_leaves_running_is_killed_when_it_ends(setup: Setup, relay: Daemon) -> None:
    program = "chat(messages)\nimport subprocess\nsubprocess.Popen(['sleep', '987653'], start_new_session=True)\n"
    async with running(setup(program), relay) as bench:
        await one(bench)
        assert not alive("987653")


def alive(argument: str) -> list[int]:
    """Processes with this argument."""
    found = [(p.pid, p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [pid for pid, command in found if argument in command and str(LAUNCHER) not in command]


async def test_an_engine_error_ends_the_agent_and_is_infrastructure(setup: Setup, relay: Daemon) -> None:
    program = 'assert status("/chat/completions", {"messages": messages}) == 500\ntime.sleep(1000)'
    async with running(setup(program), relay) as bench:
        await bench.hold(BROKEN)
        await bench.assign([start(1)], version=BROKEN)
        (failed,) = await bench.until("failed", 1)
    assert (failed.kind, failed.reason) == ("infra", "engine_error")


# ---- room --------------------------------------------------------------------------------------------------

UNTIL_REFUSED = """
while True:
    body = {"messages": messages, "max_tokens": 8}
    code = status("/chat/completions", body)
    if code != 200:
        assert code == 400, code
        sys.exit(1)
    messages = messages + [{"role": "user", "content": "x" * 20}]
"""


async def test_max_tokens_bounds_all_calls_together(setup: Setup, relay: Daemon) -> None:
    async with running(setup(UNTIL_REFUSED, max_tokens=150), relay) as bench:
        got = await one(bench)
        (finished,) = bench.all_of("finished")
    assert finished.finish_reason == "length", "an agent that gave up for want of room is scored as it is"
    assert 100 < len(got.tokens) == finished.num_tokens <= 150


async def test_an_answer_ends_where_the_context_does(setup: Setup, relay: Daemon) -> None:
    program = 'choice = chat(messages, max_tokens=1000, temperature=0.1)\nassert choice["finish_reason"] in ("length", "stop")'
    async with running(setup(program, max_tokens=CONTEXT), relay) as bench:
        got = await one(bench, text="x" * (CONTEXT - 40))
        (finished,) = bench.all_of("finished")
        counts = [report.agents for report in bench.reports if report.agents]
    assert len(got.prompt) + len(got.tokens) <= CONTEXT
    assert finished.finish_reason == ("env" if got.tokens[-1] == 1 else "length")
    assert sum(each.get("num_overruled", 0) for each in counts) == 1


async def test_a_prompt_without_room_fails_as_that(setup: Setup, relay: Daemon) -> None:
    async with running(setup('sys.exit(status("/chat/completions", {"messages": messages}) != 200)'), relay) as bench:
        await bench.hold()
        await bench.assign([start(1)], text="x" * CONTEXT)
        (failed,) = await bench.until("failed", 1)
    assert (failed.kind, failed.reason) == ("data", "prompt_too_long")


# ---- the API -----------------------------------------------------------------------------------------------

BAD_INPUT = """
assert status("/chat/completions", {"messages": messages}, key="guess") == 401
assert status("/chat/completions", {"messages": messages}, key="") == 401
assert status("/chat/completions", b"{") == 400
assert status("/chat/completions", {"messages": messages, "n": 3}) == 400
assert status("/chat/completions", {"messages": messages, "model": "gpt-5"}) == 404
assert status("/embeddings", {"input": "x"}) == 404
assert status("/chat/completions", b" " * (17 << 20)) == 413
connection = http.client.HTTPConnection(BASE.split("/")[2], timeout=60)
connection.request("GET", "/v1/models", headers={"Authorization": "Bearer " + KEY})
answer = connection.getresponse()
assert json.load(answer)["data"][0]["id"] == os.environ["OPENAI_MODEL"] == "policy"
assert "LAMINAR_TOKEN" not in os.environ and "SECRET_OF_THE_WORKER" not in os.environ
assert os.environ["SEARCH_KEY"] == "k"
chat(messages)
connection.request("GET", "/v1/models", headers={"Authorization": "Bearer " + KEY})  # is open while the agent ends
"""


async def test_bad_input_is_answered_and_costs_nothing(
    setup: Setup, relay: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LAMINAR_TOKEN": "t", "SECRET_OF_THE_WORKER": "s", "SEARCH_KEY": "k"}.items():
        monkeypatch.setenv(name, value)
    async with running(setup(BAD_INPUT, agent_env=["SEARCH_KEY"]), relay) as bench:
        got = await one(bench)
    assert 1 <= len(got.tokens) <= 8
    assert not any(got.sources)


STREAMED = """
events = []
body = {"messages": messages, "max_tokens": 30, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
for line in post("/chat/completions", body):
    if line.strip():
        events.append(line.decode().strip().removeprefix("data: "))
assert events.pop() == "[DONE]"
*pieces, usage = map(json.loads, events)
said = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
num = sum(len((piece["choices"][0]["logprobs"] or {}).get("content", [])) for piece in pieces)
assert num == usage["usage"]["completion_tokens"], (num, usage)
assert pieces[-1]["choices"][0]["finish_reason"] in ("stop", "length")
messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
chat(messages)
print(said)
"""


async def test_streamed_answers_are_recorded_like_others(setup: Setup, relay: Daemon, chat_model: Path) -> None:
    async with running(setup(STREAMED), relay) as bench:
        got = await one(bench)
        (rewarded,) = bench.all_of("rewarded")
    first = got.tokens[: got.sources.index(bytes([ENVIRONMENT]))]
    assert rewarded.reward == len(TextCodec(str(chat_model)).decode(first).strip())
    assert NEW_CONTEXT not in got.sources


STOPPED = """
text = "Q"
for _ in range(6):
    choice = json.load(post("/completions", {"prompt": text, "max_tokens": 60, "stop": list("aeiou")}))["choices"][0]
    assert not set(choice["text"]) & set("aeiou")
    text += choice["text"] + "!"
"""


async def test_stop_strings_end_an_answer_and_what_came_after_is_not_recorded(
    setup: Setup, relay: Daemon, chat_model: Path
) -> None:
    codec = TextCodec(str(chat_model))
    async with running(setup(STOPPED), relay) as bench:
        got = await one(bench)
        check_logprobs(got, chat_model)
    assert NEW_CONTEXT not in got.sources
    answers = bytes(got.sources).split(bytes([ENVIRONMENT]))
    at = 0
    for answer in answers:
        text = codec.decode(got.tokens[at : at + len(answer)])
        assert not set(text[:-1]) & set("aeiou"), "nothing was sampled after the stop string"
        at += len(answer) + 1


PARALLEL = """
threads = [threading.Thread(target=chat, args=([{"role": "user", "content": str(n)}],)) for n in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


async def test_parallel_calls_are_answered_one_after_another(setup: Setup, relay: Daemon, chat_model: Path) -> None:
    async with running(setup(PARALLEL), relay) as bench:
        got = await one(bench)
        check_logprobs(got, chat_model)
    assert got.sources.count(NEW_CONTEXT) == 3
    assert max(report.num_running for report in bench.reports) <= 1


ABANDONED = """
import socket
host, port = BASE.split("/")[2].split(":")
body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 900, "stream": True}).encode()
fields = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Authorization: Bearer " + KEY, f"Content-Length: {len(body)}"]
head = "\\r\\n".join(fields) + "\\r\\n\\r\\n"
with socket.create_connection((host, int(port))) as connection:
    connection.sendall(head.encode() + body)
    assert connection.recv(12) == b"HTTP/1.1 200"  # it has begun
chat([{"role": "user", "content": "else"}])
"""


async def test_a_call_that_its_agent_leaves_is_aborted_and_the_next_is_answered(
    setup: Setup, relay: Daemon, chat_model: Path
) -> None:
    async with running(setup(ABANDONED, max_tokens=CONTEXT), relay) as bench:
        got = await one(bench)
        check_logprobs(got, chat_model)
        await bench.end.until(lambda: bench.reports[-1].num_running == 0)
    assert len(got.contexts()) == 2


# ---- versions, aborts, the end -----------------------------------------------------------------------------

WAITS = """
chat(messages)
open(task["metadata"]["flag"], "w").close()
while not os.path.exists(task["metadata"]["flag"] + ".go"):
    time.sleep(0.02)
chat(messages + [{"role": "user", "content": "more"}])
"""


async def until_file(path: Path) -> None:
    await until(path.exists)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


async def test_weights_are_not_replaced_between_the_calls_of_an_agent(
    setup: Setup, relay: Daemon, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    async with running(setup(WAITS, agent_metadata=["flag"]), relay) as bench:
        await bench.hold()
        await bench.assign([start(1)], text="hi", metadata={"flag": str(flag)})
        await until_file(flag)
        await bench.end.send(wire.Refresh(version=V0, digest=digest_of(relay, V0)))
        await bench.end.until(lambda: bool(bench.end.of(wire.RefreshFailed)))
        assert "1 trajectories still generate" in bench.end.of(wire.RefreshFailed)[0].reason
        (tmp_path / "flag.go").touch()
        await bench.until("rewarded", 1)


async def test_an_abort_kills_the_agent_says_so_and_the_replica_can_refresh(
    setup: Setup, relay: Daemon, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    async with running(setup(WAITS, agent_metadata=["flag"]), relay) as bench:
        await bench.hold()
        await bench.assign([start(1)], text="hi", metadata={"flag": str(flag)})
        await until_file(flag)
        (agent,) = alive(str(tmp_path / "agent.py"))
        await bench.end.send(wire.Abort(trajectories=[TrajectoryId(1)], attempts=[0]))
        (aborted,) = await bench.until("aborted", 1)
        assert (aborted.trajectory, aborted.attempt) == (1, 0)
        assert not psutil.pid_exists(agent)
        await bench.hold(BROKEN)
        assert bench.all_of("finished") == bench.all_of("failed") == []


async def test_an_agent_aborted_in_the_middle_of_a_call_leaves_the_engine_free(setup: Setup, relay: Daemon) -> None:
    async with running(setup("chat(messages, max_tokens=900)", max_tokens=CONTEXT), relay) as bench:
        await bench.hold()
        await bench.assign([start(number) for number in range(4)], text="hi")
        await bench.end.until(lambda: bench.is_generating())
        numbers = [TrajectoryId(number) for number in range(4)]
        await bench.end.send(wire.Abort(trajectories=numbers, attempts=[0] * 4))
        await bench.hold(BROKEN)
        ended = {each.trajectory for name in ("aborted", "finished") for each in bench.all_of(name)}
        assert ended == {0, 1, 2, 3}


async def test_a_killed_worker_leaves_no_agent(setup: Setup, relay: Daemon, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    config = setup(WAITS, agent_metadata=["flag"])
    async with (
        controller_end(config) as end,
        worker_process(end, "--relay", str(relay.directory)) as process,
    ):
        await end.until(ready(end), 60)
        bench = Bench(end, relay)
        await bench.hold()
        await bench.assign([start(1)], text="hi", metadata={"flag": str(flag)})
        await until_file(flag)
        (agent,) = alive(str(tmp_path / "agent.py"))
        directory = psutil.Process(agent).cwd()
        process.send_signal(signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(agent) and not os.path.exists(directory))


async def test_an_agent_that_is_not_there_fails_the_start(setup: Setup, relay: Daemon) -> None:
    async with controller_end(setup("", agent="no-such-agent --task {prompt}")) as end:
        with pytest.raises(StartError, match="no-such-agent"):
            await RolloutWorker(Link(end.url, worker="rollout-0", role="rollout", token="secret-of-this-run")).run()
