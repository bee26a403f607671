"""Agent programs in whole runs: two calls per trajectory train, and what the agent wrote is not trained."""

import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from e2e import MARK, QUICKSTART, Run, hosts_file, ledger_is_closed
from e2e_replay import keep_tokens

from laminar.controller.segments import read_segment
from laminar.workers.rollout.text import TextCodec

pytestmark = pytest.mark.timeout(240)

SMALL = (
    "task.size=400",
    "task.eval_prompts=4",
    "trainer.batch_prompts=2",
    "rollout.group_size=4",
    "rollout.local_batch_groups=2",
    "buffer.max_groups=6",
    f"task.agent_env=['{MARK}']",  # so that an agent left behind is found
)
AGENT = QUICKSTART.parent / "agent" / "agent.py"
FAILING_AGENT = """
import runpy
from pathlib import Path

if Path({word!r}).exists():
    raise SystemExit("no tool server is configured")
runpy.run_path({agent!r}, run_name="__main__")
"""
RAISING_SAMPLER = """
class Sampler:
    def __init__(self):
        self.calls = 0

    def select(self, view, num_groups):
        self.calls += 1
        if view.step == 3:
            raise ValueError("nothing to my taste")
        freshest = sorted(view.groups, key=lambda group: (group.staleness, group.id))
        return [group.id for group in freshest[:num_groups]]

    def state(self):
        return {"calls": self.calls}

    def load_state(self, state):
        self.calls = state["calls"]
"""

STEPS = 3
TOLERANCE = 1e-3  # of log-probs of the same tokens under the same weights, by engine and trainer


def start(directory: Path, *overrides: str, replicas: int = 1, options: tuple[str, ...] = ()) -> Run:
    hosts = hosts_file(directory, replicas=replicas)
    return Run.start(directory, hosts, *SMALL, *overrides, config="../agent/config.toml", options=options)


class Response(NamedTuple):
    """What the token store was given of one trajectory."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    sources: list[int]


class Finished(NamedTuple):
    run: Run
    responses: dict[int, Response]


def read_responses(path: Path) -> dict[int, Response]:
    found: dict[int, Response] = {}
    for entry in read_segment(path).entries:
        own = found.setdefault(entry.trajectory, Response([], [], [], []))
        tokens = array("i", entry.tokens).tolist()
        if entry.group:
            own.prompt.extend(tokens)
        else:
            own.tokens.extend(tokens)
            own.logprobs.extend(array("f", entry.logprobs))
            own.sources.extend(entry.sources or bytes(len(tokens)))
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    with start(tmp_path_factory.mktemp("run"), f"run.steps={STEPS}") as run:
        kept = keep_tokens(run)
        assert run.wait(220.0) == 0, run.output
        yield Finished(run, read_responses(kept))


def test_agents_train_and_the_ledger_closes(finished: Finished) -> None:
    run = finished.run
    assert ledger_is_closed(run.output)
    assert run.query("SELECT max(step) FROM metrics") == [(STEPS,)]
    rows = run.query("SELECT finish_reason, count(*) FROM trajectories WHERE trained_at IS NOT NULL GROUP BY 1")
    assert rows == [("env", STEPS * 2 * 4)]
    assert run.query("SELECT count(*) FROM metrics WHERE name = 'agent/num_calls' AND value >= 16") != [(0,)]


def test_every_trajectory_is_two_answers_and_what_the_agent_wrote_between_them(finished: Finished) -> None:
    codec = TextCodec(str(QUICKSTART / "model"))
    trained = finished.run.query(
        "SELECT id, num_prompt_tokens, num_tokens FROM trajectories WHERE trained_at IS NOT NULL"
    )
    assert len(trained) == STEPS * 2 * 4
    for number, num_prompt_tokens, num_tokens in trained:
        own = finished.responses[number]
        assert (len(own.prompt), len(own.tokens), len(own.sources)) == (num_prompt_tokens, num_tokens, num_tokens)
        word = codec.decode(own.prompt).split()[-1]
        written = [token for token, source in zip(own.tokens, own.sources, strict=True) if source]
        assert codec.decode(written) == f"\n{word}\n"
        assert set(own.sources) == {0, 1}
        first = own.sources.index(1)
        assert own.sources == [0] * first + [1] * len(written) + [0] * (num_tokens - first - len(written))
        assert [logprob for logprob, source in zip(own.logprobs, own.sources, strict=True) if source] == [0.0] * len(
            written
        )


def test_what_the_agent_wrote_is_not_trained(finished: Finished) -> None:
    for step in range(1, STEPS + 1):
        rows = finished.run.query("SELECT id FROM trajectories WHERE step = ? AND trained_at IS NOT NULL", step)
        sources = [source for (number,) in rows for source in finished.responses[number].sources]
        names = ("num_tokens/trained", "num_tokens/environment")
        metrics = dict(finished.run.query("SELECT name, value FROM metrics WHERE step = ?", step))
        assert [metrics[name] for name in names] == [sources.count(0), len(sources) - sources.count(0)]


def test_the_trainer_finds_the_same_log_probs_in_both_answers(finished: Finished) -> None:
    rows = finished.run.query("SELECT value FROM metrics WHERE name = 'mismatch/logprob_abs_diff_max'")
    assert rows
    assert max(value for (value,) in rows) < TOLERANCE


def test_evaluations_run_the_agent(finished: Finished) -> None:
    assert finished.run.until_said(r"greedy accuracy [\d.]+, mean reward [\d.]+ on 4 held-out prompts", 1.0)


def test_a_killed_replica_and_a_raising_sampler_cost_nothing_and_agents_that_fail_are_told_in_their_own_words(
    tmp_path: Path,
) -> None:
    word, agent, sampler = tmp_path / "fail", tmp_path / "agent.py", tmp_path / "sampler.py"
    agent.write_text(FAILING_AGENT.format(word=str(word), agent=str(AGENT)))
    sampler.write_text(RAISING_SAMPLER)
    overrides = ("run.steps=2000", "task.eval_prompts=0", f"task.agent=['python', '{agent}']")
    with start(tmp_path, *overrides, replicas=2, options=("--sampler", f"{sampler}:Sampler")) as run:
        run.until_said(r"^step 1/")
        run.until(lambda: run.status()["replicas"].get("rollout-1", {}).get("generating"))
        run.kill_worker("laminar.workers.rollout", "rollout-1")
        run.until_said(r"^rollout-1 is started again")
        (last,) = run.query("SELECT max(step) FROM metrics")[0]
        run.until_said(rf"^step {max(last, 3) + 2}/")
        word.touch()
        assert run.until_said(r"agent_failed.*will not be trained on.*no tool server is configured")
        run.signal(signal.SIGINT)
        run.wait()
    assert ledger_is_closed(run.output)
    assert run.until_said(r"^alarm: worker-lost: rollout-1 was lost: ended by signal 9")
    assert run.until_said(r"^alarm: sampler: .*Sampler.*raised ValueError: nothing to my taste")
    rows = run.query("SELECT DISTINCT group_id, behavior_version FROM trajectories WHERE trained_at IS NOT NULL")
    assert len({group for group, _ in rows}) == len(rows) > 0, "a group has one version"
    trained = "FROM trajectories WHERE trained_at IS NOT NULL AND dropped IS NULL"
    rows = run.query(f"SELECT step, count(*), count(DISTINCT id) {trained} GROUP BY step")
    assert rows == [(step, 8, 8) for step in range(1, len(rows) + 1)], "once, and every step is full"
