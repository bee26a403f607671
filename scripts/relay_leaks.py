#!/usr/bin/env python
"""Memory, descriptors and threads of relays over many publications and repairs: none may grow.

    python scripts/relay_leaks.py [--publications 1000] [--repairs 100]

Four real daemons under the real core (`tests/cluster_world.py`). Between publications one of the two relays in the middle is
killed, now and then, and started again; the other two go through all of it and are measured. Exit status 1 when one of them grew.
"""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cluster_world import Cluster, Member, cluster  # noqa: E402

WARM_PUBLICATIONS = 10  # more than there are slots: every page of every slot was touched
NUM_BYTES = 4 << 20
SPARE = {"descriptors": 4, "threads": 4, "anonymous KiB": 16 << 10}
"""By how much a count may be above the first: a link that is being replaced, a pool's thread that began late, fragmentation."""


def counts(member: Member) -> dict[str, int]:
    """Of its process, now."""
    assert member.process is not None
    process = Path(f"/proc/{member.process.pid}")
    anonymous = next(line for line in (process / "status").read_text().splitlines() if line.startswith("RssAnon"))
    return {
        "descriptors": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
        "anonymous KiB": int(anonymous.split()[1]),
    }


async def repair(relays: Cluster, member: Member) -> None:
    """It dies, the others are chained anew, it comes back empty and is filled."""
    member.signal(signal.SIGKILL)
    await relays.until(lambda: member.worker not in relays.core.state.relays)
    await relays.relaunch(member)
    await relays.until(lambda: member.worker in relays.core.state.relays)


async def run(publications: int, repairs: int) -> list[str]:
    """What grew, in words."""
    async with cluster(4, num_bytes=NUM_BYTES, link_timeout_s=5.0) as relays:
        first, *middle, last = relays.order
        for _ in range(WARM_PUBLICATIONS):
            await relays.publish()
        before = {member.name: counts(member) for member in (first, last)}
        every, num_repaired = max(1, publications // max(repairs, 1)), 0
        for number in range(publications):
            if number % every == 0 and num_repaired < repairs:
                await repair(relays, middle[num_repaired % len(middle)])
                num_repaired += 1
            await relays.publish()
        after = {member.name: counts(member) for member in (first, last)}
    print(
        f"{publications} publications, {num_repaired} repairs\n\n| relay | | before | after | allowed |\n|---|---|---|---|---|"
    )
    grown = []
    for name, was in before.items():
        for what, count in was.items():
            limit = count + SPARE[what]
            print(f"| {name} | {what} | {count} | {after[name][what]} | {limit} |")
            if after[name][what] > limit:
                grown.append(f"{what} of {name} grew from {count} to {after[name][what]}")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publications", type=int, default=1000)
    parser.add_argument("--repairs", type=int, default=100)
    options = parser.parse_args()
    grown = asyncio.run(run(options.publications, options.repairs))
    for each in grown:
        print(f"GREW: {each}", file=sys.stderr)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
