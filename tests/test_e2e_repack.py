"""Repacking in a real run: what moves, what it is made of afterwards, and what the emptied replicas do."""

import asyncio
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from e2e import END_S, QUICKSTART, Run, hosts_file, ledger_is_closed
from e2e_logprobs import largest_difference, row
from e2e_replay import Freed, Move, Part, Replay, Tokens, keep_tokens, read_tokens

from laminar import configfile
from laminar.config import Config
from laminar.ids import Version
from laminar.rl import packing
from laminar.workers.engines.embedded import EmbeddedEngine
from laminar.workers.rollout.requests import Requests
from laminar.workers.rollout.text import TextCodec

pytestmark = pytest.mark.timeout(400)

STEPS_MAX = 80  # far more than it takes: the run is stopped when enough has happened
LOOK_EVERY = 10  # steps
MOVES_MIN = 10
CHECKED_MIN = 4  # moves whose weights are there to compute with
TOLERANCE = 1e-3  # of log-probs of the same tokens under the same weights, by two programs


class Case(NamedTuple):
    """A fleet that repacks."""

    replicas: int
    overrides: tuple[str, ...]
    divides: bool
    """Whether one source's trajectories may go to several destinations."""


CASES = {
    "whole": Case(
        replicas=2, overrides=("repack.interval_s=0.05",), divides=False
    ),  # tails are short on a fast machine
    "parts": Case(
        replicas=3,
        overrides=(
            "rollout.refresh_policy=continuous",
            "repack.policy=parts",
            "repack.interval_s=0.05",
            "rollout.max_concurrent=40",
            "repack.requests_max=28",  # so few that what one source generates sometimes needs two destinations
            "buffer.max_groups=40",
            "buffer.max_ready_groups=6",  # the next batch makes room: an emptied replica has something to begin
        ),
        divides=True,
    ),
}


class Finished(NamedTuple):
    """A run and what is left of it."""

    case: Case
    run: Run
    replay: Replay
    tokens: Tokens
    config: Config
    status: dict[str, Any]
    """Of the controller, shortly before it was stopped."""

    def weights(self, version: Version) -> Path:
        """A Hugging Face directory with this version's weights, if they were kept."""
        return _weights(self.run, version)

    def moved(self) -> dict[int, Move]:
        """The last move of each trajectory that moved and was trained on."""
        return _moved(self.run, self.replay)

    def checked(self) -> dict[Version, list[Move]]:
        """Those of them whose weights were kept, by version."""
        found: dict[Version, list[Move]] = {}
        for move in _of_kept_weights(self.run, self.replay):
            found.setdefault(move.started_under, []).append(move)
        return found

    def prompt(self, trajectory: int) -> list[int]:
        [(group,)] = self.run.query("SELECT group_id FROM trajectories WHERE id = ?", trajectory)
        return self.tokens.prompts[group]

    def response(self, trajectory: int) -> list[int]:
        return [token for part in self.tokens.responses[trajectory] for token in part.tokens]

    def logprobs(self, trajectory: int) -> list[float]:
        return [logprob for part in self.tokens.responses[trajectory] for logprob in part.logprobs]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is tiny: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that was stopped when enough had moved. The versions differ much; most are kept: no checkpoint begins while one is
    being written."""
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    weights = (
        f"run.steps={STEPS_MAX}",
        "trainer.lr=1e-3",
        "trainer.checkpoint_every=1",
        f"trainer.keep_last={STEPS_MAX}",
    )
    hosts = hosts_file(directory, replicas=case.replicas)
    with Run.start(directory, hosts, *weights, *case.overrides, config="longtail.toml") as run:
        kept = keep_tokens(run)
        for step in range(LOOK_EVERY, STEPS_MAX, LOOK_EVERY):
            run.until_said(rf"^step {step}/", END_S)
            if _is_enough(case, run, Replay(run)):
                break
        status = run.status()
        run.signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    return Finished(case, run, Replay(run), read_tokens(kept), configfile.load(run.path / "config.toml", []), status)


def _is_enough(case: Case, run: Run, replay: Replay) -> bool:
    behind = any(freed.held != freed.newest for freed in replay.freed)
    is_divided = replay.num_divided > 0 or not case.divides
    return (
        len(replay.moves) >= MOVES_MIN and behind and is_divided and len(_of_kept_weights(run, replay)) >= CHECKED_MIN
    )


def _moved(run: Run, replay: Replay) -> dict[int, Move]:
    trained = dict(run.query("SELECT id, 1 FROM trajectories WHERE trained_at IS NOT NULL"))
    return {move.trajectory: move for move in replay.moves if move.trajectory in trained}


def _of_kept_weights(run: Run, replay: Replay) -> list[Move]:
    return [
        move for move in _moved(run, replay).values() if (_weights(run, move.started_under) / "config.json").is_file()
    ]


def _weights(run: Run, version: Version) -> Path:
    return run.path / "checkpoints" / f"step-{version.step}" / "hf" if version.step else QUICKSTART / "model"


def test_a_run_with_long_tails_moves_trajectories(finished: Finished) -> None:
    assert len(finished.replay.moves) >= MOVES_MIN, finished.run.output
    assert finished.run.until_said(rf"^repack +{finished.replay.core.state.repack.num_moves} moves from [1-9]")
    assert ledger_is_closed(finished.run.output)
    assert finished.run.num_dropped().keys() <= {"stopped"}
    # A fast machine may have no source that needs two destinations: tests/test_core_spread.py has them for sure.
    assert finished.case.divides or not finished.replay.num_divided


def test_the_status_says_how_much_moved_and_why_each_replica_is_a_source_or_not(finished: Finished) -> None:
    repack = finished.status["repack"]
    assert repack["checks"] > repack["emptied"] > 0
    assert repack["moves"] >= MOVES_MIN
    assert repack["moved_tokens"] > 0
    assert repack["reasons"].keys() <= {f"rollout-{index}" for index in range(finished.case.replicas)}
    assert all(repack["reasons"].values())
    assert repack["checked_at"] >= repack["moved_at"] > 0
    assert any(reason.startswith("source") for reason in repack["moved_reasons"].values())


def test_a_move_keeps_every_token_once(finished: Finished) -> None:
    assert finished.moved()
    for move in finished.moved().values():
        parts = finished.tokens.responses[move.trajectory]
        before = _ids(part for part in parts if part.attempt < move.attempt)
        after = [part for part in parts if part.attempt >= move.attempt]
        assert len(before) == move.num_flushed > 0
        assert after[0].start == move.num_flushed
        query = "SELECT num_tokens, attempt FROM trajectories WHERE id = ?"
        trained = (len(_ids(parts)), move.attempt)
        assert finished.run.query(query, move.trajectory) == [trained]


def _ids(parts: Iterable[Part]) -> list[int]:
    return [token for part in parts for token in part.tokens]


async def test_what_moved_is_what_one_replica_would_have_generated_alone(finished: Finished) -> None:
    """Each token is a function of seed, position and weights: a token lost, doubled or changed would change all after it."""
    same = [
        alone == finished.response(trajectory)
        for version, moves in finished.checked().items()
        for trajectory, alone in (await _generate(finished, version, moves)).items()
    ]
    assert same
    # A draw that falls on the edge of two tokens may go either way in a batch of another shape.
    assert same.count(False) <= len(same) // 10, same


async def _generate(finished: Finished, version: Version, moves: list[Move]) -> dict[int, list[int]]:
    """The moved trajectories of a version, each from its prompt by one engine."""
    engine = EmbeddedEngine(str(finished.weights(version)), num_requests_max=128, dtype="float32")
    ended: asyncio.Queue[int] = asyncio.Queue()
    await engine.start(ended.put_nowait)
    try:
        codec = TextCodec(finished.config.model.path)
        requests = Requests(engine, finished.config.rollout, codec.stop_ids)
        keys = {requests.sample(finished.prompt(m.trajectory), [], m.seed): m.trajectory for m in moves}
        async with asyncio.timeout(60):
            for _ in keys:
                await ended.get()
        return {keys[output.key]: output.tokens for output in engine.drain()}
    finally:
        await engine.stop()


def test_the_version_of_what_moves_never_changes(finished: Finished) -> None:
    versions = dict(finished.run.query("SELECT id, behavior_version FROM trajectories"))
    for move in finished.replay.moves:
        assert move.held == (move.started_under, move.started_under)
        assert versions[move.trajectory] == str(move.started_under)


def test_the_trainer_recomputes_the_log_probs_of_what_moved(finished: Finished) -> None:
    live = finished.run.query("SELECT max(value) FROM metrics WHERE name = 'mismatch/logprob_abs_diff_max'")
    assert 0 < live[0][0] < TOLERANCE
    assert finished.checked()
    for version, moved in finished.checked().items():
        assert _largest_difference(finished, version, moved) < TOLERANCE


def test_the_log_probs_would_tell_other_weights_and_a_lost_token(finished: Finished) -> None:
    moved = [move for moves in finished.checked().values() for move in moves]
    move = max(moved, key=lambda move: len(finished.response(move.trajectory)) - move.num_flushed)
    steps = {*finished.run.checkpoints(), 0}
    other = Version(min(steps - {move.started_under.step}, key=lambda step: abs(step - move.started_under.step)), 0)
    assert _largest_difference(finished, other, [move]) > TOLERANCE
    assert _largest_difference(finished, move.started_under, [move], without=move.num_flushed - 1) > TOLERANCE


def _largest_difference(finished: Finished, version: Version, moves: list[Move], without: int | None = None) -> float:
    """Between the rollouts' log-probs and those of the trainer's own program under `version`; `without` a token at a position."""
    return largest_difference(finished.weights(version), [_row(finished, move.trajectory, without) for move in moves])


def _row(finished: Finished, trajectory: int, without: int | None) -> packing.Tokens:
    response, logprobs = finished.response(trajectory), finished.logprobs(trajectory)
    if without is not None:
        del response[without], logprobs[without]
    return row(finished.prompt(trajectory), response, logprobs)


def test_an_emptied_replica_pulls_the_newest_version_at_once(finished: Finished) -> None:
    behind = [freed for freed in finished.replay.freed if freed.held != freed.newest]
    assert behind, finished.replay.freed
    for freed in behind:
        _check_pull(freed)


def _check_pull(freed: Freed) -> None:
    assert freed.pulled == freed.newest
    assert freed.then is not None
    assert freed.then.version == freed.newest
    assert type(freed.then).__name__ == "ReplicaRefreshed"


def test_a_continuous_fleet_drains_and_each_trajectory_keeps_its_version(tmp_path: Path) -> None:
    """The learning rate is 0: every version has the same values, so the trainer's log-probs must be those of all rollouts."""
    overrides = ("run.steps=10", "rollout.refresh_policy=continuous", "trainer.lr=0", "buffer.max_groups=18")
    with Run.start(tmp_path, hosts_file(tmp_path, replicas=2), *overrides, config="longtail.toml") as run:
        assert run.wait() == 0, run.output
    assert ledger_is_closed(run.output)
    replay = Replay(run)
    assert replay.num_split_fleet > 0
    assert all(move.held == (move.started_under, move.started_under) for move in replay.moves)
    for freed in replay.freed:
        assert freed.held == freed.newest or freed.pulled == freed.newest
    assert run.query("SELECT count(*) > 4 FROM events WHERE kind = 'ReplicaRefreshed'") == [(1,)]
    [(ratio,)] = run.query("SELECT max(value) FROM metrics WHERE name = 'importance_ratio/max'")
    assert abs(ratio - 1) < TOLERANCE
