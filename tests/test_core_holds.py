"""Held decisions: hold, look, apply, skip, edit; and what became void meanwhile."""

import pytest

from laminar.core import actions, events
from laminar.core.decisions import DispatchNew, DispatchQueued, RefreshReplica, Repack, TakeBatch, Transfer
from laminar.core.operator_records import HeldDecision, Hold
from laminar.ids import GroupId, Version, WorkerId
from tests.core_world import Driver, of, settings

R0, R1 = WorkerId("r0"), WorkerId("r1")


def started(*replicas: str, **changes) -> Driver:
    driver = Driver(settings(**changes))
    driver.start(*replicas)
    return driver


def hold(driver: Driver, name: str, held: bool = True) -> list[actions.AnyAction]:
    return driver.send(events.HoldChanged(pass_name=name, held=held))


def the_held(driver: Driver) -> HeldDecision:
    (held,) = driver.core.state.held.values()
    return held


def resolve(driver: Driver, verdict: str = "apply", replacement=None) -> list[actions.AnyAction]:
    number = the_held(driver).id
    return driver.send(events.DecisionResolved(decision=number, verdict=verdict, replacement=replacement))


def voided(driver: Driver, replacement=None) -> str:
    """Why applying the held decision, or its replacement, did nothing but say so."""
    (alarm,) = resolve(driver, replacement=replacement)
    assert isinstance(alarm, actions.RaiseAlarm)
    assert alarm.name == "decision-void"
    assert driver.core.state.resolution.void in alarm.text
    return driver.core.state.resolution.void


def tick(driver: Driver) -> list[actions.AnyAction]:
    return driver.send(events.TimerFired())


# ---- dispatch ----------------------------------------------------------------------------------------------


def dispatch_held() -> Driver:
    driver = started()
    hold(driver, "dispatch")
    driver.join("r0")
    driver.refreshed("r0")
    return driver


def test_a_held_dispatch_starts_nothing_and_shows_its_decision():
    driver = dispatch_held()
    assert not driver.all(actions.StartGroup)
    assert the_held(driver).decision == DispatchNew(worker=R0)
    tick(driver)
    assert len(driver.core.state.held) == 1, "one decision of a pass waits at a time"


def test_applying_a_dispatch_starts_one_group_and_holds_the_next_decision():
    driver = dispatch_held()
    first = the_held(driver).id
    assert len(of(resolve(driver), actions.StartGroup)) == 1
    assert the_held(driver).id == first + 1


def test_releasing_a_pass_lets_everything_go():
    driver = dispatch_held()
    assert len(of(hold(driver, "dispatch", held=False), actions.StartGroup)) == 2
    assert not driver.core.state.held


def test_a_skipped_decision_is_taken_again_at_the_next_event_not_before():
    driver = dispatch_held()
    assert resolve(driver, "skip") == []
    assert not driver.core.state.held
    tick(driver)
    assert the_held(driver).decision == DispatchNew(worker=R0)


def test_a_skip_delays_a_pass_that_is_not_held_any_more():
    driver = dispatch_held()
    number = the_held(driver).id
    driver.core.state.holds.clear()
    driver.send(events.DecisionResolved(decision=number, verdict="skip"))
    assert len(of(tick(driver), actions.StartGroup)) == 2


def test_an_edited_dispatch_goes_where_the_operator_wants():
    driver = started()
    hold(driver, "dispatch")
    for name in ("r0", "r1"):
        driver.join(name)
        driver.refreshed(name)
    assert [a.worker for a in of(resolve(driver, replacement=DispatchNew(worker=R1)), actions.StartGroup)] == ["r1"]


def test_a_retry_can_be_held_too():
    driver = started("r0")
    hold(driver, "dispatch")
    first = driver.generating("r0")[0]
    driver.report("r0", {first: 2}, fail={first: ("infra", "engine_error")})
    group = driver.core.state.trajectories[first].group
    assert the_held(driver).decision == DispatchQueued(worker=R0, group=group, trajectories=[first], restart=False)
    assert [a.starts[0].attempt for a in of(resolve(driver), actions.StartGroup)] == [2]


@pytest.mark.parametrize(
    ("replacement", "why"),
    [
        (DispatchNew(worker=WorkerId("nobody")), "there is no replica nobody"),
        (DispatchQueued(worker=R0, group=GroupId(99), trajectories=[], restart=True), "g0.99 has no queued siblings"),
        (RefreshReplica(worker=R0, version=Version(0, 0)), "a RefreshReplica is no decision of the pass dispatch"),
        (TakeBatch(step=1, groups=[]), "a TakeBatch is no decision of the pass dispatch"),
    ],
)
def test_a_replacement_that_does_not_fit_is_void(replacement, why):
    driver = dispatch_held()
    assert voided(driver, replacement) == why
    assert the_held(driver).decision == DispatchNew(worker=R0), "decided anew"


@pytest.mark.parametrize("complete", [True, False])
def test_a_group_without_queued_siblings_cannot_be_restarted(complete):
    driver = started("r0", batch_groups=4, buffer_groups_max=6, local_batch_groups=2)
    if complete:
        here = driver.generating("r0")[:2]
        driver.report("r0", dict.fromkeys(here, 1), finish=here, reward=dict.fromkeys(here, 1.0))
    group = next(iter(driver.core.state.groups))
    hold(driver, "dispatch")
    driver.join("r1")
    driver.refreshed("r1")
    again = DispatchQueued(worker=R1, group=group, trajectories=[], restart=True)
    assert "has no queued siblings" in voided(driver, again)


def test_a_dispatch_to_a_replica_that_was_lost_meanwhile_is_void():
    driver = dispatch_held()
    driver.join("r1")
    driver.refreshed("r1")
    driver.lost("r0")
    assert the_held(driver).decision == DispatchNew(worker=R0)
    assert voided(driver) == "there is no replica r0"
    assert the_held(driver).decision == DispatchNew(worker=R1)


def test_a_dispatch_applied_after_the_stop_starts_nothing():
    driver = started("r0", batch_groups=1, buffer_groups_max=6, local_batch_groups=4, steps=9)
    hold(driver, "dispatch")
    here = driver.generating("r0")[:2]
    driver.report("r0", dict.fromkeys(here, 1), finish=here, reward=dict.fromkeys(here, 1.0))
    driver.join("r1")
    driver.refreshed("r1")
    assert isinstance(the_held(driver).decision, DispatchNew)
    driver.send(events.StopRequested(reason="asked"))
    assert voided(driver) == "the run is stopping"


def test_a_decision_applied_after_the_end_changes_nothing():
    driver = dispatch_held()
    driver.send(events.StopRequested(reason="asked"))
    assert driver.core.state.finished
    assert resolve(driver) == []
    assert driver.core.state.ledger.trajectories.total == 0


# ---- refresh -----------------------------------------------------------------------------------------------


def refresh_held() -> Driver:
    driver = started()
    hold(driver, "refresh")
    driver.join("r0")
    return driver


def test_a_held_refresh_pulls_nothing_until_it_is_applied():
    driver = refresh_held()
    assert not driver.all(actions.PullWeights)
    assert the_held(driver).decision == RefreshReplica(worker=R0, version=Version(0, 0))
    assert [(a.worker, a.version) for a in of(resolve(driver), actions.PullWeights)] == [("r0", Version(0, 0))]


def test_a_skipped_refresh_comes_back():
    driver = refresh_held()
    assert resolve(driver, "skip") == []
    tick(driver)
    assert isinstance(the_held(driver).decision, RefreshReplica)


def test_a_refresh_to_a_version_that_is_not_readable_is_void():
    driver = refresh_held()
    assert not of(resolve(driver, replacement=RefreshReplica(worker=R0, version=Version(5, 0))), actions.PullWeights)


def test_a_refresh_is_void_if_the_replica_generates_meanwhile():
    driver = started("r0", "r1", batch_groups=1, local_batch_groups=1, buffer_groups_max=3, steps=9)
    driver.complete_all("r0")
    driver.step_done()
    hold(driver, "refresh")
    driver.ready(Version(1, 0))
    here = driver.generating("r0")
    assert here
    driver.report("r0", dict.fromkeys(here, 1), finish=here)
    assert the_held(driver).decision == RefreshReplica(worker=R0, version=Version(1, 0))
    driver.lost("r1")
    assert driver.core.state.replicas[R0].num_generating, "it has taken over the groups of r1, of the same version"
    assert not of(resolve(driver), actions.PullWeights)


# ---- sample ------------------------------------------------------------------------------------------------


def sample_held(**changes) -> Driver:
    driver = started("r0", **({"batch_groups": 2, "buffer_groups_max": 6, "local_batch_groups": 3} | changes))
    hold(driver, "sample")
    driver.complete_all("r0")
    return driver


def test_a_held_batch_leases_nothing_until_it_is_applied():
    driver = sample_held()
    ids = list(driver.core.state.buffer)
    assert the_held(driver).decision == TakeBatch(step=1, groups=ids[:2])
    assert not driver.core.state.steps
    assert of(resolve(driver), actions.StartTrainStep)
    assert driver.core.state.steps[1].groups == ids[:2]


def test_an_edited_batch_is_trained_as_edited():
    driver = sample_held()
    ids = list(driver.core.state.buffer)
    resolve(driver, replacement=TakeBatch(step=1, groups=[ids[2], ids[0]]))
    assert driver.core.state.steps[1].groups == [ids[2], ids[0]]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("unknown", "g0.7 is not in the buffer"),
        ("twice", "a group is in it twice"),
        ("empty", "a batch needs groups"),
        ("wrong step", "the next step is 1, not 2"),
    ],
)
def test_an_edited_batch_that_cannot_be_is_void(kind, why):
    driver = sample_held()
    ids = list(driver.core.state.buffer)
    groups = {"unknown": [GroupId(7)], "twice": [ids[0], ids[0]], "empty": []}.get(kind, ids[:2])
    step = 2 if kind == "wrong step" else 1
    assert voided(driver, TakeBatch(step=step, groups=groups)) == why
    assert the_held(driver).decision == TakeBatch(step=1, groups=ids[:2])


def test_a_batch_smaller_than_usual_leaves_a_rest_that_is_dropped_and_aborted_at_the_end():
    driver = sample_held(steps=1, evaluate=True)
    ids = list(driver.core.state.buffer)
    driver.send(events.EvaluationFinished(evaluation=1, accuracy=0.1, num_prompts=1))
    resolve(driver, replacement=TakeBatch(step=1, groups=ids[:1]))
    hold(driver, "sample", held=False)
    driver.step_done()
    driver.ready(Version(1, 0))
    driver.saved()
    assert driver.core.state.ledger.trajectories.dropped["run_complete"] == 2 * (len(ids) - 1)
    driver.refreshed("r0")
    assert of(driver.send(events.EvaluationFinished(evaluation=2, accuracy=0.9, num_prompts=1)), actions.FinishRun)


def test_a_held_batch_does_not_keep_a_stop_from_ending_the_run():
    driver = sample_held()
    assert of(driver.send(events.StopRequested(reason="asked")), actions.FinishRun)
    assert resolve(driver) == []


def test_a_custom_samplers_choice_can_be_held_and_edited():
    driver = sample_held(custom_sampler=True)
    ids = list(driver.core.state.buffer)
    (question,) = driver.all(actions.AskSampler)
    driver.send(events.SamplerAnswered(request=question.request, groups=[ids[2], ids[1]]))
    assert the_held(driver).decision == TakeBatch(step=1, groups=[ids[2], ids[1]])
    resolve(driver, replacement=TakeBatch(step=1, groups=ids[:2]))
    assert driver.core.state.steps[1].groups == ids[:2]
    assert driver.core.state.sampler_answer == []


# ---- all ---------------------------------------------------------------------------------------------------


def test_an_unknown_pass_cannot_be_held():
    driver = started("r0")
    (alarm,) = hold(driver, "coffee")
    assert (alarm.name, alarm.text) == (
        "hold-refused",
        "there is no pass 'coffee'; there are: refresh, repack, dispatch, sample, all",
    )
    assert not driver.core.state.holds


def test_an_unknown_or_resolved_decision_changes_nothing():
    driver = dispatch_held()
    number = the_held(driver).id
    resolve(driver)
    held = the_held(driver)
    for word in (
        events.DecisionResolved(decision=number, verdict="apply"),
        events.DecisionResolved(decision=999, verdict="skip"),
    ):
        (alarm,) = driver.send(word)
        assert alarm.name == "decision-refused"
        assert the_held(driver) == held


def test_passes_are_held_independently():
    driver = started("r0", batch_groups=2, local_batch_groups=2)
    hold(driver, "sample")
    driver.complete_all("r0")
    assert driver.generating("r0"), "dispatch goes on"
    assert not driver.all(actions.StartTrainStep)


# ---- edited in place ---------------------------------------------------------------------------------------


def test_an_edited_decision_goes_on_being_held_and_is_what_applying_carries_out():
    driver = dispatch_held()
    driver.join("r1")
    driver.refreshed("r1")
    held = the_held(driver)
    assert driver.send(events.DecisionEdited(decision=held.id, replacement=DispatchNew(worker=R1))) == []
    assert the_held(driver).decision == DispatchNew(worker=R1)
    [started_on] = [action.worker for action in of(resolve(driver), actions.StartGroup)]
    assert started_on == R1


def test_an_edit_of_another_kind_or_of_what_is_not_held_changes_nothing():
    driver = dispatch_held()
    held = the_held(driver)
    driver.send(events.DecisionEdited(decision=held.id, replacement=TakeBatch(step=1, groups=[])))
    driver.send(events.DecisionEdited(decision=held.id + 7, replacement=DispatchNew(worker=R1)))
    assert the_held(driver).decision == DispatchNew(worker=R0)


# ---- pauses ------------------------------------------------------------------------------------------------


def pause(driver: Driver, name: str) -> list[actions.AnyAction]:
    return driver.send(events.HoldChanged(pass_name=name, held=True, mode="pause"))


def test_a_paused_pass_decides_and_shows_nothing_until_it_is_let_go():
    driver = started()
    pause(driver, "dispatch")
    driver.join("r0")
    driver.refreshed("r0")
    tick(driver)
    assert not driver.core.state.held
    assert driver.core.state.holds == {"dispatch": Hold(mode="pause", since=driver.at)}
    assert len(of(hold(driver, "dispatch", held=False), actions.StartGroup)) == 2


def test_a_pass_that_is_paused_while_it_shows_a_decision_shows_it_no_more_and_can_be_stepped_again():
    driver = dispatch_held()
    pause(driver, "dispatch")
    assert not driver.core.state.held
    hold(driver, "dispatch")
    assert the_held(driver).decision == DispatchNew(worker=R0)


def test_all_passes_are_held_and_let_go_at_once():
    driver = started("r0", repack_interval_s=1.0)
    pause(driver, "all")
    assert list(driver.core.state.holds) == ["refresh", "repack", "dispatch", "sample"]
    driver.join("r1")
    driver.complete_all("r0")
    assert not of(tick(driver), actions.StartGroup)
    new = hold(driver, "all", held=False)
    assert [type(action) for action in new if not isinstance(action, actions.StartGroup)] == [
        actions.PullWeights, actions.StartTrainStep
    ]  # fmt: skip
    assert not driver.core.state.holds


def test_a_paused_sample_pass_asks_no_sampler():
    driver = started("r0", custom_sampler=True, batch_groups=2, local_batch_groups=2)
    pause(driver, "sample")
    driver.complete_all("r0")
    assert not driver.all(actions.AskSampler)
    assert of(hold(driver, "sample", held=False), actions.AskSampler)


def test_a_hold_on_another_pass_keeps_nobody_from_asking_the_sampler():
    driver = started("r0", custom_sampler=True, batch_groups=2, local_batch_groups=2)
    hold(driver, "sample")
    hold(driver, "refresh")
    driver.join("r1")
    assert driver.core.state.held, "the pull of r1"
    driver.complete_all("r0")
    assert driver.all(actions.AskSampler)


def test_what_generates_goes_on_while_every_pass_is_paused_and_nothing_is_lost():
    driver = started("r0", "r1", repack_interval_s=1.0, checkpoint_every=1, progress_timeout_s=10.0, restarts_max=1)
    pause(driver, "all")
    driver.fill("r0")
    lost = driver.generating("r1")
    driver.lost("r1")
    account = driver.core.state.ledger.trajectories
    assert (account.buffered, account.in_flight, account.dropped) == (4, len(lost), {})
    assert of(driver.send(events.TimerFired(), after=1.0), actions.StartWorker), "health and restarts go on"
    driver.join("r1", incarnation=2)
    hold(driver, "all", held=False)
    assert driver.core.state.ledger.trajectories.dropped == {}
    assert driver.core.state.trainer.running == 1


def test_a_frame_in_which_nothing_ends_decides_nothing_although_a_decision_waits():
    driver = dispatch_held()
    driver.join("r1")
    driver.refreshed("r1")
    before = driver.core.snapshot()
    assert driver.report("r1", running=1) == []
    assert driver.core.state.dirty == {}
    assert len(driver.core.snapshot()) == len(before)


# ---- a word that counts for nothing ------------------------------------------------------------------------


def test_an_edit_of_what_is_not_held_or_to_another_kind_is_refused_aloud():
    driver = dispatch_held()
    number, replacement = the_held(driver).id, TakeBatch(step=1, groups=[])
    for decision in (99, number):
        (alarm,) = driver.send(events.DecisionEdited(decision=decision, replacement=replacement))
        assert alarm.name == "decision-refused"
    assert the_held(driver).id == number


def test_a_part_of_a_repack_that_no_longer_fits_says_why_and_the_rest_is_done():
    driver = started("r0", "r1", "r2", "r3", repack_interval_s=1.0, buffer_groups_max=8, local_batch_groups=2)
    hold(driver, "repack")
    transfers = [
        Transfer(source=WorkerId(a), destination=WorkerId(b), trajectories=driver.generating(a), reason="by hand")
        for a, b in (("r0", "r1"), ("r2", "nobody"))
    ]
    driver.core.state.held[7] = HeldDecision(
        id=7, pass_name="repack", decision=Repack(transfers=transfers), held_at=driver.at
    )
    new = driver.send(events.DecisionResolved(decision=7, verdict="apply"))
    assert [abort.worker for abort in of(new, actions.AbortAttempts)] == ["r0"]
    assert driver.core.state.resolution.void == "nothing leaves r2: nobody is no other replica"
