"""How near `laminar.replay --whatif` comes to runs that it was not tuned on: quickstarts of several kinds, simulated again.

    python scripts/whatif_calibration.py [--steps 30] [--out DIR] [--reuse] [KIND | RUN …]

Each kind is run once, its log is fitted, and three things are compared with what it really came to: the whole run simulated as it
was; the run simulated on from the middle of its steps; and, where a kind differs from another by what a what-if can change, the
what-if of that other run. RUN is the directory of one that was recorded before. Printed is a Markdown table: the real figures, and
how far the simulated ones are from them.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from laminar.errors import LaminarError  # noqa: E402 - the repository need not be installed
from laminar.replay import changes, forecast  # noqa: E402
from laminar.replay.changes import Changes  # noqa: E402
from laminar.replay.meter import Figures, Meter  # noqa: E402
from laminar.replay.playback import Playback  # noqa: E402
from laminar.replay.recording import Recording  # noqa: E402
from laminar.replay.whatif import record, simulated  # noqa: E402

QUICKSTART = ROOT / "configs" / "quickstart"
RUN_SECONDS_MAX = 600.0
DELAYS = ("task.reward_delay_median_s=0.5", "task.reward_delay_p99_s=5", "buffer.max_groups=128")
SLOW = ("algorithm.old_logprobs=recompute", "trainer.packing=none", "trainer.micro_batch_tokens=256")


@dataclass(frozen=True)
class Kind:
    """A run."""

    overrides: tuple[str, ...] = ()
    config: str = "config.toml"
    replicas: int = 2
    other: str = ""
    """Another kind …"""
    change: tuple[str, ...] = ()
    """… that this one is with these changes of a what-if."""


KINDS = {
    "quickstart": Kind(),
    "seed 1": Kind(("run.seed=1",)),
    "seed 2": Kind(("run.seed=2",)),
    "one replica": Kind(replicas=1, other="quickstart", change=("replicas=1",)),
    "four replicas": Kind(replicas=4, other="quickstart", change=("replicas=4",)),
    "small buffer": Kind(("buffer.max_groups=32",), other="quickstart", change=("buffer.max_groups=32",)),
    "slow trainer": Kind(SLOW),
    "slow rewards": Kind(DELAYS),
    "long tails": Kind(config="longtail.toml"),
    "long tails, not repacked": Kind(
        ("repack.enabled=false",), config="longtail.toml", other="long tails", change=("repack.enabled=false",)
    ),
}


def main() -> int:
    options = _parse()
    out = options.out or Path(tempfile.mkdtemp(prefix="whatif-"))
    print("| run | | step (s) | trained tokens/s | replicas busy | staleness |\n|---|---|---|---|---|---|", flush=True)
    for name in options.kinds or KINDS:
        directory = out / name.replace(" ", "-").replace(",", "") if name in KINDS else Path(name)
        try:
            if name in KINDS and not (options.reuse and (directory / "run.db").exists()):
                _run(KINDS[name], directory, options.steps)
            for row in _rows(name, directory, out):
                print(row, flush=True)
        except (LaminarError, subprocess.SubprocessError) as error:
            print(f"| {name} | {error} | | | | |", flush=True)
    print(f"\nruns are in {out}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND | RUN", help=f"of: {', '.join(KINDS)}")
    parser.add_argument("--steps", type=int, default=30, help="train steps of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where the runs go (default: a new directory)")
    parser.add_argument("--reuse", action="store_true", help="take runs that are there already")
    return parser.parse_args()


def _run(kind: Kind, directory: Path, steps: int) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    hosts = directory.parent / f"{directory.name}-hosts.txt"
    hosts.write_text(f"localhost trainer ranks=2\nlocalhost rollout engine=embedded replicas={kind.replicas}\n")
    command = [
        sys.executable, "-m", "laminar.controller", "--cluster", str(hosts), "--config", str(QUICKSTART / kind.config),
        f"run.steps={steps}", "task.eval_prompts=0", f"run.dir={directory.parent}", f"run.name={directory.name}", *kind.overrides,
    ]  # fmt: skip
    log = directory.parent / f"{directory.name}.log"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=output, timeout=RUN_SECONDS_MAX, cwd=ROOT, check=False)
    if done.returncode:
        raise subprocess.SubprocessError(f"the run ended with {done.returncode}, see {log}")


def _rows(name: str, directory: Path, out: Path) -> Iterator[str]:
    with Recording(directory) as recording:
        recorded = record(recording)
        yield _cells(directory.name, "real", recorded.real)
        yield _off("", "simulated", recorded.real, simulated(recorded, Changes()))
        yield _from_the_middle(recording, recorded.num_steps)
    kind = KINDS.get(name, Kind())
    other = out / kind.other
    if kind.other and (other / "run.db").exists():
        with Recording(other) as recording:
            predicted = simulated(record(recording), changes.parse(kind.change))
        yield _off("", f"what-if of *{kind.other}*: {' '.join(kind.change)}", recorded.real, predicted)


def _from_the_middle(recording: Recording, num_steps: int) -> str:
    """On from where half of the steps are done, to three quarters: both measured in the same way."""
    fitted, playback, last = forecast.fit(Playback(recording)), Playback(recording), 3 * num_steps // 4
    real, meter = Meter(), Meter()
    while playback.core.state.trainer.step < num_steps // 2 and (step := playback.step()):
        pass
    world = forecast.world(playback.core, fitted)
    world.observe = meter.observe
    world.run(until=lambda: world.core.state.trainer.step >= last)
    while playback.core.state.trainer.step < last and (step := playback.step()):
        real.observe(playback.core, step.event, step.actions)
    text = f"on from step {num_steps // 2} to {last}"
    return _off("", text, real.figures(), meter.figures())


def _cells(name: str, what: str, found: Figures) -> str:
    return (
        f"| {name} | {what} | {found.step_s:.3f} | {found.trained_tokens_per_s:.0f} | {found.replicas_busy:.3f} | "
        f"{found.staleness_mean:.2f} |"
    )


def _off(name: str, what: str, real: Figures, found: Figures) -> str:
    step, tokens = found.step_s / real.step_s - 1, found.trained_tokens_per_s / real.trained_tokens_per_s - 1
    busy, stale = found.replicas_busy - real.replicas_busy, found.staleness_mean - real.staleness_mean
    return f"| {name} | {what} | {step:+.1%} | {tokens:+.1%} | {busy:+.3f} | {stale:+.2f} |"


if __name__ == "__main__":
    sys.exit(main())
