"""The command line of laminar.chaos: what is wrong is said before anything starts."""

import argparse
import re
import shutil
from pathlib import Path

import pytest

from laminar import configfile
from laminar.chaos import __main__ as chaos
from laminar.chaos.kinds import KINDS

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = [
    "--cluster",
    str(ROOT / "configs/quickstart/hosts.txt"),
    "--config",
    str(ROOT / "configs/quickstart/config.toml"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --cluster HOSTS to start a run, or --run RUN_DIR"),
        ([*CLUSTER, "--run", "x", "--random"], "give --cluster HOSTS to start a run, or --run RUN_DIR"),
        (CLUSTER, "give --plan FILE, or --random"),
        ([*CLUSTER, "--random", "--plan", "x"], "give --plan FILE, or --random"),
        (["--run", "x", "--random", "trainer.lr=1"], "--run takes a run as it is"),
        (["--run", "/no/such/run", "--random"], "is not a run's directory"),
        ([*CLUSTER, "--random", "--duration", "soon"], "--duration = 'soon': expected a duration"),
        ([*CLUSTER, "--random", "--kinds", "slow,kill_rely"], "no kind 'kill_rely'.*did you mean kill_relay"),
        (
            [*CLUSTER, "--random", "--kinds", "partition"],
            "--kinds: partition is not possible: there is nothing to strike",
        ),
        ([*CLUSTER, "--random", "trainer.rl=1"], "trainer.rl"),
        ([*CLUSTER, "--plan", "/no/such/plan.toml"], "cannot read the plan"),
        (["--report", "/no/such/run"], "no faults were injected there"),
        (["--report", "x", "--random"], "--report only judges a run that is over: leave --random away"),
        (["--report", "x", "trainer.lr=1"], "--report only judges a run that is over: leave trainer.lr=1 away"),
        ([*CLUSTER, "--random", "--kinds", ""], "there is no kind ''"),
        ([*CLUSTER, "--random", "--gap", ""], "--gap = '': expected a duration"),
        ([*CLUSTER, "--plan", "x", "--duration", "5m"], "--duration is for --random: a plan says itself"),
        ([*CLUSTER, "--random", "run.name="], "run.name is empty; choose another"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos.main(arguments) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err), said.err


def test_the_list_has_all_kinds_with_what_they_may_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(KINDS)
    assert all("may cost" in line for line in lines)


def test_every_kind_is_in_the_docs() -> None:
    text = (ROOT / "docs/chaos.md").read_text()
    assert [name for name in KINDS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("size", ["0", "-5", "much", "1.5"])
def test_a_size_that_is_none_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.main([*CLUSTER, "--random", "--disk-mib", size])
    assert ended.value.code == 2
    assert f"{size!r}: expected a number of MiB" in capsys.readouterr().err


def test_a_run_of_somebody_else_is_not_ended_by_faults_that_its_limits_do_not_allow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configfile.load(ROOT / "configs/quickstart/config.toml", ["rollout.restarts=0", "relay.restarts=1"])
    (tmp_path / "config.toml").write_text(configfile.dumps(config))
    shutil.copy(ROOT / "configs/quickstart/hosts.txt", tmp_path)
    (tmp_path / "run.db").touch()
    wanted = ["--run", str(tmp_path), "--random", "--kinds", "kill_relay,kill_rollout"]
    assert chaos.main(wanted) == 2
    why = "kill_rollout is not possible: it may end this run, which has rollout.restarts = 0"
    assert f"--kinds: {why}" in capsys.readouterr().err
    assert chaos.main(["--run", str(tmp_path), "--random"]) == 2
    said = capsys.readouterr()
    assert "without kill_rollout: it may end this run" in said.out
    assert "without kill_relay" not in said.out
    assert "no controller of" in said.err


@pytest.mark.parametrize(("own_disk", "mib"), [(True, 4096), (False, 100)])
def test_a_file_system_of_the_runs_own_may_be_filled_whatever_its_size(own_disk: bool, mib: int) -> None:
    options = argparse.Namespace(disk_mib=4096, disk_quota_mib=100)
    assert chaos.fill_bytes(options, own_disk) == mib << 20
