"""What the local relay costs, in multiples of one memcpy of the same bytes in the same run.

    python scripts/bench_relay_local.py [--mib 512] [--rounds 7]

One daemon process, one publisher and one reader. Times are medians over the rounds; every round takes its own memcpy
(warm private memory to warm private memory), so that a noisy neighbour hits both sides of a ratio. `first publish`
includes allocating and prefaulting the slots and happens once in a run.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from laminar.ids import Version
from laminar.workers.relay import paths
from laminar.workers.relay.client import RelayClient
from laminar.workers.relay.manifest import Manifest

TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of publishing and leasing weights on one host.")
    parser.add_argument("--mib", type=int, default=512, help="size of a version")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    run_id = f"bench-{os.getpid()}"
    daemon = subprocess.Popen([sys.executable, "-m", "laminar.workers.relay", "--run-id", run_id])
    try:
        with RelayClient(paths.shm_directory(run_id), TIMEOUT_S) as client:
            report(measure(client, arguments.mib << 20, arguments.rounds), arguments.mib)
    finally:
        daemon.terminate()
        daemon.wait(TIMEOUT_S)


def measure(client: RelayClient, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per phase and round; round 0 is the cold one."""
    manifest = Manifest.plan([("weights", "uint8", (num_bytes,), 1)])
    source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    target = np.zeros_like(source)
    client.connect()
    seconds: dict[str, list[float]] = {}
    for step in range(rounds + 1):
        for phase, duration in one_round(client, manifest, Version(step, 0), source, target).items():
            seconds.setdefault(phase, []).append(duration)
    return seconds


def one_round(
    client: RelayClient, manifest: Manifest, version: Version, source: np.ndarray, target: np.ndarray
) -> dict[str, float]:
    """Publish `source`, read it back into `target`; seconds per phase."""
    seconds = {"memcpy": clocked(lambda: np.copyto(target, source))}

    def publish() -> None:
        buffer = client.begin(version, manifest, 0, 1)
        assert buffer is not None
        np.copyto(np.frombuffer(buffer, np.uint8), source)
        client.commit(version)

    seconds["publish (begin, copy, commit)"] = clocked(publish)
    seconds["commit until leasable (digest)"] = clocked(lambda: client.lease(version, wait_s=TIMEOUT_S).release())
    started = time.perf_counter()
    lease = client.lease(version)
    seconds["attach (lease)"] = time.perf_counter() - started
    weights = np.frombuffer(lease.buffer, np.uint8)
    target.fill(0)
    seconds["first read (copy out)"] = clocked(partial(np.copyto, target, weights))
    assert np.array_equal(target, source)
    seconds["second read (copy out)"] = clocked(partial(np.copyto, target, weights))
    del weights
    seconds["release"] = clocked(lease.release)
    return seconds


def clocked(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def report(seconds: dict[str, list[float]], mib: int) -> None:
    """Print one line per phase: milliseconds and multiples of memcpy (median, least and most over the rounds)."""
    memcpy = seconds["memcpy"]
    print(f"{mib} MiB, {len(memcpy) - 1} rounds; times in ms, multiples of one memcpy of the same bytes")
    print(f"{'phase':34}{'median':>10}{'x memcpy':>10}{'least':>8}{'most':>8}")
    for phase, durations in seconds.items():
        ratios = [a / b for a, b in zip(durations[1:], memcpy[1:], strict=True)]
        median_ms = 1e3 * statistics.median(durations[1:])
        print(f"{phase:34}{median_ms:10.2f}{statistics.median(ratios):10.2f}{min(ratios):8.2f}{max(ratios):8.2f}")
    first, later = seconds["publish (begin, copy, commit)"][0], seconds["publish (begin, copy, commit)"][1:]
    print(f"first publish: {1e3 * first:.0f} ms, {first / statistics.median(later):.1f} x a later one")


if __name__ == "__main__":
    main()
