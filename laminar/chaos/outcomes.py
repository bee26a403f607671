"""What each fault came to: noticed, recovered, what it cost against what it may, and what went on meanwhile."""

from bisect import bisect_right

import msgspec

from laminar.chaos.evidence import Evidence
from laminar.chaos.journal import Strike
from laminar.chaos.kinds import BEYOND, KINDS, OF_FAULTS
from laminar.chaos.signs import Watch, part_of

BEFORE_S = 20.0  # of which the usual rate of generation is taken
AFTERWARDS_S = 5.0  # in which what a fault did may still count as its doing: a process that ends late, a second silence


class Outcome(msgspec.Struct, kw_only=True):
    """Of one fault. Times in seconds after it struck; None = never."""

    number: int
    kind: str
    target: str
    at_s: float
    """After the run's first event."""
    lasted_s: float
    noticed_s: float | None = None
    noticed_by: str = ""
    recovered_s: float | None = None
    cost: str = ""
    """What it may cost."""
    lost_tokens: dict[str, int] = {}
    """Received and dropped, by reason."""
    lost_trajectories: int = 0
    num_redone: int = 0
    """Train steps that were done again, because the trainer was restored meanwhile."""
    num_steps: int = 0
    """That ended from the strike to the recovery."""
    generation: float | None = None
    """Tokens a second from the strike to the recovery, as a share of the rate before."""
    lost_workers: list[str] = []
    skipped: str = ""
    problems: list[str] = []


def outcomes(evidence: Evidence, strikes: list[Strike]) -> list[Outcome]:
    """One per fault. What is lost while several last is held against all that may cost it."""
    watches = [_followed(evidence, strike) for strike in strikes]
    found = [_outcome(evidence, watch) for watch in watches]
    for watch, outcome in zip(watches, found, strict=True):
        if not outcome.skipped:
            outcome.problems = _problems(evidence, watch, outcome, _beside(watch, watches))
    return found


def _followed(evidence: Evidence, strike: Strike) -> Watch:
    watch = Watch(strike)
    if not strike.skipped:
        for event in evidence.tables.events:
            watch.take(event)
    return watch


def window(watch: Watch) -> tuple[float, float]:
    """From the strike to when nothing that happens is its doing any more."""
    end = max(watch.recovered_at, watch.strike.until, watch.noticed_at)
    return watch.strike.at, (end if watch.recovered_at else float("inf")) + AFTERWARDS_S


def _beside(watch: Watch, watches: list[Watch]) -> list[Watch]:
    """All whose doing may be seen in this one's window, itself included."""
    begin, end = window(watch)
    near = [w for w in watches if not w.strike.skipped]
    return [other for other in near if window(other)[0] <= end and window(other)[1] >= begin]


def _outcome(evidence: Evidence, watch: Watch) -> Outcome:
    strike, kind = watch.strike, KINDS[watch.strike.kind]
    begin = evidence.tables.events[0].at if evidence.tables.events else strike.at
    outcome = Outcome(
        number=strike.number,
        kind=strike.kind,
        target=strike.target,
        at_s=strike.at - begin,
        lasted_s=max(0.0, strike.until - strike.at),
        cost=kind.cost,
        skipped=strike.skipped,
    )
    if strike.skipped:
        return outcome
    if watch.noticed_at:
        outcome.noticed_s, outcome.noticed_by = watch.noticed_at - strike.at, watch.noticed_by
    if watch.recovered_at:
        outcome.recovered_s = watch.recovered_at - strike.at
    _weigh(evidence, watch, outcome)
    return outcome


def _weigh(evidence: Evidence, watch: Watch, outcome: Outcome) -> None:
    begin, end = window(watch)
    for dropped in evidence.dropped:
        if begin <= dropped.at <= end and dropped.reason in OF_FAULTS:
            outcome.lost_tokens[dropped.reason] = outcome.lost_tokens.get(dropped.reason, 0) + dropped.tokens
            outcome.lost_trajectories += dropped.trajectories
    until = watch.recovered_at or watch.strike.until
    outcome.num_steps = sum(begin <= step.at <= until for step in evidence.trained)
    branches = {branch for at, branch in evidence.restored if begin <= at <= end}
    outcome.num_redone = sum(step.attempt > 1 and step.branch in branches for step in evidence.trained)
    before = _tokens(evidence, begin - BEFORE_S, begin) / BEFORE_S
    if before > 0 and until > begin and len(evidence.received) > 1 and evidence.received[1][0] < begin - BEFORE_S:
        outcome.generation = _tokens(evidence, begin, until) / (until - begin) / before
    lost = [loss.worker for loss in evidence.lost if begin <= loss.at <= end]
    outcome.lost_workers = list(dict.fromkeys(lost))


def _tokens(evidence: Evidence, begin: float, end: float) -> int:
    """Received in between."""
    at = [moment for moment, _ in evidence.received]
    totals = [total for _, total in evidence.received]
    return totals[bisect_right(at, end) - 1] - totals[bisect_right(at, max(begin, 0.0)) - 1]


def _problems(evidence: Evidence, watch: Watch, outcome: Outcome, beside: list[Watch]) -> list[str]:
    problems = []
    if _must_be_noticed(evidence, watch) and outcome.noticed_s is None:
        problems.append("nothing noticed it")
    if not watch.strike.until:
        problems.append(f"it was not undone: {watch.strike.stuck or 'laminar.chaos was killed'}")
    elif outcome.recovered_s is None:
        problems.append("the run did not recover from it")
    allowed = frozenset[str]().union(*(KINDS[other.strike.kind].allowed for other in beside))
    for reason, num in outcome.lost_tokens.items():
        if reason not in allowed:
            problems.append(f"{num} received tokens were dropped ({reason}); it may cost {outcome.cost}")
    for worker in outcome.lost_workers:
        if not _may_lose(beside, worker):
            problems.append(f"{worker} was lost, which nothing had struck")
    if outcome.num_redone and not _may_lose(beside, "trainer"):
        problems.append(f"{outcome.num_redone} train steps were done again; it may cost {outcome.cost}")
    return problems


def _must_be_noticed(evidence: Evidence, watch: Watch) -> bool:
    """Also what is silent for longer than silence is forgiven."""
    kind, lasted_s = KINDS[watch.strike.kind], watch.strike.until - watch.strike.at
    return kind.must_be_noticed or (kind.outlasts and lasted_s > BEYOND[0] * evidence.settings.reconnect_grace_s)


def _may_lose(beside: list[Watch], worker: str) -> bool:
    """Whether one of the faults may cost it: the trainer as a whole, of others those that were hit."""
    part, strikes = part_of(worker), [other.strike for other in beside]
    return any(part in KINDS[s.kind].may_lose and (part == "trainer" or worker in s.workers) for s in strikes)


def unexplained(evidence: Evidence, strikes: list[Strike]) -> list[str]:
    """Workers that were lost while no fault was at work."""
    spans = [window(_followed(evidence, strike)) for strike in strikes if not strike.skipped]
    return [
        f"{loss.worker} was lost {loss.at - evidence.tables.events[0].at:.1f} s after the start, while no fault was at work: "
        f"{loss.reason.splitlines()[0]}"
        for loss in evidence.lost
        if loss.at < evidence.ended_at and not any(begin <= loss.at <= end for begin, end in spans)
    ]
