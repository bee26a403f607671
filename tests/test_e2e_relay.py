"""A real run whose relays are killed under way."""

import signal
from pathlib import Path

import pytest
from e2e import SHM, SMALL, Run, ledger_is_closed

pytestmark = pytest.mark.timeout(240)


def two_hosts(directory: Path) -> Path:
    """This machine under two addresses, each with a relay of its own."""
    path = directory / "two-hosts.txt"
    path.write_text("localhost trainer ranks=1\nlocalhost rollout replicas=1\n127.0.0.2 rollout replicas=1\n")
    return path


def test_weights_reach_replicas_of_another_host_also_after_its_relay_and_then_all_were_killed(tmp_path: Path) -> None:
    # a starved process may be silent for longer than the default allows, and relays are lost for that
    with Run.start(tmp_path, two_hosts(tmp_path), *SMALL, "run.steps=5000", "relay.link_timeout_s=10") as run:
        run.until_said(r"^step 2/")
        run.until(lambda: _oldest(run) >= 1)
        for victims in ({"relay-1": 1}, {"relay-0": 1, "relay-1": 2}):  # and how often each was started again by then
            for victim in victims:
                run.kill_worker(victim)
            run.until(
                lambda victims=victims: all(_num_starts(run, victim) >= wanted for victim, wanted in victims.items())
            )
            step = run.status()["step"]
            run.until(lambda step=step: _oldest(run) > step)  # it can only have come from the new relays
        run.signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    assert run.until_said(r"^alarm: worker-lost: relay-0 was lost: ended by signal 9")
    assert ledger_is_closed(run.output)
    assert run.num_dropped().keys() <= {"stopped"}, run.output
    rows = run.query("SELECT step, count(*), count(DISTINCT id) FROM trajectories WHERE dropped IS NULL GROUP BY step")
    assert rows == [(step, 16, 16) for step in range(1, len(rows) + 1)]
    assert [str(path) for path in SHM.glob(f"*{run.name}*")] == []


def _num_starts(run: Run, name: str) -> int:
    return sum(line.startswith(f"{name} is started again") for line in run.lines)


def _oldest(run: Run) -> int:
    """Step of the oldest version that a replica holds; -1 while one holds none."""
    held = [replica["version"] for replica in run.status()["replicas"].values()]
    return min((int(version[1:]) if version else -1 for version in held), default=-1)
