"""Which processes a hosts file stands for."""

import shlex
import sys
from pathlib import Path

import pytest

from laminar import hosts
from laminar.config import Config, RolloutConfig
from laminar.controller.plan import Process, describe, plan, url_of
from laminar.errors import ConfigError

pytestmark = pytest.mark.timeout(20)

URL = "http://127.0.0.1:7000"
CONFIG = Config(rollout=RolloutConfig(max_concurrent=48))


def planned(text: str, resume: Path | None = None) -> list[Process]:
    return plan(CONFIG, hosts.parse(text, "hosts.txt"), URL, resume)


def option(process: Process, name: str) -> str:
    return process.command[process.command.index(name) + 1]


def test_one_relay_per_host_one_launch_of_ranks_and_a_process_per_replica() -> None:
    processes = planned("localhost trainer ranks=2\nlocalhost rollout replicas=2\n127.0.0.1 rollout\n")
    assert [(p.name, p.role, p.address, p.num_workers) for p in processes] == [
        ("relay-0", "relay", "localhost", 1),
        ("relay-1", "relay", "127.0.0.1", 1),
        ("trainer-0", "trainer", "localhost", 2),
        ("rollout-0", "rollout", "localhost", 1),
        ("rollout-1", "rollout", "localhost", 1),
        ("rollout-2", "rollout", "127.0.0.1", 1),
    ]
    for process in processes:
        assert option(process, "--controller") == URL
        assert option(process, "--name") == process.name
        assert process.command[0] == sys.executable
        assert int(process.environment["OMP_NUM_THREADS"]) >= 1


def test_options_of_a_host_reach_its_commands() -> None:
    trainer, rollout = planned("localhost trainer ranks=3\nlocalhost rollout max_concurrent=5 python=/opt/python")[1:]
    assert "--nproc-per-node=3" in trainer.command
    assert rollout.command[0] == "/opt/python"
    assert option(rollout, "--max-concurrent") == "5"
    assert option(planned("localhost trainer\nlocalhost rollout")[2], "--max-concurrent") == "48"


def test_only_the_trainer_is_told_what_to_resume() -> None:
    processes = planned("localhost trainer\nlocalhost rollout", Path("/runs/a/checkpoints/step-4"))
    assert option(processes[1], "--resume") == "/runs/a/checkpoints/step-4"
    assert all("--resume" not in p.command for p in processes if p.role != "trainer")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("localhost trainer\n127.0.0.1 trainer\nlocalhost rollout", "several trainer hosts"),
        ("localhost trainer\n\nlocalhost rollout engine=vllm", "line 3: engine=vllm is not available"),
        ("localhost trainer\ngpu-node-7 rollout", "gpu-node-7, which is not this machine"),
    ],
)
def test_what_this_version_cannot_start_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(text)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("0.0.0.0", "http://127.0.0.1:7"),
        ("::1", "http://[::1]:7"),
        ("::", "http://[::1]:7"),
        ("node-3", "http://node-3:7"),
    ],
)
def test_workers_get_a_url_that_they_can_reach(host: str, url: str) -> None:
    assert url_of(host, 7) == url


def test_the_plan_can_be_read_and_typed() -> None:
    processes = planned("localhost trainer\nlocalhost rollout")
    lines = describe(processes).splitlines()
    assert len(lines) == 2 * len(processes)
    words = shlex.split(lines[-1])
    assert [word for word in words if "=" not in word or word.startswith("-")] == processes[-1].command
    assert all(len(line.split()) == 4 for line in lines[::2])
