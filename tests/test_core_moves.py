"""Repacking carried out: events in, actions out. The planner has test_core_repack.py."""

import pytest
from core_world import Driver, of, settings

from laminar.core import actions, events
from laminar.core.decisions import Repack, Transfer
from laminar.core.records import ReplicaState, VersionRecord
from laminar.ids import Version, WorkerId

PERIOD = 5.0


def tailing(**changes: object) -> Driver:
    """Two replicas of v0 past their peak: r0 with one trajectory of 4 tokens left, r1 with two of 6."""
    small = {"repack_interval_s": PERIOD, "local_batch_groups": 1, "buffer_groups_max": 2}
    driver = Driver(settings(**{**small, **changes}))
    driver.start("r0", "r1")
    first, second = driver.generating("r0")
    a, b = driver.generating("r1")
    driver.report("r0", {first: 4, second: 4}, kv_tokens=50)
    driver.report("r1", {a: 6, b: 6}, kv_tokens=60)
    driver.send(events.TimerFired(), after=PERIOD)  # a first check, which sees both at their peak
    driver.report("r0", {first: 4}, finish=[second], reward={second: 1.0}, kv_tokens=20)
    driver.report("r1", {a: 6, b: 6}, kv_tokens=40)
    return driver


def check(driver: Driver) -> list[actions.AnyAction]:
    return driver.send(events.TimerFired(), after=PERIOD)


def test_a_replica_past_its_peak_is_emptied_into_another_of_its_version() -> None:
    driver = tailing()
    (moving,) = driver.generating("r0")
    (abort,) = of(check(driver), actions.AbortAttempts)
    assert (abort.worker, abort.trajectories, abort.attempts) == ("r0", [moving], [1])
    (start,) = of(driver.report("r0", {moving: 5}, aborted=[moving]), actions.StartGroup)
    assert (start.worker, start.version) == ("r1", Version(0, 0))
    assert [(s.trajectory, s.attempt, s.resume) for s in start.starts] == [(moving, 2, True)]
    record = driver.core.state.repack
    assert (record.num_released, record.num_moves, record.num_moved_tokens) == (1, 1, 5)


def test_a_check_explains_itself_for_every_replica() -> None:
    driver = tailing()
    assert all(reason.startswith("not past its peak") for reason in driver.core.state.repack.reasons.values())
    check(driver)
    reasons = driver.core.state.repack.reasons
    assert reasons[WorkerId("r0")].startswith("source")
    assert reasons[WorkerId("r1")].startswith("destination")


def test_the_reasons_of_the_last_check_that_moved_anything_are_kept() -> None:
    driver = tailing()
    assert driver.core.state.repack.moved_at == 0.0
    check(driver)
    moved_at = driver.at
    (moving,) = driver.generating("r0")
    driver.report("r0", {moving: 5}, aborted=[moving])
    check(driver)
    record = driver.core.state.repack
    assert (record.checked_at, record.moved_at) == (driver.at, moved_at)
    assert not any(reason.startswith("source") for reason in record.reasons.values())
    assert record.moved_reasons[WorkerId("r0")].startswith("source")


def test_a_check_says_why_a_replica_takes_no_part() -> None:
    driver = tailing()
    check(driver)
    driver.join("r2")
    check(driver)
    reasons = driver.core.state.repack.reasons
    assert reasons[WorkerId("r0")] == "takes no part: it is being emptied by an earlier check"
    assert reasons[WorkerId("r2")] == "takes no part: pulls v0"


def test_the_emptied_replica_pulls_the_newest_version_at_once() -> None:
    driver = tailing(batch_groups=1, buffer_groups_max=3)
    third = driver.generating("r0")[0]
    driver.report("r1", {t: 6 for t in driver.generating("r1")}, kv_tokens=30)
    check(driver)
    driver.core.state.versions[-1].ready = True
    made = Version(1, 0)
    driver.core.state.trainer.step = 1
    driver.core.state.versions.append(VersionRecord(version=made))
    assert not of(driver.ready(made), actions.PullWeights), "nothing pulls while it generates or expects a trajectory"
    (pull,) = of(driver.report("r0", {third: 5}, aborted=[third]), actions.PullWeights)
    assert (pull.worker, pull.version) == ("r0", made)
    assert driver.core.state.replicas[WorkerId("r1")].state == ReplicaState.GENERATING


def test_a_trajectory_that_finishes_first_is_finished_and_not_moved() -> None:
    driver = tailing()
    (moving,) = driver.generating("r0")
    check(driver)
    new = driver.report("r0", {moving: 6}, finish=[moving], reward={moving: 1.0})
    assert not any(moving in [s.trajectory for s in start.starts] for start in of(new, actions.StartGroup))
    assert driver.core.state.replicas[WorkerId("r1")].incoming == {}
    assert driver.core.state.repack.num_moves == 0


def test_a_destination_keeps_its_version_until_what_it_expects_has_come() -> None:
    driver = tailing()
    (moving,) = driver.generating("r0")
    check(driver)
    driver.complete_all("r1")
    replica = driver.core.state.replicas[WorkerId("r1")]
    assert (replica.version, list(replica.incoming)) == (Version(0, 0), [moving])
    (start,) = of(driver.report("r0", {moving: 5}, aborted=[moving]), actions.StartGroup)
    assert start.worker == "r1"


def test_a_lost_destination_leaves_the_trajectory_to_any_other_holder_of_its_version() -> None:
    driver = tailing()
    (moving,) = driver.generating("r0")
    check(driver)
    driver.lost("r1")
    starts = of(driver.report("r0", {moving: 5}, aborted=[moving]), actions.StartGroup)
    ours = [s for start in starts if start.worker == "r0" for s in start.starts if s.trajectory == moving]
    assert [(s.attempt, s.resume) for s in ours] == [(2, True)]


def test_a_source_lost_in_mid_move_costs_no_more_than_its_last_flush() -> None:
    driver = tailing()
    (moving,) = driver.generating("r0")
    check(driver)
    starts = of(driver.lost("r0"), actions.StartGroup)
    ours = [(start.worker, s.attempt, s.resume) for start in starts for s in start.starts if s.trajectory == moving]
    assert ours == [("r1", 2, True)]
    assert driver.core.state.trajectories[moving].num_tokens == 4  # type: ignore[index]


@pytest.mark.parametrize("verdict", ["apply", "skip"])
def test_a_held_repack_moves_nothing_until_it_is_applied(verdict: str) -> None:
    driver = tailing()
    driver.send(events.HoldChanged(pass_name="repack", held=True))
    assert not of(check(driver), actions.AbortAttempts)
    (number,) = driver.core.state.held
    new = driver.send(events.DecisionResolved(decision=number, verdict=verdict))
    assert len(of(new, actions.AbortAttempts)) == (verdict == "apply")
    assert driver.core.state.repack.planned == []


def apply_held(driver: Driver, replacement: Repack | None = None) -> list[actions.AbortAttempts]:
    (number,) = driver.core.state.held
    event = events.DecisionResolved(decision=number, verdict="apply", replacement=replacement)
    return of(driver.send(event), actions.AbortAttempts)


@pytest.mark.parametrize(("kv_tokens", "moves"), [(8980, 1), (8981, 0)])
def test_a_move_is_off_if_the_destination_has_filled_up_while_it_was_held(kv_tokens: int, moves: int) -> None:
    """20 KV tokens are to go to r1, which may use 9,000."""
    driver = tailing()
    driver.send(events.HoldChanged(pass_name="repack", held=True))
    check(driver)
    driver.report("r1", kv_tokens=kv_tokens)
    assert len(apply_held(driver)) == moves
    assert len(driver.core.state.replicas[WorkerId("r1")].incoming) == moves


def test_an_operator_cannot_send_more_requests_to_a_replica_than_are_memory_bound() -> None:
    """B = 3: r1 generates two, so it takes the one of r0 and not the two of r2."""
    driver = tailing(repack_requests_max=3, buffer_groups_max=3)
    driver.send(events.HoldChanged(pass_name="repack", held=True))
    check(driver)
    driver.join("r2")
    driver.refreshed("r2")
    transfers = [
        Transfer(source=WorkerId(name), destination=WorkerId("r1"), trajectories=list(driver.generating(name)))  # type: ignore[arg-type]
        for name in ("r0", "r2")
    ]
    assert [len(transfer.trajectories) for transfer in transfers] == [1, 2]
    assert [abort.worker for abort in apply_held(driver, Repack(transfers=transfers))] == ["r0"]


@pytest.mark.parametrize("pulls", [True, False])
def test_a_replica_that_begins_anew_is_not_past_its_peak(pulls: bool) -> None:
    limits = {"local_batch_groups": 1, "batch_groups": 1, "buffer_groups_max": 8, "steps": 9}
    driver = Driver(settings(repack_interval_s=PERIOD, **limits))
    driver.start("r0", "r1")
    if pulls:
        driver.complete_all("r1")
        driver.step_done()
        driver.ready(Version(1, 0))
    driver.report("r0", kv_tokens=50)
    check(driver)
    here = driver.generating("r0")
    driver.report("r0", {t: 3 for t in here}, finish=here, reward=dict.fromkeys(here, 1.0), kv_tokens=40)
    if pulls:
        driver.refreshed("r0")
    assert driver.generating("r0")
    check(driver)  # before its first report: the KV tokens reported last were of what it generated before
    driver.report("r0", kv_tokens=30)
    check(driver)
    expected = "not past its peak: 30 KV tokens now, 0 at the last check"
    assert driver.core.state.repack.reasons[WorkerId("r0")] == expected


def test_an_operator_may_send_the_trajectories_the_other_way() -> None:
    driver = tailing()
    driver.send(events.HoldChanged(pass_name="repack", held=True))
    check(driver)
    (number,) = driver.core.state.held
    back = Repack(
        transfers=[
            Transfer(
                source=WorkerId("r1"),
                destination=WorkerId("r0"),
                trajectories=list(driver.generating("r1")),  # type: ignore[arg-type]
            )
        ]
    )
    (abort,) = of(
        driver.send(events.DecisionResolved(decision=number, verdict="apply", replacement=back)), actions.AbortAttempts
    )
    assert (abort.worker, len(abort.trajectories)) == ("r1", 2)


def test_a_check_follows_every_train_step() -> None:
    driver = Driver(settings(repack_interval_s=1000.0))
    driver.start("r0")
    driver.complete_all("r0")
    before = driver.core.state.repack.num_checks
    driver.step_done()
    assert driver.core.state.repack.num_checks == before + 1


def test_without_an_interval_nothing_is_ever_repacked() -> None:
    driver = tailing(repack_interval_s=0.0)
    assert not of(check(driver), actions.AbortAttempts)
    assert driver.core.state.repack.num_checks == 0


# ---- pinned trajectories -----------------------------------------------------------------------------------


def test_pinned_trajectories_are_not_moved_and_the_check_says_why() -> None:
    driver = tailing(pinned=True)
    assert of(check(driver), actions.AbortAttempts) == []
    assert {reason.split(":")[0] for reason in driver.core.state.repack.reasons.values()} == {"pinned"}


def test_an_edited_decision_moves_no_pinned_trajectory() -> None:
    driver = tailing(pinned=True)
    transfer = Transfer(
        source=WorkerId("r0"), destination=WorkerId("r1"), trajectories=driver.generating("r0"), reason="x"
    )
    driver.core.state.repack.planned = [transfer]
    assert of(driver.send(events.TimerFired()), actions.AbortAttempts) == []


def test_pinned_trajectories_of_a_lost_replica_start_again_under_their_version_counted() -> None:
    driver = tailing(pinned=True)
    (lost,) = driver.generating("r0")
    out = driver.lost("r0")
    (start,) = of(out, actions.StartGroup)
    assert (start.worker, start.version) == ("r1", Version(0, 0))
    assert [(s.trajectory, s.attempt, s.resume, s.score_only) for s in start.starts] == [(lost, 2, False, False)]
    state = driver.core.state
    assert (state.trajectories[lost].num_tokens, state.trajectories[lost].behavior_version) == (0, Version(0, 0))
    assert (state.num_failovers.restarted, state.num_failovers.same_version) == (1, 0)
    assert sum(state.ledger.tokens.dropped.values()) == 4


def test_a_pinned_trajectory_whose_reward_was_lost_with_its_host_is_generated_again() -> None:
    driver = tailing(pinned=True)
    (late,) = driver.generating("r0")
    driver.report("r0", {late: 5}, finish=[late])
    (start,) = of(driver.lost("r0"), actions.StartGroup)
    assert [(s.trajectory, s.resume, s.score_only) for s in start.starts] == [(late, False, False)]
    driver.report("r1", {late: 3}, finish=[late], reward={late: 1.0})
    assert driver.core.state.trajectories[late].num_tokens == 3
