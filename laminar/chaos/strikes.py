"""From a fault of the plan to what is done: finds the processes, sockets and slots that it strikes."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from laminar.chaos import harm
from laminar.chaos.harm import Impossible
from laminar.chaos.journal import Strike
from laminar.chaos.plan import Fault
from laminar.chaos.roster import Roster
from laminar.chaos.targets import Targets
from laminar.chaos.trial import Trial
from laminar.workers.relay import paths

if TYPE_CHECKING:
    from laminar.workers.relay.client import RelayClient
    from laminar.workers.relay.protocol import SlotStatus

ANSWER_S = 5.0
FRESH_S = 20.0  # for the next version to be published
LOOK_S = 0.002  # a replica may pull it at once


class Striker:
    """`quota_bytes`: most that is written to fill a disk; `seed`: of the bytes that are flipped."""

    def __init__(self, trial: Trial, targets: Targets, roster: Roster, quota_bytes: int, seed: int) -> None:
        self._trial, self._targets, self._roster = trial, targets, roster
        self._quota_bytes, self._seed = quota_bytes, seed
        self._of_their_own: dict[str, Callable[[Fault, Strike], AbstractContextManager[None]]] = {
            "kill_controller": self._kill_controller,
            "slow": self._slow,
            "cut": self._cut,
            "drop_frames": self._drop_frames,
            "fill_disk": self._fill_disk,
            "corrupt": self._corrupt,
            "partition": self._partition,
        }

    def harm(self, fault: Fault, strike: Strike) -> AbstractContextManager[None]:
        """What the fault does, on entry; its undoing, on exit. Notes in `strike` who is hit. Raises Impossible."""
        if fault.kind in self._of_their_own:
            return self._of_their_own[fault.kind](fault, strike)
        found = self._found(fault, strike)
        return harm.killed(found) if fault.kind.startswith("kill_") else harm.stopped(found)

    def _found(self, fault: Fault, strike: Strike) -> list[psutil.Process]:
        """The processes of a target."""
        if fault.target == "controller":
            return [self._targets.controller()]
        if fault.kind == "kill_reward":
            strike.workers = [fault.target]
            return self._targets.rewards(fault.target)
        if fault.kind.endswith(("_rank", "_trainer")):
            strike.workers = list(self._roster.ranks)
        else:
            strike.workers = [fault.target]
        names = self._roster.ranks if fault.target == "trainer" else [fault.target]
        return [self._targets.worker(name) for name in names]

    def _slow(self, fault: Fault, strike: Strike) -> AbstractContextManager[None]:
        return harm.slowed(self._found(fault, strike))

    @contextlib.contextmanager
    def _kill_controller(self, fault: Fault, strike: Strike) -> Iterator[None]:
        self._trial.kill_controller()
        try:
            yield
        finally:
            self._trial.resume()

    def _cut(self, fault: Fault, strike: Strike) -> AbstractContextManager[None]:
        (process,) = self._found(fault, strike)
        return harm.cut(process, self._targets.port())

    def _drop_frames(self, fault: Fault, strike: Strike) -> AbstractContextManager[None]:
        (process,) = self._found(fault, strike)
        return harm.frames_dropped(process, self._targets.controller(), self._targets.port())

    def _fill_disk(self, fault: Fault, strike: Strike) -> AbstractContextManager[None]:
        return harm.filled(self._trial.run.path, self._quota_bytes)

    def _partition(self, fault: Fault, strike: Strike) -> AbstractContextManager[None]:
        found = self._targets.on_host(fault.target)
        strike.workers = self._targets.names(found)
        return harm.unplugged(found[0])

    @contextlib.contextmanager
    def _corrupt(self, fault: Fault, strike: Strike) -> Iterator[None]:
        """Bytes of the next version that the relay has whole, before anybody reads it."""
        from laminar.workers.relay.client import RelayClient, RelayError  # needs what workers need

        directory = _directory_of(self._targets.worker(fault.target).pid)
        try:
            with RelayClient(directory, timeout_s=ANSWER_S) as client:
                slot = _fresh(client)
        except RelayError as error:
            raise Impossible(f"{fault.target} does not answer: {error}") from error
        harm.flip(directory / slot.file, slot.num_bytes, self._seed + fault.number)
        strike.at = time.time()
        strike.facts = {"version": str(slot.version), "digest": slot.digest, "file": slot.file}
        yield


def _directory_of(pid: int) -> Path:
    """The shared memory of a relay."""
    for directory in paths.SHM_ROOT.glob(f"{paths.PREFIX}*"):
        owner = paths.read_owner(directory)
        if owner is not None and owner.pid == pid:
            return directory
    raise Impossible(f"the relay with pid {pid} has no directory in {paths.SHM_ROOT}")


def _fresh(client: "RelayClient") -> "SlotStatus":
    """The next version that becomes ready and that nobody reads yet."""
    known = {slot.version for slot in client.status().slots if slot.state == "ready"}
    deadline = time.monotonic() + FRESH_S
    while time.monotonic() < deadline:
        for slot in client.status().slots:
            if slot.state == "ready" and slot.version not in known and not slot.num_leases:
                return slot
        time.sleep(LOOK_S)
    raise Impossible(f"no version was published within {FRESH_S:g} s")
