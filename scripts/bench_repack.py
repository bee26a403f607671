"""How long a repack plan takes: `python scripts/bench_repack.py [--quick]`. Prints the tables of docs/benchmarks.md.

The planner of `laminar.core.repack` and Best-Fit word for word (tests/naive_repack.py) plan the same fleets in turn, so that their
ratio does not depend on what else the machine does; their plans are compared, too. CPU time (`time.process_time`).

Fleets, all replicas past their peak, B = 221, room for 800,000 KV tokens each:
* tail: up to a quarter of B, 500 to 16,000 tokens each: KV decides.
* short: up to B requests of 100 tokens: the number of requests decides, the fullest replicas have no room.
* versions: as tail, over eight weight versions.
"""

import argparse
import gc
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from laminar.core import repack, spread
from laminar.core.repack import Load, Plan
from laminar.ids import Version, WorkerId
from tests import naive_repack

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
B, KV_MAX, NUM_VERSIONS = 221, 800_000, 8


def fleet(kind: str, size: int, seed: int) -> list[Load]:
    """One random fleet."""
    draw = random.Random(seed)
    loads = []
    for index in range(size):
        num = draw.randint(1, B - 1 if kind == "short" else B // 4)
        kv = 100 * num if kind == "short" else sum(draw.randint(500, 16_000) for _ in range(num))
        loads.append(
            Load(
                worker=WorkerId(f"rollout-{index}"),
                version=Version(draw.randrange(NUM_VERSIONS) if kind == "versions" else 0, 0),
                kv_used=kv,
                kv_previous=kv + 1,
                num_requests=num,
                kv_max=KV_MAX,
                requests_max=B,
            )
        )
    return loads


def timed(plan: Callable[[list[Load]], Plan], loads: list[Load]) -> tuple[Plan, float]:
    """The plan, and its CPU milliseconds."""
    began = time.process_time()
    result = plan(loads)
    return result, (time.process_time() - began) * 1e3


def row(kind: str, size: int, repeats: int, naive_repeats: int) -> str:
    """One line of the table: medians over different fleets; those that the naive planner also plans are the first."""
    costs, naive_costs, moves = [], [], 0
    for seed in range(repeats):
        loads = fleet(kind, size, seed)
        result, cost = timed(repack.plan, loads)
        costs.append(cost)
        moves = len(result.moves)
        if seed < naive_repeats:
            expected, naive_cost = timed(naive_repack.plan, loads)
            naive_costs.append(naive_cost)
            assert result == expected, f"{kind}, {size} replicas, seed {seed}: the plans differ"
    ratios = [slow / fast for slow, fast in zip(naive_costs, costs, strict=False)]
    return (
        f"| {kind} | {size:,} | {moves:,} | {statistics.median(costs):.2f} | {statistics.median(naive_costs):.1f}"
        f" | {statistics.median(ratios):.1f} × |"
    )


def parts_row(kind: str, size: int, repeats: int) -> str:
    """One line of the table of `repack.policy = "parts"`."""
    costs = []
    for seed in range(repeats):
        result, cost = timed(spread.plan, fleet(kind, size, seed))
        costs.append(cost)
    emptied = len({move.source for move in result.moves})
    return f"| {kind} | {size:,} | {len(result.moves):,} | {emptied:,} | {statistics.median(costs):.2f} |"


def main() -> None:
    """Run all measurements and print them as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 1,024 replicas, fewer fleets")
    parser.add_argument("--parts", action="store_true", help="only the plans in parts")
    options = parser.parse_args()
    quick = options.quick
    gc.collect()
    gc.freeze()  # as the controller does: what was imported is not looked through again
    print(f"{platform.machine()}, Python {platform.python_version()}, one core\n")
    sizes = [size for size in SIZES if not quick or size <= 1024]
    print("in parts:\n\n| fleet | replicas | moves | emptied | median ms |\n|---|---|---|---|---|")
    for kind in ("tail", "short", "versions"):
        for size in sizes:
            print(parts_row(kind, size, 9 if quick else 25), flush=True)
    if options.parts:
        return
    print("\nwhole:\n\n| fleet | replicas | moves | median ms | word for word, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for kind in ("tail", "short", "versions"):
        for size in sizes:
            naive_repeats = 3 if size <= 1024 else 1  # minutes at 8,192
            print(row(kind, size, 9 if quick else 25, naive_repeats), flush=True)


if __name__ == "__main__":
    main()
