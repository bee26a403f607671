"""The simulated engine against one that makes every step, and its rules one by one."""

import math
from collections.abc import Callable
from random import Random

import pytest

from laminar.ids import GroupId, TrajectoryId, Version
from laminar.roofline import HARDWARE
from laminar.sim.cluster import MODELS, Cluster
from laminar.sim.replica import KV_LOW, Replica
from laminar.sim.request import Request
from laminar.sim.workload import Draw, Pause

CLUSTER = Cluster(hardware=HARDWARE["H800"], model=MODELS["32B"], train_gpus=4, rollout_gpus=4, num_requests_max=6)
PROMPT = 10


def request(
    number: int, tokens: int, *, attempt: int = 1, done: int = 0, pauses: tuple[Pause, ...] = (), at: float = 0.0
):
    return Request(
        trajectory=TrajectoryId(number),
        attempt=attempt,
        group=GroupId(number),
        version=Version(0, 0),
        draw=Draw(tokens, pauses),
        num_prompt_tokens=PROMPT,
        num_tokens=done,
        submitted_at=at,
        prefill_tokens=PROMPT + done,
    )


def drive(
    replica: Replica,
    plan: list[tuple[float, str, Request]],
    capacity: int = 0,
    wakes: Callable[[Replica], float] = lambda replica: replica.wake_at,
) -> dict[int, tuple[str, float, int]]:
    """Submit, abort and look as planned, and make the turns at `wakes`; how each request ended: (how, when, tokens)."""
    replica.capacity = capacity or replica.capacity
    ended, plan = {}, sorted(plan, key=lambda row: row[0])
    for _ in range(100_000):
        now = min(plan[0][0] if plan else math.inf, wakes(replica))
        if now == math.inf:
            return ended
        while plan and plan[0][0] <= now:
            _, what, subject = plan.pop(0)
            if what == "submit":
                replica.submit(now, subject)
            elif what == "look":
                replica.advance(now)
            else:
                replica.abort(now, subject.trajectory, subject.attempt)
        outcome = replica.turn(now)
        ended |= {r.trajectory: ("finished", now, r.num_tokens) for r in outcome.finished}
        ended |= {r.trajectory: ("aborted", now, r.num_tokens) for r in outcome.aborted}
        check(replica)
    raise AssertionError("the replica never comes to rest")


def replica_end(replica: Replica, now: float) -> float:
    return now


def check(replica: Replica) -> None:
    resident = [r for r in replica.requests.values() if r.began_step >= 0 or r.paused]
    assert replica.kv_tokens == sum(r.num_prompt_tokens + replica.length(r) for r in resident)
    assert replica.num_running == sum(r.began_step >= 0 for r in resident)
    assert len(resident) <= replica.cluster.num_requests_max


def kv_of(running: list[dict], paused: list[tuple[float, dict]]) -> int:
    return sum(PROMPT + e["tokens"] for e in running + [e for _, e in paused])


def step_by_step(plan: list[tuple[float, str, Request]], capacity: int) -> dict[int, tuple[str, float, int]]:
    """The same engine with a loop over single steps and no bookkeeping worth the name."""
    model, now = CLUSTER.decode_model, 0.0
    plan = sorted(plan, key=lambda row: row[0])
    running, waiting, paused, ended = [], [], [], {}
    while plan or running or waiting or paused:
        if not running and not waiting:
            now = max(now, min([row[0] for row in plan] + [row[0] for row in paused]))
        for entry in list(running):  # the last token, or the last before a tool call, has come
            if entry["pauses"] and entry["pauses"][0].at <= entry["tokens"]:
                running.remove(entry)
                paused.append((now + entry["pauses"][0].latency_s, entry))
            elif entry["tokens"] >= entry["total"]:
                running.remove(entry)
                ended[entry["id"]] = ("finished", now, entry["tokens"])
        arrived = [row for row in plan if row[0] <= now]
        plan = [row for row in plan if row[0] > now]
        for _, _, subject in [row for row in arrived if row[1] == "submit"]:
            waiting.append(
                {"id": subject.trajectory, "tokens": subject.num_tokens, "total": subject.draw.num_tokens,
                 "pauses": list(subject.draw.pauses), "prefill": subject.prefill_tokens}
            )  # fmt: skip
        for _, _, subject in [row for row in arrived if row[1] == "abort"]:
            here = [e for e in running + waiting + [e for _, e in paused] if e["id"] == subject.trajectory]
            if here:
                ended[subject.trajectory] = ("aborted", now, here[0]["tokens"])
                running = [e for e in running if e not in here]
                waiting = [e for e in waiting if e not in here]
                paused = [p for p in paused if p[1] not in here]
        added = 0
        for moment, entry in sorted(paused, key=lambda row: row[0]):
            if moment <= now:
                paused.remove((moment, entry))
                entry["tokens"] += entry["pauses"][0].num_tokens
                added += entry["pauses"].pop(0).num_tokens
                running.append(entry)
        while waiting and len(running) + len(paused) < CLUSTER.num_requests_max:
            size = PROMPT + waiting[0]["tokens"]
            if kv_of(running, paused) + size > KV_LOW * capacity and running + paused:
                break
            added += waiting[0]["prefill"]
            running.append(waiting.pop(0))
        now += CLUSTER.prefill_s(added)
        if added or any(e["pauses"] and e["pauses"][0].at <= e["tokens"] for e in running):
            continue  # whatever came during the prefill is looked at before the next step
        if running:
            now += model.step_s(len(running), kv_of(running, paused))
            for entry in running:
                entry["tokens"] += 1
    return ended


def random_plan(seed: int, tools: bool) -> list[tuple[float, str, Request]]:
    random, plan = Random(seed), []
    for number in range(1, 25):
        total = random.randint(1, 120)
        at = random.random() * 12.0
        pauses = ()
        if tools and total > 40:
            pauses = (
                Pause(at=10, latency_s=random.random() * 2, num_tokens=5),
                Pause(at=30, latency_s=0.5, num_tokens=7),
            )
        made = request(number, total, at=at, pauses=pauses)
        plan.append((at, "submit", made))
        if random.random() < 0.2:
            plan.append((at + random.random() * 3.0, "abort", made))
    return plan


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_random_load_ends_as_in_a_loop_over_single_steps(seed, tools):
    expected = step_by_step(random_plan(seed, tools), 10**6)
    found = drive(Replica(CLUSTER), random_plan(seed, tools), capacity=10**6)
    assert {k: (v[0], v[2]) for k, v in found.items()} == {k: (v[0], v[2]) for k, v in expected.items()}
    for number, (_, when, _) in expected.items():
        assert found[number][1] == pytest.approx(when, abs=1e-6), f"request {number}"


@pytest.mark.parametrize("capacity", [350, 10**6])
@pytest.mark.parametrize("seed", range(12))
def test_an_engine_that_is_woken_only_when_something_may_end_does_the_same_to_the_last_bit(seed, capacity):
    looks = [(0.7 * number, "look", request(0, 1)) for number in range(30)]
    often, seldom = Replica(CLUSTER), Replica(CLUSTER)
    expected = drive(often, random_plan(seed, tools=True) + looks, capacity)
    found = drive(seldom, random_plan(seed, tools=True) + looks, capacity, Replica.quiet_until)
    assert found == expected
    assert (seldom.boundary, seldom.steps) == (often.boundary, often.steps)
    assert (seldom.num_preemptions, seldom.num_prefilled) == (often.num_preemptions, often.num_prefilled)


def test_an_engine_is_not_woken_for_each_tool_call_of_a_long_request():
    pauses = tuple(Pause(at=1000 * number, latency_s=2.0, num_tokens=5) for number in range(1, 10))
    replica, num_woken = Replica(CLUSTER), 0
    replica.submit(0.0, request(1, 10_000, pauses=pauses))
    while replica.requests:
        replica.turn(replica.quiet_until())
        num_woken += 1
    assert num_woken < len(pauses)


def test_a_full_cache_preempts_the_youngest_and_loses_no_token():
    replica = Replica(CLUSTER)
    plan = [(0.1 * n, "submit", request(n, 400)) for n in range(1, 6)]
    found = drive(replica, plan, capacity=1200)
    assert replica.num_preemptions > 0
    assert {number: row[2] for number, row in found.items()} == dict.fromkeys(range(1, 6), 400)
    first_to_end = min(found, key=lambda number: found[number][1])
    assert first_to_end == 1
    assert replica.num_generated == 5 * 400
    assert replica.kv_tokens == 0


def test_without_room_for_two_requests_one_runs_alone():
    found = drive(Replica(CLUSTER), [(0.0, "submit", request(1, 500)), (0.0, "submit", request(2, 500))], capacity=300)
    assert sorted(found) == [1, 2]


def test_a_request_that_goes_on_elsewhere_pays_for_its_prefix_only():
    whole, half = Replica(CLUSTER), Replica(CLUSTER)
    full = drive(whole, [(0.0, "submit", request(1, 200))])
    rest = drive(half, [(0.0, "submit", request(1, 200, attempt=2, done=150))])
    assert half.num_generated == 50
    assert half.num_prefilled == PROMPT + 150
    assert rest[1][1] < full[1][1]


def test_an_abort_of_an_old_attempt_stops_nothing():
    replica = Replica(CLUSTER)
    old = request(1, 20, attempt=1)
    found = drive(replica, [(0.0, "submit", request(1, 20, attempt=2)), (0.01, "abort", old)])
    assert found[1][0] == "finished"


def test_a_paused_request_keeps_its_kv_and_does_not_grow():
    replica = Replica(CLUSTER)
    replica.submit(0.0, request(1, 60, pauses=(Pause(at=10, latency_s=100.0, num_tokens=20),)))
    while replica.num_running or replica.wake_at < 50:
        replica.turn(replica.wake_at)
    replica.advance(50.0)
    assert (replica.num_running, replica.kv_tokens) == (0, PROMPT + 10)
    assert replica.wake_at > 100.0


def test_prefill_holds_up_all_others():
    alone, beside = Replica(CLUSTER), Replica(CLUSTER)
    undisturbed = drive(alone, [(0.0, "submit", request(1, 100))])
    long = request(2, 16_001, done=16_000)
    disturbed = drive(beside, [(0.0, "submit", request(1, 100)), (1.0, "submit", long)])
    delay = disturbed[1][1] - undisturbed[1][1]
    assert delay >= CLUSTER.prefill_s(16_000)
