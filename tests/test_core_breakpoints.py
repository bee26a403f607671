"""Breakpoints: what they hold, what they tell, and that letting go gets past them."""

from typing import Any

import pytest
from core_world import Driver, of, settings

from laminar.core import actions, breakpoints, events, explain, passes, stall, waits
from laminar.core.decisions import DispatchNew, RefreshReplica, Repack, TakeBatch
from laminar.core.engine import Core
from laminar.core.operator_records import Condition, HeldDecision
from laminar.ids import Version, WorkerId

R0, R1 = WorkerId("r0"), WorkerId("r1")
PERIOD = 10.0


def driver(*replicas: str, **changes: Any) -> Driver:
    made = Driver(settings(**({"buffer_groups_max": 8, "steps": 9, "restarts_max": 1} | changes)))
    made.start(*replicas)
    return made


def set_at(made: Driver, where: str, *conditions: tuple[str, str, int | float | str]) -> list[actions.AnyAction]:
    return made.send(events.BreakpointSet(where=where, conditions=[Condition(*each) for each in conditions]))


def let_go(made: Driver, name: str = passes.ALL) -> list[actions.AnyAction]:
    return made.send(events.HoldChanged(pass_name=name, held=False))


def the_held(made: Driver) -> HeldDecision:
    (held,) = made.core.state.held.values()
    return held


def told(new: list[actions.AnyAction]) -> list[tuple[str, str]]:
    return [(hit.where, hit.text) for hit in of(new, actions.BreakpointHit)]


# ---- decisions ---------------------------------------------------------------------------------------------


def test_a_batch_is_held_and_told_when_it_is_about_to_be_taken() -> None:
    made = driver("r0", "r1")
    set_at(made, "sample")
    new = made.complete_all("r0")
    assert told(new) == [("sample", "step 1 gets a batch of 2 groups")]
    assert not of(new, actions.StartTrainStep)
    assert isinstance(the_held(made).decision, TakeBatch)
    assert made.core.state.breakpoints[1].num_hits == 1
    (hit,) = made.core.state.hits
    assert (hit.breakpoint, hit.seq, hit.decision) == (1, made.seq, the_held(made).id)


def test_letting_go_applies_the_decision_that_hit_and_the_next_one_hits_again() -> None:
    made = driver("r0", "r1")
    set_at(made, "sample")
    made.complete_all("r0")
    assert of(let_go(made), actions.StartTrainStep)
    assert not made.core.state.held
    made.complete_all("r1")
    made.step_done()
    assert the_held(made).decision.step == 2  # type: ignore[union-attr]
    assert made.core.state.breakpoints[1].num_hits == 2


def test_each_new_group_is_stepped_by_a_breakpoint_without_conditions() -> None:
    made = driver(local_batch_groups=3)
    made.join("r0")
    made.send(events.TimerFired())
    set_at(made, "dispatch")
    made.refreshed("r0")
    for num in range(3):
        assert the_held(made).decision == DispatchNew(worker=R0)
        assert len(of(let_go(made), actions.StartGroup)) == 1, num
    assert not made.core.state.held


def tailing() -> Driver:
    """r0 generates one trajectory, r1 two; both are past their peaks, so that a check empties r0 into r1."""
    made = driver("r0", "r1", repack_interval_s=PERIOD, local_batch_groups=1, group_size=3)
    for name, num in (("r0", 2), ("r1", 1)):
        here = made.generating(name)
        made.report(name, dict.fromkeys(here, 4), kv_tokens=30)
        made.report(name, dict.fromkeys(here, 4), finish=here[:num], kv_tokens=20)
    made.send(events.TimerFired(), after=PERIOD)
    for name in ("r0", "r1"):
        made.report(name, kv_tokens=10)
    return made


@pytest.mark.parametrize(
    ("conditions", "hits"),
    [
        ([("moves", ">", 0)], True),
        ([("moves", ">", 1)], False),
        ([("moves", "<=", 1), ("tokens", "==", 4)], True),
        ([("replica", "==", "r0")], True),
        ([("replica", "==", "r1")], True),
        ([("replica", "!=", "r1")], False),
        ([("replica", "!=", "r2")], True),
        ([("sources", ">=", 2)], False),
        ([("destinations", "<", 2)], True),
    ],
)
def test_a_repack_is_held_when_all_conditions_are_met(conditions: list[Any], hits: bool) -> None:
    made = tailing()
    set_at(made, "repack", *conditions)
    new = made.send(events.TimerFired(), after=PERIOD)
    assert bool(told(new)) == hits
    assert bool(of(new, actions.AbortAttempts)) != hits
    if hits:
        assert told(new)[0][1] == "trajectories move: 1 from r0 to r1"
        assert isinstance(the_held(made).decision, Repack)
        assert [abort.worker for abort in of(let_go(made, "repack"), actions.AbortAttempts)] == ["r0"]


def test_a_refresh_is_held_for_one_replica_and_others_wait_with_it() -> None:
    made = driver("r0")
    set_at(made, "refresh", ("replica", "==", "r2"), ("behind", "==", 0))
    made.join("r1")
    made.refreshed("r1")
    made.join("r2")
    assert the_held(made).decision == RefreshReplica(worker=WorkerId("r2"), version=Version(0, 0))
    assert explain.why(made.core.look(), "r2").line("refresh").text == (
        f"it is to pull; but the pass refresh is held by breakpoint 1, decision {the_held(made).id} waits for a word"
    )


def test_a_decision_that_hit_may_be_skipped_or_edited() -> None:
    made = driver("r0", "r1")
    set_at(made, "sample", ("step", "==", 1))
    made.complete_all("r0")
    number, decision = the_held(made).id, the_held(made).decision
    assert made.send(events.DecisionResolved(decision=number, verdict="skip")) == []
    made.send(events.TimerFired())
    number = the_held(made).id
    edited = TakeBatch(step=1, groups=list(reversed(decision.groups)))  # type: ignore[union-attr]
    made.send(events.DecisionResolved(decision=number, verdict="apply", replacement=edited))
    assert made.core.state.steps[1].groups == edited.groups


def test_a_decision_that_has_become_void_while_it_was_held_does_not_hold_up_letting_go() -> None:
    made = driver()
    made.join("r0")
    made.send(events.TimerFired())
    set_at(made, "dispatch", ("replica", "==", "r0"))
    made.refreshed("r0")
    made.join("r1")
    made.refreshed("r1")
    made.lost("r0")
    new = let_go(made)
    assert {start.worker for start in of(new, actions.StartGroup)} == {"r1"}
    assert [alarm.name for alarm in of(new, actions.RaiseAlarm)] == ["decision-void"]


def test_what_an_operator_steps_by_hand_hits_nothing() -> None:
    made = driver("r0", "r1")
    made.send(events.HoldChanged(pass_name="sample", held=True))
    set_at(made, "sample")
    assert not told(made.complete_all("r0"))
    assert the_held(made).breakpoint == 0


# ---- events ------------------------------------------------------------------------------------------------


def test_the_death_of_a_replica_holds_every_pass_and_its_deadlines_go_on() -> None:
    made = driver("r0", "r1")
    set_at(made, "replica-dead", ("replica", "==", "r1"))
    assert not told(made.lost("r0"))
    made.send(events.TimerFired(), after=1.0)
    made.join("r0", incarnation=2)
    made.refreshed("r0")
    new = made.lost("r1")
    assert told(new) == [("replica-dead when replica == r1", "replica-dead: replica r1")]
    assert list(made.core.state.holds) == ["dispatch", "refresh", "repack", "sample"]
    assert not of(new, actions.StartGroup), "its siblings wait"
    assert of(made.send(events.TimerFired(), after=10.0), actions.StartWorker)
    assert of(let_go(made), actions.StartGroup)


@pytest.mark.parametrize(
    ("where", "condition", "happen"),
    [
        ("step-finished", ("step", ">=", 1), lambda made: made.step_done()),
        ("version-ready", ("version", "==", "v1"), lambda made: (made.step_done(), made.ready(Version(1, 0)))[1]),
        ("checkpoint-saved", ("step", "==", 1), lambda made: (made.step_done(), made.saved())[1]),
        ("replica-joined", ("replica", "==", "r9"), lambda made: made.join("r9")),
        ("relay-dead", ("relay", "==", "relay-0"), lambda made: made.lost("relay-0")),
        ("alarm", ("name", "==", "drain-refused"), lambda made: made.send(events.DrainRequested(worker=WorkerId("x")))),
        ("alarm", ("name", "!=", "stalled"), lambda made: made.send(events.StorageFailed(reason="full"))),
    ],
)
def test_events_of_every_kind_hold_the_run(where: str, condition: Any, happen: Any) -> None:
    made = driver("r0", "r1", checkpoint_every=1, relay_restarts_max=1)
    made.complete_all("r0")
    set_at(made, where, condition)
    assert not made.core.state.holds
    assert len(told(happen(made))) == 1
    assert len(made.core.state.holds) == 4


def test_the_loss_of_the_trainer_holds_the_run_once() -> None:
    made = driver("r0", trainer_restarts_max=2)
    set_at(made, "trainer-dead")
    assert told(made.lost("trainer-0/0")) == [("trainer-dead", "trainer-dead")]
    assert not told(made.send(events.TimerFired()))


def test_a_dropped_group_hits_once_with_the_reason_of_its_first_sibling() -> None:
    made = driver("r0")
    set_at(made, "trajectory-dropped", ("reason", "==", "reward_error"))
    group = made.generating("r0")[:2]
    new = made.report("r0", fail=dict.fromkeys(group, ("data", "reward_error")))
    assert len(told(new)) == 1
    assert told(new)[0][1].startswith("trajectory-dropped: reason reward_error, group g1.")


def test_a_replica_that_an_operator_takes_out_is_not_dead() -> None:
    made = driver("r0", "r1")
    set_at(made, "replica-dead")
    made.send(events.DrainRequested(worker=R1))
    assert not told(made.complete_all("r1"))
    assert R1 not in made.core.state.replicas


# ---- setting, clearing, keeping ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "conditions", "why"),
    [
        ("coffee", [], "there is no breakpoint at 'coffee'"),
        (
            "repack",
            [("move", ">", 2)],
            "repack has no field 'move'; there are: replica, sources, destinations, moves, tokens",
        ),
        ("repack", [("moves", ">", "two")], "repack: moves is a number, 'two' is not"),
        ("refresh", [("replica", "==", 3)], "refresh: replica is text, 3 is not"),
        ("refresh", [("replica", ">", "r1")], "refresh: replica is text, which is == or != something"),
        ("trainer-dead", [("step", "==", 1)], "trainer-dead has no field 'step'; there are: none"),
    ],
)
def test_what_cannot_be_a_breakpoint_is_refused_with_the_reason(where: str, conditions: list[Any], why: str) -> None:
    made = driver("r0")
    assert why in breakpoints.why_not_set(made.core.state, where, [Condition(*each) for each in conditions])
    (alarm,) = set_at(made, where, *conditions)
    assert isinstance(alarm, actions.RaiseAlarm)
    assert alarm.name == "breakpoint-refused"
    assert why in alarm.text
    assert not made.core.state.breakpoints


def test_there_is_a_limit() -> None:
    made = driver("r0")
    for _ in range(breakpoints.BREAKPOINTS_MAX):
        assert set_at(made, "alarm") == []
    assert "clear some" in set_at(made, "alarm")[0].text  # type: ignore[union-attr]


def test_a_cleared_breakpoint_holds_nothing_any_more_but_what_it_holds_stays_held() -> None:
    made = driver("r0", "r1")
    set_at(made, "sample")
    set_at(made, "refresh")
    made.complete_all("r0")
    assert "there is no breakpoint 9; there are: 1, 2" in made.send(events.BreakpointCleared(breakpoint=9))[0].text  # type: ignore[union-attr]
    made.send(events.BreakpointCleared(breakpoint=1))
    assert the_held(made).breakpoint == 1
    let_go(made)
    made.complete_all("r1")
    made.step_done()
    assert not made.core.state.held
    made.send(events.BreakpointCleared(breakpoint=0))
    assert not made.core.state.breakpoints


def test_breakpoints_hits_and_holds_outlive_the_core() -> None:
    made = driver("r0", "r1")
    set_at(made, "sample", ("staleness", "<", 5), ("groups", "==", 2))
    made.complete_all("r0")
    made.core = Core.restore(made.core.configured, made.core.snapshot())
    assert made.core.state.holds["sample"].breakpoint == 1
    assert (
        breakpoints.in_text("sample", made.core.state.breakpoints[1].conditions)
        == "sample when staleness < 5 and groups == 2"
    )
    assert of(let_go(made), actions.StartTrainStep)


def test_every_field_of_a_decision_can_be_asked_for() -> None:
    made = tailing()
    made.send(events.HoldChanged(pass_name="all", held=True))
    made.join("r2")
    made.send(events.TimerFired(), after=PERIOD)
    seen = {}
    for held in made.core.state.held.values():
        seen[held.pass_name] = breakpoints.of_decision(made.core.look(), held.decision)
    for name, facts in seen.items():
        assert facts.keys() == breakpoints.OF_DECISIONS[name].keys()
    assert {"refresh", "repack"} <= seen.keys()
    assert breakpoints.OF_DECISIONS.keys() == passes.PASSES.keys()


# ---- a held run is not a stalled one -----------------------------------------------------------------------


def test_a_run_that_is_held_is_not_stalled_and_says_who_holds_it() -> None:
    made = driver("r0", "r1", stall_after_s=30.0)
    set_at(made, "step-finished")
    made.complete_all("r0")
    made.step_done()
    made.fill("r1")
    for _ in range(30):
        assert not of(made.send(events.TimerFired(), after=10.0), actions.Stalled)
    by_who = {wait.who: wait.what for wait in waits.waits(made.core.look())}
    assert by_who["pass dispatch"].startswith("the pass dispatch is held by breakpoint 1")


def test_a_hold_on_repack_alone_is_no_excuse() -> None:
    made = driver("r0", stall_after_s=30.0)
    made.send(events.HoldChanged(pass_name="repack", held=True, mode="pause"))
    assert not stall.is_excused(made.core.look())
    made.send(events.HoldChanged(pass_name="dispatch", held=True, mode="pause"))
    assert stall.is_excused(made.core.look())
