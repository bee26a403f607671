"""What the console's commands say of a core, and which events its changes are."""

from typing import Any

import pytest
from core_world import Driver, settings

from laminar.config import Config
from laminar.console.answers import Answer, records
from laminar.console.commands import COMMANDS
from laminar.console.commands.change import KEYS, OF_REPLICAS
from laminar.console.language import Language
from laminar.console.view import View
from laminar.core import actions, events, explain, ledger, preview, waits
from laminar.core.decisions import Repack
from laminar.ids import WorkerId, format_id

LANGUAGE = Language(COMMANDS)


class Desk(Driver):
    """A core with a fleet, and the console in front of it."""

    def __init__(self, replicas: int = 2, **changes: Any) -> None:
        super().__init__(settings(**changes))
        self.at = 10.0
        self.start(*(f"rollout-{index}" for index in range(replicas)))

    def ask(self, line: str) -> Answer:
        def post(event: events.AnyEvent) -> int:
            self.send(event)
            return self.seq

        view = View(self.core, target="live", now=self.at, began=10.0)
        return LANGUAGE.answer(view, line, post)

    def rows(self, line: str) -> list[dict[str, Any]]:
        answer = self.ask(line)
        assert not answer.error, answer.error
        return records(answer.tables[0])

    def error(self, line: str) -> str:
        error = self.ask(line).error
        assert error, line
        return error


# ---- look --------------------------------------------------------------------------------------------------


def test_the_fleet_has_a_row_for_each_replica_and_words_choose():
    desk = Desk(3)
    assert [row["replica"] for row in desk.rows("fleet")] == ["rollout-0", "rollout-1", "rollout-2"]
    assert [row["replica"] for row in desk.rows("fleet rollout-1")] == ["rollout-1"]
    assert "no replica has 'dead'" in desk.ask("fleet dead").lines[0]


def test_a_name_chooses_what_it_names_and_not_what_begins_like_it():
    desk = Desk(12)
    assert [row["replica"] for row in desk.rows("fleet r1")] == ["rollout-1"]
    assert [row["replica"] for row in desk.rows("fleet rollout-1 v0")] == ["rollout-1"]
    assert len(desk.rows("fleet rollout-1 v")) == 1
    assert {row["replica"] for row in desk.rows("fleet lout-1")} == {"rollout-1", "rollout-10", "rollout-11"}
    told = [f"{row['subjects']} {row['because_of']} {row['what']}" for row in desk.rows("timeline r1")]
    assert told
    assert not [text for text in told if "rollout-1" in text and "rollout-1 " not in text + " "]


def test_a_lost_replica_stays_in_the_fleet_with_the_reason():
    desk = Desk(2, restarts_max=1)
    desk.lost("rollout-1")
    row = desk.rows("fleet dead")[0]
    assert row["replica"] == "rollout-1"
    assert row["note"].startswith("killed")


def test_a_replica_shows_what_it_is_at_and_what_happened_to_it():
    desk = Desk(2)
    answer = desk.ask("replica r1")
    at, story = answer.tables
    assert [row["group"] for row in records(at)] == ["g1.3", "g1.4"]
    assert records(story)[0]["what"] == "joined"
    assert answer.facts["version"] == "v0"


def test_groups_are_those_in_flight_or_those_that_words_are_true_of():
    desk = Desk(2)
    desk.complete_all("rollout-0")
    assert {row["state"] for row in desk.rows("groups")} == {"in_flight"}
    assert len(desk.rows("groups")) == len([g for g in desk.core.state.groups.values() if g.state == "in_flight"])
    assert {row["replica"] for row in desk.rows("groups r1")} == {"rollout-1"}
    assert {row["step"] for row in desk.rows("groups leased")} == {1}
    assert "no group is v7" in desk.ask("groups v7").lines[0]


def test_the_buffer_shows_complete_groups_in_the_order_of_completion():
    desk = Desk(2, batch_groups=3, buffer_groups_max=6)
    desk.complete_all("rollout-0", reward=0.5)
    rows = desk.rows("buffer")
    assert [row["group"] for row in rows] == ["g1.1", "g1.2"]
    assert [row["reward_mean"] for row in rows] == [0.5, 0.5]
    assert desk.ask("buffer").facts["complete_groups"] == "2, a batch takes 3"


def test_the_ledger_of_the_console_is_that_of_the_core():
    desk = Desk(2)
    desk.complete_all("rollout-0")
    account = desk.core.state.ledger.trajectories
    shown = {row["place"]: row["trajectories"] for row in desk.rows("ledger")}
    assert shown["all"] == account.total == sum(value for place, value in shown.items() if place != "all")
    assert ledger.is_closed(account)


def test_the_ledger_says_how_far_behind_the_groups_are_that_no_step_has():
    desk = Desk(2)
    desk.complete_all("rollout-0")
    num = sum(group.state != "leased" for group in desk.core.state.groups.values())
    assert num < len(desk.core.state.groups)
    assert desk.ask("ledger").lines[1] == f"groups in flight or buffered, by trainer steps behind: 0: {num}"


def test_the_story_of_a_trajectory_has_that_of_its_group_but_not_that_of_its_siblings():
    desk = Desk(1, num_retries=3)
    one, other = desk.generating("rollout-0")[:2]
    desk.report("rollout-0", fail={one: ("infra", "engine_error")})
    assert [row["what"] for row in desk.rows(f"story t{format_id(other)}")] == ["2 siblings started under v0"]
    told = [row["what"] for row in desk.rows(f"story t{format_id(one)}")]
    assert "queued again after engine_error" in told


def test_a_story_says_which_event_each_row_is_because_of():
    desk = Desk(1)
    row = next(row for row in desk.rows("story v0") if row["what"].startswith("published"))
    assert row["because_of"] == "VersionReady"
    assert row["event"] == 4


def test_a_story_of_what_is_gone_is_still_told():
    desk = Desk(1)
    desk.complete_all("rollout-0")
    desk.step_done()
    desk.send(events.StopRequested(reason="enough"))
    desk.saved()
    assert "there is no group g1 now" in desk.error("group g1")
    assert desk.rows("story g1")[-1]["what"].startswith("complete")


def test_the_status_says_who_waits_for_what():
    desk = Desk(1)
    assert desk.ask("status").facts["trainer"] == "waits for complete groups: 0 of 2 are buffered"
    desk.complete_all("rollout-0")
    assert "work on step 1" in str(desk.ask("status").facts["trainer"])


def test_the_status_says_what_an_operator_has_changed():
    desk = Desk(2)
    desk.ask("set buffer.max_groups=40 repack.interval_s=2")
    desk.ask("set rollout.max_concurrent=8 r1")
    desk.ask("sampler mine.py:Mine")
    desk.ask("stop after 2")
    answer = desk.ask("status")
    assert answer.facts["run"] == "under way, and stops after step 2"
    assert answer.lines == [
        "changed by an operator: buffer.max_groups = 40, repack.interval_s = 2.0, buffer.sampler = mine.py:Mine, "
        "rollout.max_concurrent = 8 of rollout-1"
    ]
    assert [row["what"] for row in desk.rows("story settings")][-2:] == [
        "the sampler is mine.py:Mine",
        "the run is to stop after step 2",
    ]


def test_the_sampler_says_who_chooses_and_what_it_said_last():
    desk = Desk(1)
    assert desk.ask("sampler").facts == {"sampler": "fifo: batches are taken first in, first out"}
    desk.ask("sampler mine.py:Mine")
    desk.fill("rollout-0")
    desk.send(events.SamplerAnswered(request=1, error="fell asleep"))
    assert desk.ask("sampler").facts == {
        "sampler": "mine.py:Mine, chosen by an operator",
        "last_word": "it fell asleep",
    }


@pytest.mark.parametrize("line", ["plan later", "versions most", "checkpoint soon"])
def test_a_word_that_would_have_no_effect_is_refused(line):
    desk = Desk(1)
    name = line.split()[0]
    assert desk.error(line).startswith(f"usage: {name} [")


def test_names_that_are_not_there_are_answered_by_those_that_are():
    desk = Desk(2)
    assert desk.error("replica r7") == "there is no replica 'r7'; there are: rollout-0, rollout-1"
    assert "did you mean rollout-1?" in desk.error("replica rolout-1")
    assert "there are: g1.1, g1.2, g1.3, g1.4" in desk.error("group g9")
    assert "write, for example, g1.4" in desk.error("group 7")
    assert "there is no subject 'v'" in desk.error("story v")
    assert "nothing is told of settings" in desk.ask("story settings").lines[0]


# ---- ask ---------------------------------------------------------------------------------------------------


def reasons(answer: Answer) -> list[list[Any]]:
    return [list(row.values()) for table in answer.tables for row in records(table)]


@pytest.mark.parametrize(
    ("asked", "subject"),
    [("r1", "rollout-1"), ("g3", "g1.3"), ("t5", "t1.5"), ("v0", "v0"), ("trainer", "trainer"),
     ("new groups", "new groups"), ("relay-0", "relay-0")],
)  # fmt: skip
def test_why_is_what_the_core_says_and_nothing_else(asked: str, subject: str) -> None:
    desk = Desk(2, repack_interval_s=1.0)
    found = explain.why(desk.core.look(), subject)
    answer = desk.ask(f"why {asked}")
    assert answer.headline == found.text
    assert reasons(answer) == [[line.topic, line.yes, line.text] for line in found.lines]


def test_why_of_what_is_not_there_says_what_is() -> None:
    desk = Desk(2)
    assert "there are: rollout-0, rollout-1" in desk.error("why r9")
    assert "g1.9 is not live" in desk.error("why g9")
    assert "more than one subject" in desk.error("why r1 r2")
    assert "there is no subject 'it'" in desk.error("why it")


def test_the_plan_is_that_of_the_planner_and_the_check_that_follows_does_it() -> None:
    desk = held_repack()
    desk.ask("skip")
    desk.ask("resume repack")
    for index in range(3):
        name = f"rollout-{index}"
        desk.report(name, kv_tokens=50 + 10 * index, running=len(desk.generating(name)))
    found = preview.plan(desk.core.look())
    answer = desk.ask("plan")
    candidates = records(answer.tables[0])
    assert [row["why"] for row in candidates] == [candidate.reason for candidate in found.candidates]
    chosen = [(row["source"], row["destination"]) for row in records(answer.tables[1]) if row["chosen"]]
    assert chosen == [(choice.move.source, choice.move.destination) for choice in found.choices]
    assert chosen
    desk.send(events.TimerFired(), after=1.0)
    assert {action.worker for action in desk.all(actions.AbortAttempts)} == {source for source, _ in chosen}


def test_what_comes_next_begins_with_the_timer_that_the_driver_sets() -> None:
    desk = Desk(2, repack_interval_s=1.0)
    timers = records(desk.ask("next").tables[0])
    assert timers[0]["in_s"] == pytest.approx((desk.core.next_deadline() or 0.0) - desk.at)
    assert timers[0]["what"] == "the next repack check"


def test_who_waits_for_whom_is_the_wait_for_graph_of_the_core() -> None:
    desk = Desk(2)
    shown = [row["who"] for row in desk.rows("why-stalled")]
    assert shown == [wait.who for wait in waits.waits(desk.core.look())]


# ---- step through decisions --------------------------------------------------------------------------------


def held_repack(replicas: int = 3) -> Desk:
    """The second check finds all replicas past their peak, and what it decides is held."""
    desk = Desk(replicas, repack_interval_s=1.0, local_batch_groups=2, buffer_groups_max=12)
    assert not desk.ask("hold repack").error
    for kv in (900, 100):
        for index in range(replicas):
            name = f"rollout-{index}"
            desk.report(name, kv_tokens=kv + 50 * index, running=len(desk.generating(name)))
        desk.send(events.TimerFired(), after=1.0)
    assert desk.core.state.held
    return desk


def the_held(desk: Desk) -> Repack:
    (held,) = desk.core.state.held.values()
    assert isinstance(held.decision, Repack)
    return held.decision


def test_a_pause_is_an_event_and_holds_the_next_decision():
    desk = held_repack()
    assert not desk.all(actions.AbortAttempts)
    (row,) = desk.rows("held")
    assert row["pass"] == "repack"
    assert row["what"].startswith("trajectories move: ")


def test_a_held_repack_shows_each_transfer_with_the_reason_of_the_planner():
    desk = held_repack()
    number = next(iter(desk.core.state.held))
    shown = desk.rows(f"held {number}")
    assert [row["reason"] for row in shown] == [transfer.reason for transfer in the_held(desk).transfers]
    assert all(row["reason"].startswith("left fullest") for row in shown)


def test_the_plan_of_a_held_repack_is_what_the_check_that_decided_it_saw():
    desk = held_repack()
    answer = desk.ask("plan")
    assert [row["why"] for row in records(answer.tables[0])] == list(desk.core.state.repack.moved_reasons.values())
    assert records(answer.tables[1]) == desk.rows(f"held {next(iter(desk.core.state.held))}")
    assert desk.ask("plan now").headline.startswith("a check now would move nothing; but the pass repack is held")


def test_what_is_approved_is_carried_out_and_the_answer_is_the_story_of_that_event():
    desk = held_repack()
    moved = [t for transfer in the_held(desk).transfers for t in transfer.trajectories]
    answer = desk.ask("approve")
    assert answer.facts == {"event": str(desk.seq)}
    assert any("trajectories move from" in line for line in answer.lines)
    assert [t for action in desk.all(actions.AbortAttempts) for t in action.trajectories] == moved


def test_where_nothing_is_held_nothing_is_approved_or_skipped():
    desk = Desk(1)
    for line in ("approve", "approve all", "skip all", "skip 3"):
        assert "nothing is held; `hold` or `break` holds a pass" in desk.error(line)


def test_what_is_skipped_is_not_carried_out():
    desk = held_repack()
    assert not desk.ask("skip all").error
    assert not desk.core.state.held
    assert not desk.all(actions.AbortAttempts)


def test_an_edited_repack_goes_where_the_operator_says():
    desk = held_repack()
    transfer = the_held(desk).transfers[0]
    other = next(r for r in desk.core.state.replicas if r not in (transfer.source, transfer.destination))
    number = next(iter(desk.core.state.held))
    assert not desk.ask(f"edit {number} send {transfer.source} {other}").error
    assert the_held(desk).transfers[0].destination == other
    assert not desk.all(actions.AbortAttempts), "it goes on being held"
    desk.ask(f"approve {number}")
    moving = {desk.core.state.trajectories[t].moving_to for t in transfer.trajectories}
    assert moving == {other}


def test_an_edit_that_cannot_be_is_refused_with_the_reason():
    desk = held_repack(replicas=2)
    number, source = next(iter(desk.core.state.held)), the_held(desk).transfers[0].source
    destination = the_held(desk).transfers[0].destination
    before = desk.seq
    assert "nothing would be left to move" in desk.error(f"edit {number} drop {source}")
    assert f"nothing moves from {destination}" in desk.error(f"edit {number} drop {destination}")
    assert "it is the source" in desk.error(f"edit {number} send {source} {source}")
    assert "it can be edited by: drop, send" in desk.error(f"edit {number} swap g1 g2")
    assert f"no decision 99 is held; there are: {number} (repack)" in desk.error("edit 99 drop r1")
    assert desk.seq == before


def test_a_batch_is_edited_by_swapping_complete_groups():
    desk = Desk(2, buffer_groups_max=8)
    desk.ask("hold sample")
    desk.fill("rollout-0", "rollout-1")
    (held,) = desk.core.state.held.values()
    assert "is in the batch already" in desk.error(f"edit {held.id} swap g1 g2")
    assert not desk.ask(f"edit {held.id} swap g1 g4").error
    desk.ask("approve")
    step = desk.core.state.steps[1]
    assert [group & 0xFF for group in step.groups] == [4, 2]


def test_a_dispatch_is_edited_to_go_to_another_replica():
    desk = Desk(1)
    desk.ask("hold dispatch")
    desk.join("rollout-1")
    desk.refreshed("rollout-1")
    desk.join("rollout-2")
    desk.refreshed("rollout-2")
    (held,) = desk.core.state.held.values()
    other = {"rollout-1": "rollout-2", "rollout-2": "rollout-1"}[held.decision.worker]
    desk.ask(f"edit {held.id} on {other}")
    desk.ask(f"approve {held.id}")
    assert desk.core.state.replicas[WorkerId(other)].attempts


def test_resume_lets_go_what_was_paused_and_nothing_else():
    desk = held_repack()
    assert "dispatch is not held; held are: repack" in desk.error("resume dispatch")
    assert not desk.ask("resume").error
    assert not desk.core.state.holds
    assert "nothing is held or paused" in desk.error("resume")
    desk.ask("pause repack sample")
    assert "there is no pass 'all'" in desk.error("resume repack all")
    desk.ask("resume all")
    assert not desk.core.state.holds


def test_a_paused_pass_decides_nothing_and_a_held_one_shows_what_it_would():
    desk = Desk(1, buffer_groups_max=8)
    desk.ask("pause sample")
    desk.fill("rollout-0")
    assert not desk.core.state.held
    assert not desk.core.state.steps
    desk.ask("hold sample")
    assert [row["pass"] for row in desk.rows("held")] == ["sample"]
    desk.ask("continue")
    assert list(desk.core.state.steps) == [1]
    assert desk.core.state.holds, "it goes on being held: the next batch will be shown"


def test_going_on_where_nothing_is_held_is_refused_with_what_helps():
    desk = Desk(1)
    assert "nothing waits at a breakpoint" in desk.error("continue")
    desk.ask("pause all")
    assert "`resume` lets refresh, repack, dispatch, sample go" in desk.error("continue")
    assert "goes on by itself" in desk.error("continue until step 3")


# ---- breakpoints -------------------------------------------------------------------------------------------


def test_a_breakpoint_holds_the_decision_that_meets_it_and_continue_applies_it():
    desk = Desk(1, buffer_groups_max=8)
    assert "breakpoint 1 at sample when step == 1" in desk.ask("break sample when step = 1").lines[0]
    desk.fill("rollout-0")
    (held,) = desk.core.state.held.values()
    assert held.breakpoint == 1
    shown = desk.rows("break")[0]
    assert (shown["at"], shown["hits"], shown["last_event"]) == ("sample when step == 1", 1, desk.seq)
    desk.ask("continue")
    assert list(desk.core.state.steps) == [1]
    assert not desk.core.state.holds


def test_a_breakpoint_at_an_event_holds_every_pass_from_then_on():
    desk = Desk(2, restarts_max=1)
    desk.ask("break replica-dead when replica == r1")
    desk.lost("rollout-0")
    assert not desk.core.state.holds
    desk.lost("rollout-1")
    assert set(desk.core.state.holds) == {"dispatch", "repack", "sample", "refresh"}
    assert not desk.ask("continue").error
    assert not desk.core.state.holds


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("break repak", "did you mean repack?"),
        ("break repack if moves > 2", "write `break repack when FIELD == VALUE"),
        ("break repack when", "write `break repack when FIELD == VALUE"),
        ("break repack when moves", "'moves' is no condition"),
        ("break repack when moves > many", "moves is a number, 'many' is not"),
        ("break repack when size > 2", "repack has no field 'size'; there are: replica"),
        ("break sample when group == g77777", "g1.77777"),
        ("clear 4", "there is no breakpoint 4; there are: none"),
        ("clear one", "is no breakpoint"),
    ],
)
def test_a_breakpoint_that_cannot_be_is_refused_with_what_to_write(line, error):
    desk = Desk(1)
    before = desk.seq
    answer = desk.ask(line)
    if answer.error:
        assert error in answer.error
        assert desk.seq == before
    else:
        assert error in answer.lines[0], "it may come to be"


def test_cleared_breakpoints_are_gone():
    desk = Desk(1)
    for line in ("break sample", "break repack", "clear 1"):
        desk.ask(line)
    assert list(desk.core.state.breakpoints) == [2]
    desk.ask("clear all")
    assert not desk.core.state.breakpoints


# ---- changes -----------------------------------------------------------------------------------------------


def test_settings_are_changed_by_the_keys_of_the_configuration():
    desk = Desk(1, repack_interval_s=1.0)
    answer = desk.ask("set buffer.max_groups=40 repack.policy=parts buffer.max_staleness=3")
    assert answer.lines[-1] == (
        "→ buffer.max_groups 6 → 40, repack.policy whole → parts, buffer.max_staleness None → 3 (settings)"
    )
    settings = desk.core.settings
    assert (settings.buffer_groups_max, settings.repack_policy, settings.max_staleness) == (40, "parts", 3)
    desk.ask("set buffer.max_staleness=-1")
    desk.ask("set repack.enabled=false")
    assert (desk.core.settings.max_staleness, desk.core.settings.repack_interval_s) == (None, 0.0)
    (row,) = desk.rows("settings max_groups")
    assert (row["value"], row["note"]) == (40, "changed by an operator")


def test_every_key_that_can_be_changed_is_a_key_of_the_configuration():
    config = Config()
    for key in (*KEYS, *OF_REPLICAS):
        section, name = key.split(".")
        assert hasattr(getattr(config, section), name), key


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("set buffer.max_group=3", "did you mean buffer.max_groups?"),
        ("set trainer.lr=1", "trainer.lr cannot be changed while a run goes on"),
        ("set buffer.max_groups=many", "buffer.max_groups = 'many': expected `int`, got `str`"),
        ("set buffer.max_groups=1", "a batch of batch_groups = 2 would never fill"),
        ("set repack.policy=some", "repack.policy = 'some'"),
        ("set repack", "is no KEY=VALUE"),
        ("set buffer.max_groups=9 buffer.max_groups=8", "buffer.max_groups is given twice"),
        ("set repack.enabled=true", "write repack.interval_s=5"),
        ("set buffer.max_groups=9 r0", "can be set of one replica"),
        ("set rollout.max_concurrent=4 buffer.max_groups=9", "are two commands"),
        ("set rollout.max_concurrent=900 r0", "was started for 64 at once"),
        ("set rollout.max_concurrent=x", "a whole number is expected"),
        ("set rollout.flush_interval_s=900", "at most 60 s"),
        ("drain r0", "it is the last replica that admits groups"),
        ("stop after", "write `stop`, `stop after 12` or `stop never`"),
        ("stop after 9", "the run ends with step 3 anyway"),
        ("stop never", "the run was not to stop"),
        ("checkpoint", "there is nothing to save"),
    ],
)
def test_a_change_that_cannot_be_is_refused_before_it_is_an_event(line, error):
    desk = Desk(1)
    before = desk.seq
    assert error in desk.error(line)
    assert desk.seq == before


def test_replicas_are_changed_one_by_one_or_all():
    desk = Desk(2)
    desk.ask("set rollout.max_concurrent=8 r1")
    assert [replica.num_requests_max for replica in desk.core.state.replicas.values()] == [64, 8]
    desk.ask("set rollout.flush_interval_s=1")
    assert {action.flush_interval_s for action in desk.all(actions.ReconfigureReplica)} == {1.0}
    assert desk.ask("settings flush").tables[-1].rows == [["rollout-1", None, 8], ["every replica", 1.0, None]]


def test_a_drain_a_checkpoint_and_an_end_are_events_of_the_core():
    desk = Desk(2)
    desk.ask("drain r1")
    assert desk.core.state.replicas[WorkerId("rollout-1")].draining
    desk.fill("rollout-0")
    assert "after step 1, which is running" in desk.ask("checkpoint").lines[0]
    desk.ask("stop after 2")
    assert desk.core.state.stop_after == 2
    desk.step_done()
    assert [action.step for action in desk.all(actions.SaveCheckpoint)] == [1]
    desk.ask("stop")
    assert desk.core.state.stopping == "stopped by an operator"
