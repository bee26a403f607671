"""max_staleness against its page, docs/policies/staleness.md."""

import pytest
from core_world import Driver, World, of, settings

from laminar.core import actions, versions
from laminar.ids import Version

VARIANTS = (
    {"steps": 6, "buffer_groups_max": 16, "local_batch_groups": 3},
    {"steps": 6, "buffer_groups_max": 16, "refresh_policy": "continuous", "repack_interval_s": 0.3},
    {"steps": 5, "buffer_groups_max": 12, "custom_sampler": True, "group_versions": "mixed"},
)


class BoundedWorld(World):
    """Checks every batch when it starts to train."""

    worst = 0

    def _on_StartTrainStep(self, action: actions.StartTrainStep) -> None:
        state = self.core.state
        trainer = Version(state.trainer.step, max(0, state.trainer.branch))
        bound = self.core.settings.max_staleness
        for row in action.rows:
            staleness = versions.staleness(state.branches, trainer, row.behavior_version)
            assert bound is not None
            assert staleness <= bound
            self.worst = max(self.worst, staleness)
        super()._on_StartTrainStep(action)


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_no_batch_is_ever_staler_than_the_bound_and_every_run_ends(bound: int, on_stale: str) -> None:
    worst = 0
    for seed in range(12):
        for variant in VARIANTS:
            for faults in (0.0, 0.1):
                world = BoundedWorld(
                    settings(max_staleness=bound, on_stale=on_stale, **variant), seed, faults, replicas=4
                )
                world.run()
                worst = max(worst, world.worst)
    assert worst == bound, "a bound that is never reached holds back too much"


def test_without_drops_a_bound_loses_nothing() -> None:
    world = BoundedWorld(settings(max_staleness=1, on_stale="wait", steps=8, buffer_groups_max=16), seed=3)
    world.run()
    assert world.core.state.ledger.trajectories.dropped == {}


def test_a_step_waits_for_the_group_that_it_would_push_past_the_bound() -> None:
    driver = Driver(settings(max_staleness=0, on_stale="wait", local_batch_groups=2, buffer_groups_max=8))
    driver.start("r0", "r1")
    late = driver.generating("r1") or driver.generating("r0")[2:]
    assert len(of(driver.actions, actions.StartGroup)) == 2, "a third group of v0 could not be trained on-policy"
    early = [t for t in driver.generating("r0") if t not in late]
    driver.report("r0", {t: 2 for t in early}, finish=early, reward={t: 1.0 for t in early})
    assert not driver.all(actions.StartTrainStep)


def test_groups_too_old_are_dropped_and_their_room_is_used_again() -> None:
    driver = Driver(settings(max_staleness=0, on_stale="drop", local_batch_groups=4, buffer_groups_max=4, steps=5))
    driver.start("r0")
    driver.complete_all("r0")
    before = len(of(driver.actions, actions.StartGroup))
    driver.step_done()
    assert driver.core.state.ledger.trajectories.dropped == {"stale": 4}
    driver.ready(Version(1, 0))
    driver.refreshed("r0")
    assert len(of(driver.actions, actions.StartGroup)) > before


def test_weights_that_cannot_be_published_within_the_bound_end_the_run() -> None:
    driver = Driver(settings(max_staleness=0, on_stale="wait"))
    driver.start("r0")
    driver.complete_all("r0")
    driver.step_done()
    driver.unpublishable(Version(1, 0), "no slot")
    assert "max_staleness" in driver.core.state.stopping


def apart(**changes) -> Driver:
    """r0 generates under v1, r1 under v0."""
    driver = Driver(settings(**({"local_batch_groups": 2, "buffer_groups_max": 16, "steps": 9} | changes)))
    driver.start("r0", "r1")
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(Version(1, 0))
    driver.complete_all("r0")
    driver.refreshed("r0")
    assert [r.version for r in driver.core.state.replicas.values()] == [Version(1, 0), Version(0, 0)]
    assert driver.generating("r0")
    assert driver.generating("r1")
    return driver


def test_a_group_that_starts_again_anyway_is_not_scored_first() -> None:
    driver = apart()
    first = driver.generating("r0")[0]
    driver.report("r0", {first: 4}, finish=[first])
    driver.dropped(Version(1, 0))
    starts = [start for action in of(driver.lost("r0"), actions.StartGroup) for start in action.starts]
    assert first in [start.trajectory for start in starts]
    assert not [start for start in starts if start.score_only]
