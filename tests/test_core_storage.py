"""While nothing can be written, nothing new begins; what goes on goes on; nothing is lost."""

from core_world import Driver, World, of, settings
from test_core_fuzz import check_end

from laminar.core import actions, events

FULL = events.StorageFailed(reason="no space left on /runs")


def driver(**changes) -> Driver:
    result = Driver(
        settings(**({"batch_groups": 1, "buffer_groups_max": 8, "local_batch_groups": 4, "steps": 9} | changes))
    )
    result.start("r0")
    return result


def test_an_alarm_says_why_and_that_nothing_begins_once():
    d = driver()
    (alarm,) = of(d.send(FULL), actions.RaiseAlarm)
    assert alarm.name == "storage-failed"
    assert "no space left on /runs" in alarm.text
    assert d.send(FULL) == []


def test_no_group_and_no_step_begins_but_what_generates_goes_on_and_is_kept():
    d = driver()
    d.send(FULL)
    here = d.generating("r0")
    new = d.report("r0", dict.fromkeys(here, 3), finish=here, reward=dict.fromkeys(here, 1.0))
    assert not of(new, actions.StartGroup)
    assert not of(new, actions.StartTrainStep)
    assert len(d.core.state.buffer) == len(here) // 2
    assert d.core.state.ledger.tokens.buffered == 3 * len(here)


def test_a_sibling_that_failed_is_tried_again_meanwhile():
    d = driver()
    d.send(FULL)
    first = d.generating("r0")[0]
    assert of(d.report("r0", {}, fail={first: ("infra", "engine_error")}), actions.StartGroup)


def test_everything_begins_again_when_it_has_cleared():
    d = driver()
    d.send(FULL)
    d.complete_all("r0")
    new = d.send(events.StorageRecovered())
    assert [a.step for a in of(new, actions.StartTrainStep)] == [1]
    assert of(new, actions.StartGroup)


def test_a_step_that_runs_ends_and_its_checkpoint_is_made_up_for_before_the_next_step():
    d = driver(checkpoint_every=1)
    d.complete_all("r0")
    d.send(FULL)
    new = d.step_done()
    assert not of(new, actions.SaveCheckpoint)
    assert not of(new, actions.StartTrainStep)
    new = d.send(events.StorageRecovered())
    order = [type(a).__name__ for a in new if isinstance(a, actions.SaveCheckpoint | actions.StartTrainStep)]
    assert order == ["SaveCheckpoint", "StartTrainStep"]
    assert of(new, actions.SaveCheckpoint)[0].step == 1


def test_a_recovery_saves_nothing_that_is_not_due():
    d = driver(checkpoint_every=2, steps=6)
    d.complete_all("r0")
    d.send(FULL)
    d.step_done()
    assert not of(d.send(events.StorageRecovered()), actions.SaveCheckpoint)


def test_a_checkpoint_that_the_full_disk_spoils_does_not_count_as_a_try():
    d = driver(steps=1)
    d.complete_all("r0")
    d.step_done()
    d.send(FULL)
    for _ in range(5):
        d.send(events.CheckpointFailed(step=1, reason="no space"))
    assert not d.core.state.stopping
    assert [a.step for a in of(d.send(events.StorageRecovered()), actions.SaveCheckpoint)] == [1]
    (end,) = of(d.saved(), actions.FinishRun)
    assert end.ok


def test_a_run_that_is_stopped_meanwhile_ends_when_its_checkpoint_can_be_written():
    d = driver()
    d.complete_all("r0")
    d.send(FULL)
    d.step_done()
    assert not of(d.send(events.StopRequested(reason="asked")), actions.FinishRun)
    d.send(events.StorageRecovered())
    assert of(d.saved(), actions.FinishRun)[0].ok


def stopped_on_a_full_disk() -> Driver:
    """Step 1 is trained and in no checkpoint."""
    d = driver()
    d.complete_all("r0")
    d.send(FULL)
    d.step_done()
    assert not of(d.send(events.StopRequested(reason="asked")), actions.FinishRun)
    return d


def test_a_stop_waits_for_the_disk_only_so_long_and_says_what_was_not_written():
    d = stopped_on_a_full_disk()
    deadline = d.core.next_deadline()
    assert deadline == d.at + d.core.settings.stop_grace_s
    assert not of(d.send(events.TimerFired(), after=deadline - d.at - 1.0), actions.FinishRun)
    out = d.send(events.TimerFired(), after=1.0)
    (alarm,) = of(out, actions.RaiseAlarm)
    assert alarm.name == "not-saved"
    assert "step 1 is in no checkpoint" in alarm.text
    assert "no space left on /runs" in alarm.text
    (end,) = of(out, actions.FinishRun)
    assert not end.ok, "trained steps were lost"
    assert d.core.next_deadline() is None


def test_a_disk_that_fails_again_and_again_gives_a_stop_no_more_time():
    d = stopped_on_a_full_disk()
    deadline = d.core.next_deadline()
    d.send(events.StorageRecovered(), after=1.0)
    d.send(FULL, after=1.0)
    assert d.core.next_deadline() == deadline
    d.send(events.TimerFired(), after=deadline - d.at)
    assert d.core.state.trainer.saving == 1
    assert d.core.next_deadline() > d.at, "the checkpoint that is being written has an end of its own"
    assert of(d.send(events.CheckpointFailed(step=1, reason="no space")), actions.FinishRun)


def test_a_failure_of_the_run_ends_on_a_full_disk_too():
    d = driver()
    d.complete_all("r0")
    d.send(FULL)
    d.step_done()
    d.send(events.FailureReported(reason="a worker did not start"))
    assert of(d.send(events.TimerFired(), after=d.core.settings.stop_grace_s), actions.FinishRun)


def test_a_custom_sampler_is_not_asked_and_its_late_answer_waits():
    d = driver(custom_sampler=True)
    d.complete_all("r0")
    (ask,) = d.all(actions.AskSampler)
    d.send(FULL)
    chosen = [group.id for group in ask.view.groups[:1]]
    assert not of(d.send(events.SamplerAnswered(request=ask.request, groups=chosen)), actions.StartTrainStep)
    assert of(d.send(events.StorageRecovered()), actions.StartTrainStep)


def test_a_sampler_that_chose_nothing_is_not_overruled_because_the_disk_is_full():
    d = driver(custom_sampler=True, buffer_groups_max=12)
    d.complete_all("r0")
    (ask,) = d.all(actions.AskSampler)
    d.send(FULL)
    d.complete_all("r0")
    assert len(d.core.state.groups) < 12, "more could begin"
    d.send(events.SamplerAnswered(request=ask.request, groups=[]))
    assert not d.core.state.sampler_answer


def test_random_worlds_in_which_trainer_and_disk_fail_end_with_closed_books() -> None:
    lost = full = unsaved = 0
    for seed in range(40):
        world = World(settings(restarts_max=3, trainer_restarts_max=20, steps=5, checkpoint_every=2), seed, faults=0.1)
        world.disk_fills, world.stop_after = True, 60 * (seed % 2)
        world.run()
        check_end(world)
        lost += sum(a.worker == "trainer-0" for a in world.all(actions.StartWorker))
        full += sum(a.name == "storage-failed" for a in world.all(actions.RaiseAlarm))
        unsaved += sum(a.name == "not-saved" for a in world.all(actions.RaiseAlarm))
    assert lost
    assert full
    assert unsaved
