"""Groups: events in, actions out."""

import msgspec
import pytest

from laminar.core import actions, events, ledger
from laminar.core.records import GroupState, TrajectoryState
from laminar.ids import Version, WorkerId, format_id
from tests.core_world import Driver, of, settings


def started(*replicas: str, **changes) -> Driver:
    driver = Driver(settings(**changes))
    driver.start(*(replicas or ("r0",)))
    return driver


def dropped(driver: Driver) -> tuple[dict[str, int], dict[str, int]]:
    books = driver.core.state.ledger
    return books.trajectories.dropped, books.tokens.dropped


def test_rewards_that_only_time_out_end_the_run_long_before_every_group_has_been_tried():
    driver = Driver(settings(group_size=4, local_batch_groups=4, buffer_groups_max=8))
    driver.start("r0")
    here = driver.generating("r0")
    driver.report("r0", {t: 2 for t in here}, finish=here)
    hang = {"fail": {t: ("data", "reward_timeout") for t in here[:7]}}
    driver.report("r0", **hang)
    driver.report("r0", reward={here[7]: 1.0})
    driver.report("r0", fail={t: ("data", "reward_timeout") for t in here[8:15]})
    assert not driver.core.state.stopping, "one reward came in between"
    driver.report("r0", fail={here[15]: ("data", "reward_timeout")})
    assert "the reward function hangs" in driver.core.state.stopping


def test_rewards_that_end_their_process_at_every_retry_end_the_run_long_before_every_group_has_been_tried():
    driver = Driver(settings(group_size=4, local_batch_groups=8, buffer_groups_max=8, num_retries=1))
    driver.start("r0")
    here = driver.generating("r0")[:17]
    driver.report("r0", {t: 2 for t in here}, finish=here)
    driver.report("r0", fail={t: ("infra", "reward_crash") for t in here[:-1]})
    driver.report("r0", fail={here[-1]: ("infra", "reward_not_started")})
    assert not driver.core.state.stopping, "that may pass"
    driver.report("r0", {t: 2 for t in here}, finish=here)
    driver.report("r0", fail={here[-1]: ("infra", "reward_not_started")})
    driver.report("r0", fail={t: ("infra", "reward_crash") for t in here[:15]})
    assert not driver.core.state.stopping
    driver.report("r0", fail={here[15]: ("infra", "reward_crash")})
    assert (
        "16 rewards in a row ended their process and none came: the reward function crashes"
        in driver.core.state.stopping
    )


def test_siblings_start_together_on_one_replica_under_one_version():
    driver = started(group_size=3)
    starts = driver.all(actions.StartGroup)
    assert [len(start.starts) for start in starts] == [3, 3]
    assert {(start.worker, start.version) for start in starts} == {("r0", Version(0, 0))}
    assert [format_id(start.group) for start in starts] == ["1.1", "1.2"]


def test_every_trajectory_has_its_own_seed_and_ids_carry_the_boot_number():
    driver = Driver(settings(group_size=4))
    driver.start("r0", boot=7)
    starts = [start for group in driver.all(actions.StartGroup) for start in group.starts]
    assert len({start.seed for start in starts}) == len(starts) == 8
    assert all(format_id(start.trajectory).startswith("7.") for start in starts)


def test_a_group_is_sampleable_only_when_all_its_siblings_are_rewarded():
    driver = started(batch_groups=1)
    first, second = driver.generating("r0")[:2]
    driver.report("r0", {first: 3, second: 4}, finish=[first, second], reward={first: 1.0})
    assert not driver.all(actions.StartTrainStep)
    (step,) = of(driver.report("r0", reward={second: 0.0}), actions.StartTrainStep)
    assert [(row.trajectory, row.num_tokens, row.reward) for row in step.rows] == [(first, 3, 1.0), (second, 4, 0.0)]


def test_a_reward_before_the_end_of_generation_is_ignored():
    driver = started()
    first = driver.generating("r0")[0]
    driver.report("r0", reward={first: 1.0})
    assert driver.core.state.trajectories[first].state == TrajectoryState.GENERATING


def test_an_infra_failure_is_retried_at_the_groups_version_from_the_received_prefix():
    driver = started()
    first = driver.generating("r0")[0]
    (retry,) = of(driver.report("r0", {first: 5}, fail={first: ("infra", "engine_error")}), actions.StartGroup)
    (start,) = retry.starts
    assert (start.trajectory, start.attempt, start.resume, start.score_only) == (first, 2, True, False)
    assert retry.version == Version(0, 0)
    assert driver.core.state.trajectories[first].num_tokens == 5


def test_an_attempt_that_failed_before_its_first_token_does_not_resume():
    driver = started()
    first = driver.generating("r0")[0]
    (retry,) = of(driver.report("r0", fail={first: ("infra", "engine_error")}), actions.StartGroup)
    assert not retry.starts[0].resume


def test_the_seed_of_a_retry_is_that_of_the_first_attempt():
    driver = started()
    first = driver.generating("r0")[0]
    seed = driver.core.state.trajectories[first].seed
    (retry,) = of(driver.report("r0", fail={first: ("infra", "engine_error")}), actions.StartGroup)
    assert retry.starts[0].seed == seed


def test_a_lost_reward_is_asked_for_again_without_generating():
    driver = started()
    first = driver.generating("r0")[0]
    driver.report("r0", {first: 5}, finish=[first])
    (retry,) = of(driver.report("r0", fail={first: ("infra", "reward_timeout")}), actions.StartGroup)
    assert (retry.starts[0].resume, retry.starts[0].score_only) == (True, True)
    assert driver.core.state.replicas[WorkerId("r0")].num_generating == 3
    driver.report("r0", reward={first: 0.5})
    assert driver.core.state.trajectories[first].state == TrajectoryState.DONE


@pytest.mark.parametrize("num_retries", [0, 1, 3])
def test_infra_retries_are_bounded(num_retries):
    driver = started(num_retries=num_retries, steps=1)
    first, second = driver.generating("r0")[:2]
    for _ in range(num_retries + 1):
        assert driver.core.state.trajectories[first].state == TrajectoryState.GENERATING
        driver.report("r0", fail={first: ("infra", "engine_error")})
    assert driver.core.state.trajectories[first].state == TrajectoryState.FAILED
    driver.report("r0", {second: 1}, finish=[second], reward={second: 1.0})
    assert dropped(driver)[0] == {"engine_error": 1, "incomplete_group": 1}


def test_a_data_failure_drops_the_group_and_is_never_a_zero_reward_row():
    driver = started(steps=1, local_batch_groups=3)
    first, second = driver.generating("r0")[:2]
    new = driver.report(
        "r0", {first: 2, second: 4}, finish=[second], reward={second: 1.0}, fail={first: ("data", "nan")}
    )
    assert dropped(driver) == ({"nan": 1, "incomplete_group": 1}, {"nan": 2, "incomplete_group": 4})
    assert sorted(t for action in of(new, actions.ForgetTokens) for t in action.trajectories) == [first, second]
    records = [t for action in of(new, actions.RecordTrajectories) for t in action.trajectories]
    assert {(t.id, t.dropped, t.finish_reason) for t in records} == {
        (first, "nan", "failed"),
        (second, "incomplete_group", "stop"),
    }
    assert of(new, actions.StartGroup), "a new group takes the place of the dropped one"


def test_an_incomplete_group_trains_from_min_group_size_up():
    driver = started(group_size=3, on_incomplete="train", batch_groups=1)
    one, two, three = driver.generating("r0")[:3]
    new = driver.report(
        "r0", {two: 3, three: 3}, finish=[two, three], reward={two: 1.0, three: 0.0}, fail={one: ("data", "nan")}
    )
    (step,) = of(new, actions.StartTrainStep)
    assert [row.trajectory for row in step.rows] == [two, three]
    assert dropped(driver)[0] == {"nan": 1}


def test_a_group_below_min_group_size_is_dropped():
    driver = started(group_size=3, on_incomplete="train", batch_groups=1)
    one, two, three = driver.generating("r0")[:3]
    driver.report(
        "r0", {three: 3}, finish=[three], reward={three: 1.0}, fail={one: ("data", "nan"), two: ("data", "nan")}
    )
    assert not driver.all(actions.StartTrainStep)
    assert dropped(driver)[0] == {"nan": 2, "incomplete_group": 1}


def test_another_replica_may_take_the_place_of_a_dropped_group():
    driver = started("r0", "r1", local_batch_groups=1, buffer_groups_max=2)
    driver.complete_all("r1")
    assert driver.generating("r1") == [], "one is buffered, one in flight"
    driver.send(events.WorkerDisconnected(worker=WorkerId("r0"), incarnation=1))
    here = driver.generating("r0")
    new = driver.report("r0", fail=dict.fromkeys(here, ("data", "nan")))
    assert [a.worker for a in of(new, actions.StartGroup)] == ["r1"]


def test_drops_without_progress_end_the_run_and_name_the_reason():
    driver = started(drops_without_progress_max=2)
    for _ in range(2):
        first, second = driver.generating("r0")[:2]
        driver.report("r0", fail={first: ("data", "reward_error"), second: ("data", "reward_error")})
    (end,) = driver.all(actions.FinishRun)
    assert not end.ok
    assert "2 groups in a row were dropped" in end.reason
    assert "reward_error" in end.reason


def test_one_complete_group_resets_the_count_of_drops():
    driver = started(drops_without_progress_max=2)
    for _ in range(3):
        a, b, c, d = driver.generating("r0")[:4]
        driver.report("r0", fail={a: ("data", "nan"), b: ("data", "nan")})
        driver.report("r0", {c: 1, d: 1}, finish=[c, d], reward={c: 1.0, d: 1.0})
        if driver.all(actions.StartTrainStep):
            break
    assert not driver.all(actions.FinishRun)


def test_answers_to_an_old_attempt_change_nothing_but_the_story():
    driver = started()
    first = driver.generating("r0")[0]
    driver.report("r0", {first: 5}, fail={first: ("infra", "engine_error")})
    before = msgspec.msgpack.encode(driver.core.state)
    new = driver.report("r0", {first: 9}, finish=[first], reward={first: 1.0}, attempts={first: 1}, waiting=1)
    new += driver.report("r0", fail={first: ("data", "nan")}, attempts={first: 1}, waiting=1)
    assert new == []
    after = msgspec.msgpack.decode(msgspec.msgpack.encode(driver.core.state))
    expected = msgspec.msgpack.decode(before)
    for state in (after, expected):
        state.pop("seq")
    assert after == expected
    assert "answer of old attempt 1 ignored" in [row.text for row in driver.core.story.of(f"t{format_id(first)}")]


def test_a_report_of_another_incarnation_changes_nothing():
    driver = started()
    first = driver.generating("r0")[0]
    driver.core.state.replicas[WorkerId("r0")].incarnation = 5
    stale = events.ReplicaReported(
        worker=WorkerId("r0"),
        incarnation=4,
        trajectories=first.to_bytes(8, "little"),
        attempts=(1).to_bytes(4, "little"),
        num_tokens=(9).to_bytes(4, "little"),
    )
    assert driver.send(stale) == []
    assert driver.core.state.trajectories[first].num_tokens == 0


def test_finishing_twice_counts_once():
    driver = started()
    first = driver.generating("r0")[0]
    driver.report("r0", {first: 5}, finish=[first])
    driver.report("r0", {}, finish=[first])
    assert driver.core.state.replicas[WorkerId("r0")].num_generating == 3
    assert driver.core.state.ledger.tokens.total == 5


def test_tokens_are_counted_where_they_are():
    driver = started(batch_groups=2)
    a, b, c, d = driver.generating("r0")
    driver.report("r0", {a: 1, b: 2, c: 3, d: 4})
    books = driver.core.state.ledger.tokens
    assert (books.total, books.in_flight) == (10, 10)
    driver.report("r0", {a: 2, b: 2}, finish=[a, b], reward={a: 1.0, b: 1.0})
    assert (books.total, books.in_flight, books.buffered) == (11, 7, 4)
    driver.report("r0", {c: 3, d: 4}, finish=[c, d], reward={c: 1.0, d: 1.0})
    assert (books.in_flight, books.buffered, books.leased) == (0, 0, 11)
    assert ledger.is_closed(books)


def test_the_record_of_a_trajectory_says_when_what_happened():
    driver = started(batch_groups=1)
    first, second = driver.generating("r0")[:2]
    driver.at = 10.0
    driver.report("r0", {first: 3, second: 3}, finish=[first, second])
    driver.at = 11.0
    driver.report("r0", reward={first: 1.0, second: 0.0})
    driver.at = 14.0
    (record,) = [r for r in of(driver.step_done(), actions.RecordTrajectories)]
    timings = record.trajectories[0].timings
    assert (timings.finished, timings.rewarded, timings.sampled, timings.trained) == (10.0, 11.0, 11.0, 14.0)
    assert (record.trajectories[0].behavior_version, record.trajectories[0].sample_version) == (Version(0, 0),) * 2


# ---- loss of the replica -----------------------------------------------------------------------------------


def test_a_lost_replicas_groups_continue_on_a_replica_of_the_same_version():
    driver = started("r0", "r1")
    here = driver.generating("r0")
    driver.report("r0", dict.fromkeys(here, 6))
    restarted = [action for action in of(driver.lost("r0"), actions.StartGroup) if action.starts[0].attempt == 2]
    assert {action.worker for action in restarted} == {"r1"}
    assert sorted(s.trajectory for action in restarted for s in action.starts) == sorted(here)
    assert all(s.resume for action in restarted for s in action.starts)
    assert dropped(driver) == ({}, {})


def new_version_on(driver: Driver, name: str) -> None:
    """The trainer has made v1, and this replica holds it."""
    driver.step_done()
    driver.ready(Version(1, 0))
    driver.complete_all(name)
    driver.refreshed(name)


def one_group_on_v0_others_on_v1(**changes) -> tuple[Driver, list[int]]:
    """r1 holds v1; r0 is left with one group under v0: one sibling done, one with 4 tokens."""
    driver = started("r0", "r1", local_batch_groups=1, batch_groups=1, buffer_groups_max=3, **changes)
    driver.complete_all("r1")
    group = driver.core.state.replicas[WorkerId("r0")].attempts
    first, second = list(group)
    driver.report("r0", {first: 3, second: 4}, finish=[first], reward={first: 1.0})
    new_version_on(driver, "r1")
    return driver, [first, second]


def test_without_a_replica_of_its_version_a_group_starts_again_and_its_tokens_are_accounted():
    driver, (first, second) = one_group_on_v0_others_on_v1()
    driver.dropped(Version(0, 0))
    new = driver.lost("r0")
    restarted = [a for a in of(new, actions.StartGroup) if a.starts[0].trajectory == first]
    assert [(s.trajectory, s.resume) for s in restarted[0].starts] == [(first, False), (second, False)]
    assert restarted[0].version == Version(1, 0)
    record = driver.core.state.trajectories[first]
    assert (record.reward, record.timings.rewarded) == (0.0, 0.0), "nothing of the voided attempt is left"
    assert dropped(driver) == ({}, {"version_gone": 7})


def test_with_mixed_versions_only_the_missing_sibling_starts_again():
    driver, (first, second) = one_group_on_v0_others_on_v1(group_versions="mixed")
    driver.dropped(Version(0, 0))
    new = driver.lost("r0")
    restarted = [a for a in of(new, actions.StartGroup) if second in [s.trajectory for s in a.starts]]
    assert [(s.trajectory, s.resume) for s in restarted[0].starts] == [(second, False)]
    records = driver.core.state.trajectories
    assert (records[first].behavior_version, records[second].behavior_version) == (Version(0, 0), Version(1, 0))
    assert dropped(driver) == ({}, {"version_gone": 4})


def test_a_group_waits_for_a_silent_replica_of_its_version_before_it_starts_again():
    driver, (_, second) = one_group_on_v0_others_on_v1()
    driver.send(events.WorkerDisconnected(worker=WorkerId("r0"), incarnation=1))
    driver.report("r0", fail={second: ("infra", "engine_error")})
    group = driver.core.state.trajectories[second].group
    assert group in driver.core.state.requeue
    new = driver.send(events.WorkerReturned(worker=WorkerId("r0"), incarnation=1))
    assert [(a.worker, a.group) for a in of(new, actions.StartGroup) if a.group == group] == [("r0", group)]
    assert dropped(driver)[1] == {}


def test_a_missing_reward_is_computed_by_a_replica_of_any_version():
    driver = started("r0", "r1", local_batch_groups=1, batch_groups=1, buffer_groups_max=3)
    driver.complete_all("r1")
    first, second = driver.generating("r0")
    driver.report("r0", {first: 3, second: 4}, finish=[first, second], reward={first: 1.0})
    new_version_on(driver, "r1")
    scored = [a for a in of(driver.lost("r0"), actions.StartGroup) if a.starts[0].trajectory == second]
    assert [(a.worker, a.starts[0].score_only, a.starts[0].attempt) for a in scored] == [("r1", True, 2)]
    driver.report("r1", reward={second: 0.0})
    assert driver.core.state.trajectories[second].behavior_version == Version(0, 0)
    assert dropped(driver) == ({}, {})


def test_a_restart_stops_the_attempts_that_still_run_elsewhere():
    """The reward of one sibling is computed by a replica that has gone on to v1 when the other one's replica dies."""
    driver = started("r0", "r1", local_batch_groups=1, batch_groups=1, buffer_groups_max=3)
    driver.complete_all("r1")
    first, second = driver.generating("r0")
    driver.report("r0", {first: 3, second: 4}, finish=[first])
    new_version_on(driver, "r1")
    driver.send(events.WorkerDisconnected(worker=WorkerId("r0"), incarnation=1))
    scored = driver.report("r0", fail={first: ("infra", "reward_timeout")})
    assert [(a.worker, a.starts[0].score_only) for a in of(scored, actions.StartGroup)] == [("r1", True)]
    driver.dropped(Version(0, 0))
    new = driver.lost("r0")
    assert [(a.worker, a.trajectories, a.attempts) for a in of(new, actions.AbortAttempts)] == [("r1", [first], [2])]
    (again,) = [a for a in of(new, actions.StartGroup) if a.starts[0].trajectory == first]
    assert [(s.trajectory, s.attempt, s.resume) for s in again.starts] == [(first, 3, False), (second, 2, False)]


def test_the_buffer_limit_never_holds_back_a_retry():
    driver = started(buffer_groups_max=2, batch_groups=2)
    first = driver.generating("r0")[0]
    assert len(driver.core.state.groups) == 2
    assert of(driver.report("r0", fail={first: ("infra", "engine_error")}), actions.StartGroup)


def test_the_buffer_limit_holds_back_new_groups():
    driver = started(buffer_groups_max=3, batch_groups=3, local_batch_groups=8)
    assert len(driver.all(actions.StartGroup)) == 3
    here = driver.generating("r0")
    new = driver.report("r0", {t: 2 for t in here[:4]}, finish=here[:4], reward=dict.fromkeys(here[:4], 1.0))
    assert not of(new, actions.StartGroup), "two are buffered, one in flight"
    assert of(driver.complete_all("r0"), actions.StartGroup), "the batch is leased"


def test_the_end_of_the_run_does_not_overproduce():
    driver = started(steps=2, batch_groups=2, buffer_groups_max=100, local_batch_groups=100)
    assert len(driver.all(actions.StartGroup)) == 4
    driver.complete_all("r0")
    driver.step_done()
    driver.step_done()
    driver.saved()
    books = driver.core.state.ledger.trajectories
    assert (books.total, books.committed, books.dropped) == (8, 8, {})
    assert driver.core.state.finished == "completed"


def test_the_story_of_a_group_tells_its_life():
    driver = started(batch_groups=1, buffer_groups_max=1)
    group = driver.all(actions.StartGroup)[0].group
    first = driver.generating("r0")[0]
    driver.report("r0", fail={first: ("infra", "engine_error")})
    driver.complete_all("r0")
    texts = [row.text for row in driver.core.story.of(f"g{format_id(group)}")]
    assert texts == [
        "2 siblings started under v0",
        "queued again after engine_error",
        "1 siblings started under v0",
        "complete with 2 siblings",
    ]
    assert driver.core.state.groups[group].state == GroupState.LEASED
