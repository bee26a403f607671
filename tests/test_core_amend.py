"""What an operator changes in mid-run: what applies from when on, what is refused and why, and that all of it is kept."""

from typing import Any

import msgspec
import pytest
from core_world import Driver, World, of, settings

from laminar.core import actions, amend, events, limits, tuning, versions
from laminar.core.engine import Core
from laminar.core.records import GroupState
from laminar.core.settings import Settings
from laminar.ids import Version, WorkerId

R0, R1 = WorkerId("r0"), WorkerId("r1")
V1 = Version(1, 0)


def running(*replicas: str, **changes: Any) -> Driver:
    driver = Driver(settings(**({"buffer_groups_max": 8, "steps": 9} | changes)))
    driver.start(*(replicas or ("r0", "r1")))
    return driver


def change(driver: Driver, **changes: Any) -> list[actions.AnyAction]:
    return driver.send(events.SettingsChanged(changes=changes))


def alarms(new: list[actions.AnyAction]) -> dict[str, str]:
    return {alarm.name: alarm.text for alarm in of(new, actions.RaiseAlarm)}


# ---- settings: all or nothing ------------------------------------------------------------------------------


def test_a_change_applies_from_the_event_on_is_told_and_outlives_the_core() -> None:
    driver = running("r0", buffer_groups_max=2)
    new = change(driver, buffer_groups_max=4, checkpoint_every=5)
    assert len(of(new, actions.StartGroup)) == 0, "r0 has admitted its local batch"
    assert alarms(new) == {"settings-changed": "buffer.max_groups 2 → 4, trainer.checkpoint_every 0 → 5"}
    assert driver.core.settings.buffer_groups_max == 4
    again = Core.restore(settings(buffer_groups_max=2, steps=9), driver.core.snapshot())
    assert again.settings == driver.core.settings
    change(driver, buffer_groups_max=4)
    told = [row.text for row in driver.core.story.of("settings")]
    assert told == ["buffer.max_groups 2 → 4, trainer.checkpoint_every 0 → 5", "they were so already"]


def test_a_larger_buffer_lets_new_groups_begin_at_once() -> None:
    driver = running("r0", "r1", buffer_groups_max=2)
    assert not driver.generating("r1")
    assert [start.worker for start in of(change(driver, buffer_groups_max=4), actions.StartGroup)] == ["r1", "r1"]


def test_a_smaller_buffer_drops_nothing_and_lets_none_begin_until_there_is_room() -> None:
    driver = running("r0", "r1", buffer_groups_max=8, batch_groups=2)
    change(driver, buffer_groups_max=2)
    assert not of(driver.complete_all("r0"), actions.StartGroup)
    assert driver.core.state.ledger.trajectories.dropped == {}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"buffer_groups_max": 1}, "buffer_groups_max = 1: a batch of batch_groups = 2 would never fill"),
        ({"ready_groups_max": 1}, "ready_groups_max = 1"),
        ({"max_staleness": -1}, "max_staleness = -1: 0 or more, or none"),
        ({"draining_share": 0.0}, "draining_share = 0.0"),
        ({"repack_kv_share": "much"}, "repack_kv_share = 'much': expected `float`, got `str`"),
        ({"refresh_policy": "often"}, "refresh_policy = 'often': invalid enum value 'often'"),
        ({"steps": 2.5}, "steps = 2.5: expected `int`, got `float`"),
        ({"seed": 3}, "seed cannot change while a run goes on; these can: steps, buffer_groups_max"),
        ({"batch_groups": 3}, "batch_groups cannot change"),
        ({"coffee": 3}, "there is no setting 'coffee'; these can change: steps"),
        ({}, "no setting is named"),
        ({"checkpoint_every": 2, "steps": 0}, "steps = 0: at least 1"),
        ({"refresh_policy": "continuous", "draining_share": 0.5}, "with progress_timeout_s = 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason_and_nothing_is_changed(changes: dict[str, Any], why: str) -> None:
    driver = running()
    before = driver.core.settings
    assert why in amend.why_not_changed(driver.core.look(), changes)
    assert why in alarms(change(driver, **changes))["settings-refused"]
    assert driver.core.settings == before
    assert driver.core.state.amended == {}


def test_the_steps_that_have_begun_stay() -> None:
    driver = running()
    driver.complete_all("r0")
    driver.step_done()
    driver.complete_all("r1")
    assert driver.core.state.trainer.running == 2
    assert alarms(change(driver, steps=1)) == {"settings-refused": "steps = 1: step 2 has begun"}
    change(driver, steps=2)
    driver.step_done()
    assert driver.all(actions.SaveCheckpoint)[-1].step == 2
    driver.saved()
    assert driver.core.state.finished == "completed"


def test_more_steps_let_a_run_go_on_whose_last_evaluation_is_under_way() -> None:
    driver = running("r0", steps=1, evaluate=True)
    driver.send(events.EvaluationFinished(evaluation=1, accuracy=0.1, num_prompts=1))
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(V1)
    driver.refreshed("r0")
    driver.saved()
    assert driver.core.state.evaluations[-1].name == "after"
    change(driver, steps=3)
    assert [e.name for e in driver.core.state.evaluations] == ["before", "superseded"]
    driver.send(events.EvaluationFinished(evaluation=2, accuracy=0.2, num_prompts=1))
    assert not driver.core.state.finished
    assert driver.generating("r0")


def test_every_changeable_setting_is_one_of_the_core_and_is_checked() -> None:
    names = {field.name for field in msgspec.structs.fields(Settings)}
    assert amend.CHANGEABLE.keys() <= names
    assert amend._AFTER.keys() <= amend.CHANGEABLE.keys()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "12", 12),
        ("max_staleness", "none", None),
        ("max_staleness", "2", 2),
        ("repack_kv_share", "0.5", 0.5),
        ("repack_interval_s", "5", 5.0),
        ("on_stale", "wait", "wait"),
    ],
)
def test_values_are_taken_as_people_type_them(name: str, text: str, value: Any) -> None:
    assert amend.parse(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"), [("steps", "many"), ("steps", "none"), ("on_stale", "keep"), ("seed", "1"), ("x", "1")]
)
def test_what_people_mistype_is_an_error_of_one_line(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        amend.parse(name, text)


# ---- settings: what has to be set right --------------------------------------------------------------------


def test_groups_past_a_new_bound_leave_before_the_next_batch() -> None:
    driver = running("r0", "r1", local_batch_groups=2)
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(V1)
    old = [
        g.id
        for g in driver.core.state.groups.values()
        if g.version == Version(0, 0) and g.state == GroupState.IN_FLIGHT
    ]
    assert old
    change(driver, max_staleness=0, on_stale="wait")
    assert driver.core.state.ledger.trajectories.dropped["stale"] == 2 * len(old)
    change(driver, max_staleness=None)
    assert driver.core.settings.max_staleness is None


def test_a_bound_that_no_weights_would_meet_is_refused() -> None:
    driver = running("r0")
    driver.complete_all("r0")
    driver.step_done()
    driver.unpublishable(V1, "no slot")
    text = alarms(change(driver, max_staleness=0))["settings-refused"]
    assert text == "max_staleness = 0: the newest weights that replicas can pull, v0, are 1 steps behind"
    assert "settings-changed" in alarms(change(driver, max_staleness=1))


def test_a_smaller_local_batch_is_not_filled_beyond_its_size() -> None:
    driver = running("r0", local_batch_groups=6, buffer_groups_max=3)
    assert driver.core.state.replicas[R0].admit_left == 3
    change(driver, local_batch_groups=1)
    new = change(driver, buffer_groups_max=8)
    assert len(of(new, actions.StartGroup)) == 1


def test_stragglers_are_dropped_from_the_change_on_and_no_longer_after_the_next() -> None:
    driver = running("r0", group_size=3, local_batch_groups=1)
    here = driver.generating("r0")
    driver.send(events.TimerFired(), after=1.0)
    driver.report("r0", dict.fromkeys(here, 3), finish=here[:2], reward=dict.fromkeys(here[:2], 1.0))
    change(driver, stragglers="drop", min_group_size=2, straggler_factor=3.0)
    assert driver.core.next_deadline() == 3.0
    change(driver, stragglers="wait")
    driver.send(events.TimerFired(), after=10.0)
    assert not driver.core.state.buffer
    new = change(driver, stragglers="drop")
    assert len(of(new, actions.AbortAttempts)) == 1
    assert len(driver.core.state.buffer) == 1


def test_repacking_can_be_turned_off_and_on() -> None:
    driver = running(repack_interval_s=5.0)
    change(driver, repack_interval_s=0.0)
    assert driver.core.next_deadline() is None
    change(driver, repack_interval_s=2.0)
    assert driver.core.next_deadline() == driver.at + 2.0


def test_without_a_progress_limit_nobody_is_given_up_and_a_suspect_has_to_pull() -> None:
    driver = running(progress_timeout_s=4.0)
    for _ in range(3):
        driver.report("r0", running=1)
        driver.send(events.TimerFired(), after=1.5)
    assert driver.core.state.replicas[R0].suspect
    change(driver, progress_timeout_s=0.0)
    assert (driver.core.state.replicas[R0].suspect, driver.core.state.replicas[R0].quarantined) == (False, True)
    driver.send(events.TimerFired(), after=100.0)
    assert R0 in driver.core.state.replicas
    change(driver, progress_timeout_s=4.0)
    assert driver.core.next_deadline() == driver.at + 1.0


def test_another_refresh_policy_applies_to_whoever_is_behind() -> None:
    driver = running("r0", "r1", "r2", buffer_groups_max=16, local_batch_groups=8, progress_timeout_s=1e6)
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(V1)
    change(driver, refresh_policy="continuous", draining_share=0.34)
    assert len(driver.core.state.draining_to_refresh) == 1
    change(driver, draining_share=1.0)
    assert len(driver.core.state.draining_to_refresh) > 1
    change(driver, refresh_policy="batch")
    assert driver.core.state.draining_to_refresh == {}


def test_a_buffer_larger_than_the_limit_of_drops_raises_that_too() -> None:
    driver = running(drops_without_progress_max=10)
    change(driver, buffer_groups_max=50)
    assert driver.core.settings.drops_without_progress_max == 50


class BoundedWorld(World):
    """Checks every batch that is leased against the bound of that moment."""

    def _on_StartTrainStep(self, action: actions.StartTrainStep) -> None:
        state, bound = self.core.state, self.core.settings.max_staleness
        trainer = Version(state.trainer.step, max(0, state.trainer.branch))
        is_first = action.step not in [step for step, _ in self.attempted]
        for row in action.rows if is_first and bound is not None else ():
            assert versions.staleness(state.branches, trainer, row.behavior_version) <= bound
        super()._on_StartTrainStep(action)


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_the_bound_of_the_moment_holds_whatever_an_operator_changes(on_stale: str) -> None:
    for seed in range(25):
        world = BoundedWorld(
            settings(max_staleness=1, on_stale=on_stale, steps=5, local_batch_groups=3), seed, 0.3, replicas=4
        )
        world.operator = True
        world.run()
        assert not limits.problems(world.core.settings)


# ---- checkpoints and the end -------------------------------------------------------------------------------


def checkpoint(driver: Driver) -> list[actions.AnyAction]:
    return driver.send(events.CheckpointRequested())


def test_a_checkpoint_is_made_at_once_while_the_trainer_waits() -> None:
    driver = running()
    assert alarms(checkpoint(driver)) == {"checkpoint-refused": "there is nothing to save: step 0 is saved"}
    driver.complete_all("r0")
    driver.step_done()
    assert [save.step for save in of(checkpoint(driver), actions.SaveCheckpoint)] == [1]
    assert alarms(checkpoint(driver)) == {"checkpoint-refused": "there is nothing to save: step 1 is being saved"}


def test_a_checkpoint_is_made_after_the_running_step_and_only_once() -> None:
    driver = running()
    driver.complete_all("r0")
    assert not of(checkpoint(driver), actions.SaveCheckpoint)
    assert [save.step for save in of(driver.step_done(), actions.SaveCheckpoint)] == [1]
    driver.saved()
    driver.complete_all("r1")
    assert not of(driver.step_done(), actions.SaveCheckpoint)


def test_a_checkpoint_that_is_asked_for_while_another_is_written_or_the_disk_is_full_comes_after_that() -> None:
    driver = running(checkpoint_every=1, buffer_groups_max=12)
    driver.complete_all("r0")
    driver.step_done()
    driver.complete_all("r1")
    checkpoint(driver)
    assert not of(driver.step_done(), actions.SaveCheckpoint), "that of step 1 is being written"
    change(driver, checkpoint_every=0)
    driver.send(events.StorageFailed(reason="full"))
    assert not of(driver.saved(), actions.SaveCheckpoint)
    new = driver.send(events.StorageRecovered())
    assert [save.step for save in of(new, actions.SaveCheckpoint)] == [2]
    assert not driver.core.state.trainer.save_wanted


def test_a_run_stops_after_the_step_that_an_operator_names() -> None:
    driver = running("r0", "r1")
    driver.send(events.StopAfterStep(step=2))
    driver.complete_all("r0")
    driver.step_done()
    assert not driver.core.state.stopping
    driver.complete_all("r1")
    new = driver.step_done()
    assert [save.step for save in of(new, actions.SaveCheckpoint)] == [2]
    driver.saved()
    assert driver.core.state.finished == "stopped after step 2, as an operator wanted"
    assert driver.core.state.ok


def test_no_group_begins_that_a_run_which_is_to_stop_would_not_train() -> None:
    driver = running("r0", "r1", local_batch_groups=8, buffer_groups_max=20)
    driver.send(events.StopAfterStep(step=1))
    driver.join("r2")
    assert not of(driver.refreshed("r2"), actions.StartGroup)
    assert of(driver.send(events.StopAfterStep(step=0)), actions.StartGroup)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (0, "the run was not to stop after any step"),
        (-3, "step -3 is over; the next to end is 1"),
        (9, "the run ends with step 9 anyway"),
        (99, "the run ends with step 9 anyway"),
    ],
)
def test_an_end_that_cannot_be_is_refused(step: int, why: str) -> None:
    driver = running()
    assert alarms(driver.send(events.StopAfterStep(step=step))) == {"stop-refused": why}
    assert driver.core.state.stop_after == 0


# ---- the sampler -------------------------------------------------------------------------------------------


def sampler(driver: Driver, reference: str) -> list[actions.AnyAction]:
    return driver.send(events.SamplerChanged(reference=reference))


def test_another_sampler_is_asked_from_the_change_on_and_what_the_old_one_says_counts_no_more() -> None:
    driver = running("r0", custom_sampler=True)
    driver.complete_all("r0")
    (old,) = driver.all(actions.AskSampler)
    new = sampler(driver, "mine.py:Fresh")
    assert [type(a) for a in new] == [actions.UseSampler, actions.RaiseAlarm, actions.AskSampler]
    groups = [group.id for group in old.view.groups]
    assert not of(driver.send(events.SamplerAnswered(request=old.request, groups=groups)), actions.StartTrainStep)
    again = of(new, actions.AskSampler)[0]
    assert again.state == b""
    assert of(driver.send(events.SamplerAnswered(request=again.request, groups=groups)), actions.StartTrainStep)
    assert driver.core.state.sampler_word.groups == groups  # type: ignore[union-attr]


def test_fifo_takes_over_from_a_sampler_that_chose_nothing_and_stays_after_a_restore() -> None:
    driver = running("r0", custom_sampler=True, local_batch_groups=3)
    driver.complete_all("r0")
    driver.send(events.SamplerAnswered(request=1, groups=[]))
    assert driver.core.state.sampler_starved
    assert of(sampler(driver, "fifo"), actions.StartTrainStep)
    again = Core.restore(settings(custom_sampler=True, steps=9), driver.core.snapshot())
    assert not again.settings.custom_sampler
    assert again.state.sampler == "fifo"


def test_a_run_without_a_sampler_can_be_given_one() -> None:
    driver = running("r0")
    sampler(driver, "mine.py:Fresh")
    assert of(driver.complete_all("r0"), actions.AskSampler)
    assert driver.core.state.sampler == "mine.py:Fresh"


# ---- replicas ----------------------------------------------------------------------------------------------


def of_replica(driver: Driver, **wanted: Any) -> list[actions.AnyAction]:
    return driver.send(events.ReplicaSettingsChanged(**wanted))


def test_a_replica_that_is_to_have_less_at_once_is_given_none_until_it_has_room() -> None:
    driver = running("r0", local_batch_groups=8, buffer_groups_max=20)
    of_replica(driver, worker=R0, num_requests_max=2)
    here = driver.generating("r0")
    assert len(here) == 16
    assert not of(driver.report("r0", dict.fromkeys(here, 3), finish=here[2:]), actions.StartGroup)
    of_replica(driver, worker=R0, num_requests_max=0)
    assert driver.core.state.replicas[R0].num_requests_max == 64


def test_the_flush_interval_is_told_to_every_replica_and_again_to_a_new_process() -> None:
    driver = running(restarts_max=1)
    new = of_replica(driver, flush_interval_s=2.0)
    assert [(a.worker, a.flush_interval_s) for a in of(new, actions.ReconfigureReplica)] == [("r0", 2.0), ("r1", 2.0)]
    new = of_replica(driver, worker=R1, flush_interval_s=0.5)
    assert [(a.worker, a.flush_interval_s) for a in of(new, actions.ReconfigureReplica)] == [("r1", 0.5)]
    driver.lost("r1")
    new = driver.join("r1", incarnation=2)
    assert [(a.worker, a.flush_interval_s) for a in of(new, actions.ReconfigureReplica)] == [("r1", 0.5)]
    new = of_replica(driver, worker=R1, flush_interval_s=0.0)
    assert [(a.worker, a.flush_interval_s) for a in of(new, actions.ReconfigureReplica)] == [("r1", 2.0)], (
        "as everybody"
    )


def test_a_new_process_has_the_limit_of_the_old_one() -> None:
    driver = running()
    of_replica(driver, num_requests_max=8)
    driver.join("r2")
    assert driver.core.state.replicas[WorkerId("r2")].num_requests_max == 8
    driver.join("r3", requests=4)
    assert driver.core.state.replicas[WorkerId("r3")].num_requests_max == 4
    assert not driver.all(actions.ReconfigureReplica)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"worker": "r9", "num_requests_max": 1}, "there is no replica r9; there are: r0, r1"),
        ({"worker": "r0"}, "neither a flush interval nor a number of requests is named"),
        ({"worker": "r0", "num_requests_max": 65}, "num_requests_max = 65: r0 was started for 64 at once"),
        ({"num_requests_max": -1}, "num_requests_max = -1: at least 1"),
        ({"flush_interval_s": 61.0}, "flush_interval_s = 61: above 0 and at most 60 s"),
        ({"flush_interval_s": 3.0}, "flush_interval_s = 3: one that gives no tokens for 10 s is suspect"),
    ],
)
def test_what_a_replica_cannot_do_is_refused(wanted: dict[str, Any], why: str) -> None:
    driver = running(progress_timeout_s=10.0)
    event = events.ReplicaSettingsChanged(**wanted)
    assert why in tuning.why_not_reconfigured(driver.core.look(), event)
    assert why in alarms(driver.send(event))["replica-settings-refused"]
    assert driver.core.state.replica_settings == {}


def test_a_progress_limit_has_to_leave_time_for_the_flushes_of_the_slowest_replica() -> None:
    driver = running(progress_timeout_s=60.0)
    of_replica(driver, worker=R0, flush_interval_s=10.0)
    text = alarms(change(driver, progress_timeout_s=20.0))["settings-refused"]
    assert text.startswith("progress_timeout_s = 20: a replica flushes every 10 s")
