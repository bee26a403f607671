"""A trainer that finds its newest checkpoints damaged goes on from an older one; what these had committed is lost, and counted."""

import pytest
from core_world import Driver, of, settings

from laminar.core import actions, events, invariants, ledger
from laminar.core.engine import Core
from laminar.ids import Version, WorkerId
from tests.core_world import World
from tests.test_core_fuzz import check_end

RANK = WorkerId("trainer-0/0")
DAMAGED = ["step-4: rank 1: state/__1_0.distcp has other bytes than were written"]


def driver(**changes) -> Driver:
    base = {"batch_groups": 1, "buffer_groups_max": 8, "steps": 9, "trainer_restarts_max": 3, "checkpoint_every": 2}
    result = Driver(settings(**(base | changes)))
    result.start("r0")
    return result


def trained(d: Driver) -> list[tuple[int, int, list[int]]]:
    return [(a.step, a.attempt, [row.trajectory for row in a.rows]) for a in d.all(actions.StartTrainStep)]


def saves(d: Driver) -> dict[int, bytes]:
    return {action.step: action.data_state for action in d.all(actions.SaveCheckpoint)}


def one_step(d: Driver) -> None:
    if not d.core.state.trainer.running:
        d.complete_all("r0")
    d.step_done()
    if d.core.state.trainer.saving >= 0:
        d.saved()


def restart(d: Driver, step: int, damaged: list[str], data_state: bytes, incarnation: int = 2) -> list:
    d.lost(RANK)
    d.send(events.TimerFired(), after=10.0)
    return d.rank(incarnation=incarnation, step=step, damaged=damaged, data_state=data_state)


def committed_four() -> Driver:
    """Steps 1 to 4 are committed by checkpoints 2 and 4, step 5 is trained, step 6 runs."""
    d = driver()
    for _ in range(5):
        one_step(d)
    if not d.core.state.trainer.running:
        d.complete_all("r0")
    assert (d.core.state.trainer.checkpoint, d.core.state.trainer.running) == (4, 6)
    return d


def test_what_was_committed_since_the_older_checkpoint_is_dropped_and_people_are_told_what_it_costs():
    d = committed_four()
    books = d.core.state.ledger
    committed, tokens = books.trajectories.committed, books.tokens.committed
    new = restart(d, 2, DAMAGED, saves(d)[2])
    assert books.trajectories.dropped["checkpoint_lost"] == committed // 2
    assert books.trajectories.committed == committed // 2
    assert books.tokens.dropped["checkpoint_lost"] + books.tokens.committed == tokens
    assert ledger.is_closed(books.trajectories)
    assert ledger.is_closed(books.tokens)
    (alarm,) = [a for a in of(new, actions.RaiseAlarm) if a.name == "checkpoint-damaged"]
    assert alarm.text.startswith(
        f"{DAMAGED[0]}; the trainer goes on from step 2; what steps 3 to 4 had trained is lost: "
    )
    assert f"{committed // 2} trajectories" in alarm.text
    (lost,) = of(new, actions.RecordLostSteps)
    assert (lost.first, lost.last, lost.reason) == (3, 4, "checkpoint_lost")
    invariants.check(d.core.state)


def test_leased_groups_are_trained_next_in_their_order_under_new_step_numbers_and_attempts():
    d = committed_four()
    before = {(step, attempt): rows for step, attempt, rows in trained(d)}
    count = len(trained(d))
    restart(d, 2, DAMAGED, saves(d)[2])
    one_step(d)
    one_step(d)
    one_step(d)
    again = trained(d)[count:]
    assert [step for step, _, _ in again[:3]] == [3, 4, 5]
    assert [rows for _, _, rows in again[:2]] == [before[5, 1], before[6, 1]]
    assert not {(step, attempt) for step, attempt, _ in again} & before.keys(), "no attempt is issued twice"
    assert again[2][2] not in before.values(), "then come groups that were never trained"


def test_the_run_still_trains_all_its_steps_and_its_checkpoints_follow_the_new_numbers():
    d = committed_four()
    restart(d, 2, DAMAGED, saves(d)[2])
    while d.core.state.trainer.step < 9:
        one_step(d)
    assert d.core.state.finished == "completed"
    assert d.core.state.ok
    assert [a.step for a in d.all(actions.SaveCheckpoint)] == [2, 4, 4, 6, 8, 9]
    account = d.core.state.ledger.trajectories
    assert account.committed == 9 * d.core.settings.group_size


def test_staleness_counts_from_the_common_step_after_it():
    d = committed_four()
    restart(d, 2, DAMAGED, saves(d)[2])
    assert d.core.state.versions[-1].version == Version(2, 1)
    assert d.core.state.branches[-1].fork_step == 2


def test_a_damaged_checkpoint_that_had_committed_nothing_costs_nothing():
    d = committed_four()
    new = restart(d, 4, ["step-6: meta.json is missing"], saves(d)[4])
    assert not of(new, actions.RecordLostSteps)
    (alarm,) = [a for a in of(new, actions.RaiseAlarm) if a.name == "checkpoint-damaged"]
    assert "; nothing that was committed is lost" in alarm.text
    assert "checkpoint_lost" not in d.core.state.ledger.trajectories.dropped


@pytest.mark.parametrize(
    ("step", "damaged", "of_step"), [(0, DAMAGED, 2), (2, DAMAGED, 4), (2, [], 2), (0, [], 0), (2, DAMAGED, 0)]
)
def test_an_older_step_that_is_no_checkpoint_of_this_run_ends_it_and_changes_nothing(step, damaged, of_step):
    d = committed_four()
    before = d.core.state.ledger.trajectories.committed
    new = restart(d, step, damaged, saves(d).get(of_step, b"\xc1"))
    assert "but step 4 is already committed" in d.core.state.stopping
    assert not of(new, actions.StartTrainStep)
    assert d.core.state.ledger.trajectories.committed == before


def test_a_resumed_run_whose_newest_weights_are_damaged_goes_back_in_the_same_way():
    before = committed_four()
    after = Driver(before.core.settings, Core.resumed(before.core.settings, saves(before)[4]))
    committed = after.core.state.ledger.trajectories.committed
    after.send(events.RunStarted(boot=2, branch_floor=1))
    after.send(events.RelayJoined(worker=WorkerId("relay-0"), incarnation=1))
    after.rank(step=2, damaged=DAMAGED, data_state=saves(before)[2])
    after.ready(Version(2, 1))
    after.join("r0")
    after.refreshed("r0")
    assert after.core.state.ledger.trajectories.dropped["checkpoint_lost"] == committed // 2
    while after.core.state.trainer.step < 9:
        one_step(after)
    assert (after.core.state.finished, after.core.state.ok) == ("completed", True)
    assert [step for step, _, _ in trained(after)] == [3, 4, 5, 6, 7, 8, 9]


def test_runs_in_which_checkpoints_break_lose_only_what_these_had_committed():
    num_lost = 0
    for seed in range(25):
        base = {"checkpoint_every": 1 + seed % 2, "steps": 8, "trainer_restarts_max": 50, "batch_groups": 1}
        world = World(settings(**base), seed, faults=0.3)
        world.checkpoints_break = True
        world.run()
        check_end(world)
        num_lost += len(world.lost_rows)
        lost = sum(len(rows) for rows in world.lost_rows)
        assert world.core.state.ledger.trajectories.dropped.get("checkpoint_lost", 0) == lost
    assert num_lost > 10
