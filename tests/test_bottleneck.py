"""Where a run's bottleneck is, from its figures."""

import pytest

from laminar.controller.bottleneck import IDLE_MAX, Facts, Verdict, verdict

BUSY, IDLE = IDLE_MAX / 2, 0.6


def told(**facts: object) -> Verdict:
    return verdict(Facts(num_steps=10, batch_groups=32, num_replicas=4, **facts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trainer_idle", "rollout_idle", "limit"),
    [(BUSY, BUSY, "none"), (BUSY, IDLE, "trainer"), (IDLE, BUSY, "rollouts"), (IDLE, IDLE, "both")],
)
def test_who_is_idle_says_who_is_the_limit(trainer_idle: float, rollout_idle: float, limit: str) -> None:
    found = told(trainer_idle=trainer_idle, rollout_idle=rollout_idle)
    assert found.limit == limit
    assert f"idle {trainer_idle:.0%} and replicas {rollout_idle:.0%}" in found.reason


def test_rollouts_that_wait_for_rewards_are_not_called_slow() -> None:
    found = told(trainer_idle=IDLE, rollout_idle=BUSY, num_generating=3, num_rewarding=40)
    assert found.limit == "rewards"
    assert "40 trajectories wait for their reward, 3 are generated" in found.reason


def test_the_limit_of_the_buffer_is_named_with_whom_it_holds_back() -> None:
    assert (
        "buffer.max_groups holds" in told(trainer_idle=BUSY, rollout_idle=IDLE, held_back_by="buffer_groups_max").reason
    )
    both = told(trainer_idle=IDLE, rollout_idle=IDLE, held_back_by="ready_groups_max")
    assert both.reason.endswith("the slowest answers; buffer.max_ready_groups holds new groups back.")


def test_rollouts_that_are_the_limit_say_how_many_groups_there_are_and_how_many_replicas_are_sick() -> None:
    reason = told(trainer_idle=IDLE, rollout_idle=BUSY, buffer_groups=7, num_sick=2).reason
    assert "7 of the 32 groups of a batch are buffered" in reason
    assert "2 of 4 replicas are suspect, quarantined or dead" in reason


def test_a_trainer_that_stands_still_to_publish_says_so() -> None:
    assert "30% of the time to publish" in told(trainer_idle=BUSY, rollout_idle=IDLE, publication=0.3).reason
    assert "publish" not in told(trainer_idle=BUSY, rollout_idle=IDLE, publication=0.05).reason


def test_before_the_first_step_it_says_what_the_trainer_waits_for() -> None:
    found = told(trainer_waits_for="all its ranks: 1 of 2 are ready")
    assert (found.limit, found.reason) == ("starting", "The trainer waits for all its ranks: 1 of 2 are ready.")


def test_what_stops_the_run_comes_before_what_slows_it_and_the_end_before_all() -> None:
    figures = {"trainer_idle": IDLE, "rollout_idle": BUSY}
    assert told(**figures, stopping="stopped by SIGINT").limit == "stopping"
    stalled = told(**figures, stopping="x", stalled_for_s=312.0, trainer_waits_for="complete groups")
    assert (stalled.limit, stalled.reason[:49]) == ("stalled", "Nothing useful has happened for 312 s. The traine")
    assert told(**figures, stalled_for_s=1.0, storage_failure="the disk is full").limit == "disk"
    assert told(storage_failure="x", finished="completed").headline == "The run is over"
    assert told(finished="the trainer died", ok=False).headline == "The run failed"


def test_what_an_operator_holds_is_not_called_slow() -> None:
    found = told(trainer_idle=IDLE, rollout_idle=BUSY, held=["the pass sample is paused by an operator"])
    assert (found.limit, found.headline) == ("held", "The run is held")
    assert found.reason.startswith("The pass sample is paused by an operator. In the console")
    assert told(held=["x"], finished="completed").limit == "over"
