"""A real run on two other machines by ssh: namespaces with their own network, process ids, host name and /dev/shm."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e import SMALL, Run, ledger_is_closed
from hosts_world import Machines, why_not

pytestmark = pytest.mark.timeout(300)


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


def test_a_run_on_other_machines_trains_mends_itself_and_leaves_nothing_there(
    machines: Machines, tmp_path: Path
) -> None:
    hosts = "node1 trainer\nnode2 rollout\n"
    with start(machines, tmp_path, hosts, "run.steps=5000", "relay.link_timeout_s=10") as run:
        run.until_said(r"^step 2/")
        assert run.until_said(r"processes, controller at http://10\.78\.0\.1:")
        assert {"relay-0", "trainer-0"} <= named(machines, 1)
        assert {"relay-1", "rollout-0"} <= named(machines, 2)
        run.kill_worker("laminar.workers.rollout")
        run.until_said(r"^rollout-0 is started again")
        run.until(lambda: steps(run) and steps(run)[-1] > steps_when_told(run))
        controller = run.worker("laminar.controller")
        assert controller is not None
        controller.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    machines.await_nothing_left()
    assert run.until_said(r"^alarm: worker-lost: rollout-0 was lost: ended by signal 9")
    assert ledger_is_closed(run.output)
    assert run.num_dropped().keys() <= {"stopped"}, run.output
    assert run.checkpoints()


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
    with start(machines, tmp_path, "node1 trainer\nnode9 rollout\nnode2 rollout python=/opt/none\n") as run:
        assert run.wait() == 2, run.output
    assert "2 of 3 other hosts cannot take part; nothing was started:" in run.output
    assert re.search(r"node9: ssh failed \(.*[Cc]ould not resolve hostname node9", run.output)
    assert re.search(r"node2: it has no Python /opt/none \(.*/opt/none", run.output)
    assert not run.path.exists()
    machines.await_nothing_left()
