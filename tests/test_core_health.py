"""Replicas that answer but do not generate: suspicion, quarantine, loss; and what is said of each replica's health."""

import msgspec
import pytest
from core_world import Driver, World, of, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from laminar.core import actions, events, health
from laminar.core.engine import Core
from laminar.core.health import CHECKS_PER_TIMEOUT, RESET_S, SUSPICIONS_MAX, Health
from laminar.core.records import ReplicaState
from laminar.core.turn import Turn
from laminar.ids import WorkerId

R0, R1 = WorkerId("r0"), WorkerId("r1")
TIMEOUT_S = 40.0
PERIOD_S = TIMEOUT_S / CHECKS_PER_TIMEOUT


def driver(*replicas: str, **changes) -> Driver:
    result = Driver(settings(**({"progress_timeout_s": TIMEOUT_S, "steps": 100} | changes)))
    result.start(*(replicas or ("r0", "r1")))
    return result


def let_pass(d: Driver, seconds: float, *frames) -> list[actions.AnyAction]:
    """Time passes; every second comes what `frames` give, and the timer fires when it is due."""
    new, end = [], d.at + seconds
    while d.at < end:
        d.at += 1.0
        for frame in frames:
            new += frame()
        due = d.core.next_deadline()
        if due is not None and due <= d.at:
            new += d.send(events.TimerFired())
    return new


def runs(d: Driver, name: str, num: int = 4):
    """Its frames say that requests run, and carry no token."""
    return lambda: d.report(name, running=num) if WorkerId(name) in d.core.state.replicas else []


def generates(d: Driver, name: str):
    """Its frames carry one more token of everything."""

    def frame() -> list[actions.AnyAction]:
        here, records = d.generating(name), d.core.state.trajectories
        return d.report(name, {t: records[t].num_tokens + 1 for t in here}, running=len(here))

    return frame


def status(d: Driver, name: str) -> health.Status:
    return health.overview(Turn(d.core.state, d.core.settings, d.core.story))[WorkerId(name)]


def alarms(new: list[actions.AnyAction]) -> list[str]:
    return [alarm.name for alarm in of(new, actions.RaiseAlarm)]


# ---- the deadline ------------------------------------------------------------------------------------------


def test_an_engine_that_answers_without_a_token_is_suspect_then_lost_and_the_other_goes_on_with_its_work() -> None:
    d = driver(buffer_groups_max=8)
    hung, free = d.generating("r0"), generates(d, "r1")
    new = let_pass(d, TIMEOUT_S - 1, runs(d, "r0"), free)
    assert alarms(new) == []
    new = let_pass(d, PERIOD_S + 1, runs(d, "r0"), free)
    assert alarms(new) == ["replica-suspect"]
    assert d.generating("r0") == hung, "its trajectories stay"
    new = let_pass(d, TIMEOUT_S + PERIOD_S, runs(d, "r0"), free)
    stop = of(new, actions.StopWorker)[0]
    assert (stop.worker, stop.lost) == (R0, True)
    assert "makes no progress: 4 requests run and 0 wait in it, and no token came for" in stop.reason
    assert set(hung) <= set(d.generating("r1")), "they continue where their version is"


def test_without_a_time_limit_nothing_is_suspect() -> None:
    d = Driver(settings())
    d.start("r0", "r1")
    assert d.core.next_deadline() is None
    assert of(let_pass(d, 1000.0, runs(d, "r0")), actions.StopWorker) == []


def test_a_slow_replica_is_healthy() -> None:
    d = driver()
    one_token = generates(d, "r0")
    for _ in range(20):
        let_pass(d, TIMEOUT_S - 1, runs(d, "r0"), runs(d, "r1", 0))
        one_token()
    assert status(d, "r0").health in (Health.GENERATING, Health.DRAINING)
    assert d.all(actions.RaiseAlarm) == []


def test_requests_that_wait_while_nothing_runs_are_a_hang_unless_something_is_in_a_tool() -> None:
    d = driver()
    assert len(d.generating("r0")) == 4
    in_tools = let_pass(d, 10 * TIMEOUT_S, lambda: d.report("r0", running=0, waiting=1), runs(d, "r1", 0))
    assert alarms(in_tools) == []
    stuck = let_pass(d, TIMEOUT_S + PERIOD_S, lambda: d.report("r0", running=0, waiting=4), runs(d, "r1", 0))
    assert alarms(stuck) == ["replica-suspect"]


def test_nothing_running_is_no_hang() -> None:
    d = driver()
    new = let_pass(d, 10 * TIMEOUT_S, runs(d, "r0", 0), runs(d, "r1", 0))
    assert alarms(new) == []


def test_what_was_given_and_never_spoken_of_counts_as_waiting() -> None:
    d = driver()
    new = let_pass(d, TIMEOUT_S + PERIOD_S, runs(d, "r1", 0))
    assert d.core.state.replicas[R0].suspect
    assert alarms(new) == ["replica-suspect"]


def test_the_clock_starts_when_work_is_given_not_when_it_last_ended() -> None:
    d = driver("r0", local_batch_groups=1, buffer_groups_max=2)
    while d.generating("r0"):
        d.complete_all("r0")
    let_pass(d, 10 * TIMEOUT_S)
    assert d.core.state.health_check_at == 0.0, "nobody is looked at while nothing is expected"
    d.step_done()
    assert d.generating("r0")
    assert alarms(let_pass(d, TIMEOUT_S - 1, runs(d, "r0", 2))) == []
    assert alarms(let_pass(d, PERIOD_S + 1, runs(d, "r0", 2))) == ["replica-suspect"]


def test_an_evaluation_is_work_whose_tokens_nobody_reports() -> None:
    d = driver("r0", evaluate=True, buffer_groups_max=2)
    d.complete_all("r0")
    assert len(d.all(actions.RunEvaluation)) == 1
    assert alarms(let_pass(d, 5 * TIMEOUT_S, lambda: d.report("r0", running=8, busy_s=0.9))) == []
    rewards_only = let_pass(d, 5 * TIMEOUT_S, lambda: d.report("r0", running=0))
    assert alarms(rewards_only) == []
    d.report("r0", running=8, busy_s=0.9)
    assert alarms(let_pass(d, TIMEOUT_S + PERIOD_S, lambda: d.report("r0", running=8))) == ["replica-suspect"]


def test_a_controller_that_was_not_listening_blames_nobody() -> None:
    d = driver()
    d.report("r0", running=4)
    d.report("r1", running=4)
    assert alarms(d.send(events.TimerFired(), after=100 * TIMEOUT_S)) == []
    assert alarms(let_pass(d, TIMEOUT_S + PERIOD_S, runs(d, "r0"), generates(d, "r1"))) == ["replica-suspect"]


def test_a_broken_channel_is_suspect_and_has_its_own_deadline() -> None:
    d = driver(reconnect_grace_s=10 * TIMEOUT_S)
    d.report("r0", running=4)
    d.send(events.WorkerDisconnected(worker=R0, incarnation=1))
    assert status(d, "r0").health == Health.SUSPECT
    let_pass(d, 9 * TIMEOUT_S, runs(d, "r1", 0))
    d.send(events.WorkerReturned(worker=R0, incarnation=1))
    assert status(d, "r0").health != Health.SUSPECT
    assert alarms(let_pass(d, TIMEOUT_S - 1, runs(d, "r1", 0))) == []


# ---- what a suspect is given -------------------------------------------------------------------------------


def suspect(d: Driver, name: str = "r0") -> None:
    """Everything on it stands still for the time limit; the others generate."""
    others = [generates(d, other) for other in d.core.state.replicas if other != name]
    let_pass(d, TIMEOUT_S + PERIOD_S, runs(d, name), *others)
    assert d.core.state.replicas[WorkerId(name)].suspect


def test_a_suspect_is_given_nothing_and_what_was_to_move_there_goes_elsewhere() -> None:
    d = driver("r0", "r1", "r2", buffer_groups_max=30)
    suspect(d)
    moving, stays = d.generating("r1")[0], d.generating("r0")
    before = len(stays)
    d.report("r1", fail={moving: ("infra", "engine_error")})
    for name in ("r1", "r2"):
        d.complete_all(name)
    assert len(d.generating("r0")) == before
    assert all(start.worker != R0 for start in d.all(actions.StartGroup)[-3:])


def test_moves_to_a_replica_are_off_when_it_becomes_suspect() -> None:
    d = driver("r0", "r1", buffer_groups_max=8)
    r0, trajectory = d.core.state.replicas[R0], d.core.state.trajectories[d.generating("r1")[0]]
    health.groups.pin(trajectory, r0, 5)
    suspect(d)
    assert (trajectory.moving_to, r0.incoming) == (None, {})


def test_progress_ends_suspicion_in_quarantine_until_the_newest_version_is_pulled() -> None:
    d = driver(buffer_groups_max=30)
    suspect(d)
    generates(d, "r0")()
    assert status(d, "r0").health == Health.QUARANTINED
    assert "4 trajectories to go, then it pulls the newest version" in status(d, "r0").reason
    d.complete_all("r1")
    assert len(d.generating("r0")) == 4, "it finishes what it has, and no more"
    new = d.complete_all("r0")
    assert [pull.worker for pull in of(new, actions.PullWeights)] == [R0], "although it holds the newest"
    assert (status(d, "r0").health, d.generating("r0")) == (Health.QUARANTINED, [])
    d.refreshed("r0")
    assert status(d, "r0").health != Health.QUARANTINED
    assert d.generating("r0"), "it is given work again"


def test_an_engine_whose_work_was_withdrawn_is_tried_by_a_pull() -> None:
    d = driver("r0", "r1", buffer_groups_max=8, num_retries=0)
    suspect(d)
    for group in {d.core.state.trajectories[t].group for t in d.generating("r0")}:
        first = d.core.state.groups[group].trajectories
        d.report("r0", fail={t: ("data", "nan") for t in first}, running=4)
    let_pass(d, PERIOD_S + 1, generates(d, "r1"))
    assert d.core.state.replicas[R0].state == ReplicaState.SYNCING


def test_stopping_and_going_on_again_and_again_ends_in_loss() -> None:
    d = driver("r0", "r1", buffer_groups_max=30)
    for _ in range(SUSPICIONS_MAX):
        suspect(d)
        generates(d, "r0")()
    new = let_pass(d, TIMEOUT_S + PERIOD_S, runs(d, "r0"), generates(d, "r1"))
    assert [stop.worker for stop in of(new, actions.StopWorker)] == [R0]
    assert f"stopped making progress {SUSPICIONS_MAX + 1} times" in of(new, actions.StopWorker)[0].reason


def test_hiccups_far_apart_are_not_added_up() -> None:
    d = driver("r0", "r1", buffer_groups_max=30)
    for _ in range(3 * SUSPICIONS_MAX):
        suspect(d)
        let_pass(d, RESET_S, generates(d, "r0"), generates(d, "r1"))
    assert R0 in d.core.state.replicas


# ---- restarts ----------------------------------------------------------------------------------------------


def test_a_process_that_takes_a_lost_ones_place_is_quarantined_until_it_holds_the_newest_version() -> None:
    d = driver(restarts_max=1, restart_backoff_s=1.0)
    assert status(d, "r0").health != Health.QUARANTINED
    d.lost("r0")
    assert status(d, "r0") == health.Status(health=Health.DEAD, reason="killed; restart 1 of 1 in 1 s")
    d.send(events.TimerFired(), after=1.0)
    assert status(d, "r0").reason == "killed; restart 1 of 1 is under way"
    d.join("r0", incarnation=2)
    assert status(d, "r0").health == Health.QUARANTINED
    assert "pulls v0" in status(d, "r0").reason
    d.refreshed("r0")
    assert status(d, "r0").health in (Health.GENERATING, Health.DRAINING)


def test_one_that_hangs_in_every_pull_is_evicted_and_named() -> None:
    d = driver(restarts_max=1, restart_backoff_s=1.0, refresh_timeout_s=3 * RESET_S)
    d.lost("r0")
    d.send(events.TimerFired(), after=1.0)
    d.join("r0", incarnation=2)
    new = d.send(events.TimerFired(), after=3 * RESET_S)
    assert "worker-evicted" in alarms(new)
    assert status(d, "r0").health == Health.DEAD
    assert status(d, "r0").reason.endswith("did not end; evicted after 1 restarts")
    refused = d.join("r0", incarnation=2)
    assert [stop.incarnation for stop in of(refused, actions.StopWorker)] == [2], "a late return is fenced off"
    assert R0 not in d.core.state.replicas


def test_one_that_hangs_again_after_every_restart_is_evicted_however_long_the_time_limit() -> None:
    d = Driver(settings(progress_timeout_s=2 * RESET_S, restarts_max=2, buffer_groups_max=90, steps=100))
    d.start("r0", "r1")
    for incarnation in (2, 3, 4):
        let_pass(d, 5 * RESET_S, runs(d, "r0"), generates(d, "r1"))
        assert R0 not in d.core.state.replicas
        if d.core.state.restarts[R0].evicted:
            break
        d.join("r0", incarnation)
        d.refreshed("r0")
    assert (incarnation, status(d, "r0").health) == (4, Health.DEAD)


# ---- the bound, and snapshots ------------------------------------------------------------------------------


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    timeout_s=st.floats(0.5, 100.0),
    productive=st.lists(st.floats(0.01, 0.99), max_size=8),
    flush=st.floats(0.01, 0.9),
)
def test_a_hang_is_found_between_two_time_limits_and_two_and_a_quarter(timeout_s, productive, flush) -> None:
    d = Driver(settings(progress_timeout_s=timeout_s, buffer_groups_max=30))
    d.start("r0", "r1")

    def until(moment: float) -> None:
        while (due := d.core.next_deadline()) is not None and due <= moment and R0 in d.core.state.replicas:
            d.send(events.TimerFired(), after=due - d.at)
        d.at = max(d.at, moment)

    for part in productive:
        until(d.at + part * timeout_s)
        assert not d.core.state.replicas[R0].suspect, "less than the time limit without a token"
        generates(d, "r0")()
    last, suspected, lost = d.at, 0.0, 0.0
    while not lost:
        d.report("r0", running=4)
        for _ in range(1):
            until(d.at + flush * timeout_s / 4)
        if R0 not in d.core.state.replicas:
            lost = d.core.state.at
        elif d.core.state.replicas[R0].suspect and not suspected:
            suspected = d.core.state.replicas[R0].suspected_at
    slack = 1e-6 * (1 + last)
    assert timeout_s - slack <= suspected - last <= 1.25 * timeout_s + slack
    assert 2 * timeout_s - slack <= lost - last <= 2.25 * timeout_s + slack


def test_random_worlds_with_hangs_end_with_closed_books_whole_and_from_snapshots() -> None:
    suspected = lost = 0
    for seed in range(25):
        world = World(
            settings(progress_timeout_s=1.0, restarts_max=3, steps=5, repack_interval_s=0.5), seed, faults=0.1
        )
        world.restore_each = seed % 3
        world.run()
        suspected += sum(alarm.name == "replica-suspect" for alarm in world.all(actions.RaiseAlarm))
        lost += sum("no progress" in stop.reason for stop in world.all(actions.StopWorker))
    assert suspected > lost > 0


def test_health_survives_a_snapshot() -> None:
    d = driver(buffer_groups_max=30)
    suspect(d)
    again = Core.restore(d.core.settings, d.core.snapshot())
    assert again.next_deadline() == d.core.next_deadline()
    assert msgspec.to_builtins(again.state.replicas[R0]) == msgspec.to_builtins(d.core.state.replicas[R0])


@pytest.mark.parametrize(("draining", "word"), [(True, "an operator takes it out"), (False, "begins no more groups")])
def test_a_replica_that_begins_nothing_more_is_draining(draining, word) -> None:
    d = driver()
    if draining:
        d.send(events.DrainRequested(worker=R0))
    assert status(d, "r0").health == Health.DRAINING
    assert word in status(d, "r0").reason
    assert "4 trajectories to go" in status(d, "r0").reason


def test_a_first_process_is_starting_then_syncing() -> None:
    d = Driver(settings())
    d.send(events.RunStarted(boot=1))
    d.join("r0")
    assert status(d, "r0") == health.Status(health=Health.STARTING, reason="it has joined, waits for weights to pull")
    d.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
    d.rank()
    d.ready(d.all(actions.PublishVersion)[-1].version)
    assert status(d, "r0") == health.Status(health=Health.SYNCING, reason="pulls v0")


def test_the_clock_starts_when_tokens_are_owed_again_after_tools_not_at_the_last_report_before() -> None:
    d = driver(buffer_groups_max=8)
    let_pass(d, 1.0, lambda: d.report("r0", running=0, waiting=0), runs(d, "r1", 0))
    let_pass(d, 5 * TIMEOUT_S, runs(d, "r1", 0))  # all of r0 is in tools, and it says nothing
    d.report("r0", running=1)
    assert alarms(let_pass(d, TIMEOUT_S - 1, runs(d, "r0", 1), runs(d, "r1", 0))) == []
    assert alarms(let_pass(d, PERIOD_S + 1, runs(d, "r0", 1), runs(d, "r1", 0))) == ["replica-suspect"]
