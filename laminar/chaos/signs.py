"""How a fault shows in the run's own event log: when it was noticed, and when what it hit worked again.

    strike ──► noticed (a channel broke, a pull was refused, the disk is full) ──► back (joined or reconnected) ──► works

What was killed has to join again before its work counts; what was only held up has to work after it was let go. Work before a fault
that must be noticed was noticed is what was under way.
"""

from laminar.chaos.journal import Strike
from laminar.chaos.kinds import KINDS
from laminar.core import events

JOINS = (events.ReplicaJoined, events.RelayJoined, events.TrainerRankReady)
_WORK: dict[str, tuple[type, ...]] = {
    "rollout": (events.ReplicaReported, events.ReplicaRefreshed),
    "relay": (events.VersionReady, events.VersionHeld),
    "trainer": (events.StepFinished,),
}


def part_of(worker: str) -> str:
    """``rollout``, ``relay`` or ``trainer``, by the name that the controller gives."""
    return worker.partition("-")[0]


class Watch:
    """Follows one fault through the events, in their order."""

    def __init__(self, strike: Strike) -> None:
        self.strike, self.kind = strike, KINDS[strike.kind]
        self.noticed_at = 0.0
        """0 = it was not."""
        self.noticed_by = ""
        self.recovered_at = 0.0
        """0 = it has not."""
        self._hit = set(strike.workers)
        self._away: set[str] = set()
        self._back: set[str] = set()
        self._must_return = set(self._hit) if self.kind.kills else set()
        self._controller_is_back = strike.kind != "kill_controller"

    def take(self, event: events.AnyEvent) -> None:
        """The next event. `strike.until` has to be known by the time at which it is over."""
        if event.at < self.strike.at or self.recovered_at:
            return
        self._follow(event)
        if reason := self._sign(event):
            self.noticed_at = self.noticed_at or event.at
            self.noticed_by = self.noticed_by or reason
        over = 0 < self.strike.until <= event.at and (self.noticed_at or not self.kind.must_be_noticed)
        if over and self._controller_is_back and not self._away and self._must_return <= self._back:
            self.recovered_at = event.at if self._works(event) else 0.0

    def _follow(self, event: events.AnyEvent) -> None:
        worker = getattr(event, "worker", None)
        self._controller_is_back |= isinstance(event, events.ControllerRestarted)
        if worker not in self._hit:
            return
        if isinstance(event, events.WorkerDisconnected | events.WorkerLost):
            self._away.add(worker)
        elif isinstance(event, JOINS):
            self._back.add(worker)
            self._away.discard(worker)
        elif isinstance(event, events.WorkerReturned):
            self._away.discard(worker)

    def _sign(self, event: events.AnyEvent) -> str:
        """What tells of the fault; empty = the event does not."""
        role = self.kind.role
        if role == "disk":
            return "the log" if isinstance(event, events.StorageFailed) else ""
        if role == "version":
            return self._sign_of_corruption(event)
        if isinstance(event, events.ControllerRestarted):
            return "the controller is back"
        if isinstance(event, events.LinkBroken) and event.peer in self._hit and role != "reward":
            return f"its neighbour {event.worker}"
        if isinstance(event, events.ReplicaReported) and role == "reward" and event.worker in self._hit:
            return next((failed.reason for failed in event.failed if failed.kind == "infra"), "")
        if isinstance(event, events.WorkerDisconnected | events.WorkerReturned) and event.worker in self._hit:
            return "its channel"
        if isinstance(event, events.WorkerLost) and event.worker in self._hit:
            return "its process"
        return ""

    def _sign_of_corruption(self, event: events.AnyEvent) -> str:
        version = str(self.strike.facts.get("version"))
        if (
            isinstance(event, events.ReplicaRefreshFailed)
            and str(event.version) == version
            and "digest" in event.reason
        ):
            return f"the digest, in {event.worker}"
        if isinstance(event, events.LinkBroken) and self.strike.target in (event.worker, event.peer):
            return f"the digest, in {event.worker}"
        if isinstance(event, events.WorkerLost) and "canary" in event.reason:
            return f"the canary, in {event.worker}"
        return ""

    def _works(self, event: events.AnyEvent) -> bool:
        """Whether what was hit does what it is for."""
        role = self.kind.role
        if role == "disk":
            return isinstance(event, events.StorageRecovered if self.noticed_at else events.StepFinished)
        if role == "version":
            other = isinstance(event, events.ReplicaRefreshed) and str(event.version) != self.strike.facts.get(
                "version"
            )
            return other or not self.strike.facts
        if not self._hit:
            return isinstance(event, events.StepFinished)
        if role == "reward":
            return isinstance(event, events.ReplicaReported) and event.worker in self._hit and bool(event.rewarded)
        return any(
            isinstance(event, _WORK[part_of(worker)]) and getattr(event, "worker", worker) in (worker, None)
            for worker in self._hit
        )
