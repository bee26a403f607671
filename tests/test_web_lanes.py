"""Lanes: what each replica did, from the events of a core."""

import msgspec
import pytest
from core_world import Driver, settings
from test_core_moves import check, tailing

from laminar.controller.web import lanes as lanes_module
from laminar.controller.web.lanes import Activity, Kept, Lanes, Mark, Move, Train
from laminar.core import actions, events
from laminar.ids import Version, WorkerId


class World(Driver):
    """A core whose lanes are kept as the application does it."""

    def __init__(self, **changes: object) -> None:
        super().__init__(settings(**changes))
        self.lanes = Lanes()

    def send(self, event: events.AnyEvent, after: float = 1.0) -> list[actions.AnyAction]:
        new = super().send(event, after)
        self.lanes.observe(self.core, msgspec.structs.replace(event, seq=self.seq, at=self.at))
        for action in new:
            if isinstance(action, actions.AbortAttempts):
                self.lanes.on_abort(self.core, action)
        return new

    def lane(self, worker: str) -> list[tuple[str, str, float]]:
        """(activity, version, seconds) of what is over."""
        number = self.lanes.lane(WorkerId(worker))
        rows = self.lanes.segments.since(0, 1000)[1]
        return [(Activity(r.activity).name, r.version, r.end - r.start) for r in rows if r.lane == number]

    def now(self, worker: str) -> tuple[str, str]:
        number = self.lanes.lane(WorkerId(worker))
        assert number is not None
        return self.lanes.open[number].activity.name, self.lanes.open[number].version


def test_a_lane_tells_of_pulls_generation_and_draining_in_turn() -> None:
    world = World()
    world.start("r0")
    world.lanes.look(world.core)
    assert world.now("r0") == ("DRAINING", "v0")  # a local batch was admitted at once, nothing more begins
    world.complete_all("r0")
    world.step_done()
    world.ready(Version(1, 0))
    assert world.now("r0")[0] in ("DRAINING", "GENERATING")
    for _ in range(3):
        world.complete_all("r0")
        if world.core.state.replicas[WorkerId("r0")].target:
            world.refreshed("r0")
    kinds = [kind for kind, _, _ in world.lane("r0")]
    assert "SYNCING" in kinds
    assert ("SYNCING", "v1") in [(kind, version) for kind, version, _ in world.lane("r0")]


def test_a_pull_that_nobody_saw_begin_is_as_long_as_the_replica_says() -> None:
    world = World()
    world.start()
    Driver.join(world, "r0")
    world.lanes.open[0] = world.lanes.open[0]._replace(
        activity=Activity.IDLE, version="v0"
    )  # as a look long ago found it
    world.refreshed("r0")
    ((kind, version, seconds),) = [row for row in world.lane("r0") if row[0] == "SYNCING"]
    assert (kind, version, round(seconds, 3)) == ("SYNCING", "v0", 0.1)


def test_a_replica_that_is_lost_is_dead_until_it_is_back_and_one_that_left_is_gone() -> None:
    world = World(restarts_max=1)
    world.start("r0", "r1")
    world.lost("r0")
    world.lanes.look(world.core)
    assert world.now("r0") == ("DEAD", "")
    world.send(events.DrainRequested(worker=WorkerId("r1")))
    world.join("r0", incarnation=2)
    assert world.now("r0")[0] in ("SYNCING", "QUARANTINED", "STARTING")
    assert Mark(world.lanes.marks.since(0, 99)[1][-1].at, "lost", "r0") in world.lanes.marks.since(0, 99)[1]


def test_moves_are_told_once_with_both_ends_and_how_many_go() -> None:
    driver = tailing()
    lanes = Lanes()
    lanes.look(driver.core)
    before = len(driver.actions)
    check(driver)
    for action in driver.actions[before:]:
        if isinstance(action, actions.AbortAttempts):
            lanes.on_abort(driver.core, action)
    source, destination = lanes.lane(WorkerId("r0")), lanes.lane(WorkerId("r1"))
    assert lanes.moves.since(0, 99)[1] == [Move(round(driver.at, 3), source, destination, 1)]  # type: ignore[arg-type]


def test_what_concerns_all_lanes_is_marked() -> None:
    world = World()
    world.start("r0")
    kinds = [(mark.kind, mark.text) for mark in world.lanes.marks.since(0, 99)[1]]
    assert kinds == [("version", "v0")]


def test_rows_are_numbered_for_ever_and_the_oldest_are_dropped() -> None:
    kept: Kept[tuple[int]] = Kept(16)
    for number in range(40):
        kept.add((number,))
        assert kept.end == number + 1
    first, rows = kept.since(0, 3)
    assert first == rows[0][0] > 20
    assert len(rows) == 3
    assert kept.since(38, 99) == (38, [(38,), (39,)])
    assert kept.since(99, 99)[1] == []
    kept.forget(lambda row: row[0] < 30)
    assert kept.since(0, 1)[1][0][0] > first


def test_no_more_lanes_than_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "LANES_MAX", 1)
    world = World()
    world.start("r0", "r1")
    assert world.lanes.names == ["r0"]
    world.complete_all("r1")


def test_the_trainers_steps_are_kept_also_one_that_ends_with_its_trainer() -> None:
    world = World()
    world.start("r0")
    lanes = world.lanes
    world.complete_all("r0")
    began = world.core.state.trainer.running_since
    world.step_done()
    assert lanes.trains.since(0, 9)[1] == [Train(began, world.at, "s1")]
    world.ready(Version(1, 0))
    while not world.core.state.trainer.running:
        if world.core.state.replicas[WorkerId("r0")].target:
            world.refreshed("r0")
        world.complete_all("r0")
    world.lost("trainer-0/0")
    assert [train.text for train in lanes.trains.since(0, 9)[1]] == ["s1", "s2"]
    assert lanes.trains.since(1, 9)[1][0].end == world.at
