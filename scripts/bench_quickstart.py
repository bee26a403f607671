"""Wall time to a mean reward of 0.85: Laminar, TRL's GRPOTrainer and a bare loop on the quickstart's problem.

    python scripts/bench_quickstart.py --seeds 3 --settings i,ii

Model, prompts, reward and hyperparameters are the quickstart's (configs/quickstart), the same for all three; TRL lives in an
environment of its own, `.venv-trl`, which is made when it is missing. Runs are interleaved (Laminar, TRL, bare, Laminar …).
Settings: ``i`` as is; ``ii`` each answer's reward arrives after a log-normal delay (median 0.5 s, 99th percentile 5 s).
What is timed and when the target counts as reached: `bench/common.py` and `bench/laminar_run.py`. Results: one line per run,
`result.json` (rewritten after every run) and `result.md` in the output directory.
"""

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from laminar import configfile  # noqa: E402 - the repository need not be installed
from laminar.errors import LaminarError  # noqa: E402
from laminar.tasks import datasets  # noqa: E402
from scripts.bench import laminar_run  # noqa: E402
from scripts.bench.common import Curve, Problem  # noqa: E402

CONFIG, HOSTS = ROOT / "configs/quickstart/config.toml", ROOT / "configs/quickstart/hosts.txt"
TRL_ENVIRONMENT = ROOT / ".venv-trl"
TORCH = "torch==2.13.0"  # first and alone, so that nothing pulls the CUDA build
TRL_PACKAGES = ("trl==1.16.0", "transformers==5.24.0", "datasets==5.2.0", "accelerate==1.15.0", "msgspec>=0.19")
SYSTEMS = ("laminar", "trl", "bare")
TRIAL_STEPS = 6
TRIAL_SECONDS_MAX = 90.0
START_SECONDS_MAX = 180.0
INSTALL_SECONDS_MAX = 1200.0


@dataclass(frozen=True)
class Setting:
    """What distinguishes the two settings; `overrides` are Laminar's own, as a user would choose them."""

    delay_median_s: float
    delay_p99_s: float
    overrides: tuple[str, ...]


# Four batches in flight or buffered instead of the quickstart's 40 groups: a batch's worth waits for slow rewards while the
# next ones are generated. More keeps the processors busier and makes the data older: 224 was slower to the target.
SETTINGS = {
    "i": Setting(0.0, 0.0, ()),
    "ii": Setting(0.5, 5.0, ("buffer.max_groups=128",)),
}


@dataclass
class Result:
    """One run."""

    setting: str
    system: str
    seed: int
    reached: bool
    seconds: float
    """To the target; without it, the time that was trained."""
    steps: int
    step_s: float
    """Median over steps but the first."""
    cpu_s_per_step: dict[str, float]
    parts: dict[str, float]
    """Median seconds per step by part, or Laminar's own metrics."""
    start_up_s: float | None
    load_before: float
    threads: int | None
    times_s: list[float] = field(repr=False)
    rewards: list[float] = field(repr=False)


def main() -> int:
    """Measure, print, write."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception it also ends the run that is measured
    directory = options.out or ROOT / "runs" / f"bench-quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        if "trl" in options.systems:
            make_trl_environment()
        bench = Bench(options, directory)
        bench.run()
    except (LaminarError, laminar_run.RunFailed, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{report(bench.results)}\nwritten to {directory}")
    return 0


def parse() -> argparse.Namespace:
    """The command line; names are checked here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 … N-1 (default 3)")
    parser.add_argument("--settings", type=_names(SETTINGS), default=list(SETTINGS), help="i,ii (default both)")
    parser.add_argument("--systems", type=_names(SYSTEMS), default=list(SYSTEMS), help="laminar,trl,bare (default all)")
    parser.add_argument("--target", type=float, default=0.85, help="mean reward to reach (default 0.85)")
    parser.add_argument("--steps-max", type=int, default=150, help="steps after which a run is given up (default 150)")
    parser.add_argument("--minutes-max", type=float, default=25.0, help="the same in minutes of training (default 25)")
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads of TRL and the bare loop; 0 = the faster of 1 and 2"
    )
    parser.add_argument(
        "--override", action="append", default=[], help="section.key=value for Laminar's runs, repeatable"
    )
    parser.add_argument("--out", type=Path, help="output directory (default runs/bench-quickstart-TIME)")
    return parser.parse_args()


def _names(known: Any) -> Any:
    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; there are {', '.join(known)}")
        return given

    return names


class BenchError(Exception):
    """A contestant could not be installed or run."""


def make_trl_environment() -> None:
    """`.venv-trl` with the pinned packages, if it is not there already. Raises BenchError with pip's last lines."""
    python, marker = TRL_ENVIRONMENT / "bin/python", TRL_ENVIRONMENT / "installed"
    wanted = "\n".join((TORCH, *TRL_PACKAGES))
    if marker.is_file() and marker.read_text() == wanted:
        return
    print(f"making {TRL_ENVIRONMENT} (a few minutes)", flush=True)
    if not python.exists():
        _install([sys.executable, "-m", "venv", str(TRL_ENVIRONMENT)])
    for packages in ((TORCH,), TRL_PACKAGES):
        _install([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    marker.write_text(wanted)


def _install(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
    if result.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")


class Bench:
    """All runs of one invocation."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.results: list[Result] = []
        self._options, self._directory = options, directory
        self._config = configfile.load(CONFIG, [])
        prompts = datasets.load(self._config.task)
        self._prompts = [(prompts.prompt(i).text, prompts.prompt(i).answer) for i in range(len(prompts))]
        self._threads: dict[str, int] = {}

    def run(self) -> None:
        """Interleaved; the result file is complete after every run."""
        for system in self._options.systems:
            if system != "laminar":
                self._threads[system] = self._options.threads or self._faster_threads(system)
        for setting in self._options.settings:
            for seed in range(self._options.seeds):
                for system in self._options.systems:
                    self._measure(setting, system, seed)

    def _measure(self, setting: str, system: str, seed: int) -> None:
        load = os.getloadavg()[0]
        measure = self._laminar if system == "laminar" else self._loop
        result = measure(system, setting, seed, load)
        self.results.append(result)
        print(_line(result), flush=True)
        machine = {"cores": os.cpu_count(), "processor": _processor(), "target": self._options.target}
        record = {"machine": machine, "results": [asdict(result) for result in self.results]}
        (self._directory / "result.json").write_text(json.dumps(record, indent=1))
        (self._directory / "result.md").write_text(report(self.results))

    def _laminar(self, system: str, setting: str, seed: int, load: float) -> Result:
        delays = SETTINGS[setting]
        arguments = ["--cluster", str(HOSTS), "--config", str(CONFIG), f"run.seed={seed}", f"run.steps={self._options.steps_max}",
                     "task.eval_prompts=0", "trainer.checkpoint_every=0", f"task.reward_delay_median_s={delays.delay_median_s}",
                     f"task.reward_delay_p99_s={delays.delay_p99_s}", *delays.overrides, *self._options.override]  # fmt: skip
        watched = laminar_run.run(
            arguments,
            self._directory,
            f"laminar-{setting}-{seed}",
            target=self._options.target,
            seconds_max=60 * self._options.minutes_max,
        )
        steps = max(1, len(watched.curve.times_s))
        cpu = {name: seconds / steps for name, seconds in watched.cpu_s.items()}
        return _result(setting, system, seed, watched.curve, cpu, watched.metrics, watched.start_up_s, load, None)

    def _loop(self, system: str, setting: str, seed: int, load: float) -> Result:
        began = time.time()
        problem = self._problem(setting, seed)
        lines = self._run_loop(system, problem, f"{system}-{setting}-{seed}", self._threads[system])
        curve = Curve(problem.target, [line["t"] for line in lines], [line["reward"] for line in lines])
        parts = {
            name: statistics.median(line[name] for line in lines)
            for name in ("generate_s", "reward_s", "update_s", "step_s")
            if name in lines[-1]
        }
        cpu = {"process": lines[-1]["cpu_s"] / len(lines)}
        start_up_s = time.time() - began - curve.times_s[-1]
        return _result(setting, system, seed, curve, cpu, parts, start_up_s, load, self._threads[system])

    def _faster_threads(self, system: str) -> int:
        """1 or 2 torch threads, by the median step of a short trial of each."""
        problem = self._problem("i", 0, steps_max=TRIAL_STEPS, seconds_max=TRIAL_SECONDS_MAX)
        medians = {}
        for threads in (1, 2):
            times = [line["t"] for line in self._run_loop(system, problem, f"{system}-trial-{threads}", threads)]
            medians[threads] = statistics.median(_durations(times))
        best = min(medians, key=lambda threads: medians[threads])
        shown = ", ".join(f"{threads} thread(s) {seconds:.2f} s per step" for threads, seconds in medians.items())
        print(f"{system}: {shown}; takes {best}", flush=True)
        return best

    def _run_loop(self, system: str, problem: Problem, name: str, threads: int) -> list[dict[str, float]]:
        """The lines that TRL or the bare loop wrote. Raises BenchError with the end of its log."""
        given, out, log = (self._directory / f"{name}.{suffix}" for suffix in ("json", "jsonl", "log"))
        problem.save(given)
        python, script = {
            "trl": (TRL_ENVIRONMENT / "bin/python", "trl_grpo.py"),
            "bare": (Path(sys.executable), "bare_loop.py"),
        }[system]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        command = [str(python), str(ROOT / "scripts/bench" / script), str(given), str(out)]
        seconds_max = 1.2 * problem.seconds_max + START_SECONDS_MAX
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=seconds_max, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise BenchError(f"{name} did not end within {seconds_max:.0f} s; its log is {log}") from error
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
        if code.returncode or not lines:
            raise BenchError(f"{name} ended with code {code.returncode}:\n{log.read_text()[-2000:]}")
        return lines

    def _problem(self, setting: str, seed: int, steps_max: int = 0, seconds_max: float = 0.0) -> Problem:
        config, delays = self._config, SETTINGS[setting]
        return Problem(
            model=config.model.path,
            reward=config.task.reward,
            prompts=self._prompts,
            batch_prompts=config.trainer.batch_prompts,
            group_size=config.rollout.group_size,
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            lr=config.trainer.lr,
            betas=config.trainer.betas,
            weight_decay=config.trainer.weight_decay,
            grad_clip=config.trainer.grad_clip,
            clip_low=config.algorithm.clip_low,
            clip_high=config.algorithm.clip_high,
            delay_median_s=delays.delay_median_s,
            delay_p99_s=delays.delay_p99_s,
            seed=seed,
            target=self._options.target,
            steps_max=steps_max or self._options.steps_max,
            seconds_max=seconds_max or 60 * self._options.minutes_max,
        )


def _result(
    setting: str, system: str, seed: int, curve: Curve, cpu: dict[str, float], parts: dict[str, float],
    start_up_s: float | None, load: float, threads: int | None,
) -> Result:  # fmt: skip
    steps = curve.reached_step or len(curve.times_s)
    return Result(
        setting=setting,
        system=system,
        seed=seed,
        reached=curve.reached_step is not None,
        seconds=curve.times_s[steps - 1] if steps else 0.0,
        steps=steps,
        step_s=statistics.median(_durations(curve.times_s)),
        cpu_s_per_step=cpu,
        parts=parts,
        start_up_s=start_up_s,
        load_before=load,
        threads=threads,
        times_s=curve.times_s,
        rewards=curve.rewards,
    )


def _line(result: Result) -> str:
    state = "reached" if result.reached else "NOT reached"
    cpu = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.cpu_s_per_step.items())
    return (
        f"({result.setting}) seed {result.seed} {result.system:8} target {state} after "
        f"{result.seconds:.1f} s, {result.steps} steps, {result.step_s:.2f} s per step "
        f"| CPU s per step: {cpu} | load before {result.load_before:.1f}"
    )


def _durations(times_s: list[float]) -> list[float]:
    """Seconds of each step but the first, which warms caches up."""
    return [after - before for before, after in itertools.pairwise(times_s)] or times_s or [0.0]


def report(results: list[Result]) -> str:
    """Markdown: a table of medians over seeds, and the ratios of Laminar's time to the others'."""
    lines = [
        "| setting | system | seconds to the target | steps | s per step | CPU s per step | reached |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios = []
    for setting in dict.fromkeys(result.setting for result in results):
        medians: dict[str, float] = {}
        for system in SYSTEMS:
            runs = [result for result in results if (result.setting, result.system) == (setting, system)]
            if not runs:
                continue
            reached = sum(run.reached for run in runs)
            medians[system] = statistics.median(run.seconds if run.reached else float("inf") for run in runs)
            spread = ", ".join(f"{run.seconds:.1f}" if run.reached else f"> {run.seconds:.1f}" for run in runs)
            cpu = statistics.median(sum(run.cpu_s_per_step.values()) for run in runs)
            lines.append(
                f"| {setting} | {system} | {medians[system]:.1f} ({spread}) | {statistics.median(run.steps for run in runs):.0f} "
                f"| {statistics.median(run.step_s for run in runs):.2f} | {cpu:.2f} | {reached}/{len(runs)} |"
            )
        ratios += [
            f"- setting {setting}: Laminar / {system} = {medians['laminar'] / medians[system]:.2f}"
            for system in ("trl", "bare")
            if system in medians and "laminar" in medians and medians[system] < float("inf")
        ]
    return "\n".join([*lines, "", *ratios, ""])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
