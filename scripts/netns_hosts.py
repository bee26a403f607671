#!/usr/bin/env python
"""The quickstart's task on machines that are reached by ssh, made of namespaces: network, process ids, host names, /dev/shm.

    sudo .venv/bin/python scripts/netns_hosts.py [--steps 100] [--no-faults]

Needs root, iproute2, util-linux and openssh-server. The controller's machine has one replica, node1 the trainer, node2 another
replica. Printed: the run's own lines, which processes ran where, whether the reward rose, and that nothing is left anywhere. Then,
each in a run of its own: a replica that is killed, a machine whose cable is pulled for two seconds, for a while or for good, a
controller that is killed and followed by one at another address, a controller that nobody follows.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from e2e import SMALL, Run  # noqa: E402
from hosts_world import Machines, why_not  # noqa: E402

HOSTS = "localhost rollout\nnode1 trainer\nnode2 rollout\n"
LIMIT_S = 900.0
SSH_GIVES_UP_S = 40.0  # ServerAliveInterval x ServerAliveCountMax, and some
PATIENT = (
    "controller.heartbeat_timeout_s=90",
    "controller.orphan_timeout_s=90",
    "controller.heartbeat_s=1",
    "controller.start_timeout_s=600",
)
TROUBLES = ("LinkBroken", "WorkerDisconnected", "WorkerReturned", "WorkerLost", "ReplicaRefreshFailed")
FAULTS_OVERRIDES = ("controller.heartbeat_timeout_s=5", "controller.orphan_timeout_s=5", "controller.heartbeat_s=1")


def main() -> int:
    options = _parse()
    if reason := why_not():
        print(f"this machine cannot do it: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="laminar-runs-") as directory, Machines(2) as machines:
        if options.only_faults is None:
            learns(machines, Path(directory), options.steps)
        words = options.only_faults or [""]
        for fault in () if options.no_faults else FAULTS:
            if any(word in fault.__name__ for word in words):
                fault(machines, Path(directory))
    return 0


def start(machines: Machines, directory: Path, *overrides: str) -> Run:
    hosts = directory / "hosts.txt"
    hosts.write_text(HOSTS)
    return Run.start(directory, hosts, *overrides, f"controller.ssh={machines.client}", wrap=machines.wrap)


def learns(machines: Machines, directory: Path, steps: int) -> None:
    """The quickstart as it is, but for its hosts."""
    with start(machines, directory, f"run.steps={steps}") as run:
        run.until_said(r"^step 1/", LIMIT_S)
        for number in range(3):
            print(f"{['controller', *machines.names][number]}: {', '.join(running(machines, number))}", flush=True)
        code = run.wait(LIMIT_S)
    machines.await_nothing_left()
    print(run.output)
    found = re.search(r"^reward +([\d.]+) → ([\d.]+)", run.output, re.MULTILINE)
    assert code == 0, code
    assert found, "no line `reward`"
    assert float(found[2]) > float(found[1]), "the reward did not rise"
    print("nothing is left on node1 and node2\n", flush=True)


def running(machines: Machines, number: int) -> list[str]:
    """Names of the run's processes on a machine."""
    lines = [process.cmdline() for process in machines.processes(number)]
    named = [
        line[line.index("--name") + 1] for line in lines if "--name" in line and "laminar.workers" in " ".join(line)
    ]
    return sorted(dict.fromkeys(named))


# ---- faults ------------------------------------------------------------------------------------------------


def replica_killed(machines: Machines, directory: Path) -> None:
    """Started again on its machine."""
    with start(machines, directory, *SMALL, "run.steps=5000") as run:
        run.until_said(r"^step 2/")
        (victim,) = [p for p in machines.processes(2) if "laminar.workers.rollout" in p.cmdline()]
        victim.kill()
        began = time.monotonic()
        run.until_said(r"^rollout-\d is started again")
        print(f"a replica on node2 was killed; started again there after {time.monotonic() - began:.1f} s")
        stop(run)
    machines.await_nothing_left()


def cable_pulled(machines: Machines, directory: Path) -> None:
    """The run goes on without the machine, and its end does not wait for it; what runs there ends by itself."""
    with start(
        machines, directory, *SMALL, *FAULTS_OVERRIDES, "run.steps=5000", "rollout.restarts=0", "relay.restarts=0"
    ) as run:
        run.until_said(r"^step 2/")
        machines.cable(2, "down")
        began = time.monotonic()
        lost = run.until_said(r"^alarm: worker-lost: (rollout-\d) was lost: .*")
        print(f"node2's cable was pulled; {lost[1]} lost after {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        stop(run)
        print(f"the run ended {time.monotonic() - began:.1f} s after Ctrl-C")
        machines.await_nothing_left(120.0)
        print(f"nothing was left on node2 {time.monotonic() - began:.1f} s after Ctrl-C, its cable still out")
        machines.cable(2, "up")


def cable_pulled_for_a_while(machines: Machines, directory: Path) -> None:
    """Longer than ssh stands, shorter than workers are waited for: the same processes go on."""
    with start(machines, directory, *SMALL, *PATIENT, "relay.link_timeout_s=90", "run.steps=5000") as run:
        run.until_said(r"^step 2/")
        before = pids(machines)
        machines.cable(2, "down")
        time.sleep(SSH_GIVES_UP_S)
        machines.cable(2, "up")
        began, num_steps = time.monotonic(), num_steps_of(run)
        run.until(lambda: num_steps_of(run) > num_steps + 1, LIMIT_S)
        same = "the same processes" if before <= pids(machines) else "OTHER PROCESSES"
        print(
            f"node2's cable was out for {SSH_GIVES_UP_S:g} s; {same} trained on within {time.monotonic() - began:.1f} s"
        )
        stop(run)
    machines.await_nothing_left()
    assert same == "the same processes", run.output
    assert "alarm: worker-lost" not in run.output, run.output


def cable_pulled_for_two_seconds(machines: Machines, directory: Path) -> None:
    """Shorter than `controller.heartbeat_timeout_s`, longer than `relay.link_timeout_s`: only the relays notice."""
    with start(machines, directory, *SMALL, "run.steps=5000") as run:
        run.until_said(r"^step 2/")
        before = pids(machines)
        machines.cable(2, "down")
        time.sleep(2.0)
        machines.cable(2, "up")
        began, num_steps = time.monotonic(), num_steps_of(run)
        run.until(lambda: num_steps_of(run) > num_steps + 3, LIMIT_S)
        same = "the same processes" if before <= pids(machines) else "OTHER PROCESSES"
        print(f"node2's cable was out for 2 s; {same} trained on within {time.monotonic() - began:.1f} s")
        counts = run.query("SELECT kind, count(*) FROM events GROUP BY kind")
        seen = {kind: num for kind, num in counts if kind in TROUBLES}
        stop(run)
    machines.await_nothing_left()
    trained = "SELECT prompt FROM trajectories WHERE trained_at IS NOT NULL GROUP BY prompt"
    twice = run.query(f"{trained} HAVING count(DISTINCT group_id) > 1")
    told = ", ".join(f"{num} {kind}" for kind, num in seen.items()) or "nothing"
    print(f"of it the log tells: {told}; dropped: {run.num_dropped()}; prompts trained twice: {len(twice)}")
    assert same == "the same processes", run.output
    assert seen.keys() <= {"LinkBroken"}
    assert run.num_dropped().keys() <= {"stopped"}
    assert not twice


def controller_followed(machines: Machines, directory: Path) -> None:
    """Cut off it is not replaced; dead it is, from another address."""
    with start(machines, directory, *SMALL, *PATIENT, "run.steps=5000") as run:
        run.until_said(r"^step 2/")
        before = pids(machines)
        machines.cable(0, "down")
        with Run.resume(run.path, wrap=machines.wrap_at(2, "elsewhere")) as refused:
            assert refused.wait() == 2, refused.output
        print(f"the controller was cut off; another was refused: {refused.lines[-1]}")
        run.kill_worker("laminar.controller")
        run.wait()
        began = time.monotonic()
        with Run.resume(run.path, wrap=machines.wrap_at(2, "elsewhere")) as second:
            second.until_said(r"^step ", LIMIT_S)
            same = "the same processes" if before <= pids(machines) else "OTHER PROCESSES"
            took_s = time.monotonic() - began
            print(
                f"it was killed; one at {machines.address(2)} had {same} finish a step {took_s:.1f} s after its start"
            )
            stop(second)
        assert same == "the same processes", second.output
        machines.await_nothing_left()
        machines.cable(0, "up")
    machines.await_nothing_left()


def num_steps_of(run: Run) -> int:
    return sum(line.startswith("step ") for line in run.lines)


def pids(machines: Machines) -> set[int]:
    """Of the run's workers on node1 and node2."""
    found = [process for number in (1, 2) for process in machines.processes(number)]
    return {process.pid for process in found if "--name" in process.cmdline()}


def controller_killed(machines: Machines, directory: Path) -> None:
    """Workers notice it, wait for `controller.orphan_timeout_s`, and end."""
    with start(machines, directory, *SMALL, *FAULTS_OVERRIDES, "run.steps=5000") as run:
        run.until_said(r"^step 2/")
        controller = run.worker("laminar.controller")
        assert controller is not None
        controller.kill()
        began = time.monotonic()
        machines.await_nothing_left(120.0)
        print(f"the controller was killed; nothing was left on node1 and node2 after {time.monotonic() - began:.1f} s")
        run.until(lambda: not run.leftovers(), 60.0)


def stop(run: Run) -> None:
    controller = run.worker("laminar.controller")
    assert controller is not None
    os.kill(controller.pid, signal.SIGINT)
    code = run.wait(120.0)
    assert code == 0, run.output


FAULTS: tuple[Callable[[Machines, Path], None], ...] = (
    replica_killed,
    cable_pulled_for_two_seconds,
    cable_pulled_for_a_while,
    cable_pulled,
    controller_followed,
    controller_killed,
)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument(
        "--only-faults", nargs="*", metavar="WORD", help="those whose name has one of the words (default: all)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
