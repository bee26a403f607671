"""The command line as a user meets it: real processes, bad input of every kind, one screen and never a traceback."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import ssh_standin

from laminar import checkpoints
from laminar.controller.__main__ import main
from laminar.controller.eventlog import EventLog
from laminar.core.records import State
from laminar.core.resume import data_state

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parent.parent
TRACEBACK = "Traceback (most recent call last)"


class Shell:
    """Runs the controller in a directory with a hosts file, a configuration, a data set and something like a model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text("{}")
        self.write("hosts.txt", "localhost trainer\nlocalhost rollout\n")
        self.write("data.jsonl", json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
        self.write("config.toml", '[model]\npath = "model"\n[task]\ndataset = "data.jsonl"\n')

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def run(self, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "laminar.controller", *arguments],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=50,
        )

    def controller(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """With the hosts file and the configuration of the directory."""
        return self.run("--cluster", "hosts.txt", "--config", "config.toml", *arguments)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same in this process, for what is refused before anything starts: an exception fails the test."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.directory), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def check(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """As `controller`, in this process."""
        return self.call("--cluster", "hosts.txt", "--config", "config.toml", *arguments)

    def refused(self, done: subprocess.CompletedProcess[str], *parts: str) -> None:
        """Exit 2, everything expected in one message of one screen on stderr, nothing left."""
        assert done.returncode == 2, done.stdout + done.stderr
        assert TRACEBACK not in done.stderr + done.stdout
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) <= 20
        for part in parts:
            assert part in done.stderr


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


# ---- help and plan -----------------------------------------------------------------------------------------


def test_help_shows_what_to_type(shell: Shell) -> None:
    done = shell.run("--help", environment={"COLUMNS": "100"})
    assert done.returncode == 0
    for part in ("--cluster", "--config", "--sampler", "--dry-run", "--resume", "key=value", "examples:", "Ctrl-C"):
        assert part in done.stdout
    assert len(done.stdout.splitlines()) <= 50


def loaded_by(module: str) -> set[str]:
    program = f"import sys, {module}; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    return set(done.stdout.split())


def test_the_command_line_loads_nothing_heavy() -> None:
    modules = loaded_by("laminar.controller.__main__")
    assert not modules & {"torch", "vllm", "transformers", "numpy", "reasoning_gym", "aiohttp", "rich", "sqlite3"}


def test_the_controller_loads_no_torch() -> None:
    modules = loaded_by("laminar.controller.app")
    assert not modules & {"torch", "vllm", "transformers", "numpy", "reasoning_gym"}
    workers = {name for name in modules if name.startswith("laminar.workers.") and "relay" not in name}
    assert workers <= {"laminar.workers.canary"}, "a message of the relay, plain data"


def test_a_dry_run_prints_plan_and_configuration_and_starts_nothing(shell: Shell) -> None:
    done = shell.controller("--dry-run", "trainer.lr=1e-5", "run.name=mine")
    assert (done.returncode, done.stderr) == (0, "")
    plan, _, configuration = done.stdout.partition("# configuration\n")
    assert [line.split()[0] for line in plan.splitlines() if re.match(r"\S+ +(relay|trainer|rollout) ", line)] == [
        "relay-0",
        "trainer-0",
        "rollout-0",
    ]
    assert "torch.distributed.run" in plan
    resolved = tomllib.loads(configuration)
    assert (resolved["trainer"]["lr"], resolved["run"]["name"]) == (1e-5, "mine")
    assert resolved["model"]["path"] == str(shell.directory / "model")
    assert {path.name for path in shell.directory.iterdir()} == {"model", "hosts.txt", "data.jsonl", "config.toml"}


def test_a_dry_run_shows_where_the_controller_is_reached_and_how_other_hosts_are(shell: Shell) -> None:
    shell.write("hosts.txt", "localhost trainer\nthere rollout\n")
    client = ssh_standin.make(shell.directory)
    done = shell.check("--dry-run", f"controller.ssh={client}", "controller.port=7000")
    assert (done.returncode, done.stderr) == (0, "")
    assert "# the controller listens on 127.0.0.1, workers dial http://127.0.0.1:7000" in done.stdout
    assert f"    {client} -T -o BatchMode=yes" in done.stdout
    assert " there 'cd " in done.stdout


def test_a_host_that_cannot_take_part_is_told_and_leaves_no_run_behind(shell: Shell) -> None:
    shell.write("hosts.txt", "localhost trainer\nnowhere rollout\n")
    client = ssh_standin.make(shell.directory)
    done = shell.check(f"controller.ssh={client}", f"run.dir={shell.directory}/runs", "run.name=mine")
    shell.refused(done, "1 of 1 other hosts cannot take part", "nowhere: ssh failed", "Could not resolve hostname")
    assert not (shell.directory / "runs" / "mine").exists()


def test_keys_may_stand_before_between_and_after_options(shell: Shell) -> None:
    done = shell.run(
        "run.seed=3", "--cluster", "hosts.txt", "trainer.lr=2e-5", "--config", "config.toml", "--dry-run", "run.steps=9"
    )
    assert done.returncode == 0, done.stderr
    resolved = tomllib.loads(done.stdout.partition("# configuration\n")[2])
    assert (resolved["run"]["seed"], resolved["trainer"]["lr"], resolved["run"]["steps"]) == (3, 2e-5, 9)


def test_a_plan_piped_into_a_reader_that_leaves_is_no_error(shell: Shell) -> None:
    command = f"{sys.executable} -m laminar.controller --cluster hosts.txt --config config.toml --dry-run | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=shell.directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert TRACEBACK not in done.stderr
    assert "Exception" not in done.stderr


def test_a_terminal_without_unicode_is_no_error(shell: Shell) -> None:
    arguments = ("--cluster", "hosts.txt", "--config", "config.toml", "--dry-run", "task.prompt_template={prompt} → ü")
    done = shell.run(*arguments, environment={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "{prompt} ? ?" in done.stdout


# ---- wrong input -------------------------------------------------------------------------------------------


def test_no_hosts_file_at_all(shell: Shell) -> None:
    shell.refused(shell.call(), "--cluster", "--help")


def test_a_hosts_file_that_is_not_there(shell: Shell) -> None:
    done = shell.call("--cluster", "nowhere.txt", "--config", "config.toml")
    shell.refused(done, "nowhere.txt", "No such file")


def test_a_wrong_line_of_the_hosts_file(shell: Shell) -> None:
    shell.write("hosts.txt", "localhost trainer\n# comment\nlocalhost rollot\n")
    shell.refused(shell.controller(), "hosts.txt:3", "expected role trainer or rollout", "did you mean rollout?")


def test_an_unknown_key_names_the_nearest(shell: Shell) -> None:
    shell.refused(shell.check("trainer.batch_prompt=4"), "trainer.batch_prompt", "did you mean trainer.batch_prompts?")
    shell.write("config.toml", "[rollout]\ngroup_sice = 4\n")
    shell.refused(shell.check(), "config.toml", "did you mean rollout.group_size?")


def test_a_model_directory_that_is_not_there(shell: Shell) -> None:
    shell.refused(shell.check("model.path=/no/such/model"), "model.path = '/no/such/model'", "no such directory")
    shell.refused(shell.check('model.path=""'), "model.path is empty")


def test_a_group_of_one(shell: Shell) -> None:
    shell.refused(shell.check("rollout.group_size=1"), "rollout.group_size = 1", "use 2 or more")


def test_an_empty_data_set(shell: Shell) -> None:
    shell.write("data.jsonl", "\n\n")
    shell.refused(shell.check(), "data.jsonl", "the data set is empty")


def test_a_data_set_that_is_not_there(shell: Shell) -> None:
    shell.refused(shell.check("task.dataset=none.jsonl"), "none.jsonl", "no such file")


def test_a_reward_function_that_no_worker_could_load(shell: Shell) -> None:
    shell.write("judge.py", "def reward(prompt, response): return 1.0\n")
    shell.refused(shell.check("task.reward=jugde.py:reward"), "task.reward = ", "no file", "did you mean judge.py?")
    shell.refused(shell.check("task.reward=judge.py:rewards", "--dry-run"), "has no rewards; did you mean reward?")
    assert shell.check("task.reward=judge.py:reward", "--dry-run").returncode == 0


SAMPLERS = """
class Good:
    def select(self, view, num_groups): return []
    def state(self): return {}
    def load_state(self, state): pass

class NoState:
    def select(self, view, num_groups): return []

class Arguments(Good):
    def __init__(self, path): pass

class Exits(Good):
    def __init__(self): raise SystemExit(7)

not_a_class = 3
"""


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("none.py:Good", ("no file", "none.py")),
        ("mine.py:God", ("mine.py has no God", "Good")),
        ("mine.py", ('expected "fifo", "pkg.mod:Class" or "path/file.py:Class"',)),
        ("no_such_package.mod:Good", ("no module no_such_package",)),
        ("broken.py:Good", ("does not parse", "broken.py:1")),
        ("mine.py:NoState", ("has no method state, load_state", "docs/samplers.md")),
        ("mine.py:Arguments", ("without arguments failed", "path")),
        ("mine.py:Exits", ("without arguments failed: SystemExit: 7",)),
        ("mine.py:not_a_class", ("without arguments failed", "not callable")),
    ],
)
def test_a_sampler_that_is_none_is_refused_before_anything_starts(
    shell: Shell, reference: str, parts: tuple[str, ...]
) -> None:
    shell.write("mine.py", SAMPLERS)
    shell.write("broken.py", "def def")
    shell.refused(shell.check("--sampler", reference), "sampler", *parts)
    assert not (shell.directory / "runs").exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_told_from_a_port_that_is_taken(shell: Shell, host: str) -> None:
    shell.refused(shell.controller(f"controller.host={host}"), f"cannot listen on {host}:", "with controller.host=…")


def test_an_occupied_port_is_one_message_and_leaves_no_process_and_no_token(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = shell.controller(f"controller.port={port}", "run.name=mine")
    shell.refused(done, f"cannot listen on 127.0.0.1:{port} (Address already in use)", "controller.port=")
    shell.refused(done, f"nothing was started, and {shell.directory}/runs/mine is removed again")
    assert not (shell.directory / "runs" / "mine").exists()


def test_an_interpreter_of_a_host_that_does_not_exist(shell: Shell) -> None:
    shell.write("hosts.txt", "localhost trainer\nlocalhost rollout python=/no/such/python\n")
    done = shell.controller("run.name=mine")
    shell.refused(done, "cannot start rollout-0", "/no/such/python", "another start may have the same run.name")
    assert (shell.directory / "runs" / "mine" / "logs" / "trainer-0.log").exists()


# ---- run directories ---------------------------------------------------------------------------------------


def test_a_name_that_is_taken(shell: Shell) -> None:
    (shell.directory / "runs" / "mine").mkdir(parents=True)
    (shell.directory / "runs" / "mine" / "run.db").touch()
    shell.refused(shell.check("run.name=mine"), "exists; resume it with --resume", "another run.name")


def test_a_directory_for_runs_that_cannot_be_written(shell: Shell) -> None:
    shell.write("file", "")
    shell.refused(shell.check("run.dir=file"), "cannot write the run's directory", "Not a directory")


@pytest.mark.parametrize("name", ["a/b", "two words", "..", "x" * 300])
def test_a_name_that_cannot_be_a_directory(shell: Shell, name: str) -> None:
    shell.refused(shell.check(f"run.name={name}"), "run")


def test_resuming_without_a_run(shell: Shell) -> None:
    shell.refused(shell.call("--resume"), "there is no run in")
    shell.refused(shell.call("--resume", "run.steps=9"), "there is no run in")
    shell.refused(shell.call("--resume", "nowhere"), "nowhere is not a run's directory")
    shell.refused(shell.call("--resume", "model"), "model is not a run's directory")


def resumable(shell: Shell, data_state: bytes = b"") -> Path:
    """The directory of a run with a checkpoint, as far as the command line looks."""
    run = shell.directory / "runs" / "mine"
    checkpoint = run / "checkpoints" / "step-4"
    checkpoint.mkdir(parents=True)
    (run / "logs").mkdir()
    (checkpoint / "data_state.bin").write_bytes(data_state)
    checkpoints.write_manifest(checkpoint, {"data_state.bin": checkpoints.digest(checkpoint / "data_state.bin")})
    for name in ("config.toml", "hosts.txt"):
        (run / name).write_text((shell.directory / name).read_text().replace('"', '"', 1))
    (run / "config.toml").write_text(
        f'[model]\npath = "{shell.directory}/model"\n[task]\ndataset = "{shell.directory}/data.jsonl"\n'
    )
    log = EventLog(run / "run.db", 0.01)
    log.begin_boot(1.0, 1, "here", 0)
    log.close()
    return run


def test_a_run_is_resumed_with_its_own_hosts_and_configuration_and_what_is_changed(shell: Shell) -> None:
    run = resumable(shell)
    for name in ("hosts.txt", "config.toml"):
        (shell.directory / name).unlink()
    for arguments in (("--resume", str(run), "run.steps=9"), ("--resume", "run.steps=9")):
        done = shell.call(*arguments, "--dry-run")
        assert done.returncode == 0, done.stderr
        assert f"--resume {run}/checkpoints/step-4" in done.stdout
        assert "steps = 9" in done.stdout


def test_a_run_without_a_checkpoint_cannot_be_resumed(shell: Shell) -> None:
    run = resumable(shell)
    (run / "checkpoints" / "step-4").rename(run / "checkpoints" / "step-4.partial")
    shell.refused(shell.call("--resume", str(run)), "no complete checkpoint")


def test_a_checkpoint_that_is_damaged(shell: Shell) -> None:
    run = resumable(shell, data_state=b"\xc1 no data")
    shell.refused(shell.run("--resume", str(run)), "cannot resume from", "data_state.bin")
    (run / "checkpoints" / "step-4" / "data_state.bin").write_bytes(b"\xc1 no dat")
    words = "no checkpoint there is undamaged: step-4: data_state.bin has 8 bytes, 9 were written"
    shell.refused(shell.run("--resume", str(run)), words)
    assert (run / "checkpoints" / "step-4").is_dir(), "nothing is better"


def test_a_run_that_another_controller_holds_is_left_alone(shell: Shell) -> None:
    run = resumable(shell, data_state=data_state(State(), 4))
    log = EventLog(run / "run.db", 0.01)
    log.begin_boot(1.0, os.getpid(), "here", 0)
    (run / "token").write_text("the other controller's")
    try:
        for how in ((), ("--from-checkpoint",)):
            shell.refused(shell.run("--resume", str(run), *how), f"in use by the controller with pid {os.getpid()}")
        (run / "checkpoints" / "step-4").rename(run / "checkpoints" / "none-yet")
        shell.refused(shell.run("--resume", str(run)), f"in use by the controller with pid {os.getpid()}")
        assert (run / "token").read_text() == "the other controller's"
    finally:
        log.close()


def test_a_run_is_not_taken_over_from_a_controller_that_lives(shell: Shell) -> None:
    run = resumable(shell)
    log = EventLog(run / "run.db", 0.01)
    log.begin_boot(1.0, os.getpid(), "here", 0)
    with sqlite3.connect(run / "run.db") as database:
        database.execute("INSERT INTO snapshots (boot, seq, body) VALUES (2, 1, ?)", (b"",))
    for arguments in ((), ("run.steps=9",)):
        shell.refused(shell.run("--resume", str(run), *arguments), f"in use by the controller with pid {os.getpid()}")
    log.close()
    shell.refused(shell.run("--resume", str(run), "run.steps=9"), "goes on as it was, without run.steps=9")
    moved = shell.run("--resume", str(run), "controller.host=127.0.0.2", "controller.port=7777", "--dry-run")
    assert "workers dial http://127.0.0.2:7777" in moved.stdout, moved.stderr


def test_a_run_whose_token_is_gone_goes_on_and_says_what_that_costs(shell: Shell) -> None:
    run = resumable(shell)
    with sqlite3.connect(run / "run.db") as database:
        database.execute("UPDATE boots SET outcome = NULL")
        database.execute("INSERT INTO snapshots (boot, seq, body) VALUES (1, 1, ?)", (b"",))
    done = shell.run("--resume", str(run))
    assert f"{run}/token cannot be read (No such file or directory): workers that live cannot come back" in done.stdout
    assert "no snapshot of the state is whole" in done.stderr


def test_a_run_in_whose_directory_nothing_can_be_written(shell: Shell) -> None:
    run = resumable(shell)
    (run / "run.lock").unlink()
    (run / "run.lock").mkdir()
    words = ("cannot lock the run with", "Is a directory", "its directory must be there and yours to write")
    shell.refused(shell.run("--resume", str(run)), *words)


def test_a_database_that_is_none(shell: Shell) -> None:

    run = resumable(shell, data_state=data_state(State(), 4))
    (run / "run.db").write_bytes(b"no database at all " * 300)
    for name in ("run.db-wal", "run.db-shm"):
        (run / name).unlink(missing_ok=True)
    shell.refused(shell.run("--resume", str(run)), "run.db is damaged (file is not a database)", "--from-checkpoint")


def test_an_option_that_does_not_exist(shell: Shell) -> None:
    done = shell.controller("--dryrun")
    assert done.returncode == 2
    assert done.stderr == "error: unrecognized arguments: --dryrun; did you mean --dry-run?; --help has examples\n"


def test_the_way_to_resume_alone_names_no_run(shell: Shell) -> None:
    shell.refused(shell.call("--from-checkpoint"), "--from-checkpoint says how to --resume a run; add that")


@pytest.mark.parametrize("after", ["exec", "imports"])
def test_an_interrupt_of_a_command_that_has_hardly_begun_prints_no_traceback(tmp_path: Path, after: str) -> None:
    """At two moments: inside the first import of the command's module, and inside the first of the run's."""
    module = "argparse" if after == "exec" else "laminar.controller.app"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.modules.pop('argparse', None)\n"
    )
    quickstart = ROOT / "configs" / "quickstart"
    command = [sys.executable, "-m", "laminar.controller", "--cluster", quickstart / "hosts.txt"]
    command += ["--config", quickstart / "config.toml", f"run.dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=ROOT)
    assert done.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in done.stderr
