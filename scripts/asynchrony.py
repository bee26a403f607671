"""How asynchronous was a run? Computed from its `run.db`: `python scripts/asynchrony.py runs/NAME [--json] [--check]`.

* overlap: share of the trainer's busy time (train steps and publications) during which some replica decoded. The decoding
  time of a report is spread evenly over its interval; replicas are combined as the maximum of their rates, a lower bound.
* versions: share of steps during which the replicas held different weight versions for a tenth of the step or longer.
* mixed: trajectories whose records name more than one generating version (must be 0 by construction and by the log).
`--check` exits 1 unless overlap >= 0.5, versions >= 0.2 and mixed == 0.
"""

import argparse
import contextlib
import itertools
import json
import sqlite3
import sys
from pathlib import Path

OVERLAP_MIN, VERSIONS_MIN, DIFFERENT_MIN = 0.5, 0.2, 0.1


def overlap(database: sqlite3.Connection) -> float:
    """Share of train and publish time in which decoding went on, 0..1."""
    busy = database.execute(
        "SELECT start, end FROM spans WHERE kind IN ('train', 'publish') AND end > start"
    ).fetchall()
    decoding = database.execute(
        "SELECT worker, start, end, min(1.0, busy_s / (end - start)) FROM spans WHERE kind = 'decode' AND end > start"
    ).fetchall()
    total = sum(end - start for start, end in busy)
    return sum(_covered(start, end, decoding) for start, end in busy) / total if total else 0.0


def _covered(start: float, end: float, decoding: list[tuple[str, float, float, float]]) -> float:
    parts = [(max(start, a), min(end, b), rate) for _, a, b, rate in decoding if b > start and a < end]
    edges = sorted({edge for a, b, _ in parts for edge in (a, b)})
    covered = 0.0
    for left, right in itertools.pairwise(edges):
        rates = [rate for a, b, rate in parts if a <= left and b >= right]
        covered += (right - left) * max(rates, default=0.0)
    return covered


def different_versions(database: sqlite3.Connection) -> float:
    """Share of steps during which the replicas held different versions for at least DIFFERENT_MIN of the step, 0..1."""
    pulls = database.execute("SELECT end, worker, version FROM spans WHERE kind = 'pull' ORDER BY end").fetchall()
    ends = [row[0] for row in database.execute("SELECT end FROM spans WHERE kind = 'train' ORDER BY end")]
    apart: list[tuple[float, float]] = []
    held: dict[str, str] = {}
    last = (max(ends, default=0.0), "", "")
    for (moment, worker, version), following in itertools.pairwise([*pulls, last]):
        held[worker] = version
        if len(set(held.values())) > 1:
            apart.append((moment, following[0]))
    steps = list(itertools.pairwise(ends))
    shares = [sum(max(0.0, min(b, d) - max(a, c)) for c, d in apart) / (b - a) for a, b in steps]
    return sum(share >= DIFFERENT_MIN for share in shares) / len(steps) if steps else 0.0


def mixed(database: sqlite3.Connection) -> int:
    """Trained trajectories without exactly one generating version and its digest."""
    return int(
        database.execute(
            """SELECT count(*) FROM trajectories WHERE trained_at IS NOT NULL AND (behavior_version IS NULL OR digest IS NULL OR
            digest NOT IN (SELECT digest FROM versions WHERE 'v' || step || iif(branch, '.b' || branch, '') = behavior_version))"""
        ).fetchone()[0]
    )


def main() -> int:
    """Print the three figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory, or its run.db")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    path = options.run / "run.db" if options.run.is_dir() else options.run
    if not path.is_file():
        parser.error(f"{path} does not exist: name a run's directory")
    uri = f"{path.absolute().as_uri()}?mode=rw"  # nothing is written; the last one to close removes the write-ahead log
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
        figures = {
            "overlap": overlap(database),
            "different_versions": different_versions(database),
            "mixed_trajectories": mixed(database),
        }
    if options.json:
        print(json.dumps(figures))
    else:
        print(f"decoding during train steps and publications  {figures['overlap']:.0%} of their time")
        print(f"replicas at different weight versions         {figures['different_versions']:.0%} of the steps")
        print(f"trained trajectories of more than one version {figures['mixed_trajectories']}")
    good = (
        figures["overlap"] >= OVERLAP_MIN
        and figures["different_versions"] >= VERSIONS_MIN
        and not figures["mixed_trajectories"]
    )
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
