"""The story: what happened to whom, and because of which event."""

from core_world import Driver, settings

from laminar.core import story
from laminar.ids import GroupId, TrajectoryId, WorkerId


def started() -> Driver:
    driver = Driver(settings())
    driver.start("r0")
    return driver


def test_a_row_names_the_event_that_led_to_it():
    row = next(row for row in started().core.story.of("r0") if row.text.startswith("2 siblings started"))
    assert row.because == "ReplicaRefreshed of r0"


def test_a_trajectory_has_the_row_of_its_start():
    driver = started()
    group, trajectory = next(iter(driver.core.state.groups.values())), driver.generating("r0")[0]
    [of_trajectory] = driver.core.story.of(story.trajectory(TrajectoryId(trajectory)))
    assert of_trajectory in driver.core.story.of(story.group(GroupId(group.id)))
    assert of_trajectory in driver.core.story.of(story.worker(WorkerId("r0")))


def test_the_latest_rows_are_those_of_all_subjects_oldest_first():
    driver = started()
    latest = driver.core.story.latest(3)
    assert len(latest) == 3
    assert [row.cause for row in latest] == sorted(row.cause for row in latest)
    assert latest[-1] == driver.core.story.latest(1)[0]
    assert len(driver.core.story.latest(1000)) < 1000
