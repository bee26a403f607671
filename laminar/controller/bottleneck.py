"""Where a run's bottleneck is, in a sentence for people.

    trainer idle │ rollouts idle │ the limit is
    no           │ no            │ balanced: nobody waits for the other
    no           │ yes           │ the trainer
    yes          │ no            │ rollouts; or rewards, if more trajectories wait for theirs than are generated
    yes          │ yes           │ the two wait for one another: how much may be in flight

Pure: `Facts` in, `Verdict` out. *Idle* is as docs/metrics.md defines it, over the last `num_steps` steps.
"""

import msgspec

IDLE_MAX = 0.15  # less than this is the grain of a step: a batch that is complete a moment after the trainer is ready
STALLED = "stalled"
HOLDS = {
    "buffer_groups_max": "buffer.max_groups holds new groups back",
    "ready_groups_max": "buffer.max_ready_groups holds new groups back",
    "steps": "what is in flight and buffered is enough for the remaining steps",
}
LET_GO = "In the console, held shows what waits; continue or resume lets it go on."


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the verdict rests on. Shares are 0..1; None = not measured yet."""

    finished: str = ""
    ok: bool = True
    stopping: str = ""
    storage_failure: str = ""
    stalled_for_s: float | None = None
    held: list[str] = []
    """Passes that an operator or a breakpoint keeps from deciding, without which the run gets nowhere, in words."""
    num_steps: int = 0
    """Finished steps that the shares are means of."""
    trainer_idle: float | None = None
    rollout_idle: float | None = None
    publication: float = 0.0
    """Share of the time in which the trainer stood still to publish weights or to save a checkpoint."""
    buffer_groups: int = 0
    batch_groups: int = 1
    held_back_by: str = ""
    """As `laminar.core.dispatch.held_back_by`."""
    num_generating: int = 0
    """Trajectories."""
    num_rewarding: int = 0
    num_replicas: int = 0
    num_sick: int = 0
    """Replicas that are suspect, quarantined or dead."""
    trainer_waits_for: str = ""
    """In words; empty = it works."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`limit`: ``over``, ``stopping``, ``disk``, ``held``, ``stalled``, ``starting``, ``trainer``, ``rollouts``, ``rewards``,
    ``both`` or ``none``."""

    limit: str
    headline: str
    """Some words."""
    reason: str
    """A sentence or two with the figures."""


def verdict(facts: Facts) -> Verdict:
    """What limits the run now; first what keeps it from going on at all."""
    if facts.finished:
        return Verdict(limit="over", headline="The run is over" if facts.ok else "The run failed", reason=_end(facts))
    if facts.storage_failure:
        return Verdict(limit="disk", headline="Nothing new begins", reason=_sentence(facts.storage_failure))
    if facts.held:
        text = " ".join(map(_sentence, facts.held))
        return Verdict(limit="held", headline="The run is held", reason=f"{text} {LET_GO}")
    if facts.stalled_for_s is not None:
        text = f"Nothing useful has happened for {facts.stalled_for_s:.0f} s. {_waits(facts)}".strip()
        return Verdict(limit=STALLED, headline="The run stands still", reason=text)
    if facts.stopping:
        return Verdict(limit="stopping", headline="The run is stopping", reason=_sentence(facts.stopping))
    if facts.trainer_idle is None or facts.rollout_idle is None:
        return Verdict(limit="starting", headline="No step is finished yet", reason=_waits(facts))
    return _of_shares(facts, facts.trainer_idle, facts.rollout_idle)


def _of_shares(facts: Facts, trainer_idle: float, rollout_idle: float) -> Verdict:
    busy = (
        f"Over the last {facts.num_steps} steps the trainer was idle {trainer_idle:.0%} and replicas {rollout_idle:.0%} "
        "of the time"
        if facts.num_steps > 1
        else f"In the last step the trainer was idle {trainer_idle:.0%} and replicas {rollout_idle:.0%} of the time"
    )
    if trainer_idle <= IDLE_MAX and rollout_idle <= IDLE_MAX:
        return Verdict(limit="none", headline="Rollouts and trainer keep pace", reason=f"{busy}.{_publication(facts)}")
    if trainer_idle <= IDLE_MAX:
        why = f": {HOLDS[facts.held_back_by]}" if facts.held_back_by else ""
        return Verdict(
            limit="trainer", headline="The trainer is the limit", reason=f"{busy}{why}.{_publication(facts)}"
        )
    if rollout_idle <= IDLE_MAX:
        return _of_rollouts(facts, busy)
    why = f"; {HOLDS[facts.held_back_by]}" if facts.held_back_by else ""
    return Verdict(
        limit="both",
        headline="Trainer and rollouts wait for one another",
        reason=f"{busy}: too little is in flight to bridge the slowest answers{why}.{_sick(facts)}",
    )


def _of_rollouts(facts: Facts, busy: str) -> Verdict:
    if facts.num_rewarding > facts.num_generating:
        text = (
            f"{busy}. {facts.num_rewarding} trajectories wait for their reward, {facts.num_generating} are generated."
        )
        return Verdict(limit="rewards", headline="Rewards are the limit", reason=text)
    have = f" {facts.buffer_groups} of the {facts.batch_groups} groups of a batch are buffered."
    return Verdict(limit="rollouts", headline="Rollouts are the limit", reason=f"{busy}.{have}{_sick(facts)}")


def _publication(facts: Facts) -> str:
    if facts.publication <= IDLE_MAX:
        return ""
    return f" It stood still {facts.publication:.0%} of the time to publish weights and to save checkpoints."


def _sick(facts: Facts) -> str:
    if not facts.num_sick:
        return ""
    return f" {facts.num_sick} of {facts.num_replicas} replicas are suspect, quarantined or dead."


def _waits(facts: Facts) -> str:
    return f"The trainer waits for {facts.trainer_waits_for}." if facts.trainer_waits_for else ""


def _end(facts: Facts) -> str:
    return _sentence(facts.finished)


def _sentence(text: str) -> str:
    return _capital(text.rstrip(".")) + "."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
