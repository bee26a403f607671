"""Which processes a hosts file stands for."""

import shlex
import socket
import sys
from pathlib import Path

import pytest

from laminar import hosts
from laminar.config import Config, ControllerConfig, RolloutConfig, TaskConfig
from laminar.controller.plan import (
    RENDEZVOUS_PORT,
    Process,
    describe,
    going_on_from,
    one_more,
    plan,
    pythons_of,
    url_of,
    vllm_pythons_of,
)
from laminar.errors import ConfigError
from laminar.remote import Answer

pytestmark = pytest.mark.timeout(20)

URL = "http://127.0.0.1:7000"
OWN = socket.gethostname()
CONFIG = Config(rollout=RolloutConfig(max_concurrent=48))


def planned(text: str, resume: Path | None = None) -> list[Process]:
    return plan(CONFIG, hosts.parse(text, "hosts.txt"), URL, resume)


def option(process: Process, name: str) -> str:
    return process.command[process.command.index(name) + 1]


def test_one_relay_per_host_one_launch_of_ranks_and_a_process_per_replica() -> None:
    processes = planned("localhost trainer ranks=2\nlocalhost rollout replicas=2\n127.0.0.2 rollout\n")
    assert [(p.name, p.role, p.address, p.num_workers) for p in processes] == [
        ("relay-0", "relay", "localhost", 1),
        ("relay-1", "relay", "127.0.0.2", 1),
        ("trainer-0", "trainer", "localhost", 2),
        ("rollout-0", "rollout", "localhost", 1),
        ("rollout-1", "rollout", "localhost", 1),
        ("rollout-2", "rollout", "127.0.0.2", 1),
    ]
    for process in processes:
        assert option(process, "--controller") == URL
        assert option(process, "--name") == process.name
        assert process.command[0] == sys.executable
        assert int(process.environment["OMP_NUM_THREADS"]) >= 1


def test_relays_of_several_hosts_listen_there_and_every_process_knows_its_host() -> None:
    processes = planned("localhost trainer\nlocalhost rollout\n127.0.0.2 rollout\n")
    assert {p.name: p.environment["LAMINAR_HOST"] for p in processes} == {
        "relay-0": "localhost",
        "relay-1": "127.0.0.2",
        "trainer-0": "localhost",
        "rollout-0": "localhost",
        "rollout-1": "127.0.0.2",
    }
    assert [option(p, "--listen") for p in processes if p.role == "relay"] == ["localhost", "127.0.0.2"]
    for alone in planned("localhost trainer\nlocalhost rollout\n"):
        assert "--listen" not in alone.command
        assert "LAMINAR_HOST" not in alone.environment


def test_options_of_a_host_reach_its_commands() -> None:
    trainer, rollout = planned("localhost trainer ranks=3\nlocalhost rollout max_concurrent=5 python=/opt/python")[1:]
    assert "--nproc-per-node=3" in trainer.command
    assert rollout.command[0] == "/opt/python"
    assert option(rollout, "--max-concurrent") == "5"
    assert option(planned("localhost trainer\nlocalhost rollout")[2], "--max-concurrent") == "48"


# ---- other hosts -------------------------------------------------------------------------------------------


def test_a_process_of_another_host_is_started_by_ssh_and_that_of_this_one_is_not() -> None:
    processes = planned("localhost trainer\ngpu1 rollout replicas=2 python=/opt/python")
    assert [p.name for p in processes if p.ssh] == ["relay-1", "rollout-0", "rollout-1"]
    for process in processes:
        if process.ssh:
            assert process.ssh[0] == "ssh"
            assert process.ssh[-2] == "gpu1"
            assert process.ssh[-1].endswith("/opt/python -m laminar.workers.remote.supervise")
            assert {"BatchMode=yes", "ConnectTimeout=10"} <= set(process.ssh)
            assert process.command[0] == "/opt/python"


def test_the_client_is_the_users_own() -> None:
    config = Config(controller=ControllerConfig(ssh="ssh -F 'my config'"))
    process = plan(config, hosts.parse("gpu1 trainer\ngpu1 rollout", "hosts.txt"), URL, None)[0]
    assert process.ssh[:3] == ["ssh", "-F", "my config"]


def test_relays_have_their_links_where_other_hosts_reach_them() -> None:
    text = "localhost trainer\ngpu1 rollout\ngpu2 rollout listen=ib-gpu2\ngpu3 rollout\n"
    machines = hosts.parse(text, "hosts.txt")
    found = {
        name: Answer(version="", problems=[], listen=listen, num_cpus=64, machine=name)
        for name, listen in [("gpu1", "10.0.0.1"), ("gpu2", "10.0.0.2"), ("gpu3", "")]
    }
    processes = plan(CONFIG, machines, "http://10.0.0.9:7000", None, found)
    listening = [option(p, "--listen") for p in processes if p.role == "relay"]
    assert listening == ["10.0.0.9", "10.0.0.1", "ib-gpu2", "gpu3"]
    assert [p.environment["LAMINAR_HOST"] for p in processes if p.role == "relay"] == [
        "localhost", "gpu1", "gpu2", "gpu3",
    ]  # fmt: skip


def test_the_cpus_of_a_host_are_shared_by_what_runs_there() -> None:
    machines = hosts.parse("gpu1 trainer ranks=2\ngpu1 rollout replicas=2\ngpu2 rollout\n", "hosts.txt")
    found = {name: Answer(version="", problems=[], listen="", num_cpus=64, machine=name) for name in ("gpu1", "gpu2")}
    threads = {p.name: p.environment["OMP_NUM_THREADS"] for p in plan(CONFIG, machines, URL, None, found)}
    assert threads["relay-0"] == threads["relay-1"] == "1"
    assert threads["trainer-0"] == threads["rollout-0"] == threads["rollout-1"] == "16"
    assert threads["rollout-2"] == "64"


def test_variables_that_agents_need_reach_rollout_workers_of_other_hosts_by_name_only() -> None:
    config = Config(task=TaskConfig(agent="agent", agent_env=["SEARCH_KEY"]))
    processes = plan(config, hosts.parse("gpu1 trainer\ngpu1 rollout", "hosts.txt"), URL, None)
    assert {p.name: p.inherits for p in processes} == {"relay-0": [], "trainer-0": [], "rollout-0": ["SEARCH_KEY"]}


def test_a_vllm_environment_of_another_host_is_looked_for_there() -> None:
    machines = hosts.parse("gpu1 trainer\ngpu1 rollout engine=vllm python=/there/python", "hosts.txt")
    rollout = plan(CONFIG, machines, URL, None)[2]
    assert option(rollout, "--vllm-python") == "/there/python"
    assert rollout.ssh[-1].endswith(f"{sys.executable} -m laminar.workers.remote.supervise")
    assert pythons_of("gpu1", machines) == [sys.executable]
    assert vllm_pythons_of("gpu1", machines) == ["/there/python"]


def test_the_plan_shows_the_ssh_command_of_a_process_of_another_host() -> None:
    processes = planned("gpu1 trainer\ngpu1 rollout")
    lines = describe(processes).splitlines()
    assert len(lines) == 3 * len(processes)
    assert shlex.split(lines[1]) == processes[0].ssh


# ------------------------------------------------------------------------------------------------------------


def test_only_the_trainer_is_told_what_to_resume() -> None:
    processes = planned("localhost trainer\nlocalhost rollout", Path("/runs/a/checkpoints/step-4"))
    assert option(processes[1], "--resume") == "/runs/a/checkpoints/step-4"
    assert all("--resume" not in p.command for p in processes if p.role != "trainer")


def test_the_nodes_of_a_trainer_meet_at_the_first_and_count_their_own_ranks() -> None:
    processes = planned("127.0.0.1 trainer ranks=2\n127.0.0.2 trainer\n127.0.0.1 rollout")
    trainers = [p for p in processes if p.role == "trainer"]
    assert [(p.name, p.num_workers) for p in trainers] == [("trainer-0", 2), ("trainer-1", 1)]
    for rank, process in enumerate(trainers):
        assert process.command[3:7] == [
            "--nnodes=2",
            f"--node-rank={rank}",
            "--master-addr=127.0.0.1",
            f"--master-port={RENDEZVOUS_PORT}",
        ]
    assert "--standalone" in planned("localhost trainer ranks=2\nlocalhost rollout")[1].command


def test_the_nodes_of_a_trainer_meet_where_ssh_reaches_the_first_and_each_knows_its_own_address() -> None:
    """A name of the hosts file may be known to nobody but the ssh client of the controller."""
    found = {
        f"node{number}": Answer(
            version="", problems=[], listen=f"10.0.0.{number}", num_cpus=8, machine=f"machine {number}"
        )
        for number in (1, 2)
    }
    text = "node1 trainer\nnode2 trainer listen=ib-node2\nnode1 rollout"
    machines = hosts.parse(text, "hosts.txt")
    trainers = [p for p in plan(CONFIG, machines, URL, None, found) if p.role == "trainer"]
    assert all("--master-addr=10.0.0.1" in p.command for p in trainers)
    assert [p.environment["LAMINAR_ADDRESS"] for p in trainers] == ["10.0.0.1", "ib-node2"]


def test_nodes_of_other_machines_meet_one_on_this_machine_where_workers_reach_the_controller() -> None:
    machines = hosts.parse("localhost trainer\nnode1 trainer\nlocalhost rollout", "hosts.txt")
    trainers = [p for p in plan(CONFIG, machines, "http://10.0.0.9:4711", None) if p.role == "trainer"]
    assert all("--master-addr=10.0.0.9" in p.command for p in trainers)


def test_a_trainer_that_is_started_again_meets_at_another_port_and_goes_on_from_the_newest_checkpoint() -> None:
    first = planned("127.0.0.1 trainer\n127.0.0.2 trainer\n127.0.0.1 rollout", Path("/runs/a/checkpoints/step-4"))
    again = going_on_from(first[3], Path("/runs/a/checkpoints/step-8"), 4711)
    assert "--master-port=4711" in again.command
    assert again.command[-2:] == ["--resume", "/runs/a/checkpoints/step-8"]
    assert "--resume" not in going_on_from(again, None, 4711).command


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "localhost trainer\n\n127.0.0.1 rollout",
            "line 3: 127.0.0.1 is this machine, which line 1 calls localhost: call",
        ),
        (f"localhost trainer\n{OWN} rollout", f"line 2: {OWN} is this machine, which line 1 calls localhost: call"),
        (
            "localhost trainer\n\nlocalhost rollout engine=vllm python=/no/python",
            "line 3: no Python /no/python for vLLM",
        ),
        ("localhost trainer\nlocalhost rollout gpus=8 tp=4 replicas=3", "3 replicas of 4 GPUs need more than gpus=8"),
    ],
)
def test_what_this_version_cannot_start_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(text)


def test_a_vllm_replica_runs_its_worker_here_and_its_server_in_the_named_python() -> None:
    flags = "vllm.block-size=32 vllm.enable-lora=true vllm.async_scheduling=false"
    text = f"localhost trainer gpus=2\nlocalhost rollout engine=vllm gpus=8 tp=4 python={sys.executable} {flags}"
    first, second = planned(text)[2:]
    assert first.command[0] == sys.executable
    assert option(first, "--engine") == "vllm"
    assert option(first, "--vllm-python") == sys.executable
    assert option(first, "--gpus") == "4"
    after = first.command[first.command.index("--") + 1 :]
    assert after == ["--block-size", "32", "--enable-lora", "--no-async-scheduling"]
    assert [process.environment["CUDA_VISIBLE_DEVICES"] for process in (first, second)] == ["2,3,4,5", "6,7,8,9"]


def test_a_vllm_server_that_runs_already_is_only_named() -> None:
    rollout = planned("localhost trainer\nlocalhost rollout engine=vllm url=http://h:8000")[2]
    assert rollout.command[-2:] == ["--vllm-url", "http://h:8000"]
    assert "CUDA_VISIBLE_DEVICES" not in rollout.environment


def test_the_environment_that_setup_vllm_makes_is_found_and_its_lack_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAMINAR_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr("laminar.__file__", str(tmp_path / "laminar" / "__init__.py"))
    text = "localhost trainer\nlocalhost rollout engine=vllm"
    with pytest.raises(
        ConfigError, match=r"line 2: engine=vllm needs an environment with vLLM: run scripts/setup-vllm"
    ):
        planned(text)
    made = tmp_path / ".venv-vllm" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.touch()
    rollout = planned(text)[2]
    assert option(rollout, "--vllm-python") == str(made)
    assert option(rollout, "--gpus") == "0"


def test_truncation_at_a_temperature_of_which_vllm_reports_no_log_probs_before_it_is_refused() -> None:
    machines = hosts.parse("localhost trainer\nlocalhost rollout engine=vllm url=http://h:8", "hosts.txt")
    for temperature, top_p, refused in [(0.7, 0.9, True), (1.0, 0.9, False), (0.7, 1.0, False)]:
        config = Config(rollout=RolloutConfig(temperature=temperature, top_p=top_p))
        if refused:
            with pytest.raises(
                ConfigError, match=r"line 2: vLLM reports no log-probs before truncation at temperature 0.7"
            ):
                plan(config, machines, URL, None)
        else:
            plan(config, machines, URL, None)


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


# ---- one more replica ----------------------------------------------------------------------------------------


def test_one_more_replica_gets_a_name_of_its_own_on_the_first_host_with_room() -> None:
    text = "localhost trainer\nlocalhost rollout replicas=2\n"
    process = one_more(CONFIG, hosts.parse(text, "hosts.txt"), URL, planned(text))
    assert (process.name, process.address, option(process, "--name")) == ("rollout-2", "localhost", "rollout-2")
    assert option(process, "--max-concurrent") == "48"


def test_one_more_replica_gets_gpus_that_no_other_has() -> None:
    text = "trainer0 trainer gpus=2\nnode1 rollout gpus=4 tp=2\nnode2 rollout gpus=4 tp=2 replicas=1\n"
    machines = hosts.parse(text, "hosts.txt")
    process = one_more(CONFIG, machines, URL, planned(text))
    assert (process.address, process.environment["CUDA_VISIBLE_DEVICES"]) == ("node2", "2,3")
    assert process.ssh
    with pytest.raises(ConfigError, match="every rollout host has no room"):
        one_more(CONFIG, machines, URL, [*planned(text), process])
    left = [process for process in planned(text) if process.name != "rollout-0"]
    assert one_more(CONFIG, machines, URL, left, "node1").environment["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_one_more_replica_on_a_host_that_is_none_of_the_run_is_refused() -> None:
    text = "localhost trainer\nlocalhost rollout\n"
    with pytest.raises(ConfigError, match="node7 is no rollout host of this run; there are: localhost"):
        one_more(CONFIG, hosts.parse(text, "hosts.txt"), URL, planned(text), "node7")
