"""What the page shows of the state of now, as plain data. Pure: read from the core, changed by nobody.

Each section is looked at whole in one turn of the event loop, so its numbers belong together.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from laminar.controller import bottleneck, status
from laminar.controller.web.lanes import Activity, Lanes
from laminar.core import dispatch, health, holds, ledger, versions, waits
from laminar.core.engine import Core
from laminar.core.records import Group, State
from laminar.core.turn import Turn
from laminar.ids import GroupId, WorkerId, format_id
from laminar.wire import RelayReport

AGE_EDGES_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Of the histogram of ages: below the first, between two, from the last on."""
GROUPS_LOOKED_AT = 1024  # of a buffer, in one turn of the event loop: about a millisecond
VERDICT_STEPS = 10
SAMPLES = 24  # groups on the page to click on
SICK = (Activity.SUSPECT, Activity.QUARANTINED, Activity.DEAD)


def progress(core: Core, eta_s: float, tokens_per_s: float) -> dict[str, Any]:
    """How far the run is, and at which step the trainer works (0 = none)."""
    state, trainer = core.state, core.state.trainer
    return {
        "step": trainer.step,
        "steps": core.settings.steps,
        "finished": state.finished,
        "eta_s": eta_s,
        "tokens_per_s": tokens_per_s,
        "trainer": {"step": trainer.running, "since": trainer.running_since},
        "new_groups": status.new_groups(core),
        "evaluations": [
            [e.name, str(e.version), e.accuracy, e.score, e.num_prompts] for e in state.evaluations if e.num_prompts
        ],
    }


def stalled_for_s(state: State) -> float | None:
    """For how long nothing useful has happened; None = something has."""
    return state.at - state.stall.since if state.stall.told else None


def facts(core: Core, history: Sequence[Mapping[str, float]]) -> bottleneck.Facts:
    """What the verdict rests on. `history`: metrics of the steps so far; the first one's window contains the start."""
    state, turn = core.state, Turn(core.state, core.settings, core.story)
    steps = list(history[1:][-VERDICT_STEPS:])
    waiting = next(waits.of_trainer(turn), None) if not (state.trainer.running or state.finished) else None
    replicas = state.replicas.values()
    return bottleneck.Facts(
        finished=state.finished,
        ok=state.ok,
        stopping=state.stopping,
        storage_failure=state.storage_failure,
        stalled_for_s=stalled_for_s(state),
        held=[holds.why(state, name) for name in holds.STANDING_STILL if name in state.holds],
        num_steps=len(steps),
        trainer_idle=_mean(steps, "perf/trainer_idle_ratio"),
        rollout_idle=_mean(steps, "perf/rollout_idle_ratio"),
        publication=_publication(steps),
        buffer_groups=len(state.buffer),
        batch_groups=core.settings.batch_groups,
        held_back_by=dispatch.held_back_by(turn),
        num_generating=sum(replica.num_generating for replica in replicas),
        num_rewarding=sum(len(replica.attempts) - replica.num_generating for replica in replicas),
        num_replicas=len(state.replicas),
        num_sick=sum(not health.is_healthy(state, replica) for replica in replicas),
        trainer_waits_for=waiting.what if waiting else "",
    )


def verdict_of(core: Core, history: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Where the bottleneck is."""
    return dict(msgspec.to_builtins(bottleneck.verdict(facts(core, history))))


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Over time."""
    wall_s = sum(step["timing/wall_s"] for step in steps)
    return sum(step[name] * step["timing/wall_s"] for step in steps) / wall_s if wall_s else None


def _publication(steps: Sequence[Mapping[str, float]]) -> float:
    stood_s = sum(step["perf/publication_stall_s"] + step.get("perf/checkpoint_stall_s", 0.0) for step in steps)
    return stood_s / (sum(step["timing/wall_s"] for step in steps) or 1.0)


# ---- buffer and books --------------------------------------------------------------------------------------


class Ages:
    """Histograms of the buffer, made in slices."""

    def __init__(self, core: Core) -> None:
        self._state, self._at = core.state, core.state.at
        self._trainer = Turn(core.state, core.settings, core.story).trainer_version
        self.seconds = [0] * (len(AGE_EDGES_S) + 1)
        self.steps: dict[int, int] = {}
        """Trainer steps behind, if they were sampled now -> groups."""

    def parts(self) -> Iterator[list[GroupId]]:
        """The buffer as it was, in slices to `count`."""
        buffered = list(self._state.buffer)
        yield from (buffered[at : at + GROUPS_LOOKED_AT] for at in range(0, len(buffered), GROUPS_LOOKED_AT))

    def count(self, groups: list[GroupId]) -> None:
        """Take these in, as far as they are still there."""
        for group_id in groups:
            if group_id in self._state.groups:
                self._count(self._state.groups[group_id])

    def _count(self, group: Group) -> None:
        self.seconds[bisect_right(AGE_EDGES_S, max(0.0, self._at - group.completed_at))] += 1
        if group.version is not None:
            behind = versions.staleness(self._state.branches, self._trainer, group.version)
            self.steps[behind] = self.steps.get(behind, 0) + 1


def buffer(core: Core, ages: Ages) -> dict[str, Any]:
    """Its depth, its limits and how old it is."""
    state, settings = core.state, core.settings
    return {
        "groups": len(state.buffer),
        "batch_groups": settings.batch_groups,
        "outstanding": dispatch.num_outstanding(state),
        "max_groups": settings.buffer_groups_max,
        "max_ready_groups": settings.ready_groups_max,
        "queued_groups": len(state.requeue),
        "ages_s": ages.seconds,
        "ages_steps": sorted(ages.steps.items()),
    }


def books(core: Core) -> dict[str, Any]:
    """The ledger, as in `/v1/status`, and whether it is closed."""
    rows: dict[str, Any] = msgspec.to_builtins(core.state.ledger)
    for name, row in rows.items():
        row["closed"] = ledger.is_closed(getattr(core.state.ledger, name))
    return rows


def relays(core: Core, reports: Mapping[WorkerId, RelayReport]) -> dict[str, Any]:
    """The chain, as in `/v1/status`, and the newest version that can be pulled."""
    newest = versions.newest(core.state)
    known = status.relays(core.state, reports)
    return {**known, "newest": str(newest.version) if newest else None}


def repack(state: State) -> dict[str, Any]:
    """What repacking has done so far."""
    record = state.repack
    return {
        "checks": record.num_checks,
        "emptied": record.num_released,
        "moves": record.num_moves,
        "moved_tokens": record.num_moved_tokens,
    }


# ---- replicas ----------------------------------------------------------------------------------------------


class Fleet:
    """The columns of the table of replicas, by lane, made in slices."""

    def __init__(self, core: Core, lanes: Lanes) -> None:
        self._core, self._lanes = core, lanes
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("generating", "rewarding", "kv", "busy", "restarts", "since", "activity", "version")
        }
        self.reasons: dict[str, str] = {}
        """Lane -> why it is sick, or taken out."""
        self.fixed: list[list[Any]] = []
        """Of each lane what seldom changes: name, host, KV capacity, requests at once."""

    def look(self, begin: int, end: int, busy: Mapping[WorkerId, float]) -> None:
        """At some lanes; in order."""
        for lane, worker in enumerate(self._lanes.names[begin:end], begin):
            self._add(lane, worker, busy)

    def _add(self, lane: int, worker: WorkerId, busy: Mapping[WorkerId, float]) -> None:
        state, columns, present = self._core.state, self.columns, self._lanes.open[lane]
        replica, restart = state.replicas.get(worker), state.restarts.get(worker)
        columns["generating"].append(replica.num_generating if replica else 0)
        columns["rewarding"].append(len(replica.attempts) - replica.num_generating if replica else 0)
        columns["kv"].append(replica.kv_tokens if replica else 0)
        columns["busy"].append(round(busy.get(worker, 0.0), 2))
        columns["restarts"].append(restart.num if restart else 0)
        columns["since"].append(present.since)
        columns["activity"].append(int(present.activity))
        columns["version"].append(present.version)
        limits = [replica.kv_tokens_max, replica.num_requests_max] if replica else [0, 0]
        self.fixed.append([worker, replica.host if replica else "", *limits])
        if replica is not None and (present.activity in SICK or replica.draining):
            turn = Turn(state, self._core.settings, self._core.story)
            self.reasons[str(lane)] = health.status(turn, replica).reason


def samples(state: State) -> list[list[Any]]:
    """Groups that were completed last: id, step that takes them (0 = buffered), version, when, mean length, rewards."""
    newest: list[GroupId] = list(reversed(state.buffer))[:SAMPLES]
    for step in sorted(state.steps, reverse=True)[:2]:
        newest += state.steps[step].groups[-SAMPLES:]
    found = sorted((state.groups[g] for g in newest if g in state.groups), key=lambda g: -g.completed_at)
    return [_sample(state, group) for group in found[:SAMPLES]]


def _sample(state: State, group: Group) -> list[Any]:
    members = [state.trajectories[t] for t in group.trajectories if t in state.trajectories]
    lengths = [member.num_tokens for member in members]
    rewards = [round(member.reward, 4) if member.timings.rewarded else None for member in members]
    version = str(group.version) if group.version is not None else ""
    mean = round(sum(lengths) / max(1, len(lengths)), 1)
    return [f"g{format_id(group.id)}", group.step, version, round(group.completed_at, 3), mean, rewards]
