"""Faults into a run, one after another or at their times; each is undone, watched until the run has recovered, and noted.

Invariants:
* Whatever ends the injection, everything that can be undone is: nothing stays stopped, full or unplugged.
* A drawn fault waits until the run has recovered from the one before, for `PATIENCE_S` at most.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil

from laminar.chaos.harm import Impossible
from laminar.chaos.journal import Journal, Strike
from laminar.chaos.kinds import KINDS
from laminar.chaos.plan import Fault
from laminar.chaos.signs import Watch
from laminar.chaos.strikes import Striker
from laminar.chaos.trial import Tail, Trial
from laminar.core import events

LOOK_S = 0.1
PATIENCE_S = 240.0  # a trainer that starts again on a busy machine takes a minute; what takes four is not coming
START_S = 600.0  # until the first train step; a large model loads for minutes

CANNOT = (Impossible, psutil.Error, OSError)
"""What keeps a fault from striking, or from being undone."""


class _Active(NamedTuple):
    """A fault that lasts."""

    until: float
    strike: Strike
    undo: contextlib.ExitStack


class Injector:
    """`say(line)` is for people."""

    def __init__(
        self, trial: Trial, journal: Journal, striker: Striker, tail: Tail, say: Callable[[str], None]
    ) -> None:
        self._trial, self._journal, self._striker = trial, journal, striker
        self._tail, self._say = tail, say
        self._active: list[_Active] = []
        self._watches: list[Watch] = []
        self._struck_at = 0.0
        self.num_struck = 0

    # ---- waiting -------------------------------------------------------------------------------------------

    def await_first_step(self) -> bool:
        """Whether the run has made its first train step."""
        deadline = time.time() + START_S
        while time.time() < deadline and not self._trial.is_over:
            if any(isinstance(event, events.StepFinished) for event in self._tail.new()):
                return True
            time.sleep(LOOK_S)
        return False

    def run(self, faults: Iterator[Fault], until: float) -> None:
        """Inject until the time (seconds since the epoch) or the plan is over, or the run is."""
        began = time.time()
        try:
            for fault in faults:
                if not self._await_turn(fault, began, until):
                    break
                self._strike(fault)
            self._await_calm(time.time() + PATIENCE_S)
        finally:
            for active in list(self._active):
                self._undo(active)
            self._journal.flush()
            if unwritten := len(self._journal.unwritten):
                self._say(f"{self._journal.path} cannot be written: {unwritten} of its lines are lost")

    def _await_turn(self, fault: Fault, began: float, until: float) -> bool:
        """Whether the fault's time has come before the end."""
        if fault.at_s is not None:
            return self._await(lambda: time.time() >= began + (fault.at_s or 0.0), until)
        patience = self._struck_at + PATIENCE_S
        if not self._await(lambda: self._is_calm() or time.time() > patience, until):
            return False
        due = time.time() + fault.gap_s
        return self._await(lambda: time.time() >= due, until)

    def _await_calm(self, limit: float) -> None:
        self._await(self._is_calm, limit)

    def _is_calm(self) -> bool:
        return not self._active and all(watch.recovered_at for watch in self._watches)

    def _await(self, condition: Callable[[], bool], until: float) -> bool:
        """Live on until the condition holds; False if the time, or the run, is over first."""
        while not condition():
            if time.time() > until or self._is_over():
                return False
            self._look()
            time.sleep(LOOK_S)
        return time.time() <= until and not self._is_over()

    def _is_over(self) -> bool:
        away = any(active.strike.kind == "kill_controller" for active in self._active)
        return self._trial.is_over and not away

    def _look(self) -> None:
        for active in list(self._active):
            if time.time() >= active.until:
                self._undo(active)
        for event in self._tail.new():
            for watch in self._watches:
                self._tell(watch, event)
        self._watches = [watch for watch in self._watches if not self._is_settled(watch)]

    def _tell(self, watch: Watch, event: events.AnyEvent) -> None:
        noticed, recovered = watch.noticed_at, watch.recovered_at
        watch.take(event)
        name = f"fault {watch.strike.number} {watch.strike.kind} {watch.strike.target}"
        if watch.noticed_at and not noticed:
            self._say(f"{name}: noticed by {watch.noticed_by} after {watch.noticed_at - watch.strike.at:.1f} s")
        if watch.recovered_at and not recovered:
            self._say(f"{name}: recovered after {watch.recovered_at - watch.strike.at:.1f} s")

    def _is_settled(self, watch: Watch) -> bool:
        if watch.recovered_at or time.time() < watch.strike.at + PATIENCE_S:
            return bool(watch.recovered_at)
        self._say(f"fault {watch.strike.number} {watch.strike.kind}: not recovered within {PATIENCE_S:g} s")
        return True

    # ---- striking ------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        kind = KINDS[fault.kind]
        undo = contextlib.ExitStack()
        strike = Strike(number=fault.number, kind=fault.kind, target=fault.target, at=time.time())
        lasting = f" for {fault.for_s:g} s" if kind.lasts else ""
        self._say(f"fault {fault.number} {fault.kind} {fault.target}{lasting}")
        try:
            undo.enter_context(self._striker.harm(fault, strike))
        except CANNOT as error:
            strike.skipped = str(error) or type(error).__name__
            self._say(f"fault {fault.number} {fault.kind} {fault.target}: skipped: {strike.skipped}")
            self._journal.write(strike)
            return
        self._active.append(_Active(strike.at + fault.for_s, strike, undo))
        self._struck_at = time.time()
        self.num_struck += 1
        self._watches.append(Watch(strike))
        self._journal.write(strike)
        self._look()

    def _undo(self, active: _Active) -> None:
        self._active.remove(active)
        strike = active.strike
        try:
            active.undo.close()
            strike.until = time.time()
        except CANNOT as error:
            strike.stuck = str(error) or type(error).__name__
            self._say(f"fault {strike.number} {strike.kind} could not be undone: {strike.stuck}")
        self._journal.write(strike)
