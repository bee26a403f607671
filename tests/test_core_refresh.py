"""Refresh policies: transcripts, and the bounds that docs/policies/refresh.md proves."""

from itertools import cycle
from math import floor

import pytest
from core_world import Driver, World, of, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from laminar.core import actions, events, pace, refresh, relays
from laminar.core.pace import Mean, Pace
from laminar.core.records import Replica, ReplicaState, State, TrajectoryState, VersionRecord
from laminar.core.relay_records import Chain, Relay
from laminar.core.story import Story
from laminar.core.turn import Turn
from laminar.ids import TrajectoryId, Version, WorkerId


def fleet(policy: str, *replicas: str, **changes: object) -> Driver:
    small = {"local_batch_groups": 1, "buffer_groups_max": 8, "steps": 9, "progress_timeout_s": 1e6}
    driver = Driver(settings(refresh_policy=policy, **{**small, **changes}))
    driver.start()
    for name in replicas:
        driver.join(name, requests=4)
        driver.refreshed(name)
    return driver


def finish_one_group(driver: Driver, name: str) -> list[actions.AnyAction]:
    here = driver.generating(name)[:2]
    return driver.report(name, {t: 3 for t in here}, finish=here, reward={t: 1.0 for t in here})


def begins_after_an_end(driver: Driver, name: str) -> bool:
    return any(start.worker == name for start in of(finish_one_group(driver, name), actions.StartGroup))


def with_a_second_version(driver: Driver, *names: str) -> None:
    """One step is trained, v1 is ready."""
    for name in names:
        driver.complete_all(name)
    driver.step_done()
    driver.ready(Version(1, 0))


# ---- continuous --------------------------------------------------------------------------------------------


def test_a_replica_admits_beyond_its_local_batch_while_its_version_is_the_newest() -> None:
    driver = Driver(settings(refresh_policy="continuous", local_batch_groups=1, buffer_groups_max=8))
    driver.start("r0")
    assert len(driver.generating("r0")) == 12, "the end of the run, not the local batch, holds it back"


def test_only_a_share_of_the_fleet_drains_at_once() -> None:
    names = ("r0", "r1", "r2", "r3")
    driver = fleet("continuous", *names, draining_share=0.5, buffer_groups_max=16)
    with_a_second_version(driver, "r0", "r1")
    assert len(driver.core.state.draining_to_refresh) == 2
    for name in names:
        assert begins_after_an_end(driver, name) == (name not in driver.core.state.draining_to_refresh)


def test_what_has_begun_to_drain_drains_to_its_end_and_then_the_next_begins() -> None:
    names = ("r0", "r1", "r2", "r3")
    driver = fleet("continuous", *names, draining_share=0.25, buffer_groups_max=16)
    with_a_second_version(driver, "r0")
    (first,) = driver.core.state.draining_to_refresh
    for name in names:
        if name != first:
            driver.complete_all(name)  # others have less to do now
    assert list(driver.core.state.draining_to_refresh) == [first]
    driver.complete_all(first)
    driver.refreshed(first)
    (second,) = driver.core.state.draining_to_refresh
    assert second != first


def test_when_a_draining_replica_is_lost_another_drains_in_its_place() -> None:
    driver = fleet("continuous", "r0", "r1", "r2", draining_share=0.34, buffer_groups_max=16)
    with_a_second_version(driver, "r0")
    (first,) = driver.core.state.draining_to_refresh
    driver.lost(first)
    (second,) = driver.core.state.draining_to_refresh
    assert second != first


@pytest.mark.parametrize("faults", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_no_more_than_the_share_ever_drains_and_each_refreshes_in_its_turn(share: float, faults: float) -> None:
    for seed in range(6):
        chosen = settings(refresh_policy="continuous", draining_share=share, steps=6, progress_timeout_s=1.0)
        world = Watched(chosen, seed, faults, replicas=4)
        world.run()
        assert world.most_draining > 0, "nothing ever drained"


class Watched(World):
    """Checks the bound of `continuous` after every event."""

    most_draining = 0

    def send(self, event: events.AnyEvent, after: float = 0.0) -> list[actions.AnyAction]:
        new = super().send(event, after)
        state = self.core.state
        limit = max(1, int(self.core.settings.draining_share * len(state.replicas)))
        if not state.finished:
            assert len(state.draining_to_refresh) <= limit
        self.most_draining = max(self.most_draining, len(state.draining_to_refresh))
        return new


class Rota:
    """A fixed fleet whose replicas take drawn times to drain and pull; `refresh.review` alone says who drains. Versions become
    readable on host `near` first and on host `far` `lag` versions later."""

    def __init__(self, hosts: list[str], share: float, lag: int) -> None:
        self.at, self.lag = 0, lag
        self.settings = settings(refresh_policy="continuous", draining_share=share, progress_timeout_s=1.0)
        self.state = State(versions=[VersionRecord(version=Version(0, 0), ready=True)])
        for host in ("near", "far"):
            relay = WorkerId(f"relay-{host}")
            self.state.relays[relay] = Relay(id=relay, incarnation=1, host=host, held=[Version(0, 0)])
            self.state.relay_hosts[host] = relay
        self.state.chain = Chain(epoch=1, order=list(self.state.relays), master=WorkerId("relay-near"))
        for number, host in enumerate(hosts):
            worker = WorkerId(f"r{number}")
            self.state.replicas[worker] = Replica(
                id=worker, incarnation=1, host=host, num_requests_max=4, kv_tokens_max=100, version=Version(0, 0),
                state=ReplicaState.GENERATING, num_generating=number % 3,
            )  # fmt: skip
        self.since: dict[WorkerId, int] = {}
        """Superseded replicas that do not drain -> since when."""
        self.before: dict[WorkerId, list[WorkerId]] = {}
        """... -> whose drains went on or began meanwhile."""
        self.waits: list[tuple[WorkerId, int, list[WorkerId]]] = []
        """Replicas that began to drain, after how long, and who drained before."""

    def publish(self) -> None:
        made = [*self.state.versions, VersionRecord(version=Version(len(self.state.versions), 0), ready=True)]
        self.state.versions = made
        for host, num in (("near", len(made)), ("far", max(1, len(made) - self.lag))):
            self.state.relays[WorkerId(f"relay-{host}")].held = [record.version for record in made[:num]]
        self._review()

    def pulled(self, worker: WorkerId) -> None:
        replica = self.state.replicas[worker]
        replica.version = self.state.relays[self.state.relay_hosts[replica.host]].held[-1]
        del self.state.draining_to_refresh[worker]
        self._review()

    def _review(self) -> None:
        """What `fleet` and `versions` leave to the refresh pass."""
        self.state.review_due = True
        turn = Turn(self.state, self.settings, Story())
        before = list(self.state.draining_to_refresh)
        for worker, replica in self.state.replicas.items():
            if worker not in before and worker not in self.since and relays.newer(self.state, replica):
                self.since[worker], self.before[worker] = self.at, list(before)
        refresh.review(turn)
        begun = [worker for worker in self.state.draining_to_refresh if worker not in before]
        for worker in begun:
            self.waits.append((worker, self.at - self.since.pop(worker), self.before.pop(worker)))
            for others in self.before.values():
                others.append(worker)


@given(
    hosts=st.lists(st.sampled_from(["near", "far"]), min_size=1, max_size=8),
    share=st.sampled_from([0.01, 0.3, 0.5, 1.0]),
    lag=st.integers(0, 2),
    publications=st.lists(st.integers(0, 60), min_size=3, max_size=10).map(sorted),
    takes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
)
def test_a_superseded_replica_waits_for_one_drain_of_each_other_and_for_more_only_if_their_relay_is_behind(
    hosts: list[str], share: float, lag: int, publications: list[int], takes: list[int]
) -> None:
    rota, ends = Rota(hosts, share, lag), dict[WorkerId, int]()
    longest, durations = max(takes), cycle(takes)
    while publications or ends:
        first = min(ends, key=ends.__getitem__, default=None)
        if publications and (first is None or publications[0] < ends[first]):
            rota.at = publications.pop(0)
            rota.publish()
        else:
            assert first is not None
            rota.at = ends.pop(first)
            rota.pulled(first)
        ends |= {worker: rota.at + next(durations) for worker in rota.state.draining_to_refresh if worker not in ends}
    slots, others = max(1, int(share * len(hosts))), len(hosts) - 1
    assert rota.waits
    for worker, waited, before in rota.waits:
        turns = {other: before.count(other) for other in before}
        for other, num in turns.items():
            late = rota.state.replicas[other].host == "far"
            assert num <= 1 + lag * late, f"{worker} waited for {turns}"
        assert waited * slots <= others * (1 + lag * ("far" in hosts)) * longest


# ---- rolling -----------------------------------------------------------------------------------------------


@given(
    ages=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    budget=st.floats(0.0, 3.0),
    generation_s=st.floats(0.0, 500.0),
    already=st.integers(0, 12),
)
def test_those_that_go_on_under_old_versions_are_within_the_budget_and_nobody_drains_without_need(
    ages: list[int], budget: float, generation_s: float, already: int
) -> None:
    made = [Version(step, 0) for step in range(5)]
    state = State(versions=[VersionRecord(version=version, ready=True) for version in made])
    relay = WorkerId("relay-0")
    state.relays[relay] = Relay(id=relay, incarnation=1, host="h", held=made)
    state.chain = Chain(epoch=1, order=[relay], master=relay)
    for number, age in enumerate(ages):
        worker = WorkerId(f"r{number}")
        state.replicas[worker] = Replica(
            id=worker, incarnation=1, host="h", num_requests_max=4, kv_tokens_max=100, state=ReplicaState.GENERATING,
            version=Version(4 - age, 0), num_generating=number % 3,
        )  # fmt: skip
    state.draining_to_refresh = {
        w: None for w, r in list(state.replicas.items())[:already] if r.version != Version(4, 0)
    }
    state.pace = Pace(generation_s=Mean(weight=1.0, total=generation_s), step_s=Mean(weight=1.0, total=100.0))
    state.review_due = True
    chosen = settings(refresh_policy="rolling", staleness_budget=budget)
    before = list(state.draining_to_refresh)
    refresh.review(Turn(state, chosen, Story()))
    room = len(ages) * (budget - pace.steps_per_trajectory(state.pace))
    going_on = [age for number, age in enumerate(ages) if age and f"r{number}" not in state.draining_to_refresh]
    assert sum(going_on) <= max(0.0, room) + 1e-9
    if state.draining_to_refresh:
        last = list(state.draining_to_refresh)[-1]
        age = ages[int(last[1:])]
        assert sum(going_on) + age > room - 1e-9, f"{last} could have gone on"
    if any(worker not in state.draining_to_refresh for worker in before):
        assert all(worker in before for worker in state.draining_to_refresh), "those that drain already come first"


def test_rolling_lets_replicas_go_on_under_an_old_version_as_far_as_the_budget_reaches() -> None:
    driver = fleet("rolling", "r0", "r1", "r2", "r3", staleness_budget=0.5, buffer_groups_max=16)
    with_a_second_version(driver, "r0", "r1")
    steps = pace.steps_per_trajectory(driver.core.state.pace)
    assert steps == 0.0, "one step is no pace yet"
    assert len(driver.core.state.draining_to_refresh) == 2, (
        "4 replicas, half a version on average: two may be one behind"
    )


def test_the_pace_is_steps_per_trajectory() -> None:
    seen = Pace()
    for at in (10.0, 20.0, 30.0):
        pace.stepped(seen, at)
    seen.generation_s = Mean(weight=2.0, total=50.0)
    assert pace.steps_per_trajectory(seen) == 2.5


# ---- batch -------------------------------------------------------------------------------------------------


class Timed(World):
    """Notes for every trajectory when the local batch that it is in began, and how far behind that was."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.begun: dict[WorkerId, tuple[float, int]] = {}
        """Replica -> (when its local batch began, steps that its version was behind then)."""
        self.of_trajectory: dict[TrajectoryId, tuple[float, int]] = {}
        self.steps_at: list[float] = []
        self.rows: list[tuple[int, float, int]] = []
        """(s_gen, seconds since its local batch began, steps behind at that time) of every finished trajectory."""

    def send(self, event: events.AnyEvent, after: float = 0.0) -> list[actions.AnyAction]:
        state = self.core.state
        generating = [t for t, r in state.trajectories.items() if r.state == TrajectoryState.GENERATING]
        left = {worker: replica.admit_left for worker, replica in state.replicas.items()}
        new = super().send(event, after)
        state = self.core.state
        if isinstance(event, events.StepFinished):
            self.steps_at.append(self.at)
        for pull in of(new, actions.PullWeights):
            self.begun[pull.worker] = (self.at, state.trainer.step - pull.version.step)
        for worker, replica in state.replicas.items():
            begins = replica.admit_left > left.get(worker, 0) and not isinstance(event, events.ReplicaRefreshed)
            if begins and replica.version is not None:
                self.begun[worker] = (self.at, state.trainer.step - replica.version.step)
        for start in of(new, actions.StartGroup):
            for row in start.starts:
                self.of_trajectory.setdefault(row.trajectory, self.begun[start.worker])
        for t in generating:
            record = state.trajectories.get(t)
            if record and record.finish_version and record.behavior_version and t in self.of_trajectory:
                begun_at, behind = self.of_trajectory.pop(t)
                s_gen = record.finish_version.step - record.behavior_version.step
                self.rows.append((s_gen, self.at - begun_at, behind))
        return new


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    replicas=st.integers(1, 5),
    local=st.integers(1, 4),
    repack=st.booleans(),
    batch=st.integers(1, 3),
)
def test_batch_bounds_inherent_staleness_by_the_length_of_a_local_batch(
    seed: int, replicas: int, local: int, repack: bool, batch: int
) -> None:
    chosen = settings(
        steps=8, local_batch_groups=local, batch_groups=batch, buffer_groups_max=9, repack_interval_s=0.5 * repack
    )
    world = Timed(chosen, seed, replicas=replicas)
    world.run()
    intervals = [b - a for a, b in zip(world.steps_at, world.steps_at[1:], strict=False)]
    shortest, furthest = min(intervals), max(behind for _, _, behind in world.rows)
    assert world.rows
    for s_gen, seconds, _ in world.rows:
        assert s_gen <= furthest + 1 + floor(seconds / shortest + 1e-9)
