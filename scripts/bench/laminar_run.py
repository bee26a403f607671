"""One run of Laminar as a user starts it, watched from outside: its curve, and the CPU time of each of its processes.

The clock starts when the first replica holds its weights (end of the first ``pull`` span in run.db): from then on groups are
assigned. It is the counterpart of "the first step's generation starts" in a synchronous loop.
"""

import contextlib
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from scripts.bench.common import Curve

POLL_S = 0.5
START_SECONDS_MAX = 300.0
STOP_SECONDS_MAX = 90.0  # a stop writes a checkpoint and asks every process first
TIMINGS = ("timing/fetch_s", "timing/update_s", "perf/trainer_idle_ratio", "perf/rollout_idle_ratio",
           "perf/publication_stall_s", "perf/rollout_wait_s", "off_policy/s_train/mean")  # fmt: skip


@dataclass
class Watched:
    """What came out of one run."""

    curve: Curve
    start_up_s: float
    """From launch until the first replica held its weights."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds by role from then on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Medians over steps."""


class RunFailed(Exception):
    """The run did not start, or ended before its time; says where its log is."""


def run(arguments: list[str], directory: Path, name: str, *, target: float, seconds_max: float) -> Watched:
    """Start the controller with `arguments`, stop it at the target or after `seconds_max` of training. Raises RunFailed."""
    path, log = directory / name, directory / f"{name}.log"
    launched = time.time()
    command = [sys.executable, "-m", "laminar.controller", *arguments, f"run.dir={directory}", f"run.name={name}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    samples: list[tuple[float, dict[int, tuple[str, float]]]] = []
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            samples.append((time.time(), cpu_seconds(process.pid)))
            started = started_at(path / "run.db")
            if _enough(path, started, launched, target, seconds_max):
                break
    finally:
        _stop(process)
    started = started_at(path / "run.db")
    if started is None:
        raise RunFailed(f"{name} never trained; its last output is in {log}")
    curve, metrics = read_metrics(path / "metrics.jsonl", started, target)
    ended = started + (curve.times_s[-1] if curve.times_s else 0.0)
    return Watched(curve, started - launched, _by_role(samples, started, ended), metrics)


def _enough(path: Path, started: float | None, launched: float, target: float, seconds_max: float) -> bool:
    if started is None:
        return time.time() - launched > START_SECONDS_MAX
    curve, _ = read_metrics(path / "metrics.jsonl", started, target)
    return curve.reached_step is not None or time.time() - started > seconds_max


def started_at(database: Path) -> float | None:
    """Wall clock at which the first replica held weights; None before that."""
    if not database.is_file():
        return None
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5.0)) as connection:
        try:
            return connection.execute("SELECT min(end) FROM spans WHERE kind = 'pull'").fetchone()[0]  # type: ignore[no-any-return]
        except sqlite3.OperationalError:  # the tables are just being made
            return None


def read_metrics(path: Path, started: float, target: float) -> tuple[Curve, dict[str, float]]:
    """The curve and the medians of `TIMINGS`; a line that is half written counts as not yet there."""
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    curve = Curve(target)
    for line in steps:
        curve.add(line["at"] - started, line["reward/mean"])
    return curve, {
        name: statistics.median(line[name] for line in steps if name in line)
        for name in TIMINGS
        if any(name in line for line in steps)
    }


# ---- processor time ----------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> dict[int, tuple[str, float]]:
    """(role, CPU seconds so far) of the process and its descendants, by process id."""
    found: dict[int, tuple[str, float]] = {}
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid] = (role(process.cmdline(), pid == process.pid), times.user + times.system)
    return found


def role(command: list[str], is_root: bool) -> str:
    """What a process of a run does, from its command line."""
    line = " ".join(command)
    if is_root:
        return "controller"
    for part, name in (("torch.distributed", "torchrun"), ("torchrun", "torchrun"), ("workers.trainer", "trainer ranks"),
                       ("workers.rollout", "rollouts"), ("workers.relay", "relay"), ("reward", "rewards")):  # fmt: skip
        if part in line:
            return name
    return "other"


def _by_role(samples: list[tuple[float, dict[int, tuple[str, float]]]], began: float, ended: float) -> dict[str, float]:
    """CPU seconds spent between the samples nearest to both moments."""
    if not samples:
        return {}
    first = min(samples, key=lambda sample: abs(sample[0] - began))[1]
    last = min(samples, key=lambda sample: abs(sample[0] - ended))[1]
    totals: dict[str, float] = {}
    for pid, (name, seconds) in last.items():
        totals[name] = totals.get(name, 0.0) + seconds - first.get(pid, (name, 0.0))[1]
    return totals


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; a second signal is immediate; the workers end by themselves if even that fails."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.kill(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS_MAX if number == signal.SIGINT else 10.0)
