"""What all tests share, and how `scripts/test` divides them between two processes.

    one      whole runs, one after another ───────────────►┐
    other    tests without processes, file after file ────►┴─ relays and other processes, file after file

Whole runs keep both cores busy, so no two of them run at a time, and what waits for processes comes last, when they are over.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WHOLE_RUNS = "test_e2e_"
PROCESSES = (
    "test_application", "test_launch", "test_relay_", "test_remote_", "test_rollout_worker", "test_trainer_process",
)  # fmt: skip


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    """User code by reference appends its directory to sys.path; the next test must not find it there."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first; in the reverse of the alphabet, which has those in front that would disturb others later: a run on vLLM
    servers (tests of one server are the last of the others), and sweeps of /dev/shm (every relay sweeps it)."""
    runs = [item for item in items if item.path.name.startswith(WHOLE_RUNS)]
    files = sorted({item.path for item in runs}, reverse=True)
    runs.sort(key=lambda item: files.index(item.path))
    last = [item for item in items if item.path.name.startswith(PROCESSES)]
    others = [item for item in items if not item.path.name.startswith((WHOLE_RUNS, *PROCESSES))]
    items[:] = [*runs, *others, *last]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay whole, and whole runs together."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0]).name
            return WHOLE_RUNS if file.startswith(WHOLE_RUNS) else file

    return Files(config, log)
