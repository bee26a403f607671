"""Faults strike in their order, each after the run has recovered from the one before, and are undone whatever happens."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.chaos import injector, journal
from laminar.chaos.harm import Impossible
from laminar.chaos.injector import Injector
from laminar.chaos.journal import Journal, Strike
from laminar.chaos.plan import Fault
from laminar.core import events
from laminar.ids import WorkerId

NEVER = 1e12


class Run:
    """What an injector sees of a run, and does to it: trial, tail and striker at once."""

    def __init__(self) -> None:
        self.is_over = False
        self.told: list[events.AnyEvent] = []
        self.done: list[str] = []
        self.on_strike: Callable[[Fault], None] = lambda fault: None
        self.impossible = ""

    def new(self) -> list[events.AnyEvent]:
        """What has happened by now."""
        told = [event for event in self.told if event.at <= time.time()]
        self.told = self.told[len(told) :]
        return told

    @contextlib.contextmanager
    def harm(self, fault: Fault, strike: Strike) -> Iterator[None]:
        if fault.kind == self.impossible:
            raise Impossible("not here")
        strike.workers = [fault.target]
        self.done.append(f"{fault.number} strikes")
        self.on_strike(fault)
        try:
            yield
        finally:
            self.done.append(f"{fault.number} is undone")

    def works(self, worker: str, after_s: float = 0.0) -> None:
        """It reports."""
        empty: dict[str, Any] = {"trajectories": b"", "attempts": b"", "num_tokens": b""}
        at = time.time() + after_s
        self.told.append(events.ReplicaReported(worker=WorkerId(worker), incarnation=1, at=at, **empty))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injector, "LOOK_S", 0.005)


def inject(run: Run, directory: Path, faults: list[Fault], until: float = NEVER) -> list[Strike]:
    made = Injector(run, Journal(directory), run, run, lambda line: None)  # type: ignore[arg-type]
    made.run(iter(faults), until)
    return journal.read(directory)


def stop(number: int, for_s: float = 0.0, **more: Any) -> Fault:
    return Fault(number=number, kind="stop_rollout", target="rollout-0", for_s=for_s, **more)


def test_a_fault_waits_until_the_run_has_recovered_from_the_one_before(tmp_path: Path) -> None:
    run = Run()
    run.on_strike = lambda fault: run.works("rollout-0", after_s=0.2)
    strikes = inject(run, tmp_path, [stop(1, 0.1), stop(2, 0.1)])
    assert run.done == ["1 strikes", "1 is undone", "2 strikes", "2 is undone"]
    first, second = strikes
    assert first.at + 0.1 <= first.until <= second.at
    assert first.workers == ["rollout-0"]


def test_faults_of_a_plan_strike_at_their_times_also_while_others_last(tmp_path: Path) -> None:
    run = Run()
    run.on_strike = lambda fault: run.works("rollout-0", after_s=1.0)
    first, second = inject(run, tmp_path, [stop(1, 0.6, at_s=0.0), stop(2, 0.1, at_s=0.2)])
    assert run.done == ["1 strikes", "2 strikes", "2 is undone", "1 is undone"]
    assert second.at >= first.at + 0.19


def test_a_fault_that_is_not_possible_is_skipped_with_its_reason(tmp_path: Path) -> None:
    run = Run()
    run.impossible = "cut"
    cut = Fault(number=1, kind="cut", target="rollout-0")
    run.on_strike = lambda fault: run.works("rollout-0", after_s=0.2)
    skipped, struck = inject(run, tmp_path, [cut, stop(2, 0.1)])
    assert (skipped.skipped, struck.skipped) == ("not here", "")
    assert run.done == ["2 strikes", "2 is undone"]


def test_no_fault_strikes_a_run_that_is_over_and_what_lasts_is_undone(tmp_path: Path) -> None:
    run = Run()

    def end(fault: Fault) -> None:
        run.is_over = True

    run.on_strike = end
    (strike,) = inject(run, tmp_path, [stop(1, 600.0), stop(2)])
    assert run.done == ["1 strikes", "1 is undone"]
    assert strike.until > 0


def test_no_fault_strikes_after_the_end_of_the_time(tmp_path: Path) -> None:
    run = Run()
    run.on_strike = lambda fault: run.works("rollout-0", after_s=0.3)
    (strike,) = inject(run, tmp_path, [stop(1, 0.2), stop(2)], until=time.time() + 0.1)
    assert run.done == ["1 strikes", "1 is undone"]
    assert strike.until >= strike.at + 0.2, "it lasts as long as it was to"


def test_an_interrupt_undoes_what_lasts_and_notes_it(tmp_path: Path) -> None:
    run = Run()
    made = Injector(run, Journal(tmp_path), run, run, lambda line: None)  # type: ignore[arg-type]

    def faults() -> Iterator[Fault]:
        yield stop(1, 600.0, at_s=0.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run(faults(), NEVER)
    assert run.done == ["1 strikes", "1 is undone"]
    assert journal.read(tmp_path)[0].until > 0


def test_a_full_disk_delays_the_journal_and_loses_nothing_of_it(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    kept = Journal(directory)
    kept.write(Strike(number=1, kind="slow", target="controller", at=1.0))
    directory.mkdir()
    kept.write(Strike(number=2, kind="slow", target="controller", at=2.0))
    assert [strike.number for strike in journal.read(directory)] == [1, 2]


def test_a_journal_takes_a_line_whole_or_not_at_all(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    kept.write(Strike(number=1, kind="slow", target="controller", at=1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kept.path.stat().st_size + 9, limits[1]))  # a disk with nine bytes left
    try:
        kept.write(Strike(number=2, kind="slow", target="controller", at=2.0))
        assert [strike.number for strike in journal.read(tmp_path)] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept.flush()
    assert [strike.number for strike in journal.read(tmp_path)] == [1, 2]


def test_a_fault_is_noted_when_it_strikes_so_that_one_whose_injector_is_killed_is_known(tmp_path: Path) -> None:
    run, noted = Run(), []
    run.on_strike = lambda fault: run.works("rollout-0", after_s=0.3)
    look = run.new

    def new() -> list[events.AnyEvent]:
        noted.append([(strike.number, strike.until > 0) for strike in journal.read(tmp_path)])
        return look()

    run.new = new  # type: ignore[method-assign]
    inject(run, tmp_path, [stop(1, 0.1)])
    assert noted[0] == [(1, False)]
    assert noted[-1] == [(1, True)]


def test_one_that_cannot_be_undone_keeps_no_other_from_being_undone_and_is_told(tmp_path: Path) -> None:
    run, told = Run(), list[str]()
    harm = run.harm

    @contextlib.contextmanager
    def stuck(fault: Fault, strike: Strike) -> Iterator[None]:
        with harm(fault, strike):
            yield
        if fault.number == 1:
            raise PermissionError("the interface stays down")

    run.harm = stuck  # type: ignore[method-assign]
    made = Injector(run, Journal(tmp_path), run, run, told.append)  # type: ignore[arg-type]

    def faults() -> Iterator[Fault]:
        yield stop(1, 600.0, at_s=0.0)
        yield stop(2, 600.0, at_s=0.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run(faults(), NEVER)
    assert run.done[2:] == ["1 is undone", "2 is undone"]
    first, second = journal.read(tmp_path)
    assert (first.until, first.stuck) == (0.0, "the interface stays down")
    assert second.until > 0
    assert "fault 1 stop_rollout could not be undone: the interface stays down" in told
