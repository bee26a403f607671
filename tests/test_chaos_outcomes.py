"""What each fault came to: when it was noticed, when the run had recovered, and whether it cost more than it may."""

from pathlib import Path

import msgspec
import pytest

from laminar.chaos.journal import Strike
from laminar.chaos.outcomes import Outcome
from laminar.chaos.report import Report
from laminar.chaos.signs import Watch
from laminar.core import actions, events
from laminar.ids import WorkerId
from tests.chaos_world import SETTINGS, judged, leave
from tests.core_world import Driver, settings


class Script(Driver):
    """Two replicas that have begun, at time 100."""

    def __init__(self) -> None:
        super().__init__(settings(**SETTINGS))
        self.at = 100.0
        self.start("rollout-0", "rollout-1")
        self.fill("rollout-0", "rollout-1")

    def comes_back(self, name: str, incarnation: int) -> None:
        self.send(events.TimerFired(), after=2.0)
        self.join(name, incarnation)
        self.refreshed(name)

    def is_killed(self, name: str) -> float:
        """When."""
        self.at += 1.0
        struck = self.at
        self.at += 0.3
        self.send(events.WorkerDisconnected(worker=WorkerId(name), incarnation=1))
        self.at += 0.1
        self.lost(name, 1)
        return struck


def strike(kind: str, target: str, at: float, lasts_s: float = 0.0, **more: object) -> Strike:
    made = Strike(number=1, kind=kind, target=target, at=at, until=at + lasts_s + 0.001, workers=[target])
    return msgspec.structs.replace(made, **more)


def report(script: Script, tmp_path: Path, *strikes: Strike) -> tuple[Report, Outcome]:
    script.send(events.StopRequested(reason="over"), after=60.0)
    found = judged(script, leave(script, tmp_path / "run", *strikes))
    return found, found.faults[0]


def test_a_killed_replica_is_noticed_by_its_channel_and_has_recovered_when_it_holds_weights(tmp_path: Path) -> None:
    script = Script()
    struck = script.is_killed("rollout-1")
    script.comes_back("rollout-1", 2)
    found, outcome = report(script, tmp_path, strike("kill_rollout", "rollout-1", struck))
    assert (round(outcome.noticed_s or 0, 3), outcome.noticed_by) == (0.3, "its channel")
    assert round(outcome.recovered_s or 0, 3) == 2.4
    assert outcome.lost_workers == ["rollout-1"]
    assert (outcome.problems, found.checks["every fault within its cost"]) == ([], [])


def test_a_fault_that_nothing_noticed_or_from_which_the_run_did_not_recover_is_a_finding(tmp_path: Path) -> None:
    script = Script()
    script.send(events.TimerFired(), after=1.0)
    found, outcome = report(script, tmp_path, strike("kill_rollout", "rollout-1", script.at))
    assert outcome.problems == ["nothing noticed it", "the run did not recover from it"]
    assert not found.clean


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_full_disk_is_over_when_the_log_says_so_or_at_the_next_step_if_the_log_had_no_need_of_room(
    is_noticed: bool,
) -> None:
    watch = Watch(Strike(number=1, kind="fill_disk", target="disk", at=10.0, until=14.0))
    if is_noticed:
        watch.take(events.StorageFailed(reason="full", at=11.0))
    watch.take(events.StepFinished(step=1, attempt=1, at=13.0))
    assert not watch.recovered_at, "the disk is full still"
    watch.take(events.StepFinished(step=2, attempt=1, at=15.0))
    watch.take(events.StorageRecovered(at=16.0))
    assert (watch.noticed_at, watch.recovered_at) == ((11.0, 16.0) if is_noticed else (0.0, 15.0))


def test_a_fault_that_was_never_undone_is_a_finding(tmp_path: Path) -> None:
    script = Script()
    killed = strike("slow", "rollout-1", script.at, until=0.0)
    stuck = msgspec.structs.replace(killed, number=2, stuck="it hangs")
    found, _ = report(script, tmp_path, killed, stuck)
    why = ["it was not undone: laminar.chaos was killed", "it was not undone: it hangs"]
    assert [outcome.problems for outcome in found.faults] == [[each] for each in why]


def test_a_worker_that_was_lost_beside_the_one_that_was_struck_is_a_finding(tmp_path: Path) -> None:
    script = Script()
    struck = script.is_killed("relay-0")
    script.lost("rollout-0", 1)
    script.send(events.TimerFired(), after=2.0)
    script.relay("relay-0", 2)
    script.ready(script.all(actions.PublishVersion)[-1].version)
    _, outcome = report(script, tmp_path, strike("kill_relay", "relay-0", struck))
    assert outcome.problems == ["rollout-0 was lost, which nothing had struck"]


def test_only_those_that_were_struck_may_be_lost(tmp_path: Path) -> None:
    script = Script()
    struck = script.is_killed("rollout-1")
    script.lost("rollout-0", 1)
    script.comes_back("rollout-0", 2)
    script.comes_back("rollout-1", 2)
    _, outcome = report(script, tmp_path, strike("kill_rollout", "rollout-1", struck))
    assert outcome.problems == ["rollout-0 was lost, which nothing had struck"]


def test_silence_that_lasts_longer_than_it_is_forgiven_must_be_noticed(tmp_path: Path) -> None:
    script = Script()
    struck = script.at
    script.send(events.TimerFired(), after=50.0)
    script.report("rollout-1")
    _, outcome = report(script, tmp_path, strike("stop_rollout", "rollout-1", struck, lasts_s=40.0))
    assert outcome.problems == ["nothing noticed it"]


def test_two_faults_at_once_may_cost_what_both_may(tmp_path: Path) -> None:
    script = Script()
    struck = script.is_killed("rollout-1")
    script.lost("relay-0", 1)
    script.send(events.TimerFired(), after=2.0)
    script.relay("relay-0", 2)
    script.ready(script.all(actions.PublishVersion)[-1].version)
    script.comes_back("rollout-1", 2)
    other = msgspec.structs.replace(strike("kill_relay", "relay-0", struck), number=2)
    found, _ = report(script, tmp_path, strike("kill_rollout", "rollout-1", struck), other)
    assert [fault.problems for fault in found.faults] == [[], []]


def test_what_was_only_held_up_has_recovered_when_it_works_after_that(tmp_path: Path) -> None:
    script = Script()
    struck = script.at
    script.report("rollout-1")
    script.at += 3.0
    script.report("rollout-1")
    _, outcome = report(script, tmp_path, strike("stop_rollout", "rollout-1", struck, lasts_s=2.0))
    assert (outcome.noticed_s, round(outcome.recovered_s or 0, 3)) == (None, 3.0)
    assert outcome.problems == []


def test_work_that_was_under_way_when_a_connection_was_cut_is_no_recovery(tmp_path: Path) -> None:
    script = Script()
    struck = script.at
    script.at += 0.1
    script.report("rollout-1")
    script.at += 0.2
    script.send(events.WorkerReturned(worker=WorkerId("rollout-1"), incarnation=1))
    script.at += 0.1
    script.report("rollout-1")
    _, outcome = report(script, tmp_path, strike("drop_frames", "rollout-1", struck))
    assert (round(outcome.noticed_s or 0, 3), round(outcome.recovered_s or 0, 3)) == (0.3, 0.4)
    assert outcome.problems == []


def test_steps_that_are_done_again_are_a_finding_unless_the_trainer_was_struck(tmp_path: Path) -> None:
    script = Script()
    script.step_done()
    script.ready(script.all(actions.PublishVersion)[-1].version)
    struck = script.at
    script.at += 0.5
    script.lost("trainer-0/0", 1)
    script.send(events.TimerFired(), after=2.0)
    script.rank(incarnation=2)
    script.ready(script.all(actions.PublishVersion)[-1].version)
    script.at += 10.0
    script.step_done()
    run = tmp_path / "trainer"
    script.send(events.StopRequested(reason="over"), after=60.0)
    fault = strike("kill_rank", "trainer-0/0", struck)
    outcome = judged(script, leave(script, run, fault)).faults[0]
    assert (outcome.num_redone, outcome.problems) == (1, [])
    outcome = judged(script, leave(script, tmp_path / "other", strike("cut", "trainer-0/0", struck))).faults[0]
    assert any("1 train steps were done again" in problem for problem in outcome.problems)
    later = msgspec.structs.replace(strike("slow", "controller", script.at - 0.5), number=2, workers=[])
    outcome = judged(script, leave(script, tmp_path / "later", fault, later)).faults[1]
    assert outcome.num_redone == 0, "what the trainer does again after its restart is the doing of what had struck it"


def test_received_tokens_that_are_dropped_are_held_against_what_the_fault_may_cost(tmp_path: Path) -> None:
    script = Script()
    here = script.generating("rollout-1")
    if not here:
        script.step_done()
        script.ready(script.all(actions.PublishVersion)[-1].version)
        for name in ("rollout-0", "rollout-1"):
            script.refreshed(name)
        here = script.generating("rollout-1")
    script.report("rollout-1", {t: 2 for t in here})
    struck = script.is_killed("rollout-1")
    script.lost("rollout-0", 1)  # with it the last one that held the version: what it had begins anew elsewhere
    script.comes_back("rollout-0", 2)
    script.comes_back("rollout-1", 2)
    both = ["rollout-0", "rollout-1"]
    first = strike("kill_rollout", "rollout-1", struck, workers=both)
    _, outcome = report(script, tmp_path, first)
    lost = sum(outcome.lost_tokens.values())
    assert outcome.problems == []
    assert outcome.lost_tokens.keys() <= {"version_gone"}
    other = judged(
        script, leave(script, tmp_path / "other", strike("slow", "rollout-1", struck, workers=["rollout-1"]))
    )
    problems = other.faults[0].problems
    assert any("rollout-0 was lost" in problem for problem in problems)
    assert not lost or any(f"{lost} received tokens were dropped (version_gone)" in problem for problem in problems)
