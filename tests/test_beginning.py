"""With which state a controller begins that resumes a run from a checkpoint: what an operator had changed, and who overrules it."""

from pathlib import Path

import pytest
from core_world import Driver, settings

from laminar import checkpoints
from laminar.controller.beginning import Beginning, begin
from laminar.core import actions, amend, events
from laminar.core.operator_records import ReplicaSettings
from laminar.core.settings import Settings
from laminar.errors import ConfigError, StartError
from laminar.ids import WorkerId

SAMPLER = """
class Mine:
    def select(self, view, num_groups): return []
    def state(self): return {}
    def load_state(self, state): pass
"""
CONFIGURED = settings(steps=9)


def saved(directory: Path, *changes: events.AnyEvent) -> Path:
    """A checkpoint of a run in which an operator has said so."""
    driver = Driver(CONFIGURED)
    driver.start("r0", "r1")
    driver.complete_all("r0")
    for event in changes:
        driver.send(event)
    driver.send(events.StopRequested(reason="asked"))
    driver.step_done()
    return checkpoint(directory, driver.all(actions.SaveCheckpoint)[-1].data_state)


def checkpoint(directory: Path, data_state: bytes) -> Path:
    path = directory / "step-1"
    path.mkdir()
    (path / checkpoints.DATA_STATE).write_bytes(data_state)
    checkpoints.write_manifest(path, {checkpoints.DATA_STATE: checkpoints.digest(path / checkpoints.DATA_STATE)})
    return path


def resumed(path: Path, configured: Settings = CONFIGURED, *named: str) -> Beginning:
    return begin(configured, None, history=None, checkpoint=path, named=named)


def changed(**changes: object) -> events.AnyEvent:
    return events.SettingsChanged(changes=changes)  # type: ignore[arg-type]


def test_what_an_operator_had_changed_goes_on_and_is_told(tmp_path: Path) -> None:
    found = resumed(saved(tmp_path, changed(buffer_groups_max=8, checkpoint_every=5)))
    assert (found.core.settings.buffer_groups_max, found.core.settings.checkpoint_every) == (8, 5)
    assert found.core.configured == CONFIGURED
    assert found.told() == (
        "goes on with what an operator has changed: buffer.max_groups = 8, trainer.checkpoint_every = 5; "
        "KEY=VALUE after --resume wins over it"
    )


def test_what_a_resume_names_anew_wins_over_that(tmp_path: Path) -> None:
    path = saved(tmp_path, changed(buffer_groups_max=8, checkpoint_every=5))
    found = resumed(path, settings(steps=9, buffer_groups_max=7), "buffer.max_groups")
    assert (found.core.settings.buffer_groups_max, found.core.settings.checkpoint_every) == (7, 5)
    assert resumed(path, CONFIGURED, *amend.ALL_KEYS).told() == ""


def test_the_state_that_is_recorded_makes_the_same_core_again(tmp_path: Path) -> None:
    """So that a replay has what the run had."""
    found = resumed(saved(tmp_path, changed(buffer_groups_max=8, repack_interval_s=3.0)), CONFIGURED, "repack.enabled")
    again = type(found.core).resumed(found.core.configured, found.data_state)
    assert again.settings == found.core.settings
    assert (again.settings.buffer_groups_max, again.settings.repack_interval_s) == (8, 0.0)


def test_settings_that_do_not_go_with_what_was_changed_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = saved(tmp_path, changed(buffer_groups_max=4))
    with pytest.raises(ConfigError, match=r"buffer_groups_max = 4(.|\n)*what an operator had changed before"):
        resumed(path, settings(steps=9, batch_groups=5, buffer_groups_max=9), "trainer.batch_prompts")


def test_the_sampler_that_an_operator_had_chosen_is_loaded_or_the_resume_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SAMPLER)
    path = saved(
        tmp_path, events.SamplerChanged(reference=f"{tmp_path}/mine.py:Mine"), changed(on_sampler_error="fifo")
    )
    found = resumed(path)
    assert type(found.sampler).__name__ == "Mine"
    assert found.core.settings.custom_sampler
    assert f"buffer.sampler = {tmp_path}/mine.py:Mine" in found.told()
    (tmp_path / "mine.py").rename(tmp_path / "other.py")
    with pytest.raises(
        ConfigError, match=r"no file .*; an operator had chosen it before the checkpoint: mend it, or resume with"
    ):
        resumed(path)
    anew = resumed(path, CONFIGURED, "buffer.sampler")
    assert (anew.sampler, anew.core.settings.custom_sampler, anew.core.state.sampler) == (None, False, "")


def test_fifo_that_an_operator_had_chosen_wins_over_the_configured_sampler(tmp_path: Path) -> None:
    found = resumed(saved(tmp_path, events.SamplerChanged(reference="fifo")), settings(steps=9, custom_sampler=True))
    assert (found.sampler, found.core.settings.custom_sampler) == (None, False)


def test_what_was_changed_of_replicas_goes_on_too_and_is_overruled_by_their_keys(tmp_path: Path) -> None:
    worker = WorkerId("r1")
    path = saved(tmp_path, events.ReplicaSettingsChanged(worker=worker, num_requests_max=8, flush_interval_s=2.0))
    assert "rollout.flush_interval_s = 2 of r1, rollout.max_concurrent = 8 of r1" in resumed(path).told()
    found = resumed(path, CONFIGURED, "rollout.max_concurrent").core.state.replica_settings
    assert found == {worker: ReplicaSettings(flush_interval_s=2.0, num_requests_max=0)}
    with pytest.raises(ConfigError, match="a replica flushes every 2 s"):
        resumed(path, settings(steps=9, progress_timeout_s=4.0), "rollout.progress_timeout_s")


def test_what_was_held_or_watched_for_does_not_go_on(tmp_path: Path) -> None:
    """A resumed run that stood still because of a debugger of last week would look broken."""
    held = events.HoldChanged(pass_name="repack", held=True)
    state = resumed(
        saved(tmp_path, events.BreakpointSet(where="sample"), held, events.StopAfterStep(step=5))
    ).core.state
    assert (state.holds, state.held, state.breakpoints, state.stop_after) == ({}, {}, {}, 0)


def test_a_checkpoint_whose_state_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot resume from .*step-1: data_state\.bin"):
        resumed(checkpoint(tmp_path, b"garbage"))
