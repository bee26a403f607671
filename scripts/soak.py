"""Random faults on the quickstart's cluster for half an hour: `python scripts/soak.py [--minutes 30] [--seed 0] [KIND …]`.

Exit status 0 if the report is clean, there were enough faults of enough kinds (in 30 minutes 40 of 8), and the reward rose. A short
form is a test (tests/test_e2e_soak.py). Without root some kinds are left out, see docs/chaos.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart"
OVERRIDES = (
    "trainer.lr=1e-4",  # the quickstart's is for a hundred steps, here are thousands
    "trainer.checkpoint_every=20",
    "trainer.batch_prompts=8",
    "rollout.local_batch_groups=4",
    "buffer.max_groups=16",
    "task.reward_delay_median_s=0.5",  # a slow judge: much is under way when a fault strikes, and half an hour fits on a small disk
    "task.reward_delay_p99_s=2",
    "task.eval_prompts=0",
    "controller.heartbeat_s=1",
    "controller.heartbeat_timeout_s=8",
    "controller.orphan_timeout_s=90",  # a controller takes long to start beside busy workers
)
AROUND_S = 50.0  # for the start and the end
FULL_MINUTES, FULL_FAULTS, FULL_KINDS = 30.0, 40, 8
SHORT_KINDS = 5
SMALL_MINUTES, SMALL_MIB, LARGE_MIB = 10.0, 384, 1536


def main() -> int:
    options = _parse()
    report = soak(options.minutes, options.seed, options.kinds, options.overrides)
    problems = shortcomings(report, options.minutes)
    for problem in problems:
        print(f"not enough: {problem}")
    print("soaked" if report["clean"] and not problems else "FAILED")
    return 0 if report["clean"] and not problems else 1


def soak(minutes: float, seed: int, kinds: list[str], overrides: list[str], gap: str = "5s") -> dict[str, Any]:
    """The report of a run with random faults for so long, start and end included. What is said meanwhile goes to stderr."""
    disk_mib = LARGE_MIB if minutes > SMALL_MINUTES else SMALL_MIB
    command = [
        sys.executable, "-m", "laminar.chaos", "--json", "--quiet", "--random", f"--seed={seed}", f"--gap={gap}",
        f"--duration={max(10.0, 60 * minutes - AROUND_S)}s", f"--disk-mib={disk_mib}",
        "--cluster", str(QUICKSTART / "hosts.txt"), "--config", str(QUICKSTART / "config.toml"),
        *([f"--kinds={','.join(kinds)}"] if kinds else []), *OVERRIDES, *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit(f"laminar.chaos ended with exit status {done.returncode} and no report")
    found: dict[str, Any] = json.loads(done.stdout)
    show(found)
    return found


def show(report: dict[str, Any]) -> None:
    """As laminar.chaos prints it."""
    import msgspec
    from rich.console import Console

    from laminar.chaos.report import Report
    from laminar.chaos.report import show as print_report

    print_report(msgspec.convert(report, Report), Console(width=180))


def shortcomings(report: dict[str, Any], minutes: float) -> list[str]:
    """What a clean report lacks to be worth much."""
    is_full = minutes >= FULL_MINUTES
    num_faults = FULL_FAULTS if is_full else SHORT_KINDS
    num_kinds = FULL_KINDS if is_full else SHORT_KINDS
    found = []
    if report["num_faults"] < num_faults:
        found.append(f"{report['num_faults']} faults, not {num_faults}")
    if report["num_kinds"] < num_kinds:
        found.append(f"{report['num_kinds']} kinds, not {num_kinds}")
    skipped = {fault["kind"]: fault["skipped"] for fault in report["faults"]}
    struck = {fault["kind"] for fault in report["faults"] if not fault["skipped"]}
    found += [f"no {kind} struck: {why}" for kind, why in skipped.items() if kind not in struck]
    first, last = report["reward"] or (0.0, 0.0)
    if is_full and last <= first:
        found.append(f"the reward went from {first:.3f} to {last:.3f}")
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=FULL_MINUTES, help="start and end included (default: %(default)g)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", metavar="KIND|key=value", help="only these kinds; configuration keys")
    options = parser.parse_intermixed_args()
    options.kinds = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    return options


if __name__ == "__main__":
    sys.exit(main())
