"""How long recovery takes: `python scripts/recovery_times.py [--parts failover,restart,relays] [--events 65536]`. Prints a table.

* `failover`: a replica says that it fails, with all that it generates; until the last of it goes on elsewhere. Goal: 2 s.
* `restart`: SIGKILL to a controller with 8,192 trajectories in flight, after `--events` events of one train step, and
  `--resume`; from the start of the new process to the first group that it starts. Goal: 5 s. The workers live on and dial again.
* `relays`: relays of a chain are killed, stopped, cut off; until it is whole again (`scripts/netns_relays.py --parts repairs`,
  as root). Goal: 1 s.

Failover and restart: a real controller on one core, simulated workers (`scripts/bench/fleet.py`) on another.
"""

import argparse
import asyncio
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from laminar import wire  # noqa: E402 - the repository need not be installed
from scripts.bench.controller_run import GROUP_SIZE, ControllerRun  # noqa: E402
from scripts.bench.fleet import Fleet, Load, Replica  # noqa: E402

PARTS = ("failover", "restart", "relays")
WAIT_S = 120.0
LOOK_S = 0.002
NO_STEPS = ("trainer.batch_prompts=100000", "buffer.max_groups=200000")
RESTART = Load(replicas=256, trajectories=32, reports_per_s=16.0, mean_tokens=8000)
"""8,192 in flight. Four times as many reports as by default, so that a long step is soon over."""
FAILOVER = Load(replicas=32, trajectories=128)


def main() -> int:
    """Measure and print Markdown."""
    options = parse()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # links tell of every try
    print("| what | seconds | goal | details |\n|---|---|---|---|", flush=True)
    if "failover" in options.parts:
        for _ in range(options.repeat):
            print(asyncio.run(with_controller(FAILOVER, (), failover)), flush=True)
    if "restart" in options.parts:
        for num in (2048, options.events):
            print(asyncio.run(with_controller(RESTART, NO_STEPS, partial(restart, num_events=num))), flush=True)
    return relays(options.repeat) if "relays" in options.parts else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)} (default all)")
    parser.add_argument("--events", type=int, default=65_536, help="of the step before the crash (default 65536)")
    parser.add_argument("--repeat", type=int, default=3, help="failovers, and repairs of each kind (default 3)")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}: some of {', '.join(PARTS)}")
    return options


async def with_controller(
    load: Load, overrides: tuple[str, ...], work: Callable[[ControllerRun, Fleet], Awaitable[str]]
) -> str:
    """A row of the table: what `work` found with all replicas full."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="recovery-times-") as directory:
        run = ControllerRun(Path(directory), load, cores[0], overrides)
        os.sched_setaffinity(0, {cores[-1]})
        try:
            with run as controller:
                os.environ[wire.RENDEZVOUS_VARIABLE] = str(controller.path / "url")
                fleet = Fleet(controller.url, controller.token, load)
                await fleet.start()
                try:
                    full = int(0.9 * load.trajectories)
                    await until(lambda: all(replica.num_generating >= full for replica in fleet.replicas), fleet)
                    return await work(controller, fleet)
                finally:
                    await fleet.close()
        finally:
            os.sched_setaffinity(0, set(cores))


async def until(condition: Callable[[], bool], fleet: Fleet) -> None:
    """RuntimeError if it does not come true in time."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"what was waited for did not happen within {WAIT_S:g} s")
        fleet.check()
        await asyncio.sleep(LOOK_S)


async def failover(controller: ControllerRun, fleet: Fleet) -> str:
    """A replica fails after ten seconds of work."""
    await until(lambda: fleet.count.reports > 40 * fleet.load.replicas, fleet)
    victim, others = fleet.replicas[0], fleet.replicas[1:]
    lost = set(victim.generating)
    victim.failed = True
    began = time.monotonic()
    victim.link.send(wire.WorkerFailed(reason="it is told to fail"))
    await until(lambda: lost <= {t for replica in others for t in replica.generating}, fleet)
    last = max(_began(replica, lost) for replica in others)
    return f"| failover of a replica's trajectories | {last - began:.2f} | 2 | {len(lost)} go on from their prefix elsewhere |"


def _began(replica: Replica, trajectories: set[int]) -> float:
    return max((at for trajectory, at in replica.began.items() if trajectory in trajectories), default=0.0)


async def restart(controller: ControllerRun, fleet: Fleet, num_events: int) -> str:
    """The controller dies and another takes its place."""
    await until(lambda: fleet.count.reports >= num_events, fleet)
    in_flight = sum(replica.num_generating for replica in fleet.replicas)
    controller.crash()
    for replica in fleet.replicas:
        replica.complete_oldest(GROUP_SIZE)  # so that there is something to dispatch as soon as anybody is heard
    began = time.monotonic()
    await asyncio.to_thread(controller.resume)
    listens_s, cpu_s = time.monotonic() - began, controller.cpu_s()
    await until(lambda: any(replica.started_at > began for replica in fleet.replicas), fleet)
    first = min(replica.started_at for replica in fleet.replicas if replica.started_at > began)
    replayed = re.findall(r"(\d+) events replayed", controller.output())
    return (
        f"| controller restart to first dispatch | {first - began:.2f} | 5 | {in_flight:,} in flight, {fleet.count.reports:,} "
        f"reports since the step began, {replayed[-1] if replayed else '?'} events after the last snapshot; it listened after "
        f"{listens_s:.2f} s, {cpu_s:.2f} s of them on its processor |"
    )


def relays(repeat: int) -> int:
    """Print what the script about relays says of repairs; its exit status."""
    if os.geteuid() != 0:
        print("| relay rewire | – | 1 | needs root, for network namespaces |")
        return 0
    command = [sys.executable, str(ROOT / "scripts/netns_relays.py"), "--parts", "repairs", "--repairs", str(repeat)]
    print(f"\nrelay rewire, by {' '.join(command[1:])}:\n", flush=True)
    return subprocess.run(command, check=False, timeout=600).returncode


if __name__ == "__main__":
    sys.exit(main())
