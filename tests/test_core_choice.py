"""Custom samplers from the core's side: asked, answered, refused. Events in, actions out."""

import pytest

from laminar.core import actions, events
from laminar.core.sampling import BufferView, GroupView, fifo, problem
from laminar.ids import GroupId, Version, WorkerId
from tests.core_world import Driver, of, settings


def asked(**changes) -> tuple[Driver, actions.AskSampler]:
    """Three groups are complete, a batch needs two of them, one more generates."""
    changes = {"custom_sampler": True, "buffer_groups_max": 6, "local_batch_groups": 4, "steps": 2} | changes
    driver = Driver(settings(**changes))
    driver.start("r0")
    complete(driver, 4)
    (question,) = driver.all(actions.AskSampler)
    complete(driver, 2)
    return driver, question


def complete(driver: Driver, num: int) -> list[actions.AnyAction]:
    here = driver.generating("r0")[:num]
    return driver.report("r0", dict.fromkeys(here, 3), finish=here, reward=dict.fromkeys(here, 1.0))


def answer(driver: Driver, question: actions.AskSampler, groups: list[GroupId], **more) -> list[actions.AnyAction]:
    return driver.send(events.SamplerAnswered(request=question.request, groups=groups, **more))


def leased(new: list[actions.AnyAction]) -> list[GroupId]:
    return list(dict.fromkeys(row.group for action in of(new, actions.StartTrainStep) for row in action.rows))


def alarms(new: list[actions.AnyAction]) -> list[str]:
    return [action.text for action in of(new, actions.RaiseAlarm)]


def test_it_is_asked_once_when_a_batch_is_complete_and_the_trainer_is_free():
    driver, question = asked()
    assert question.num_groups == 2
    assert len(question.view.groups) == 2
    assert len(driver.all(actions.AskSampler)) == 1, "not again while it has not answered"


def test_it_is_not_asked_before_a_batch_is_complete_nor_while_a_step_runs():
    driver, question = asked()
    new = answer(driver, question, list(driver.core.state.buffer)[:2])
    assert leased(new)
    assert not of(complete(driver, 2), actions.AskSampler)


def test_the_view_shows_the_buffer_as_it_is():
    driver = Driver(settings(custom_sampler=True, local_batch_groups=4, buffer_groups_max=6))
    driver.start("r0")
    a, b, c, d = driver.generating("r0")[:4]
    driver.report("r0", {a: 3, b: 5}, finish=[a, b], reward={a: 1.0, b: 0.5})
    driver.at = 7.0
    driver.report("r0", {c: 1, d: 1}, finish=[c, d], reward={c: 0.0, d: 0.0})
    view = driver.all(actions.AskSampler)[0].view
    first = view.groups[0]
    assert (view.step, view.version) == (1, Version(0, 0))
    assert (first.age_s, first.rewards, first.lengths) == (7.0, (1.0, 0.5), (3, 5))
    assert (first.behavior_version, first.staleness) == (Version(0, 0), 0)


def test_a_good_answer_is_the_batch_in_its_order():
    driver, question = asked()
    oldest, middle, newest = driver.core.state.buffer
    assert leased(answer(driver, question, [newest, oldest])) == [newest, oldest]
    assert list(driver.core.state.buffer) == [middle]


@pytest.mark.parametrize(
    ("choose", "more", "complaint"),
    [
        (lambda ids: [], {"error": "raised KeyError: 'reward'"}, "raised KeyError"),
        (lambda ids: [ids[0], 12345], {}, "returned 1 ids that are not complete groups in the buffer, first: 12345"),
        (lambda ids: [ids[0], ids[0]], {}, "returned the same group twice"),
        (lambda ids: ids[:1], {}, "returned 1 groups, the batch needs 2"),
        (lambda ids: ids[:2], {"elapsed_ms": 9.25}, "took 9.2 ms, allowed are 5 ms"),
    ],
)
def test_a_bad_answer_is_named_and_the_batch_is_fifo(choose, more, complaint):
    driver, question = asked()
    ids = list(driver.core.state.buffer)
    new = answer(driver, question, choose(ids), **more)
    assert leased(new) == ids[:2]
    (text,) = alarms(new)
    assert text.startswith("the custom sampler ")
    assert complaint in text


def test_the_policy_stop_ends_the_run_with_the_complaint():
    driver, question = asked(on_sampler_error="stop")
    (end,) = of(answer(driver, question, [], error="raised ValueError: x"), actions.FinishRun)
    assert not end.ok
    assert end.reason == "the custom sampler raised ValueError: x"


def test_an_answer_that_is_slow_but_within_the_configured_budget_counts():
    driver, question = asked(sampler_budget_ms=20.0)
    ids = list(driver.core.state.buffer)
    new = answer(driver, question, ids[1:3], elapsed_ms=9.0)
    assert leased(new) == ids[1:3]
    assert alarms(new) == []


def test_it_may_wait_and_is_asked_again_when_the_buffer_changes():
    driver, question = asked()
    new = answer(driver, question, [])
    assert leased(new) == []
    assert "chose nothing from 3 complete groups" in alarms(new)[0]
    assert not of(driver.send(events.TimerFired()), actions.AskSampler)
    (again,) = of(complete(driver, 2), actions.AskSampler)
    assert again.request == 2
    assert len(again.view.groups) == 4


def test_it_may_wait_while_new_groups_are_allowed_although_none_generates():
    """The replica pulls weights, so nothing is in flight; but the buffer has room, so more will come."""
    driver = Driver(settings(custom_sampler=True, batch_groups=1, buffer_groups_max=4, local_batch_groups=1, steps=4))
    driver.start("r0")
    driver.complete_all("r0")
    question = driver.all(actions.AskSampler)[-1]
    answer(driver, question, list(driver.core.state.buffer))
    driver.complete_all("r0")
    driver.step_done()
    question = driver.all(actions.AskSampler)[-1]
    driver.ready(Version(1, 0))
    driver.complete_all("r0")
    state = driver.core.state
    assert state.replicas[WorkerId("r0")].target == Version(1, 0)
    assert len(state.buffer) == len(state.groups) - 1 == 2, "all that are not leased are in the buffer"
    new = answer(driver, question, [])
    assert leased(new) == []
    assert "although" not in alarms(new)[0]
    driver.refreshed("r0")
    assert of(driver.complete_all("r0"), actions.AskSampler)


def test_it_may_not_wait_when_nothing_else_can_complete():
    driver = Driver(settings(custom_sampler=True, batch_groups=2, buffer_groups_max=2, local_batch_groups=2))
    driver.start("r0")
    driver.complete_all("r0")
    (question,) = driver.all(actions.AskSampler)
    ids = list(driver.core.state.buffer)
    new = answer(driver, question, [])
    assert leased(new) == ids
    assert "chose nothing although no other group can complete" in alarms(new)[0]


def test_an_answer_to_another_question_is_ignored():
    driver, question = asked()
    late = events.SamplerAnswered(request=question.request + 5, groups=list(driver.core.state.buffer)[:2])
    assert driver.send(late) == []
    ids = list(driver.core.state.buffer)[:2]
    assert leased(answer(driver, question, ids)) == ids
    assert answer(driver, question, ids) == [], "a question is answered once"


def test_an_answer_after_the_stop_starts_nothing():
    driver, question = asked()
    driver.send(events.StopRequested(reason="asked"))
    assert leased(answer(driver, question, [])) == []


def test_its_state_is_handed_over_with_the_next_question_and_saved_with_the_run():
    driver, question = asked(steps=3)
    assert question.state == b""
    answer(driver, question, list(driver.core.state.buffer)[:2], state=b"\x81\xa1n\x01")
    complete(driver, 2)
    new = driver.step_done()
    (again,) = of(new, actions.AskSampler) or [driver.all(actions.AskSampler)[-1]]
    assert again.state == b"\x81\xa1n\x01"


def test_fifo_takes_the_oldest_complete_groups():
    groups = tuple(
        GroupView(
            id=GroupId(i), prompt=i, age_s=0.0, behavior_version=Version(0, 0), staleness=0, rewards=(), lengths=()
        )
        for i in (4, 2, 9)
    )
    assert fifo(BufferView(groups=groups, step=1, version=Version(0, 0)), 2) == [4, 2]


def test_no_choice_is_no_problem():
    assert problem([], {}, 3) == ""
