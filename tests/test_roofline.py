"""B from the roofline: the formula, the names of GPUs, and the way of the number from the worker to the planner."""

import msgspec
import pytest
from core_world import Driver, settings

from laminar import wire
from laminar.controller.translate import Origin
from laminar.core import events, moves
from laminar.core.story import Story
from laminar.core.turn import Turn
from laminar.ids import WorkerId
from laminar.roofline import HARDWARE, known, requests_memory_bound
from laminar.sim.scenario import Scenario
from laminar.sim.workload import WORKLOADS


@pytest.mark.parametrize(("name", "expected"), [("H800", 221), ("H100", 221), ("H200", 154), ("A100", 114)])
def test_b_is_what_the_data_sheet_gives_by_hand(name: str, expected: int) -> None:
    """989e12 * 0.6 / (3.35e12 * 0.8) = 221.4; 989 / 4.8 * 0.75 = 154.5; 312 / 2.039 * 0.75 = 114.8."""
    assert requests_memory_bound(HARDWARE[name]) == expected


def test_one_request_more_than_b_takes_longer_than_reading_the_weights() -> None:
    gpu, num_parameters = HARDWARE["H800"], 32.8e9
    reading_s = 2.0 * num_parameters / (gpu.hbm_bandwidth * 0.8)
    b = requests_memory_bound(gpu)
    computing_s = [2.0 * num_parameters * n / (gpu.peak_flops * 0.6) for n in (b, b + 1)]
    assert computing_s[0] <= reading_s < computing_s[1]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_only_the_boards_of_the_table_are_known(device: str, name: str | None) -> None:
    assert known(device) == (HARDWARE[name] if name else None)


def joined(reported: int) -> events.ReplicaJoined:
    """What the core hears of a worker that reports B = `reported` over the wire."""
    ready = wire.RolloutReady(
        num_requests_max=64, kv_tokens_max=1000, context_tokens_max=100, num_requests_memory_bound=reported
    )
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=wire.RolloutReady)
    event = Origin(WorkerId("r0"), 1, "h").to_event(received)
    assert isinstance(event, events.ReplicaJoined)
    return event


@pytest.mark.parametrize(
    ("configured", "reported", "expected", "by"),
    [
        (10, 30, 10, "as configured"),
        (0, 30, 30, "by the roofline of its GPU"),
        (0, 0, 64, "as many as it decodes at once"),
        (0, 221, 64, "as many as it decodes at once"),
    ],
)
def test_b_is_as_configured_else_as_reported_else_as_many_as_decode_at_once(
    configured: int, reported: int, expected: int, by: str
) -> None:
    driver = Driver(settings(repack_interval_s=5.0, repack_requests_max=configured))
    driver.start()
    driver.send(joined(reported))
    driver.refreshed("r0")
    replica = driver.core.state.replicas[WorkerId("r0")]
    load = moves.load(Turn(driver.core.state, driver.core.settings, Story()), replica)
    assert (load.requests_max, load.requests_max_by) == (expected, by)


def test_the_simulators_replicas_report_the_same_b() -> None:
    world = Scenario(model="32B", gpus=8, split=(4, 4), workload=WORKLOADS["math"]).world()
    world.begin()
    (replica,) = world.core.state.replicas.values()
    assert replica.num_requests_memory_bound == requests_memory_bound(HARDWARE["H800"])
    assert world.core.settings.repack_requests_max == 0
