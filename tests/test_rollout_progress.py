"""What a replica's reports say: facts in, reports out."""

import pytest

from laminar import wire
from laminar.ids import GroupId, PromptId, TrajectoryId, Version
from laminar.workers.engines.base import Output, Usage
from laminar.workers.rollout.progress import Attempt, Interval, Progress

PROMPT = wire.Prompt(prompt=PromptId(0), text="q")
IDLE = Usage(num_running=0, num_waiting=0, kv_tokens=0, busy_s=0.0)
INTERVAL = Interval(decode_busy_s=0.1, interval_s=0.25, since=5.0)


def attempt(trajectory: int, prefix: list[int] | None = None, number: int = 1) -> Attempt:
    tokens = list(prefix or [])
    return Attempt(
        trajectory=TrajectoryId(trajectory),
        attempt=number,
        prompt=PROMPT,
        num_prompt_tokens=3,
        tokens=tokens,
        num_reported=len(tokens),
    )


def output(key: int, tokens: list[int], finish_reason: str | None = None) -> Output:
    return Output(key=key, tokens=tokens, logprobs=[-float(token) for token in tokens], finish_reason=finish_reason)


def report(progress: Progress) -> wire.RolloutReport:
    return progress.report(Version(1, 0), IDLE, INTERVAL)


def rows(report: wire.RolloutReport) -> list[tuple[int, int, int]]:
    """(trajectory, num_tokens, num_new)"""
    arrays = (wire.unpack_i64(report.trajectories), wire.unpack_i32(report.num_tokens), wire.unpack_i32(report.num_new))
    return list(zip(*arrays, strict=True))


@pytest.fixture
def progress() -> Progress:
    """Attempts 11 and 12 generate under the keys 1 and 2; 12 has a prefix of two tokens."""
    progress = Progress()
    progress.submitted(1, attempt(11))
    progress.submitted(2, attempt(12, prefix=[7, 8]))
    return progress


def test_every_report_lists_all_that_generates_and_only_the_new_tokens(progress: Progress) -> None:
    progress.generated(output(1, [1, 2]))
    first = report(progress)
    assert rows(first) == [(11, 2, 2), (12, 2, 0)]
    assert wire.unpack_i32(first.tokens) == [1, 2]
    assert wire.unpack_f32(first.logprobs) == [-1.0, -2.0]
    progress.generated(output(1, [3]))
    progress.generated(output(2, [4, 5]))
    second = report(progress)
    assert rows(second) == [(11, 3, 1), (12, 4, 2)]
    assert wire.unpack_i32(second.tokens) == [3, 4, 5]
    assert wire.unpack_f32(second.logprobs) == [-3.0, -4.0, -5.0]


def test_a_finished_attempt_is_listed_once_with_its_last_tokens(progress: Progress) -> None:
    due = progress.generated(output(2, [4], "stop"))
    assert due is not None
    assert due.tokens == [7, 8, 4]
    last = report(progress)
    assert rows(last) == [(12, 3, 1), (11, 0, 0)]
    assert [(each.trajectory, each.finish_reason, each.num_tokens) for each in last.finished] == [(12, "stop", 3)]
    after = report(progress)
    assert rows(after) == [(11, 0, 0)]
    assert after.finished == []


def test_a_reward_is_reported_once_after_its_finish(progress: Progress) -> None:
    due = progress.generated(output(1, [4], "length"))
    assert due is not None
    report(progress)
    progress.rewarded(due, 0.5, {"format": 1.0}, 0.2)
    progress.rewarded(due, 0.5, {"format": 1.0}, 0.2)
    (reward,) = report(progress).rewarded
    assert (reward.trajectory, reward.attempt, reward.reward, reward.parts) == (11, 1, 0.5, {"format": 1.0})
    assert report(progress).rewarded == []


def test_a_failed_reward_is_a_failed_attempt(progress: Progress) -> None:
    due = progress.generated(output(1, [4], "length"))
    assert due is not None
    progress.unrewarded(due, "data", "reward_nan", "returned nan")
    (failure,) = report(progress).failed
    assert (failure.trajectory, failure.kind, failure.reason) == (11, "data", "reward_nan")


@pytest.mark.parametrize("reason", ["error: out of memory", "abort"])
def test_an_engine_that_ends_a_request_by_itself_is_an_infrastructure_failure(progress: Progress, reason: str) -> None:
    assert progress.generated(output(1, [4], reason)) is None
    last = report(progress)
    assert rows(last) == [(11, 1, 1), (12, 2, 0)]
    (failure,) = last.failed
    assert (failure.trajectory, failure.kind, failure.reason) == (11, "infra", "engine_error")
    assert failure.detail == reason.removeprefix("error: ")


def test_an_attempt_that_finished_before_it_could_be_stopped_is_finished(progress: Progress) -> None:
    progress.abort(TrajectoryId(11), 1)
    assert progress.generated(output(1, [4], "stop")) is not None
    last = report(progress)
    assert [(f.trajectory, f.finish_reason) for f in last.finished] == [(11, "stop")]
    assert last.aborted == []


def test_an_aborted_attempt_flushes_its_tokens_says_that_it_ended_and_is_silent_then(progress: Progress) -> None:
    assert progress.abort(TrajectoryId(11), 1) == 1
    assert progress.num_unaborted == 1
    assert progress.generated(output(1, [4], "abort")) is None
    last = report(progress)
    assert rows(last) == [(11, 1, 1), (12, 2, 0)]
    assert (last.finished, last.failed) == ([], [])
    assert [(a.trajectory, a.attempt) for a in last.aborted] == [(11, 1)]
    following = report(progress)
    assert rows(following) == [(12, 2, 0)]
    assert following.aborted == []


def test_an_aborted_attempt_without_new_tokens_is_not_listed_again(progress: Progress) -> None:
    progress.abort(TrajectoryId(11), 1)
    progress.generated(output(1, [], "abort"))
    assert rows(report(progress)) == [(12, 2, 0)]


def test_an_abort_that_comes_after_the_finish_does_not_cost_the_reward(progress: Progress) -> None:
    due = progress.generated(output(1, [4], "stop"))
    assert due is not None
    assert progress.abort(TrajectoryId(11), 1) is None
    progress.rewarded(due, 1.0, {}, 0.1)
    last = report(progress)
    assert [r.trajectory for r in last.finished] == [r.trajectory for r in last.rewarded] == [11]


def test_an_abort_of_another_attempt_changes_nothing(progress: Progress) -> None:
    assert progress.abort(TrajectoryId(11), 2) is None
    assert progress.num_unaborted == 2


def test_an_attempt_with_nothing_to_generate_is_finished_but_not_listed() -> None:
    progress = Progress()
    progress.completed(attempt(11, prefix=[1, 2]), "length")
    progress.completed(attempt(12, prefix=[1, 2]), None)
    only = report(progress)
    assert rows(only) == []
    assert [(each.trajectory, each.num_tokens) for each in only.finished] == [(11, 2)]


def test_prompt_tokens_travel_once(progress: Progress) -> None:
    progress.assigned(GroupId(5), [1, 2, 3])
    (prompt,) = report(progress).prompts
    assert (prompt.group, wire.unpack_i32(prompt.tokens)) == (5, [1, 2, 3])
    assert report(progress).prompts == []


def test_an_idle_replica_says_so_once_and_is_silent_then() -> None:
    progress = Progress()
    assert not progress.has_report
    progress.submitted(1, attempt(11))
    assert progress.has_report
    assert not progress.has_news
    report(progress)
    progress.abort(TrajectoryId(11), 1)
    progress.generated(output(1, [], "abort"))
    assert progress.has_report
    report(progress)
    assert not progress.has_report


def test_requests_of_others_are_ignored(progress: Progress) -> None:
    assert progress.generated(output(99, [1], "stop")) is None
    assert not progress.has_news


def test_a_report_carries_version_load_and_interval(progress: Progress) -> None:
    usage = Usage(num_running=2, num_waiting=1, kv_tokens=30, busy_s=9.0)
    only = progress.report(Version(4, 1), usage, INTERVAL)
    assert (only.version, only.num_running, only.num_waiting, only.kv_tokens) == (Version(4, 1), 2, 1, 30)
    assert (only.decode_busy_s, only.interval_s, only.since) == (0.1, 0.25, 5.0)


# ---- agents ------------------------------------------------------------------------------------------------


def test_an_agents_attempt_reports_its_prompt_when_it_has_one_and_the_source_of_every_token(progress: Progress) -> None:
    progress.began(1, GroupId(5), [9, 9, 9, 9])
    progress.generated(output(2, [3]))
    progress.grew(1, [1, 2], [-1.0, -1.0], bytes([0, 0]))
    progress.grew(1, [4], [0.0], bytes([1]))
    first = report(progress)
    (prompt,) = first.prompts
    assert (prompt.group, prompt.trajectory, prompt.attempt, wire.unpack_i32(prompt.tokens)) == (5, 11, 1, [9] * 4)
    assert (wire.unpack_i32(first.tokens), first.sources) == ([1, 2, 4, 3], bytes([0, 0, 1, 0]))
    progress.generated(output(2, [3]))
    assert report(progress).sources == b"", "all are the model's"
    due = progress.generated(output(1, [], "env"))
    last = report(progress)
    assert due is not None
    assert [(each.finish_reason, each.num_prompt_tokens, each.num_tokens) for each in last.finished] == [("env", 4, 3)]


def test_an_attempt_that_gave_up_is_reported_with_its_last_tokens_and_not_again(progress: Progress) -> None:
    progress.grew(1, [1], [-1.0], bytes([0]))
    progress.gave_up(1, "data", "agent_failed", "why")
    first = report(progress)
    assert rows(first) == [(11, 1, 1), (12, 2, 0)]
    assert [(each.trajectory, each.kind, each.reason) for each in first.failed] == [(11, "data", "agent_failed")]
    assert rows(report(progress)) == [(12, 2, 0)]
