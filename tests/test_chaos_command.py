"""The command line of laminar.chaos: what is wrong is said before anything starts."""

import re
from pathlib import Path

import pytest

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
