"""What a scrape of `/metrics` costs: `python scripts/bench_scrape.py [--replicas 64,256,1024]`. CPU time (`time.process_time`).

A controller with so many replicas, 32 trajectories on each, a relay for every eight, and a finished step. *loop*: reading the
state, for which the event loop stands; *text*: making text of it, in a thread.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from prometheus_client import generate_latest

from laminar import wire
from laminar.controller.eventlog import EventLog
from laminar.controller.prometheus import Prometheus
from laminar.controller.runtime import Runtime
from laminar.controller.telemetry import Telemetry
from laminar.core import events
from laminar.core.engine import Core
from laminar.core.settings import Settings
from laminar.ids import Version, WorkerId

GROUP_SIZE, GROUPS_EACH, REPEATS = 8, 4, 30


def main() -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="64,256,1024", help="sizes of fleets (default 64,256,1024)")
    sizes = [int(size) for size in parser.parse_args().replicas.split(",")]
    print("| replicas | loop, ms | text, ms | KiB |\n|---|---|---|---|")
    for size in sizes:
        print(asyncio.run(measure(size)), flush=True)
    return 0


async def measure(size: int) -> str:
    """One row."""
    with tempfile.TemporaryDirectory() as directory:
        log = EventLog(Path(directory) / "run.db", 0.05)
        log.begin_boot(time.time(), 1, "here", 0)
        settings = Settings(
            num_prompts=1 << 20, steps=99, group_size=GROUP_SIZE, batch_groups=64, local_batch_groups=GROUPS_EACH,
            buffer_groups_max=GROUPS_EACH * size, evaluate=False,
        )  # fmt: skip
        runtime = Runtime(Core(settings), log, Path(directory))
        telemetry = Telemetry(runtime, log, Path(directory) / "metrics.jsonl")
        fill(runtime, telemetry, size)
        exporter = Prometheus("bench", runtime, telemetry, log)
        assert sum(replica.num_generating for replica in runtime.core.state.replicas.values()) == 32 * size
        loop_ms, families = timed(exporter.families)
        text_ms, text = timed(lambda: generate_latest(families))
        await runtime.close()
        log.close()
        telemetry.close()
    return f"| {size:,} | {loop_ms:.1f} | {text_ms:.1f} | {len(text) / 1024:.0f} |"


def fill(runtime: Runtime, telemetry: Telemetry, size: int) -> None:
    """Replicas that generate, relays that report."""
    version = Version(0, 0)
    runtime.post(events.RunStarted(boot=1))
    relays = [WorkerId(f"relay-{index}") for index in range(max(1, size // 8))]
    for relay in relays:
        runtime.post(events.RelayJoined(worker=relay, incarnation=1, host=f"h-{relay}"))
    runtime.post(events.TrainerRankReady(worker=WorkerId("trainer-0/0"), incarnation=1, rank=0, world_size=1, step=0))
    runtime.post(events.VersionReady(version=version, digest="d", num_bytes=1))
    for relay in relays[1:]:
        runtime.post(events.VersionHeld(worker=relay, version=version, digest="d"))
    for relay in relays:
        telemetry.on_message(relay, wire.RelayReport(sent_bytes=1 << 30, wire_bytes=1 << 24))
    for index in range(size):
        worker, host = WorkerId(f"rollout-{index}"), f"h-{relays[index // 8 % len(relays)]}"
        runtime.post(
            events.ReplicaJoined(worker=worker, incarnation=1, host=host, num_requests_max=256, kv_tokens_max=1_000_000)
        )
        runtime.post(events.ReplicaRefreshed(worker=worker, incarnation=1, version=version, digest="d", wait_s=0.01))
    telemetry.history.append({f"name_{index}/mean": float(index) for index in range(70)})


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(median CPU milliseconds, what it gave)."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        result = call()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times), result


if __name__ == "__main__":
    sys.exit(main())
