"""A real run on two other machines by ssh: namespaces with their own network, process ids, host name and /dev/shm."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e import SMALL, Run, ledger_is_closed
from e2e_replay import events_of
from hosts_world import Machines, why_not

from laminar.core import events

pytestmark = pytest.mark.timeout(300)

PATIENT = ("controller.orphan_timeout_s=120", "controller.heartbeat_timeout_s=60")
JOINED = "SELECT count(*) FROM events WHERE kind = 'ReplicaJoined'"


@pytest.fixture
def machines() -> Iterator[Machines]:
    if reason := why_not():
        pytest.skip(reason)
    with Machines(2) as machines:
        yield machines


def start(machines: Machines, directory: Path, hosts: str, *overrides: str) -> Run:
    file = directory / "hosts.txt"
    file.write_text(hosts)
    return Run.start(directory, file, *SMALL, *overrides, f"controller.ssh={machines.client}", wrap=machines.wrap)


def test_a_run_on_other_machines_mends_itself_survives_its_controller_and_leaves_nothing_there(
    machines: Machines, tmp_path: Path
) -> None:
    hosts = "node1 trainer\nnode2 trainer\nnode2 rollout\n"
    with start(machines, tmp_path, hosts, "run.steps=5000", "relay.link_timeout_s=10", *PATIENT) as run:
        run.until_said(r"^step 2/")
        assert run.until_said(r"processes, controller at http://10\.78\.0\.1:")
        assert {"relay-0", "trainer-0"} <= named(machines, 1)
        assert {"relay-1", "rollout-0"} <= named(machines, 2)
        run.kill_worker("laminar.workers.rollout")
        run.until_said(r"^rollout-0 is started again")
        run.until(lambda: steps(run) and steps(run)[-1] > steps_when_told(run))
        run.until(lambda: run.query(JOINED) == [(2,)])
        workers = pids(machines)
        controller(run).kill()
        run.wait()
        assert pids(machines) == workers, "workers live on without a controller"
        with Run.resume(run.path, wrap=machines.wrap_at(2, "elsewhere")) as second:
            second.until_said(r"processes, controller at http://10\.78\.0\.3:")
            second.until(lambda: len(steps(second)) >= 2)
            assert pids(machines) == workers, "the other controller took them over"
            controller(second).send_signal(signal.SIGINT)
            assert second.wait() == 0, second.output
        machines.await_nothing_left()
    assert run.until_said(r"^alarm: worker-lost: rollout-0 was lost: ended by signal 9")
    assert "alarm: worker-lost" not in second.output
    assert ledger_is_closed(second.output)
    assert run.num_dropped().keys() <= {"stopped"}, second.output
    assert run.checkpoints()
    check_nothing_was_done_twice(run)


def check_nothing_was_done_twice(run: Run) -> None:
    done = [(event.step, event.attempt) for event in events_of(run) if isinstance(event, events.StepFinished)]
    assert done == [(step, 1) for step in range(1, len(done) + 1)]
    rows = "SELECT count(*), count(DISTINCT id) FROM trajectories WHERE trained_at IS NOT NULL GROUP BY step"
    assert set(run.query(rows)) == {(16, 16)}
    twice = "SELECT prompt FROM trajectories GROUP BY prompt HAVING count(DISTINCT group_id) > 1"
    assert run.query(twice) == []


def controller(run: Run) -> psutil.Process:
    found = run.worker("laminar.controller")
    assert found is not None
    return found


def pids(machines: Machines) -> dict[str, set[int]]:
    """Worker -> its processes, on all machines."""
    found: dict[str, set[int]] = {}
    for number in range(1, len(machines.names) + 1):
        for process in machines.processes(number):
            words = process.cmdline()
            if "--name" in words:
                found.setdefault(words[words.index("--name") + 1], set()).add(process.pid)
    return found


def named(machines: Machines, number: int) -> set[str]:
    """Names of a run's processes on a machine."""
    lines = [process.cmdline() for process in machines.processes(number) if "--name" in process.cmdline()]
    return {line[line.index("--name") + 1] for line in lines}


def steps(run: Run) -> list[int]:
    return [int(match[1]) for match in map(re.compile(r"^step (\d+)/").match, run.lines) if match]


def steps_when_told(run: Run) -> int:
    """The last step before the worker was started again."""
    at = next(number for number, line in enumerate(run.lines) if line.startswith("rollout-0 is started again"))
    return max((int(match[1]) for match in map(re.compile(r"^step (\d+)/").match, run.lines[:at]) if match), default=0)


def test_a_machine_that_cannot_take_part_ends_the_start_with_its_own_words(machines: Machines, tmp_path: Path) -> None:
    hosts = "node9 rollout\nnode1 trainer\nnode1.cluster rollout\nnode2 rollout python=/opt/none\n"
    with start(machines, tmp_path, hosts) as run:
        assert run.wait() == 2, run.output
    assert "3 of 4 other hosts cannot take part; nothing was started:" in run.output
    assert "node1.cluster: it is the machine that the hosts file calls node1 too: call it the same" in run.output
    assert re.search(r"node9: ssh failed \(.*[Cc]ould not resolve hostname node9", run.output)
    assert re.search(r"node2: it has no Python /opt/none \(.*/opt/none", run.output)
    assert not run.path.exists()
    machines.await_nothing_left()
