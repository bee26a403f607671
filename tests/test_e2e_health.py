"""Replicas that stop generating in whole runs: a hung engine whose worker still answers, and a process that stands still."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from e2e import SMALL, Run, hosts_file, ledger_is_closed

pytestmark = pytest.mark.timeout(180)

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
