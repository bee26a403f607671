"""The run's directory: names, what is taken, what can be resumed, the token."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from laminar import checkpoints, configfile
from laminar.config import Config, ModelConfig, RunConfig, TaskConfig
from laminar.controller import rundir
from laminar.controller.eventlog import EventLog
from laminar.controller.rundir import RunDirectory
from laminar.errors import ConfigError, StartError

pytestmark = pytest.mark.timeout(20)


def config(directory: Path, name: str = "mine", dataset: str = "reasoning_gym:spell_backward") -> Config:
    return Config(
        run=RunConfig(dir=str(directory), name=name), model=ModelConfig(path="/model"), task=TaskConfig(dataset=dataset)
    )


def test_a_new_run_has_its_configuration_its_hosts_and_its_places(tmp_path: Path) -> None:
    run = rundir.create(config(tmp_path), "localhost trainer\n")
    assert run.path == tmp_path / "mine"
    assert run.hosts.read_text() == "localhost trainer\n"
    assert 'name = "mine"' in run.config.read_text()
    assert run.config.read_text() == configfile.dumps(config(tmp_path))
    assert all(path.is_dir() for path in (run.logs, run.tokens, run.checkpoints))


@pytest.mark.parametrize(
    ("dataset", "start"),
    [
        ("reasoning_gym:spell_backward", "spell_backward-2"),
        ("/data/my prompts (v2).jsonl", "my_prompts__v2_-2"),
        ("gsm8k.parquet", "gsm8k-2"),
        (f"/data/{'long' * 60}.jsonl", "longlong"),
    ],
)
def test_a_run_without_a_name_is_called_after_its_data_and_the_time(tmp_path: Path, dataset: str, start: str) -> None:
    run = rundir.create(config(tmp_path, "", dataset), "")
    assert run.name.startswith(start)
    assert f'name = "{run.name}"' in run.config.read_text()
    assert len(run.name) <= 60


@pytest.mark.parametrize("name", ["a/b", "..", ".", "../x", "my run", "a\0b", ".hidden", "ü", "a\n"])
def test_a_name_that_is_no_plain_directory_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name = .*a plain directory name is expected"):
        rundir.create(config(tmp_path, name), "")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused_with_the_way_to_resume(tmp_path: Path) -> None:
    run = rundir.create(config(tmp_path), "")
    run.database.touch()
    with pytest.raises(ConfigError, match=rf"the run {run.path} exists; resume it with --resume {run.path}"):
        rundir.create(config(tmp_path), "")


@pytest.mark.parametrize("name", ["x" * 300, "mine"])
def test_a_directory_that_cannot_be_made_is_a_start_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    where = tmp_path if len(name) > 255 else tmp_path / "file"
    with pytest.raises(StartError, match=r"cannot write the run's directory .*: (File name too long|Not a directory)"):
        rundir.create(config(where, name), "")


def test_a_run_that_ended_before_its_first_step_leaves_its_name_free_and_its_logs(tmp_path: Path) -> None:
    run, said = rundir.create(config(tmp_path), ""), list[str]()
    (run.logs / "trainer-0.log").write_text("no such device\n")
    boots(run, outcome="trainer-0 did not start", snapshot=True)
    (run.tokens / "0001-000001.seg").write_bytes(b"left")
    again = rundir.create(config(tmp_path), "", said.append)
    assert again.path == run.path
    assert said == [
        f"{run.path}: a run of this name ended before its first step; its directory is used again, logs are added to"
    ]
    assert not run.database.exists()
    assert list(run.tokens.iterdir()) == []
    assert (run.logs / "trainer-0.log").read_text() == "no such device\n"


def test_a_run_with_a_step_or_a_checkpoint_or_a_controller_that_was_killed_keeps_its_name(tmp_path: Path) -> None:
    for name in ("step", "checkpoint", "killed"):
        run = rundir.create(config(tmp_path, name), "")
        boots(run, outcome="" if name == "killed" else "stopped", snapshot=True)
        if name == "step":
            database = sqlite3.connect(run.database)
            with database:
                database.execute("INSERT INTO metrics VALUES (1, 'reward/mean', 0.5)")
            database.close()
        if name == "checkpoint":
            (run.checkpoints / "step-1").mkdir()
        with pytest.raises(ConfigError, match="exists; resume it"):
            rundir.create(config(tmp_path, name), "")


def test_a_run_that_has_just_begun_keeps_its_name(tmp_path: Path) -> None:
    run = rundir.create(config(tmp_path), "")
    log = EventLog(run.database, 0.01)
    log.begin_boot(1.0, 7, "here", 0)
    with pytest.raises(StartError, match="in use by the controller with pid 7 on here"):
        rundir.create(config(tmp_path), "")
    log.close()


def test_what_others_made_or_workers_wrote_to_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    run = rundir.create(config(tmp_path), "")
    assert "logs are in" in rundir.discard(run)
    new = rundir.create(config(tmp_path, "new"), "")
    (new.logs / "controller.log").touch()
    (new.logs / "relay-0.log").touch()
    assert "logs are in" in rundir.discard(new)
    (new.logs / "relay-0.log").unlink()
    assert "is removed again" in rundir.discard(new)
    assert not new.path.exists()
    assert run.path.exists()


def resumable(directory: Path, *steps: str) -> RunDirectory:
    run = rundir.create(config(directory), "")
    run.database.touch()
    for step in steps:
        (run.checkpoints / step).mkdir()
    return run


def test_the_newest_complete_checkpoint_is_the_one_to_resume_from(tmp_path: Path) -> None:
    run = resumable(tmp_path, "step-9", "step-10", "step-11.partial", "step-", "other")
    assert rundir.reopen(run.path).last_checkpoint() == run.checkpoints / "step-10"
    assert checkpoints.complete(run.checkpoints) == [run.checkpoints / "step-9", run.checkpoints / "step-10"]


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            ConfigError, match=r"is not a run's directory \(config\.toml and run\.db are expected there\)"
        ):
            rundir.reopen(path)


def test_a_checkpoint_that_was_not_written_to_the_end_is_none(tmp_path: Path) -> None:
    assert rundir.reopen(resumable(tmp_path, "step-1.partial").path).last_checkpoint() is None


def boots(run: rundir.RunDirectory, *, outcome: str, snapshot: bool) -> None:
    log = EventLog(run.database, 0.01)
    log.begin_boot(1.0, 1, "here", 0)
    if snapshot:
        log.snapshot(1, b"state")
    log._commit(sqlite3.connect(run.database))
    if outcome:
        log.write("UPDATE boots SET outcome = ? WHERE boot = ?", (outcome, log._boot))
        log._commit(sqlite3.connect(run.database))
    log.close()


def test_a_run_is_interrupted_when_its_last_controller_said_nothing_and_left_a_state(tmp_path: Path) -> None:
    run = rundir.create(config(tmp_path, "mine"), "")
    assert not run.is_interrupted
    boots(run, outcome="", snapshot=False)
    assert not run.is_interrupted
    boots(run, outcome="", snapshot=True)
    assert run.is_interrupted
    boots(run, outcome="completed", snapshot=True)
    assert not run.is_interrupted


def test_the_latest_run_is_the_one_touched_last(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in"):
        rundir.latest(tmp_path)
    for number, name in enumerate(("b", "c", "a")):
        run = rundir.create(config(tmp_path, name), "")
        run.database.touch()
        os.utime(run.database, (number, number))
    assert rundir.latest(tmp_path) == tmp_path / "a"


def test_the_token_is_long_new_each_time_and_for_this_user_only(tmp_path: Path) -> None:
    run = rundir.create(config(tmp_path), "")
    run.token.write_text("an old one, readable by all")
    run.token.chmod(0o644)
    mask = os.umask(0)
    try:
        first = rundir.write_token(run)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(run.token.stat().st_mode) == 0o600
    assert run.token.read_text() == first
    assert len(first) >= 40
    assert rundir.write_token(run) != first


def test_a_link_in_place_of_the_token_is_replaced_and_not_followed(tmp_path: Path) -> None:
    run = rundir.create(config(tmp_path), "")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("untouched")
    run.token.symlink_to(elsewhere)
    rundir.write_token(run)
    assert elsewhere.read_text() == "untouched"
    assert not run.token.is_symlink()


def test_a_url_that_cannot_be_written_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot write"):
        rundir.write_url(RunDirectory(tmp_path / "nowhere"), "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            sqlite3.SQLITE_CANTOPEN,
            "cannot be read (no luck): is its directory there, with all files, and yours to write?",
        ),
        (sqlite3.SQLITE_CORRUPT, "is damaged (no luck); go on from the last checkpoint with --from-checkpoint"),
    ],
)
def test_a_log_that_cannot_be_opened_is_not_called_damaged(
    tmp_path: Path, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        error = sqlite3.OperationalError("no luck")
        error.sqlite_errorcode = code
        raise error

    run = RunDirectory(tmp_path)
    monkeypatch.setattr(sqlite3, "connect", fails)
    assert run.unreadable() == f"the log {tmp_path}/run.db {words}"


def test_a_token_that_is_no_text_is_replaced(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for data, why in ((b"", "it is empty"), (b"\xff\xfe", "codec can't decode")):
        run.token.write_bytes(data)
        assert why in rundir.why_no_token(run)
        token = rundir.last_token(run)
        assert len(token) > 30
        assert rundir.last_token(run) == token
