"""The reward pool with real child processes and user code that misbehaves in every way we know."""

import asyncio
import math
import os
import signal
import statistics
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from laminar import wire
from laminar.config import TaskConfig
from laminar.errors import ProtocolError, StartError
from laminar.ids import PromptId
from laminar.tasks.reward_child import Child, Job
from laminar.tasks.reward_wire import Ready, Unpacker, pack
from laminar.tasks.reward_worker import judge
from laminar.tasks.rewards import Reward, RewardFailure, RewardPool

pytestmark = pytest.mark.timeout(60)

PROMPT = wire.Prompt(prompt=PromptId(0), text="q", answer="42", metadata={"level": 3})

USER_CODE = """
    import asyncio, math, os, subprocess, sys, time
    from pathlib import Path

    def reward(prompt, response):
        command, _, argument = response.partition(" ")
        return COMMANDS[command](argument, prompt)

    def once(marker, first, second):
        if Path(marker).exists():
            return second()
        Path(marker).touch()
        return first()

    def hang(*_):
        time.sleep(600)

    def spawn(path, _):
        child = subprocess.Popen(["sleep", "600"])
        Path(path).write_text(str(child.pid))
        time.sleep(600)

    def fail(*_):
        raise KeyError("no such column")

    async def slowly(seconds, _):
        await asyncio.sleep(float(seconds))
        return 0.25

    COMMANDS = {
        "length": lambda argument, _: len(argument),
        "answer": lambda argument, prompt: float(argument == prompt.answer) * prompt.metadata["level"],
        "hang": hang,
        "hang_once": lambda path, _: once(path, hang, lambda: 0.5),
        "die": lambda *_: os._exit(7),
        "crash": lambda *_: os.kill(os.getpid(), 11),
        "exit": lambda *_: sys.exit(3),
        "print": lambda *_: [print("x" * 100000), os.write(1, b"raw"), 0.75][2],
        "read": lambda *_: float(len(sys.stdin.read())),
        "fail": fail,
        "nan": lambda *_: math.nan,
        "text": lambda *_: "1.0",
        "none": lambda *_: None,
        "parts": lambda *_: {"score": 1, "format": 0.5},
        "secret": lambda *_: float("LAMINAR_TOKEN" in os.environ),
        "slowly": slowly,
        "spawn": spawn,
        "nap": lambda seconds, _: time.sleep(float(seconds)) or 1.0,
        "pid": lambda *_: float(os.getpid()),
    }
"""

Score = Callable[..., Coroutine[Any, Any, Reward | RewardFailure]]


def task(tmp_path: Path, **changes: Any) -> TaskConfig:
    file = tmp_path / "user_reward.py"
    file.write_text(textwrap.dedent(USER_CODE))
    return TaskConfig(**{"reward": f"{file}:reward", "reward_timeout_s": 30.0, **changes})


@pytest.fixture
async def make_pool(tmp_path: Path) -> AsyncIterator[Callable[..., Coroutine[Any, Any, Score]]]:
    pools: list[RewardPool] = []

    async def make(**changes: Any) -> Score:
        pool = RewardPool(task(tmp_path, **changes), seed=1)
        pools.append(pool)
        await pool.start()
        return lambda response, key=0: pool.score(PROMPT, response, key)

    yield make
    for pool in pools:
        await pool.stop()


async def test_scores_come_from_user_code_with_the_prompt_at_hand(make_pool: Any) -> None:
    score = await make_pool()
    first, second = await asyncio.gather(score("length four"), score("answer 42"))
    assert (first.reward, second.reward, first.parts) == (4.0, 3.0, {})
    assert first.reward_s > 0
    parts = await score("parts")
    assert (parts.reward, parts.parts) == (1.0, {"format": 0.5})


async def test_many_scores_keep_their_own_answers_over_several_children(make_pool: Any) -> None:
    score = await make_pool(reward_workers=2)
    results = await asyncio.gather(*(score("length " + "x" * size) for size in range(1000)))
    assert [result.reward for result in results] == [float(size) for size in range(1000)]


async def test_prints_and_reads_of_user_code_do_not_touch_the_protocol(make_pool: Any) -> None:
    score = await make_pool()
    results = await asyncio.gather(score("print"), score("read"), score("length abc"))
    assert [result.reward for result in results] == [0.75, 0.0, 3.0]


async def test_an_exception_is_the_datas_fault_and_shows_where(make_pool: Any) -> None:
    score = await make_pool()
    failure, fine = await asyncio.gather(score("fail"), score("length a"))
    assert (failure.kind, failure.reason) == ("data", "reward_error")
    assert failure.detail.endswith("KeyError: 'no such column'")
    assert "in fail" in failure.detail
    assert fine.reward == 1.0
    assert (await score("exit")).reason == "reward_error"


@pytest.mark.parametrize("response", ["nan", "text", "none"])
async def test_what_is_not_a_finite_number_is_recorded_as_that(make_pool: Any, response: str) -> None:
    failure = await (await make_pool())(response)
    assert (failure.kind, failure.reason) == ("data", "reward_nan")


async def test_asynchronous_scorers_run_side_by_side_in_one_child(make_pool: Any) -> None:
    score = await make_pool(reward_timeout_s=4.0)
    results = await asyncio.gather(*(score("slowly 0.3") for _ in range(60)))
    assert [result.reward for result in results] == [0.25] * 60
    assert max(result.reward_s for result in results) < 4.0


async def test_a_hanging_score_fails_alone_after_one_more_try(make_pool: Any) -> None:
    score = await make_pool(reward_timeout_s=0.4)
    failure, *others = await asyncio.gather(score("hang"), *(score("length abc") for _ in range(20)))
    assert (failure.kind, failure.reason) == ("data", "reward_timeout")
    assert [other.reward for other in others] == [3.0] * 20


async def test_a_score_that_hangs_once_succeeds_at_the_second_try(make_pool: Any, tmp_path: Path) -> None:
    score = await make_pool(reward_timeout_s=0.4)
    assert (await score(f"hang_once {tmp_path / 'marker'}")).reward == 0.5


async def test_waiting_behind_slow_scores_is_no_timeout(make_pool: Any) -> None:
    score = await make_pool(reward_timeout_s=1.0)
    results = await asyncio.gather(*(score("nap 0.2") for _ in range(8)))
    assert [result.reward for result in results] == [1.0] * 8


@pytest.mark.parametrize("how", ["die", "crash"])
async def test_a_score_that_kills_its_child_fails_alone(make_pool: Any, how: str) -> None:
    score = await make_pool()
    results = await asyncio.gather(score("length a"), score(how), *(score("length abc") for _ in range(20)))
    assert (results[1].kind, results[1].reason) == ("infra", "reward_crash")
    assert results[1].detail.startswith("the reward function ended its process")
    assert [result.reward for result in (results[0], *results[2:])] == [1.0] + [3.0] * 20


async def test_asynchronous_neighbours_of_a_crash_are_unharmed(make_pool: Any) -> None:
    score = await make_pool()
    results = await asyncio.gather(*(score("slowly 0.1") for _ in range(5)), score("die"), score("die"))
    assert [getattr(result, "reward", None) for result in results] == [0.25] * 5 + [None] * 2


async def test_what_user_code_started_dies_with_its_child(make_pool: Any, tmp_path: Path) -> None:
    score = await make_pool(reward_timeout_s=1.0)
    await score(f"spawn {tmp_path / 'pid'}")
    assert not is_alive(int((tmp_path / "pid").read_text()))


async def test_the_run_token_is_not_in_the_environment_of_user_code(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINAR_TOKEN", "secret")
    assert (await (await make_pool())("secret")).reward == 0.0


async def test_a_scorer_that_cannot_be_imported_stops_the_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\ndef reward(prompt, response): return 1.0\n")
    pool = RewardPool(TaskConfig(reward=f"{broken}:reward", reward_workers=2), seed=0)
    with pytest.raises(StartError, match="no_such_module"):
        await pool.start()
    await pool.stop()


async def test_code_that_dies_while_it_is_imported_stops_the_start(tmp_path: Path) -> None:
    deadly = tmp_path / "deadly.py"
    deadly.write_text("import os\nos._exit(1)\n")
    with pytest.raises(StartError, match="died while loading"):
        await RewardPool(TaskConfig(reward=f"{deadly}:reward"), seed=0).start()


async def test_scores_that_wait_at_stop_end_as_failures(tmp_path: Path) -> None:
    pool = RewardPool(task(tmp_path), seed=0)
    await pool.start()
    waiting = [asyncio.create_task(pool.score(PROMPT, "hang", 0)) for _ in range(100)]
    await asyncio.sleep(0)
    await pool.stop()
    async with asyncio.timeout(10):
        assert {(await score).reason for score in waiting} == {"reward_not_started"}
    await pool.stop()


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    code = f"""
        import asyncio, os, signal, sys
        from laminar.config import TaskConfig
        from laminar.ids import PromptId
        from laminar.tasks.rewards import RewardPool
        from laminar.wire import Prompt

        async def main():
            pool = RewardPool(TaskConfig(reward={task(tmp_path).reward!r}), seed=0)
            await pool.start()
            pid = await pool.score(Prompt(prompt=PromptId(0)), "pid", 0)
            print(int(pid.reward), flush=True)
            asyncio.create_task(pool.score(Prompt(prompt=PromptId(0)), "hang", 0))
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    parent = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, timeout=40)
    pid = int(parent.stdout)
    descriptor = None
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    readable, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    assert readable, f"reward process {pid} outlived its parent"


async def test_delays_are_log_normal_seeded_and_awaited_side_by_side(make_pool: Any, tmp_path: Path) -> None:
    slow = task(tmp_path, reward_delay_median_s=0.2, reward_delay_p99_s=2.0)
    delays = [RewardPool(slow, seed=5).delay_s(key) for key in range(4000)]
    assert delays == [RewardPool(slow, seed=5).delay_s(key) for key in range(4000)]
    assert statistics.median(delays) == pytest.approx(0.2, rel=0.1)
    assert statistics.quantiles(delays, n=100)[98] == pytest.approx(2.0, rel=0.25)
    score = await make_pool(reward_delay_median_s=0.3, reward_delay_p99_s=0.0)
    async with asyncio.timeout(15):
        results = await asyncio.gather(*(score("length a", key) for key in range(200)))
    assert all(result.reward_s >= 0.3 for result in results)


def test_values_are_judged_by_type_and_finiteness() -> None:
    assert judge(1, True).reward == 1.0
    assert judge(1, {"reward": 2, "score": 1}).parts == {"score": 1.0}
    assert judge(1, {"format": 1.0}).reason == "reward_error"
    assert "where 'x' is no finite number; expected is" in judge(1, {"score": 1, "x": "abc"}).detail
    assert {judge(1, value).reason for value in (math.inf, b"1", [1.0], {"score": 1, "x": math.nan})} == {"reward_nan"}


def test_frames_from_a_child_may_arrive_in_any_pieces_and_nonsense_is_refused() -> None:
    stream = pack(Ready()) * 3
    unpacker = Unpacker()
    assert [message for byte in stream for message in unpacker.feed(bytes([byte]))] == [Ready()] * 3
    for junk in (b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"):
        with pytest.raises(ProtocolError):
            list(Unpacker().feed(junk))


def is_alive(pid: int) -> bool:
    """Not gone and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_question_to_a_child_that_has_just_died_is_owed_like_the_others(tmp_path: Path) -> None:
    """Under uvloop, as in a rollout worker: its pipes are closed before anybody has read to their end."""

    async def ask_the_dead() -> None:
        child = await Child.start(task(tmp_path))
        process = child._process
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        assert process.stdin is not None
        while "closed=True" not in repr(process.stdin.transport):  # noqa: ASYNC110 - uvloop tells nobody
            await asyncio.sleep(0.001)
        job = Job(number=1, prompt=PROMPT, response="length a", future=asyncio.get_running_loop().create_future())
        child.ask(job)
        await child.serve(lambda job, answer: None)
        assert child.jobs == {1: job}
        await child.kill()

    uvloop.run(ask_the_dead())
