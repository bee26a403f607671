"""The check of other hosts before a run: who fails, why, and what to do, in one message."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ssh_standin

from laminar import configfile, hosts, remote
from laminar.config import Config
from laminar.controller import preflight
from laminar.controller.reach import Reach, reach
from laminar.errors import ConfigError, StartError
from laminar.remote import ANSWER, Answer, Question
from laminar.workers.remote import check

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parent.parent
HERE = Reach("127.0.0.1", "127.0.0.1")


class World:
    """A directory with a model and the stand-in for ssh."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text("{}")
        self.client = ssh_standin.make(directory)

    def config(self, *overrides: str) -> Config:
        own = [f"model.path={self.directory}/model", f"run.dir={self.directory}/runs", f"controller.ssh={self.client}"]
        return configfile.load(None, [*own, *overrides])

    def check(self, text: str, *overrides: str, at: Reach = HERE) -> dict[str, Answer]:
        return preflight.check_hosts(self.config(*overrides), hosts.parse(text, "hosts.txt"), at)

    def refusal(self, text: str, *overrides: str, at: Reach = HERE) -> str:
        with pytest.raises(StartError) as caught:
            self.check(text, *overrides, at=at)
        return str(caught.value)

    def python(self, name: str, program: str) -> Path:
        """A shell script in place of an interpreter."""
        path = self.directory / name
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return World(tmp_path)


def test_a_run_on_this_machine_asks_nobody(world: World) -> None:
    assert world.check("localhost trainer\n127.0.0.2 rollout", f"controller.ssh={world.directory}/none") == {}


def test_a_host_that_has_all_it_needs_answers_with_its_cpus_and_nothing_is_left_behind(world: World) -> None:
    found = world.check("there trainer\nthere rollout")
    answer = Answer(
        version=remote.version(), problems=[], listen="", num_cpus=os.cpu_count() or 1, machine=remote.machine()
    )
    assert found == {"there": answer}
    assert list((world.directory / "runs").iterdir()) == []


def test_the_file_of_a_reward_is_looked_for_where_it_is_run(world: World) -> None:
    reward = world.directory / "reward.py"
    reward.write_text("def reward(prompt, response): return 0.0\n")
    config = world.config(f"task.reward={reward}:reward")
    assert preflight._files(config, True) == [f"{world.directory}/model/config.json", str(reward)]
    assert preflight._files(config, False) == [f"{world.directory}/model/config.json"]


def test_all_failures_stand_in_one_message_each_with_what_to_do(world: World) -> None:
    other = world.python("other", f"echo '{ANSWER.decode()}{json.dumps(_answer('0.0.9'))}'")
    older = world.python("older", f"echo '{ANSWER.decode()}{{}}'")
    bare = world.python(
        "bare", "echo \"/opt/python: Error while finding module: No module named 'laminar'\" >&2; exit 1"
    )
    text = (
        "nowhere trainer\nlocked rollout\nthere1 rollout python=/no/python\n"
        f"there2 rollout python={bare}\nthere3 rollout python={other}\nthere4 rollout python={older}\n"
        "fine rollout listen=127.0.0.1\n"
    )
    lines = world.refusal(text).splitlines()
    assert lines[0] == "7 of 7 other hosts cannot take part; nothing was started:"
    for line, parts in zip(
        lines[1:],
        [
            ("  nowhere: ", "Could not resolve hostname nowhere", "correct the name in the hosts file"),
            ("  locked: ", "Permission denied (publickey)", "ssh-copy-id locked"),
            ("  there1: ", "no Python /no/python", "python=PATH"),
            ("  there2: ", "No module named 'laminar'", "install the same Laminar"),
            ("  there3: ", "has Laminar 0.0.9, the controller 0.1.0 (", "install the same"),
            ("  there4: ", "has a Laminar of another version", "install that of the controller"),
            ("  fine: ", "127.0.0.1 is 127.0.0.1 there, where no other host reaches its relay", "listen=ADDRESS"),
        ],
        strict=True,
    ):
        for part in parts:
            assert part in line


def _answer(version: str) -> dict[str, Any]:
    return {"version": version, "problems": [], "listen": "", "num_cpus": 1, "machine": "another"}


def test_a_machine_under_two_names_is_told_with_both(world: World) -> None:
    elsewhere = "listen=192.0.2.1"
    lines = world.refusal(f"there1 trainer {elsewhere}\nthere2 rollout {elsewhere}\n").splitlines()
    assert lines[0] == "2 of 2 other hosts cannot take part; nothing was started:"
    told = [line for line in lines if "it is the machine that the hosts file calls there1 too" not in line]
    assert len(told) == len(lines) - 1
    (line,) = [line for line in lines if line not in told]
    assert line.startswith("  there2: it is the machine")
    message = world.refusal("localhost trainer\nthere1 rollout listen=192.0.2.1\n")
    assert (
        "there1: it is the machine that the hosts file calls localhost too: call it the same in both lines" in message
    )


def test_a_host_that_does_not_answer_is_named_after_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ANSWER_S", 0.5)
    assert "silent: ssh failed (no answer within 0.5 s)" in world.refusal("silent trainer\nsilent rollout")


def test_of_very_many_hosts_that_fail_only_the_names_of_the_last_are_told(world: World) -> None:
    lines = world.refusal("localhost trainer\nnowhere[00-19] rollout").splitlines()
    assert len(lines) == 2 + preflight.SHOWN_MAX
    assert lines[-1] == "  and nowhere16, nowhere17, nowhere18, nowhere19"


def test_a_controller_that_a_host_cannot_reach_is_told_by_its_address(world: World) -> None:
    message = world.refusal("there trainer\nthere rollout", at=Reach("127.0.0.1", "127.0.0.9"))
    assert "there: it cannot connect to the controller at 127.0.0.9:" in message
    assert "Connection refused" in message
    assert "controller.advertise=ADDRESS" in message


def test_an_address_that_is_not_ours_to_listen_on_is_told_before_anybody_is_asked(world: World) -> None:
    message = world.refusal("there trainer\nthere rollout", at=Reach("192.0.2.1", "192.0.2.1"))
    assert message.startswith("cannot listen on 192.0.2.1:0 (Cannot assign requested address")


def test_a_login_that_prints_lines_of_its_own_does_not_hide_the_answer(world: World) -> None:
    assert "a login's greeting" in Path(world.client).read_text()
    assert world.check("there trainer\nthere rollout")["there"].problems == []


# ---- what a host finds -------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def problems(port: int, **changes: Any) -> list[str]:
    known = {
        "controller": ("127.0.0.1", port),
        "chained": False,
        "listen": "",
        "files": [],
        "marker": "",
        "pythons": [],
    }
    question = Question(**{**known, **changes})
    return list(check._problems(question, question.listen))


def test_a_missing_model_a_strangers_run_directory_and_a_missing_vllm_are_told(
    tmp_path: Path, listener: socket.socket
) -> None:
    port = listener.getsockname()[1]
    marker = tmp_path / "marker"
    marker.touch()
    assert problems(port, marker=str(marker), pythons=[sys.executable]) == []
    (model,) = problems(port, files=[str(marker), "/no/model/config.json"])
    assert model.startswith("it has no file /no/model/config.json")
    (directory,) = problems(port, marker="/no/runs/marker")
    assert directory.startswith("the run's directory /no/runs is not the controller's")
    (python,) = problems(port, pythons=["/no/python"])
    assert python.startswith("there is no Python /no/python for vLLM")


def test_an_address_at_which_a_relay_cannot_listen_or_is_not_reached_is_told(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    (foreign,) = problems(port, listen="192.0.2.1")
    assert foreign.startswith("its relay cannot listen on 192.0.2.1 (")
    (loopback,) = problems(port, listen="localhost")
    assert loopback.startswith("localhost is ")


def test_the_address_that_ssh_reached_is_that_of_the_relay_where_there_are_several(listener: socket.socket) -> None:
    question = Question(
        controller=("127.0.0.1", listener.getsockname()[1]), chained=True, listen="", files=[], marker="", pythons=[]
    )
    done = subprocess.run(
        [sys.executable, "-m", "laminar.workers.remote.check"],
        input=msgspec.json.encode(question) + b"\n",
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SSH_CONNECTION": "192.0.2.9 40000 192.0.2.1 22"},
        timeout=60,
        check=True,
    )
    answer = msgspec.json.decode(done.stdout.removeprefix(ANSWER), type=Answer)
    assert answer.listen == "192.0.2.1"


# ---- where the controller is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("localhost", [], Reach("127.0.0.1", "127.0.0.1")),
        ("localhost", ["controller.host=0.0.0.0"], Reach("0.0.0.0", "0.0.0.0")),
        ("localhost", ["controller.advertise=me"], Reach("127.0.0.1", "me")),
        ("there", ["controller.host=10.0.0.5"], Reach("10.0.0.5", "10.0.0.5")),
        ("there", ["controller.host=10.0.0.5", "controller.advertise=me"], Reach("10.0.0.5", "me")),
        ("there", ["controller.advertise=me"], Reach("me", "me")),
        ("there", ["controller.host=0.0.0.0"], Reach("0.0.0.0", "127.0.0.1")),
        ("there", [], Reach("127.0.0.1", "127.0.0.1")),
    ],
)
def test_the_controller_listens_where_its_workers_reach_it(
    world: World, text: str, overrides: list[str], expected: Reach
) -> None:
    machines = hosts.parse(f"{text} trainer\n{text} rollout", "hosts.txt")
    assert reach(world.config(*overrides), machines) == expected, "the stand-in says that every host is 127.0.0.1"


def test_without_a_client_or_a_name_that_resolves_it_is_said_what_to_do(world: World) -> None:
    machines = hosts.parse("there trainer\nthere rollout", "hosts.txt")
    with pytest.raises(ConfigError, match=r"there is no /no/ssh .*install the OpenSSH client"):
        reach(world.config("controller.ssh=/no/ssh"), machines)
    machines = hosts.parse("typo1 trainer\ntypo2 rollout", "hosts.txt")
    with pytest.raises(
        ConfigError,
        match=r"typo1.invalid: .*; typo2.invalid: .*\): correct the names, .*HostName.*controller.advertise",
    ):
        reach(world.config(), machines)


def test_a_first_host_whose_name_is_wrong_does_not_hide_the_way_to_the_others(world: World) -> None:
    machines = hosts.parse("typo trainer\nthere rollout\n", "hosts.txt")
    assert reach(world.config(), machines) == Reach("127.0.0.1", "127.0.0.1")


def test_the_version_is_that_of_the_sources(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        assert remote.version() == remote.version()
    assert remote.version().startswith("0.1.0 (")
