"""Plans of faults: read from a file, drawn from a seed, refused with what is wrong."""

import itertools
from pathlib import Path

import pytest

from laminar import hosts
from laminar.chaos import plan
from laminar.chaos.kinds import KINDS
from laminar.chaos.roster import Roster, roster
from laminar.config import Config, ControllerConfig
from laminar.errors import ConfigError

WHO = Roster(
    rollouts=["rollout-0", "rollout-1"], relays=["relay-0"], ranks=["trainer-0/0", "trainer-0/1"], others=["node1"]
)


def read(tmp_path: Path, text: str, seed: int = 0) -> list[plan.Fault]:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    return plan.read(path, WHO, Config(), seed)


def test_faults_of_a_file_come_in_order_of_time(tmp_path: Path) -> None:
    text = """
    [[fault]]
    kind = "stop_rollout"
    at = "1.5m"
    target = "rollout-1"
    for = "5s"
    [[fault]]
    kind = "kill_trainer"
    at = 30
    """
    first, second = read(tmp_path, text)
    assert (first.kind, first.target, first.at_s, first.for_s) == ("kill_trainer", "trainer", 30.0, 0.0)
    assert (second.kind, second.target, second.at_s, second.for_s) == ("stop_rollout", "rollout-1", 90.0, 5.0)


def test_what_a_file_leaves_open_is_drawn_from_the_seed(tmp_path: Path) -> None:
    text = '[[fault]]\nkind = "stop_rollout"\nat = 1\n'
    drawn = {(fault.target, fault.for_s) for seed in range(20) for fault in read(tmp_path, text, seed)}
    assert len(drawn) > 10
    assert read(tmp_path, text, 3) == read(tmp_path, text, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one"),
        ("[[fault]", "not valid TOML"),
        ("[[faults]]\nkind = 'slow'", "'faults' is no key of a plan.*did you mean fault"),
        ("[[fault]]\nkind = 'slow'", "fault 1: at is missing"),
        ("[[fault]]\nkind = 'kill_realy'\nat = 1", "no kind 'kill_realy'.*did you mean kill_relay"),
        ("[[fault]]\nkind = 'slow'\nat = 1\nfro = 2", "'fro' is no key of a fault.*did you mean for"),
        ("[[fault]]\nkind = 'slow'\nat = 'soon'", "at = 'soon': expected a duration"),
        ("[[fault]]\nkind = 'slow'\nat = -1", "at = -1: expected a duration"),
        ("[[fault]]\nkind = 'slow'\nat = true", "at = True: expected a duration"),
        ("[[fault]]\nkind = 'kill_relay'\nat = 1\nfor = 1", "kill_relay is over at once; leave `for` away"),
        ("[[fault]]\nkind = 'kill_relay'\nat = 1\ntarget = 'rely-0'", "cannot strike 'rely-0'.*did you mean relay-0"),
        ("[[fault]]\nkind = 'slow'\nat = 1\ntarget = ''", "slow cannot strike ''"),
    ],
)
def test_a_wrong_plan_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the plan"):
        plan.read(tmp_path / "none.toml", WHO, Config(), 0)


def test_drawn_faults_are_those_of_the_seed_and_every_kind_comes_up_soon() -> None:
    def drawn(seed: int) -> list[plan.Fault]:
        return list(itertools.islice(plan.draw(seed, list(KINDS.values()), WHO, Config(), 5.0), 50))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    one_deck = drawn(4)[: sum(kind.weight for kind in KINDS.values())]
    assert {fault.kind for fault in one_deck} == KINDS.keys()
    for fault in drawn(5):
        kind = KINDS[fault.kind]
        assert fault.target in kind.targets(WHO)
        assert (fault.for_s > 0) == kind.lasts
        assert 2.5 <= fault.gap_s <= 7.5


def test_a_controller_is_never_away_for_as_long_as_its_workers_wait() -> None:
    config = Config(controller=ControllerConfig(orphan_timeout_s=5.0))
    for fault in itertools.islice(plan.draw(1, list(KINDS.values()), WHO, config, 5.0), 200):
        if KINDS[fault.kind].role == "controller":
            assert fault.for_s < 0.5 * config.controller.orphan_timeout_s


def test_workers_are_named_as_the_controller_names_them() -> None:
    text = "localhost trainer ranks=2\nlocalhost rollout replicas=2\nnode1 rollout replicas=1\n127.0.0.2 rollout replicas=1\n"
    assert roster(hosts.parse(text, "hosts.txt")) == Roster(
        rollouts=["rollout-0", "rollout-1", "rollout-3"],
        relays=["relay-0", "relay-2"],
        ranks=["trainer-0/0", "trainer-0/1"],
        others=["node1"],
    )
