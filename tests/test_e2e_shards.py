"""A real run whose trainer is on two hosts, which are two addresses of this machine: each has a relay with shards of its own."""

import signal
import tomllib
from pathlib import Path

import pytest
import torch
from e2e import SHM, SMALL, Run, ledger_is_closed

from laminar.workers.relay.digest import digest
from laminar.workers.trainer.model import load_model, local_parameters
from laminar.workers.trainer.publish import own_pieces, plan_manifest

pytestmark = pytest.mark.timeout(280)


def three_hosts(directory: Path) -> Path:
    path = directory / "three-hosts.txt"
    path.write_text("127.0.0.1 trainer ranks=1\n127.0.0.2 trainer ranks=1\n127.0.0.3 rollout replicas=1\n")
    return path


def digest_of_one_host(model: str) -> str:
    """Of the weights at this path, published by one rank that has all of them."""
    parameters = local_parameters(load_model(model))
    manifest = plan_manifest(parameters, torch.float32)
    whole = memoryview(bytearray(manifest.num_bytes))
    for piece in own_pieces(parameters, manifest, rank=0):
        whole[piece.start : piece.end] = memoryview(piece.local.contiguous().view(-1).numpy()).cast("B")
    return digest(whole)


def test_ranks_on_two_hosts_publish_and_go_on_after_killed_relays_and_a_killed_rank(tmp_path: Path) -> None:
    options = ("run.steps=5000", "trainer.restarts=2", "trainer.checkpoint_every=1", "relay.link_timeout_s=10")
    with Run.start(tmp_path, three_hosts(tmp_path), *SMALL, *options) as run:
        run.until_said(r"^step 2/")
        run.until(lambda: _held(run) >= 1)
        _kill_relays(run, {"relay-1": 1, "relay-2": 1})
        _kill_relays(run, {"relay-0": 1, "relay-1": 2, "relay-2": 2})
        assert run.num_dropped() == {}, "relays cost no trajectory"
        run.kill_worker("laminar.workers.trainer", "trainer-1")
        run.until_said(r"^trainer-[01] is started again")  # whichever node was heard of first
        step = run.status()["step"]
        run.until(lambda: _held(run) > step)
        run.signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    assert run.until_said(r"^alarm: worker-lost: relay-1 was lost: ended by signal 9")
    assert ledger_is_closed(run.output)
    assert run.num_dropped().keys() <= {"stopped"}, run.output
    rows = run.query("SELECT step, count(*), count(DISTINCT id) FROM trajectories WHERE dropped IS NULL GROUP BY step")
    assert rows == [(step, 16, 16) for step in range(1, len(rows) + 1)]
    model = tomllib.loads((run.path / "config.toml").read_text())["model"]["path"]
    assert run.query("SELECT digest FROM versions WHERE step = 0 AND branch = 0") == [(digest_of_one_host(model),)]
    assert [str(path) for path in SHM.glob(f"*{run.name}*")] == []


def _kill_relays(run: Run, victims: dict[str, int]) -> None:
    """All at once; by then each has been started again so often. What the replica pulls next comes through the new ones."""
    for victim in victims:
        run.kill_worker(victim)
    run.until(lambda: all(_num_starts(run, victim) >= wanted for victim, wanted in victims.items()))
    step = run.status()["step"]
    run.until(lambda: _held(run) > step)


def _num_starts(run: Run, name: str) -> int:
    return sum(line.startswith(f"{name} is started again") for line in run.lines)


def _held(run: Run) -> int:
    """Step of the version that the replica of the third host holds; -1 = none."""
    held = [replica["version"] for replica in run.status()["replicas"].values()]
    return min((int(version[1:].partition(".")[0]) if version else -1 for version in held), default=-1)
