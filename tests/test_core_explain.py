"""Why things are as they are: answers agree with what the passes do, cover every subject, and change nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
from core_relay_world import RelayWorld
from core_world import Driver, World, of, settings

from laminar.core import actions, dispatch, events, explain, fleet, moves, preview, training
from laminar.core.engine import Core
from laminar.core.explanation import Explanation
from laminar.core.records import GroupState
from laminar.core.story import group as group_subject
from laminar.core.story import trajectory as trajectory_subject
from laminar.ids import GroupId, Version, WorkerId, format_id

R0, R1 = WorkerId("r0"), WorkerId("r1")
V0, V1 = Version(0, 0), Version(1, 0)

REPACKS = {"repack_interval_s": 0.3, "group_size": 4}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repack": REPACKS | {"steps": 4},
    "continuous": REPACKS | {"refresh_policy": "continuous", "draining_share": 0.34, "progress_timeout_s": 1.0},
    "rolling": REPACKS | {"refresh_policy": "rolling", "staleness_budget": 0.5},
    "parts": REPACKS | {"repack_policy": "parts"},
    "bounded": {"max_staleness": 1, "on_stale": "wait", "await_publication_s": 0.3, "evaluate": True},
    "dropping": {"max_staleness": 0, "on_stale": "drop", "stragglers": "drop", "min_group_size": 1},
    "sampler": {"custom_sampler": True, "checkpoint_every": 1},
    "faults": {"restarts_max": 3, "trainer_restarts_max": 9, "relay_restarts_max": 9, "checkpoint_pulls": True},
}


def moments(name: str, seed: int, world: type[World] = World, operator: bool = False) -> Iterator[World]:
    """A run of a seeded world with faults, after each event."""
    made = world(settings(**KINDS[name]), seed, faults=0.08)
    made.operator = operator
    made._take(made._begin())
    while not made.core.state.finished:
        yield made
        made.at += made.random.random() * 0.1
        made._take(made._next())


def subjects(core: Core) -> list[str]:
    state = core.state
    named = [*state.replicas, *state.relays, *state.restarts, "trainer", "new groups", "s1", f"s{core.settings.steps}"]
    named += [group_subject(group) for group in state.groups]
    named += [trajectory_subject(t) for t in state.trajectories]
    return [*map(str, named), *(str(record.version) for record in state.versions)]


# ---- whatever happens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_whatever_is_live_can_be_asked_about_and_asking_changes_nothing(name: str) -> None:
    for world in moments(name, seed=3, world=RelayWorld, operator=True):
        if world.seq % 5:
            continue
        before = world.core.snapshot()
        for subject in subjects(world.core):
            if subject in world.core.state.restarts and subject not in world.core.state.replicas:
                continue  # a trainer's launch, or a relay that is lost
            answer = explain.why(world.core.look(), subject)
            assert answer.subject in (subject, "trainer")
            assert answer.text
            assert all(line.topic and line.text for line in answer.lines)
        preview.plan(world.core.look())
        preview.ahead(world.core.look())
        assert world.core.snapshot() == before


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world", [World, RelayWorld])
def test_what_is_said_to_be_about_to_happen_has_happened(name: str, world: type[World]) -> None:
    """While nothing is held: no replica is left that may be given a group or is to pull, no sibling that could go on."""
    for seed in range(3):
        for made in moments(name, seed, world):
            core, turn = made.core, made.core.look()
            if (core.next_deadline() or made.at + 1) <= made.at:
                continue  # a timer is due: what it ends is over, and nobody has said so
            for worker in core.state.replicas:
                answer = explain.why_replica(turn, worker)
                assert not answer.line("new groups").yes, f"{made.seq}: {answer}"
                assert not answer.line("refresh").yes or core.state.replicas[worker].target, f"{made.seq}: {answer}"
            for group in [] if core.state.stopping else core.state.requeue:
                assert not explain.why(turn, group_subject(group)).line("queued").yes
            assert not explain.why(turn, "trainer").line("batch").yes


@pytest.mark.parametrize("name", ["repack", "continuous", "parts"])
def test_the_preview_of_a_repack_is_what_the_check_finds(name: str) -> None:
    num = 0
    for seed in range(8):
        for made in moments(name, seed):
            turn = made.core.look()
            shown = preview.plan(turn)
            copy = Core.restore(made.core.configured, made.core.snapshot())
            moves.trigger(copy.look())
            moves.check(copy.look())
            assert copy.state.repack.reasons == {row.worker: row.reason for row in shown.candidates}
            planned = [(t.source, t.destination, len(t.trajectories)) for t in copy.state.repack.planned]
            found = [choice.move for choice in shown.choices]
            assert planned == [(move.source, move.destination, move.num_requests) for move in found]
            num += len(found)
            for choice in shown.choices:
                assert all(other.why_not or other.kv_after <= choice.move.kv_after for other in choice.others)
    assert num, "there was something to show"


@pytest.mark.parametrize("name", KINDS)
def test_the_first_timer_is_the_next_deadline(name: str) -> None:
    for made in moments(name, seed=1, world=RelayWorld):
        ahead = preview.ahead(made.core.look())
        assert made.core.next_deadline() == (ahead.timers[0].at if ahead.timers else None)


# ---- replicas ----------------------------------------------------------------------------------------------


def why(driver: Driver, subject: str) -> Explanation:
    return explain.why(driver.core.look(), subject)


def two() -> Driver:
    driver = Driver(settings(buffer_groups_max=8, local_batch_groups=2, steps=9, repack_interval_s=1.0))
    driver.start("r0", "r1")
    return driver


def test_a_replica_whose_local_batch_has_begun_drains_and_gets_no_group() -> None:
    driver = two()
    answer = why(driver, "r0")
    assert answer.text == "r0 is draining: it begins no more groups under v0: 4 trajectories to go"
    assert answer.line("drains").yes
    assert answer.line("new groups").text == f"none now: {answer.line('drains').text}"
    assert answer.line("refresh").text == "it pulls nothing now: trajectories generate on it"
    assert answer.line("holds").text == "v0, 0 steps behind the trainer's v0; its relay has nothing newer"


def test_a_full_buffer_says_which_limit_holds_back() -> None:
    driver = Driver(settings(buffer_groups_max=2))
    driver.start("r0", "r1")
    assert why(driver, "r1").line("new groups").text == "none now: buffer_groups_max holds new groups back"
    assert why(driver, "new groups").text == "no new group begins: no replica may be given one"
    assert "buffer_groups_max holds new groups back: r1" in [line.text for line in why(driver, "new groups").lines]


def test_a_replica_is_said_to_be_a_source_or_a_destination_of_a_check_now() -> None:
    driver = two()
    for name in ("r0", "r1"):
        here = driver.generating(name)
        driver.report(name, dict.fromkeys(here, 5), finish=here[1:], kv_tokens=20)
    assert (
        why(driver, "r0").line("repack").text
        == "in a check now: not past its peak: 20 KV tokens now, 0 at the last check"
    )
    for name in ("r0", "r1"):
        driver.core.state.replicas[WorkerId(name)].kv_previous = 40
    assert why(driver, "r0").line("repack").text == "in a check now: source: 1 requests move to r1"
    assert why(driver, "r1").line("repack").text.startswith("in a check now: destination: 40 KV tokens")
    shown = preview.plan(driver.core.look())
    assert [(row.worker, row.role, row.kv_after) for row in shown.candidates] == [
        ("r0", "source", 0),
        ("r1", "destination", 40),
    ]


def test_a_held_pass_is_named_where_it_keeps_something_from_happening() -> None:
    driver = two()
    driver.send(events.HoldChanged(pass_name="refresh", held=True))
    driver.join("r2")
    assert why(driver, "r2").line("refresh").text == (
        "it is to pull; but the pass refresh is held by an operator, decision 1 waits for a word"
    )


def test_a_lost_replica_says_what_is_done_about_it_and_an_unknown_one_names_those_that_are_there() -> None:
    driver = Driver(settings(restarts_max=1))
    driver.start("r0", "r1")
    driver.lost("r0")
    assert why(driver, "r0").text == "r0 is dead: killed; restart 1 of 1 in 1 s"
    with pytest.raises(LookupError, match=r"there is no replica 'rollout-9'; there are: r1"):
        why(driver, "rollout-9")


# ---- groups, trajectories ----------------------------------------------------------------------------------


def test_a_group_in_flight_says_where_each_missing_sibling_is() -> None:
    driver = two()
    first, second = driver.generating("r0")[:2]
    driver.report("r0", {first: 7, second: 9}, finish=[first])
    group = driver.core.state.trajectories[first].group
    answer = why(driver, group_subject(group))
    names = [trajectory_subject(t) for t in (first, second)]
    assert answer.text == f"{group_subject(group)} is not complete: 2 of 2 siblings are missing ({', '.join(names)})"
    assert answer.line(names[0]).text.startswith("has its 7 tokens; r0 computes its reward")
    assert answer.line(names[1]).text.startswith("generates on r0, 9 tokens so far")
    assert why(driver, names[1]).line("group").text == answer.text


def test_queued_siblings_say_what_they_wait_for() -> None:
    driver = Driver(settings(restarts_max=1, buffer_groups_max=8))
    driver.start("r0")
    group = next(iter(driver.core.state.groups))
    driver.lost("r0")
    line = why(driver, group_subject(group)).line("queued")
    assert (line.text, line.yes) == ("2 siblings: no replica takes work", False)


def complete(driver: Driver, name: str, num: int) -> list[GroupId]:
    """So many groups of the replica complete."""
    done = driver.generating(name)[: num * driver.core.settings.group_size]
    driver.report(name, dict.fromkeys(done, 3), finish=done, reward=dict.fromkeys(done, 1.0))
    return list(driver.core.state.buffer)


def test_a_buffered_group_says_how_many_are_before_it_and_why_no_batch_is_taken() -> None:
    driver = Driver(settings(batch_groups=3, buffer_groups_max=8, local_batch_groups=4))
    driver.start("r0")
    groups = complete(driver, "r0", 2)
    answer = why(driver, group_subject(groups[1]))
    assert answer.text.endswith(
        "is complete and waits: the trainer takes no batch now, because 2 of 3 groups are complete and in the buffer"
    )
    assert "1 of 2 groups are before it; first in, first out" in answer.line("buffer").text
    driver.complete_all("r0")
    leased = why(driver, group_subject(groups[1]))
    assert leased.text.endswith("is sampled: step 1 has it")
    assert why(driver, "s1").text.startswith("step 1 is at work in the trainer")


def test_a_batch_that_would_leave_a_group_behind_the_bound_is_said_to_wait_for_it() -> None:
    driver = Driver(settings(batch_groups=1, buffer_groups_max=2))
    driver.start("r0")
    driver.core.settings = settings(batch_groups=1, buffer_groups_max=2, max_staleness=0, on_stale="wait")
    (group,) = complete(driver, "r0", 1)
    other = next(g for g in driver.core.state.groups if g != group)
    reason = f"group {format_id(other)} would be left behind and pass max_staleness = 0"
    assert why(driver, "trainer").line("batch").text == reason
    assert why(driver, group_subject(group)).text.endswith(f"the trainer takes no batch now, because {reason}")


def test_a_group_says_what_the_custom_sampler_said_last() -> None:
    driver = Driver(settings(custom_sampler=True, buffer_groups_max=6, local_batch_groups=3))
    driver.start("r0")
    groups = complete(driver, "r0", 2)
    subject = group_subject(groups[0])
    assert why(driver, subject).line("sampler").text == "it is asked for 2 groups and has not answered"
    driver.send(events.SamplerAnswered(request=1, groups=[]))
    assert why(driver, subject).line("sampler").text.startswith("it chose nothing, and is asked again")


def test_what_is_not_live_any_more_is_not_explained() -> None:
    driver = two()
    for subject in ("g1.99", "t9.1", "s0", "s99", "v7", "relay-7", "x", "g1", "t1.x", ""):
        with pytest.raises(LookupError):
            why(driver, subject)


# ---- versions, trainer, relays -----------------------------------------------------------------------------


def test_a_version_says_who_holds_it_and_why_it_is_kept() -> None:
    driver = two()
    answer = why(driver, "v0")
    assert answer.text == "v0 is readable, held by 1 relays and 2 replicas"
    assert answer.line("replicas").text == "r0, r1 hold it; none pull it"
    assert answer.line("retained").yes


def test_a_version_under_way_says_until_when_and_a_lost_one_why() -> None:
    driver = two()
    driver.complete_all("r0")
    driver.step_done()
    line = why(driver, "v1").line("readable")
    assert (line.text, line.yes) == ("its publication is under way, at most 120.0 s more", False)
    for _ in range(2):
        driver.send(events.VersionLost(version=V1, reason="slots are full"))
    text = "its publication failed and is tried again in 1.0 s; the last try: slots are full"
    assert why(driver, "v1").line("readable").text == text
    driver.unpublishable(V1, "slots are full")
    assert "given up after 4 tries: slots are full" in why(driver, "v1").line("readable").text


def test_the_trainer_says_what_it_works_on_and_what_it_waits_for() -> None:
    driver = two()
    assert why(driver, "trainer").text.startswith(
        "the trainer is at step 0: no step begins, because 0 of 2 groups are complete"
    )
    driver.complete_all("r0")
    assert "step 1 is at work in the trainer" in why(driver, "trainer").text
    assert why(driver, "trainer-0/0").text == why(driver, "trainer").text


def test_a_relay_says_its_place_and_what_it_holds() -> None:
    driver = two()
    answer = why(driver, "relay-0")
    assert answer.text == "relay-0 is the master of the chain and serves r0, r1"
    assert answer.line("holds").text == "v0"


# ---- what decides and what explains are one -----------------------------------------------------------------


def test_the_predicates_of_the_passes_are_the_reasons() -> None:
    driver = two()
    turn = driver.core.look()
    for worker, replica in driver.core.state.replicas.items():
        assert why(driver, worker).line("new groups").text == f"none now: {dispatch.why_no_new_group(turn, replica)}"
        assert why(driver, worker).line("refresh").text == f"it pulls nothing now: {fleet.why_no_pull(turn, replica)}"
    assert why(driver, "trainer").line("batch").text == training.why_no_batch(turn)
    assert not of(driver.send(events.TimerFired()), actions.StartGroup)
    states = {group.state for group in driver.core.state.groups.values()}
    assert states == {GroupState.IN_FLIGHT}


def test_a_superseded_replica_that_goes_on_admitting_says_whose_turn_it_is() -> None:
    limits = {"draining_share": 0.5, "progress_timeout_s": 1e6}
    driver = Driver(settings(refresh_policy="continuous", buffer_groups_max=12, steps=9, **limits))
    driver.start("r0", "r1")
    driver.complete_all("r0")
    driver.step_done()
    driver.ready(V1)
    (draining,) = driver.core.state.draining_to_refresh
    (other,) = set(driver.core.state.replicas) - {draining}
    assert explain.why(driver.core.look(), draining).line("drains").yes
    line = explain.why(driver.core.look(), other).line("drains")
    assert line.yes is False
    assert "at most 1 of 2 replicas drain at once (draining_share = 0.5)" in line.text
    assert line.text.endswith(f"not its turn: {draining}")
