"""What the rollouts notice of a trainer's death: `python scripts/trainer_outage.py [--kills 3] [--seconds 20]`.

A run of the quickstart's task on this machine, trainer and controller on core 0, the rollout alone on core 1. The trainer's rank is
killed in the middle of a train step, `--kills` times. Tokens per second are those that the controller received: in the seconds
before each kill, from the kill until the first step after it, and in the seconds after that. Exit code 1 if the median of the
outages is more than 10 % below that of the time before. Needs two cores, `taskset`, and nothing else on the machine.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from e2e import Run

OVERRIDES = (
    "run.steps=100000",
    "task.eval_prompts=8",
    "buffer.max_groups=100000",  # rollouts are never held back
    "trainer.mini_batches=16",  # the trainer is the slower one: when a whole batch waits, it is in a step
    "trainer.checkpoint_every=10",
    "trainer.restarts=100",
)
BATCH_GROUPS = 32  # of the quickstart
WARM_UP_STEPS = 10
STEPS_SEEN = 5  # whose median is the length of a step
SHARE_MIN = 0.9
LIMIT_S = 600.0


class Sample(NamedTuple):
    """What the controller's status says."""

    at: float
    num_tokens: int
    """Received so far."""
    step: int
    num_groups: int
    """Complete ones that wait for the trainer."""


class Outage(NamedTuple):
    """Tokens per second around one death, and what it cost."""

    before: float
    during: float
    after: float
    seconds: float
    """From the kill until a step was trained again."""
    steps_redone: int


def sample(run: Run) -> Sample:
    """Now."""
    status = run.status()
    return Sample(time.monotonic(), status["ledger"]["tokens"]["total"], status["step"], status["buffer_groups"])


def rate(first: Sample, last: Sample) -> float:
    """Tokens per second."""
    return (last.num_tokens - first.num_tokens) / (last.at - first.at)


def pinned(directory: Path, core: int) -> Path:
    """An interpreter that runs on one core."""
    path = directory / f"python-on-{core}"
    path.write_text(f'#!/bin/sh\nexec taskset -c {core} {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def hosts_file(directory: Path) -> Path:
    """Trainer (and relay) on core 0, the rollout on core 1."""
    path = directory / "hosts.txt"
    path.write_text(
        f"localhost trainer python={pinned(directory, 0)}\n"
        f"localhost rollout engine=embedded python={pinned(directory, 1)}\n"
    )
    return path


def step_seconds(run: Run) -> float:
    """How long the last steps took."""
    found = run.query("SELECT value FROM metrics WHERE name = 'timing/step_s' ORDER BY step DESC LIMIT ?", STEPS_SEEN)
    return statistics.median(value for (value,) in found)


def num_launches(run: Run) -> int:
    """Of the trainer, that came up."""
    ((count,),) = run.query("SELECT count(*) FROM events WHERE kind = 'TrainerRankReady'")
    return int(count)


def has_begun(run: Run, after: int) -> bool:
    """Whether the step after the one that has just ended is under way."""
    now = sample(run)
    return now.step > after and now.num_groups >= BATCH_GROUPS


def kill_in_mid_step(run: Run) -> Sample:
    """Half a step after one has ended; what the controller had then."""
    run.until(partial(has_begun, run, sample(run).step), LIMIT_S)
    time.sleep(step_seconds(run) / 2)
    run.kill_worker("laminar.workers.trainer", "trainer-0")
    return sample(run)


def one_outage(run: Run, seconds: float) -> Outage:
    """Watch, kill, wait for the first step after it, watch again."""
    start, launches = sample(run), num_launches(run)
    time.sleep(seconds)
    killed = kill_in_mid_step(run)
    run.until(lambda: num_launches(run) > launches, LIMIT_S)
    restored = sample(run).step
    run.until(lambda: sample(run).step > restored, LIMIT_S)
    back = sample(run)
    time.sleep(seconds)
    return Outage(
        rate(start, killed), rate(killed, back), rate(back, sample(run)), back.at - killed.at, killed.step - restored
    )


def measure(kills: int, seconds: float) -> list[Outage]:
    """Print a line for each death."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        wrap = ("taskset", "-c", "0")
        with Run.start(directory, hosts_file(directory), *OVERRIDES, wrap=wrap) as run:
            run.until_said(rf"^step {WARM_UP_STEPS}/", LIMIT_S)
            outages = []
            for _ in range(kills):
                outages.append(one_outage(run, seconds))
                print(tell(outages[-1]), flush=True)
            run.signal(signal.SIGINT)
            run.wait(LIMIT_S)
            return outages


def tell(outage: Outage) -> str:
    """One line."""
    return (
        f"before {outage.before:,.0f} tokens/s, during {outage.during:,.0f} ({outage.during / outage.before:.2f} of it), "
        f"after {outage.after:,.0f}; away for {outage.seconds:.1f} s, {outage.steps_redone} steps redone"
    )


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="watched before and after each kill")
    options = parser.parse_args()
    shares = [outage.during / outage.before for outage in measure(options.kills, options.seconds)]
    share = statistics.median(shares)
    print(f"median of {len(shares)}: {share:.3f} of the throughput before (at least {SHARE_MIN} is wanted)")
    return 0 if share >= SHARE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
