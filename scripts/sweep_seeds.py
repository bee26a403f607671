"""Simulate many small runs with random faults and check every invariant: python scripts/sweep_seeds.py --count 2000

Prints a line per seed with --verbose, else a count as it goes. The first failure stops the sweep with exit code 1 and the
command that replays it.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from laminar.sim.sweep import check
from laminar.sim.world import SimulationError

PROGRESS_S = 5.0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=100, help="number of seeds (default 100)")
    parser.add_argument("--verbose", action="store_true", help="one line per seed")
    options = parser.parse_args()
    begun = told = time.monotonic()
    for seed in range(options.first, options.first + options.count):
        try:
            line = check(seed)
        except SimulationError as error:
            print(error, file=sys.stderr)
            return 1
        if options.verbose or options.count == 1:
            print(line)
        elif time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            print(f"{seed - options.first + 1} of {options.count} seeds, {told - begun:.0f} s", file=sys.stderr)
    print(f"{options.count} seeds passed in {time.monotonic() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
