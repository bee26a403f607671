"""Replicas that stop generating in whole runs: a hung engine whose worker still answers, a process that stands still, and one that
dies with a version that nobody has any more but its relay, as a delta."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e import QUICKSTART, SMALL, Run, hosts_file, ledger_is_closed
from e2e_logprobs import largest_difference, row
from e2e_replay import Replay, Tokens, keep_tokens, read_tokens

from laminar.core.records import TrajectoryState
from laminar.ids import Version, WorkerId
from laminar.workers.relay.client import RelayClient

pytestmark = pytest.mark.timeout(240)

LONG = "run.steps=2000"
STOPPED_S = 60.0

HANGING_ENGINE = """
import os
import threading
from pathlib import Path

WORD = Path({word!r})
begin = threading.Thread.__init__


def init(thread, *args, **options):
    if options.get("name") == "embedded-engine":
        model = options["args"][0]
        decode = model.decode

        def hang(tokens):
            try:
                WORD.unlink()
            except FileNotFoundError:
                return decode(tokens)
            threading.Event().wait()

        model.decode = hang
    begin(thread, *args, **options)


if os.environ.get("LAMINAR_PROCESS") == "rollout-1":
    threading.Thread.__init__ = init
"""
"""A `sitecustomize` of the run's processes: the decode thread of rollout-1 stands still for ever once the file exists."""


def replica(run: Run, name: str) -> dict[str, Any]:
    """What /v1/status says of it."""
    token = {"Authorization": f"Bearer {(run.path / 'token').read_text().strip()}"}
    request = urllib.request.Request(f"{(run.path / 'url').read_text().strip()}/v1/status", headers=token)
    with urllib.request.urlopen(request, timeout=10.0) as answer:
        found: dict[str, Any] = json.load(answer)["replicas"][name]
        return found


def comes_back(run: Run, name: str) -> None:
    """It is started again, holds weights and works."""
    assert run.until_said(rf"^{name} is started again")
    run.until(lambda: replica(run, name)["restarts"] == 1 and replica(run, name)["generating"])


def test_replicas_that_stop_generating_or_stand_still_are_found_and_started_again(tmp_path: Path) -> None:
    word, hook = tmp_path / "hang", tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HANGING_ENGINE.format(word=str(word)))
    hosts = hosts_file(tmp_path, replicas=2)
    limits = ("rollout.progress_timeout_s=4", "controller.heartbeat_s=1", "controller.heartbeat_timeout_s=8")
    with Run.start(tmp_path, hosts, *SMALL, LONG, *limits, python_path=(str(hook),)) as run:
        run.until_said(r"^step 2/")
        _an_engine_hangs_while_its_worker_answers(run, word)
        assert replica(run, "rollout-0")["restarts"] == 0
        _a_worker_stands_still(run)
        assert replica(run, "rollout-1")["restarts"] == 1
        run.signal(signal.SIGINT)
        assert run.wait(STOPPED_S) == 0, run.output
    assert ledger_is_closed(run.output)
    rows = run.query("SELECT step, count(*), count(DISTINCT id) FROM trajectories WHERE dropped IS NULL GROUP BY step")
    assert rows == [(step, 16, 16) for step in range(1, len(rows) + 1)]


def _an_engine_hangs_while_its_worker_answers(run: Run, word: Path) -> None:
    word.touch()
    assert run.until_said(r"^alarm: replica-suspect: rollout-1 is suspect: \d+ requests run .* no token came for \d")
    assert run.until_said(r"^alarm: worker-lost: rollout-1 was lost: it answers but makes no progress: \d+ requests")
    comes_back(run, "rollout-1")


def _a_worker_stands_still(run: Run) -> None:
    process = run.worker("laminar.workers.rollout", "rollout-0")
    assert process is not None
    process.suspend()
    run.until(lambda: replica(run, "rollout-0")["state"] == "suspect")
    assert run.until_said(r"^alarm: worker-lost: rollout-0 was lost: its channel broke and did not come back")
    comes_back(run, "rollout-0")


# ---- an old version -----------------------------------------------------------------------------------------

OLD_VERSIONS = (
    *SMALL,
    LONG,
    "trainer.lr=2e-10",  # in float32 some percent of the elements change: each version has a digest of its own, and small deltas
    "rollout.length_floor_median=80",  # long enough to be found in the middle
    "rollout.length_floor_p99=90",
    "repack.enabled=false",  # so what moves, moves because of the fault
    "relay.verify_pulls=true",  # what is loaded has the digest that the trajectories carry
    "controller.heartbeat_timeout_s=60",  # the victim stands still for some steps before it is killed
    "task.eval_prompts=0",
)
TOLERANCE = 1e-3  # of log-probs of the same tokens under the same weights, by two programs


def test_what_a_killed_replica_generated_goes_on_under_its_own_version_rebuilt_from_a_delta(tmp_path: Path) -> None:
    hosts = hosts_file(tmp_path, replicas=2)
    with Run.start(tmp_path, hosts, *OLD_VERSIONS, config="longtail.toml") as run:
        kept = keep_tokens(run)
        run.until_said(r"^step 1/")
        with RelayClient(run.shm()[0]) as relay:
            victim, old = _suspend_one_whose_version_only_a_delta_has(run, relay)
            rebuilt = relay.status().old.num_rebuilt
            victim.kill()
            run.until(lambda: run.status()["failovers"]["relay"])
            assert relay.status().old.num_rebuilt > rebuilt
        step = run.status()["step"]
        run.until_said(rf"^step {step + 3}/")  # what went on is in one of these
        run.signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    assert ledger_is_closed(run.output)
    assert run.num_dropped().keys() <= {"stopped"}, run.output
    _check_what_went_on(run, Replay(run), read_tokens(kept), old)


def _suspend_one_whose_version_only_a_delta_has(run: Run, relay: RelayClient) -> tuple[psutil.Process, Version]:
    """rollout-1, stopped with unfinished trajectories of a version that no slot and no other replica has any more.

    A delta that comes too late, on a machine where its thread is starved, costs the version: then it is tried again.
    """
    while True:
        process, old = _suspend_in_the_middle(run)
        run.until(lambda: not _has_slot(relay, old))  # noqa: B023 - called at once
        if old in [each.version for each in relay.status().old.kept]:
            run.until(lambda: replica(run, "rollout-0")["version"] != str(old))  # noqa: B023 - called at once
            return process, old
        process.resume()


def _suspend_in_the_middle(run: Run) -> tuple[psutil.Process, Version]:
    """With what it generates under."""
    query = "SELECT count(*) FROM events WHERE kind = 'StepFinished'"
    while True:
        process = run.worker("laminar.workers.rollout", "rollout-1")
        assert process is not None
        process.suspend()
        before = run.query(query)
        run.until(lambda: run.query(query) > before)  # noqa: B023 - called at once; what it had sent has come by then
        state = Replay(run).core.state
        old = state.replicas[WorkerId("rollout-1")].version
        of_victim = [each for each in state.trajectories.values() if each.worker == "rollout-1"]
        found = [each for each in of_victim if each.state is TrajectoryState.GENERATING]
        if old is not None and found and all(each.num_tokens for each in found):
            return process, old
        process.resume()


def _has_slot(relay: RelayClient, version: Version) -> bool:
    return any(slot.version == version for slot in relay.status().slots)


def _check_what_went_on(run: Run, replay: Replay, tokens: Tokens, old: Version) -> None:
    moves = [move for move in replay.moves if move.source == "rollout-1"]
    assert moves
    pulls = [pull for pull in replay.pulls if pull.version == old and pull.worker == moves[0].destination]
    assert [pull.source for pull in pulls[-1:]] == ["relay"]
    assert {move.held[1] for move in moves} == {move.started_under for move in moves} == {old}
    digests = dict(run.query("SELECT 'v' || step, digest FROM versions"))
    assert len(set(digests.values())) == len(digests), "every version has bytes of its own"
    rows = []
    for move in moves:
        parts = tokens.responses[move.trajectory]
        assert sum(len(part.tokens) for part in parts if part.attempt < move.attempt) == move.num_flushed > 0
        assert next(part.start for part in parts if part.attempt >= move.attempt) == move.num_flushed
        response = [token for part in parts for token in part.tokens]
        query = "SELECT group_id, behavior_version, digest, num_tokens FROM trajectories WHERE id = ? AND step"
        [(group, *trained)] = run.query(query, move.trajectory)
        assert trained == [str(old), digests[str(old)], len(response)]
        logprobs = [logprob for part in parts for logprob in part.logprobs]
        rows.append(row(tokens.prompts[group], response, logprobs))
    # At this learning rate all versions have the initial model's log-probs: they tell a lost token, and the digest the version.
    assert largest_difference(QUICKSTART / "model", rows) < TOLERANCE
    assert largest_difference(QUICKSTART / "model", [_without_a_token(moves[0].num_flushed, rows[0])]) > TOLERANCE


def _without_a_token(at: int, whole: Any) -> Any:
    """As if the first token after the move had been lost."""
    response, logprobs = whole.response.tolist(), whole.logprobs.tolist()
    del response[at], logprobs[at]
    return row(whole.prompt.tolist(), response, logprobs)
