"""What a checkpoint carries, and a run that goes on from it."""

import msgspec
import pytest

from laminar.core import actions, events, ledger
from laminar.core.engine import Core
from laminar.core.prompts import draw
from laminar.core.records import PromptPool
from laminar.core.resume import DataState
from laminar.ids import Version, format_id
from tests.core_world import Driver, of, settings


def data(driver: Driver) -> bytes:
    return driver.all(actions.SaveCheckpoint)[-1].data_state


def resumed(before: Driver, boot: int = 2) -> Driver:
    after = Driver(before.core.settings, Core.resumed(before.core.settings, data(before)))
    after.start("r0", step=after.core.state.trainer.checkpoint, boot=boot)
    return after


def stopped_run(**changes) -> Driver:
    """One step is trained, two groups are complete, more generate; then the run is stopped."""
    changes = {"steps": 9, "batch_groups": 2, "buffer_groups_max": 8, "local_batch_groups": 4} | changes
    driver = Driver(settings(**changes))
    driver.start("r0")
    driver.complete_all("r0")
    driver.send(events.StopRequested(reason="asked"))
    driver.step_done()
    driver.saved()
    assert driver.all(actions.FinishRun)[0].ok
    return driver


def prompts_of(driver: Driver) -> list[int]:
    first = {action.group: action.prompt for action in driver.all(actions.StartGroup)}
    return list(first.values())


def test_a_resumed_run_draws_the_interrupted_prompts_first_then_goes_on_in_order():
    before = stopped_run()
    trained = [row.group for row in before.all(actions.StartTrainStep)[0].rows]
    prompts = {action.group: action.prompt for action in before.all(actions.StartGroup)}
    interrupted = [prompt for group, prompt in prompts.items() if group not in trained]
    assert interrupted
    after = resumed(before)
    after.complete_all("r0")
    assert prompts_of(after)[: len(interrupted)] == interrupted
    drawn = [prompts[group] for group in dict.fromkeys(trained)] + prompts_of(after)
    order = PromptPool()
    assert sorted(drawn) == sorted(draw(order, before.core.settings) for _ in drawn)


def test_a_run_that_is_interrupted_twice_keeps_the_order_of_its_prompts():
    before = stopped_run()
    first = msgspec.msgpack.decode(data(before), type=DataState).prompts.returned
    assert len(first) > 2
    tight = msgspec.structs.replace(before.core.settings, buffer_groups_max=2)
    after = Driver(tight, Core.resumed(tight, data(before)))
    after.start("r0", step=1, boot=2)
    after.complete_all("r0")
    after.send(events.StopRequested(reason="again"))
    after.step_done()
    second = msgspec.msgpack.decode(data(after), type=DataState).prompts.returned
    assert second == first[2:], "two were trained; of the rest those that generated come first"


def test_the_ledger_stays_closed_across_a_resume_and_names_what_was_given_back():
    before = stopped_run()
    after = resumed(before)
    for account, old in (
        (after.core.state.ledger.trajectories, before.core.state.ledger.trajectories),
        (after.core.state.ledger.tokens, before.core.state.ledger.tokens),
    ):
        assert ledger.is_closed(account)
        assert account.committed == old.committed > 0
        assert account.dropped["resume"] == old.dropped["stopped"]


def test_a_resumed_run_goes_on_at_the_next_step_on_a_new_branch():
    before = stopped_run()
    after = resumed(before)
    assert after.all(actions.PublishVersion)[0].version == Version(1, 1)
    after.complete_all("r0")
    assert after.all(actions.StartTrainStep)[0].step == 2


def test_ids_of_a_resumed_run_are_never_those_of_the_run_before():
    before = stopped_run()
    after = resumed(before, boot=2)
    assert {format_id(a.group).split(".")[0] for a in before.all(actions.StartGroup)} == {"1"}
    assert {format_id(a.group).split(".")[0] for a in after.all(actions.StartGroup)} == {"2"}


def test_a_resumed_run_completes():
    after = resumed(stopped_run(steps=2))
    after.complete_all("r0")
    after.step_done()
    after.saved()
    assert (after.core.state.finished, after.core.state.ok) == ("completed", True)
    assert after.core.state.ledger.trajectories.committed == 8


def test_a_run_that_was_complete_ends_at_once_when_resumed():
    before = stopped_run(steps=1)
    after = Driver(before.core.settings, Core.resumed(before.core.settings, data(before)))
    after.send(events.RunStarted(boot=2))
    assert [a.ok for a in of(after.rank(step=1), actions.FinishRun)] == [True]


def test_a_trainer_that_restored_another_checkpoint_is_refused():
    before = stopped_run()
    after = Driver(before.core.settings, Core.resumed(before.core.settings, data(before)))
    after.send(events.RunStarted(boot=2))
    assert "already committed" in of(after.rank(step=0), actions.FinishRun)[0].reason


def test_a_finished_evaluation_is_not_repeated_after_a_resume():
    driver = Driver(settings(evaluate=True, steps=9, buffer_groups_max=8))
    driver.start("r0")
    driver.send(events.EvaluationFinished(evaluation=1, accuracy=0.25, num_prompts=4))
    driver.complete_all("r0")
    driver.send(events.StopRequested(reason="asked"))
    driver.step_done()
    after = resumed(driver)
    assert not after.all(actions.RunEvaluation)
    assert [(e.name, e.accuracy) for e in after.core.state.evaluations] == [("before", 0.25)]


def test_the_samplers_state_survives():
    driver = Driver(settings(custom_sampler=True, steps=9, buffer_groups_max=8))
    driver.start("r0")
    driver.complete_all("r0")
    (question,) = driver.all(actions.AskSampler)
    groups = list(driver.core.state.buffer)[:2]
    driver.send(events.SamplerAnswered(request=question.request, groups=groups, state=b"\x81\xa1n\x05"))
    driver.send(events.StopRequested(reason="asked"))
    driver.step_done()
    after = resumed(driver)
    after.complete_all("r0")
    assert after.all(actions.AskSampler)[0].state == b"\x81\xa1n\x05"


def test_a_checkpoint_between_steps_to_be_redone_counts_only_what_it_contains():
    """After a restore to step 0, step 1 is redone and saved while step 2 is still leased for its second attempt."""
    driver = Driver(settings(steps=9, batch_groups=1, buffer_groups_max=4, checkpoint_every=1))
    driver.start("r0")
    driver.complete_all("r0")
    driver.step_done()
    assert driver.core.state.trainer.running == 2
    driver.restore_trainer(step=0)
    driver.step_done()
    saved = msgspec.msgpack.decode(data(driver), type=DataState)
    account = saved.ledger.trajectories
    assert saved.step == 1
    assert (account.committed, ledger.is_closed(account)) == (2, True)
    assert account.dropped["resume"] == 2
    assert len(saved.prompts.returned) == 1


def test_a_checkpoint_says_the_same_whether_or_not_it_is_the_last():
    """A run that is killed after a checkpoint resumes like one that was stopped with it."""
    driver = Driver(settings(steps=9, batch_groups=1, buffer_groups_max=4, checkpoint_every=1))
    driver.start("r0")
    driver.complete_all("r0")
    driver.step_done()
    after = resumed(driver)
    account = after.core.state.ledger.trajectories
    assert (account.committed, ledger.is_closed(account)) == (2, True)


def test_garbage_is_refused():
    with pytest.raises(msgspec.DecodeError):
        Core.resumed(settings(), b"garbage")


# ---- the prompt pool ---------------------------------------------------------------------------------------


def test_every_epoch_draws_each_prompt_once_in_another_order():
    pool, small = PromptPool(), settings(num_prompts=20)
    epochs = [[draw(pool, small) for _ in range(20)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffle_the_order_is_that_of_the_data():
    pool, small = PromptPool(), settings(num_prompts=3, shuffle=False)
    assert [draw(pool, small) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_another_seed_gives_another_order():
    orders = [
        [draw(pool, settings(seed=seed)) for _ in range(50)] for seed, pool in ((1, PromptPool()), (2, PromptPool()))
    ]
    assert orders[0] != orders[1]


def test_returned_prompts_do_not_move_the_position():
    pool = PromptPool(returned=[7, 3], position=5)
    small = settings(num_prompts=50, shuffle=False)
    assert [draw(pool, small) for _ in range(3)] == [7, 3, 5]
