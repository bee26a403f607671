"""Hurt whole runs in many ways and print what came of it: `python scripts/torture.py [WORD …] [--moments 10] [--seed 0]`.

Each scenario starts real runs of a small task (one rank, one replica, 6–20 s each). WORDs choose the scenarios whose names
contain one of them. Exit code 1 if any went wrong. The short ones are tests, too: tests/test_e2e_*.py.

`--machines` lets `crash again and again` run with its trainer and its replica on two machines made of namespaces and reached by
ssh, its controllers by turns at two addresses (needs root, iproute2, util-linux and openssh-server).
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from e2e import SMALL, Run, hosts_file, ledger_is_closed
from hosts_world import Machines, why_not

LONG = "run.steps=2000"
STEPS_MAX = 12  # moments are counted in steps, because the seconds that a start takes depend on the machine
STOP_S = 30.0
STEP_S = 10.0  # of a small task on a busy machine
SAMPLER = """
class Sampler:
    def select(self, view, num_groups):
        raise ValueError("nothing to my taste")
    def state(self):
        return {}
    def load_state(self, state):
        pass
"""


class Place:
    """Where a scenario works."""

    def __init__(self, directory: Path, source: random.Random, machines: Machines | None = None) -> None:
        self.directory, self.source, self.machines = directory, source, machines
        self.hosts = hosts_file(directory)

    def start(self, *overrides: str, options: tuple[str, ...] = ()) -> Run:
        """A run of the small task."""
        return Run.start(self.directory, self.hosts, *SMALL, *overrides, options=options)

    def start_there(self, *overrides: str) -> Run:
        """The same on other machines, if there are some."""
        if self.machines is None:
            return self.start(*overrides)
        self.hosts.write_text("node1 trainer\nnode2 rollout\n")
        there = (f"controller.ssh={self.machines.client}", *overrides)
        return Run.start(self.directory, self.hosts, *SMALL, *there, wrap=self.machines.wrap)

    def resume(self, run: Run, number: int) -> Run:
        """Take over for the `number`-th time, by turns from another address if there are other machines."""
        wrap = self.machines.wrap_at(2 * (number % 2), f"controller{number}") if self.machines else ()
        return Run.resume(run.path, wrap=wrap)


def check_resumed(run: Run, more: int = 3) -> str:
    """Resume, train a few steps, and compare both parts. AssertionError if they do not fit."""
    step = run.checkpoints()[-1]
    with Run.resume(run.path, "--from-checkpoint", f"run.steps={step + more}") as second:
        assert second.wait() == 0, second.output
    assert ledger_is_closed(second.output), second.output
    digests = second.query("SELECT DISTINCT digest FROM versions WHERE step = ?", step)
    assert len(digests) == 1, f"step {step} was restored with other weights: {digests}"
    twice = second.query(
        "SELECT prompt FROM trajectories WHERE step > 0 GROUP BY prompt HAVING count(DISTINCT group_id) > 1"
    )
    epochs = 1 + (step + more) * 4 // 400
    assert epochs > 1 or not twice, f"prompts trained twice: {twice}"
    counts = second.query("SELECT step, count(*) FROM trajectories WHERE step > 0 GROUP BY step ORDER BY step")
    assert counts == [(number, 16) for number in range(1, step + more + 1)], counts
    return f"resumed at {step}, same weights, {len(counts)} full steps"


def interrupt_at(place: Place, after_step: int, moment_s: float) -> str:
    """SIGINT once: a clean end with exit code 0, a checkpoint of what was trained, a resume that fits."""
    with place.start(LONG) as run:
        if after_step:
            run.until_said(rf"^step {after_step}/")
        time.sleep(moment_s)
        run.signal(signal.SIGINT)
        began = time.monotonic()
        code = run.wait(STOP_S)
        took = time.monotonic() - began
    steps = sum(line.startswith("step ") for line in run.lines)
    if not run.lines or not run.lines[0].startswith("run "):
        assert code == 130, run.output
        return f"before the run began: exit {code} in {took:.1f} s"
    assert code == 0, run.output
    assert ledger_is_closed(run.output), run.output
    assert run.checkpoints() == ([steps] if steps else []), (steps, run.checkpoints())
    said = f"at step {steps}: exit {code} in {took:.1f} s"
    return f"{said}; {check_resumed(run)}" if steps else said


def interrupt_in_a_checkpoint(place: Place) -> str:
    """SIGINT while a checkpoint is being written."""
    with place.start(LONG, "trainer.checkpoint_every=1") as run:
        run.until_said(r"^step 2/")
        run.until(lambda: list((run.path / "checkpoints").glob("*.writing-*")))
        run.signal(signal.SIGINT)
        assert run.wait(STOP_S) == 0, run.output
    assert not list((run.path / "checkpoints").glob("*.writing-*"))
    return check_resumed(run)


def interrupt_in_the_last_evaluation(place: Place) -> str:
    """SIGINT when all steps are done: the checkpoint is there, a resume only evaluates."""
    with place.start("run.steps=3", "task.eval_prompts=128") as run:
        run.until_said(r"^step 3/")
        run.signal(signal.SIGINT)
        assert run.wait(STOP_S) == 0, run.output
    assert run.checkpoints() == [3]
    with Run.resume(run.path) as second:
        assert second.wait() == 0, second.output
    assert second.until_said(r"^greedy accuracy +0\.\d+ → 0\.\d+")
    assert json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
    return "resume evaluated version 3 and trained nothing"


def interrupt_twice(place: Place, moment_s: float) -> str:
    """SIGINT and SIGTERM together: gone within seconds."""
    with place.start(LONG) as run:
        run.until_said(r"^run ")
        time.sleep(moment_s)
        run.signal(signal.SIGSTOP)
        run.signal(signal.SIGINT)
        run.signal(signal.SIGTERM)
        run.signal(signal.SIGCONT)
        began = time.monotonic()
        code = run.wait(STOP_S)
        run.until(lambda: not run.leftovers(), 5.0)
    assert code == 130, run.output
    return f"at {moment_s:.1f} s: all gone in {time.monotonic() - began:.1f} s"


def kill_the_controller(place: Place) -> str:
    """SIGKILL to the controller in mid-run, and nobody comes: workers clean up, and the run resumes from its last checkpoint."""
    with place.start(LONG, "trainer.checkpoint_every=2", "controller.orphan_timeout_s=2") as run:
        run.until_said(r"^step 7/")
        run.signal(signal.SIGKILL)
        run.wait()
        began = time.monotonic()
        run.until(lambda: not run.leftovers(), STOP_S)
        took = time.monotonic() - began
    return f"workers gone after {took:.1f} s; {check_resumed(run)}"


def crash_again_and_again(place: Place, num_moments: int) -> str:
    """SIGKILL to the controller at random moments of one run, each time resumed at once: the workers stay, every step is trained
    once, every prompt is drawn once."""
    steps = 20 + 4 * num_moments
    room = ("task.size=20000", f"run.steps={steps}", "controller.orphan_timeout_s=300", "trainer.checkpoint_every=5")
    delays_s, recoveries_s = [], []
    with contextlib.ExitStack() as stack:
        first = run = stack.enter_context(place.start_there(*room))
        run.until_said(r"^step 1/")
        for number in range(1, num_moments + 1):
            delays_s.append(place.source.uniform(0.0, 1.5))
            time.sleep(delays_s[-1])
            if run.process.poll() is not None:
                break
            run.kill_worker("laminar.controller")
            run.wait()
            began = time.monotonic()
            run = stack.enter_context(place.resume(first, number))
            run.until_said(r"^goes on after a controller that died")
            recoveries_s.append(time.monotonic() - began)
        assert run.wait(steps * STEP_S) == 0, run.output
        if place.machines is not None:
            place.machines.await_nothing_left()
        assert not first.marked(), "workers live on"
    assert ledger_is_closed(run.output), run.output
    counts = run.query(
        "SELECT step, count(*), count(DISTINCT id) FROM trajectories WHERE step > 0 GROUP BY step ORDER BY step"
    )
    assert counts == [(number, 16, 16) for number in range(1, steps + 1)], counts
    twice = run.query("SELECT prompt FROM trajectories GROUP BY prompt HAVING count(DISTINCT group_id) > 1")
    assert not twice, f"prompts drawn twice: {twice}"
    dropped = run.num_dropped()
    assert dropped.keys() <= {"run_complete"}, dropped
    took = statistics.median(recoveries_s)
    return f"{len(recoveries_s)} crashes, {steps} steps once each; start to state restored {took:.2f} s (median)"


def kill_a_rank(place: Place) -> str:
    """SIGKILL to one of two trainer ranks: exit 1, named; then a resume."""
    place.hosts = hosts_file(place.directory, ranks=2)
    with place.start(LONG, "trainer.checkpoint_every=2") as run:
        run.until_said(r"^step 5/")
        pid = run.kill_worker("laminar.workers.trainer")
        assert run.wait(STOP_S) == 1, run.output
    assert run.until_said(rf"^the run failed: .* because rank \d ended by signal 9 \(pid {pid}\)")
    return check_resumed(run)


def kill_the_relay(place: Place) -> str:
    """SIGKILL to the relay: exit 1, named; what was trained is saved; then a resume."""
    with place.start(LONG) as run:
        run.until_said(r"^step 4/")
        run.kill_worker("laminar.workers.relay")
        assert run.wait(STOP_S) == 1, run.output
    assert "the relay relay-0 was lost" in run.output
    return check_resumed(run)


def stop_for_a_sampler(place: Place) -> str:
    """A sampler that raises under `on_sampler_error = "stop"`."""
    file = place.directory / "sampler.py"
    file.write_text(SAMPLER)
    with place.start("buffer.on_sampler_error=stop", options=("--sampler", f"{file}:Sampler")) as run:
        assert run.wait() == 1, run.output
    assert "nothing to my taste" in run.lines[-2], run.output
    return run.lines[-2]


def fill_shared_memory(place: Place) -> str:
    """A /dev/shm of 1 MiB (own mount namespace, needs root): the relay says that it is full."""
    if os.geteuid() != 0:
        return "skipped: needs root"
    wrap = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh")
    with Run.start(place.directory, place.hosts, *SMALL, wrap=wrap) as run:
        assert run.wait() == 1, run.output
    return run.lines[-2]


def scenarios(num_moments: int, source: random.Random) -> Iterator[tuple[str, Callable[[Place], str]]]:
    """Names and what to do."""
    for _ in range(num_moments):
        after_step = source.choice((0, source.randint(1, STEPS_MAX)))
        moment_s = source.uniform(0.0, 0.3 if after_step else 6.0)
        act = partial(interrupt_at, after_step=after_step, moment_s=moment_s)
        yield f"interrupt at a random moment, {after_step}+{moment_s:.2f}", act
    yield "crash again and again", partial(crash_again_and_again, num_moments=num_moments)
    for moment_s in (0.2, 2.0, 9.0):
        yield "interrupt twice", partial(interrupt_twice, moment_s=moment_s)
    for act in (
        interrupt_in_a_checkpoint, interrupt_in_the_last_evaluation, kill_the_controller, kill_a_rank, kill_the_relay,
        stop_for_a_sampler, fill_shared_memory,
    ):  # fmt: skip
        yield act.__name__.replace("_", " "), act


def main() -> int:
    """Run the chosen scenarios, one row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument(
        "--moments", type=int, default=10, help="interrupts, and crashes, at random moments (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machines", action="store_true", help="see above")
    options = parser.parse_args()
    if options.machines and (reason := why_not()):
        parser.error(f"this machine cannot do it: {reason}")
    with Machines(2) if options.machines else contextlib.nullcontext() as machines:
        return run_all(options, machines)


def run_all(options: argparse.Namespace, machines: Machines | None) -> int:
    """The exit code."""
    source, num_bad = random.Random(options.seed), 0
    for name, act in scenarios(options.moments, source):
        if options.words and not any(word in name for word in options.words):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="laminar-torture-") as directory:
            try:
                verdict, said = "ok", act(Place(Path(directory), source, machines))
            except AssertionError as error:
                verdict, said = "BAD", str(error)
        num_bad += verdict == "BAD"
        print(f"{name:<40} {verdict:<4} {time.monotonic() - began:5.1f} s  {said}", flush=True)
    print(f"{num_bad} went wrong")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
